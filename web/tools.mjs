// The row of tools under the panel's facts: save, sample, let others through, learning rate.

import { letThrough, sampleNow, save, setRate } from './actions.mjs'
import { button, make } from './dom.mjs'
import { figure } from './format.mjs'
import { pictureOf, runs } from './store.mjs'
import { TEXT } from './strings.mjs'

export class Tools {
  /** `name()`: the run that they are for. */
  constructor(name) {
    this.name = name
    this.element = make('div', 'tools')
    this.save = button('save', TEXT.save, TEXT.saveTip, () => save(name()))
    this.sample = button('sample', TEXT.sample, TEXT.sampleTip, () => this._toggleForm())
    this.through = button('through', TEXT.letThrough, TEXT.letThroughTip, () => letThrough(name()))
    const label = make('label', 'rate-field', TEXT.lr)
    label.title = TEXT.lrTip
    this.rate = make('input')
    Object.assign(this.rate, { type: 'text', inputMode: 'decimal', spellcheck: false, autocomplete: 'off' })
    this.rate.setAttribute('aria-label', TEXT.rate)
    this.rate.addEventListener('keydown', (event) => this._onRateKey(event))
    this.rate.addEventListener('blur', () => this._showRate())
    label.append(this.rate)
    this.element.append(this.save, this.sample, this.through, label)
    this.overlay = make('form', 'overlay')
    this.overlay.hidden = true
    this.overlay.addEventListener('submit', (event) => this._onSubmit(event))
    this.shown = null
  }

  /** `run` may be null. */
  render(run, state, online) {
    const status = run?.status ?? {}
    const alive = online && Boolean(status.worker)
    const asked = run?.request ?? ''
    this.save.disabled = !alive || asked !== ''
    this.sample.disabled = !online || !run || state === 'created' || state === 'preparing' || asked !== ''
    this.through.disabled = !online || state !== 'training' || asked !== ''
    this.rate.disabled = !alive
    this.current = status.lr_set ?? status.lr
    if (this.element.getRootNode().activeElement !== this.rate) this._showRate()
    this._showPicture(run)
  }

  _showRate() {
    const text = figure(this.current)
    if (this.rate.value !== text) this.rate.value = text
    this.rate.removeAttribute('aria-invalid')
  }

  _onRateKey(event) {
    if (event.key === 'Escape') this.rate.blur()
    if (event.key !== 'Enter') return
    const text = this.rate.value.trim().replace(',', '.')
    const rate = Number(text)
    const good = text !== '' && rate >= 0 && rate <= 1
    if (!good) {
      this.rate.setAttribute('aria-invalid', 'true')
      return runs.tell(this.name(), TEXT.lrWrong)
    }
    this.current = rate
    setRate(this.name(), rate)
    this.rate.blur()
  }

  // -- the picture that was asked for lies over the chart, so that nothing moves

  _toggleForm() {
    if (!this.overlay.hidden) return this._close()
    const prompt = make('textarea')
    Object.assign(prompt, { rows: 3, placeholder: TEXT.samplePrompt, required: true })
    prompt.setAttribute('aria-label', TEXT.samplePrompt)
    prompt.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') this._close()
      if (event.key === 'Enter' && !event.shiftKey) {
        event.preventDefault()
        this.overlay.requestSubmit()
      }
    })
    const go = button('go', TEXT.sampleGo, '', () => {})
    go.type = 'submit'
    const row = make('div', 'row')
    row.append(button('cancel', TEXT.cancel, '', () => this._close()), go)
    this.overlay.replaceChildren(prompt, row)
    this.overlay.hidden = false
    prompt.focus()
    this._suggest(prompt)
  }

  /** The prompt that was typed last for this run, else the first of its previews: selected, so that typing replaces it. */
  async _suggest(field) {
    const typed = keptPrompt(runs.get(this.name()))
    const text = typed || (await runs.fetch(this.name(), 'prompt').catch(() => ({}))).prompt
    if (!text || field.value || !field.isConnected) return
    field.value = text
    field.select()
  }

  async _onSubmit(event) {
    event.preventDefault()
    const prompt = this.overlay.querySelector('textarea')?.value.trim().split(/\s+/).join(' ')
    if (!prompt) return
    const name = this.name()
    const run = runs.get(name)
    keepPrompt(run, prompt)
    const waiting = { name, prompt, step: run?.status?.step ?? 0, ended: false }
    this.waiting = waiting
    this._close()
    const asked = await sampleNow(name, prompt)
    if (!asked || !(await asked.ended) || this.waiting !== waiting) return
    waiting.ended = true
    runs.load(name)
  }

  _close() {
    this.overlay.hidden = true
    this.overlay.replaceChildren()
    this.sample.focus()
  }

  /** Once it is there. It may have been there before: of the same step and settings no other is made. */
  _showPicture(run) {
    const { waiting } = this
    if (!waiting?.ended || run?.name !== waiting.name) return
    const made = run.samples.findLast((sample) => sample.prompt === waiting.prompt && sample.step >= waiting.step)
    if (!made) return
    this.waiting = null
    const picture = make('img')
    picture.src = pictureOf(run.name, made.file, 512)
    picture.alt = made.prompt
    const caption = make('figcaption', '', TEXT.about(TEXT.tab.atStep(made.step), made.prompt))
    const close = button('close', TEXT.close, '', () => this._close())
    this.overlay.replaceChildren(picture, caption, close)
    this.overlay.hidden = false
  }
}

/** Where a browser keeps the prompt that was typed last for a run. */
function placeOf(run) {
  return `flux_fft.prompt.${run?.status?.uid ?? ''}`
}

function keptPrompt(run) {
  try {
    return localStorage.getItem(placeOf(run)) ?? ''
  } catch {
    return '' // this browser keeps nothing
  }
}

function keepPrompt(run, prompt) {
  try {
    localStorage.setItem(placeOf(run), prompt)
  } catch {
    // this browser keeps nothing, or no more
  }
}
