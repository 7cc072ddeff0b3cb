// Numbers and times as short text.

/** "0.0213", "1.25", "3.5e-6": three figures that matter. Empty for what is no number. */
export function figure(value) {
  if (typeof value !== 'number' || !Number.isFinite(value)) return ''
  const size = Math.abs(value)
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) {
    return value.toExponential(2).replace(/\.?0+e/, 'e').replace('e+', 'e')
  }
  if (size >= 100) return value.toFixed(0)
  return String(Number(value.toPrecision(3)))
}

/** 1500 -> "1,500". */
export function count(value) {
  return Number.isFinite(value) ? Math.round(value).toLocaleString('en') : ''
}

/** Seconds of one step: "0.042 s", "9.8 s", "62 s". */
export function seconds(value) {
  if (typeof value !== 'number' || !(value >= 0)) return ''
  const digits = value < 0.0995 ? 3 : value < 0.995 ? 2 : value < 9.95 ? 1 : 0
  return `${value.toFixed(digits)} s`
}

/** A span of time: "45 s", "12 min", "3 h 05 min", "2 d 4 h". */
export function duration(value) {
  if (typeof value !== 'number' || !(value >= 0) || !Number.isFinite(value)) return ''
  const total = Math.round(value)
  if (total < 60) return `${total} s`
  const minutes = Math.round(total / 60)
  if (minutes < 60) return `${minutes} min`
  const hours = Math.floor(minutes / 60)
  if (hours < 24) return `${hours} h ${String(minutes % 60).padStart(2, '0')} min`
  return `${Math.floor(hours / 24)} d ${hours % 24} h`
}

/** Bytes as people count them: "850 KB", "5.2 GB". */
export function bytes(value) {
  if (typeof value !== 'number' || !(value >= 0)) return ''
  const units = ['B', 'KB', 'MB', 'GB', 'TB']
  let unit = 0
  while (value >= 999.5 && unit < units.length - 1) [value, unit] = [value / 1000, unit + 1]
  return `${unit && value < 9.95 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`
}

/** "23.1 GB" of a number of GiB or GB as the worker gives them. Empty for what is no number. */
export function gigabytes(value) {
  return typeof value === 'number' && value >= 0 ? `${value < 99.5 ? value.toFixed(1) : Math.round(value)} GB` : ''
}
