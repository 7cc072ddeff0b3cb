// The row of tools under the panel's facts: save, sample, let others through, learning rate.

import { letThrough, sampleNow, save, setRate } from './actions.mjs'
import { button, make, setText } from './dom.mjs'
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
    Object.assign(prompt, { rows: 3, placeholder: TEXT.samplePrompt, value: this.last ?? '', required: true })
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
  }

  _onSubmit(event) {
    event.preventDefault()
    const text = this.overlay.querySelector('textarea')?.value.trim()
    if (!text) return
    this.last = text.split(/\s+/).join(' ')
    this.waiting = Date.now() / 1000
    this.known = null
    this._close()
    sampleNow(this.name(), text)
  }

  _close() {
    this.overlay.hidden = true
    this.overlay.replaceChildren()
    this.sample.focus()
  }

  /** Once it is there. */
  _showPicture(run) {
    if (!this.waiting || !run) return
    const found = run.samples.filter((sample) => sample.prompt === this.last)
    this.known ??= new Set(found.map((sample) => sample.file))
    const made = found.find((sample) => !this.known.has(sample.file))
    if (!made) return
    this.waiting = null
    const picture = make('img')
    picture.src = pictureOf(run.name, made.file, 512)
    picture.alt = made.prompt
    const caption = make('figcaption', '', `${TEXT.tab.atStep(made.step)}: ${made.prompt}`)
    const close = button('close', TEXT.close, '', () => this._close())
    this.overlay.replaceChildren(picture, caption, close)
    this.overlay.hidden = false
    setText(this.sample, TEXT.sample)
  }
}
