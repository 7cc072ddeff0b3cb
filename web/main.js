// Entry of the pack's frontend, and its only .js file: ComfyUI imports every .js it finds under this folder.

import { app } from '../../scripts/app.js'
import { api } from '../../scripts/api.js'

import { watchDrops } from './drop.mjs'
import { dropProgressPicture, executionId, findNode, TRAIN_STEPS } from './graph.mjs'
import { watchRuns } from './notices.mjs'
import { attachPanel } from './panel.mjs'
import { prompts } from './prompts.mjs'
import { offerRuns, watchNames } from './run_names.mjs'
import { registerTab } from './runs_tab.mjs'
import { linesOf, showError, showLines } from './said.mjs'

/** A node that works for long says what it has found so far: its own words, at the end, take their place. */
api.addEventListener('flux_fft.said', ({ detail }) => {
  const node = findNode(detail.node)
  if (node) showLines(node, detail.lines)
})

/**
 * ComfyUI marks a node that failed, or that it does not take, and keeps why some clicks away: the node says it, until the
 * next prompt starts.
 */
function tellFailures(node) {
  const tell = () => {
    const failure = prompts.failureAt(node)
    showError(node, failure?.own ? failure.why : '')
  }
  prompts.addEventListener('failure', tell)
  const onRemoved = node.onRemoved
  node.onRemoved = function (...args) {
    prompts.removeEventListener('failure', tell)
    return onRemoved?.apply(this, args)
  }
  setTimeout(tell) // when the graph has been read
}

app.registerExtension({
  name: 'fluxfullfinetune.panel',
  setup() {
    registerTab()
    watchRuns()
    watchDrops()
    watchNames()
  },
  nodeCreated(node) {
    if (!node.comfyClass?.startsWith('FluxFFT')) return
    const panel = node.comfyClass === TRAIN_STEPS ? attachPanel(node) : null
    if (!panel) tellFailures(node)
    offerRuns(node)
    const onExecuted = node.onExecuted
    node.onExecuted = function (output, ...rest) {
      onExecuted?.call(this, output, ...rest)
      const lines = linesOf(output)
      if (output?.images?.length) dropProgressPicture(this)
      if (lines && panel) panel.say(lines, prompts.cached.includes(executionId(this)))
      else if (lines) showLines(this, lines)
    }
  },
})
