// What can be done with a run, by the panel and the sidebar alike. Whatever needs the executor is a prompt of its own:
// while the run trains, the graph that trains it is queued to go on after that prompt, and the run pauses for it.

import { api } from '../../scripts/api.js'

import { figure } from './format.mjs'
import { openWorkflowId } from './graph.mjs'
import { prompts } from './prompts.mjs'
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

/** Make a picture of the weights as they are, of a prompt in one line. Resolves as `attemptAside` does. */
export function sampleNow(name, prompt) {
  return attemptAside(name, 'sample', TEXT.sampleAsked, async () => {
    const { previews } = await runs.fetch(name, 'details')
    return {
      run: { class_type: 'FluxFFTOpenRun', inputs: { run_name: name } },
      previews: { class_type: 'FluxFFTPreviewSettings', inputs: { ...previews, prompts: prompt, every_n_steps: 0 } },
      picture: { class_type: 'FluxFFTPreview', inputs: { run: ['run', 0], previews: ['previews', 0] } },
    }
  })
}

/** Write a checkpoint: `inputs` of an Export node. */
export function exportRun(name, inputs) {
  return attemptAside(name, 'export', TEXT.tab.exportAsked, () => ({
    run: { class_type: 'FluxFFTOpenRun', inputs: { run_name: name } },
    file: { class_type: 'FluxFFTExport', inputs: { ...inputs, run: ['run', 0] } },
  }))
}

/**
 * Do it by the small prompt that `make` gives. That it is queued is told until it has ended. Resolves to {ended}, a
 * promise of whether it came to its end well; null: it was not queued.
 */
async function attemptAside(name, action, told, make) {
  let ended = null
  await attempt(name, action, told, async () => {
    ended = prompts.ended(await aside(name, await make()))
    runs.tell(name, told, null, ended)
  })
  return ended && { ended: ended.then(() => true, () => false) }
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

/** Run a small prompt at once: a run in training is queued to go on after it, and pauses. Resolves to its id. */
async function aside(name, prompt) {
  const busy = isBusy(name)
  // What is queued to the front last runs first.
  if (busy) await queueStored(name, true)
  const id = await queue(renamed(prompt, 'flux_fft_'), null, true)
  if (busy) await runs.post(name, 'pause')
  return id
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

/** Resolves to the prompt's id. */
async function queue(prompt, workflow, front = false) {
  const answer = await api.fetchApi('/prompt', {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify({
      client_id: api.clientId ?? api.initialClientId, prompt, ...(front ? { front: true } : {}),
      extra_data: { extra_pnginfo: workflow ? { workflow } : {} },
    }),
  }).catch(() => null)
  const said = await answer?.json().catch(() => null)
  if (answer?.ok && said) return said.prompt_id
  throw new Error(said ? reason(said) : TEXT.notReached)
}

/** One line of what /prompt answers to a prompt that it does not take. */
function reason(said) {
  const [node] = Object.values(said.node_errors ?? {})
  const [error] = node?.errors ?? []
  const about = error ? `${node.class_type}: ${error.message} ${error.details ?? ''}` : said.error?.message
  return TEXT.about(TEXT.refused, about ?? '')
}
