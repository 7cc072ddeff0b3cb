// The open graph: which node an event speaks of, and which run a node belongs to.

import { app } from '../../scripts/app.js'

export const TRAIN_STEPS = 'FluxFFTTrainSteps'
/** Property of a Train Steps node that keeps the name of its run in the workflow. */
const RUN_PROPERTY = 'flux_fft_run'

function rootGraph() {
  return app.rootGraph ?? app.graph
}

/** The node of an execution id such as "7", or "12:7" for node 7 in the subgraph node 12. */
function findNode(id) {
  let graph = rootGraph()
  const steps = String(id).split(':')
  const last = steps.pop()
  for (const step of steps) graph = graph?.getNodeById?.(step)?.subgraph
  return graph?.getNodeById?.(last) ?? null
}

/** Whether `place` ({node_id, workflow_id} from the server) is this node, in this workflow. */
export function isPlaceOf(place, node) {
  const here = rootGraph()?.id
  const elsewhere = isGiven(place.workflow_id) && isGiven(here) && place.workflow_id !== here
  return !elsewhere && findNode(place.node_id) === node
}

/** Workflows that were never saved may have no id, or one of zeros. */
function isGiven(id) {
  return Boolean(id) && /[1-9a-f]/.test(id)
}

export function keptRun(node) {
  return node.properties?.[RUN_PROPERTY] || ''
}

export function keepRun(node, name) {
  if (keptRun(node) === name) return
  node.properties ??= {}
  node.properties[RUN_PROPERTY] = name
}

/** The run's name as the graph says it: along the `run` inputs up to the node that names it. Empty if unclear. */
export function runNamedUpstream(node) {
  let at = node
  for (let hops = 0; at && hops < 50; hops++) {
    const named = at.widgets?.find((widget) => widget.name === 'run_name')
    if (named) return String(named.value ?? '')
    const slot = at.inputs?.findIndex((input) => input.name === 'run') ?? -1
    at = slot < 0 ? null : at.getInputNode?.(slot)
  }
  return ''
}
