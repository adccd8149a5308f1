// A group: rollouts of one task side by side, with advantages and the first token that differs.

import { api } from "../api.js";
import { Badge, BarRows, Link, Loaded, LongText, Tile, count, fixed, html, rolloutLink, seconds, useData } from "../components.js";

export function GroupPage({ parts: [, run, , group] }) {
  return html`<${Loaded} state=${useData(api.of(run, "groups", group), "json", run)}>${(data) => html`<${GroupView} run=${run} data=${data} />`}</${Loaded}>`;
}

const isSame = (a, first) => a.shared != null && a.shared === a.tokens && a.shared === first.tokens;

function GroupView({ run, data }) {
  const { attempts } = data;
  const longest = Math.max(...attempts.map((a) => a.tokens || 0), 1);
  return html`<div class="title"><h1>Group ${data.id}</h1><span class="muted">step ${data.step ?? "–"} · task ${data.task_id}</span></div>
    <p class="text">${attempts[0].question}</p>
    <div class="tiles">
      <${Tile} title="mean reward" value=${fixed(data.reward)} note=${`${fixed(data.min_reward)} to ${fixed(data.max_reward)}`} />
      <${Tile} title="rollouts" value=${data.rollouts} note=${`${data.failed} failed`} />
      <${Tile} title="slowest" value=${seconds(data.seconds)} />
      <${Tile} title="tokens" value=${count(data.sampled_tokens)} />
      ${data.dropped && html`<${Tile} title="dropped" value="yes" tone="bad" note=${data.dropped} />`}
    </div>
    <section><h2>Where rollouts leave the path of the first one</h2>
      <${BarRows} label="shared beginnings" rows=${attempts.map((a) => ({
        label: `${a.id.split("-").pop()} · ${fixed(a.reward, 2)}`, title: `${a.id}: ${a.shared} of ${a.tokens} tokens shared, differs in ${a.differs_in || "nothing"}`,
        bars: [{ from: 0, to: (a.shared || 0) / longest, color: "--wait" },
          { from: (a.shared || 0) / longest, to: (a.tokens || 0) / longest, color: a.failure_kind ? "--infra" : a.reward > 0 ? "--ok" : "--policy" }].filter((bar) => bar.to > bar.from) }))} />
      <div class="legend"><span><i class="swatch" style=${{ background: "var(--wait)" }}></i>tokens shared with the first rollout</span>
        <span><i class="swatch" style=${{ background: "var(--ok)" }}></i>own tokens, reward</span><span><i class="swatch" style=${{ background: "var(--policy)" }}></i>own tokens, no reward</span><span><i class="swatch" style=${{ background: "var(--infra)" }}></i>failed</span></div></section>
    <div class="cards">${attempts.map((a, i) => html`<article class="card" key=${a.id}>
      <div class="title">${rolloutLink(run, a.id)}${a.failure_kind && html`<${Badge} name=${a.failure_kind}>${a.failure_kind}/${a.failure_reason}</${Badge}>`}</div>
      <div>reward <b>${fixed(a.reward)}</b> · advantage <b>${fixed(a.advantage)}</b></div>
      <div class="muted">${count(a.turns)} turns · ${count(a.sampled_tokens)} tokens · ${seconds(a.seconds)}${a.calls?.length ? ` · ${a.calls.slice(0, 6).join(", ")}${a.calls.length > 6 ? ` and ${a.calls.length - 6} more` : ""}` : ""}</div>
      ${a.missing ? html`<p class="error">${a.missing}</p>` : i === 0 ? html`<div class="muted">the others are compared with this one</div>`
        : isSame(a, attempts[0]) ? html`<div class="muted">the same tokens as the first rollout</div>`
        : html`<div>differs at token ${count(a.shared)}${a.differs_in ? ` in ${a.differs_in}` : ""} · <${Link} to=${["r", run, "diff"]} query=${{ a: attempts[0].id, b: a.id }}>compare</${Link}></div>`}
      ${a.failure && html`<p class="error">${a.failure.message.slice(0, 300)}</p>`}
      <${LongText} value=${typeof a.reply === "string" ? a.reply : a.reply?.text} /></article>`)}</div>`;
}
