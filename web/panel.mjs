// The panel on a Train Steps node: a DOM widget that shows one run and offers Pause and Stop.

import { LossChart } from './chart.mjs'
import { addDisplay, make, setMinHeight, setText } from './dom.mjs'
import { count, duration, figure, seconds } from './format.mjs'
import { isPlaceOf, keepRun, keptRun, leadsTo, runNamedUpstream } from './graph.mjs'
import { runs } from './store.mjs'
import { TEXT } from './strings.mjs'
import { STYLE } from './style.mjs'

const WIDTH = 340
const HEIGHT = 312
const BUSY = ['preparing', 'training', 'held']

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
    this.ends = new AbortController()
    this._build()
    const on = (type, handler) => runs.addEventListener(type, handler, { signal: this.ends.signal })
    on('change', (event) => event.detail === this.name && this._render())
    on('place', (event) => isPlaceOf(event.detail, this.node) && this._show(event.detail.run))
    on('online', () => (runs.online ? this._find() : this._render()))
    this._render()
    // The node is being made: its properties and links are there when the graph has been read.
    setTimeout(() => this._find())
  }

  destroy() {
    this.ends.abort()
  }

  /**
   * Show the first line that the node had to say when it ran, until the run moves again. The others are what the
   * state's own hint says. `again`: it did not run, ComfyUI repeats what it said when it did.
   */
  say(lines, again) {
    this.said = again ? TEXT.queuedAgain : lines[0]
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
    keepRun(this.node, name)
    this._render()
  }

  _build() {
    this.element = make('div')
    // Nodes 2.0 watches the size of what is in a node: this root takes the size it is given and passes none on.
    Object.assign(this.element.style, { width: '100%', height: '100%', contain: 'layout size' })
    setMinHeight(this.element, HEIGHT)
    const root = this.element.attachShadow({ mode: 'open' })
    const style = make('style', '', STYLE)
    this.box = make('section', 'panel')

    this.state = make('span', 'state')
    this.state.setAttribute('role', 'status')
    this.runName = make('span', 'run-name')
    this.pause = this._button('pause', TEXT.pause, TEXT.pauseTip)
    this.stop = this._button('stop', TEXT.stop, TEXT.stopTip)
    const head = make('header')
    head.append(make('i', 'dot'), this.state, this.runName, this.pause, this.stop)

    this.progress = make('div', 'progress')
    this.progress.setAttribute('role', 'progressbar')
    this.bar = make('i')
    this.progress.append(this.bar)
    this.chart = new LossChart()

    this.facts = {}
    const facts = make('dl')
    for (const key of ['step', 'smoothed', 'perStep', 'left']) {
      this.facts[key] = make('dd')
      const group = make('div')
      group.append(this.facts[key], make('dt', '', TEXT[key]))
      facts.append(group)
    }
    this.line = make('p', 'line')
    this.hint = make('p', 'hint')
    this.box.append(head, this.progress, this.chart.element, facts, this.line, this.hint)
    root.append(style, this.box)
  }

  _button(action, text, tip) {
    const button = make('button', action, text)
    button.type = 'button'
    button.title = tip
    button.addEventListener('click', () => this.name && runs.ask(this.name, action))
    return button
  }

  _render() {
    const run = runs.get(this.name)
    const status = run?.status ?? {}
    // Paused by the graph itself, which will go on: for the pictures of a preview.
    const state = status.state === 'paused' && run.held && !run.request ? 'held' : (status.state ?? 'none')
    this.box.dataset.state = runs.online ? state : 'offline'
    setText(this.state, TEXT.states[state] ?? state)
    setText(this.runName, run ? this.name : '')
    this.runName.title = this.name

    const busy = BUSY.includes(state)
    if (busy) this.said = ''
    const asked = run?.request ?? ''
    this.pause.disabled = !runs.online || !busy || asked !== ''
    this.stop.disabled = !runs.online || !(busy || state === 'paused' || status.worker) || asked === 'stop'

    const { step = 0, target = 0 } = status
    const share = target > 0 ? Math.min(1, step / target) : 0
    this.bar.style.width = `${share * 100}%`
    this.progress.setAttribute('aria-valuenow', String(Math.round(share * 100)))

    const loss = this.chart.draw(run?.losses.bins ?? [])
    setText(this.facts.step, run ? (target ? `${count(step)} / ${count(target)}` : count(step)) : '')
    setText(this.facts.smoothed, figure(loss ?? status.loss))
    setText(this.facts.perStep, seconds(status.seconds_per_step))
    setText(this.facts.left, busy ? duration(status.seconds_left) : '')
    this._say(run, state, asked)
  }

  /** The last lines: what went wrong, else what was asked for, what it does, what the node said; what to do next. */
  _say(run, state, asked) {
    const error = run?.requestFailed || (['failed', 'interrupted'].includes(state) && run?.status?.error) || ''
    const done = { pause: 'paused', stop: 'stopped' }[asked] === state
    const wish = done ? '' : { pause: TEXT.pausing, stop: TEXT.stopping }[asked]
    const now = runs.online ? error || wish || run?.note || '' : TEXT.offline
    const hint = now ? '' : this._hint(run?.status, state)
    const text = now || this.said || hint
    this.line.classList.toggle('is-error', error !== '' && text === error)
    setText(this.line, text)
    this.line.title = text
    setText(this.hint, text === hint ? '' : hint)
  }

  _hint(status, state) {
    if (state === 'training') return savingHint(status)
    if (state === 'interrupted') return TEXT.goesOnFrom(count(status.resume_step ?? 0))
    if (state === 'finished') return TEXT.atTarget(count(status.target), Boolean(status.worker))
    return TEXT.hints[state] ?? ''
  }
}

/** When the run was saved, and when it will be. */
function savingHint(status) {
  const last = status.save_point_step ? TEXT.saved(count(status.save_point_step)) : TEXT.unsaved
  const times = []
  const before = (seconds) => !Number.isFinite(status.seconds_left) || seconds < status.seconds_left
  if (Number.isFinite(status.save_in) && before(status.save_in)) times.push(TEXT.saveIn(duration(status.save_in)))
  if (status.save_at && status.save_at < status.target) times.push(TEXT.saveAt(count(status.save_at)))
  return TEXT.nextSave(last, times)
}
