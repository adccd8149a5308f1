"""Totals over the rollouts of a step, as metrics of the step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from afield.types import Group, RolloutResult, VersionSpan


class StepTotals:
    """Totals of a step, added group by group; no rollout stays in memory."""

    def __init__(self) -> None:
        self.rollouts = 0
        self.dropped: dict[str, str] = {}
        self._rewards: list[float] = []
        self._failures: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._refusals: dict[str, str] = {}
        self._retried = self._turns = self._tool_calls = 0
        self._staleness = self._stale_tokens = self._tokens = 0
        self._agent: dict[str, list[float]] = {}

    def add(self, group: Group, *, version: int | None, dropped: str | None = None) -> None:
        """Add a group that policy version `version` trains on, None if engines do not report theirs;
        `dropped` is why it is not trained."""
        if dropped is not None:
            self.dropped[group.id] = dropped
        for finished in group.finished:
            self._add(finished)
        if dropped is None and version is not None:
            spans = carrying_spans(group)
            self._staleness = max(self._staleness, *(version - span.low for span in spans), 0)
            self._stale_tokens += sum((version - span.low) * (span.end - span.start) for span in spans)
            self._tokens += sum(span.end - span.start for span in spans)

    def _add(self, finished: RolloutResult) -> None:
        outcome = finished.outcome
        self.rollouts += 1
        if (reward := outcome.reward_or_floor(0.0)) is not None:
            self._rewards.append(reward)
        if outcome.failure is not None:
            self._failures[str(outcome.failure.kind)] += 1
        for calls in finished.refused:
            self._refused[calls.code] += calls.count
            self._refusals.setdefault(calls.code, calls.message)
        self._retried += finished.attempts - 1
        self._turns += len(finished.turns)
        self._tool_calls += sum(len(turn.messages[-1].tool_calls) for turn in finished.turns if turn.messages)
        for name, value in outcome.metrics.items():
            self._agent.setdefault(name, []).append(value)

    @property
    def reward(self) -> float | None:
        """Mean reward, with 0 for policy failures without one; None without rewards."""
        return sum(self._rewards) / len(self._rewards) if self._rewards else None

    @property
    def failed(self) -> int:
        """Number of rollouts without a reward."""
        return self.rollouts - len(self._rewards)

    @property
    def agent(self) -> dict[str, float]:
        """Metrics of agents, each averaged over the rollouts that report it."""
        return {name: _mean(values) for name, values in self._agent.items()}

    def metrics(self) -> dict[str, Any]:
        """Fields of `StepMetrics` that follow from the rollouts."""
        code = next((code for code, _ in self._refused.most_common(1)), "")
        return {
            "reward": self.reward,
            "rollouts": self.rollouts,
            "failed": self.failed,
            "failures": dict(self._failures),
            "refused": dict(self._refused),
            "refusal": self._refusals.get(code, ""),
            "retried": self._retried,
            "dropped_groups": dict(self.dropped),
            "turns_per_rollout": self._turns / max(self.rollouts, 1),
            "tool_calls_per_rollout": self._tool_calls / max(self.rollouts, 1),
            "staleness": self._staleness,
            "staleness_mean": self._stale_tokens / max(self._tokens, 1),
            "agent": self.agent,
        }


def carrying_spans(group: Group) -> list[VersionSpan]:
    """Versions of the tokens of rollouts with a reward."""
    carrying = (f for f in group.finished if f.outcome.reward_or_floor(0.0) is not None)
    return [span for f in carrying for t in f.trajectories for span in t.versions]


def mean_metrics(finished: Iterable[RolloutResult]) -> dict[str, float]:
    """Average each agent metric over the rollouts that report it."""
    values_of: dict[str, list[float]] = {}
    for result in finished:
        for name, value in result.outcome.metrics.items():
            values_of.setdefault(name, []).append(value)
    return {name: _mean(values) for name, values in values_of.items()}


def _mean(values: Sequence[float]) -> float:
    """Divides first, so that the sum of very large numbers does not overflow."""
    return math.fsum(value / len(values) for value in values)
