// Every text that the panel, the sidebar and the toasts show, in one place. A further language is a further table of the
// same shape in a module of its own; what it leaves out is English.

import { ZH } from './strings_zh.mjs'

/** Tables by ComfyUI's code for the language. */
const TABLES = { zh: ZH }

function many(number, what) {
  return `${number} ${what}${number === '1' ? '' : 's'}`
}

/** `rest`: how long a run rests in memory at most. */
function until(rest) {
  return rest ? ` until it has rested for ${rest}` : ''
}

const EN = {
  /** A row of short texts; a text and what it is about. */
  listed: (parts) => parts.join(', '),
  about: (what, text) => `${what}: ${text}`.trim(),
  states: {
    none: 'No run yet',
    created: 'Ready',
    preparing: 'Starting',
    training: 'Training',
    held: 'Sampling',
    paused: 'Paused',
    finished: 'Finished',
    stopped: 'Stopped',
    failed: 'Failed',
    interrupted: 'Interrupted',
  },
  notStarted: 'Not started',
  endedBefore: (node, why) => `The prompt ended before training, at ${node}: ${why}`,
  hints: {
    none: 'Queue the graph to start training.',
    created: 'Queue the graph to start training.',
    preparing: 'Loading the model.',
    held: 'Making preview pictures, then training goes on.',
    stopped: 'Saved. Resume, or queue the graph, to go on.',
  },
  pausedHint: (ram, rest) =>
    `Resume to go on. The run holds ${ram ? `${ram} of` : 'its'} RAM${until(rest)}: Stop saves and frees it now.`,
  pause: 'Pause',
  pauseTip: 'Stop after this step, end the queued prompt and free the VRAM. The run stays in RAM.',
  resume: 'Resume',
  resumeTip: 'Queue the graph that trained this run, whatever workflow is open.',
  stop: 'Stop',
  stopTip: 'Stop after this step, save the whole run and free VRAM and RAM.',
  save: 'Save',
  saveTip: 'Write a save point of the run as it is, between two steps.',
  sample: 'Sample',
  sampleTip: 'Make a picture of the weights as they are. Training pauses for it, then goes on.',
  samplePrompt: 'Prompt of the picture',
  sampleGo: 'Make it',
  sampleAsked: 'The picture is queued ...',
  letThrough: 'Let through',
  letThroughTip: 'Let the prompts that wait in the queue run first, then go on training.',
  letThroughNone: 'No other prompt waits in the queue.',
  letThroughAsked: 'Pausing for the queued prompts, then training goes on ...',
  lr: 'LR',
  lrTip: 'Learning rate from the next step on. Type a number such as 3.5e-6 and press Enter.',
  lrAsked: (lr) => `Learning rate ${lr} from the next step on.`,
  lrWrong: 'The learning rate is a number from 0 to 1, such as 3.5e-6.',
  saving: 'Saving between two steps ...',
  savedNow: (step) => `Saved at step ${step}.`,
  /** By the server's word for what is written. */
  writing: {
    'save point': (share) => `Writing save point ... ${share} %`,
    checkpoint: (share) => `Writing checkpoint ... ${share} %`,
  },
  queued: 'Queued: it goes on when the prompts before it are done.',
  cancel: 'Cancel',
  close: 'Close',
  pausing: 'Pausing after this step ...',
  stopping: 'Stopping after this step, then saving ...',
  offline: 'No connection to ComfyUI, waiting for it ...',
  saved: (step) => `Last saved at step ${step}`,
  unsaved: 'Not saved yet',
  saveIn: (time) => `in ${time}`,
  saveAt: (step) => `at step ${step}`,
  nextSave: (last, times) => `${last}: next save ${[...times, 'at the target'].join(', ')}, or on Stop.`,
  powerCut: (time) => `A power cut now would cost ${time}.`,
  waitsFor: (what) => `The step waits for ${what}.`,
  /** What the worker calls it, and what it is called here. */
  waits: { arithmetic: '', up: 'data on their way to the GPU', down: 'data on their way to RAM' },
  diskLow: (size) => `The disk is low: ${size} free, too little for another save point.`,
  saveFailed: (error) => `The run is not saved: ${error}`,
  lossRisen: (times) => `The loss is ${times} times what it was at first: this training has gone wrong. Lower the `
    + 'learning rate and begin again, or go back to a save point from before.',
  atTarget: (target, inMemory, ram, rest) =>
    `The run is at its target of ${target}, and saved. Queueing again trains nothing: raise steps to train further.${
      inMemory ? ` The run holds ${ram ? `${ram} of` : 'its'} RAM${until(rest)}: Stop frees it now.` : ''}`,
  queuedAgain: 'Queued again: this node has nothing to train.',
  goesOnFrom: (step) => `Ended unexpectedly. Resume, or queue the graph, to go on from step ${step}.`,
  log: 'Log',
  logTip: 'What the worker wrote, with the traceback of an error.',
  logTitle: (run) => `Worker log of ${run}`,
  chartEmpty: 'The loss curve appears with the first steps.',
  chartKeys: 'Arrow keys read the values, drag zooms, double click or Escape shows all.',
  allSteps: 'all',
  allStepsTip: 'Show all steps again, as double click and Escape do',
  logAxis: 'log',
  logAxisTip: 'Logarithmic axis',
  step: 'step',
  loss: 'loss',
  legend: 'Curves: press one to hide it, or to show it again',
  raw: 'each step',
  rawTip: 'The loss of each step. It jumps with the noise level that the step has drawn.',
  smoothed: 'loss (smoothed)',
  smooth: 'smoothed',
  smoothTip: 'The running mean of the losses: the line to look at.',
  validation: 'validation',
  fixedNoise: 'validation (fixed noise)',
  validationTip: 'The loss of the pictures that are never trained, with the same noise each time: it can be compared '
    + 'between steps.',
  rate: 'learning rate',
  rateTip: 'The learning rate of each step, on a scale of its own.',
  perStep: 'per step',
  left: 'left',
  imagesPerSecond: 'images / s',
  epoch: 'epoch',
  vram: 'VRAM',
  ram: 'RAM',
  notReached: 'ComfyUI did not answer. Try again.',
  refused: 'ComfyUI did not take the prompt',

  tab: {
    title: 'Flux runs',
    tip: 'Runs of Flux Full Fine-Tune: curves, samples, save points, export',
    none: 'No runs yet. Open the template "demo on any machine" and queue it: it trains a tiny Flux in a few minutes.',
    refresh: 'Refresh',
    back: 'All runs',
    ofTarget: (step, target) => (target ? `step ${step} of ${target}` : `step ${step}`),
    samples: 'Samples',
    noSamples: 'No pictures yet. Connect Preview Settings to Train Steps, or press Sample on its panel.',
    atStep: (step) => `Step ${step}`,
    compareTip: (prompt) => `Compare steps: ${prompt}`,
    leftStep: 'Left: step',
    rightStep: 'Right: step',
    settings: 'Settings',
    savePoints: 'Save points and checkpoints',
    noSavePoints: 'None yet.',
    onDisk: (size) => `${size} on the disk`,
    files: 'Exports',
    export: 'Export',
    exportTip: 'Write the weights as they are into models/diffusion_models. A run in training pauses for it, then goes on.',
    exportGo: 'Queue the export',
    exportAsked: 'The export is queued.',
    copy: 'Copy settings into the graph',
    copyTip: 'Set the widgets of our nodes in the open graph as this run has them; nodes that are not there are added.',
    copied: (set, added) => `Settings copied: ${many(String(set), 'node')} set, ${added} added.`,
    delete: 'Delete',
    deleteAsk: (name, size) => `Delete ${name} with its samples and save points, ${size}? This cannot be undone.`,
    deleteLive: ' Its worker is stopped first.',
    deleteGo: 'Delete it',
    deleted: (name) => `${name} was deleted.`,
  },

  toasts: {
    finished: (run) => `${run} is finished`,
    finishedDetail: (step, loss) => `Step ${step}${loss ? `, loss ${loss}` : ''}.`,
    failed: (run) => `${run} failed`,
    interrupted: (run) => `${run} ended unexpectedly`,
    saved: (run, step) => `${run}: save point of step ${step} written`,
    saveFailed: (run) => `${run} could not be saved`,
    diskLow: (run) => `The disk of ${run} is nearly full`,
    diskLowDetail: (size) => `${size} are free, too little for another save point: free some space.`,
    outOfMemory: (run) => `${run} ran out of VRAM and goes on with less`,
    rolledBack: (run, step) => `${run} went back to step ${step}`,
    spike: (run, step) => `${run}: the loss jumped at step ${step}. If it stays up, lower the learning rate`,
    exported: (file) => `Exported ${file}`,
    listed: (loader, name) => `Press R, then ${loader} lists it as ${name}`,
    folder: (folder) => `Folder: ${folder}`,
  },

  drop: {
    sending: (name) => `Receiving the pictures of ${name} ...`,
    done: (name) => `Dataset ${name}`,
    doneDetail: (pictures, texts, size, skipped) => `${many(pictures, 'picture')} and ${many(texts, 'caption file')}, `
      + `${size}, in ComfyUI's input folder.${skipped ? ` Left out: ${many(skipped, 'other file')}.` : ''}`,
    failed: 'The pictures were not taken',
    dropped: 'dropped pictures',
  },
}

/** The language that the user has chosen in ComfyUI's settings. There is no `globalThis.app` yet where this is loaded. */
function language() {
  return globalThis.comfyAPI?.app?.app?.extensionManager?.setting?.get?.('Comfy.Locale') ?? 'en'
}

function merged(base, other) {
  return Object.fromEntries(Object.entries(base).map(([key, value]) => {
    const put = other[key] ?? value
    const isTable = typeof value === 'object' && !Array.isArray(value)
    return [key, isTable ? merged(value, put === value ? {} : put) : put]
  }))
}

export const TEXT = merged(EN, TABLES[language()] ?? {})
