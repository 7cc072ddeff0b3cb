// What can be done with a run, by the panel and the sidebar alike. Whatever needs the executor is a prompt of its own:
// while the run trains, the graph that trains it is queued to go on after that prompt, and the run pauses for it.

import { api } from '../../scripts/api.js'

import { figure } from './format.mjs'
import { openWorkflowId } from './graph.mjs'
import { runs } from './store.mjs'
import { TEXT } from './strings.mjs'

const MOVING = ['preparing', 'training']

export function isBusy(name) {
  const run = runs.get(name)
  return MOVING.includes(run?.status?.state) || run?.held === true
}

/** Queue the graph that trained the run last. */
export function resume(name) {
  return attempt(name, 'resume', TEXT.queued, () => queueStored(name))
}

export function save(name) {
  return attempt(name, 'save', TEXT.saving, async () => {
    const { done } = await runs.post(name, 'save')
    return TEXT.savedNow(done)
  })
}

export function setRate(name, rate) {
  return attempt(name, 'lr', '', async () => {
    await runs.post(name, 'lr', { lr: rate })
    return TEXT.lrAsked(figure(rate))
  })
}

/** Have the prompts that wait run first, then go on. */
export function letThrough(name) {
  return attempt(name, 'through', TEXT.letThroughAsked, async () => {
    const queue = await (await api.fetchApi('/queue')).json()
    if (!queue.queue_pending?.length) return TEXT.letThroughNone
    await queueStored(name)
    await runs.post(name, 'pause')
    return ''
  })
}

/** Make a picture of the weights as they are. */
export function sampleNow(name, prompt) {
  return attempt(name, 'sample', TEXT.sampleAsked, async () => {
    const { previews } = await runs.fetch(name, 'details')
    const text = prompt.split(/\s+/).join(' ')
    await aside(name, {
      run: { class_type: 'FluxFFTOpenRun', inputs: { run_name: name } },
      previews: { class_type: 'FluxFFTPreviewSettings', inputs: { ...previews, prompts: text, every_n_steps: 0 } },
      picture: { class_type: 'FluxFFTPreview', inputs: { run: ['run', 0], previews: ['previews', 0] } },
    })
    return TEXT.sampleAsked
  })
}

/** Write a checkpoint: `inputs` of an Export node. */
export function exportRun(name, inputs) {
  return attempt(name, 'export', TEXT.tab.exportAsked, async () => {
    await aside(name, {
      run: { class_type: 'FluxFFTOpenRun', inputs: { run_name: name } },
      file: { class_type: 'FluxFFTExport', inputs: { ...inputs, run: ['run', 0] } },
    })
    return TEXT.tab.exportAsked
  })
}

/** Do it, and say on the run what it is, and what came of it. Resolves to whether it was done. */
async function attempt(name, action, meanwhile, work) {
  runs.wish(name, action, meanwhile)
  try {
    const told = await work()
    if (told !== undefined) runs.tell(name, told)
    return true
  } catch (error) {
    runs.tell(name, '', error)
    return false
  }
}

/** Run a small prompt at once: a run in training is queued to go on after it, and pauses. */
async function aside(name, prompt) {
  const busy = isBusy(name)
  // What is queued to the front last runs first.
  if (busy) await queueStored(name, true)
  await queue(renamed(prompt, 'flux_fft_'), null, true)
  if (busy) await runs.post(name, 'pause')
}

async function queueStored(name, front = false) {
  const { prompt, workflow } = await runs.fetch(name, 'graph')
  // Under other ids where another workflow is open: the canvas would show what they say on its nodes of the same ids.
  const open = workflow?.id && workflow.id === openWorkflowId()
  await queue(open ? prompt : renamed(prompt, 'resumed_'), workflow, front)
}

function renamed(prompt, prefix) {
  const id = (key) => `${prefix}${String(key).replaceAll(':', '_')}`
  const isLink = (value) => Array.isArray(value) && value.length === 2 && String(value[0]) in prompt
  return Object.fromEntries(Object.entries(prompt).map(([key, node]) => [id(key), {
    ...node,
    inputs: Object.fromEntries(Object.entries(node.inputs).map(([input, value]) =>
      [input, isLink(value) ? [id(value[0]), value[1]] : value])),
  }]))
}

async function queue(prompt, workflow, front = false) {
  const answer = await api.fetchApi('/prompt', {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify({
      client_id: api.clientId ?? api.initialClientId, prompt, ...(front ? { front: true } : {}),
      extra_data: { extra_pnginfo: workflow ? { workflow } : {} },
    }),
  }).catch(() => null)
  if (answer?.ok) return
  const said = await answer?.json().catch(() => null)
  throw new Error(said ? reason(said) : TEXT.notReached)
}

/** One line of what /prompt answers to a prompt that it does not take. */
function reason(said) {
  const [node] = Object.values(said.node_errors ?? {})
  const [error] = node?.errors ?? []
  const about = error ? `${node.class_type}: ${error.message} ${error.details ?? ''}` : said.error?.message
  return `${TEXT.refused}: ${about ?? ''}`.trim()
}
