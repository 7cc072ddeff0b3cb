// The open graph: which node an event speaks of, and which run a node belongs to.

import { app } from '../../scripts/app.js'

export const TRAIN_STEPS = 'FluxFFTTrainSteps'
/** Property of a Train Steps node that keeps the name of its run in the workflow. */
const RUN_PROPERTY = 'flux_fft_run'

function rootGraph() {
  return app.rootGraph ?? app.graph
}

/** The node of an execution id such as "7", or "12:7" for node 7 in the subgraph node 12. */
export function findNode(id) {
  let graph = rootGraph()
  const steps = String(id).split(':')
  const last = steps.pop()
  for (const step of steps) graph = graph?.getNodeById?.(step)?.subgraph
  return graph?.getNodeById?.(last) ?? null
}

/** What the server calls `node`: `findNode` the other way round. Empty for a node that is in no graph. */
export function executionId(node, graph = rootGraph()) {
  for (const one of graph?.nodes ?? []) {
    if (one === node) return String(one.id)
    const inside = one.subgraph ? executionId(node, one.subgraph) : ''
    if (inside) return `${one.id}:${inside}`
  }
  return ''
}

/**
 * Whether `place` ({run, node_id, workflow_id} from the server) is this node, in this workflow. Every workflow has a
 * node 4: where the place does not say in which one it lies, the node's own graph has to lead to that run.
 */
export function isPlaceOf(place, node) {
  if (findNode(place.node_id) !== node) return false
  return isGiven(place.workflow_id) ? place.workflow_id === rootGraph()?.id : leadsTo(node, place.run)
}

/** The graph that is looked at: a subgraph that was opened, else the whole. */
export function openGraph() {
  return app.canvas?.graph ?? rootGraph()
}

export function openWorkflowId() {
  return workflowIdOf(rootGraph())
}

/** The id of a workflow, open or as it is saved. Empty: it has none. */
export function workflowIdOf(workflow) {
  return isGiven(workflow?.id) ? workflow.id : ''
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

/** Take away the picture of a node's progress, which the classic canvas would go on to show in place of the results. */
export function dropProgressPicture(node) {
  const graph = node.graph
  delete app.nodePreviewImages?.[graph && graph !== rootGraph() ? `${graph.id}:${node.id}` : String(node.id)]
}

/** Whether the graph says that this node trains `run`, or has trained it. Start may have numbered the name. */
export function leadsTo(node, run) {
  const named = runNamedUpstream(node)
  const numbered = named !== '' && run.startsWith(`${named}_`) && /^\d+$/.test(run.slice(named.length + 1))
  return run === keptRun(node) || run === named || numbered
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
