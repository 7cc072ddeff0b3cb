// The style sheet of the runs sidebar.

import { BASE } from './style.mjs'

export const TAB_STYLE = `${BASE}
:host { height: 100%; }
.tab {
  --ground: var(--comfy-menu-bg, #222);
  display: flex; flex-direction: column; gap: 10px; height: 100%; padding: 10px 12px; overflow: auto;
  background: var(--ground); container-type: inline-size;
}
.bar { display: flex; flex-wrap: wrap; align-items: center; gap: 6px; }
.bar button { flex: 0 1 auto; max-width: 100%; white-space: normal; text-align: start; }
h2 { flex: 1; min-width: 0; margin: 0; font-size: 14px; font-weight: 600; overflow-wrap: anywhere; }
h3 { margin: 0; font-size: 12px; font-weight: 600; }
p { margin: 0; color: var(--dim); overflow-wrap: anywhere; }
ul { list-style: none; margin: 0; padding: 0; }

.runs { display: flex; flex-direction: column; gap: 4px; }
.runs button {
  display: grid; grid-template-columns: 48px 1fr; gap: 10px; align-items: center; width: 100%; padding: 6px;
  border-color: transparent; background: none; text-align: left;
}
.runs button:hover { background: color-mix(in srgb, var(--ink) 8%, transparent); }
.thumb {
  width: 48px; height: 48px; border-radius: 4px; object-fit: cover;
  background: color-mix(in srgb, var(--ink) 8%, transparent);
}
.about { min-width: 0; }
.about b { display: block; overflow-wrap: anywhere; }
.about span { color: var(--dim); }
.about .dot { display: inline-block; margin-right: 5px; }
.meter { display: block; height: 3px; margin-top: 4px; border-radius: 2px; background: var(--line); overflow: hidden; }
.meter i { display: block; height: 100%; background: var(--tone); }

.tab .chart { flex: none; height: 210px; }
.facts { display: flex; flex-wrap: wrap; justify-content: flex-start; gap: 8px 16px; }
.facts > div { min-width: 56px; }
section { display: flex; flex-direction: column; gap: 8px; }
details > summary { cursor: pointer; font-weight: 600; padding: 2px 0; }
table { width: 100%; border-collapse: collapse; }
td { padding: 2px 0; vertical-align: top; overflow-wrap: anywhere; }
td:first-child { width: 45%; padding-right: 8px; color: var(--dim); }
caption { padding-top: 8px; text-align: left; font-weight: 600; text-transform: capitalize; }
form.ask {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(108px, 1fr)); align-items: end; gap: 8px; padding: 10px;
  border: 1px solid var(--line); border-radius: 6px;
}
form.ask label { display: flex; flex-direction: column; gap: 2px; color: var(--dim); font-size: 11px; }
form.ask label.check { flex-direction: row-reverse; justify-content: flex-end; align-items: center; gap: 6px; min-height: 24px; }
form.ask label.wide, form.ask p, form.ask .row { grid-column: 1 / -1; }
form.ask input:not([type='checkbox']), form.ask select { width: 100%; }
form.ask input[type='checkbox'] { margin: 0; accent-color: var(--accent); }
form.ask p { color: var(--ink); }
form.ask .row { display: flex; justify-content: flex-end; gap: 6px; }

.slider { display: flex; align-items: center; gap: 8px; }
.slider input { flex: 1; min-width: 0; accent-color: var(--accent); }
.slider output { min-width: 74px; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(120px, 1fr)); gap: 8px; align-items: start; }
.pictures button { padding: 0; border: 0; background: none; text-align: left; }
.pictures img, .pair img {
  display: block; width: 100%; border-radius: 4px; background: color-mix(in srgb, var(--ink) 8%, transparent);
}
.pictures img { aspect-ratio: var(--shape, 1); object-fit: cover; }
.pictures span, .pair span { display: block; margin-top: 3px; color: var(--dim); font-size: 11px; overflow-wrap: anywhere; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; overflow: auto; }
.pair figure { display: flex; flex-direction: column; gap: 6px; margin: 0; min-width: 0; }
.pair img { max-height: 62vh; object-fit: contain; image-rendering: auto; }
`
