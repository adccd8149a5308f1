// All runs.

import { api } from "../api.js";
import { Loaded, Table, clock, count, fixed, go, html, percent, useData } from "../components.js";

const RUN_COLUMNS = [
  { name: "run", title: "run", width: 14, grow: 2, cell: (r) => html`<a href=${`#/r/${encodeURIComponent(r.run)}`}>${r.run}</a>` },
  { name: "kind", title: "kind", width: 4, cell: (r) => r.kind || "train" },
  { name: "state", title: "state", width: 5.5, cell: (r) => html`<span class="state ${r.state}" title=${r.error}>${r.state}</span>` },
  { name: "agent", title: "agent", width: 8, grow: 1.5, cell: (r) => (r.agent || "").split("/").pop() },
  { name: "model", title: "model", width: 7, grow: 1, cell: (r) => (r.model || "").split("/").pop() },
  { name: "step", title: "step", width: 6, numeric: true, cell: (r) => (r.step == null ? "–" : r.steps ? `${r.step} of ${r.steps}` : r.step) },
  { name: "rollouts", title: "rollouts", width: 5.5, numeric: true, cell: (r) => count(r.rollouts) },
  { name: "failed", title: "failed", width: 5, numeric: true, cell: (r) => (r.rollouts ? percent(r.failed / r.rollouts) : "–") },
  { name: "reward", title: "reward", width: 5, numeric: true, cell: (r) => fixed(r.reward) },
  { name: "started", title: "started", width: 11.5, cell: (r) => clock(r.started) },
];

export function RunsPage() {
  const state = useData(api.runs(), "json", true);
  return html`<h1>Runs</h1><${Loaded} state=${state}>${({ runs }) => html`
    <${Table} label="runs" columns=${RUN_COLUMNS} rows=${runs} height="75vh" open=${(r) => go(["r", r.run])} />`}</${Loaded}>`;
}
