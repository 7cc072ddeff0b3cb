// Pictures of a run, by prompt and step: a slider goes through the steps, and two steps of one prompt lie side by side.

import { showDialog } from './dialog.mjs'
import { button, make, setText } from './dom.mjs'
import { count } from './format.mjs'
import { pictureOf } from './store.mjs'
import { TEXT } from './strings.mjs'

/** What makes pictures comparable over the steps. */
const SAME = ['prompt', 'width', 'height', 'preview_seed', 'sampler', 'sampling_steps', 'guidance', 'cfg']

export class Gallery {
  constructor(root, name) {
    this.root = root
    this.name = name
    this.key = ''
    this.rows = []
    this.steps = []
    this.step = null
    this.element = make('section', 'gallery')
    this.none = make('p', '', TEXT.tab.noSamples)
    const slider = make('label', 'slider')
    this.range = make('input')
    Object.assign(this.range, { type: 'range', min: 0, step: 1 })
    this.range.dataset.keys = ''
    this.range.setAttribute('aria-label', TEXT.step)
    this.output = make('output')
    slider.append(this.range, this.output)
    this.slider = slider
    this.range.addEventListener('input', () => this._go(this.steps[Number(this.range.value)]))
    this.pictures = make('div', 'pictures')
    this.element.append(make('h3', '', TEXT.tab.samples), this.none, slider, this.pictures)
  }

  /** `samples` as the server lists them. The slider stays at the last step while it is there. */
  show(samples) {
    const key = samples.map((sample) => sample.file).join('\n')
    if (key === this.key && this.steps.length) return
    const atEnd = this.step === null || this.step === this.steps[this.steps.length - 1]
    this.key = key
    this.rows = byPrompt(samples)
    this.steps = [...new Set(samples.map((sample) => sample.step ?? 0))].sort((a, b) => a - b)
    this.none.hidden = this.steps.length > 0
    this.slider.hidden = this.steps.length < 2
    this.range.max = Math.max(0, this.steps.length - 1)
    if (this.steps.length) this._go(atEnd ? this.steps[this.steps.length - 1] : this.step)
  }

  _go(step) {
    this.step = step
    this.range.value = this.steps.indexOf(step)
    this.range.setAttribute('aria-valuetext', TEXT.tab.atStep(count(step)))
    setText(this.output, TEXT.tab.atStep(count(step)))
    this.pictures.replaceChildren(...this.rows.map((row) => this._picture(row, step)).filter(Boolean))
  }

  /** The row's picture of the step; null: there is none. */
  _picture(row, step) {
    const sample = row.find((one) => one.step === step)
    if (!sample) return null
    const open = button('', '', TEXT.tab.compareTip(sample.prompt ?? ''), () => this._compare(row, sample))
    const picture = make('img')
    picture.src = pictureOf(this.name, sample.file, 256)
    picture.alt = sample.prompt ?? sample.file
    picture.loading = 'lazy'
    if (sample.width && sample.height) picture.style.setProperty('--shape', `${sample.width} / ${sample.height}`)
    open.append(picture, make('span', '', sample.prompt ?? sample.file))
    return open
  }

  /** The row's first picture beside the one that was chosen; a slider under each goes through the others. */
  _compare(row, chosen) {
    const pair = make('div', 'pair')
    pair.append(this._side(row, row[0], TEXT.tab.leftStep), this._side(row, chosen, TEXT.tab.rightStep))
    showDialog(this.root, chosen.prompt ?? chosen.file, pair, 'compare')
    pair.querySelector('figure:last-child input')?.focus()
  }

  _side(row, sample, label) {
    const figure = make('figure')
    const picture = make('img')
    const range = make('input')
    Object.assign(range, { type: 'range', min: 0, max: row.length - 1, step: 1, value: row.indexOf(sample) })
    range.setAttribute('aria-label', label)
    const output = make('output')
    const go = () => {
      const one = row[Number(range.value)]
      picture.src = pictureOf(this.name, one.file)
      picture.alt = TEXT.about(TEXT.tab.atStep(count(one.step)), one.prompt ?? '')
      range.setAttribute('aria-valuetext', TEXT.tab.atStep(count(one.step)))
      setText(output, TEXT.tab.atStep(count(one.step)))
    }
    range.addEventListener('input', go)
    go()
    const slider = make('label', 'slider')
    slider.append(range, output)
    figure.append(picture, slider)
    return figure
  }
}

/** The samples in rows of the same prompt and settings, each by step, in the order of the newest step's prompts. */
function byPrompt(samples) {
  const rows = new Map()
  for (const sample of samples) {
    const key = JSON.stringify(SAME.map((name) => sample[name] ?? null))
    if (!rows.has(key)) rows.set(key, [])
    rows.get(key).push(sample)
  }
  return [...rows.values()].map((row) => row.sort((a, b) => (a.step ?? 0) - (b.step ?? 0)))
}
