// What an export is asked for: the widgets of the Export node itself, so that they are the same in both places.

import { button, make } from './dom.mjs'
import { TEXT } from './strings.mjs'

const NODE = 'FluxFFTExport'

/** `done(inputs)` is called with the inputs of an Export node, or null if the user gave up. */
export function exportForm(possible, done) {
  const form = make('form', 'ask')
  const fields = Object.entries(widgets()).map(([name, spec]) => [name, ...field(name, spec)])
  for (const [, label] of fields) form.append(label)
  const go = button('go', TEXT.tab.exportGo, '', () => {})
  go.type = 'submit'
  go.disabled = !possible
  const row = make('div', 'row')
  row.append(button('cancel', TEXT.cancel, '', () => done(null)), go)
  form.append(row)
  form.addEventListener('submit', (event) => {
    event.preventDefault()
    done(Object.fromEntries(fields.map(([name, , read]) => [name, read()])))
  })
  form.addEventListener('keydown', (event) => event.key === 'Escape' && done(null))
  return form
}

/** The node's inputs that are widgets, by name, as the server describes them. */
function widgets() {
  const { required = {}, optional = {} } = window.LiteGraph.registered_node_types[NODE]?.nodeData?.input ?? {}
  const all = Object.entries({ ...required, ...optional })
  return Object.fromEntries(all.filter(([, spec]) => Array.isArray(spec[0])
    || ['STRING', 'COMBO', 'BOOLEAN', 'INT', 'FLOAT'].includes(spec[0])))
}

/** The label with its field, and how to read it. */
function field(name, [type, about = {}]) {
  const choices = Array.isArray(type) ? type : about.options
  const label = make('label', { STRING: 'wide', BOOLEAN: 'check' }[type] ?? '', name.replaceAll('_', ' '))
  if (about.tooltip) label.title = about.tooltip
  const input = make(choices ? 'select' : 'input')
  input.name = name
  label.append(input)
  if (choices) {
    input.append(...choices.map((choice) => make('option', '', choice)))
    input.value = about.default ?? choices[0]
    return [label, () => input.value]
  }
  if (type === 'BOOLEAN') {
    input.type = 'checkbox'
    input.checked = about.default === true
    return [label, () => input.checked]
  }
  if (type === 'STRING') {
    input.type = 'text'
    input.value = about.default ?? ''
    return [label, () => input.value]
  }
  Object.assign(input, { type: 'number', min: about.min, max: about.max, step: about.step ?? 'any', value: about.default })
  return [label, () => Number(input.value)]
}
