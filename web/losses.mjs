// The loss curve as data: steps merged into bins, smoothing, the range to show. No DOM here.
//
// A bin is [step, mean, low, high, count, lr]: `count` steps that end at `step`, whose learning rate was `lr`. The server
// sends such bins (nodes/follow.py) and each live step is a bin of one.

/** More bins than this are merged in pairs: about two for each pixel of a wide panel. */
export const MOST_BINS = 2000

/** A run's losses, in order of steps. */
export class Losses {
  constructor(bins = []) {
    /** How often all of it was read anew. */
    this.age = 0
    this.replace(bins)
  }

  replace(bins) {
    this.age++
    this.bins = bins.filter((bin) => bin.slice(0, 4).every(Number.isFinite)).map((bin) => [...bin])
    this._shrink()
  }

  /** Add what came live. Steps that are here already are passed over. */
  append(bins) {
    for (const bin of bins) {
      if (bin.slice(0, 4).every(Number.isFinite) && bin[0] > this.lastStep) this.bins.push([...bin])
    }
    this._shrink()
  }

  get lastStep() {
    return this.bins.length ? this.bins[this.bins.length - 1][0] : -Infinity
  }

  _shrink() {
    while (this.bins.length > MOST_BINS) {
      const merged = []
      for (let i = 0; i < this.bins.length; i += 2) merged.push(mergeBins(this.bins.slice(i, i + 2)))
      this.bins = merged
    }
  }
}

function mergeBins(bins) {
  let [step, sum, low, high, total, rate] = [0, 0, Infinity, -Infinity, 0, undefined]
  for (const bin of bins) {
    step = bin[0]
    rate = bin[5]
    sum += bin[1] * bin[4]
    low = Math.min(low, bin[2])
    high = Math.max(high, bin[3])
    total += bin[4]
  }
  return [step, sum / total, low, high, total, rate]
}

/**
 * Exponential moving average that carries `share` (0..1) from step to step, unbiased at the start: it begins at the
 * first loss and, for the same share, is the line of the Loss Plot (trainer/plot.py). Returns one number a bin.
 */
export function smooth(bins, share) {
  let [total, weight] = [0, 0]
  return bins.map((bin) => {
    const keep = share ** bin[4]
    total = keep * total + (1 - keep) * bin[1]
    weight = keep * weight + (1 - keep)
    return total / weight
  })
}

/** The Loss Plot's default share; in runs of more than 2,000 steps the wider one that their length asks for. */
export function smoothingShare(bins) {
  const steps = bins.reduce((sum, bin) => sum + bin[4], 0)
  return Math.max(0.9, 1 - 200 / Math.max(1, steps))
}

/** The part of `bins` inside [first, last], with one bin beyond each end: the indices [from, to) of it. */
export function inside(bins, first, last) {
  let from = bins.findIndex((bin) => bin[0] >= first)
  if (from < 0) from = bins.length
  let to = bins.length
  while (to > from && bins[to - 1][0] > last) to--
  return [Math.max(0, from - 1), Math.min(bins.length, to + 1)]
}

/** The index of the bin that is nearest to `step`; -1: there is none. */
export function nearest(bins, step) {
  let [low, high] = [0, bins.length - 1]
  while (low < high) {
    const middle = (low + high) >> 1
    if (bins[middle][0] < step) low = middle + 1
    else high = middle
  }
  if (low > 0 && bins[low] && step - bins[low - 1][0] < bins[low][0] - step) low--
  return bins.length ? low : -1
}

/**
 * The values to show, [low, high]: the first and last losses, all of the smoothed curve, and the raw one but for its
 * outliers (a lone spike must not flatten the rest).
 */
export function valueRange(bins, smoothed) {
  if (!bins.length) return [0, 1]
  const lows = bins.map((bin) => bin[2]).sort((a, b) => a - b)
  const highs = bins.map((bin) => bin[3]).sort((a, b) => a - b)
  const cut = Math.floor(bins.length * 0.005)
  const ends = [...bins.slice(0, 3), bins[bins.length - 1]].flatMap((bin) => [bin[2], bin[3]])
  let [low, high] = minMax([lows[cut], highs[highs.length - 1 - cut], ...ends, ...smoothed])
  if (isLogarithmic(low, high)) return [low * 0.95, high * 1.05]
  if (!(high > low)) {
    const half = Math.abs(high) * 0.05 || 0.5
    low -= half
    high += half
  }
  const pad = (high - low) * 0.06
  return [low >= 0 ? Math.max(0, low - pad) : low - pad, high + pad]
}

/** Whether values that lie in [low, high] are shown on a logarithmic axis: those that span more than a decade. */
export function isLogarithmic(low, high) {
  return low > 0 && high > 10 * low
}

function minMax(values) {
  return values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity])
}

/** Round numbers inside [low, high], about `wanted` of them. */
export function ticks(low, high, wanted = 4) {
  const rough = (high - low) / wanted
  if (!(rough > 0)) return []
  const power = 10 ** Math.floor(Math.log10(rough))
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough)
  const found = []
  for (let k = Math.ceil(low / step); k * step <= high; k++) found.push(Number((k * step).toPrecision(12)))
  return found
}

/**
 * 1, 2 and 5 of each decade inside [low, high], or whole decades where that would be too many; where fewer than two are
 * inside, what a linear axis has.
 */
export function logTicks(low, high, most = 7) {
  const found = []
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++) {
    for (const m of [1, 2, 5]) found.push(Number((m * 10 ** power).toPrecision(12)))
  }
  const inside = found.filter((value) => value >= low && value <= high)
  if (inside.length < 2) return ticks(low, high)
  if (inside.length <= most) return inside
  const decades = inside.filter((value) => Number.isInteger(Math.round(Math.log10(value) * 1e9) / 1e9))
  return decades.filter((_, i) => i % Math.ceil(decades.length / most) === 0)
}
