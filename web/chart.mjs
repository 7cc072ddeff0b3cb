// The loss curve: raw faint, smoothed bold. SVG in a stretched viewBox with strokes that do not scale: crisp at every
// pixel ratio and canvas zoom, coloured by style sheet, and with nothing to measure (measuring a node's content from
// inside it makes Nodes 2.0 grow the node without end).

import { make } from './dom.mjs'
import { count, figure } from './format.mjs'
import { isLogarithmic, logTicks, smooth, smoothingShare, ticks, valueRange } from './losses.mjs'
import { TEXT } from './strings.mjs'

const SVG = 'http://www.w3.org/2000/svg'
const SIDE = 1000

export class LossChart {
  constructor() {
    this.element = make('div', 'chart')
    this.empty = make('div', 'chart-empty', TEXT.chartEmpty)
    this.plot = make('div', 'plot')
    this.svg = document.createElementNS(SVG, 'svg')
    this.svg.setAttribute('viewBox', `0 0 ${SIDE} ${SIDE}`)
    this.svg.setAttribute('preserveAspectRatio', 'none')
    this.svg.setAttribute('role', 'img')
    this.grid = this._path('grid')
    this.raw = this._path('raw')
    this.bold = this._path('bold')
    this.plot.append(this.svg)
    this.values = make('div', 'values')
    this.steps = make('div', 'steps')
    this.element.append(this.values, this.plot, this.steps, this.empty)
    this.draw([])
  }

  _path(name) {
    const path = document.createElementNS(SVG, 'path')
    path.setAttribute('class', name)
    this.svg.append(path)
    return path
  }

  /** Draw bins (see losses.mjs). Returns the last smoothed loss, or null. */
  draw(bins) {
    this.element.classList.toggle('is-empty', bins.length < 2)
    const smoothed = smooth(bins, smoothingShare(bins))
    const last = smoothed.length ? smoothed[smoothed.length - 1] : null
    if (bins.length < 2) return last
    const [low, high] = valueRange(bins, smoothed)
    const first = bins[0][0]
    const span = bins[bins.length - 1][0] - first
    const x = (step) => round(((step - first) / span) * SIDE)
    const log = isLogarithmic(low, high)
    const at = log ? (value) => Math.log(Math.max(value, low / 10)) : (value) => value
    const y = (value) => round((1 - (at(value) - at(low)) / (at(high) - at(low))) * SIDE)

    let upwards = false
    const raw = bins.flatMap((bin) => {
      if (bin[2] === bin[3]) return [`${x(bin[0])},${y(bin[1])}`]
      upwards = !upwards
      const ends = upwards ? [bin[2], bin[3]] : [bin[3], bin[2]]
      return ends.map((value) => `${x(bin[0])},${y(value)}`)
    })
    this.raw.setAttribute('d', `M${raw.join('L')}`)
    this.bold.setAttribute('d', `M${smoothed.map((value, i) => `${x(bins[i][0])},${y(value)}`).join('L')}`)

    const marks = log ? logTicks(low, high) : ticks(low, high)
    this.grid.setAttribute('d', marks.map((value) => `M0,${y(value)}H${SIDE}`).join(''))
    this.values.replaceChildren(...marks.map((value) => {
      const label = make('span', '', figure(value))
      label.style.top = `${y(value) / (SIDE / 100)}%`
      return label
    }))
    this.steps.replaceChildren(
      make('span', '', count(first)),
      make('span', '', TEXT.step),
      make('span', '', count(first + span)),
    )
    this.svg.setAttribute('aria-label', `${TEXT.loss} ${figure(smoothed[0])} - ${figure(last)}`)
    return last
  }
}

function round(value) {
  return Math.round(value * 10) / 10
}
