// The loss curve as data: steps merged into bins, smoothing, the range to show. No DOM here.
//
// A bin is [step, mean, low, high, count]: `count` steps that end at `step`. The server sends such bins
// (nodes/follow.py) and each live step is a bin of one.

/** More bins than this are merged in pairs: about two for each pixel of a wide panel. */
export const MOST_BINS = 2000

/** A run's losses, in order of steps. */
export class Losses {
  constructor(bins = []) {
    this.replace(bins)
  }

  replace(bins) {
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
  let [step, sum, low, high, total] = [0, 0, Infinity, -Infinity, 0]
  for (const bin of bins) {
    step = bin[0]
    sum += bin[1] * bin[4]
    low = Math.min(low, bin[2])
    high = Math.max(high, bin[3])
    total += bin[4]
  }
  return [step, sum / total, low, high, total]
}

/**
 * Moving average with weights that fall off exponentially to both sides, so that a falling curve is not drawn late; at
 * its two ends there is one side only. `span` is in steps. Returns one number a bin.
 */
export function smooth(bins, span) {
  const keep = 1 - 2 / (span + 1)
  const own = bins.map((bin) => 1 - keep ** bin[4])
  const before = decayed(bins, own)
  const after = decayed([...bins].reverse(), [...own].reverse()).reverse()
  return bins.map((bin, i) => {
    const weight = before[i].weight + after[i].weight - own[i]
    return (before[i].sum + after[i].sum - bin[1] * own[i]) / weight
  })
}

/** Sum and weight of each bin and those before it, which count the less the more steps lie between. */
function decayed(bins, own) {
  let [sum, weight] = [0, 0]
  return bins.map((bin, i) => {
    sum = sum * (1 - own[i]) + bin[1] * own[i]
    weight = weight * (1 - own[i]) + own[i]
    return { sum, weight }
  })
}

/** Steps over which to smooth: a tenth of what there is, from 10 to 400. */
export function smoothingSpan(bins) {
  const steps = bins.reduce((sum, bin) => sum + bin[4], 0)
  return Math.min(400, Math.max(10, steps / 10))
}

/**
 * The values to show, [low, high]: all of the smoothed curve, and the raw one but for its outliers (a lone spike must
 * not flatten the rest).
 */
export function valueRange(bins, smoothed) {
  if (!bins.length) return [0, 1]
  const lows = bins.map((bin) => bin[2]).sort((a, b) => a - b)
  const highs = bins.map((bin) => bin[3]).sort((a, b) => a - b)
  const cut = Math.floor(bins.length * 0.02)
  let low = Math.min(lows[cut], ...minMax(smoothed))
  let high = Math.max(highs[highs.length - 1 - cut], ...minMax(smoothed))
  if (!(high > low)) {
    const half = Math.abs(high) * 0.05 || 0.5
    low -= half
    high += half
  }
  const pad = (high - low) * 0.06
  return [low >= 0 ? Math.max(0, low - pad) : low - pad, high + pad]
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
