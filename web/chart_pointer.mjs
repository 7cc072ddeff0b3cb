// Reading a chart: hover or arrow keys for values, drag to zoom, double click or Escape to see all.

/** Shorter drags, as shares of the plot's width, are clicks. */
const LEAST = 0.02

export function listenToPointer(chart) {
  const { plot, band } = chart
  let from = null
  const share = (event) => {
    const box = plot.getBoundingClientRect()
    return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width))
  }
  plot.addEventListener('pointerdown', (event) => {
    if (event.button !== 0) return
    event.stopPropagation() // or the node would be dragged
    from = share(event)
    plot.setPointerCapture(event.pointerId)
  })
  plot.addEventListener('pointermove', (event) => {
    const at = share(event)
    if (from !== null) {
      event.stopPropagation()
      band.style.left = `${Math.min(from, at) * 100}%`
      band.style.width = `${Math.abs(at - from) * 100}%`
      plot.classList.toggle('is-dragged', Math.abs(at - from) > LEAST)
    }
    chart.tell(chart.points.length ? chart.stepAt(at) : null)
  })
  plot.addEventListener('pointerup', (event) => {
    const [begin, end] = [from, share(event)]
    from = null
    plot.classList.remove('is-dragged')
    if (begin !== null && Math.abs(end - begin) > LEAST) chart.show([chart.stepAt(begin), chart.stepAt(end)])
  })
  plot.addEventListener('pointercancel', () => {
    from = null
    plot.classList.remove('is-dragged')
  })
  plot.addEventListener('pointerleave', () => from === null && chart.tell(null))
  plot.addEventListener('blur', () => chart.tell(null))
  plot.addEventListener('dblclick', (event) => {
    event.stopPropagation()
    chart.show(null)
  })
  plot.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') chart.show(null)
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key]
    if (!way || !chart.points.length) return
    event.preventDefault()
    const at = chart.points.findIndex((bin) => bin[0] === chart.told)
    const next = at < 0 ? chart.points.length - 1 : Math.min(chart.points.length - 1, Math.max(0, at + way))
    chart.tell(chart.points[next][0])
  })
}
