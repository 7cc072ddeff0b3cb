// The style sheets of what lies in shadow roots. Colours are ComfyUI's own, so they follow the palette, light or dark;
// the few of ours are mixed with its ink, so that they stay readable on either.

export const BASE = `
:host { display: block; }
* { box-sizing: border-box; }
[hidden] { display: none !important; }
.panel, .tab, dialog {
  --ink: var(--input-text, #ddd);
  --ground: color-mix(in srgb, var(--comfy-menu-bg, #222) 60%, var(--comfy-input-bg, #222));
  --dim: color-mix(in srgb, var(--ink) 72%, var(--ground));
  --line: color-mix(in srgb, var(--ink) 14%, transparent);
  --accent: color-mix(in srgb, #3b82f6 82%, var(--ink));
  --second: color-mix(in srgb, #e08a1e 82%, var(--ink));
  --third: color-mix(in srgb, #22a55b 78%, var(--ink));
  --bad: color-mix(in srgb, #ef4444 62%, var(--ink));
  --bad-ink: color-mix(in srgb, #ef4444 38%, var(--ink));
  --tone: var(--dim);
  color: var(--ink); font: 12px/1.35 Inter, system-ui, sans-serif; font-variant-numeric: tabular-nums;
}
[data-state='preparing'], [data-state='training'], [data-state='held'] { --tone: var(--accent); }
[data-state='finished'] { --tone: var(--third); }
[data-state='paused'], [data-state='interrupted'], [data-state='offline'] { --tone: var(--second); }
[data-state='failed'] { --tone: var(--bad); }
.dot { flex: none; width: 8px; height: 8px; border-radius: 50%; background: var(--tone); }
button {
  flex: none; padding: 2px 10px; border: 1px solid var(--line); border-radius: 4px;
  background: color-mix(in srgb, var(--ink) 8%, transparent); color: inherit; font: inherit; cursor: pointer;
}
button:hover:enabled { background: color-mix(in srgb, var(--ink) 18%, transparent); }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 1px; }
button:disabled, input:disabled { opacity: 0.45; cursor: default; }
button.link { padding: 0; border: 0; background: none; color: inherit; text-decoration: underline; }
button.danger { border-color: color-mix(in srgb, var(--bad) 60%, transparent); color: var(--bad-ink); }
input[type='text'], input[type='number'], textarea, select {
  min-width: 0; padding: 2px 6px; border: 1px solid var(--line); border-radius: 4px;
  background: color-mix(in srgb, var(--comfy-input-bg, #222) 80%, var(--ground)); color: var(--ink); font: inherit;
}
input[aria-invalid] { border-color: var(--bad); }
p.is-error, .is-error { color: var(--bad-ink); }

.chart {
  position: relative; flex: 1; min-height: 96px;
  display: grid; grid-template: auto 1fr auto / auto 1fr; column-gap: 6px;
}
.legend { grid-area: 1 / 1 / 2 / 3; display: flex; align-items: start; gap: 8px; }
.marks { flex: 1; display: flex; flex-wrap: wrap; gap: 0 8px; min-width: 0; }
.is-none { visibility: hidden; }
button.mark {
  display: flex; align-items: center; gap: 4px; padding: 0 2px; border: 0; background: none; color: var(--dim);
  font-size: 10px; line-height: 16px;
}
button.mark::before { content: ''; flex: none; width: 12px; border-top: 2px solid var(--mark); }
button.mark[aria-pressed='false'] { text-decoration: line-through; }
.mark-raw, .mark-smooth { --mark: var(--accent); }
.mark-validation { --mark: var(--second); }
.mark-rate { --mark: var(--third); }
button.mark-raw::before { border-top-width: 1px; opacity: 0.6; }
button.mark-rate::before { border-top-style: dashed; border-top-width: 1px; }
button.mark-validation::before { width: 5px; height: 5px; margin: 0 3px; border: 0; border-radius: 50%; background: var(--mark); }
button.mark.log, button.mark.all { padding: 0 5px; border: 1px solid var(--line); border-radius: 3px; text-decoration: none; }
button.mark.log::before, button.mark.all::before { display: none; }
button.mark.log[aria-pressed='true'] { background: color-mix(in srgb, var(--ink) 16%, transparent); color: var(--ink); }
.plot { position: relative; grid-area: 2 / 2; min-width: 0; min-height: 0; cursor: crosshair; touch-action: none; }
svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: hidden; }
path { fill: none; vector-effect: non-scaling-stroke; stroke-linejoin: round; stroke-linecap: round; }
.grid { stroke: var(--line); stroke-width: 1px; }
.raw { stroke: var(--accent); stroke-width: 1px; opacity: 0.4; }
.bold { stroke: var(--accent); stroke-width: 2px; }
.validation { stroke: var(--second); stroke-width: 1.5px; }
.dots { stroke: var(--second); stroke-width: 5px; }
.rate { stroke: var(--third); stroke-width: 1px; stroke-dasharray: 4 3; opacity: 0.8; }
.cursor, .band { display: none; position: absolute; top: 0; bottom: 0; pointer-events: none; }
.cursor { width: 1px; background: var(--dim); }
.band { background: color-mix(in srgb, var(--accent) 24%, transparent); }
.chart-tip {
  display: none; position: absolute; top: 2px; right: 2px; padding: 3px 6px; border-radius: 4px; pointer-events: none;
  background: color-mix(in srgb, var(--comfy-input-bg, #222) 92%, transparent); border: 1px solid var(--line);
  font-size: 10px; white-space: pre;
}
.chart-tip.is-left { right: auto; left: 2px; }
.is-told .cursor, .is-told .chart-tip, .is-dragged .band { display: block; }
.values { position: relative; grid-area: 2 / 1; width: 34px; font-size: 10px; color: var(--dim); }
.values span { position: absolute; right: 0; transform: translateY(-50%); }
.steps { grid-area: 3 / 2; display: flex; justify-content: space-between; font-size: 10px; color: var(--dim); }
.chart-empty {
  display: none; position: absolute; inset: 0; align-items: center; justify-content: center;
  color: var(--dim); text-align: center; border: 1px dashed var(--line); border-radius: 4px;
}
.is-empty > :not(.overlay) { visibility: hidden; }
.is-empty > .chart-empty { display: flex; visibility: visible; }

dl { flex: none; display: grid; grid-template-columns: repeat(4, auto); justify-content: space-between; gap: 4px 8px; margin: 0; }
dl > div { min-width: 0; white-space: nowrap; }
dd { margin: 0; font-weight: 600; min-height: 16px; }
dd:empty::before { content: '-'; color: var(--dim); font-weight: 400; }
dt { color: var(--dim); font-size: 10px; }

dialog {
  width: min(900px, 92vw); max-height: 90vh; padding: 12px 16px 16px; border: 1px solid var(--line); border-radius: 8px;
  background: var(--ground);
}
dialog[open] { display: flex; flex-direction: column; gap: 10px; }
dialog::backdrop { background: rgb(0 0 0 / 55%); }
dialog > header { display: flex; align-items: center; gap: 8px; }
dialog h2 { flex: 1; min-width: 0; margin: 0; font-size: 14px; overflow-wrap: anywhere; }
.log-text { flex: 1; margin: 0; overflow: auto; font: 12px/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; user-select: text; }
`

export const STYLE = `${BASE}
.panel {
  display: flex; flex-direction: column; gap: 6px;
  width: 100%; height: 100%; min-width: 0; overflow: hidden;
  padding: 8px 10px; border-radius: 6px; background: var(--ground); user-select: none;
}
.panel[data-state='offline'] > :not(.words) { opacity: 0.55; }
header { display: flex; align-items: center; gap: 6px; min-height: 22px; }
.state { flex: none; font-weight: 600; }
.run-name { flex: 1; min-width: 0; color: var(--dim); overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.pause, .resume { min-width: 66px; }
.progress { flex: none; height: 4px; border-radius: 2px; background: var(--line); overflow: hidden; }
.progress i { display: block; width: 0; height: 100%; background: var(--tone); }

.tools { flex: none; display: flex; align-items: center; gap: 6px; }
.tools button { padding: 1px 8px; font-size: 11px; }
.rate-field { display: flex; flex: 1; align-items: center; justify-content: flex-end; gap: 4px; min-width: 0; color: var(--dim); font-size: 11px; }
.rate-field input { width: 64px; padding: 1px 5px; }
.overlay {
  position: absolute; inset: 0; z-index: 1; display: flex; flex-direction: column; gap: 6px; padding: 6px;
  border: 1px solid var(--line); border-radius: 6px; background: var(--ground); visibility: visible;
}
.overlay textarea { flex: 1; resize: none; }
.overlay .row { display: flex; justify-content: flex-end; gap: 6px; }
.overlay img { flex: 1; min-height: 0; object-fit: contain; }
.overlay figcaption { color: var(--dim); font-size: 11px; text-align: center; overflow-wrap: anywhere; max-height: 32px; overflow: auto; }
.overlay .close { align-self: center; }

.words { flex: none; min-height: 66px; max-height: 148px; overflow: auto; scrollbar-width: thin; color: var(--dim); overflow-wrap: anywhere; }
.words .worker-log { float: right; margin-left: 10px; }
p { margin: 0; }
p:empty { display: none; }
`

export const SAID_STYLE = `
:host { display: block; }
.said.is-error { color: color-mix(in srgb, #ef4444 38%, var(--input-text, #ddd)); }
.said {
  box-sizing: border-box; width: 100%; height: 100%; overflow: auto; padding: 6px 10px; border-radius: 6px;
  background: color-mix(in srgb, var(--comfy-menu-bg, #222) 60%, var(--comfy-input-bg, #222));
  color: var(--input-text, #ddd);
  font: 12px/16px Inter, system-ui, sans-serif; overflow-wrap: anywhere; user-select: text;
}
`
