// The panel's style sheet. Its colours are ComfyUI's own, so it follows the palette, light or dark.

export const STYLE = `
:host { display: block; }
* { box-sizing: border-box; }
.panel {
  --ink: var(--input-text, #ddd);
  --dim: var(--descrip-text, #999);
  --line: color-mix(in srgb, var(--ink) 14%, transparent);
  --accent: #3b82f6;
  --tone: var(--dim);
  display: flex; flex-direction: column; gap: 6px;
  width: 100%; height: 100%; min-width: 0; overflow: hidden;
  padding: 8px 10px; border-radius: 6px;
  background: color-mix(in srgb, var(--comfy-menu-bg, #222) 60%, var(--comfy-input-bg, #222)); color: var(--ink);
  font: 12px/1.35 Inter, system-ui, sans-serif; font-variant-numeric: tabular-nums;
  user-select: none;
}
.panel[data-state='preparing'], .panel[data-state='training'], .panel[data-state='held'] { --tone: var(--accent); }
.panel[data-state='finished'] { --tone: #22a55b; }
.panel[data-state='paused'], .panel[data-state='interrupted'], .panel[data-state='offline'] { --tone: #d98b0b; }
.panel[data-state='failed'] { --tone: #e5484d; }
.panel[data-state='offline'] > :not(p) { opacity: 0.55; }

header { display: flex; align-items: center; gap: 6px; min-height: 22px; }
.dot { flex: none; width: 8px; height: 8px; border-radius: 50%; background: var(--tone); }
.state { flex: none; font-weight: 600; }
.run-name { flex: 1; min-width: 0; color: var(--dim); overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
button {
  flex: none; padding: 2px 10px; border: 1px solid var(--line); border-radius: 4px;
  background: color-mix(in srgb, var(--ink) 8%, transparent); color: inherit; font: inherit; cursor: pointer;
}
button:hover:enabled { background: color-mix(in srgb, var(--ink) 18%, transparent); }
button:focus-visible { outline: 2px solid var(--accent); outline-offset: 1px; }
button:disabled { opacity: 0.4; cursor: default; }

.progress { flex: none; height: 4px; border-radius: 2px; background: var(--line); overflow: hidden; }
.progress i { display: block; width: 0; height: 100%; background: var(--tone); }

.chart {
  position: relative; flex: 1; min-height: 76px;
  display: grid; grid-template: 1fr auto / auto 1fr; column-gap: 6px;
}
.plot { position: relative; grid-area: 1 / 2; min-width: 0; min-height: 0; }
svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: hidden; }
path { fill: none; vector-effect: non-scaling-stroke; stroke-linejoin: round; stroke-linecap: round; }
.grid { stroke: var(--line); stroke-width: 1px; }
.raw { stroke: var(--accent); stroke-width: 1px; opacity: 0.45; }
.bold { stroke: var(--accent); stroke-width: 2px; }
.values { position: relative; grid-area: 1 / 1; width: 34px; font-size: 10px; color: var(--dim); }
.values span { position: absolute; right: 0; transform: translateY(-50%); }
.steps { grid-area: 2 / 2; display: flex; justify-content: space-between; font-size: 10px; color: var(--dim); }
.chart-empty {
  display: none; position: absolute; inset: 0; align-items: center; justify-content: center;
  color: var(--dim); text-align: center; border: 1px dashed var(--line); border-radius: 4px;
}
.is-empty > * { visibility: hidden; }
.is-empty > .chart-empty { display: flex; visibility: visible; }

dl { flex: none; display: flex; justify-content: space-between; gap: 8px; margin: 0; }
dl > div { min-width: 0; white-space: nowrap; }
dd { margin: 0; font-weight: 600; min-height: 16px; }
dd:empty::before { content: '-'; color: var(--dim); font-weight: 400; }
dt { color: var(--dim); font-size: 10px; }

p {
  flex: none; margin: 0; min-height: 16px; color: var(--dim); overflow: hidden; overflow-wrap: anywhere;
  display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 3;
}
p:empty { display: none; }
p.is-error { color: var(--error-text, #ff6b6b); }
`

export const SAID_STYLE = `
:host { display: block; }
.said {
  box-sizing: border-box; width: 100%; height: 100%; overflow: auto; padding: 6px 10px; border-radius: 6px;
  background: color-mix(in srgb, var(--comfy-menu-bg, #222) 60%, var(--comfy-input-bg, #222));
  color: var(--input-text, #ddd);
  font: 12px/16px Inter, system-ui, sans-serif; overflow-wrap: anywhere; user-select: text;
}
`
