// Timeline: attempts with their calls and tools, queue, trainer, versions and discarded work.

import { api } from "../api.js";
import { Chart, Loaded, Table, canvasColor, clock, count, go, html, rolloutLink, seconds, setQuery, theme, useData, useEffect, useMemo, useRef, useState } from "../components.js";

const KIND_COLORS = { queue: "--wait", retries: "--infra", launch: "--c5", call: "--accent", tool: "--policy", refused: "--error", grade: "--verifier" };
const LANE = 7;
const TRAINER = 40; // height of the trainer's lane

export function TimelinePage({ parts: [, run], query }) {
  const range = query.t0 ? `?t0=${encodeURIComponent(query.t0)}&t1=${encodeURIComponent(query.t1)}` : "";
  const page = useData(api.of(run, "timeline") + range, "json", run);
  const events = useData(api.of(run, "events") + range, "columns", run);
  return html`<div class="toolbar"><h1>Timeline <span class="muted">${run}</span></h1>
      ${query.t0 && html`<button onClick=${() => setQuery({ t0: "", t1: "" })}>whole run</button>`}</div>
    <${Loaded} state=${page}>${(data) => (data.t0 == null ? html`<p class="muted">No times were recorded.</p>` : html`
      <${Concurrency} data=${data} />
      <${Loaded} state=${events}>${(table) => html`<${Gantt} run=${run} data=${data} table=${table} />`}</${Loaded}>
      <${Discarded} run=${run} rows=${data.discarded} tokens=${data.discarded_tokens} />`)}</${Loaded}>`;
}

// Number of calls, tools and waiting rollouts at each time. Dragging chooses a range.
function Concurrency({ data }) {
  const { x, series } = useMemo(() => {
    const n = data.bucket_count;
    const times = Array.from({ length: n }, (_, i) => data.from + (i + 1) * data.width);
    const lines = Object.fromEntries(["call", "tool", "queue", "launch", "grade"].map((kind) => [kind, new Float64Array(n + 1)]));
    for (const { bucket, kind, change } of data.buckets) if (kind in lines) lines[kind][bucket + 1] += change; // 0 is before the range
    const running = (line) => { let sum = line[0]; return Array.from(line.subarray(1), (change) => (sum += change)); };
    const used = Object.entries(lines).filter(([, line]) => line.some((v) => v));
    return { x: times, series: used.map(([kind, line]) => ({ name: kind, values: running(line), color: KIND_COLORS[kind] })) };
  }, [data]);
  return html`<section><h2>At once</h2><${Chart} time=${true} x=${x} series=${series} stacked=${true} height=${150}
    onSelect=${(t0, t1) => setQuery({ t0: t0.toFixed(3), t1: t1.toFixed(3) })} /><p class="muted">drag to choose a range</p></section>`;
}

// Rollouts in lanes: each takes the first lane that is free when it begins.
function layout(table) {
  const spans = new Map();
  for (let row = 0; row < table.rows; row++) {
    const key = table.rollout[row];
    const end = table.t[row] + table.seconds[row];
    const span = spans.get(key);
    if (span) { span.from = Math.min(span.from, table.t[row]); span.to = Math.max(span.to, end); } else spans.set(key, { key, from: table.t[row], to: end });
  }
  const free = [];
  for (const span of [...spans.values()].sort((a, b) => a.from - b.from)) {
    let lane = free.findIndex((end) => end <= span.from);
    if (lane < 0) lane = free.length;
    free[lane] = span.to;
    span.lane = lane;
  }
  return { spans, lanes: free.length };
}

function Gantt({ run, data, table }) {
  const canvas = useRef(null);
  const [shown, setShown] = useState("");
  const { spans, lanes } = useMemo(() => layout(table), [table]);
  const from = table.rows ? Math.max(data.from, table.t[0]) : data.from;
  const to = data.to;
  const height = TRAINER + lanes * LANE + 8;
  useEffect(() => {
    const node = canvas.current;
    const paint = () => {
      const ratio = devicePixelRatio || 1;
      const width = node.clientWidth;
      node.width = width * ratio;
      node.height = height * ratio;
      const context = node.getContext("2d");
      context.scale(ratio, ratio);
      const x = (t) => ((t - from) / (to - from || 1)) * width;
      const colors = Object.fromEntries(Object.entries(KIND_COLORS).map(([kind, name]) => [kind, canvasColor(name)]));
      const [ok, bad, ink, drop] = ["--ok", "--infra", "--muted", "--line"].map(canvasColor);
      context.font = "10px system-ui, sans-serif";
      context.fillStyle = drop;
      for (const span of spans.values()) context.fillRect(x(span.from), TRAINER + span.lane * LANE + 2, Math.max(1, x(span.to) - x(span.from)), 2);
      for (let row = 0; row < table.rows; row++) {
        const kind = table.text("kind", row);
        const y = TRAINER + spans.get(table.rollout[row]).lane * LANE;
        if (kind === "outcome") {
          context.fillStyle = table.text("failure", row) ? bad : ok;
          context.fillRect(x(table.t[row]) - 1, y, 2, LANE - 1);
        } else if (kind in colors) {
          context.fillStyle = colors[kind];
          context.fillRect(x(table.t[row]), y + 1, Math.max(1, x(table.t[row] + table.seconds[row]) - x(table.t[row])), LANE - 3);
        }
      }
      let label = -Infinity;
      for (const mark of data.marks) {
        const at = x(mark.t);
        if (mark.kind === "trained") {
          context.fillStyle = canvasColor("--c4");
          context.fillRect(at, 4, Math.max(2, x(mark.t + mark.seconds) - at), 12);
        } else {
          context.fillStyle = ink;
          context.fillRect(at, 18, 1, height - 18);
          if (at > label) { context.fillText(`v${mark.value}`, at + 3, 30); label = at + 28; }
        }
      }
    };
    const observer = new ResizeObserver(paint);
    observer.observe(node);
    return () => observer.disconnect();
  }, [table, data, theme()]);
  const find = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const t = from + ((event.clientX - box.left) / box.width) * (to - from);
    const lane = Math.floor((event.clientY - box.top - TRAINER) / LANE);
    const slack = (2 * (to - from)) / box.width;
    for (const span of spans.values()) if (span.lane === lane && span.from - slack <= t && t <= span.to + slack) return { span, t };
    return null;
  };
  const over = (event) => {
    const hit = find(event);
    if (!hit) return setShown("");
    const parts = [];
    for (let row = 0; row < table.rows; row++) {
      if (table.rollout[row] !== hit.span.key || !(table.t[row] <= hit.t && hit.t <= table.t[row] + table.seconds[row])) continue;
      parts.push(`${table.text("kind", row)} ${table.text("turn", row)} ${seconds(table.seconds[row])}`);
    }
    return setShown(`${table.strings.rollout[hit.span.key]}  ${parts.join(", ")}`);
  };
  const click = (event) => { const hit = find(event); if (hit) go(["r", run, "o", table.strings.rollout[hit.span.key]]); };
  return html`<section><h2>Rollouts, trainer and versions</h2>
    <div class="legend">${[["trainer", "--c4"], ...Object.entries(KIND_COLORS), ["outcome", "--ok"], ["failed", "--infra"]].map(([kind, color]) => html`<span><i class="swatch" style=${{ background: `var(${color})` }}></i>${kind}</span>`)}</div>
    <div class="readout">${shown || `${clock(from)} to ${clock(to)}, ${count(spans.size)} rollouts${table.header.cut ? ", the latest events; drag above to see others" : ""}`}</div>
    <div class="scroll"><canvas class="gantt" ref=${canvas} style=${{ height: `${height}px` }} onMouseMove=${over} onClick=${click} role="img" aria-label="rollouts over time"></canvas></div></section>`;
}

function Discarded({ run, rows, tokens }) {
  const columns = [
    { name: "id", title: "rollout", width: 14, grow: 2, cell: (r) => rolloutLink(run, r.id) },
    { name: "failure", title: "failure", width: 11, grow: 1, cell: (r) => (r.failure_kind ? `${r.failure_kind}/${r.failure_reason}` : "") },
    { name: "dropped", title: "group dropped", width: 10, grow: 1, cell: (r) => r.dropped || "" },
    { name: "attempts", title: "attempts", width: 6, numeric: true, cell: (r) => r.attempts },
    { name: "retries", title: "in failed attempts", width: 10, numeric: true, cell: (r) => seconds(r.retries_s) },
    { name: "retried", title: "their tokens", width: 7.5, numeric: true, cell: (r) => count(r.retried_tokens) },
    { name: "tokens", title: "tokens", width: 5, numeric: true, cell: (r) => count(r.sampled_tokens) },
    { name: "step", title: "step", width: 4, numeric: true, cell: (r) => r.step ?? "–" },
  ];
  if (!rows.length) return null;
  const { retried_attempts, failed_rollouts, dropped_groups, sampled } = tokens;
  const discarded = retried_attempts + failed_rollouts + dropped_groups;
  return html`<section><h2>Discarded work <span class="muted">failed rollouts, retried attempts and dropped groups, latest first</span></h2>
    <p class="muted">${count(discarded)} of ${count(sampled + retried_attempts)} sampled tokens: ${count(retried_attempts)} in retried attempts, ${count(failed_rollouts)} in rollouts without a reward, ${count(dropped_groups)} in dropped groups</p>
    <${Table} label="discarded work" columns=${columns} rows=${rows} open=${(r) => go(["r", run, "o", r.id])} height="35vh" /></section>`;
}
