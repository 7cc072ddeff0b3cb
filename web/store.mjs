// What the browser knows of the runs: snapshots from /flux_fft/runs/NAME, kept up to date by numbered events. Nothing
// is asked for by the clock: a panel asks once when it appears, and again after a lost connection.

import { api } from '../../scripts/api.js'

import { Losses } from './losses.mjs'
import { TEXT } from './strings.mjs'

const EVENT = 'flux_fft.event'
/** Milliseconds for which the outcome of a request is shown. */
const TOLD = 8000

/**
 * One run: `status` as the server gives it, how far its events are known (`n`), and the newest that came (`seen`);
 * what was asked of it (`request`), whether its worker has `answered`, why that failed, or what came of it (`told`).
 */
class Run {
  constructor(name) {
    this.name = name
    this.n = -1
    this.seen = -1
    this.status = null
    this.note = ''
    this.held = false
    this.losses = new Losses()
    this.validation = []
    this.samples = []
    this.request = ''
    this.answered = false
    this.requestFailed = ''
    this.told = ''
  }
}

class Runs extends EventTarget {
  constructor() {
    super()
    this.byName = new Map()
    this.online = true
    this.asked = new Map()
    api.addEventListener(EVENT, (event) => this._take(event.detail))
    api.addEventListener('reconnecting', () => this._setOnline(false))
    api.addEventListener('reconnected', () => this._setOnline(true))
  }

  get(name) {
    return this.byName.get(name) ?? null
  }

  /** All runs, briefly, and where in a graph they were trained: {runs: [status], places: [{run, node_id, ...}]}. */
  list() {
    return this._once('runs', async () => (await this._json('/flux_fft/runs')) ?? { runs: [], places: [] })
  }

  /** Read a run's snapshot, whatever is known of it already. */
  load(name) {
    return this._once(`run ${name}`, async () => {
      const run = this._make(name)
      let snapshot = await this._json(address(name))
      // Asked for before the newest event came: ask once more, so that nothing goes back in time.
      if (snapshot && snapshot.n < run.seen) snapshot = await this._json(address(name))
      if (!snapshot || snapshot.n < run.seen) return
      run.n = run.seen = snapshot.n
      run.losses.replace(snapshot.losses)
      run.validation = snapshot.validation ?? []
      run.samples = snapshot.samples
      this._settle(run, snapshot.status, snapshot)
    })
  }

  /** Ask the worker of a run to pause or stop. `run.request` holds the wish until the run has followed it. */
  async ask(name, action) {
    const run = this.wish(name, action)
    try {
      await this.post(name, action)
    } catch (error) {
      run.requestFailed = error.message
      run.request = ''
      this.changed(run)
      return
    }
    this.changed(run)
    await this.load(name)
    run.answered = true
  }

  /** Note what is asked of a run. */
  wish(name, action, told = '') {
    const run = this._make(name)
    Object.assign(run, { request: action, answered: false, requestFailed: '', told })
    this.changed(run)
    return run
  }

  /** Note what came of it: a line to show for some seconds, or `until` a promise is kept; or an `error`. */
  tell(name, told, error = null, until = null) {
    const run = this._make(name)
    Object.assign(run, { request: '', requestFailed: error?.message ?? '', told })
    this.changed(run)
    const over = () => run.told === told && this.changed(Object.assign(run, { told: '' }))
    if (until) until.then(over, (failed) => this.tell(name, '', failed))
    else if (told) setTimeout(over, TOLD)
  }

  /** POST `body` to a route of the run. Resolves to the answer; rejects with one line that says why not. */
  async post(name, action, body = {}) {
    return answerOf(api.fetchApi(`${address(name)}/${action}`, {
      method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(body),
    }))
  }

  /** The losses of these steps alone, in bins: single steps, unless they are very many. */
  async losses(name, first, last) {
    return (await this.fetch(name, `losses?first=${first}&last=${last}`)).losses
  }

  /** GET a route of the run: "details", "prompt", "graph", "log". Rejects with one line. */
  async fetch(name, what) {
    return answerOf(api.fetchApi(`${address(name)}/${what}`))
  }

  /** A run was deleted. */
  forget(name) {
    this.byName.delete(name)
    this.dispatchEvent(new CustomEvent('change', { detail: name }))
  }

  _make(name) {
    if (!this.byName.has(name)) this.byName.set(name, new Run(name))
    return this.byName.get(name)
  }

  _take(event) {
    const run = this._make(event.run)
    for (const place of event.places ?? []) {
      this.dispatchEvent(new CustomEvent('place', { detail: { ...place, run: event.run } }))
    }
    // A run that was deleted and made anew counts its events anew.
    if (run.status && run.status.uid !== event.uid) run.n = run.seen = -1
    const missed = event.reset || event.since > run.n
    const before = run.status?.state
    if (event.n >= run.seen) {
      run.seen = event.n
      if (!missed) {
        run.losses.append(event.losses)
        const known = run.validation.length ? run.validation[run.validation.length - 1][0] : -Infinity
        run.validation.push(...(event.validation ?? []).filter(([step]) => step > known))
        run.n = event.n
      }
      this._settle(run, event, event)
      this.dispatchEvent(new CustomEvent('news', { detail: { run, before, happened: event.happened ?? [] } }))
    }
    if (missed || event.sampled) this.load(event.run)
  }

  _settle(run, status, about) {
    run.status = status
    run.note = about.note ?? ''
    run.held = about.held === true
    const moves = ['preparing', 'training'].includes(status.state)
    const stopsYet = run.request === 'stop' && status.state === 'paused'
    const waits = run.request === 'resume' && !moves
    if (!moves && !run.held && !stopsYet && !waits) run.request = ''
    // It moves again after a pause or stop that its worker has followed: somebody else has it go on.
    const done = run.request === 'resume' || run.answered
    if (moves && done) Object.assign(run, { request: '', answered: false, told: '' })
    this.changed(run)
  }

  changed(run) {
    this.dispatchEvent(new CustomEvent('change', { detail: run.name }))
  }

  _setOnline(online) {
    this.online = online
    this.dispatchEvent(new CustomEvent('online'))
  }

  /** One request for a key at a time: who asks meanwhile gets the same answer. */
  _once(key, work) {
    if (!this.asked.has(key)) this.asked.set(key, work().finally(() => this.asked.delete(key)))
    return this.asked.get(key)
  }

  async _json(path) {
    try {
      const answer = await api.fetchApi(path)
      return answer.ok ? await answer.json() : null
    } catch {
      return null // the server is away: 'reconnected' will ask again
    }
  }
}

async function answerOf(asked) {
  const answer = await asked.catch(() => null) // the server is away
  const said = await answer?.json().catch(() => null)
  if (!answer?.ok) throw new Error(said?.error ?? TEXT.notReached)
  return said
}

/** Where a picture of a run is; `side`: a small one of about so many pixels. */
export function pictureOf(name, file, side = 0) {
  return api.apiURL(`${address(name)}/samples/${encodeURIComponent(file)}${side ? `?side=${side}` : ''}`)
}

function address(name) {
  return `/flux_fft/runs/${encodeURIComponent(name)}`
}

export const runs = new Runs()
