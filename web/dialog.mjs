// A dialog inside a shadow root: it lies above everything, takes the keyboard, and ends with Escape.

import { button, make } from './dom.mjs'
import { runs } from './store.mjs'
import { TEXT } from './strings.mjs'

/** Show `content` under a title, in the shadow root `root`. Returns the dialog; it removes itself when it is closed. */
export function showDialog(root, title, content, className = '') {
  const dialog = make('dialog', className)
  dialog.setAttribute('aria-label', title)
  const head = make('header')
  head.append(make('h2', '', title), button('close', TEXT.close, '', () => dialog.close()))
  dialog.append(head, content)
  dialog.addEventListener('close', () => dialog.remove())
  dialog.addEventListener('click', (event) => event.target === dialog && dialog.close())
  dialog.addEventListener('keydown', (event) => event.stopPropagation())
  root.append(dialog)
  dialog.showModal()
  return dialog
}

/** Show the end of the worker's log. */
export async function showLog(root, name) {
  const text = make('pre', 'log-text')
  text.tabIndex = 0
  showDialog(root, TEXT.logTitle(name), text, 'log-dialog')
  try {
    text.textContent = (await runs.fetch(name, 'log')).text
    text.scrollTop = text.scrollHeight
  } catch (error) {
    text.textContent = error.message
  }
}
