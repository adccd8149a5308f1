// A running gateway: engines, sessions, tokens and their cost.

import { api, getJson } from "../api.js";
import { Loaded, Table, Tile, count, fixed, html, seconds, setQuery, useEffect, useState } from "../components.js";

const INTERVAL_MS = 2000;

export function GatewayPage({ query }) {
  const [state, setState] = useState({ data: null, error: null });
  const [rates, setRates] = useState({});
  useEffect(() => {
    let before = null;
    let stopped = false;
    const read = async () => {
      try {
        const data = await getJson(api.gateway());
        if (stopped) return;
        if (before) setRates({ sampled: rate(before, data, "sampled_tokens_total"), prompt: rate(before, data, "prompt_tokens_total"), calls: rate(before, data, "calls_total") });
        before = data;
        setState({ data, error: null });
      } catch (error) { if (!stopped) setState({ data: null, error: error.message }); }
      if (!stopped) timer = setTimeout(read, INTERVAL_MS);
    };
    let timer = setTimeout(read, 0);
    return () => { stopped = true; clearTimeout(timer); };
  }, []);
  return html`<h1>Gateway</h1><${Loaded} state=${state}>${(data) => html`<${GatewayView} data=${data} rates=${rates} query=${query} />`}</${Loaded}>`;
}

const total = (data, name) => data.metrics.filter((m) => m.name === name).reduce((sum, m) => sum + m.value, 0);
const rate = (before, now, name) => (total(now, name) - total(before, name)) / (now.time - before.time);
const mean = (data, name) => total(data, `${name}_sum`) / total(data, `${name}_count`);

function GatewayView({ data, rates, query }) {
  const prices = [Number(query.in || 0), Number(query.out || 0)];
  const priced = prices.some((x) => x > 0);
  const cost = (prompt, sampled) => (prompt * prices[0] + sampled * prices[1]) / 1e6;
  const price = (name, title) => html`<label>${title} <input type="number" min="0" step="any" value=${query[name] || ""} onInput=${(e) => setQuery({ [name]: e.target.value })} /></label>`;
  const byLabel = (name, label) => data.metrics.filter((m) => m.name === name && m.value).map((m) => `${m.labels[label]} ${count(m.value)}`).join(", ") || "none";
  const engineColumns = [
    { name: "id", title: "engine", width: 8, grow: 1, cell: (e) => e.id },
    { name: "kind", title: "kind", width: 6, cell: (e) => e.kind || "" },
    { name: "url", title: "address", width: 12, grow: 2, cell: (e) => e.url || "" },
    { name: "health", title: "health", width: 7, cell: (e) => e.reason ? `${e.health}: ${e.reason}` : e.health },
    { name: "version", title: "version", width: 5, numeric: true, cell: (e) => e.version ?? "–" },
    { name: "in_flight", title: "running", width: 5, numeric: true, cell: (e) => e.in_flight ?? "–" },
    { name: "calls", title: "calls", width: 5, numeric: true, cell: (e) => count(e.calls) },
    { name: "failures", title: "failures", width: 5, numeric: true, cell: (e) => count(e.failures) },
  ];
  const sessionColumns = [
    { name: "id", title: "session", width: 14, grow: 2, cell: (s) => s.id },
    { name: "phase", title: "phase", width: 6, cell: (s) => s.phase },
    { name: "in_flight", title: "running", width: 4.5, numeric: true, cell: (s) => s.in_flight },
    { name: "calls", title: "calls", width: 4.5, numeric: true, cell: (s) => s.calls },
    { name: "branches", title: "branches", width: 5, numeric: true, cell: (s) => s.branches },
    { name: "prompt", title: "prompt", width: 5.5, numeric: true, cell: (s) => count(s.tokens.prompt) },
    { name: "sampled", title: "sampled", width: 5.5, numeric: true, cell: (s) => count(s.tokens.sampled) },
    { name: "idle", title: "idle", width: 5, numeric: true, cell: (s) => seconds(s.idle_s) },
    { name: "cost", title: "cost", width: 5, numeric: true, cell: (s) => priced ? fixed(cost(s.tokens.prompt || 0, s.tokens.sampled || 0), 4) : "–" },
  ];
  const [prompt, sampled] = [total(data, "prompt_tokens_total"), total(data, "sampled_tokens_total")];
  return html`<p class="muted">${data.url}</p><div class="tiles">
      <${Tile} title="calls running" value=${count(total(data, "calls_in_flight"))} note=${`${fixed(rates.calls, 1)} calls/s`} />
      <${Tile} title="sampled tokens" value=${count(sampled)} note=${`${count(rates.sampled)} tokens/s`} />
      <${Tile} title="prompt tokens" value=${count(prompt)} note=${`${count(rates.prompt)} tokens/s`} />
      <${Tile} title="mean call" value=${seconds(mean(data, "call_seconds"))} note=${`first token ${seconds(mean(data, "first_token_seconds"))}`} />
      <${Tile} title="prompts by tier" value=${byLabel("tier_total", "tier")} />
      <${Tile} title="refused" value=${byLabel("refusals_total", "status")} tone=${total(data, "refusals_total") ? "bad" : ""} />
      <${Tile} title="excluded tokens" value=${byLabel("excluded_tokens_total", "reason")} />
      <${Tile} title="cost" value=${priced ? fixed(cost(prompt, sampled), 4) : "–"} note=${priced ? "of all sessions" : "set prices below"} />
    </div>
    <div class="toolbar"><span>Price of a million tokens:</span>${price("in", "prompt")}${price("out", "sampled")}</div>
    <section><h2>Engines</h2><${Table} label="engines" columns=${engineColumns} rows=${data.engines} height="30vh" /></section>
    <section><h2>Sessions <span class="muted">${data.sessions.length}</span></h2><${Table} label="sessions" columns=${sessionColumns} rows=${data.sessions} height="45vh" /></section>`;
}
