"""Samples and batches: the rows that are trained, and all rollouts they were taken from.

A `Sample` is one row: the ids before the first token it owns, the ids from there on, and for each of those
its mask and log-probability; offsets of turns and versions count from the start of the response. Only
rollouts that carry a score have samples; a `Batch` keeps a `RolloutRecord` of every rollout.
A batch that exists lines up: every owned turn is owned by one row only, the weights of a rollout add up to
1, and scores agree. What does not is refused, naming rollout and turn.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Struct

from afield.errors import UsageError
from afield.types import (
    Constraint,
    Exclusion,
    Outcome,
    Rollout,
    Sampling,
    Trajectory,
    TurnRange,
    VersionSpan,
    check_cover,
)

Form = Literal["linear", "per_turn"]
T = TypeVar("T")
MOST = 2**31  # token ids are below it
ROUNDING = 1e-3  # what arithmetic may put a log-probability above 0


class OwnedTurn(Struct, frozen=True, kw_only=True):
    """A turn that a row owns: where its tokens lie, how they were drawn, and its place in its rollout.

    `order` counts the rollout's trained turns in the order they were committed, `parent` is the nearest
    trained turn above it ("" for none). `finish_reason` is "" where the turn itself was not kept.
    """

    id: str
    order: int
    start: int
    end: int
    temperature: float
    truncated: bool = False
    top_p: float = 1.0
    top_k: int = 0
    tier: str = ""
    parent: str = ""
    finish_reason: str = ""
    constraint: Constraint | None = None

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


class Sample(Struct, frozen=True, kw_only=True):
    """One training row. `logprobs` is 0.0 where `response_mask` is 0."""

    rollout_id: str
    group_id: str
    row: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    turns: tuple[OwnedTurn, ...]
    weight: float
    score: float
    rewards: dict[str, float] = {}
    failure: str = ""
    attempts: int = 1

    def __post_init__(self) -> None:
        where = self.where
        if not self.prompt_ids:
            raise ValueError(f"{where}: there is no prompt before its first sampled token")
        lengths = (len(self.response_ids), len(self.response_mask), len(self.logprobs))
        if len(set(lengths)) != 1:
            raise ValueError(
                f"{where}: {lengths[0]} response ids, {lengths[1]} mask entries,"
                f" {lengths[2]} log-probabilities"
            )
        check_ids((*self.prompt_ids, *self.response_ids), where)
        self._check_mask()
        check_cover(self.versions, [(turn.start, turn.end) for turn in self.turns], where)
        if not 0 < self.weight <= 1:
            raise ValueError(f"{where}: weight {self.weight} must be above 0 and at most 1")
        if not math.isfinite(self.score):
            raise ValueError(f"{where}: score {self.score} is not a finite number")

    @property
    def where(self) -> str:
        return f"rollout {self.rollout_id}, turn {self.turns[0].id if self.turns else '(none)'}"

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.response_ids

    @property
    def owned(self) -> int:
        return sum(self.response_mask)

    @property
    def trajectory(self) -> Trajectory:
        """The row as trainers of this package take it."""
        before = len(self.prompt_ids)
        return Trajectory(
            token_ids=self.token_ids,
            loss_mask=(0,) * before + self.response_mask,
            logprobs=(0.0,) * before + self.logprobs,
            versions=tuple(
                VersionSpan(before + s.start, before + s.end, s.low, s.high) for s in self.versions
            ),
            turns=tuple(
                TurnRange(
                    t.id,
                    before + t.start,
                    before + t.end,
                    t.temperature,
                    t.truncated,
                    t.tier,
                    t.constraint,
                )
                for t in self.turns
            ),
            weight=self.weight,
        )

    def _check_mask(self) -> None:
        """The mask is 1 on the tokens of its turns and nowhere else."""
        if not self.turns or self.turns[0].start != 0:
            raise ValueError(f"{self.where}: the response does not begin with a sampled token")
        at = 0
        for turn in self.turns:
            where = f"rollout {self.rollout_id}, turn {turn.id}"
            if not at <= turn.start < turn.end <= len(self.response_ids):
                raise ValueError(f"{where}: tokens {turn.start} to {turn.end} are not a part of the row")
            check_logprobs(self.logprobs[turn.start : turn.end], where)
            expected = (0,) * (turn.start - at) + (1,) * (turn.end - turn.start)
            if self.response_mask[at : turn.end] != expected:
                raise ValueError(f"{where}: the mask is not 1 exactly where the row owns tokens")
            at = turn.end
        if any(self.response_mask[at:]):
            raise ValueError(f"{self.where}: the mask is 1 where no turn of the row lies")
        for mask, logprob in zip(self.response_mask, self.logprobs, strict=True):
            if logprob and not mask:
                raise ValueError(f"{self.where}: a log-probability where the mask is 0")


def check_ids(ids: Iterable[int], where: str) -> None:
    if stray := next((i for i in ids if not 0 <= i < MOST), None):
        raise ValueError(f"{where}: token id {stray} is negative, or beyond every vocabulary")


def check_logprobs(logprobs: Iterable[float], where: str) -> None:
    for value in logprobs:
        if not math.isfinite(value):
            raise ValueError(f"{where}: a log-probability is not a finite number")
        if value > ROUNDING:
            raise ValueError(f"{where}: the log-probability {value:g} is above 0")


class RolloutRecord(Struct, frozen=True, kw_only=True):
    """A rollout and what came of it, trained or not. `score` is what trains; None leaves it out.
    Of one that trains, the outcome's `turn_rewards` and `named_turn_rewards` are by trained turns and their
    ids.
    """

    rollout: Rollout
    outcome: Outcome
    epoch: int
    score: float | None = None
    attempts: int = 1
    excluded: tuple[Exclusion, ...] = ()
    baseline: bool = False

    @property
    def trains(self) -> bool:
        return self.score is not None and not self.baseline


class Batch(Struct, frozen=True, kw_only=True):
    form: Form
    samples: tuple[Sample, ...]
    rollouts: tuple[RolloutRecord, ...]

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise ValueError(f"unknown form {self.form!r}; choose one of: {', '.join(get_args(Form))}")
        known = by_id(self.rollouts)
        rows: dict[str, list[Sample]] = {}
        for sample in self.samples:
            check_sample(sample, known)
            rows.setdefault(sample.rollout_id, []).append(sample)
        for mine in rows.values():
            check_rollout(mine)
            check_lineage(mine)
            if self.form == "per_turn" and (more := [row for row in mine if len(row.turns) > 1]):
                raise ValueError(f"{more[0].where}: its row has {len(more[0].turns)} turns, not one")
        for rollout_id, record in known.items():
            check_rewards(record, {turn.id for row in rows.get(rollout_id, []) for turn in row.turns})

    def rows(self, rollout_id: str) -> tuple[Sample, ...]:
        return tuple(sample for sample in self.samples if sample.rollout_id == rollout_id)


def by_id(records: Iterable[RolloutRecord]) -> dict[str, RolloutRecord]:
    known: dict[str, RolloutRecord] = {}
    for record in records:
        if record.rollout.id in known:
            raise ValueError(f"rollout {record.rollout.id} is in the batch more than once")
        if record.score is not None and record.outcome.reward_or_floor(0.0) is None:
            raise ValueError(f"rollout {record.rollout.id} failed and has a score all the same")
        known[record.rollout.id] = record
    return known


def check_sample(sample: Sample, known: dict[str, RolloutRecord]) -> None:
    """A sample says of its rollout what the rollout's record says."""
    record = known.get(sample.rollout_id)
    if record is None:
        raise ValueError(f"{sample.where}: the batch has no record of this rollout")
    if not record.trains:
        raise ValueError(f"{sample.where}: a rollout that does not train has rows")
    theirs = (record.rollout.group_id, record.score, record.outcome.rewards, failure_kind(record.outcome))
    if (sample.group_id, sample.score, sample.rewards, sample.failure) != theirs:
        raise ValueError(f"{sample.where}: group, score, rewards or failure differ from its rollout's record")
    if sample.attempts != record.attempts:
        raise ValueError(
            f"{sample.where}: {sample.attempts} attempts, its rollout's record says {record.attempts}"
        )


def check_rollout(rows: list[Sample]) -> None:
    """All rows of one rollout, each owned turn in one of them only."""
    if [sample.row for sample in rows] != list(range(len(rows))):
        raise ValueError(f"{rows[0].where}: its rows are numbered {[sample.row for sample in rows]}")
    turns = [turn for sample in rows for turn in sample.turns]
    seen: set[str] = set()
    for turn in turns:
        if turn.id in seen:
            raise ValueError(f"rollout {rows[0].rollout_id}, turn {turn.id}: more than one row owns it")
        seen.add(turn.id)
    if sorted(turn.order for turn in turns) != list(range(len(turns))):
        raise ValueError(f"{rows[0].where}: the order of its turns is {[turn.order for turn in turns]}")
    weight = math.fsum(sample.weight for sample in rows)
    if abs(weight - 1) > 1e-6:
        raise ValueError(
            f"{rows[0].where}: the weights of its rows add up to {weight}, not 1: a row is missing"
        )
    total = sum(sample.owned for sample in rows)
    for sample in rows:
        if not math.isclose(sample.weight, sample.owned / total, rel_tol=1e-6):
            raise ValueError(
                f"{sample.where}: weight {sample.weight}, and its row has {sample.owned} of {total} tokens"
            )


def check_lineage(rows: list[Sample]) -> None:
    """Turns follow their parents, and rows begin with the very ids of what they branched from."""
    owned = {turn.id: (row, turn) for row in rows for turn in row.turns}
    for row in rows:
        before = None
        for turn in row.turns:
            where = f"rollout {row.rollout_id}, turn {turn.id}"
            if before is not None and turn.parent != before:
                raise ValueError(f"{where}: it follows turn {before} in its row and names {turn.parent!r}")
            before = turn.id
            if not turn.parent:
                continue
            if turn.parent not in owned or owned[turn.parent][1].order >= turn.order:
                raise ValueError(f"{where}: its parent {turn.parent} is not before it")
            other, above = owned[turn.parent]
            end = len(other.prompt_ids) + above.end
            if other is not row and (
                end > len(row.prompt_ids) or other.token_ids[:end] != row.prompt_ids[:end]
            ):
                raise ValueError(f"{where}: its prompt does not begin with turn {above.id}, its parent")


def in_order(samples: Iterable[Sample]) -> tuple[Sample, ...]:
    """The same, each rollout's rows as they are numbered, in the places that they had."""
    given = list(samples)
    rows: dict[str, list[Sample]] = {}
    for sample in given:
        rows.setdefault(sample.rollout_id, []).append(sample)
    sorted_rows = {name: iter(sorted(mine, key=lambda one: one.row)) for name, mine in rows.items()}
    return tuple(next(sorted_rows[sample.rollout_id]) for sample in given)


def check_rewards(record: RolloutRecord, owned: set[str]) -> None:
    outcome = record.outcome
    rewarded = set(outcome.turn_rewards).union(*outcome.named_turn_rewards.values())
    if stray := sorted(rewarded - owned) if record.trains else []:
        where = f"rollout {record.rollout.id}, turn {stray[0]}"
        raise ValueError(f"{where}: it has a reward, and no row owns it")


def failure_kind(outcome: Outcome) -> str:
    return str(outcome.failure.kind) if outcome.failure else ""


def describe_row(line: Mapping[str, Any]) -> str:
    """Rollout and first turn of a sample or a node that may be wrong in any way."""
    turns = line.get("turns") or [line.get("turn")]
    first = turns[0] if isinstance(turns, list | tuple) else None
    turn = first.get("id") if isinstance(first, Mapping) else None
    return f"rollout {line.get('rollout_id') or '(none)'}, turn {turn or '(none)'}"


def convert_row(line: Mapping[str, Any], into: type[T]) -> T:
    """With rollout and turn in the message where a value is not even of its type."""
    try:
        return msgspec.convert(line, into)
    except msgspec.ValidationError as error:
        told = str(error)
        raise ValueError(told if told.startswith("rollout ") else f"{describe_row(line)}: {told}") from error


@contextmanager
def usage_errors(what: str) -> Generator[None]:
    """What does not line up is a person's to mend: the message says where."""
    try:
        yield
    except (ValueError, msgspec.MsgspecError) as error:
        raise UsageError(f"{what}: {error}") from error
