// Single steps for a chart that is zoomed into: asked of the server where the curve that is here holds them merged.

/** Milliseconds between two questions. */
const AGAIN = 1000

export class Detail {
  /** `ask(first, last)` resolves to the bins of these steps; `changed()` is called when there are others to draw. */
  constructor(ask, changed) {
    this.ask = ask
    this.changed = changed
    this.asked = 0
    this.forget()
  }

  forget() {
    clearTimeout(this.timer)
    this.timer = 0
    this.have = null
    this.asking = null
  }

  /**
   * `bins`, and where they are merged within `zoom` ([first, last] step) those that the server has of it, once it has
   * answered. It is asked where a plot of `width` pixels has room for more, and again when a bin of the range ends at
   * another step than before, or the curve was read anew (`age`): a range that ends before the newest step rests.
   */
  within(bins, zoom, width, age) {
    const from = bins.findIndex((bin) => bin[0] >= zoom[0])
    const end = bins.findIndex((bin) => bin[0] >= zoom[1])
    const part = bins.slice(Math.max(0, from), end < 0 ? bins.length : end + 1)
    if (!this.ask || from < 0 || part.length >= width || !part.some((bin) => bin[4] > 1)) return bins
    const [first, last] = [part[0][0] - part[0][4] + 1, part[part.length - 1][0]]
    const { have } = this
    if (!have || have.first !== first || have.last !== last || have.age !== age) this._askFor({ first, last, age })
    if (!have) return bins
    return [...bins.filter((bin) => bin[0] < have.first), ...have.bins, ...bins.filter((bin) => bin[0] > have.last)]
  }

  async _askFor(range) {
    if (this.asking || this.timer) return
    const wait = this.asked + AGAIN - Date.now()
    if (wait > 0) {
      this.timer = setTimeout(() => {
        this.timer = 0
        this.changed()
      }, wait)
      return
    }
    this.asked = Date.now()
    this.asking = range
    const bins = await this.ask(range.first, range.last).catch(() => null)
    if (this.asking !== range) return // it was forgotten meanwhile
    this.asking = null
    if (!bins?.length) return // the server is away: the next change asks again
    this.have = { ...range, bins }
    this.changed()
  }
}
