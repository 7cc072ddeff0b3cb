// A run's settings into the open graph: the widgets of our nodes are set as the graph that trained it had them; nodes
// that are not there are added, with the links between them.

import { app } from '../../scripts/app.js'

import { openGraph } from './graph.mjs'
import { runs } from './store.mjs'
import { TEXT } from './strings.mjs'

const OURS = 'FluxFFT'
const ROOM = 40

export async function copySettings(name) {
  try {
    const { prompt, workflow } = await runs.fetch(name, 'graph')
    const [set, added] = place(prompt, placesOf(workflow))
    runs.tell(name, TEXT.tab.copied(set, added))
  } catch (error) {
    runs.tell(name, '', error)
  }
}

/** Where the nodes lay, by id. */
function placesOf(workflow) {
  return new Map((workflow?.nodes ?? []).map((node) => [String(node.id), { pos: [...node.pos], size: [...node.size] }]))
}

function place(prompt, places) {
  const graph = openGraph()
  const ours = Object.entries(prompt).filter(([, node]) => node.class_type.startsWith(OURS))
  const free = [...graph.nodes]
  const nodes = new Map()
  let [set, added] = [0, 0]
  const shift = shiftFor(graph, ours.map(([id]) => places.get(id)).filter(Boolean))
  for (const [id, { class_type: type, inputs }] of ours) {
    const known = free.findIndex((node) => node.type === type)
    let node = known < 0 ? null : free.splice(known, 1)[0]
    if (node) set++
    else {
      node = addNode(graph, type, places.get(id), shift, added)
      if (!node) continue
      added++
    }
    nodes.set(id, node)
    for (const widget of node.widgets ?? []) {
      const value = inputs[widget.name]
      if (value === undefined || Array.isArray(value)) continue
      widget.value = value
      widget.callback?.(value)
    }
  }
  for (const [id, { inputs }] of ours) connect(nodes, nodes.get(id), inputs)
  app.canvas.setDirty(true, true)
  app.extensionManager?.workflow?.activeWorkflow?.changeTracker?.checkState?.()
  return [set, added]
}

function addNode(graph, type, was, shift, number) {
  const node = window.LiteGraph.createNode(type)
  if (!node) return null // an older or newer version's
  node.pos = was ? [was.pos[0] + shift[0], was.pos[1] + shift[1]] : [shift[0] + 420 * number, shift[1]]
  graph.add(node)
  if (was) node.setSize([Math.max(node.size[0], was.size[0]), Math.max(node.size[1], was.size[1])])
  return node
}

/** How far new nodes are moved, so that they lie below those that are there. */
function shiftFor(graph, places) {
  if (!graph.nodes.length) return [0, 0]
  const left = Math.min(...graph.nodes.map((node) => node.pos[0]))
  const bottom = Math.max(...graph.nodes.map((node) => node.pos[1] + node.size[1]))
  if (!places.length) return [left, bottom + 2 * ROOM]
  return [left - Math.min(...places.map((p) => p.pos[0])), bottom + 2 * ROOM - Math.min(...places.map((p) => p.pos[1]))]
}

/** Links of the stored graph between nodes that are here, into inputs that have none. */
function connect(nodes, node, inputs) {
  for (const [name, value] of Object.entries(inputs)) {
    const source = Array.isArray(value) ? nodes.get(String(value[0])) : null
    const slot = node?.inputs?.findIndex((input) => input.name === name) ?? -1
    if (source && slot >= 0 && node.inputs[slot].link == null) source.connect(value[1], node, slot)
  }
}
