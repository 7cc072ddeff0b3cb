// The runs that Open a Run offers: ComfyUI reads such lists when the page is loaded, and when R is pressed.

import { app } from '../../scripts/app.js'

import { runs } from './store.mjs'

const NODE = 'FluxFFTOpenRun'

/** Have all nodes of the graph offer what this page hears of, the newest first, and no more what it hears is deleted. */
export function watchNames() {
  runs.addEventListener('change', ({ detail: name }) => {
    const run = runs.get(name)
    if (run && !run.status) return // it is asked about, and may not be there
    for (const node of nodesOf(app.rootGraph ?? app.graph)) offer(node, name, Boolean(run))
  })
}

/** For a node that is made later than a run. */
export function offerRuns(node) {
  if (node.comfyClass !== NODE) return
  for (const [name, run] of runs.byName) if (run.status) offer(node, name, true)
}

function offer(node, name, exists) {
  const widget = node.widgets?.find((one) => one.name === 'run_name')
  const names = widget?.options?.values
  if (!Array.isArray(names) || names.includes(name) === exists) return
  // In place: Nodes 2.0 keeps the list itself, whatever the widget is given for it.
  exists ? names.unshift(name) : names.splice(names.indexOf(name), 1)
}

function nodesOf(graph) {
  return (graph?.nodes ?? []).flatMap((node) => (node.type === NODE ? [node] : node.subgraph ? nodesOf(node.subgraph) : []))
}
