// Tokens of a rollout: a strip over all of them, and a window of text around one position.

import { api, getJson } from "./api.js";
import { canvasColor, count, cssColor, fixed, html, onKeys, setQuery, theme, useEffect, useLayoutEffect, useRef, useState, variable } from "./components.js";

const WINDOW = 1500;
const LEVELS = 12;
export const MODES = { logprob: "log-probability", fate: "fate", version: "version", turn: "turn" };
// Modes that need a training record.
const RECORDED = { trainer_logprob: "log-probability (trainer)", difference: "trainer − sampler", entropy: "entropy", ratio: "ratio", importance: "importance weight", advantage: "advantage" };
const LABELS = { ...MODES, ...RECORDED };
const isNumeric = (mode) => mode === "logprob" || mode in RECORDED;

// Segments of turns in the order of a path: {turn, start, prompt, sampled, at}, `at` counts along the path.
export function segmentsOf(turns) {
  let at = 0;
  return turns.map((turn) => {
    const segment = { turn, start: turn.start, prompt: turn.prompt, sampled: turn.sampled, at };
    at += turn.prompt + turn.sampled;
    return segment;
  });
}

export const lengthOf = (segments) => segments.reduce((sum, s) => sum + s.prompt + s.sampled, 0);

export function segmentAt(segments, at) {
  let low = 0;
  let high = segments.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (segments[middle].at <= at) low = middle; else high = middle - 1;
  }
  return segments[low];
}

const versionOf = (turn, offset) => {
  const span = turn.versions.find(([start, end]) => start <= offset && offset < end);
  return span ? span[2] : null;
};

// Level 0 to LEVELS of a number in [0, 1]; -1 for none.
const level = (x) => (Number.isNaN(x) ? -1 : Math.max(0, Math.min(LEVELS, Math.round(x * LEVELS))));

// Level of a token's value in modes that show a number.
function levelOf(mode, table, index) {
  if (mode === "difference") return level(Math.abs(table.trainer_logprob[index] - table.logprob[index]));
  const value = table[mode]?.[index] ?? NaN;
  if (mode.endsWith("logprob")) return level(1 - Math.exp(value));
  if (mode === "ratio" || mode === "importance") return level(Math.abs(Math.log(Math.max(value, 1e-9))) / 0.5);
  if (mode === "advantage") return level(Math.abs(value) / 2);
  return level(value / 4);
}

const heat = () => Array.from({ length: LEVELS + 1 }, (_, i) => canvasColor(`--heat-${i}`));

// Fate of a sampled token: why it is masked, if training recorded it, else that of its turn.
const fateOf = (segment, index, table) => (table.mask?.[index] ? table.text("mask", index) : segment.turn.fate);

// CSS variable of a sampled token's colour in modes that show a name.
function nameOf(mode, segment, offset, table) {
  if (mode === "fate") return variable(fateOf(segment, segment.start + segment.prompt + offset, table));
  if (mode === "version") {
    const version = versionOf(segment.turn, offset);
    return version === null ? "--flat" : `--c${version % 8}`;
  }
  return `--c${Number(segment.turn.id.slice(1)) % 8}`;
}

function draw(canvas, segments, table, mode, from, to) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const total = lengthOf(segments) || 1;
  const numeric = isNumeric(mode);
  const sums = new Float32Array(width);
  const counts = new Uint32Array(width);
  const names = new Array(width).fill(null);
  const columnOf = (at) => Math.min(width - 1, Math.floor((at * width) / total));
  for (const segment of segments) {
    const start = segment.at + segment.prompt;
    if (!numeric) {
      const step = Math.max(1, Math.floor(total / width / 2));
      for (let k = 0; k < segment.sampled; k += step) names[columnOf(start + k)] = nameOf(mode, segment, k, table);
      continue;
    }
    for (let k = 0; k < segment.sampled; k++) {
      const value = levelOf(mode, table, segment.start + segment.prompt + k);
      if (value < 0) continue;
      const column = columnOf(start + k);
      sums[column] += value;
      counts[column] += 1;
    }
  }
  const wide = total < width ? Math.ceil(width / total) : 1;
  const colors = heat();
  const cache = {};
  context.fillStyle = canvasColor("--prompt");
  context.fillRect(0, 0, width, height - 6);
  for (let column = 0; column < width; column++) {
    if (numeric && counts[column]) context.fillStyle = colors[Math.round(sums[column] / counts[column])];
    else if (!numeric && names[column]) context.fillStyle = cache[names[column]] ||= canvasColor(names[column]);
    else continue;
    context.fillRect(column, 0, wide, height - 6);
  }
  context.fillStyle = canvasColor("--muted");
  for (const segment of segments) context.fillRect(columnOf(segment.at), height - 5, 1, 5);
  context.strokeStyle = canvasColor("--accent");
  context.lineWidth = 2;
  context.strokeRect((from * width) / total, 1, Math.max(3, ((to - from) * width) / total), height - 2);
}

export function TokenStrip({ segments, table, mode, from, to, onMove }) {
  const canvas = useRef(null);
  useEffect(() => {
    const paint = () => draw(canvas.current, segments, table, mode, from, to);
    const observer = new ResizeObserver(paint);
    observer.observe(canvas.current);
    return () => observer.disconnect();
  }, [segments, table, mode, from, to, theme()]);
  const move = (event) => {
    if (event.type === "pointermove" && event.buttons !== 1) return;
    const box = canvas.current.getBoundingClientRect();
    onMove(Math.floor(((event.clientX - box.left) / box.width) * lengthOf(segments)));
  };
  return html`<canvas class="strip" ref=${canvas} onPointerDown=${move} onPointerMove=${move}
    role="img" aria-label="all tokens; click to move the window"></canvas>`;
}

// Text of tokens along a path, [from, to). `mark` is the position of a marked token.
export function TokenWindow({ run, rollout, segments, table, mode, from, to, mark }) {
  const [texts, setTexts] = useState({});
  const [shown, setShown] = useState(null);
  useEffect(() => {
    let current = true;
    const parts = segments.filter((s) => s.at < to && s.at + s.prompt + s.sampled > from);
    Promise.all(parts.map(async (segment) => {
      const a = segment.start + Math.max(0, from - segment.at);
      const b = segment.start + Math.min(segment.prompt + segment.sampled, to - segment.at);
      const path = `${api.of(run, "text", rollout)}?a=${a}&b=${b}`;
      const part = await textsOf(path);
      return [segment, a, part.tokens.slice(a - part.a, b - part.a)];
    })).then((loaded) => current && setTexts({ from, loaded }), (error) => current && setTexts({ from, error }));
    return () => { current = false; };
  }, [run, rollout, segments, from, to]);
  if (texts.error) return html`<p class="error">${texts.error.message}</p>`;
  if (!texts.loaded) return html`<p class="muted" aria-busy="true">Loading …</p>`;
  const numeric = isNumeric(mode);
  const over = (event) => {
    const index = event.target.dataset?.i;
    if (index !== undefined) setShown(Number(index));
  };
  const part = ([segment, a, tokens]) => tokens.map((text, k) => {
    const index = a + k;
    const offset = index - segment.start - segment.prompt;
    const begins = index === segment.start;
    const sampled = offset >= 0;
    const heatLevel = sampled && numeric ? levelOf(mode, table, index) : -1;
    const color = !sampled ? null : !numeric ? `var(${nameOf(mode, segment, offset, table)})` : heatLevel < 0 ? null : `var(--heat-${heatLevel})`;
    const at = segment.at + index - segment.start;
    return html`${begins && html`<b class="turn-mark">${segment.turn.id}</b>`}<span data-i=${index}
      class="${sampled ? "sampled" : "prompt"}${numeric || !sampled ? "" : " named"}${at === mark ? " mark" : ""}"
      style=${color ? { [numeric ? "background" : "borderColor"]: color } : null}>${visible(text)}</span>`;
  });
  return html`<div><div class="tokens" onMouseOver=${over} onClick=${over}>${texts.loaded.map(part)}</div>
    <${TokenReadout} index=${shown} segments=${segments} table=${table} /></div>`;
}

const cachedTexts = new Map();

// Texts of a range of tokens, or of more in an exported file; the last ones stay cached.
function textsOf(path) {
  if (cachedTexts.size > 64) cachedTexts.clear();
  if (!cachedTexts.has(path)) cachedTexts.set(path, getJson(path));
  return cachedTexts.get(path);
}

const visible = (text) => text.replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t");

function TokenReadout({ index, segments, table }) {
  if (index === null) return html`<div class="readout">point at a token</div>`;
  const segment = segments.find((s) => s.start <= index && index < s.start + s.prompt + s.sampled);
  if (!segment) return html`<div class="readout"></div>`;
  const offset = index - segment.start - segment.prompt;
  const parts = [`token ${index}`, `id ${table.id[index]}`, segment.turn.id];
  if (offset < 0) parts.push("prompt");
  else {
    const logprob = table.logprob[index];
    parts.push(`log-probability ${fixed(logprob, 4)} (p ${fixed(Math.exp(logprob), 4)})`, `version ${versionOf(segment.turn, offset) ?? "–"}`, fateOf(segment, index, table));
    for (const name of Object.keys(RECORDED)) if (table[name] && !Number.isNaN(table[name][index])) parts.push(`${LABELS[name]} ${fixed(table[name][index], 4)}`);
  }
  return html`<div class="readout">${parts.join(" · ")}</div>`;
}

// Strip, window and choice of colours. `at` is the first token of the window along the path.
export function Tokens({ run, rollout, turns, table, query, missing }) {
  const segments = segmentsOf(turns);
  const total = lengthOf(segments);
  const mode = modeOf(query.color, [table]);
  const first = segments.find((s) => s.sampled);
  const at = Math.max(0, Math.min(Number(query.at ?? (first ? first.at + first.prompt - 40 : 0)), total - 1));
  const from = Math.floor(at / 50) * 50;
  const to = Math.min(total, from + WINDOW);
  const move = (position) => setQuery({ at: Math.max(0, Math.min(total - 1, position)) });
  useLayoutEffect(() => onKeys({ ArrowLeft: () => move(from - WINDOW), ArrowRight: () => move(from + WINDOW) }), [from, total]);
  return html`<section>
    <div class="toolbar"><h2>Tokens</h2>
      <label>colour <select value=${mode} onChange=${(e) => setQuery({ color: e.target.value })}>
        <${ModeOptions} tables=${[table]} /></select></label>
      <button onClick=${() => move(from - WINDOW)} disabled=${from === 0} title="←">‹</button>
      <span class="muted">${count(from)}–${count(to)} of ${total.toLocaleString("en")}</span>
      <button onClick=${() => move(from + WINDOW)} disabled=${to === total} title="→">›</button>
      <${ColorKey} mode=${mode} segments=${segments} table=${table} />
    </div>
    ${missing && html`<p class="muted">Not recorded: ${Object.values(RECORDED).join(", ")}, and why single tokens are masked; ${missing}.</p>`}
    <${TokenStrip} segments=${segments} table=${table} mode=${mode} from=${from} to=${to} onMove=${move} />
    <${TokenWindow} run=${run} rollout=${rollout} segments=${segments} table=${table} mode=${mode} from=${from} to=${to} mark=${query.mark === undefined ? -1 : Number(query.mark)} />
  </section>`;
}

// The chosen mode, if all tables have its values.
export function modeOf(name, tables) {
  return name in MODES || (name in RECORDED && tables.every((table) => table.entropy)) ? name : "logprob";
}

export function ModeOptions({ tables }) {
  const recorded = tables.every((table) => table.entropy);
  return Object.entries(LABELS).map(([name, label]) => html`<option value=${name} disabled=${name in RECORDED && !recorded}>${label}</option>`);
}

export function ColorKey({ mode, segments, table }) {
  if (mode === "fate") {
    const names = new Set(segments.filter((s) => s.sampled).map((s) => s.turn.fate));
    if (table.mask) for (const code of new Set(table.mask)) if (code) names.add(table.strings.mask[code]);
    return html`<span class="legend">${[...names].map((name) => html`<span><i class="swatch" style=${{ background: cssColor(name) }}></i>${name}</span>`)}</span>`;
  }
  if (mode === "version") {
    const versions = [...new Set(segments.flatMap((s) => s.turn.versions.map((v) => v[2])))].sort((a, b) => a - b);
    return html`<span class="legend">${versions.slice(0, 12).map((v) => html`<span><i class="swatch" style=${{ background: `var(--c${v % 8})` }}></i>v${v}</span>`)}</span>`;
  }
  if (mode === "turn") return null;
  const ends = {
    logprob: ["p = 1", "p = 0"], trainer_logprob: ["p = 1", "p = 0"], difference: ["0", "1 or more"], entropy: ["0", "4 nats"],
    ratio: ["1", "×1.6 or ÷1.6"], importance: ["1", "×1.6 or ÷1.6"], advantage: ["0", "±2"],
  }[mode];
  return html`<span class="legend key"><span>${ends[0]}</span><i class="ramp"></i><span>${ends[1]}</span></span>`;
}
