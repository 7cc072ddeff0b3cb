// The curves of a run: loss raw faint and smoothed bold, validation loss, learning rate. SVG in a stretched viewBox with
// strokes that do not scale: crisp at every pixel ratio and canvas zoom, coloured by style sheet, and with nothing to
// measure (measuring a node's content from inside it makes Nodes 2.0 grow the node without end).

import { listenToPointer } from './chart_pointer.mjs'
import { button, make, setText } from './dom.mjs'
import { count, figure } from './format.mjs'
import { inside, isLogarithmic, logTicks, nearest, smooth, smoothingShare, ticks, valueRange } from './losses.mjs'
import { TEXT } from './strings.mjs'

const SVG = 'http://www.w3.org/2000/svg'
const SIDE = 1000

export class LossChart {
  constructor() {
    this.bins = []
    this.validation = []
    /** Steps [first, last] that are shown; null: all. */
    this.zoom = null
    /** Whether the axis is logarithmic; null: where the values span more than a decade. */
    this.log = null
    this.hidden = new Set()
    this.element = make('div', 'chart')
    this.empty = make('div', 'chart-empty', TEXT.chartEmpty)
    this.plot = make('div', 'plot')
    this.plot.tabIndex = 0
    this.plot.dataset.keys = ''
    this.plot.setAttribute('role', 'group')
    this.plot.setAttribute('aria-label', TEXT.chartKeys)
    this.svg = document.createElementNS(SVG, 'svg')
    this.svg.setAttribute('viewBox', `0 0 ${SIDE} ${SIDE}`)
    this.svg.setAttribute('preserveAspectRatio', 'none')
    this.svg.setAttribute('role', 'img')
    for (const name of ['grid', 'rate', 'raw', 'bold', 'validation', 'dots']) this[`${name}Path`] = this._path(name)
    this.cursor = make('i', 'cursor')
    this.band = make('i', 'band')
    this.tip = make('div', 'chart-tip')
    this.tip.setAttribute('role', 'status')
    this.plot.append(this.svg, this.cursor, this.band, this.tip)
    this.values = make('div', 'values')
    this.steps = make('div', 'steps')
    this.element.append(this._legend(), this.values, this.plot, this.steps, this.empty)
    listenToPointer(this)
    this.draw([])
  }

  _path(name) {
    const path = document.createElementNS(SVG, 'path')
    path.setAttribute('class', name)
    this.svg.append(path)
    return path
  }

  _legend() {
    const legend = make('div', 'legend')
    this.marks = {}
    for (const [name, text] of [['loss', TEXT.loss], ['validation', TEXT.validation], ['rate', TEXT.rate]]) {
      const mark = button(`mark mark-${name}`, text, '', () => {
        this.hidden.has(name) ? this.hidden.delete(name) : this.hidden.add(name)
        this.redraw()
      })
      this.marks[name] = mark
      legend.append(mark)
    }
    this.logButton = button('mark log', TEXT.logAxis, TEXT.logAxisTip, () => {
      this.log = !this.isLog
      this.redraw()
    })
    legend.append(this.logButton)
    return legend
  }

  /** Draw bins (see losses.mjs) and validation losses ([step, loss]). Returns the last smoothed loss, or null. */
  draw(bins, validation = []) {
    this.bins = bins
    this.validation = validation
    return this.redraw()
  }

  redraw() {
    const { bins } = this
    this.element.classList.toggle('is-empty', bins.length < 2)
    this.smoothed = smooth(bins, smoothingShare(bins))
    const last = this.smoothed.length ? this.smoothed[this.smoothed.length - 1] : null
    if (bins.length < 2) return last
    const [first, end] = this._span()
    const [from, to] = inside(bins, first, end)
    const shown = bins.slice(from, to)
    const smoothed = this.smoothed.slice(from, to)
    const losses = this.hidden.has('loss') ? [] : shown
    const checks = this.hidden.has('validation') ? [] : this.validation.filter(([step]) => step >= first && step <= end)
    this._scale(shown, smoothed, checks, first, end)
    this._drawLosses(losses, this.hidden.has('loss') ? [] : smoothed)
    this._drawValidation(checks)
    this._drawRate(this.hidden.has('rate') ? [] : shown)
    this._drawAxes(first, end)
    for (const [name, mark] of Object.entries(this.marks)) mark.setAttribute('aria-pressed', !this.hidden.has(name))
    this.marks.validation.hidden = !this.validation.length
    this.marks.rate.hidden = !bins.some((bin) => Number.isFinite(bin[5]))
    this.logButton.setAttribute('aria-pressed', this.isLog)
    this.svg.setAttribute('aria-label', `${TEXT.loss} ${figure(this.smoothed[0])} - ${figure(last)}`)
    return last
  }

  _span() {
    const [first, last] = [this.bins[0][0], this.bins[this.bins.length - 1][0]]
    if (!this.zoom || this.zoom[0] >= last || this.zoom[1] <= first) return [first, last]
    return [Math.max(first, this.zoom[0]), Math.min(last, this.zoom[1])]
  }

  _scale(shown, smoothed, checks, first, end) {
    const points = checks.map(([step, loss]) => [step, loss, loss, loss, 1])
    const [low, high] = valueRange([...shown, ...points], [...smoothed, ...checks.map((check) => check[1])])
    this.isLog = low > 0 && (this.log ?? isLogarithmic(low, high))
    const at = this.isLog ? (value) => Math.log(Math.max(value, low / 10)) : (value) => value
    this.range = [low, high]
    this.x = (step) => round(((step - first) / (end - first)) * SIDE)
    this.y = (value) => round((1 - (at(value) - at(low)) / (at(high) - at(low))) * SIDE)
  }

  _drawLosses(bins, smoothed) {
    let upwards = false
    const raw = bins.flatMap((bin) => {
      if (bin[2] === bin[3]) return [`${this.x(bin[0])},${this.y(bin[1])}`]
      upwards = !upwards
      const ends = upwards ? [bin[2], bin[3]] : [bin[3], bin[2]]
      return ends.map((value) => `${this.x(bin[0])},${this.y(value)}`)
    })
    this.rawPath.setAttribute('d', line(raw))
    this.boldPath.setAttribute('d', line(smoothed.map((value, i) => `${this.x(bins[i][0])},${this.y(value)}`)))
  }

  _drawValidation(checks) {
    const points = checks.map(([step, loss]) => `${this.x(step)},${this.y(loss)}`)
    this.validationPath.setAttribute('d', line(points))
    this.dotsPath.setAttribute('d', points.map((point) => `M${point}h0`).join(''))
  }

  /** On a scale of its own, from zero: what matters is its shape, and its values are told under the pointer. */
  _drawRate(bins) {
    const known = bins.filter((bin) => Number.isFinite(bin[5]))
    const most = known.reduce((high, bin) => Math.max(high, bin[5]), 0) * 1.06
    const points = known.map((bin) => `${this.x(bin[0])},${round((1 - bin[5] / most) * SIDE)}`)
    this.ratePath.setAttribute('d', most > 0 ? line(points) : '')
  }

  _drawAxes(first, end) {
    const [low, high] = this.range
    const marks = this.isLog ? logTicks(low, high) : ticks(low, high)
    this.gridPath.setAttribute('d', marks.map((value) => `M0,${this.y(value)}H${SIDE}`).join(''))
    this.values.replaceChildren(...marks.map((value) => {
      const label = make('span', '', figure(value))
      label.style.top = `${this.y(value) / (SIDE / 100)}%`
      return label
    }))
    this.steps.replaceChildren(
      make('span', '', count(first)), make('span', '', TEXT.step), make('span', '', count(end)))
  }

  // -- under the pointer

  /** The step at a share (0..1) of the plot's width. */
  stepAt(share) {
    const [first, end] = this._span()
    return first + share * (end - first)
  }

  /** Tell the values at the step that is nearest to `step`; null: no more. */
  tell(step) {
    const i = step === null || this.bins.length < 2 ? -1 : nearest(this.bins, step)
    this.told = i < 0 ? null : this.bins[i][0]
    this.plot.classList.toggle('is-told', i >= 0)
    if (i < 0) return
    const bin = this.bins[i]
    const raw = bin[4] > 1 ? `${figure(bin[2])} - ${figure(bin[3])}` : figure(bin[1])
    const check = this.validation.filter(([at]) => at <= bin[0]).pop()
    const parts = [`${TEXT.step} ${count(bin[0])}`, `${TEXT.loss} ${raw}`, `${TEXT.smooth} ${figure(this.smoothed[i])}`]
    if (check) parts.push(`${TEXT.validation} ${figure(check[1])}`)
    if (Number.isFinite(bin[5])) parts.push(`${TEXT.rate} ${figure(bin[5])}`)
    const left = this.x(bin[0]) / (SIDE / 100)
    this.cursor.style.left = `${left}%`
    this.tip.classList.toggle('is-left', left > 50)
    setText(this.tip, parts.join('\n'))
  }

  /** Show the steps between two, in any order; null: all. */
  show(zoom) {
    const [first, last] = zoom ? [Math.min(...zoom), Math.max(...zoom)] : [0, 0]
    const few = zoom && this.bins.filter((bin) => bin[0] >= first && bin[0] <= last).length < 2
    if (few) return
    this.zoom = zoom ? [first, last] : null
    this.redraw()
  }
}

function line(points) {
  return points.length ? `M${points.join('L')}` : ''
}

function round(value) {
  return Math.round(value * 10) / 10
}
