// One run: reward over stacked outcomes, steps, token account and exactness.

import { api } from "../api.js";
import { Badge, Chart, Link, Loaded, PartsBar, Table, Tile, address, clock, count, cssColor, fixed, go, html, isNumber, percent, scientific, seconds, useData, useMemo } from "../components.js";

const outcomeName = (o) => (o.kind ? `${o.kind}/${o.reason}` : "reward");

export function RunPage({ parts: [, run] }) {
  return html`<${Loaded} state=${useData(api.run(run), "json", run)}>${(data) => html`<${RunView} data=${data} />`}</${Loaded}>`;
}

function RunView({ data }) {
  const { run, metrics, validation } = data;
  const last = metrics[metrics.length - 1];
  if (data.evaluation) return html`<${EvaluationView} data=${data} />`;
  const pending = data.outcomes.filter((o) => o.split === "train" && o.step == null).reduce((n, o) => n + o.n, 0);
  const means = stepRewards(data);
  return html`
    <${RunTitle} data=${data} />
    <div class="tiles">
      <${Tile} title="steps" value=${metrics.length ? (data.steps ? `${last.step} of ${data.steps}` : last.step) : "none"} note=${data.started ? `began ${clock(data.started)}` : null} />
      <${Tile} title="reward, first → last step" value=${means.length ? `${fixed(means[0])} → ${fixed(means[means.length - 1])}` : fixed(data.reward)} />
      <${Tile} title="rollouts" value=${count(data.rollouts)} href=${address(["r", run, "rollouts"])} note=${pending ? `${count(pending)} wait for a step` : null} />
      <${Tile} title="failed" value=${count(data.failed)} tone=${data.failed ? "bad" : ""} href=${address(["r", run, "rollouts"], { kind: "failed" })} note=${data.rollouts ? percent(data.failed / data.rollouts) : null} />
      <${Exactness} data=${data.exactness} run=${run} />
      <${Cost} data=${data} />
      ${last && isNumber(last.collect_s) && isNumber(last.train_s) && html`<${Tile} title="last step" value=${seconds(last.collect_s + last.train_s)} note=${`collect ${seconds(last.collect_s)}, train ${seconds(last.train_s)}`} />`}
    </div>
    <${StepBar} run=${run} metrics=${metrics} means=${means} />
    <${Outcomes} data=${data} />
    <${Account} run=${run} metrics=${metrics} exactness=${data.exactness} />
    ${metrics.length > 0 && html`<${TrainerCharts} metrics=${metrics} run=${run} />`}
    ${validation.length > 0 && html`<section><h2>Validation</h2><${Chart} title="after step" x=${validation.map((v) => v.step)}
      series=${[{ name: "validation reward", values: validation.map((v) => v.reward), color: "--info" }]} height=${160} /></section>`}`;
}

const RunTitle = ({ data }) => html`<div class="title"><h1>${data.run}</h1><span class="state ${data.state}">${data.state}</span>
  <span class="muted" title=${data.path}>${[data.kind, data.agent && data.agent.split("/").pop(), data.model && `model ${data.model.split("/").pop()}`, data.mode, data.runtime && `runtime ${data.runtime}`].filter(Boolean).join(" · ")}</span></div>`;

// Mean reward of each step: of its line, or of its rollouts for trainers whose lines have none.
function stepRewards(data) {
  return data.metrics.map((m) => {
    if (isNumber(m.reward)) return m.reward;
    const own = data.outcomes.filter((o) => o.split === "train" && o.step === m.step && o.rewarded);
    const n = own.reduce((sum, o) => sum + o.rewarded, 0);
    return n ? own.reduce((sum, o) => sum + o.reward * o.rewarded, 0) / n : NaN;
  });
}

// A run without training steps: an evaluation, rollouts of a client, or a training run before its first step.
function EvaluationView({ data }) {
  const { estimates, tasks, task_count, pass_reward } = data.evaluation;
  const interval = (e) => (e.low == null ? `${e.tasks} task` : `95 %: ${fixed(e.low)} to ${fixed(e.high)}`);
  const columns = [
    { name: "task", title: "task", width: 9, grow: 1, tail: true, cell: (t) => html`<${Link} to=${["r", data.run, "g", t.group]}>${t.task}</${Link}>` },
    { name: "question", title: "question", width: 14, grow: 3, cell: (t) => t.question },
    { name: "reward", title: "reward", width: 5, numeric: true, cell: (t) => fixed(t.reward) },
    { name: "passed", title: "passed", width: 5, numeric: true, cell: (t) => `${t.passed} of ${t.n}` },
    { name: "failed", title: "failed", width: 4.5, numeric: true, cell: (t) => t.failed },
  ];
  return html`<${RunTitle} data=${data} />
    <div class="tiles">
      <${Tile} title="rollouts" value=${count(data.rollouts)} href=${address(["r", data.run, "rollouts"])} note=${data.started ? `began ${clock(data.started)}` : null} />
      <${Tile} title="failed" value=${count(data.failed)} tone=${data.failed ? "bad" : ""} href=${address(["r", data.run, "rollouts"], { kind: "failed" })} note=${data.rollouts ? percent(data.failed / data.rollouts) : null} />
      ${Object.entries(estimates).map(([name, e]) => html`<${Tile} title=${name} value=${fixed(e.mean)} note=${interval(e)} />`)}
      <${Tile} title="tokens" value=${count(data.exactness.sampled)} note="recorded as sampled" />
      <${Cost} data=${data} />
    </div>
    ${data.state === "running" && data.kind === "train" && html`<p class="muted">No step has ended yet.</p>`}
    ${tasks.length ? html`<section><h2>Tasks <span class="muted">${count(task_count)}${task_count > tasks.length ? `, the first ${count(tasks.length)}` : ""} · passed: reward of at least ${fixed(pass_reward)}</span></h2>
      <${Table} label="tasks" columns=${columns} rows=${tasks} height="65vh" open=${(t) => go(["r", data.run, "g", t.group])} /></section>`
      : html`<p class="muted">No rollout has ended yet.</p>`}`;
}

// The tokens that were trained, as sampled: largest difference of log-probabilities, and the rest by reason.
function Exactness({ data, run }) {
  const diff = data.logprob_diff_max.all;
  if (diff === undefined) {
    return html`<${Tile} title="exactness" value=${data.steps ? "not measured" : "not trained"} note=${`${count(data.sampled)} tokens recorded as sampled`} />`;
  }
  const tiers = Object.entries(data.logprob_diff_max).filter(([tier]) => tier !== "all");
  return html`<${Tile} title="exactness: |Δ log p| sampler–trainer" tone=${diff < 1e-2 ? "good wide" : "bad wide"} value=${`≤ ${scientific(diff)}`}
    note=${tiers.map(([tier, value]) => `${tier} ${scientific(value)}`).join(" · ") || `${count(data.trained)} tokens trained`} />`;
}

// Cost at the prices of the run's settings; nothing without prices.
function Cost({ data }) {
  const { cost } = data;
  if (!cost) return null;
  const result = data.kind === "eval" ? [cost.per_success, "per success"] : [cost.per_reward, "per point of reward"];
  const note = [`${fixed(cost.per_rollout, 4)} per rollout`, isNumber(result[0]) && `${fixed(result[0], 4)} ${result[1]}`];
  return html`<${Tile} title="cost" value=${fixed(cost.total, 4)} note=${note.filter(Boolean).join(" · ")} />`;
}

function StepBar({ run, metrics, means }) {
  if (!metrics.length) return null;
  const rewards = means.filter(isNumber);
  const begin = Math.max(0, metrics.length - 400);
  const low = Math.min(0, ...rewards);
  const high = Math.max(1, ...rewards);
  return html`<section><h2>Steps</h2><nav class="steps" aria-label="steps">${metrics.slice(begin).map((m, i) => html`<${Link}
    to=${["r", run, "rollouts"]} query=${{ step: m.step }} class=${m.failed ? "failed" : ""}
    title=${`step ${m.step}: reward ${fixed(means[begin + i])}, ${m.rollouts ?? m.sessions ?? "–"} rollouts, ${m.failed ?? 0} failed`}>
    <i style=${{ height: isNumber(means[begin + i]) ? `${(100 * (means[begin + i] - low)) / (high - low)}%` : 0 }}></i></${Link}>`)}</nav></section>`;
}

function Outcomes({ data }) {
  const { x, series } = useMemo(() => {
    const outcomes = data.outcomes.filter((o) => o.split === "train" && o.step != null);
    const steps = [...new Set(outcomes.map((o) => o.step))].sort((a, b) => a - b);
    const places = new Map(steps.map((step, i) => [step, i]));
    const stacks = new Map();
    const rewards = new Array(steps.length).fill(null);
    const sums = new Array(steps.length).fill(0);
    const ns = new Array(steps.length).fill(0);
    for (const o of outcomes) {
      const name = outcomeName(o);
      if (!stacks.has(name)) stacks.set(name, new Array(steps.length).fill(0));
      const i = places.get(o.step);
      stacks.get(name)[i] += o.n;
      if (o.rewarded) { sums[i] += o.reward * o.rewarded; ns[i] += o.rewarded; }
    }
    steps.forEach((_, i) => { if (ns[i]) rewards[i] = sums[i] / ns[i]; });
    const names = [...stacks.keys()].sort((a, b) => (b === "reward") - (a === "reward") || a.localeCompare(b));
    const bars = names.map((name) => ({ name, values: stacks.get(name), color: colorOf(name) }));
    return { x: steps, series: [...bars, { name: "mean reward", values: rewards, scale: "reward", color: "--accent" }] };
  }, [data]);
  if (!x.length) return html`<p class="muted">No step has ended yet.</p>`;
  return html`<section><h2>Reward over outcomes, by owner and reason</h2>
    <${Chart} title="step" x=${x} series=${series} stacked=${true} height=${260} ranges=${{ reward: [0, 1.02] }}
      onPick=${(i) => go(["r", data.run, "rollouts"], { step: x[i] })} /></section>`;
}

const colorOf = (name) => ({ reward: "--soft", policy: "--policy", task: "--task", verifier: "--verifier", infrastructure: "--infra" })[name.split("/")[0]];

function Account({ run, metrics, exactness }) {
  const totals = {};
  for (const m of metrics) {
    for (const [reason, n] of Object.entries({ trained: m.trained_tokens || 0, ...m.excluded_tokens, ...m.untrained_tokens })) {
      totals[reason] = (totals[reason] || 0) + n;
    }
  }
  const parts = Object.entries(totals).filter(([, value]) => value).map(([name, value]) => ({
    name, value, href: name === "trained" ? null : address(["r", run, "excluded"], { reason: name }) }));
  if (!parts.length) return null;
  return html`<section><h2>Sampled tokens, by fate</h2><${PartsBar} parts=${parts} /></section>`;
}

const SHOWN_METRICS = ["entropy", "ratio_mean", "grad_norm", "clip_share", "loss", "kl"];

function TrainerCharts({ metrics, run }) {
  const names = SHOWN_METRICS.filter((name) => metrics.some((m) => isNumber(m.trainer?.[name])));
  const x = useMemo(() => metrics.map((m) => m.step), [metrics]);
  const charts = useMemo(() => [
    ["seconds", [{ name: "collect_s", values: metrics.map((m) => m.collect_s), color: "--c0" }, { name: "train_s", values: metrics.map((m) => m.train_s), color: "--c1" }]],
    ["staleness", [{ name: "staleness", values: metrics.map((m) => m.staleness), color: "--c4" }, { name: "mean", values: metrics.map((m) => m.staleness_mean), color: "--c5" }]],
    ...names.map((name, i) => [name, [{ name, values: metrics.map((m) => m.trainer?.[name] ?? null), color: `--c${i % 8}` }]]),
  ].filter(([, series]) => series.some((one) => one.values.some(isNumber))), [metrics]);
  if (!charts.length) return null;
  return html`<section><h2>Trainer and time</h2><div class="columns">${charts.map(([name, series]) => html`<div key=${name}>
    <${Chart} title="step" x=${x} series=${series} height=${140} /></div>`)}</div></section>`;
}
