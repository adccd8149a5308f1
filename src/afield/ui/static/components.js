// Components that pages share: links, tiles, charts, tables, texts.

import { getColumns, getJson, live } from "./api.js";

export const { html, render, useState, useEffect, useLayoutEffect, useRef, useMemo, useCallback } = globalThis.htmPreact;
const uPlot = globalThis.uPlot;

// --- addresses ---------------------------------------------------------------------------------------

export function parseHash() {
  const [path, query] = location.hash.replace(/^#/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  return { parts, query: Object.fromEntries(new URLSearchParams(query || "")) };
}

export function address(parts, query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== "" && value != null);
  const text = new URLSearchParams(kept).toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

export function go(parts, query) {
  location.hash = address(parts, query);
}

// Changes the query of the current page without a new entry in the history.
export function setQuery(changes) {
  const { parts, query } = parseHash();
  history.replaceState(null, "", address(parts, { ...query, ...changes }));
  dispatchEvent(new HashChangeEvent("hashchange"));
}

export const Link = ({ to, query, children, ...rest }) =>
  html`<a href=${address(to, query)} ...${rest}>${children}</a>`;

// --- data --------------------------------------------------------------------------------------------

const listeners = new Set();
let stopLive = null;

// Loads `path` and loads it again when the run changes. `kind` is "json" or "columns".
export function useData(path, kind = "json", run = null) {
  const [state, setState] = useState({ path: null, data: null, error: null });
  const current = useRef({});
  const load = () => {
    if (!path) return;
    const began = performance.now();
    const mine = current.current = { path, until: began + 1000 };
    (kind === "json" ? getJson(path) : getColumns(path))
      .then((data) => ({ path, data, error: null }), (error) => ({ path, data: null, error: error.message }))
      .then((loaded) => {
        if (current.current !== mine) return;
        mine.until = began + 10 * (performance.now() - began); // slow answers are requested less often
        setState(loaded);
      });
  };
  useEffect(load, [path]);
  useEffect(() => {
    if (!run) return undefined;
    let timer = null;
    const listener = (runs) => {
      if (timer || !(run === true || runs.includes(run))) return;
      timer = setTimeout(() => { timer = null; load(); }, Math.max(0, Math.min(60000, current.current.until - performance.now())));
    };
    listeners.add(listener);
    stopLive ||= live((runs) => listeners.forEach((each) => each(runs)));
    return () => { clearTimeout(timer); listeners.delete(listener); };
  }, [path, run]);
  return state.path === path ? state : { path, data: null, error: null };
}

export function Loaded({ state, children }) {
  if (state.error) return html`<p class="error" role="alert">${state.error}</p>`;
  if (!state.data) return html`<p class="muted" aria-busy="true">Loading …</p>`;
  return children(state.data);
}

// --- formats -----------------------------------------------------------------------------------------

export const isNumber = (x) => typeof x === "number" && !Number.isNaN(x);
export const fixed = (x, digits = 3) => (isNumber(x) ? x.toFixed(digits).replace(/\.?0+$/, "").replace(/^-0?$/, "0") : "–");
export const percent = (x) => (isNumber(x) ? `${(100 * x).toFixed(x > 0 && x < 0.1 ? 2 : 1)} %` : "–");
const twoDigits = (x) => String(x).padStart(2, "0");

// Local time as 2026-11-18 17:05:09.
export function clock(t) {
  if (!isNumber(t)) return "–";
  const d = new Date(1000 * t);
  const parts = (...values) => values.map(twoDigits);
  return `${parts(d.getFullYear(), d.getMonth() + 1, d.getDate()).join("-")} ${parts(d.getHours(), d.getMinutes(), d.getSeconds()).join(":")}`;
}

export function count(x) {
  if (!isNumber(x)) return "–";
  if (Math.abs(x) >= 1e6) return `${(x / 1e6).toFixed(2)} M`;
  return Math.abs(x) >= 1e4 ? `${(x / 1e3).toFixed(1)} k` : String(Math.round(x));
}

export function seconds(x) {
  if (!isNumber(x)) return "–";
  if (x === 0) return "0 s";
  if (x < 1) return `${(1000 * x).toFixed(x < 0.01 ? 1 : 0)} ms`;
  return x < 120 ? `${x.toFixed(x < 10 ? 2 : 1)} s` : `${(x / 60).toFixed(1)} min`;
}

export const scientific = (x) => (isNumber(x) ? (x === 0 ? "0" : x.toExponential(1)) : "–");

// --- colours -----------------------------------------------------------------------------------------

// Fates and owners have fixed colours, other names take the next of the palette.
const NAMED = {
  trained: "--ok", reward: "--ok", ok: "--ok", success: "--ok", pending: "--wait", validation: "--info",
  policy: "--policy", task: "--task", verifier: "--verifier", infrastructure: "--infra",
  no_advantage: "--flat", dropped_group: "--drop", prompt: "--prompt",
  clipped: "--c4", importance: "--c3", skipped_update: "--infra",
};
const PALETTE = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7"];
const assigned = new Map();

export function variable(name) {
  if (name in NAMED) return NAMED[name];
  const kind = name.split("_")[0];
  if (name.endsWith("_failure") && kind in NAMED) return NAMED[kind];
  if (!assigned.has(name)) assigned.set(name, PALETTE[assigned.size % PALETTE.length]);
  return assigned.get(name);
}

export const cssColor = (name) => `var(${variable(name)})`;
export const canvasColor = (property) => getComputedStyle(document.documentElement).getPropertyValue(property).trim();

// --- small parts -------------------------------------------------------------------------------------

export const Tile = ({ title, value, note, tone, href }) => html`
  <div class="tile ${tone || ""}">
    <div class="tile-title">${title}</div>
    <div class="tile-value">${href ? html`<a href=${href}>${value}</a>` : value}</div>
    ${note && html`<div class="tile-note">${note}</div>`}
  </div>`;

export const Badge = ({ name, children }) =>
  html`<span class="badge"><i style=${{ background: cssColor(name) }}></i>${children || name}</span>`;

// Parts of a whole as one bar with a legend: [{name, value, href?}].
export function PartsBar({ parts, total }) {
  const sum = total || parts.reduce((all, part) => all + part.value, 0) || 1;
  return html`<div>
    <div class="parts" role="img" aria-label=${parts.map((p) => `${p.name} ${p.value}`).join(", ")}>
      ${parts.map((p) => html`<span title=${`${p.name}: ${p.value}`}
        style=${{ width: `${(100 * p.value) / sum}%`, background: cssColor(p.name) }}></span>`)}
    </div>
    <div class="legend">${parts.map((p) => html`<span><${Badge} name=${p.name}>
      ${p.href ? html`<a href=${p.href}>${p.name}</a>` : p.name}</${Badge}> ${count(p.value)} (${percent(p.value / sum)})
    </span>`)}</div>
  </div>`;
}

// Rows of bars over a common width: [{label, title, bars: [{from, to, color}]}], from 0 to 1.
export const BarRows = ({ rows, label }) => html`<div class="scroll bars" role="img" aria-label=${label}>
  ${rows.map((row, i) => html`<div class="bar-row" key=${i} title=${row.title}><span>${row.label}</span><div>${row.bars.map((bar) => html`<i
    style=${{ left: `${100 * bar.from}%`, width: `${Math.max(0.3, 100 * (bar.to - bar.from))}%`, background: `var(${bar.color})` }}></i>`)}</div></div>`)}</div>`;

// A text that may be cut: a string, or {text, length}; `load` gets the whole one.
export function LongText({ value, load, className = "" }) {
  const [whole, setWhole] = useState(null);
  if (!value) return null;
  if (typeof value === "string") return html`<pre class="text ${className}">${value}</pre>`;
  return html`<pre class="text ${className}">${whole ?? value.text}</pre>
    ${whole === null && html`<button onClick=${async () => setWhole(await load())}>
      show all ${count(value.length)} characters</button>`}`;
}

// --- chart -------------------------------------------------------------------------------------------

const WHOLE = [1, 2, 5].flatMap((digit) => [0, 1, 2, 3, 4, 5, 6].map((power) => digit * 10 ** power)).sort((a, b) => a - b);

// Lines over x: series [{name, values, color?, scale?, bars?}]. `onSelect(from, to)` follows dragging,
// `onPick(index)` a click.
export function Chart({ x, series, height = 220, title, time = false, onSelect, onPick, stacked = false, ranges = {} }) {
  const holder = useRef(null);
  useEffect(() => {
    const node = holder.current;
    if (!node || !x.length) return undefined;
    const ink = canvasColor("--muted");
    const grid = { stroke: canvasColor("--line"), width: 1 };
    const bars = stacked && !time;
    const scales = { x: bars ? { time, range: (_, low, high) => [low - 0.5, high + 0.5] } : { time } };
    const axes = [{ stroke: ink, grid, ticks: grid, size: time ? 46 : 30, ...(time ? {} : { incrs: WHOLE }) }];
    const data = [x];
    const list = [{}];
    let below = new Array(x.length).fill(0);
    series.forEach((one, i) => {
      const color = canvasColor(one.color || variable(one.name));
      const scale = one.scale || "y";
      if (!(scale in scales)) {
        scales[scale] = ranges[scale] ? { range: ranges[scale] } : stacked ? { range: (_, __, high) => [0, (high || 1) * 1.05] } : {};
        axes.push({ scale, stroke: ink, grid: axes.length > 1 ? { show: false } : grid, ticks: grid, side: axes.length > 1 ? 1 : 3, size: 56 });
      }
      const stack = stacked && scale === "y";
      const values = stack ? one.values.map((v, k) => (below[k] += v || 0)) : one.values;
      data.push(stack ? [...values] : values);
      const fill = stack ? color : undefined;
      const paths = one.bars || stack ? uPlot.paths.bars({ size: [0.8, 60], align: 0 }) : undefined;
      list.push({ label: one.name, stroke: color, width: stack ? 0 : 2, fill, scale, paths, spanGaps: true,
        points: { show: !stack && x.length < 60, size: 5, fill: color } });
    });
    if (stacked) { // the largest sums are drawn first, the smaller ones over them
      const order = series.map((_, i) => i + 1).filter((i) => list[i].scale === "y").reverse();
      const rest = series.map((_, i) => i + 1).filter((i) => list[i].scale !== "y");
      const all = [0, ...order, ...rest];
      data.splice(0, data.length, ...all.map((i) => data[i]));
      list.splice(0, list.length, ...all.map((i) => list[i]));
    }
    const options = {
      width: node.clientWidth, height, scales, axes, series: list,
      legend: { show: false }, cursor: { drag: { setScale: false, x: Boolean(onSelect), y: false } },
      hooks: {
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          if (onSelect && width > 4) onSelect(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
        }],
        ready: [(plot) => plot.over.addEventListener("click", () => {
          if (onPick && plot.cursor.idx != null && plot.select.width < 4) onPick(plot.cursor.idx);
        })],
        setCursor: [(plot) => {
          const i = plot.cursor.idx;
          readout.textContent = i == null ? "" : [
            time ? clock(x[i]) : `${title || "x"} ${x[i]}`,
            ...series.map((one) => `${one.name} ${fixed(one.values[i])}`)].join("   ");
        }],
      },
    };
    const readout = node.nextElementSibling;
    const plot = new uPlot(options, data, node);
    const observer = new ResizeObserver(() => plot.setSize({ width: node.clientWidth, height }));
    observer.observe(node);
    return () => { observer.disconnect(); plot.destroy(); };
  }, [x, series, theme()]);
  return html`<div class="chart">
    <div class="legend">${series.map((one) => html`<span><i class="swatch"
      style=${{ background: `var(${one.color || variable(one.name)})` }}></i>${one.name}</span>`)}</div>
    <div ref=${holder}></div><div class="readout"></div></div>`;
}

export const theme = () => document.documentElement.dataset.theme || "auto";

// --- table -------------------------------------------------------------------------------------------

const ROW_HEIGHT = 30;

// A table that renders the visible rows only. Columns: {name, title, width (rem), grow?, numeric?, cell(row), sort?}.
// `rows` are opaque values; `open(row)` follows Enter or a click on the row.
export function Table({ columns, rows, open, sort = "", onSort, height = "60vh", label }) {
  const holder = useRef(null);
  const [top, setTop] = useState(0);
  const [chosen, setChosen] = useState(0);
  const view = holder.current?.clientHeight || 600;
  const first = Math.max(0, Math.floor(top / ROW_HEIGHT) - 8);
  const last = Math.min(rows.length, Math.ceil((top + view) / ROW_HEIGHT) + 8);
  const lines = {
    gridTemplateColumns: columns.map((c) => (c.grow ? `minmax(${c.width}rem, ${c.grow}fr)` : `${c.width}rem`)).join(" "),
    minWidth: `${columns.reduce((sum, c) => sum + c.width + 0.6, 0.6)}rem`,
  };
  const move = (by) => {
    const next = Math.max(0, Math.min(rows.length - 1, chosen + by));
    setChosen(next);
    const node = holder.current;
    const y = next * ROW_HEIGHT;
    if (y < node.scrollTop) node.scrollTop = y;
    else if (y + 2 * ROW_HEIGHT > node.scrollTop + node.clientHeight) node.scrollTop = y + 2 * ROW_HEIGHT - node.clientHeight;
  };
  useEffect(() => { setChosen(0); if (holder.current) holder.current.scrollTop = 0; }, [sort, rows.length]);
  useLayoutEffect(() => onKeys({
    j: () => move(1), ArrowDown: () => move(1), k: () => move(-1), ArrowUp: () => move(-1),
    PageDown: () => move(20), PageUp: () => move(-20), Home: () => move(-rows.length), End: () => move(rows.length),
    Enter: () => open && rows[chosen] !== undefined && open(rows[chosen]),
  }), [rows, chosen]);
  const header = (c) => html`<div role="columnheader" class=${c.numeric ? "num" : ""}
    aria-sort=${sort === c.name ? "ascending" : sort === `-${c.name}` ? "descending" : "none"}>
    ${onSort && c.sort ? html`<button class="plain" onClick=${() => onSort(sort === `-${c.name}` ? c.name : `-${c.name}`)}>
      ${c.title}${sort === c.name ? " ↑" : sort === `-${c.name}` ? " ↓" : ""}</button>` : c.title}</div>`;
  return html`<div class="table" role="table" aria-label=${label} aria-rowcount=${rows.length} ref=${holder}
    style=${{ maxHeight: height }} tabindex="0" onScroll=${(e) => setTop(e.currentTarget.scrollTop)}>
    <div class="tr th" role="row" style=${lines}>${columns.map(header)}</div>
    <div class="tbody" style=${{ height: `${rows.length * ROW_HEIGHT}px` }}>
      ${rows.slice(first, last).map((row, i) => html`<div role="row" key=${first + i}
        class="tr ${first + i === chosen ? "chosen" : ""} ${open ? "link" : ""}"
        style=${{ ...lines, top: `${(first + i) * ROW_HEIGHT}px` }}
        onClick=${(e) => { setChosen(first + i); if (open && !e.target.closest("a")) open(row); }}>
        ${columns.map((c) => html`<div role="cell" class=${c.numeric ? "num" : c.tail ? "tail" : ""}>${c.tail ? html`<bdi>${c.cell(row)}</bdi>` : c.cell(row)}</div>`)}</div>`)}
    </div></div>`;
}

// --- keys --------------------------------------------------------------------------------------------

// Handles keys outside of inputs; returns a function that ends it.
export function onKeys(handlers) {
  const listener = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
    const handler = handlers[event.key];
    if (handler && !event.defaultPrevented) { event.preventDefault(); handler(event); }
  };
  addEventListener("keydown", listener);
  return () => removeEventListener("keydown", listener);
}

export const rolloutLink = (run, id, text) => html`<${Link} to=${["r", run, "o", id]}>${text || id}</${Link}>`;
