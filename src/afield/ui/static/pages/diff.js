// Two rollouts side by side, from the first token that differs.

import { api } from "../api.js";
import { Loaded, Tile, count, fixed, html, rolloutLink, seconds, setQuery, useData, useState } from "../components.js";
import { ColorKey, ModeOptions, TokenStrip, TokenWindow, lengthOf, modeOf, segmentsOf } from "../tokens.js";

const CONTEXT = 120;
const LENGTH = 800;

export function DiffPage({ parts: [, run], query }) {
  const runs = [run, query.run_b || run];
  const load = (at, id) => [useData(id && api.of(at, "rollouts", id)), useData(id && api.of(at, "tokens", id), "columns")];
  const [a, tokensA] = load(runs[0], query.a);
  const [b, tokensB] = load(runs[1], query.b);
  if (!query.a || !query.b) return html`<${DiffForm} query=${query} />`;
  const states = [a, b, tokensA, tokensB];
  const error = states.find((state) => state.error)?.error;
  const data = states.every((state) => state.data) ? [side(a, tokensA), side(b, tokensB)] : null;
  return html`<${Loaded} state=${{ data, error }}>${(sides) => html`<${DiffView} sides=${sides} query=${query} runs=${runs} />`}</${Loaded}>`;
}

// A rollout, its path with the most tokens, and their ids in order.
function side({ data }, { data: table }) {
  const segments = segmentsOf(data.main.map((id) => data.turns.find((t) => t.id === id)));
  const ids = new Uint32Array(lengthOf(segments));
  for (const s of segments) ids.set(table.id.subarray(s.start, s.start + s.prompt + s.sampled), s.at);
  return { data, table, segments, ids };
}

function sharedPrefix(a, b) {
  let n = 0;
  while (n < a.length && n < b.length && a[n] === b[n]) n += 1;
  return n;
}

function DiffForm({ query }) {
  const [ids, setIds] = useState({ a: query.a || "", b: query.b || "" });
  const input = (name) => html`<input aria-label=${`rollout ${name}`} placeholder=${`rollout ${name}`} value=${ids[name]} onInput=${(e) => setIds({ ...ids, [name]: e.target.value })} />`;
  return html`<h1>Compare two rollouts</h1><div class="toolbar">${input("a")}${input("b")}<button onClick=${() => setQuery(ids)}>compare</button></div>`;
}

function DiffView({ sides, query, runs }) {
  const shared = sharedPrefix(sides[0].ids, sides[1].ids);
  const same = sides.every((one) => one.ids.length === shared);
  const mode = modeOf(query.color, sides.map((one) => one.table));
  return html`<div class="title"><h1>Difference</h1><span class="muted">${same ? `all ${count(shared)} tokens are equal` : `the first ${count(shared)} tokens are equal`}</span>
      <label>colour <select value=${mode} onChange=${(e) => setQuery({ color: e.target.value })}><${ModeOptions} tables=${sides.map((one) => one.table)} /></select></label></div>
    <div class="columns">${sides.map((one, i) => html`<${DiffSide} key=${i} run=${runs[i]} side=${one} shared=${shared} mode=${mode} />`)}</div>`;
}

function DiffSide({ run, side: { data, table, segments, ids }, shared, mode }) {
  const [at, setAt] = useState(Math.max(0, shared - CONTEXT));
  const to = Math.min(ids.length, at + LENGTH);
  return html`<section><h2>${rolloutLink(run, data.id)}</h2>
    <div class="tiles"><${Tile} title="reward" value=${fixed(data.reward)} note=${data.failure ? `${data.failure.kind}/${data.failure.reason}` : data.fate} />
      <${Tile} title="tokens" value=${count(ids.length)} note=${`${count(ids.length - shared)} of its own`} /><${Tile} title="time" value=${seconds(data.seconds)} /></div>
    <${TokenStrip} segments=${segments} table=${table} mode=${mode} from=${at} to=${to} onMove=${setAt} />
    <${ColorKey} mode=${mode} segments=${segments} table=${table} />
    <${TokenWindow} run=${run} rollout=${data.id} segments=${segments} table=${table} mode=${mode} from=${at} to=${to} mark=${shared} /></section>`;
}
