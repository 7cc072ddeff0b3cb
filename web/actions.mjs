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
/** In that of one that samples it: the run. */
const SAMPLES = 'flux_fft_samples'

export function isBusy(name) {
  const run = runs.get(name)
  return MOVING.includes(run?.status?.state) || run?.held === true
}

/** Queue the graph that trained the run last. */
export function resume(name) {
  return attempt(name, 'resume', TEXT.queued, () => inTurn(() => goOnAfter(name)))
}

/** Pause or stop it, for good: what would have it go on, or after a stop load it for a picture, is taken out. */
export async function halt(name, action) {
  runs.wish(name, action)
  await inTurn(async () => {
    await withdraw(name, action === 'stop' ? [RESUMES, SAMPLES] : [RESUMES])
    const { running } = await queue()
    const id = trainingOf(name, running) // it may be about to train it, and would not hear a pause
    const ids = [id, ...(action === 'stop' ? running.filter((one) => isFor(one, SAMPLES, name)).map(idOf) : [])]
    for (const one of ids.filter(Boolean)) await end(one)
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
    if ((await queue()).pending.every((one) => isFor(one, RESUMES, name))) return TEXT.letThroughNone
    await withdraw(name) // one that waits to go on stands before them
    await makeWay(name, (await queueStored(name)).prompt_id)
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
  }, { [SAMPLES]: name })
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
async function attemptAside(name, action, told, make, extra = {}) {
  let ended = null
  await attempt(name, action, told, async () => {
    const prompt = await make()
    ended = prompts.ended(await inTurn(() => aside(name, prompt, extra)))
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
async function aside(name, prompt, extra) {
  const busy = isBusy(name) || trainingOf(name, (await queue()).running) !== ''
  // What is queued to the front last runs first.
  if (busy) await goOnAfter(name, { front: true })
  const { prompt_id: id, number } = await enqueue(renamed(prompt, 'flux_fft_'), null, { front: true }, extra)
  if (busy) await makeWay(name, '', { number: number + 0.5 })
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
async function goOnAfter(name, place = {}) {
  if (!(await queue()).pending.some((one) => isFor(one, RESUMES, name))) await queueStored(name, place)
}

/**
 * End what trains the run, unless that is the prompt `but`. What was queued to go on may have begun meanwhile, and
 * be what is ended: then another one is queued at `place`. For that one look tells what runs and what waits.
 */
async function makeWay(name, but = '', place = {}) {
  const { running, pending } = await queue()
  const id = trainingOf(name, running)
  if (id && id === but) return
  if (!pending.some((one) => isFor(one, RESUMES, name))) await queueStored(name, place)
  if (id) await end(id)
  else if (isBusy(name)) await runs.post(name, 'pause', { elsewhere: true })
}

/** The queue's entries, {pending, running}: each [number, id, prompt, extra data, ...]. */
async function queue() {
  const answer = await api.fetchApi('/queue').catch(() => null)
  const said = await answer?.json().catch(() => null)
  if (!answer?.ok || !said) throw new Error(TEXT.notReached)
  return { pending: said.queue_pending ?? [], running: said.queue_running ?? [] }
}

/** The id of the prompt of those `running` that trains the run, or is about to; one at its target does not. */
function trainingOf(name, running) {
  if (runs.get(name)?.status?.state === 'finished') return ''
  const trains = ([, , prompt]) => Object.values(prompt).some(
    (node) => node.class_type === TRAIN_STEPS && runOf(node, prompt) === name)
  return running.find((one) => isFor(one, RESUMES, name) || trains(one))?.[1] ?? ''
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

/** As Cancel does, but heard by a prompt that has only just begun, too. */
async function end(id) {
  await post(`/flux_fft/prompts/${encodeURIComponent(id)}/end`, {})
}

/** Whether an entry of the queue was queued here to do that to the run. */
function isFor([, , , extra], what, name) {
  return extra?.[what] === name
}

function idOf([, id]) {
  return id
}

async function withdraw(name, what = [RESUMES]) {
  const ids = (await queue()).pending.filter((one) => what.some((key) => isFor(one, key, name))).map(idOf)
  if (ids.length) await post('/queue', { delete: ids })
  for (const id of ids) prompts.takenOut(id)
}

/** `place`: {front: true} or {number} of where in the queue, which ends with it otherwise. Resolves as `enqueue` does. */
async function queueStored(name, place = {}) {
  const { prompt, workflow } = await runs.fetch(name, 'graph')
  // Under other ids where another workflow is open: the canvas would show what they say on its nodes of the same ids.
  const open = workflow?.id && workflow.id === openWorkflowId()
  return enqueue(open ? prompt : renamed(prompt, 'resumed_'), workflow, place, { [RESUMES]: name })
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

/** Resolves to {prompt_id, number}. */
async function enqueue(prompt, workflow, place = {}, extra = {}) {
  const answer = await post('/prompt', {
    client_id: api.clientId ?? api.initialClientId, prompt, ...place,
    extra_data: { extra_pnginfo: workflow ? { workflow } : {}, ...extra },
  })
  const said = await answer?.json().catch(() => null)
  if (answer?.ok && said) return said
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
