"""Traces of rollouts, training steps and published weights; an observer of rollouts.

One rollout is one trace: a span for the rollout, one `invoke_agent` span per attempt, spans for the gaps in
which the agent runs its tools, and one for a separate verifier. Model calls are the gateway's spans below the
attempt. Steps and publications are the trace of the run.
"""

from __future__ import annotations

import time

from afield.orchestrator.config import RolloutObserver
from afield.orchestrator.training_loop import StepMetrics
from afield.types import Outcome, Rollout, RolloutResult, Turn
from afield.utils.telemetry import SpanExporter, SpanIds, attempt_ids, hashed_ids

RUN = "run"
"""Name of the run's own trace."""
SHORTEST_GAP_S = 0.001
"""Seconds below which a gap between two calls has no span."""


class TracingObserver:
    """Passes events of rollouts on to `inner`, and sends their spans."""

    def __init__(self, inner: RolloutObserver, spans: SpanExporter, seed: str, agent: str) -> None:
        self._inner = inner
        self._spans = spans
        self._seed = seed
        self._agent = agent or "agent"
        self._failed: dict[str, list[tuple[Outcome, float]]] = {}

    def attempt_ended(self, rollout: Rollout, outcome: Outcome, will_retry: bool) -> None:
        if will_retry:
            self._failed.setdefault(rollout.id, []).append((outcome, time.time()))
        self._inner.attempt_ended(rollout, outcome, will_retry)

    def rollout_finished(self, result: RolloutResult) -> None:
        self._emit(result)
        self._inner.rollout_finished(result)

    def _emit(self, result: RolloutResult) -> None:
        rollout, times, outcome = result.rollout, result.times, result.outcome
        root = hashed_ids(self._seed, rollout.id, "rollout")
        ended = times.ended or time.time()
        started = times.submitted or ended
        before = times.started or started
        for failed, failed_at in self._failed.pop(rollout.id, []):
            self._attempt(root, rollout, failed, before, failed_at)
            before = failed_at
        attempted = times.attempted or before
        ids = self._attempt(root, rollout, outcome, attempted, times.outcome or ended)
        for first, second in zip(result.turns, result.turns[1:], strict=False):
            self._gap(ids, first, second)
        if times.grading is not None:
            self._spans.emit(
                "verify",
                self._spans.child_of(ids),
                ids,
                start=times.grading,
                end=times.outcome or ended,
                attributes={"afield.rollout.id": rollout.id, "afield.reward": outcome.reward},
            )
        self._spans.emit(
            f"rollout {rollout.id}",
            root,
            None,
            start=started,
            end=ended,
            attributes={
                "afield.rollout.id": rollout.id,
                "afield.group.id": rollout.group_id,
                "afield.task.id": rollout.task.id,
                "afield.split": str(rollout.split),
                "afield.attempts": result.attempts,
                "afield.turns": len(result.turns),
                "afield.reward": outcome.reward_or_floor(0.0),
                "gen_ai.usage.output_tokens": sum(len(turn.token_ids) for turn in result.turns),
            },
            error=_error(outcome),
        )

    def _attempt(
        self, root: SpanIds, rollout: Rollout, outcome: Outcome, start: float, end: float
    ) -> SpanIds:
        ids = attempt_ids(self._seed, rollout.id, outcome.session_id)
        failure = outcome.failure
        self._spans.emit(
            f"invoke_agent {self._agent}",
            ids,
            root,
            start=start,
            end=end,
            attributes={
                "gen_ai.operation.name": "invoke_agent",
                "gen_ai.provider.name": "afield",
                "gen_ai.agent.name": self._agent,
                "gen_ai.conversation.id": outcome.session_id,
                "afield.session.id": outcome.session_id,
                "afield.rollout.id": rollout.id,
                "afield.attempt": outcome.attempt,
                "afield.reward": outcome.reward,
                "afield.failure": f"{failure.kind}/{failure.reason}" if failure else None,
                "error.type": str(failure.kind) if failure else None,
            },
            error=_error(outcome),
        )
        return ids

    def _gap(self, attempt: SpanIds, first: Turn, second: Turn) -> None:
        """Time between the reply of a call with tool calls and the request that continues it."""
        calls = first.messages[-1].tool_calls if first.messages else ()
        if not calls or second.parent != first.id or first.ended is None:
            return
        if second.started - first.ended < SHORTEST_GAP_S:
            return
        names = [call.name for call in calls]
        self._spans.emit(
            f"execute_tool {names[0]}" if len(names) == 1 else "execute_tool",
            self._spans.child_of(attempt),
            attempt,
            start=first.ended,
            end=second.started,
            attributes={
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": ", ".join(names),
                "gen_ai.tool.call.id": calls[0].id if len(calls) == 1 else None,
                "afield.turn.id": first.id,
            },
        )


class StepTracer:
    """Sends spans of training steps and of published weights, below one of this process's part of the run."""

    def __init__(self, spans: SpanExporter, seed: str, run_id: str) -> None:
        self._spans = spans
        self._run_id = run_id
        self._began = time.time()
        self._run = spans.child_of(hashed_ids(seed, RUN, RUN))

    def close(self) -> None:
        """Send the span of the run."""
        attributes = {"afield.run.id": self._run_id}
        self._spans.emit(
            f"run {self._run_id}",
            self._run,
            None,
            start=self._began,
            end=time.time(),
            attributes=attributes,
        )

    def step_done(self, line: StepMetrics) -> None:
        ended = time.time()
        attributes = {
            "afield.step": line.step,
            "afield.policy.version": line.version,
            "afield.reward": line.reward,
            "afield.rollouts": line.rollouts,
            "afield.trained": line.trained,
            "afield.failed": line.failed,
            "afield.sampled_tokens": line.sampled_tokens,
            "afield.trained_tokens": line.trained_tokens,
            "afield.collect_s": line.collect_s,
            "afield.train_s": line.train_s,
        }
        start = ended - line.collect_s - line.train_s
        ids = self._spans.child_of(self._run)
        self._spans.emit(f"step {line.step}", ids, self._run, start=start, end=ended, attributes=attributes)

    def published(self, version: int, seconds: float) -> None:
        ended = time.time()
        self._spans.emit(
            f"publish v{version}",
            self._spans.child_of(self._run),
            self._run,
            start=ended - seconds,
            end=ended,
            attributes={"afield.policy.version": version},
        )


def _error(outcome: Outcome) -> str:
    failure = outcome.failure
    return f"{failure.kind}/{failure.reason}: {failure.message[:500]}" if failure else ""
