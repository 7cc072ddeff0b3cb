// Toasts of what happened to runs while this page was open: quiet where all is well, lasting where somebody must act.

import { app } from '../../scripts/app.js'

import { bytes, count, figure } from './format.mjs'
import { TRAIN_STEPS } from './graph.mjs'
import { prompts } from './prompts.mjs'
import { runs } from './store.mjs'
import { TEXT } from './strings.mjs'

const QUIET = 3000
const USUAL = 8000
const LONG = 20000
/** ComfyUI's loaders, by the models folder that they list. */
const LOADERS = { diffusion_models: 'UNETLoader', checkpoints: 'CheckpointLoaderSimple', loras: 'LoraLoader' }
/** Milliseconds within which ComfyUI's own notice of a run that failed is here. */
const SOON = 1500
/** Runs whose disk was told to be low. */
const low = new Set()

/** Show a toast, and return what takes it away. `life`: milliseconds; 0: until it is closed. */
export function toast(severity, summary, detail = '', life = USUAL) {
  const { toast: toasts } = app.extensionManager ?? {}
  const message = { severity, summary, ...(detail ? { detail } : {}), ...(life ? { life } : {}) }
  toasts?.add?.(message)
  return () => toasts?.remove?.(message)
}

export function watchRuns() {
  runs.addEventListener('news', ({ detail: { run, before, happened } }) => {
    tellState(run, before)
    tellDisk(run)
    for (const event of happened) TELLS[event.type]?.(run.name, event)
  })
}

function tellState({ name, status }, before) {
  if (!['preparing', 'training', 'paused'].includes(before) || status.state === before) return
  const { toasts } = TEXT
  if (status.state === 'finished' && before !== 'preparing') {
    toast('success', toasts.finished(name), toasts.finishedDetail(count(status.step), figure(status.loss)))
  } else if (['failed', 'interrupted'].includes(status.state)) {
    // Where this page's prompt trained it, ComfyUI has a notice in the same place, and the panel says why.
    setTimeout(() => {
      if (prompts.error?.node_type !== TRAIN_STEPS) toast('error', toasts[status.state](name), status.error ?? '', 0)
    }, SOON)
  }
}

function tellDisk({ name, status }) {
  if (!status.disk_low) {
    low.delete(name)
  } else if (!low.has(name)) {
    low.add(name)
    toast('warn', TEXT.toasts.diskLow(name), TEXT.toasts.diskLowDetail(bytes(status.disk_low)), 0)
  }
}

/** Where an exported file lies, and what is to be chosen to load it. */
function placeOf({ folder, listed }) {
  const loader = globalThis.LiteGraph?.registered_node_types?.[LOADERS[listed?.kind]]?.title
  const chosen = loader ? [TEXT.toasts.listed(loader, listed.name)] : []
  return [...chosen, ...(folder ? [TEXT.toasts.folder(folder)] : [])].join('\n')
}

const TELLS = {
  saved: (name, event) => toast('secondary', TEXT.toasts.saved(name, count(event.step)), '', QUIET),
  save_failed: (name, event) => toast('error', TEXT.toasts.saveFailed(name), event.error ?? '', 0),
  checkpoint_failed: (name, event) => toast('error', TEXT.toasts.saveFailed(name), event.error ?? '', 0),
  exported: (name, event) => toast('success', TEXT.toasts.exported(event.file ?? ''), placeOf(event), LONG),
  out_of_memory: (name) => toast('warn', TEXT.toasts.outOfMemory(name)),
  rolled_back: (name, event) => toast('warn', TEXT.toasts.rolledBack(name, count(event.step)), event.why ?? ''),
  spike: (name, event) => toast('warn', TEXT.toasts.spike(name, count(event.step))),
}
