// What can be done with a run, by the panel and the sidebar alike. Whatever needs the executor is a prompt of its own:
// while the run trains, the graph that trains it is queued to go on after that prompt, and the run pauses for it.

import { api } from '../../scripts/api.js'

import { figure } from './format.mjs'
import { openWorkflowId, TRAIN_STEPS } from './graph.mjs'
import { prompts } from './prompts.mjs'
import { runs } from './store.mjs'
import { TEXT } from './strings.mjs'

const MOVING = ['preparing', 'training']
const OPEN_RUN = 'FluxFFTOpenRun'
/** Of Start: which run it will be is not known before it runs. */
const NEXT_NAME = 'use the next free name'
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
  return attempt(name, 'resume', TEXT.queued, () => inTurn(name, async () => {
    const { trains, ending } = await look(name)
    if (!trains || ending) await goOnAfter(name)
  }))
}

/** Pause or stop it, for good: what would have it go on, or after a stop load it for a picture, is taken out. */
export async function halt(name, action) {
  runs.wish(name, action)
  const kinds = action === 'stop' ? [RESUMES, SAMPLES] : [RESUMES]
  await inTurn(name, async () => {
    await withdraw(name, kinds)
    const { trains, running } = await look(name) // it may be about to train it, and would not hear a pause
    const samples = (one) => action === 'stop' && isFor(one, SAMPLES, name)
    for (const one of running.filter((one) => one === trains || samples(one))) await end(one)
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
  return attempt(name, 'through', TEXT.letThroughAsked, () => inTurn(name, async () => {
    const { trains, pending } = await look(name)
    if (pending.every((one) => isFor(one, RESUMES, name))) return TEXT.letThroughNone
    const id = idOf(await queueAgain(name, trains))
    await withdraw(name, [RESUMES], id) // one that waits to go on stands before them
    await makeWay(name, id)
    return ''
  }))
}

/** Make a picture of the weights as they are, of a prompt in one line. Resolves as `attemptAside` does. */
export function sampleNow(name, prompt) {
  return attemptAside(name, 'sample', TEXT.sampleAsked, async () => {
    const { previews } = await runs.fetch(name, 'details')
    return {
      run: { class_type: OPEN_RUN, inputs: { run_name: name } },
      previews: { class_type: 'FluxFFTPreviewSettings', inputs: { ...previews, prompts: prompt, every_n_steps: 0 } },
      picture: { class_type: 'FluxFFTPreview', inputs: { run: ['run', 0], previews: ['previews', 0] } },
    }
  }, { [SAMPLES]: name })
}

/** Write a checkpoint: `inputs` of an Export node. */
export function exportRun(name, inputs) {
  return attemptAside(name, 'export', TEXT.tab.exportAsked, () => ({
    run: { class_type: OPEN_RUN, inputs: { run_name: name } },
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
    ended = prompts.ended(await inTurn(name, async () => aside(name, await make(), extra)))
    runs.tell(name, told, null, ended)
  })
  return ended && { ended: ended.catch(() => false) }
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
  const { trains, ending } = await look(name)
  const busy = !ending && (isBusy(name) || trains) // whoever is ending it has said whether it is to go on
  // What is queued to the front last runs first.
  const after = busy ? await goOnAfter(name, { front: true }) : null
  const one = await enqueue(renamed(prompt, 'flux_fft_'), null, { front: true }, extra).catch(async (error) => {
    if (after) await withdraw(name, [RESUMES])
    throw error
  })
  if (busy) await makeWay(name, '', { number: one[0] + 0.5 })
  return idOf(one)
}

const last = new Map()

/** What is done with a run, one after the other: each looks at the queue, and then changes it. */
function inTurn(name, work) {
  const done = Promise.resolve(last.get(name)).then(work)
  last.set(name, done.catch(() => {}))
  return done
}

/** Have the run go on after what waits before it: once, however often that is asked. Resolves to what was queued. */
async function goOnAfter(name, place = {}) {
  const { trains, pending } = await look(name)
  return pending.some((one) => isFor(one, RESUMES, name)) ? null : queueAgain(name, trains, place)
}

/**
 * End what trains the run, unless that is the prompt `but`. What was queued to go on may have begun meanwhile, and
 * be what is ended: then another one is queued at `place`. For that one look tells what runs and what waits.
 */
async function makeWay(name, but = '', place = {}) {
  const { trains, pending } = await look(name)
  if (trains && idOf(trains) === but) return
  if (!pending.some((one) => isFor(one, RESUMES, name))) await queueAgain(name, trains, place)
  if (trains) await end(trains)
  else if (isBusy(name)) await runs.post(name, 'pause', { elsewhere: true })
}

/**
 * ComfyUI's queue, {pending, running}, in entries of [number, id, prompt, extra data, outputs, ...]; which of those that
 * run `trains` the run, or is about to (null: none); and whether it is `ending`, and waits for its step's end.
 */
async function look(name) {
  const [queue, { prompts: trained, ending }] = await Promise.all([get('/queue'), get('/flux_fft/trained')])
  const [running, pending] = [queue.queue_running ?? [], queue.queue_pending ?? []]
  const status = runs.get(name)?.status
  const trains = running.find((one) => idOf(one) === trained[name]) ?? running.find((one) =>
    !Object.values(trained).includes(idOf(one)) && (willTrain(one, name, status)
      || (isFor(one, RESUMES, name) && status?.state !== 'finished')))
  return { pending, running, trains: trains ?? null, ending: trains !== undefined && idOf(trains) === ending }
}

/** Whether a Train Steps node of a prompt is going to train the run: it is to be run, and its target lies ahead. */
function willTrain([, , prompt, , outputs], name, status) {
  return Object.entries(prompt).some(([id, node]) => {
    if (node.class_type !== TRAIN_STEPS || (outputs && !outputs.includes(id))) return false
    const aim = aimOf(node, prompt)
    return aim.run === name && (aim.target === null ? status?.state !== 'finished' : aim.target > (status?.resume_step ?? 0))
  })
}

/**
 * What a Train Steps node trains: {run, target}, along the `run` inputs up to the node that names the run (empty: that
 * is unclear) and sets out from step 0 (null: from another).
 */
function aimOf(node, prompt) {
  let target = 0
  for (let hops = 0; node && hops < 50; hops++) {
    const { run_name: named, run, steps, if_different: choice } = node.inputs
    if (typeof named === 'string') {
      return { run: choice === NEXT_NAME ? '' : named, target: node.class_type === OPEN_RUN ? null : target }
    }
    if (node.class_type === TRAIN_STEPS) target += typeof steps === 'number' ? steps : Infinity
    node = Array.isArray(run) ? prompt[run[0]] : null
  }
  return { run: '', target: null }
}

/** End a prompt as Cancel does, but heard by one that has only just begun, too. */
async function end(one) {
  const answer = await post(`/flux_fft/prompts/${encodeURIComponent(idOf(one))}/end`, {})
  if (!answer?.ok) throw new Error(TEXT.notReached)
}

/** Whether an entry of the queue was queued here to do that to the run. */
function isFor([, , , extra], what, name) {
  return extra?.[what] === name
}

function idOf([, id]) {
  return id
}

/** Take what was queued here for the run out of the queue, of these kinds and but for one. */
async function withdraw(name, kinds, but = '') {
  const { queue_pending: pending } = await get('/queue')
  const ids = pending.filter((one) => kinds.some((kind) => isFor(one, kind, name))).map(idOf).filter((id) => id !== but)
  if (ids.length) await post('/queue', { delete: ids })
  for (const id of ids) prompts.takenOut(id)
}

/**
 * Queue what trains the run now, or where nothing does, what trained it last. `place`: {front: true} or {number} of
 * where in the queue, which ends with it otherwise. Resolves as `enqueue` does.
 */
async function queueAgain(name, trains, place = {}) {
  const [, , prompt, extra, outputs] = trains ?? []
  const known = trains ? { prompt, workflow: extra?.extra_pnginfo?.workflow } : await runs.fetch(name, 'graph')
  // Under other ids where another workflow is open: the canvas would show what they say on its nodes of the same ids.
  const open = known.workflow?.id && known.workflow.id === openWorkflowId()
  const prefix = open ? '' : 'resumed_'
  const part = outputs ? { partial_execution_targets: outputs.map((id) => begun(id, prefix)) } : {}
  return enqueue(renamed(known.prompt, prefix), known.workflow, { ...place, ...part }, { [RESUMES]: name })
}

/** A node's id with a prefix. */
function begun(id, prefix) {
  return id.startsWith(prefix) ? id : `${prefix}${id.replaceAll(':', '_')}`
}

/**
 * A prompt whose ids begin so, as one that was never queued: fingerprints noted in it would pass for new ones, and lists
 * that are values, not links, come wrapped.
 */
function renamed(prompt, prefix) {
  const isLink = (value) => value.length === 2 && String(value[0]) in prompt
  const given = (value) => {
    if (!Array.isArray(value)) return value
    return isLink(value) ? [begun(String(value[0]), prefix), value[1]] : { __value__: value }
  }
  return Object.fromEntries(Object.entries(prompt).map(([key, { is_changed: _, ...node }]) => [begun(key, prefix), {
    ...node, inputs: Object.fromEntries(Object.entries(node.inputs).map(([input, value]) => [input, given(value)])),
  }]))
}

/** Resolves to what is known of its entry in the queue: [number, id]. */
async function enqueue(prompt, workflow, place = {}, extra = {}) {
  const answer = await post('/prompt', {
    client_id: api.clientId ?? api.initialClientId, prompt, ...place,
    extra_data: { extra_pnginfo: workflow ? { workflow } : {}, ...extra },
  })
  const said = await answer?.json().catch(() => null)
  if (answer?.ok && said) return [said.number, said.prompt_id]
  throw new Error(said ? reason(said) : TEXT.notReached)
}

async function get(path) {
  const answer = await api.fetchApi(path).catch(() => null)
  const said = await answer?.json().catch(() => null)
  if (!answer?.ok || !said) throw new Error(TEXT.notReached)
  return said
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
