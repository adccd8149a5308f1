"""Infrastructure: gateway, engines, runtimes, tools and the agent's own code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from afield.diagnosis.evidence import (
    INFRASTRUCTURE_CODES,
    Finding,
    RolloutFacts,
    RunEvidence,
    examples,
    listed,
    most_common,
    share,
    total_of,
)
from afield.runs.index import calls_of, pauses
from afield.types import FailureKind, Reason

SLOW_TOOL_S = 1.5
"""Mean seconds between two model calls above which tools may be slow."""
SLOW_SHARE = 0.5
"""Share of the time between first and last model call that slow tools take."""
IDLE_SHARE = 0.7
"""Share of the collecting time without a model call above which engines are idle."""
IDLE_LEAST_S = 5.0
"""Collecting seconds below which idle engines do not matter."""
LOG_LINES = 3
"""Last lines of a log that a finding quotes."""
READ = 8
"""Rollouts that are read to find out which tool is slow."""
_NOT_CONNECTING = (Reason.LAUNCH, Reason.NO_AGENT, Reason.DIED, Reason.CANCELLED, Reason.UPLOAD)
_REMEDIES = {
    Reason.LAUNCH: "read logs/ for what the runtime answers, and check `runtime` and launch_timeout_s",
    Reason.NO_AGENT: "let the image or program call afield's app, and check `agent`",
    Reason.DIED: "read logs/ for the exit of the agent's process; raise the memory of its runtime",
    Reason.ENGINE: "read logs/gateway.log for the engine's error; check `engine` and its server",
    Reason.TIMEOUT: "raise attempt_timeout_s, or find what hangs with `afield show RUN --sort seconds`",
    Reason.UPLOAD: "check the `transport` and the disk of the outcome store",
}


def nothing_collected(run: RunEvidence) -> Finding | None:
    if run.rollouts or run.single or run.run.status == "running":
        return None
    log = run.run.logs / "gateway.log"
    lines = log.read_text(errors="replace").strip().splitlines()[-LOG_LINES:] if log.is_file() else []
    return Finding(
        problem="the run stopped before its first rollout ended",
        evidence=(f"{run.run.path} has no rollout", *(f"gateway.log: {line[:300]}" for line in lines)),
        remedy="start the command again and read its error; check that `gateway` and `engine` name servers"
        " that answer",
        files=("logs/gateway.log",) if lines else ("logs/",),
    )


def unreachable_gateway(run: RunEvidence) -> Finding | None:
    if run.info.endpoint:
        return None
    without_calls = [rollout for rollout in run.rollouts if _is_silent(rollout)]
    if not run.exceeds(len(without_calls), len(run.rollouts), 0.2):
        return None
    if any((rollout.reward or 0.0) > 0 for rollout in run.rollouts if not rollout.made_calls):
        return None  # the agent works without a model
    address = run.settings.get("gateway_url") or run.settings.get("gateway")
    return Finding(
        problem="agents do not reach the gateway: they end without a single model call",
        evidence=(
            share(len(without_calls), len(run.rollouts), "rollouts made no call"),
            most_common(rollout.failure_message for rollout in without_calls)
            or "they returned a reward of 0",
            *([f"agents get the address {address}"] if address else []),
        ),
        remedy="call the model at rollout.openai_base_url with rollout.api_key; if agents run elsewhere, set"
        " gateway_url to an address that they reach, and gateway_host to 0.0.0.0",
        rollouts=examples(without_calls),
        files=("logs/gateway.log",),
    )


def _is_silent(rollout: RolloutFacts) -> bool:
    if rollout.made_calls or rollout.failure_reason in _NOT_CONNECTING:
        return False
    if rollout.failure_kind is None:
        return True
    unanswered = rollout.failure_reason in (Reason.ENGINE, Reason.TIMEOUT)
    return unanswered or rollout.failure_reason == Reason.REWARD


def infrastructure_failures(run: RunEvidence) -> Finding | None:
    failed = [
        rollout
        for rollout in run.rollouts
        if rollout.failure_kind == FailureKind.INFRASTRUCTURE
        and rollout.failure_reason != Reason.CANCELLED
        and not _is_silent(rollout)
    ]
    if not run.exceeds(len(failed), len(run.rollouts), 0.05):
        return None
    reasons: dict[str, int] = defaultdict(int)
    for rollout in failed:
        reasons[rollout.failure_reason or ""] += 1
    reason = max(reasons, key=lambda name: reasons[name])
    return Finding(
        problem="rollouts are lost to failures of the infrastructure, after all retries",
        evidence=(
            share(len(failed), len(run.rollouts), "rollouts"),
            f"reasons: {listed(reasons)}",
            most_common(rollout.failure_message for rollout in failed),
        ),
        remedy=_REMEDIES.get(Reason(reason), "read logs/ for the cause"),
        rollouts=examples(failed),
        files=("logs/",),
        commands=("afield show {run} --failed",),
    )


def agent_errors(run: RunEvidence) -> Finding | None:
    failed = [
        rollout
        for rollout in run.rollouts
        if rollout.failure_kind == FailureKind.TASK and not rollout.refused_calls and not _is_silent(rollout)
    ]
    if not run.exceeds(len(failed), len(run.rollouts), 0.05):
        return None
    return Finding(
        problem="the agent's own code raises, so that rollouts have no reward",
        evidence=(
            share(len(failed), len(run.rollouts), "rollouts"),
            most_common(rollout.failure_message for rollout in failed),
        ),
        remedy="fix the line that the traceback of `afield show` names, or return a reward in that case",
        rollouts=examples(failed),
        commands=("afield show {run} --failed",),
    )


def infrastructure_zeros(run: RunEvidence) -> Finding | None:
    rewarded = [rollout for rollout in run.rollouts if rollout.reward is not None]
    lowest = 0.0 if run.single else min((rollout.reward or 0.0 for rollout in rewarded), default=0.0)
    zeros = [
        rollout
        for rollout in rewarded
        if rollout.failure_kind is None and rollout.reward == lowest and ended_by_infrastructure(rollout)
    ]
    if not run.exceeds(len(zeros), len(rewarded), 0.05):
        return None
    codes = total_of(zeros, "refused")
    failing = sum(rollout.fact("engine_failed_end") for rollout in zeros)
    return Finding(
        problem=f"the agent catches failures of the infrastructure and returns reward {lowest:g} for them,"
        " which is trained as if the model had failed",
        evidence=(
            share(len(zeros), len(rewarded), "rollouts with a reward"),
            f"engine failed in the last call of {failing}; failed calls by class: {listed(codes)}",
            most_common(rollout.refusal for rollout in zeros),
        ),
        remedy="let the agent raise errors of the model's API (or raise afield.InfrastructureFailure): such"
        " attempts are retried and never trained",
        rollouts=examples(zeros),
        files=("logs/gateway.log",),
    )


def ended_by_infrastructure(rollout: RolloutFacts) -> bool:
    """Whether a failure of the infrastructure, which the agent caught, ended its calls."""
    return bool(rollout.fact("engine_failed_end") or INFRASTRUCTURE_CODES & rollout.refused.keys())


def slow_tool(run: RunEvidence) -> Finding | None:
    timed = [r for r in run.rollouts if r.turns > 1 and r.tool_s is not None and r.model_s is not None]
    slow = [rollout for rollout in timed if _waits_for_tools(rollout)]
    if not run.exceeds(len(slow), len(timed), 0.3):
        return None
    tools = _seconds_by_tool(run, sorted(slow, key=lambda rollout: rollout.tool_s or 0.0, reverse=True))
    slowest = max(tools, key=lambda name: median(tools[name])) if tools else "between calls"
    seconds = sum(rollout.tool_s or 0.0 for rollout in slow)
    whole = seconds + sum(rollout.model_s or 0.0 for rollout in slow)
    return Finding(
        problem=f"rollouts spend their time in tools: {slowest} is slow",
        evidence=(
            share(len(slow), len(timed), "rollouts with several turns"),
            f"{seconds:.0f} of {whole:.0f} s between first and last model call in {len(slow)} rollouts",
            "median seconds: " + ", ".join(f"{name} {median(tools[name]):.1f}" for name in list(tools)[:6]),
        ),
        remedy=f"make {slowest} faster or give it a timeout; meanwhile raise concurrency, so that the engine"
        " has calls to run",
        rollouts=tuple(r.id for r in sorted(slow, key=lambda r: -(r.tool_s or 0.0))[:3]),
        commands=("afield show {run} --sort tool_s",),
        pages=("#/r/{run}/timeline",),
    )


def _waits_for_tools(rollout: RolloutFacts) -> bool:
    tool_s, model_s = rollout.tool_s or 0.0, rollout.model_s or 0.0
    return tool_s / (rollout.turns - 1) >= SLOW_TOOL_S and tool_s > SLOW_SHARE * (tool_s + model_s)


def _seconds_by_tool(run: RunEvidence, slow: Sequence[RolloutFacts]) -> dict[str, list[float]]:
    """Seconds after replies that call a tool, by the names of the called tools."""
    seconds: dict[str, list[float]] = {}
    for result in run.read(slow, READ):
        calls = calls_of(result.turns)
        for start, length in pauses(calls):
            turn = max((one for one in calls if one[1] <= start + 1e-6), key=lambda one: one[1])[2]
            names = dict.fromkeys(call.name for call in turn.messages[-1].tool_calls) if turn.messages else {}
            seconds.setdefault(" + ".join(names) or "the agent's code", []).append(length)
    return seconds


def timeouts(run: RunEvidence) -> Finding | None:
    late = [
        rollout
        for rollout in run.rollouts
        if rollout.failure_kind == FailureKind.POLICY and rollout.failure_reason == Reason.TIMEOUT
    ]
    if not run.exceeds(len(late), len(run.rollouts), 0.05):
        return None
    limit = run.settings.get("attempt_timeout_s")
    return Finding(
        problem="rollouts end at their deadline and count as failures of the model with reward 0",
        evidence=(
            share(len(late), len(run.rollouts), "rollouts"),
            most_common(rollout.failure_message for rollout in late),
            *([f"attempt_timeout_s is {limit:g}"] if limit else []),
        ),
        remedy="raise attempt_timeout_s, or lower max_calls and max_tokens so that rollouts end in time",
        rollouts=examples(late),
        commands=("afield show {run} --sort seconds",),
    )


def idle_engine(run: RunEvidence) -> Finding | None:
    spans = [(r.started, r.ended) for r in run.rollouts if r.started is not None and r.ended is not None]
    working = _union(spans)
    calls = run.run.index.fetch("SELECT t, t + seconds FROM events WHERE kind='call' ORDER BY t")
    busy = _union(calls)
    if working < IDLE_LEAST_S or len(spans) < 16 or not calls:
        return None
    idle = 1 - busy / working
    waiting = [rollout for rollout in run.rollouts if _waits_to_start(rollout)]
    if idle < IDLE_SHARE or not run.exceeds(len(waiting), len(spans), 0.3):
        return None
    queue = sum(rollout.queue_s or 0.0 for rollout in run.rollouts)
    launch = sum(rollout.launch_s or 0.0 for rollout in run.rollouts)
    names = ("concurrency", "workers", "launch_rate", "launching")
    settings = ", ".join(f"{name} = {run.settings[name]}" for name in names if run.settings.get(name))
    return Finding(
        problem="the engine is idle while rollouts wait to be launched",
        evidence=(
            f"no model call ran in {idle:.0%} of the {working:.0f} s in which rollouts were collected",
            f"rollouts waited {queue:.0f} s for a slot and {launch:.0f} s for their launch in all",
            share(len(waiting), len(spans), "rollouts waited longer than they ran"),
            *([f"settings: {settings}"] if settings else []),
        ),
        remedy="raise concurrency, and launch_rate or launching if they are set; `workers` adds processes",
        rollouts=examples(waiting),
        commands=("afield show {run} --sort queue_s",),
        pages=("#/r/{run}/timeline",),
    )


def _waits_to_start(rollout: RolloutFacts) -> bool:
    if rollout.started is None or rollout.ended is None:
        return False
    waited = (rollout.queue_s or 0.0) + (rollout.launch_s or 0.0)
    return waited > 1.0 and waited > 0.5 * (rollout.ended - rollout.started)


def _union(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the time that intervals cover."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
