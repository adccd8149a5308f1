// Rollouts of a run: a table of any length, with filters in the address.

import { api } from "../api.js";
import { Badge, Loaded, Table, count, fixed, go, html, rolloutLink, seconds, setQuery, useData, useMemo } from "../components.js";

const FIRST = [["step", "step", 3.2, (x) => (Number.isNaN(x) ? "–" : x)], ["reward", "reward", 4.5, fixed]];
const NUMBERS = [
  ["advantage", "advantage", 5.8, fixed],
  ["turns", "turns", 3.2, count], ["tool_calls", "tools", 3.5, count], ["branches", "branches", 5.3, count],
  ["sampled_tokens", "tokens", 4.3, count], ["excluded_tokens", "excluded", 5.2, count], ["refused_calls", "refused", 4.5, count],
  ["seconds", "seconds", 5.5, seconds], ["model_s", "model", 5, seconds], ["tool_s", "tool", 5, seconds],
  ["attempts", "attempts", 5, count],
];

const matches = {
  failed: (kind) => kind !== "",
  ok: (kind) => kind === "",
};

// Rows of a table that match the query, in its order.
export function filterRows(table, query) {
  const rows = [];
  const { q = "", step = "", kind = "", split = "", group = "" } = query;
  const min = query.min === undefined || query.min === "" ? -Infinity : Number(query.min);
  const max = query.max === undefined || query.max === "" ? Infinity : Number(query.max);
  const bounded = min !== -Infinity || max !== Infinity;
  const wanted = q.toLowerCase();
  const found = {};
  if (wanted) {
    for (const name of ["id", "task_id", "question", "failure_reason", "stop_reason"]) {
      found[name] = table.strings[name].map((text) => text.toLowerCase().includes(wanted));
    }
  }
  const kinds = table.strings.failure_kind.map((name) => !kind || (matches[kind] ? matches[kind](name) : name === kind));
  const splits = table.strings.split.map((name) => !split || name === split);
  const groups = group && table.strings.group_id.indexOf(group);
  for (let row = 0; row < table.rows; row++) {
    if (step !== "" && table.step[row] !== Number(step)) continue;
    if (!kinds[table.failure_kind[row]] || !splits[table.split[row]]) continue;
    if (group && table.group_id[row] !== groups) continue;
    if (bounded && !(table.reward[row] >= min && table.reward[row] <= max)) continue;
    if (wanted && !Object.keys(found).some((name) => found[name][table[name][row]])) continue;
    rows.push(row);
  }
  return sortRows(table, rows, query.sort || "");
}

function sortRows(table, rows, sort) {
  const name = sort.replace(/^-/, "");
  if (!(name in table)) return rows;
  const sign = sort.startsWith("-") ? -1 : 1;
  const strings = table.strings[name];
  const column = table[name];
  if (strings) {
    const ranks = new Uint32Array(strings.length);
    strings.map((text, i) => [text, i]).sort((a, b) => (a[0] < b[0] ? -1 : 1)).forEach(([, i], rank) => { ranks[i] = rank; });
    return rows.sort((a, b) => sign * (ranks[column[a]] - ranks[column[b]]) || a - b);
  }
  const missing = (x) => (Number.isNaN(x) ? 1 : 0); // rows without a value come last
  return rows.sort((a, b) => missing(column[a]) - missing(column[b]) || sign * (column[a] - column[b]) || a - b);
}

export function RolloutsPage({ parts: [, run], query }) {
  const state = useData(api.of(run, "rollouts.bin"), "columns", run);
  return html`<h1>Rollouts <span class="muted">${run}</span></h1>
    <${Loaded} state=${state}>${(table) => html`<${RolloutTable} run=${run} table=${table} query=${query} />`}</${Loaded}>`;
}

function RolloutTable({ run, table, query }) {
  const rows = useMemo(() => filterRows(table, query), [table, JSON.stringify(query)]);
  const numberColumn = ([name, title, width, format]) => ({ name, title, width, numeric: true, sort: true, cell: (r) => format(table[name][r]) });
  const columns = useMemo(() => [
    { name: "id", title: "rollout", width: 11, grow: 1.4, sort: true, tail: true, cell: (r) => rolloutLink(run, table.text("id", r)) },
    ...FIRST.map(numberColumn),
    { name: "question", title: "question", width: 12, grow: 2, sort: true, cell: (r) => table.text("question", r) || table.text("task_id", r) },
    { name: "failure_kind", title: "failure", width: 7, grow: .8, sort: true, cell: (r) => table.text("failure_kind", r) && html`<${Badge} name=${table.text("failure_kind", r)}>
      ${table.text("failure_kind", r)}/${table.text("failure_reason", r)}</${Badge}>` },
    ...NUMBERS.map(numberColumn),
    { name: "group_id", title: "group", width: 9, grow: 1, sort: true, cell: (r) => html`<a href=${`#/r/${encodeURIComponent(run)}/g/${encodeURIComponent(table.text("group_id", r))}`}>${table.text("group_id", r)}</a>` },
    { name: "split", title: "split", width: 4, cell: (r) => table.text("split", r) },
  ], [table]);
  const mean = (name) => {
    let sum = 0, n = 0;
    for (const row of rows) if (!Number.isNaN(table[name][row])) { sum += table[name][row]; n += 1; }
    return n ? sum / n : NaN;
  };
  const field = (name) => ({ value: query[name] || "", onInput: (e) => setQuery({ [name]: e.target.value }) });
  return html`
    <div class="toolbar">
      <input type="search" placeholder="search (press /)" aria-label="search" ...${field("q")} />
      <label>step <input type="number" min="0" ...${field("step")} /></label>
      <label>outcome <select ...${field("kind")}>${["", "ok", "failed", "policy", "task", "verifier", "infrastructure"].map((kind) => html`<option value=${kind}>${kind || "all"}</option>`)}</select></label>
      <label>split <select ...${field("split")}>${["", "train", "val"].map((name) => html`<option value=${name}>${name || "all"}</option>`)}</select></label>
      <label>reward <input type="number" step="any" placeholder="min" aria-label="lowest reward" ...${field("min")} /></label>
      <label>to <input type="number" step="any" placeholder="max" aria-label="highest reward" ...${field("max")} /></label>
      ${query.group && html`<button onClick=${() => setQuery({ group: "" })}>group ${query.group} ✕</button>`}
    </div>
    <p class="muted">${rows.length.toLocaleString("en")} of ${table.rows.toLocaleString("en")} rollouts · mean reward ${fixed(mean("reward"))} · mean ${count(mean("sampled_tokens"))} tokens, ${seconds(mean("seconds"))}</p>
    <${Table} label="rollouts" columns=${columns} rows=${rows} sort=${query.sort || ""} onSort=${(sort) => setQuery({ sort })} height="70vh"
      open=${(row) => go(["r", run, "o", table.text("id", row)])} />`;
}
