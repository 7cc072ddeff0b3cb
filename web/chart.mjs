// The curves of a run: loss raw faint and smoothed bold, validation loss, learning rate. SVG in a stretched viewBox with
// strokes that do not scale: crisp at every pixel ratio and canvas zoom, coloured by style sheet, and with nothing to
// measure (measuring a node's content from inside it makes Nodes 2.0 grow the node without end).

import { Detail } from './chart_detail.mjs'
import { listenToPointer } from './chart_pointer.mjs'
import { button, make, setText } from './dom.mjs'
import { count, figure } from './format.mjs'
import { inside, isLogarithmic, logTicks, nearest, smooth, smoothingShare, ticks, valueRange } from './losses.mjs'
import { TEXT } from './strings.mjs'

const SVG = 'http://www.w3.org/2000/svg'
const SIDE = 1000

/** The curves that can be hidden, each with its text and what there is to know of it. */
const CURVES = [['raw', TEXT.raw, TEXT.rawTip], ['smooth', TEXT.smooth, TEXT.smoothTip], ['rate', TEXT.rate, TEXT.rateTip],
  ['validation', TEXT.fixedNoise, TEXT.validationTip]]

export class LossChart {
  /** `ask(first, last)` resolves to the bins of these steps alone; without it the curve stays as it is given. */
  constructor(ask = null) {
    this.bins = []
    /** `bins`, in single steps where these were asked for: what is drawn. */
    this.points = []
    this.age = 0
    this.width = 0
    /** The step whose values are told; null: none. */
    this.told = null
    this.detail = new Detail(ask, () => this.redraw())
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
    legend.setAttribute('role', 'group')
    legend.setAttribute('aria-label', TEXT.legend)
    const marks = make('div', 'marks')
    this.marks = {}
    for (const [name, text, tip] of CURVES) {
      this.marks[name] = button(`mark mark-${name}`, text, tip, () => {
        this.hidden.has(name) ? this.hidden.delete(name) : this.hidden.add(name)
        this.redraw()
      })
      marks.append(this.marks[name])
    }
    this.allButton = button('mark all', TEXT.allSteps, TEXT.allStepsTip, () => this.show(null))
    this.logButton = button('mark log', TEXT.logAxis, TEXT.logAxisTip, () => {
      this.log = !this.isLog
      this.redraw()
    })
    legend.append(marks, this.allButton, this.logButton)
    return legend
  }

  /**
   * Draw bins (see losses.mjs) and validation losses ([step, loss]). `age`: of the curve, see there. Returns the last
   * smoothed loss, or null.
   */
  draw(bins, validation = [], age = 0) {
    Object.assign(this, { bins, validation, age })
    return this.redraw()
  }

  redraw() {
    this.points = this.zoom ? this.detail.within(this.bins, this.zoom, this.width, this.age) : this.bins
    const bins = this.points
    this.element.classList.toggle('is-empty', bins.length < 2)
    this.smoothed = smooth(bins, smoothingShare(bins))
    const last = this.smoothed.length ? this.smoothed[this.smoothed.length - 1] : null
    if (bins.length < 2) return last
    const [first, end] = this._span()
    const [from, to] = inside(bins, first, end)
    const shown = bins.slice(from, to)
    const smoothed = this.smoothed.slice(from, to)
    const checks = this.hidden.has('validation') ? [] : this.validation.filter(([step]) => step >= first && step <= end)
    this._scale(shown, smoothed, checks, first, end)
    this._drawLosses(this.hidden.has('raw') ? [] : shown, this.hidden.has('smooth') ? [] : smoothed, shown)
    this._drawValidation(checks)
    this._drawRate(this.hidden.has('rate') ? [] : shown)
    this._drawAxes(first, end)
    for (const [name, mark] of Object.entries(this.marks)) mark.setAttribute('aria-pressed', !this.hidden.has(name))
    // They keep their places, so that nothing moves when the first of them comes.
    this.marks.validation.classList.toggle('is-none', !this.validation.length)
    this.marks.rate.classList.toggle('is-none', !bins.some((bin) => Number.isFinite(bin[5])))
    this.allButton.classList.toggle('is-none', !this.zoom)
    this.logButton.setAttribute('aria-pressed', this.isLog)
    if (this.told !== null) this.tell(this.told) // what lies there may be another bin now
    this.svg.setAttribute('aria-label', `${TEXT.loss} ${figure(this.smoothed[0])} - ${figure(last)}`)
    return last
  }

  _span() {
    const [first, last] = [this.points[0][0], this.points[this.points.length - 1][0]]
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

  /** The raw curve of `bins`, and `smoothed` over the bins `shown`. An empty one is not to be seen. */
  _drawLosses(bins, smoothed, shown) {
    let upwards = false
    const raw = bins.flatMap((bin) => {
      if (bin[2] === bin[3]) return [`${this.x(bin[0])},${this.y(bin[1])}`]
      upwards = !upwards
      const ends = upwards ? [bin[2], bin[3]] : [bin[3], bin[2]]
      return ends.map((value) => `${this.x(bin[0])},${this.y(value)}`)
    })
    this.rawPath.setAttribute('d', line(raw))
    this.boldPath.setAttribute('d', line(smoothed.map((value, i) => `${this.x(shown[i][0])},${this.y(value)}`)))
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
    const i = step === null || this.points.length < 2 ? -1 : nearest(this.points, step)
    this.told = i < 0 ? null : this.points[i][0]
    this.plot.classList.toggle('is-told', i >= 0)
    if (i < 0) return
    const bin = this.points[i]
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
    if (zoom && Math.floor(last) - Math.ceil(first) < 1) return // fewer than two steps
    this.zoom = zoom ? [first, last] : null
    this.width = zoom ? this.plot.clientWidth : 0 // measured by the user's act only, see above
    if (!zoom) this.detail.forget()
    this.redraw()
  }
}

function line(points) {
  return points.length ? `M${points.join('L')}` : ''
}

function round(value) {
  return Math.round(value * 10) / 10
}
