"""Evidence of a diagnosis: rollouts, steps and tests of shares."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from afield.orchestrator.state import RunDirectory
from afield.runs.index import RolloutRow
from afield.types import RolloutResult
from afield.utils.statistics import wilson

Stage = Literal["infrastructure", "generation", "logprobs", "advantage", "reward"]
STAGES: tuple[Stage, ...] = ("infrastructure", "generation", "logprobs", "advantage", "reward")
"""Stages of a run, lowest first: a broken one explains findings in those after it."""
ENOUGH = 4
"""Fewest cases of a problem that make a finding of a run."""
MESSAGE_LENGTH = 160
"""Characters of a message that a finding quotes."""
EXAMPLES = 3
"""Rollouts that a finding names."""
INFRASTRUCTURE_CODES = frozenset(
    {
        *("engine_unavailable", "internal_error", "store_unavailable", "request_timeout"),
        *("too_many_bytes_in_flight", "too_many_connections", "too_many_sessions"),
    }
)
"""Classes of refused calls that the infrastructure causes, not the request."""


class RolloutFacts(Struct, frozen=True, kw_only=True, gc=False):
    """Columns of a rollout's row that classes use; see `run_index.RolloutRow`."""

    id: str
    """Rollout id."""
    step: int | None
    """Training step that took it."""
    group_id: str
    """Group id."""
    task_id: str
    """Task id."""
    greedy: int
    """1 if it was sampled greedily."""
    reward: float | None
    """Reward; None without one."""
    failure_kind: str | None
    """Kind of its failure."""
    failure_reason: str | None
    """Reason of its failure."""
    failure_message: str | None
    """Message of its failure."""
    turns: int
    """Number of model calls."""
    tool_calls: int
    """Number of tool calls."""
    sampled_tokens: int
    """Sampled tokens."""
    excluded: dict[str, int]
    """Excluded tokens by reason."""
    refused_calls: int
    """Number of refused calls."""
    refused: dict[str, int]
    """Refused calls by class of error."""
    refusal: str | None
    """Message of the last refused call."""
    tags: dict[str, int]
    """Turns by tag."""
    facts: dict[str, int]
    """Counts of `turn_facts.FACTS`."""
    started: float | None
    """Time of the request to run it, in seconds."""
    ended: float | None
    """Time of its end, in seconds."""
    queue_s: float | None
    """Seconds until a slot was free."""
    launch_s: float | None
    """Seconds until the agent ran."""
    model_s: float | None
    """Seconds in model calls."""
    tool_s: float | None
    """Seconds between model calls."""

    def fact(self, name: str) -> int:
        return self.facts.get(name, 0)

    @property
    def made_calls(self) -> bool:
        """Whether any model call of it reached the gateway."""
        return bool(self.turns or self.refused_calls)


_NAMES = re.compile(r"\S*\d\S*")
COLUMNS = RolloutFacts.__struct_fields__
_JSON = frozenset({"excluded", "refused", "tags", "facts"})


class Finding(Struct, frozen=True, kw_only=True):
    """A problem of a run, with its evidence and a remedy."""

    name: str = ""
    """Name of the class."""
    stage: Stage = "infrastructure"
    """Stage of the run that is broken."""
    problem: str
    """Problem, in one sentence."""
    evidence: tuple[str, ...] = ()
    """Figures, one per line."""
    remedy: str
    """Remedy; names a setting or a command."""
    rollouts: tuple[str, ...] = ()
    """Rollouts that show it."""
    files: tuple[str, ...] = ()
    """Files that show it."""
    commands: tuple[str, ...] = ()
    """Commands that show it."""
    pages: tuple[str, ...] = ()
    """Pages of `afield ui` that show it."""


class RunEvidence:
    """A run, or one of its rollouts, as the classes see it. Reads nothing but the run directory."""

    def __init__(self, run: RunDirectory, rollout: RolloutRow | None = None) -> None:
        self.run = run
        self.rollout = rollout
        self.info = run.info
        self.settings = _settings(run.config)
        """Settings of a training run or an evaluation; empty for other runs."""
        self.rollouts = _rollouts(run) if rollout is None else _rollouts(run, rollout.id)
        """All rollouts of the run, validations included; or the one that is diagnosed."""
        lines = run.index.fetch("SELECT line FROM steps WHERE split='train' ORDER BY step")
        self.steps: list[dict[str, Any]] = [json.loads(line) for (line,) in lines]
        """Lines of metrics.jsonl."""
        if rollout is not None:
            self.steps = [line for line in self.steps if line["step"] == rollout.step]

    @property
    def single(self) -> bool:
        """Whether one rollout is diagnosed, of which a single case counts."""
        return self.rollout is not None

    @property
    def trains(self) -> bool:
        """Whether the run trains weights on the rewards of groups."""
        trainers = ("train", "demo", "verl", "trl")
        return self.info.kind in trainers and not self.settings.get("freeze_weights", False)

    def with_turns(self) -> list[RolloutFacts]:
        """Rollouts that sampled something."""
        return [rollout for rollout in self.rollouts if rollout.turns]

    def early(self) -> list[RolloutFacts]:
        """Rollouts of the first quarter of the steps: a defect that appears later was learned."""
        steps = [rollout.step for rollout in self.rollouts if rollout.step is not None]
        if self.single or not self.trains or not steps:
            return self.rollouts
        last = max(1, max(steps) // 4)
        return [rollout for rollout in self.rollouts if rollout.step is not None and rollout.step <= last]

    def grouped(self, rollouts: Sequence[RolloutFacts] | None = None) -> list[list[RolloutFacts]]:
        """Rollouts by group, in the order of the run, without greedy ones; by default all."""
        groups: dict[str, list[RolloutFacts]] = {}
        selected = self.rollouts if rollouts is None else rollouts
        if self.rollout is not None:
            selected = _rollouts(self.run, group=self.rollout.group_id)
        for rollout in selected:
            if not rollout.greedy:
                groups.setdefault(rollout.group_id, []).append(rollout)
        return list(groups.values())

    def exceeds(self, cases: int, total: int, share: float, least: int = ENOUGH) -> bool:
        """Whether more than `share` of all cases are affected, beyond the doubt of a 95 % interval."""
        if self.single:
            return cases > 0
        return cases >= least and wilson(min(1.0, cases / total), total)[0] > share

    def read(self, rollouts: Iterable[RolloutFacts], limit: int) -> list[RolloutResult]:
        """The first few whole rollouts that are still on disk."""
        results: list[RolloutResult] = []
        for rollout in rollouts:
            row = self.run.index.find(rollout.id)
            if not row.removed:
                results.append(self.run.index.read(row))
            if len(results) == limit:
                break
        return results

    def trainer_metrics(self, name: str) -> list[float]:
        """Values of a metric of the trainer, by step, where it was reported."""
        return [line["trainer"][name] for line in self.steps if name in (line.get("trainer") or {})]


def examples(rollouts: Iterable[RolloutFacts]) -> tuple[str, ...]:
    """Ids of the newest few rollouts."""
    return tuple(rollout.id for rollout in list(rollouts)[-EXAMPLES:])


def share(cases: int, total: int, what: str) -> str:
    """Text of a share with its interval."""
    if total < 2:
        return f"{cases} of {total} {what}"
    low, high = wilson(min(1.0, cases / total), total)
    interval = f"95 % interval {100 * low:.0f} to {100 * high:.0f} %"
    return f"{cases} of {total} {what} ({cases / total:.0%}, {interval})"


def most_common(values: Iterable[str | None]) -> str:
    """The most common text on one line, with its count; texts that differ in ids and numbers are alike."""
    texts: dict[str, list[str]] = {}
    for value in filter(None, values):
        text = " ".join(value.split())
        texts.setdefault(_NAMES.sub("#", text), []).append(text)
    alike = max(texts.values(), key=len, default=[])
    return f"{len(alike)} x {alike[-1][:MESSAGE_LENGTH]!r}" if alike else ""


def count(rollouts: Sequence[RolloutFacts], number: Callable[[RolloutFacts], int]) -> int:
    return sum(map(number, rollouts))


def total_of(rollouts: Iterable[RolloutFacts], field: str) -> Counter[str]:
    """Sum of a dictionary of counts over rollouts."""
    counts: Counter[str] = Counter()
    for rollout in rollouts:
        counts.update(getattr(rollout, field))
    return counts


def listed(counts: Mapping[str, int], limit: int = 4) -> str:
    """Largest counts: `context_length_exceeded 12, engine_unavailable 3`."""
    return ", ".join(f"{name} {number}" for name, number in Counter(counts).most_common(limit))


def _rollouts(run: RunDirectory, rollout_id: str = "", *, group: str = "") -> list[RolloutFacts]:
    where, values = ("1", []) if not rollout_id else ("id=?", [rollout_id])
    if group:
        where, values = "group_id=?", [group]
    sql = f"SELECT {', '.join(COLUMNS)} FROM rollouts WHERE {where} ORDER BY coalesce(step, 1e18), seq"
    places = [name in _JSON for name in COLUMNS]
    decode = msgspec.json.decode
    return [
        RolloutFacts(
            **{
                name: decode(value) if is_json else value
                for name, value, is_json in zip(COLUMNS, row, places, strict=True)
            }
        )
        for row in run.index.fetch(sql, *values)
    ]


def _settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}
