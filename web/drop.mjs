// A zip or a folder of pictures that is dropped on the canvas becomes a dataset: its files go to a folder of ComfyUI's
// input, and a Training Pictures node names that.

import { app } from '../../scripts/app.js'
import { api } from '../../scripts/api.js'

import { bytes, count } from './format.mjs'
import { openGraph } from './graph.mjs'
import { toast } from './notices.mjs'
import { forgetLines } from './said.mjs'
import { TEXT } from './strings.mjs'

const NODE = 'FluxFFTDataset'
const AT_ONCE = 3

/** Listen where the canvas lies, before the frontend takes a zip for a workflow, which it cannot read from one. */
export function watchDrops() {
  const canvas = app.canvasEl ?? app.canvas?.canvas
  const place = canvas?.closest?.('#graph-canvas-container, .graph-canvas-container') ?? canvas?.parentElement
  place?.addEventListener('drop', (event) => {
    const dropped = datasetsOf(event.dataTransfer)
    if (!dropped.length) return
    event.preventDefault()
    event.stopPropagation()
    app.canvas.adjustMouseEvent?.(event)
    const at = [event.canvasX ?? 0, event.canvasY ?? 0]
    take(dropped, at)
  }, true)
}

/** The zips and folders among what was dropped; empty where there are other files, which are the frontend's. */
function datasetsOf(transfer) {
  const entries = [...(transfer?.items ?? [])].map((item) => item.webkitGetAsEntry?.()).filter(Boolean)
  const ours = entries.filter((entry) => entry.isDirectory || entry.name.toLowerCase().endsWith('.zip'))
  return ours.length === entries.length ? ours : []
}

async function take(entries, at) {
  for (const entry of entries) {
    const name = entry.isDirectory ? entry.name : entry.name.replace(/\.zip$/i, '')
    const done = toast('info', TEXT.drop.sending(name), '', 0)
    try {
      const told = await upload(name, await filesOf(entry))
      toast('success', TEXT.drop.done(told.folder), TEXT.drop.doneDetail(
        count(told.pictures), count(told.texts), bytes(told.bytes), told.skipped && count(told.skipped)))
      setFolder(told.folder, at)
    } catch (error) {
      toast('error', TEXT.drop.failed, error.message, 0)
    }
    done()
  }
}

/** [path, entry] of each file below an entry; the dropped folder's own name is left out of the paths. */
async function filesOf(entry, path = '') {
  if (entry.isFile) return [[path || entry.name, entry]]
  const reader = entry.createReader()
  const found = []
  for (;;) { // it gives a hundred at a time
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject))
    if (!some.length) return found
    for (const one of some) {
      if (!one.name.startsWith('.')) found.push(...(await filesOf(one, path ? `${path}/${one.name}` : one.name)))
    }
  }
}

async function upload(name, files) {
  const { id } = await ask('', {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify({ name: name || TEXT.drop.dropped }),
  })
  const left = [...files]
  let failed = false
  const send = async () => {
    while (left.length && !failed) {
      const [path, entry] = left.shift()
      const file = await new Promise((resolve, reject) => entry.file(resolve, reject))
      try {
        await ask(`/${id}?path=${encodeURIComponent(path)}`, { method: 'PUT', body: file })
      } catch (error) {
        failed = true
        throw error
      }
    }
  }
  try {
    await Promise.all(Array.from({ length: AT_ONCE }, send))
    return await ask(`/${id}/finish`, { method: 'POST' })
  } catch (error) {
    await ask(`/${id}`, { method: 'DELETE' }).catch(() => {}) // it may have ended it by itself
    throw error
  }
}

async function ask(path, options) {
  const answer = await api.fetchApi(`/flux_fft/datasets${path}`, options).catch(() => null)
  const said = await answer?.json().catch(() => null)
  if (!answer?.ok) throw new Error(said?.error ?? TEXT.notReached)
  return said
}

/** The node under the pointer, or the only one without a folder, or a new one. */
function setFolder(folder, [x, y]) {
  const graph = openGraph()
  const all = graph.nodes.filter((node) => node.type === NODE)
  const under = all.find((n) => x >= n.pos[0] && x <= n.pos[0] + n.size[0] && y >= n.pos[1] - 30 && y <= n.pos[1] + n.size[1])
  const empty = all.filter((node) => !folderOf(node)?.value)
  let node = under ?? (empty.length === 1 ? empty[0] : null)
  if (!node) {
    node = window.LiteGraph.createNode(NODE)
    node.pos = freePlace(graph.nodes, [x, y], node.size)
    graph.add(node)
  }
  const widget = folderOf(node)
  widget.value = folder
  widget.callback?.(folder)
  forgetLines(node) // of another folder
  app.canvas.setDirty(true, true)
  app.extensionManager?.workflow?.activeWorkflow?.changeTracker?.checkState?.()
}

const TITLE = 30
const GAP = 20

/** `at`, or the first place below it where a node of this size covers no other. */
function freePlace(nodes, at, [width, height]) {
  const [x, top] = at
  let y = top
  const covers = ({ pos, size }) => x < pos[0] + size[0] + GAP && pos[0] < x + width + GAP
    && y - TITLE < pos[1] + size[1] + GAP && pos[1] - TITLE < y + height + GAP
  for (let under = nodes.find(covers); under; under = nodes.find(covers)) y = under.pos[1] + under.size[1] + TITLE + GAP
  return [x, y]
}

function folderOf(node) {
  return node.widgets?.find((widget) => widget.name === 'folder')
}
