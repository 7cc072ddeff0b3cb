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

/** The root of a DOM widget is at least this high: the classic canvas reads the property, Nodes 2.0 lays out the rest. */
export function setMinHeight(element, pixels) {
  element.style.minHeight = `${pixels}px`
  element.style.setProperty('--comfy-widget-min-height', `${pixels}px`)
}
