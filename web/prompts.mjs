// What becomes of prompts: when one has ended, and which node the newest failed at, or which ComfyUI did not take, until
// the next one starts.

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
    /**
     * `error` with the graph of its prompt, {lines, node, type, ran, graph, workflow}, once that is known. `lines`: why,
     * by the node's id. A prompt that was not taken may have several, and may yet run in part: then it has a `prompt`.
     */
    this.failure = null
    this.awaited = new Map()
    /** How the last few prompts ended, [id, error, well]: one may be over before it is asked about. */
    this.over = []
    const on = (type, take) => api.addEventListener(type, ({ detail }) => take(detail ?? {}))
    this._watchQueueing()
    on('execution_start', ({ prompt_id: id }) => this._start(id))
    on('execution_cached', ({ nodes }) => { this.cached = (nodes ?? []).map(String) })
    on('execution_success', ({ prompt_id: id }) => this._end(id))
    on('execution_interrupted', ({ prompt_id: id }) => this._end(id, null, false))
    on('execution_error', (error) => this._fail(error))
    // What was taken out of the queue, or ended while there was no connection, ends without a word.
    on('status', (status) => status.exec_info?.queue_remaining === 0 && this._endAll())
    on('reconnected', () => this._endAll())
  }

  /** Until the prompt has ended: to whether it came to its end. Rejects with why its node failed. */
  ended(id) {
    const known = this.over.find(([one]) => one === id)
    if (known) return known[1] ? Promise.reject(known[1]) : Promise.resolve(known[2])
    return new Promise((resolve, reject) => this.awaited.set(id, { resolve, reject }))
  }

  /** A prompt that waited is in the queue no more: of that ComfyUI says nothing. */
  takenOut(id) {
    this._end(id, null, false)
  }

  /**
   * What `node` has to do with the failure: null, or {own, at, why}. `own`: it is the node that failed; else the prompt
   * ended before it came to run, at the node with the title `at`. `why`: a line, or several.
   */
  failureAt(node) {
    const { failure } = this
    const id = failure && executionId(node)
    if (!id || failure.graph[id]?.class_type !== (node.comfyClass ?? node.type)) return null
    if (failure.workflow && failure.workflow !== openWorkflowId()) return null
    const own = failure.lines[id]
    if (!own && failure.ran.includes(id)) return null
    const type = globalThis.LiteGraph?.registered_node_types?.[failure.type]
    const at = findNode(failure.node)?.title || type?.title || failure.type
    return { own: own !== undefined, at, why: own ?? failure.lines[failure.node] }
  }

  _start(id) {
    this.cached = []
    this.error = null
    if (!this.failure?.prompt || this.failure.prompt !== id) this._tell(null)
  }

  /** What the Run button queues goes this way: ComfyUI says why it does not take it where few look. */
  _watchQueueing() {
    const { queuePrompt } = api
    api.queuePrompt = async (...args) => {
      try {
        const answer = await queuePrompt.apply(api, args)
        this._refused(args[1], answer?.node_errors, answer?.prompt_id)
        return answer
      } catch (error) {
        this._refused(args[1], error?.response?.node_errors, '')
        throw error
      }
    }
  }

  /** `errors`: of the nodes that ComfyUI does not take of a prompt; `prompt`: the id of what is left of it, if any. */
  _refused({ output: graph, workflow } = {}, errors, prompt) {
    const lines = Object.fromEntries(Object.entries(errors ?? {}).map(([id, node]) =>
      [id, node.errors?.map(refusalOf).join('\n')]).filter(([, text]) => text))
    const [node] = Object.keys(lines)
    if (!node || !graph) return
    this.error = null
    const ran = prompt ? Object.keys(graph) : []
    this._tell({ lines, node, type: errors[node].class_type, ran, graph, workflow: workflowIdOf(workflow), prompt })
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
      const node = String(error.node_id)
      return this._tell({ lines: { [node]: why }, node, type: error.node_type, ran, graph, workflow })
    }
  }

  _end(id, error = null, well = !error) {
    this.over = [...this.over.slice(-20), [id, error, well]]
    const one = this.awaited.get(id)
    this.awaited.delete(id)
    error ? one?.reject(error) : one?.resolve(well)
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

/** One line of why ComfyUI does not take a node's input: a node's own check gives "INPUT - its line". */
function refusalOf({ type, message, details, extra_info: { input_name: input } = {} }) {
  const own = type === 'custom_validation_failed' && details?.startsWith(`${input} - `)
  const line = own ? details.slice(input.length + 3) : [message, details].filter(Boolean).join(': ')
  const told = own && !line.startsWith(input) ? `${input}: ${line}` : line
  return told.replace(/\s+/g, ' ').slice(0, LONGEST)
}

export const prompts = new Prompts()
