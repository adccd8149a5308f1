// Every sampled token that was not trained, by reason.

import { api } from "../api.js";
import { Badge, Chart, Loaded, PartsBar, Table, count, fixed, go, html, percent, rolloutLink, setQuery, useData, useMemo, variable } from "../components.js";

export function ExcludedPage({ parts: [, run], query }) {
  return html`<h1>Tokens that were not trained <span class="muted">${run}</span></h1>
    <${Loaded} state=${useData(api.of(run, "excluded"), "json", run)}>${(data) => html`<${ExcludedView} run=${run} data=${data} query=${query} />`}</${Loaded}>`;
}

function ExcludedView({ run, data, query }) {
  const left = data.reasons.reduce((sum, row) => sum + row.tokens, 0);
  const rows = useMemo(() => data.rollouts.filter((row) => !query.reason || row.reason === query.reason), [data, query.reason]);
  const { x, series } = useMemo(() => {
    const steps = [...new Set(data.steps.filter((s) => s.step != null).map((s) => s.step))].sort((a, b) => a - b);
    const places = new Map(steps.map((step, i) => [step, i]));
    const lines = data.reasons.map((row) => ({ name: row.reason, values: new Array(steps.length).fill(0), color: variable(row.reason) }));
    const named = new Map(lines.map((line) => [line.name, line]));
    for (const s of data.steps) if (s.step != null) named.get(s.reason).values[places.get(s.step)] += s.tokens;
    return { x: steps, series: lines };
  }, [data]);
  const parts = [{ name: "trained", value: data.sampled - left }, ...data.reasons.map((row) => ({ name: row.reason, value: row.tokens }))];
  const reasonColumns = [
    { name: "reason", title: "reason", width: 12, grow: 1, cell: (r) => html`<${Badge} name=${r.reason} />` },
    { name: "tokens", title: "tokens", width: 6, numeric: true, cell: (r) => count(r.tokens) },
    { name: "share", title: "of sampled", width: 7, numeric: true, cell: (r) => percent(r.tokens / data.sampled) },
    { name: "rollouts", title: "rollouts", width: 6, numeric: true, cell: (r) => count(r.rollouts) },
    { name: "remedy", title: "remedy", width: 24, grow: 3, cell: (r) => html`<span title=${r.remedy}>${r.remedy}</span>` },
  ];
  const rolloutColumns = [
    { name: "id", title: "rollout", width: 14, grow: 2, cell: (r) => rolloutLink(run, r.id) },
    { name: "reason", title: "reason", width: 12, grow: 1, cell: (r) => html`<${Badge} name=${r.reason} />` },
    { name: "tokens", title: "tokens", width: 6, numeric: true, cell: (r) => count(r.tokens) },
    { name: "step", title: "step", width: 5, numeric: true, cell: (r) => r.step ?? "–" },
    { name: "reward", title: "reward", width: 5, numeric: true, cell: (r) => fixed(r.reward) },
  ];
  if (!data.sampled) return html`<p class="muted">No token was sampled yet.</p>`;
  return html`<${PartsBar} parts=${parts} />
    ${data.reasons.length > 0 && html`<${Table} label="reasons" columns=${reasonColumns} rows=${data.reasons} open=${(r) => setQuery({ reason: r.reason })} height="40vh" />`}
    ${x.length > 1 && html`<section><h2>Tokens by step and reason</h2><${Chart} title="step" x=${x} series=${series} stacked=${true} height=${180} /></section>`}
    <section><div class="toolbar"><h2>Rollouts</h2>${query.reason && html`<button onClick=${() => setQuery({ reason: "" })}>${query.reason} ✕</button>`}<span class="muted">${rows.length} with the most tokens</span></div>
    <${Table} label="rollouts" columns=${rolloutColumns} rows=${rows} open=${(r) => go(["r", run, "o", r.id], { color: "fate" })} height="45vh" /></section>`;
}
