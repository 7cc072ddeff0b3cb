// Small helpers for elements.

export function make(tag, className = '', text = '') {
  const element = document.createElement(tag)
  if (className) element.className = className
  if (text) element.textContent = text
  return element
}

/** Change text only where it differs: a live region is read aloud, and a selection lost, with each change. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text
}

/** What the classic canvas leaves free above and below a DOM widget, out of the widget's own height. */
const MARGINS = 20

/**
 * Give `node` a DOM widget that is there to be looked at: not saved, not sent, not listed among the parameters of the
 * properties panel, and always as wide as its node. `height()` is the least height of its element in pixels, or, `fixed`,
 * its height.
 */
export function addDisplay(node, name, element, height, fixed = false) {
  const whole = () => height() + MARGINS
  const widget = node.addDOMWidget(name, `flux_fft_${name}`, element, {
    serialize: false,
    hideOnZoom: false,
    hideInPanel: true,
    getValue: () => undefined,
    setValue: () => {},
    getMinHeight: whole,
    ...(fixed ? { getMaxHeight: whole } : {}),
  })
  widget.serialize = false
  // Whoever draws a widget somewhere else may leave the width it had there, and that is taken before the node's.
  Object.defineProperty(widget, 'width', { get: () => undefined, set: () => {}, configurable: true })
  return widget
}

/** The root of a DOM widget is at least this high: the classic canvas reads the property, Nodes 2.0 lays out the rest. */
export function setMinHeight(element, pixels) {
  element.style.minHeight = `${pixels}px`
  element.style.setProperty('--comfy-widget-min-height', `${pixels}px`)
}

/** A button with a text; `tip` is shown on hover and read aloud. */
export function button(className, text, tip, onClick) {
  const element = make('button', className, text)
  element.type = 'button'
  if (tip) element.title = tip
  element.addEventListener('click', onClick)
  return element
}

/**
 * Keep what is typed and pasted into the fields of `root` from the canvas, whose shortcuts listen on the whole page.
 */
export function keepTyping(root) {
  for (const type of ['keydown', 'keyup', 'keypress', 'paste', 'copy', 'cut']) {
    root.addEventListener(type, (event) => {
      if (event.composedPath()[0]?.matches?.('input, textarea, select, [data-keys]')) event.stopPropagation()
    })
  }
}
