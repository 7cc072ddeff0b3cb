// Entry of the pack's frontend, and its only .js file: ComfyUI imports every .js it finds under this folder.

import { app } from '../../scripts/app.js'
import { api } from '../../scripts/api.js'

import { watchDrops } from './drop.mjs'
import { dropProgressPicture, executionId, findNode, TRAIN_STEPS } from './graph.mjs'
import { watchErrors, watchRuns } from './notices.mjs'
import { attachPanel } from './panel.mjs'
import { registerTab } from './runs_tab.mjs'
import { linesOf, showLines } from './said.mjs'

/** Nodes of the prompt that runs now that ComfyUI's cache answered for: it sends again what they said long ago. */
let cached = []
api.addEventListener('execution_cached', ({ detail }) => {
  cached = (detail.nodes ?? []).map(String)
})

/** A node that works for long says what it has found so far: its own words, at the end, take their place. */
api.addEventListener('flux_fft.said', ({ detail }) => {
  const node = findNode(detail.node)
  if (node) showLines(node, detail.lines)
})

app.registerExtension({
  name: 'fluxfullfinetune.panel',
  setup() {
    registerTab()
    watchRuns()
    watchErrors()
    watchDrops()
  },
  nodeCreated(node) {
    if (!node.comfyClass?.startsWith('FluxFFT')) return
    const panel = node.comfyClass === TRAIN_STEPS ? attachPanel(node) : null
    const onExecuted = node.onExecuted
    node.onExecuted = function (output, ...rest) {
      onExecuted?.call(this, output, ...rest)
      const lines = linesOf(output)
      if (output?.images?.length) dropProgressPicture(this)
      if (lines && panel) panel.say(lines, cached.includes(executionId(this)))
      else if (lines) showLines(this, lines)
    }
  },
})
