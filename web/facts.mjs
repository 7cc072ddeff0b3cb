// What a run's status says, as short texts: for the panel and the sidebar alike.

import { bytes, count, duration, figure, gigabytes, seconds } from './format.mjs'
import { TEXT } from './strings.mjs'

export const BUSY = ['preparing', 'training', 'held']
/** States from which a run can be trained on by its stored graph. */
export const RESUMABLE = ['paused', 'stopped', 'failed', 'interrupted', 'created']

/** The facts shown, in rows of four. */
export const FACTS = ['step', 'smoothed', 'perStep', 'left', 'epoch', 'imagesPerSecond', 'vram', 'ram']

/** The state to show: one that was paused by its own graph, for pictures, goes on by itself. */
export function stateOf(run) {
  const state = run?.status?.state ?? 'none'
  return state === 'paused' && run.held && !run.request ? 'held' : state
}

/** Texts of `FACTS` by name. `loss`: the smoothed one. */
export function factsOf(status, loss, busy) {
  const { step, target } = status
  return {
    step: Number.isFinite(step) ? (target ? `${count(step)} / ${count(target)}` : count(step)) : '',
    smoothed: figure(loss ?? status.loss),
    perStep: seconds(status.seconds_per_step),
    left: busy ? duration(status.seconds_left) : '',
    imagesPerSecond: figure(status.images_per_second),
    epoch: Number.isFinite(status.epoch) ? status.epoch.toFixed(status.epoch < 99.95 ? 1 : 0) : '',
    vram: status.worker && status.vram_gb > 0 ? gigabytes(status.vram_gb) : '', // none on a CPU
    ram: status.worker ? gigabytes(status.ram_gb) : '',
  }
}

/** How far a save point or checkpoint that is being written is; empty where there is none. */
export function writingOf(status) {
  const { what, done, total } = status?.saving ?? {}
  return TEXT.writing[what]?.(Math.floor(100 * Math.min(1, done / Math.max(1, total)))) ?? ''
}

/** One line on what comes next, or what the user can do. */
export function hintOf(run, state) {
  const status = run?.status ?? {}
  if (status.disk_low) return TEXT.diskLow(bytes(status.disk_low))
  if (status.save_failed) return TEXT.saveFailed(status.save_failed)
  return [status.loss_risen ? TEXT.lossRisen(figure(status.loss_risen)) : '', comingNext(status, state)].join(' ').trim()
}

function comingNext(status, state) {
  if (state === 'training') return trainingHint(status)
  const [ram, rest] = [gigabytes(status.ram_gb), duration(status.idle_exit)]
  if (state === 'paused') return TEXT.pausedHint(ram, rest)
  if (state === 'interrupted') return TEXT.goesOnFrom(count(status.resume_step ?? 0))
  if (state === 'finished') return TEXT.atTarget(count(status.target), Boolean(status.worker), ram, rest)
  return TEXT.hints[state] ?? ''
}

/** When the run was saved, when it will be, and what would be lost before; what holds up the step. */
function trainingHint(status) {
  const last = status.save_point_step ? TEXT.saved(count(status.save_point_step)) : TEXT.unsaved
  const times = []
  const before = (seconds) => !Number.isFinite(status.seconds_left) || seconds < status.seconds_left
  if (Number.isFinite(status.save_in) && before(status.save_in)) times.push(TEXT.saveIn(duration(status.save_in)))
  if (status.save_at && status.save_at < status.target) times.push(TEXT.saveAt(count(status.save_at)))
  const parts = [TEXT.nextSave(last, times)]
  if (status.unsaved_seconds >= 1) parts.push(TEXT.powerCut(duration(status.unsaved_seconds)))
  const waits = TEXT.waits[status.waits_for] ?? status.waits_for
  if (waits) parts.push(TEXT.waitsFor(waits))
  return parts.join(' ')
}
