// Toasts of what happened to runs while this page was open: quiet where all is well, lasting where somebody must act.

import { api } from '../../scripts/api.js'
import { app } from '../../scripts/app.js'

import { bytes, count, figure } from './format.mjs'
import { runs } from './store.mjs'
import { TEXT } from './strings.mjs'

const QUIET = 3000
const USUAL = 8000
const LONG = 20000
/** Runs whose disk was told to be low. */
const low = new Set()

/** Show a toast, and return what takes it away. `life`: milliseconds; 0: until it is closed. */
export function toast(severity, summary, detail = '', life = USUAL) {
  const { toast: toasts } = app.extensionManager ?? {}
  const message = { severity, summary, ...(detail ? { detail } : {}), ...(life ? { life } : {}) }
  toasts?.add?.(message)
  return () => toasts?.remove?.(message)
}

/** ComfyUI's own notice of a node that failed keeps the line that says why two clicks away. Train Steps has a panel. */
export function watchErrors() {
  api.addEventListener('execution_error', ({ detail }) => {
    const { node_type: type = '', exception_message: why = '' } = detail ?? {}
    if (!type.startsWith('FluxFFT') || type === 'FluxFFTTrainSteps') return
    const title = globalThis.LiteGraph?.registered_node_types?.[type]?.title ?? type
    toast('error', title, why.trim(), LONG)
  })
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
  } else if (status.state === 'failed') toast('error', toasts.failed(name), status.error ?? '', 0)
  else if (status.state === 'interrupted') toast('error', toasts.interrupted(name), status.error ?? '', 0)
}

function tellDisk({ name, status }) {
  if (!status.disk_low) {
    low.delete(name)
  } else if (!low.has(name)) {
    low.add(name)
    toast('warn', TEXT.toasts.diskLow(name), TEXT.toasts.diskLowDetail(bytes(status.disk_low)), 0)
  }
}

const TELLS = {
  saved: (name, event) => toast('secondary', TEXT.toasts.saved(name, count(event.step)), '', QUIET),
  save_failed: (name, event) => toast('error', TEXT.toasts.saveFailed(name), event.error ?? '', 0),
  checkpoint_failed: (name, event) => toast('error', TEXT.toasts.saveFailed(name), event.error ?? '', 0),
  exported: (name, event) => toast('success', TEXT.toasts.exported(event.file ?? ''), name),
  out_of_memory: (name) => toast('warn', TEXT.toasts.outOfMemory(name)),
  rolled_back: (name, event) => toast('warn', TEXT.toasts.rolledBack(name, count(event.step)), event.why ?? ''),
  spike: (name, event) => toast('warn', TEXT.toasts.spike(name, count(event.step))),
}
