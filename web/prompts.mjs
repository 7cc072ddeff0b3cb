// What becomes of prompts: when one has ended, and which node the newest failed at, until the next one starts.

import { api } from '../../scripts/api.js'

import { executionId, findNode, openWorkflowId, workflowIdOf } from './graph.mjs'

/** Longest line that a node failed with. */
const LONGEST = 600

class Prompts extends EventTarget {
  constructor() {
    super()
    /** Nodes of the prompt that runs now that ComfyUI's cache answered for: it sends again what they said long ago. */
    this.cached = []
    /** The node that ended the newest prompt, as ComfyUI tells of it; null: none did, or another prompt has started. */
    this.error = null
    /** `error` with the graph of its prompt, {node, type, why, ran, graph, workflow}, once that is known. */
    this.failure = null
    this.awaited = new Map()
    /** How the last few prompts ended, [id, error]: one may be over before it is asked about. */
    this.over = []
    const on = (type, take) => api.addEventListener(type, ({ detail }) => take(detail ?? {}))
    on('execution_start', () => this._start())
    on('execution_cached', ({ nodes }) => { this.cached = (nodes ?? []).map(String) })
    on('execution_success', ({ prompt_id: id }) => this._end(id))
    on('execution_interrupted', ({ prompt_id: id }) => this._end(id))
    on('execution_error', (error) => this._fail(error))
    // What was taken out of the queue, or ended while there was no connection, ends without a word.
    on('status', (status) => status.exec_info?.queue_remaining === 0 && this._endAll())
    on('reconnected', () => this._endAll())
  }

  /** Until the prompt has ended. Rejects with why its node failed. */
  ended(id) {
    const known = this.over.find(([one]) => one === id)
    if (known) return known[1] ? Promise.reject(known[1]) : Promise.resolve()
    return new Promise((resolve, reject) => this.awaited.set(id, { resolve, reject }))
  }

  /**
   * What `node` has to do with the failure: null, or {own, at, why}. `own`: it is the node that failed; else the prompt
   * ended before it came to run, at the node with the title `at`. `why` is one line.
   */
  failureAt(node) {
    const { failure } = this
    const id = failure && executionId(node)
    if (!id || failure.graph[id]?.class_type !== (node.comfyClass ?? node.type)) return null
    if (failure.workflow && failure.workflow !== openWorkflowId()) return null
    if (id !== failure.node && failure.ran.includes(id)) return null
    const type = globalThis.LiteGraph?.registered_node_types?.[failure.type]
    return { own: id === failure.node, at: findNode(failure.node)?.title || type?.title || failure.type, why: failure.why }
  }

  _start() {
    this.cached = []
    this.error = null
    this._tell(null)
  }

  _tell(failure) {
    if (this.failure === failure) return
    this.failure = failure
    this.dispatchEvent(new CustomEvent('failure'))
  }

  async _fail(error) {
    if (error.exception_type === 'ExecutionBlocked') return // the prompt goes on without it
    const why = lineOf(error)
    this._end(error.prompt_id, new Error(why))
    this.error = error
    const ran = [...(error.executed ?? []), ...this.cached].map(String)
    // The prompt comes into the history when it is done with; the queue's status tells that.
    while (this.error === error) {
      await new Promise((resolve) => api.addEventListener('status', resolve, { once: true }))
      const [, , graph, extra] = (await fromHistory(error.prompt_id)) ?? []
      if (!graph || this.error !== error) continue
      const workflow = workflowIdOf(extra?.extra_pnginfo?.workflow)
      return this._tell({ node: String(error.node_id), type: error.node_type, why, ran, graph, workflow })
    }
  }

  _end(id, error = null) {
    this.over = [...this.over.slice(-20), [id, error]]
    const one = this.awaited.get(id)
    this.awaited.delete(id)
    error ? one?.reject(error) : one?.resolve()
  }

  _endAll() {
    for (const id of [...this.awaited.keys()]) this._end(id)
  }
}

async function fromHistory(id) {
  try {
    const answer = await api.fetchApi(`/history/${encodeURIComponent(id)}`)
    return (await answer.json())[id]?.prompt
  } catch {
    return null // the server is away
  }
}

/** The first line of why a node failed: ours have no other, ComfyUI adds advice to some. */
function lineOf({ exception_message: message, exception_type: type }) {
  const line = String(message ?? '').split('\n').map((one) => one.trim()).find(Boolean)
  return (line ?? type ?? '').slice(0, LONGEST)
}

export const prompts = new Prompts()
