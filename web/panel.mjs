// The panel on a Train Steps node: a DOM widget that shows one run, live, and what can be done with it.

import { halt, resume } from './actions.mjs'
import { LossChart } from './chart.mjs'
import { showLog } from './dialog.mjs'
import { addDisplay, button, keepTyping, make, setMinHeight, setText } from './dom.mjs'
import { BUSY, FACTS, factsOf, hintOf, RESUMABLE, stateOf, writingOf } from './facts.mjs'
import { isPlaceOf, keepRun, keptRun, leadsTo, runNamedUpstream } from './graph.mjs'
import { prompts } from './prompts.mjs'
import { runs } from './store.mjs'
import { TEXT } from './strings.mjs'
import { STYLE } from './style.mjs'
import { Tools } from './tools.mjs'

const WIDTH = 360
const HEIGHT = 402

/** Give `node` its panel. Returns it. */
export function attachPanel(node) {
  const panel = new Panel(node)
  addDisplay(node, 'status', panel.element, () => HEIGHT)
  const onRemoved = node.onRemoved
  node.onRemoved = function (...args) {
    panel.destroy()
    return onRemoved?.apply(this, args)
  }
  const [width, height] = node.computeSize()
  node.setSize([Math.max(node.size[0], width, WIDTH), Math.max(node.size[1], height)])
  return panel
}

class Panel {
  constructor(node) {
    this.node = node
    this.name = ''
    this.said = ''
    /** The state in which it was said. */
    this.saidIn = ''
    /** The failure before which the run has moved on: it is past. */
    this.past = null
    this.ends = new AbortController()
    this._build()
    const on = (type, handler) => runs.addEventListener(type, handler, { signal: this.ends.signal })
    on('change', (event) => event.detail === this.name && this._render())
    on('place', (event) => isPlaceOf(event.detail, this.node) && this._show(event.detail.run))
    on('online', () => (runs.online ? this._find() : this._render()))
    prompts.addEventListener('failure', () => this._render(), { signal: this.ends.signal })
    this._render()
    // The node is being made: its properties and links are there when the graph has been read.
    setTimeout(() => this._find())
  }

  destroy() {
    this.ends.abort()
  }

  /**
   * Show the first line that the node had to say when it ran, until the run moves or changes its state. The others are
   * what the state's own hint says. `again`: it did not run, ComfyUI repeats what it said when it did.
   */
  say(lines, again) {
    this.said = again ? TEXT.queuedAgain : lines[0]
    this.saidIn = stateOf(runs.get(this.name))
    this._render()
  }

  /** Find out which run is this node's: the server's word first, then the workflow's, then the graph's. */
  async _find() {
    if (this.ends.signal.aborted) return
    const { runs: known, places } = await runs.list()
    if (this.ends.signal.aborted) return
    const exists = (name) => known.some((status) => status.run === name)
    // A template that is opened anew has the workflow's id, but not the run that was trained when it was open before.
    const ours = (place) => isPlaceOf(place, this.node) && leadsTo(this.node, place.run)
    const placed = places.filter(ours).map((place) => place.run)
    const name = [...placed, this.name, keptRun(this.node), runNamedUpstream(this.node)].find(exists)
    if (name) {
      this._show(name)
      await runs.load(name)
    }
    this._render()
  }

  _show(name) {
    if (this.name === name) return
    this.name = name
    this.chart.show(null)
    keepRun(this.node, name)
    this._render()
  }

  _build() {
    this.element = make('div')
    // Nodes 2.0 watches the size of what is in a node: this root takes the size it is given and passes none on.
    Object.assign(this.element.style, { width: '100%', height: '100%', contain: 'layout size' })
    setMinHeight(this.element, HEIGHT)
    this.root = this.element.attachShadow({ mode: 'open' })
    keepTyping(this.root)
    this.box = make('section', 'panel')
    this.box.setAttribute('aria-label', 'Flux Full Fine-Tune')

    this.progress = make('div', 'progress')
    this.progress.setAttribute('role', 'progressbar')
    this.bar = make('i')
    this.progress.append(this.bar)
    this.chart = new LossChart((first, last) => runs.losses(this.name, first, last))
    this.tools = new Tools(() => this.name)
    this.chart.element.append(this.tools.overlay)

    this.facts = {}
    const facts = make('dl')
    for (const key of FACTS) {
      this.facts[key] = make('dd')
      const group = make('div')
      group.append(this.facts[key], make('dt', '', TEXT[key]))
      facts.append(group)
    }
    this.line = make('p', 'line')
    this.hint = make('p', 'hint')
    this.log = button('worker-log link', TEXT.log, TEXT.logTip, () => showLog(this.root, this.name))
    const words = make('div', 'words')
    words.append(this.log, this.line, this.hint) // in sight however much there is to say
    this.box.append(this._head(), this.progress, this.chart.element, facts, this.tools.element, words)
    this.root.append(make('style', '', STYLE), this.box)
  }

  _head() {
    this.state = make('span', 'state')
    this.state.setAttribute('role', 'status')
    this.runName = make('span', 'run-name')
    const ask = (action) => () => this.name && halt(this.name, action)
    this.pause = button('pause', TEXT.pause, TEXT.pauseTip, ask('pause'))
    this.resume = button('resume', TEXT.resume, TEXT.resumeTip, () => this.name && resume(this.name))
    this.stop = button('stop', TEXT.stop, TEXT.stopTip, ask('stop'))
    const head = make('header')
    head.append(make('i', 'dot'), this.state, this.runName, this.pause, this.resume, this.stop)
    return head
  }

  _render() {
    const run = runs.get(this.name)
    const status = run?.status ?? {}
    const state = stateOf(run)
    const failure = this._failure(state)
    const shown = failure && state === 'none' ? 'failed' : state
    this.box.dataset.state = runs.online ? shown : 'offline'
    setText(this.state, failure && state === 'none' ? TEXT.notStarted : TEXT.states[state] ?? state)
    setText(this.runName, run ? this.name : '')
    this.runName.title = this.name

    const busy = BUSY.includes(state)
    // What it said of another state is past; the end of a run may be heard of after its words.
    if (busy || (state !== this.saidIn && state !== 'finished')) this.said = ''
    const asked = run?.request ?? ''
    this.resume.hidden = busy || !RESUMABLE.includes(state)
    this.pause.hidden = !this.resume.hidden
    this.resume.disabled = !runs.online || asked === 'stop'
    this.pause.disabled = !runs.online || !busy || asked !== ''
    this.stop.disabled = !runs.online || !(busy || state === 'paused' || status.worker) || asked === 'stop'
    this.tools.render(run, state, runs.online)

    const share = status.target > 0 ? Math.min(1, status.step / status.target) : 0
    this.bar.style.width = `${share * 100}%`
    this.progress.setAttribute('aria-valuenow', String(Math.round(share * 100)))

    const loss = this.chart.draw(run?.losses.bins ?? [], run?.validation, run?.losses.age)
    for (const [key, text] of Object.entries(factsOf(status, loss, busy))) setText(this.facts[key], text)
    this._say(run, state, asked, failure)
  }

  /** Why the newest prompt did not come to train this node's run, in words; empty: it did, or the run moves again. */
  _failure(state) {
    const failure = prompts.failureAt(this.node)
    if (BUSY.includes(state) && failure && !failure.own) this.past = prompts.failure
    if (!failure || BUSY.includes(state) || this.past === prompts.failure) return ''
    return failure.own ? failure.why : TEXT.endedBefore(failure.at, failure.why)
  }

  /** The last lines: what went wrong, else what is written, was asked for, is done, the node said; what to do next. */
  _say(run, state, asked, failure) {
    const broken = ['failed', 'interrupted'].includes(state)
    const error = run?.requestFailed || failure || (broken && run?.status?.error) || ''
    const done = { pause: 'paused', stop: 'stopped' }[asked] === state
    const wish = done ? '' : { pause: TEXT.pausing, stop: TEXT.stopping }[asked]
    const writes = writingOf(run?.status)
    const now = runs.online ? error || writes || wish || run?.told || run?.note || '' : TEXT.offline
    const hint = now && now !== failure ? '' : hintOf(run, state)
    const text = now || this.said || hint
    this.line.classList.toggle('is-error', error !== '' && text === error)
    setText(this.line, text)
    this.line.title = text
    setText(this.hint, text === hint ? '' : hint)
    this.log.hidden = !broken
  }
}
