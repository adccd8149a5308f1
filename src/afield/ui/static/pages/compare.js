// Runs overlaid: rewards and any other metric by step, estimates of evaluations, and tasks with the largest differences.

import { api, getColumns, getJson } from "../api.js";
import { differences, estimateNames, sharedSplit, stepSeconds } from "../comparison.js";
import { Chart, Loaded, Table, count, fixed, go, html, isNumber, percent, seconds, setQuery, useData, useEffect, useMemo, useState } from "../components.js";

const PLAIN = ["reward", "failed", "turns_per_rollout", "tool_calls_per_rollout", "sampled_tokens", "trained_tokens", "excluded_share", "wasted_tokens", "staleness", "collect_s", "train_s"];

export function ComparePage({ query }) {
  const chosen = (query.runs || "").split(",").filter(Boolean);
  return html`<h1>Compare runs</h1><${Loaded} state=${useData(api.runs(), "json", true)}>${({ runs }) => {
    const toggle = (key) => setQuery({ runs: (chosen.includes(key) ? chosen.filter((k) => k !== key) : [...chosen, key]).join(",") });
    return html`<div class="toolbar">${runs.map((r) => html`<label key=${r.run}><input type="checkbox" checked=${chosen.includes(r.run)} onChange=${() => toggle(r.run)} /> ${r.run}</label>`)}</div>
      ${chosen.length > 0 && html`<${Overlay} key=${chosen.join()} chosen=${chosen} query=${query} />`}`;
  }}</${Loaded}>`;
}

// Values of a metric by step: a field of the step's line, or of its trainer's or agents' metrics.
const metricOf = (line, name) => line[name] ?? line.trainer?.[name] ?? line.agent?.[name] ?? null;

function Overlay({ chosen, query }) {
  const [state, setState] = useState({ data: null, error: null });
  useEffect(() => {
    Promise.all(chosen.map((run) => getJson(api.run(run)))).then((data) => setState({ data, error: null }), (error) => setState({ data: null, error: error.message }));
  }, [chosen.join()]);
  return html`<${Loaded} state=${state}>${(runs) => html`<${OverlayView} runs=${runs} query=${query} />`}</${Loaded}>`;
}

function OverlayView({ runs, query }) {
  const name = query.metric || "reward";
  const names = useMemo(() => {
    const found = new Set(PLAIN);
    for (const run of runs) for (const line of run.metrics) for (const part of [line.trainer, line.agent]) for (const key of Object.keys(part || {})) found.add(key);
    return [...found];
  }, [runs]);
  const { x, series } = useMemo(() => {
    const steps = [...new Set(runs.flatMap((run) => run.metrics.map((m) => m.step)))].sort((a, b) => a - b);
    return { x: steps, series: runs.map((run, i) => {
      const values = new Map(run.metrics.map((m) => [m.step, metricOf(m, name)]));
      return { name: run.run, color: `--c${i % 8}`, values: steps.map((step) => values.get(step) ?? null) };
    }) };
  }, [runs, name]);
  const last = (run) => run.metrics[run.metrics.length - 1];
  const columns = [
    { name: "run", title: "run", width: 14, grow: 2, cell: (r) => html`<a href=${`#/r/${encodeURIComponent(r.run)}`}>${r.run}</a>` },
    { name: "steps", title: "steps", width: 4, numeric: true, cell: (r) => r.metrics.length },
    { name: "rollouts", title: "rollouts", width: 5.5, numeric: true, cell: (r) => count(r.rollouts) },
    { name: "first", title: "first reward", width: 7, numeric: true, cell: (r) => fixed(r.metrics.find((m) => isNumber(m.reward))?.reward) },
    { name: "last", title: "last reward", width: 7, numeric: true, cell: (r) => fixed(last(r)?.reward) },
    { name: "validation", title: "validation", width: 6, numeric: true, cell: (r) => fixed(r.validation[r.validation.length - 1]?.reward) },
    { name: "failed", title: "failed", width: 5, numeric: true, cell: (r) => (r.rollouts ? percent(r.failed / r.rollouts) : "–") },
    { name: "tokens", title: "tokens", width: 5.5, numeric: true, cell: (r) => count(r.exactness.sampled) },
    { name: "step_s", title: "per step", width: 5.5, numeric: true, cell: (r) => seconds(stepSeconds(r.metrics)) },
  ];
  const trained = runs.filter((run) => !run.evaluation);
  const evaluated = runs.filter((run) => run.evaluation);
  const split = sharedSplit(runs);
  return html`${x.length > 0 && html`<div class="toolbar"><label>metric <select value=${name} onChange=${(e) => setQuery({ metric: e.target.value })}>${names.map((n) => html`<option value=${n}>${n}</option>`)}</select></label></div>
    <${Chart} title="step" x=${x} series=${series} height=${280} />`}
    ${trained.length > 0 && html`<${Table} label="runs" columns=${columns} rows=${trained} open=${(r) => go(["r", r.run])} height="40vh" />`}
    ${evaluated.length > 0 && html`<${Evaluations} runs=${evaluated} />`}
    ${runs.length === 2 && html`<${TaskDifferences} key=${split} runs=${runs.map((r) => r.run)} split=${split} />`}`;
}

// Mean reward and pass@k with their intervals, of runs without training steps.
function Evaluations({ runs }) {
  const estimate = (e) => (e ? `${fixed(e.mean)}${e.low == null ? "" : ` (${fixed(e.low)} to ${fixed(e.high)})`}` : "–");
  const columns = [
    { name: "run", title: "run", width: 14, grow: 2, cell: (r) => html`<a href=${`#/r/${encodeURIComponent(r.run)}`}>${r.run}</a>` },
    { name: "tasks", title: "tasks", width: 4.5, numeric: true, cell: (r) => count(r.evaluation.task_count) },
    { name: "rollouts", title: "rollouts", width: 5.5, numeric: true, cell: (r) => count(r.rollouts) },
    { name: "failed", title: "failed", width: 5, numeric: true, cell: (r) => (r.rollouts ? percent(r.failed / r.rollouts) : "–") },
    ...estimateNames(runs).map((name) => ({ name, title: name, width: 12, numeric: true, cell: (r) => estimate(r.evaluation.estimates[name]) })),
    { name: "tokens", title: "tokens", width: 5.5, numeric: true, cell: (r) => count(r.exactness.sampled) },
  ];
  return html`<section><h2>Evaluations <span class="muted">estimates with 95 % intervals</span></h2>
    <${Table} label="evaluations" columns=${columns} rows=${runs} open=${(r) => go(["r", r.run])} height="40vh" /></section>`;
}

// Mean rewards of tasks that both runs have, with the largest difference first.
function TaskDifferences({ runs, split }) {
  const [state, setState] = useState({ data: null, error: null });
  useEffect(() => {
    Promise.all(runs.map((run) => getColumns(api.of(run, "rollouts.bin")))).then(
      (tables) => setState({ data: differences(tables, split), error: null }), (error) => setState({ data: null, error: error.message }));
  }, [runs.join()]);
  const columns = [
    { name: "task", title: "task", width: 12, grow: 2, cell: (r) => r.task },
    ...runs.map((run, i) => ({ name: run, title: i ? "second" : "first", width: 6, numeric: true, cell: (r) => `${fixed(r.means[i])} (${r.ns[i]})` })),
    { name: "difference", title: "difference", width: 6, numeric: true, cell: (r) => fixed(r.means[1] - r.means[0]) },
  ];
  return html`<section><h2>Tasks of both runs, mean reward (rollouts) <span class="muted">${split === "val" ? "validation" : "training"} rollouts</span></h2><${Loaded} state=${state}>${(rows) => (rows.length
    ? html`<${Table} label="tasks" columns=${columns} rows=${rows} height="40vh" />` : html`<p class="muted">The runs have no task in common.</p>`)}</${Loaded}></section>`;
}
