// Entry of the pack's frontend, and its only .js file: ComfyUI imports every .js it finds under this folder.

import { app } from '../../scripts/app.js'

import { TRAIN_STEPS } from './graph.mjs'
import { attachPanel } from './panel.mjs'
import { linesOf, showLines } from './said.mjs'

app.registerExtension({
  name: 'FluxFFT',
  nodeCreated(node) {
    if (!node.comfyClass?.startsWith('FluxFFT')) return
    const panel = node.comfyClass === TRAIN_STEPS ? attachPanel(node) : null
    const onExecuted = node.onExecuted
    node.onExecuted = function (output, ...rest) {
      onExecuted?.call(this, output, ...rest)
      const lines = linesOf(output)
      if (lines && panel) panel.say(lines)
      else if (lines) showLines(this, lines)
    }
  },
})
