// The sidebar tab with all runs, and one of them opened.

import { app } from '../../scripts/app.js'

import { button, keepTyping, make, setText } from './dom.mjs'
import { stateOf } from './facts.mjs'
import { count, figure } from './format.mjs'
import { RunView } from './run_view.mjs'
import { pictureOf, runs } from './store.mjs'
import { TEXT } from './strings.mjs'
import { TAB_STYLE } from './style_tab.mjs'

const ID = 'fluxfullfinetune.runs'
let open = null

export function registerTab() {
  app.extensionManager?.registerSidebarTab?.({
    id: ID, icon: 'pi pi-chart-line', title: TEXT.tab.title, tooltip: TEXT.tab.tip, type: 'custom',
    render(element) {
      if (open?.host.parentNode === element) return
      open?.destroy()
      open = new RunsTab(element)
    },
    destroy() {
      open?.destroy()
      open = null
    },
  })
}

class RunsTab {
  constructor(element) {
    this.ends = new AbortController()
    this.rows = new Map()
    this.view = null
    this.listed = false
    this.missing = new Set()
    this.host = make('div')
    this.host.style.height = '100%'
    this.root = this.host.attachShadow({ mode: 'open' })
    keepTyping(this.root)
    this.box = make('section', 'tab')
    this.root.append(make('style', '', TAB_STYLE), this.box)
    element.replaceChildren(this.host)
    const on = (type, handler) => runs.addEventListener(type, handler, { signal: this.ends.signal })
    on('change', (event) => this._onChange(event.detail))
    on('online', () => runs.online && this.view === null && this.list())
    this.list()
  }

  destroy() {
    this.ends.abort()
    this.view?.destroy()
    this.host.remove()
  }

  /** Show all runs. `focus`: the run whose row takes the keyboard. */
  async list(focus = '') {
    this.view?.destroy()
    this.view = null
    const head = make('div', 'bar')
    head.append(make('h2', '', TEXT.tab.title), button('refresh', TEXT.tab.refresh, '', () => this.list()))
    const list = make('ul', 'runs')
    this.box.replaceChildren(head, list)
    this.rows.clear()
    const { runs: known } = await runs.list()
    if (this.ends.signal.aborted || this.view) return
    this.listed = true
    for (const status of known) list.append(this._row(status))
    if (!known.length) this.box.append(make('p', 'none', TEXT.tab.none))
    this.rows.get(focus)?.button.focus()
  }

  _row(status) {
    const row = { picture: make(status.thumbnail ? 'img' : 'span', 'thumb'), words: make('span'), bar: make('i') }
    row.button = button('', '', '', () => this.openRun(status.run))
    if (status.thumbnail) {
      const src = pictureOf(status.run, status.thumbnail, 128)
      Object.assign(row.picture, { alt: '', loading: 'lazy', src })
    }
    const about = make('span', 'about')
    const meter = make('span', 'meter')
    meter.append(row.bar)
    about.append(make('b', '', status.run), make('i', 'dot'), row.words, meter)
    row.button.append(row.picture, about)
    this.rows.set(status.run, row)
    this._fill(row, status, runs.get(status.run))
    const item = make('li')
    item.append(row.button)
    return item
  }

  _fill(row, status, run) {
    const state = run?.status ? stateOf(run) : status.state
    row.button.dataset.state = state
    const loss = figure(status.loss)
    const parts = [TEXT.states[state] ?? state, TEXT.tab.ofTarget(count(status.step), status.target && count(status.target))]
    if (loss) parts.push(`${TEXT.loss} ${loss}`)
    setText(row.words, TEXT.listed(parts))
    row.bar.style.width = `${status.target > 0 ? Math.min(100, (100 * status.step) / status.target) : 0}%`
  }

  _onChange(name) {
    if (this.view) return
    const row = this.rows.get(name)
    const run = runs.get(name)
    if (row && run?.status) this._fill(row, run.status, run)
    else if (run?.status && this.listed && !this.missing.has(name)) {
      this.missing.add(name) // it is asked for once: the list may leave it out
      this.list()
    }
  }

  openRun(name) {
    this.view?.destroy()
    this.view = new RunView(this.root, name, () => this.list(name))
    this.box.replaceChildren(this.view.element)
    this.box.scrollTop = 0
    this.view.back.focus()
  }
}
