// One run in the sidebar: its curve, samples, settings, save points, and what can be done with it.

import { exportRun, halt, isBusy, resume } from './actions.mjs'
import { LossChart } from './chart.mjs'
import { copySettings } from './copy_settings.mjs'
import { showLog } from './dialog.mjs'
import { button, make, setText } from './dom.mjs'
import { BUSY, FACTS, factsOf, hintOf, RESUMABLE, stateOf } from './facts.mjs'
import { bytes, count } from './format.mjs'
import { Gallery } from './gallery.mjs'
import { exportForm } from './export_form.mjs'
import { runs } from './store.mjs'
import { TEXT } from './strings.mjs'

/** Events after which there is another file of the run to show. */
const WRITTEN = ['saved', 'checkpoint', 'exported']

export class RunView {
  /** `goBack()` shows the list of runs. */
  constructor(root, name, goBack) {
    this.root = root
    this.name = name
    this.goBack = goBack
    this.details = null
    this.ends = new AbortController()
    this.element = make('section', 'run')
    this._build()
    const { signal } = this.ends
    runs.addEventListener('change', (event) => event.detail === name && this._render(), { signal })
    runs.addEventListener('news', ({ detail: { run, happened } }) => {
      if (run.name === name && happened.some((event) => WRITTEN.includes(event.type))) this._read()
    }, { signal })
    this._load()
  }

  destroy() {
    this.ends.abort()
  }

  async _load() {
    this._render()
    await Promise.all([runs.load(this.name), this._read()])
    if (!this.ends.signal.aborted) this._render()
  }

  async _read() {
    this.details = await runs.fetch(this.name, 'details').catch(() => this.details)
    if (!this.ends.signal.aborted) this._fill()
  }

  _build() {
    this.back = button('back', `\u2190 ${TEXT.tab.back}`, '', this.goBack)
    this.state = make('span', 'state')
    this.state.setAttribute('role', 'status')
    const head = make('div', 'bar')
    head.append(this.back, make('h2', '', this.name))
    const states = make('div', 'bar')
    states.append(make('i', 'dot'), this.state)

    const ask = (action) => () => halt(this.name, action)
    this.resume = button('resume', TEXT.resume, TEXT.resumeTip, () => resume(this.name))
    this.pause = button('pause', TEXT.pause, TEXT.pauseTip, ask('pause'))
    this.stop = button('stop', TEXT.stop, TEXT.stopTip, ask('stop'))
    this.exporting = button('export', TEXT.tab.export, TEXT.tab.exportTip, () => this._askExport())
    this.copy = button('copy', TEXT.tab.copy, TEXT.tab.copyTip, () => copySettings(this.name))
    this.log = button('worker-log', TEXT.log, TEXT.logTip, () => showLog(this.root, this.name))
    this.delete = button('delete danger', TEXT.tab.delete, '', () => this._askDelete())
    const actions = make('div', 'bar')
    actions.append(this.resume, this.pause, this.stop, this.exporting, this.copy, this.log, this.delete)
    this.asked = make('div')
    this.line = make('p', 'line')
    this.line.setAttribute('role', 'status')

    this.chart = new LossChart((first, last) => runs.losses(this.name, first, last))
    this.facts = {}
    const facts = make('dl', 'facts')
    for (const key of FACTS) {
      this.facts[key] = make('dd')
      const group = make('div')
      group.append(this.facts[key], make('dt', '', TEXT[key]))
      facts.append(group)
    }
    this.gallery = new Gallery(this.root, this.name)
    this.more = make('section')
    this.element.append(head, states, actions, this.asked, this.line, this.chart.element, facts, this.gallery.element,
      this.more)
  }

  _render() {
    const run = runs.get(this.name)
    const status = run?.status ?? {}
    const state = stateOf(run)
    const busy = BUSY.includes(state)
    this.element.dataset.state = state
    setText(this.state, TEXT.states[state] ?? state)
    this.resume.hidden = !RESUMABLE.includes(state)
    this.resume.disabled = this.details?.graph === false
    this.pause.hidden = !busy
    this.stop.hidden = !(busy || status.worker)
    for (const one of [this.pause, this.stop]) one.disabled = Boolean(run?.request)
    this.exporting.disabled = !(status.resume_step > 0) || Boolean(run?.request)
    const loss = this.chart.draw(run?.losses.bins ?? [], run?.validation, run?.losses.age)
    for (const [key, text] of Object.entries(factsOf(status, loss, busy))) {
      setText(this.facts[key], text)
      this.facts[key].parentNode.hidden = !text
    }
    this.gallery.show(run?.samples ?? [])
    const error = run?.requestFailed || (['failed', 'interrupted'].includes(state) && status.error) || ''
    this.line.classList.toggle('is-error', error !== '')
    setText(this.line, error || run?.told || run?.note || (run?.status ? hintOf(run, state) : ''))
  }

  /** What the details say. What was folded out stays so. */
  _fill() {
    const { details } = this
    if (!details) return
    const open = [...this.more.querySelectorAll('details[open] > summary')].map((summary) => summary.textContent)
    this.log.hidden = !details.log
    this.copy.disabled = !details.graph
    this._render()
    const points = make('details')
    points.append(make('summary', '', TEXT.tab.savePoints))
    const rows = [
      ...details.save_points.map((p) => [TEXT.tab.atStep(count(p.step)), TEXT.listed([bytes(p.bytes), when(p.time)])]),
      ...details.checkpoints.map((c) => [c.file, TEXT.listed([bytes(c.bytes), when(c.time)])]),
    ]
    points.append(rows.length ? table('', rows) : make('p', '', TEXT.tab.noSavePoints),
      make('p', '', TEXT.tab.onDisk(bytes(details.bytes))))
    const settings = make('details')
    settings.append(make('summary', '', TEXT.tab.settings), ...settingTables(details.settings))
    this.more.replaceChildren(points, settings)
    if (details.exports.length) {
      const files = make('details')
      files.append(make('summary', '', TEXT.tab.files), table('', details.exports.map((e) =>
        [e.file, TEXT.listed([e.dtype, TEXT.tab.ofTarget(count(e.step)), when(e.t), ...(e.folder ? [e.folder] : [])])])))
      this.more.append(files)
    }
    for (const part of this.more.querySelectorAll('details')) {
      part.open = open.includes(part.querySelector('summary').textContent)
    }
  }

  _askExport() {
    this.asked.replaceChildren(exportForm(this.details?.graph !== false || !isBusy(this.name), async (inputs) => {
      this.asked.replaceChildren()
      if (inputs) await exportRun(this.name, inputs)
      this.exporting.focus()
    }))
    this.asked.querySelector('input')?.focus()
  }

  _askDelete() {
    const live = Boolean(runs.get(this.name)?.status?.worker)
    const form = make('form', 'ask')
    const text = TEXT.tab.deleteAsk(this.name, bytes(this.details?.bytes ?? 0)) + (live ? TEXT.tab.deleteLive : '')
    const keep = button('cancel', TEXT.cancel, '', () => {
      this.asked.replaceChildren()
      this.delete.focus()
    })
    const go = button('go danger', TEXT.tab.deleteGo, '', () => {})
    go.type = 'submit'
    const row = make('div', 'row')
    row.append(keep, go)
    form.append(make('p', '', text), row)
    form.addEventListener('submit', async (event) => {
      event.preventDefault()
      this.asked.replaceChildren()
      try {
        await runs.post(this.name, 'delete', { stop: live })
        runs.forget(this.name)
        this.goBack()
      } catch (error) {
        runs.tell(this.name, '', error)
      }
    })
    this.asked.replaceChildren(form)
    keep.focus()
  }
}

function table(caption, rows) {
  const element = make('table')
  if (caption) element.append(make('caption', '', caption))
  for (const cells of rows) {
    const row = make('tr')
    row.append(...cells.map((cell) => make('td', '', cell)))
    element.append(row)
  }
  return element
}

/** One table for each part of the settings; a list of parts is numbered. */
function settingTables(settings) {
  const parts = Object.entries(settings).filter(([, value]) => value && typeof value === 'object')
  return parts.map(([name, values]) => table(name, Object.entries(values).map(([key, value]) => [
    key.replaceAll('_', ' '), Array.isArray(value) ? TEXT.listed(value.map(said)) || '-' : said(value)])))
}

function said(value) {
  if (value === '' || value === null) return '-'
  return typeof value === 'object' ? JSON.stringify(value) : String(value)
}

function when(seconds) {
  return new Date(seconds * 1000).toLocaleString([], { dateStyle: 'medium', timeStyle: 'short' })
}
