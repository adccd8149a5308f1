// One rollout: outcome, tree of branches, calls over time, tokens, turns and messages.

import { api, getJson } from "../api.js";
import { Badge, BarRows, Link, Loaded, LongText, Tile, address, clock, count, cssColor, fixed, go, html, onKeys, seconds, setQuery, useData, useLayoutEffect, useMemo, useState } from "../components.js";
import { Tokens } from "../tokens.js";

const SHOWN_TURNS = 100;
const ROOT = "(root)"; // joins the trees of a rollout
const EVENT_COLORS = { queue: "--wait", retries: "--infra", launch: "--c5", call: "--accent", tool: "--policy", refused: "--error", grade: "--verifier" };

export function RolloutPage({ parts: [, run, , id], query }) {
  const page = useData(api.of(run, "rollouts", id), "json");
  const tokens = useData(api.of(run, "tokens", id), "columns");
  return html`<${Loaded} state=${page}>${(data) => html`<${RolloutView} run=${run} data=${data} tokens=${tokens} query=${query} />`}</${Loaded}>`;
}

function RolloutView({ run, data, tokens, query }) {
  useLayoutEffect(() => onKeys({
    "[": () => data.previous && go(["r", run, "o", data.previous]),
    "]": () => data.next && go(["r", run, "o", data.next]),
  }), [data]);
  const byId = useMemo(() => new Map(data.turns.map((turn) => [turn.id, turn])), [data]);
  const path = useMemo(() => pathOf(byId, query.path), [data, query.path]);
  const turns = path || data.turns;
  const values = () => getJson(api.of(run, "values", data.id));
  return html`
    <div class="title"><h1>${data.id}</h1><${Badge} name=${data.fate} />
      <span class="muted">step ${data.step ?? "–"} · ${data.attempts > 1 ? `attempt ${data.attempt} of ${data.attempts} · ` : ""}${data.split}</span>
      <span>${data.previous && html`<${Link} to=${["r", run, "o", data.previous]} title="previous ([)">‹ previous</${Link}>`}${" "}
      ${data.next && html`<${Link} to=${["r", run, "o", data.next]} title="next (])">next ›</${Link}>`}</span></div>
    <div class="tiles">
      <${Tile} title="reward" value=${fixed(data.reward)} note=${[...Object.entries(data.rewards), ...Object.entries(data.metrics)].map(([k, v]) => `${k} ${fixed(v)}`).join(" · ")} />
      <${Tile} title="advantage" value=${fixed(data.advantage)} note=${html`<${Link} to=${["r", run, "g", data.group_id]}>group ${data.group_id}</${Link}>`} />
      <${Tile} title="tokens sampled" value=${count(data.sampled_tokens)} note=${`${count(data.trained_tokens)} trainable, ${count(data.excluded_tokens)} excluded`} />
      <${Tile} title="turns" value=${data.turns.length} note=${`${data.branches} ${data.branches === 1 ? "branch" : "branches"}, ${data.tool_calls} tool calls`} />
      <${Tile} title="time" value=${seconds(data.seconds)} note=${`model ${seconds(data.model_s)}, tools ${seconds(data.tool_s)}`} />
      <${Tile} title="versions" value=${data.min_version == null ? "–" : data.min_version === data.max_version ? `v${data.min_version}` : `v${data.min_version}–v${data.max_version}`} note=${data.stop_reason} />
    </div>
    ${data.failure && html`<section><h2 class="error">${data.failure.kind}/${data.failure.reason}</h2>
      <pre class="text error">${data.failure.message}</pre>${data.failure.traceback && html`<pre class="text">${data.failure.traceback}</pre>`}</section>`}
    ${(data.returned || Object.keys(data.returned_left_out).length > 0) && html`<section><h2>Returned by the agent</h2>
      <div class="scroll"><${LongText} value=${data.returned} load=${async () => (await values()).returned} /></div>
      ${Object.entries(data.returned_left_out).map(([name, size]) => html`<p class="muted">${name}: left out, ${count(size)} bytes</p>`)}</section>`}
    ${data.refused.length > 0 && html`<section><h2>Refused calls</h2>${data.refused.map((r) => html`<p class="error">${r.count} × ${r.code} (HTTP ${r.status}): ${r.message}</p>`)}</section>`}
    <div class="columns">
      <section><h2>Task ${data.task_id}</h2><div class="scroll"><${LongText} value=${data.task} load=${async () => (await values()).task} /></div></section>
      <${Waterfall} data=${data} />
    </div>
    <${Tree} data=${data} chosen=${query.path} />
    <${Loaded} state=${tokens}>${(table) => html`<${Tokens} run=${run} rollout=${data.id} turns=${turns} table=${table} query=${query} missing=${data.not_recorded} />`}</${Loaded}>
    <${Turns} run=${run} data=${data} turns=${turns} />`;
}

function pathOf(byId, leaf) {
  if (!byId.has(leaf)) return null;
  const path = [];
  for (let turn = byId.get(leaf); turn; turn = byId.get(turn.parent)) path.unshift(turn);
  return path;
}

// --- tree ----------------------------------------------------------------------------------------------

// Turns as a tree from left to right; dots are turns, colours their fates.
function Tree({ data, chosen }) {
  const layout = useMemo(() => {
    const known = new Set(data.turns.map((turn) => turn.id));
    const rows = [{ id: ROOT, parent: null }, ...data.turns.map((t) => ({ ...t, parent: known.has(t.parent) ? t.parent : ROOT }))];
    const root = globalThis.d3.stratify().id((d) => d.id).parentId((d) => d.parent)(rows);
    const deep = root.height > 60;
    const step = deep ? 14 : 64;
    globalThis.d3.tree().nodeSize([34, step]).separation(() => 1)(root);
    const nodes = root.descendants().filter((node) => node.id !== ROOT);
    const xs = nodes.map((node) => node.x);
    return { nodes, deep, step, top: Math.min(...xs) - 22, height: Math.max(...xs) - Math.min(...xs) + 38, width: (root.height + 1) * step + 40 };
  }, [data]);
  const largest = Math.max(...data.turns.map((t) => t.sampled), 1);
  const onPath = new Set((pathOf(new Map(data.turns.map((t) => [t.id, t])), chosen) || []).map((t) => t.id));
  if (data.turns.length < 2) return null;
  const { nodes, top, height, width, deep, step } = layout;
  const edge = (node) => {
    const from = node.parent;
    const middle = (from.y + node.y) / 2 - step;
    return `M${from.y - step + 14},${from.x}C${middle + 14},${from.x} ${middle + 14},${node.x} ${node.y - step + 14},${node.x}`;
  };
  return html`<section><div class="toolbar"><h2>Tree of turns</h2>
      <span class="muted">${chosen ? `path to ${chosen}` : "all turns; choose one to follow its path"}</span>
      ${chosen && html`<button onClick=${() => setQuery({ path: "", at: "" })}>all turns</button>`}
      <span class="legend">${[...new Set(data.turns.map((t) => t.fate))].map((fate) => html`<${Badge} name=${fate} />`)}</span></div>
    <div class="scroll"><svg width=${width} height=${height} viewBox=${`0 ${top} ${width} ${height}`} role="img" aria-label="tree of turns">
      ${nodes.filter((node) => node.parent.id !== ROOT).map((node) => html`<path class="edge" d=${edge(node)} />`)}
      ${nodes.map((node) => html`<a href="#" onClick=${(e) => { e.preventDefault(); setQuery({ path: node.id, at: "" }); }}>
        <title>${`${node.id}: ${node.data.sampled} tokens, ${node.data.fate}, ${node.data.status}${node.data.links.map((l) => `, ${l.type} of ${l.to}`).join("")}`}</title>
        <circle cx=${node.y - step + 14} cy=${node.x} r=${3 + 6 * Math.sqrt(node.data.sampled / largest)} fill=${cssColor(node.data.fate)}
          stroke=${onPath.has(node.id) ? "var(--ink)" : "none"} stroke-width="2" />
        ${!deep && html`<text x=${node.y - step + 14} y=${node.x - 11} text-anchor=${node.depth === 1 ? "start" : "middle"}>${node.id}${node.data.links.length ? ` ${node.data.links[0].type}` : ""}</text>`}</a>`)}
    </svg></div></section>`;
}

// --- waterfall -----------------------------------------------------------------------------------------

function Waterfall({ data }) {
  const events = data.events.filter((e) => e.kind in EVENT_COLORS || e.kind === "outcome");
  if (!events.length) return html`<section><h2>Calls over time</h2><p class="muted">No times were recorded.</p></section>`;
  const begin = Math.min(...events.map((e) => e.t));
  const end = Math.max(...events.map((e) => e.t + e.seconds));
  const span = end - begin || 1;
  const rows = events.filter((e) => e.seconds > 0 || e.kind === "refused").slice(0, 400);
  const shown = [...new Set(rows.map((e) => e.kind))];
  return html`<section><div class="toolbar"><h2>Calls over time</h2><span class="muted">${seconds(span)}</span>
      <span class="legend">${shown.map((kind) => html`<span><i class="swatch" style=${{ background: `var(${EVENT_COLORS[kind]})` }}></i>${kind}</span>`)}</span></div>
    <${BarRows} label="calls over time" rows=${rows.map((e) => ({
      label: e.kind === "call" ? e.turn : e.kind, title: `${e.kind} ${e.turn || ""} ${seconds(e.seconds)} after ${seconds(e.t - begin)}`,
      bars: [{ from: (e.t - begin) / span, to: (e.t - begin + e.seconds) / span, color: EVENT_COLORS[e.kind] }] }))} /></section>`;
}

// --- turns ---------------------------------------------------------------------------------------------

function Turns({ run, data, turns }) {
  const [shown, setShown] = useState(SHOWN_TURNS);
  return html`<section><h2>Turns and messages</h2>
    ${turns.slice(0, shown).map((turn) => html`<${TurnView} key=${turn.id} run=${run} rollout=${data.id} turn=${turn} reward=${data.turn_rewards[turn.id]} />`)}
    ${turns.length > shown && html`<button onClick=${() => setShown(shown + SHOWN_TURNS)}>show ${Math.min(SHOWN_TURNS, turns.length - shown)} more of ${turns.length} turns</button>`}</section>`;
}

function TurnView({ run, rollout, turn, reward }) {
  const versions = [...new Set(turn.versions.map(([, , low, high]) => (low === high ? `v${low}` : `v${low}–v${high}`)))].join(", ");
  const whole = async (n, read) => read((await getJson(api.of(run, "messages", rollout, turn.id))).messages[n]);
  return html`<article class="turn" id=${turn.id}>
    <h3>${turn.id} <${Badge} name=${turn.fate} />
      <span>${count(turn.prompt)} + ${count(turn.sampled)} tokens</span><span>${versions}</span><span>${turn.tier} · ${turn.dialect}</span>
      <span>${turn.finish_reason || turn.status}</span><span>${turn.ended ? seconds(turn.ended - turn.started) : ""}</span>
      ${reward !== undefined && html`<span>reward ${fixed(reward)}</span>`}
      ${turn.links.map((l) => html`<span>${l.type} of ${l.to}</span>`)}${turn.tags.map((tag) => html`<span>${tag}</span>`)}
      <a href="#" onClick=${(e) => { e.preventDefault(); setQuery({ path: turn.id, at: "" }); scrollTo(0, 0); }}>follow path</a></h3>
    ${turn.messages.map((m, n) => html`<div class="message ${m.role}"><div class="role">${m.role}${m.name ? ` ${m.name}` : ""}${m.images ? ` · ${m.images} images` : ""}</div>
      <${LongText} value=${m.reasoning} className="reasoning" load=${() => whole(n, (x) => x.reasoning)} />
      <${LongText} value=${m.content} load=${() => whole(n, (x) => x.content)} />
      ${m.tool_calls.map((c, k) => html`<div class="call"><b class="mono">${c.name}</b><${LongText} value=${c.arguments} load=${() => whole(n, (x) => x.tool_calls[k].arguments)} /></div>`)}
    </div>`)}</article>`;
}
