// What a node had to say when it ran ("encoded 16 pictures, 2 without caption"), or why it failed, as lines on the node.
// The widget is made with the first words, so that a graph that has not run stays small.

import { addDisplay, make, setMinHeight } from './dom.mjs'
import { SAID_STYLE } from './style.mjs'

const LINE = 16
/** More than these are scrolled: the doctor's report, and all that Start and Training Pictures usually say, are not. */
const MOST_LINES = 36
/** Name of the widget in which the classic canvas shows a node's pictures. */
const PICTURE = '$$canvas-image-preview'

/** Lines of an `executed` message, or null where it has none. */
export function linesOf(output) {
  const text = output?.text
  const lines = (Array.isArray(text) ? text : [text]).filter((line) => typeof line === 'string')
    .flatMap((line) => line.split('\n')).filter((line) => line.trim())
  return lines.length ? lines : null
}

/** Show `lines` on a node that has no panel. */
export function showLines(node, lines) {
  const said = (node.fluxFFTSaid ??= new Said(node))
  said.show(lines)
}

/** Show why a node that has no panel failed; empty: it did not, or that is past. */
export function showError(node, why) {
  if (why) node.fluxFFTSaid ??= new Said(node)
  node.fluxFFTSaid?.fail(why)
}

/** What it said, or why it failed, is past. */
export function forgetLines(node) {
  node.fluxFFTSaid?.forget()
}

class Said {
  constructor(node) {
    this.node = node
    this.lines = 1
    this.words = []
    this.error = ''
    this.size = [...node.size]
    this.element = make('div')
    Object.assign(this.element.style, { width: '100%', height: '100%', contain: 'layout size' })
    const root = this.element.attachShadow({ mode: 'open' })
    this.box = make('div', 'said')
    this.box.setAttribute('role', 'status')
    root.append(make('style', '', SAID_STYLE), this.box)
    this.widget = addDisplay(node, 'said', this.element, () => this.height, true)
  }

  get height() {
    return this.lines * LINE + 16
  }

  show(lines) {
    this.words = lines
    this._draw()
  }

  /** Why it failed stands in the place of what it said, and gives it back. */
  fail(why) {
    if (this.error === why) return
    this.error = why
    if (why || this.words.length) this._draw()
    else this._remove()
  }

  forget() {
    this.words = []
    this.error = ''
    this._remove()
  }

  _draw() {
    const lines = this.error ? this.error.split('\n') : this.words
    this.box.classList.toggle('is-error', this.error !== '')
    this.box.replaceChildren(...lines.map((line) => make('div', '', line)))
    this.box.title = lines.join('\n')
    // About how many rows the lines wrap to: the element cannot be measured where it is not drawn.
    const perRow = Math.max(20, (this.node.size[0] - 40) / 6.2)
    const rows = lines.reduce((sum, line) => sum + Math.ceil(line.length / perRow), 0)
    this.lines = Math.min(MOST_LINES, rows)
    setMinHeight(this.element, this.height)
    this._goAbovePicture()
    const [width, height] = this.node.computeSize()
    this.node.setSize([Math.max(this.node.size[0], width), Math.max(this.node.size[1], height)])
    this.node.setDirtyCanvas?.(true, true)
  }

  /** The node is again as it was before. */
  _remove() {
    const { node, widget } = this
    node.widgets.splice(node.widgets.indexOf(widget), 1)
    widget.onRemove?.()
    node.fluxFFTSaid = null
    node.setSize(this.size)
    node.setDirtyCanvas?.(true, true)
  }

  /** Pictures fill what is left of the node below the other widgets: behind one, the lines would hang out of it. */
  _goAbovePicture() {
    const widgets = this.node.widgets
    const picture = widgets.findIndex((widget) => widget.name === PICTURE)
    const own = widgets.indexOf(this.widget)
    if (picture < 0 || own < picture) return
    widgets.splice(own, 1)
    widgets.splice(picture, 0, this.widget)
  }
}
