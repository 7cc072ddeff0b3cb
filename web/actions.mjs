// What can be done with a run, by the panel and the sidebar alike. Whatever needs the executor is a prompt of its own:
// while the run trains, the graph that trains it is queued to go on after that prompt, and the run pauses for it.

import { api } from '../../scripts/api.js'

import { figure } from './format.mjs'
import { openWorkflowId, TRAIN_STEPS } from './graph.mjs'
import { prompts } from './prompts.mjs'
import { runs } from './store.mjs'
import { TEXT } from './strings.mjs'

const MOVING = ['preparing', 'training']
/** In the extra data of a prompt that has a run go on: the run. */
const RESUMES = 'flux_fft_resumes'

export function isBusy(name) {
  const run = runs.get(name)
  return MOVING.includes(run?.status?.state) || run?.held === true
}

/** Queue the graph that trained the run last. */
export function resume(name) {
  return attempt(name, 'resume', TEXT.queued, () => inTurn(() => goOnAfter(name)))
}

/** Pause or stop it, for good: what waits in the queue to have it go on is taken out. */
export async function halt(name, action) {
  runs.wish(name, action)
  await inTurn(async () => {
    await withdraw(name)
    if (!MOVING.includes(runs.get(name)?.status?.state)) await endItsPrompt(name) // one that is about to train it
  }).catch(() => {}) // where ComfyUI is away, the next question says so
  return runs.ask(name, action)
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
  return attempt(name, 'through', TEXT.letThroughAsked, () => inTurn(async () => {
    if (!(await queued('pending')).some((one) => !resumes(one, name))) return TEXT.letThroughNone
    await withdraw(name) // one that waits to go on stands before them
    await queueStored(name)
    await makeWay(name)
    return ''
  }))
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
    const prompt = await make()
    ended = prompts.ended(await inTurn(() => aside(name, prompt)))
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
  const busy = isBusy(name) || (await trainingOf(name)) !== ''
  // What is queued to the front last runs first.
  if (busy) await goOnAfter(name, true)
  const id = await queue(renamed(prompt, 'flux_fft_'), null, true)
  if (busy) await makeWay(name)
  return id
}

let last = Promise.resolve()

/** One after the other: each looks at the queue, and then changes it. */
function inTurn(work) {
  const done = last.then(work)
  last = done.catch(() => {})
  return done
}

/** Have the run go on after what waits before it: once, however often that is asked. */
async function goOnAfter(name, front = false) {
  if (!(await queued('pending')).some((one) => resumes(one, name))) await queueStored(name, front)
}

/** The queue's entries that are "pending" or "running": [number, id, prompt, extra data, ...]. */
async function queued(which) {
  const answer = await api.fetchApi('/queue').catch(() => null)
  const queue = await answer?.json().catch(() => null)
  if (!answer?.ok || !queue) throw new Error(TEXT.notReached)
  return queue[`queue_${which}`] ?? []
}

/** The id of the prompt that runs, if it is one that trains the run, or is about to; one at its target does not. */
async function trainingOf(name) {
  if (runs.get(name)?.status?.state === 'finished') return ''
  const trains = ([, , prompt]) => Object.values(prompt).some(
    (node) => node.class_type === TRAIN_STEPS && runOf(node, prompt) === name)
  return (await queued('running')).find((one) => resumes(one, name) || trains(one))?.[1] ?? ''
}

/** The name of a node's run, along the `run` inputs up to the node that names it. Empty if unclear. */
function runOf(node, prompt) {
  for (let hops = 0; node && hops < 50; hops++) {
    const { run_name: named, run } = node.inputs
    if (typeof named === 'string') return named
    node = Array.isArray(run) ? prompt[run[0]] : null
  }
  return ''
}

/** As Cancel does: a run that is about to train does not know of it yet, and would not hear a pause. */
async function endItsPrompt(name) {
  const id = await trainingOf(name)
  if (id) await post('/interrupt', { prompt_id: id })
  return id !== ''
}

async function makeWay(name) {
  if (!(await endItsPrompt(name))) await runs.post(name, 'pause')
}

function resumes([, , , extra], name) {
  return extra?.[RESUMES] === name
}

async function withdraw(name) {
  const ids = (await queued('pending')).filter((one) => resumes(one, name)).map(([, id]) => id)
  if (ids.length) await post('/queue', { delete: ids })
}

async function queueStored(name, front = false) {
  const { prompt, workflow } = await runs.fetch(name, 'graph')
  // Under other ids where another workflow is open: the canvas would show what they say on its nodes of the same ids.
  const open = workflow?.id && workflow.id === openWorkflowId()
  await queue(open ? prompt : renamed(prompt, 'resumed_'), workflow, front, { [RESUMES]: name })
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
async function queue(prompt, workflow, front = false, extra = {}) {
  const answer = await post('/prompt', {
    client_id: api.clientId ?? api.initialClientId, prompt, ...(front ? { front: true } : {}),
    extra_data: { extra_pnginfo: workflow ? { workflow } : {}, ...extra },
  })
  const said = await answer?.json().catch(() => null)
  if (answer?.ok && said) return said.prompt_id
  throw new Error(said ? reason(said) : TEXT.notReached)
}

/** Resolves to null where ComfyUI is away. */
function post(path, body) {
  return api.fetchApi(path, {
    method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(body),
  }).catch(() => null)
}

/** One line of what /prompt answers to a prompt that it does not take. */
function reason(said) {
  const [node] = Object.values(said.node_errors ?? {})
  const [error] = node?.errors ?? []
  const about = error ? `${node.class_type}: ${error.message} ${error.details ?? ''}` : said.error?.message
  return TEXT.about(TEXT.refused, about ?? '')
}
