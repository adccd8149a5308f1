"""Training rows: one trajectory with its rollout, advantages, rewards and images.

1. `Row` is the input of every trainer and export: GRPO, the tinker-style loop, FSDP, veRL and TRL.
2. `RowColumns` is its file form, the columns of JSONL, Parquet and TensorDict.
3. `Batch` holds the rows of a set of groups and a `RolloutRecord` of every rollout, trained or not.

A `Batch` is checked when it is built: each owned turn belongs to one row, the weights of a rollout add up to
1, and rows agree with their rollout's record. Errors name rollout and turn.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, cast, get_args

import msgspec
from msgspec import Struct, structs

from afield.advantages import TurnAdvantages
from afield.errors import UsageError
from afield.types import (
    Exclusion,
    Image,
    Outcome,
    Rollout,
    RolloutResult,
    Sampling,
    Trajectory,
    TurnRange,
    VersionSpan,
    check_cover,
)

Form = Literal["linear", "per_turn"]
T = TypeVar("T")
MAX_TOKEN_ID = 2**31
ROUNDING = 1e-3
"""Largest log-probability above 0 that floating-point arithmetic explains."""
NO_RECORD = "the batch has a row of this rollout, but no record of it; add the record"
NOT_TRAINED = (
    "the batch has a row of this rollout, but its record is not trained (it has no score, or is a greedy"
    " baseline); remove the row"
)


class OwnedTurn(TurnRange, frozen=True, kw_only=True):
    """Turn that a row owns, with its position in the rollout's turn tree."""

    order: int
    """Position among the rollout's trained turns, in the order they were committed."""
    parent: str = ""
    """Id of the nearest trained turn above it; empty for a root."""
    top_p: float = 1.0
    """Nucleus sampling parameter; 1 is off."""
    top_k: int = 0
    """Number of likeliest tokens to draw from; 0 is off."""
    finish_reason: str = ""
    """Why sampling stopped; empty if the turn itself was not recorded."""

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


class Row(Struct, frozen=True, kw_only=True):
    """Training sequence: token ids, owned mask, log-probabilities and versions, and its advantages."""

    rollout_id: str
    """Rollout id."""
    trajectory: Trajectory
    """Token ids, loss mask, log-probabilities, version spans, owned turns (with constraints) and weight."""
    group_id: str = ""
    """Group id; empty if unknown."""
    index: int = 0
    """Position among the rows of its rollout."""
    advantages: tuple[float, ...] = ()
    """Advantage of each owned turn; empty if the trainer estimates advantages itself, as veRL does."""
    token_rewards: tuple[tuple[int, float], ...] = ()
    """Pairs of response position and reward, for trainers that estimate advantages from rewards."""
    images: tuple[Image, ...] = ()
    """Images of the trajectory's image spans, in their order."""
    excluded: str = ""
    """Reason why the row is not trained (`exclusions.ExclusionReason`); empty for a row that trains."""

    @property
    def key(self) -> tuple[str, int]:
        return self.rollout_id, self.index

    @property
    def where(self) -> str:
        """Rollout and first owned turn, for error messages."""
        turns = self.trajectory.turns
        return f"rollout {self.rollout_id}, turn {turns[0].id if turns else '(none)'}"

    @property
    def owned(self) -> int:
        """Number of tokens that the row trains."""
        return self.trajectory.owned

    @property
    def turns(self) -> tuple[OwnedTurn, ...]:
        """Owned turns of a row from `from_groups` or from a file."""
        return cast("tuple[OwnedTurn, ...]", self.trajectory.turns)

    @property
    def assembled(self) -> Trajectory:
        """Trajectory with plain turn ranges, as it was assembled."""
        fields = TurnRange.__struct_fields__
        turns = (TurnRange(**{name: getattr(turn, name) for name in fields}) for turn in self.turns)
        return structs.replace(self.trajectory, turns=tuple(turns))

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first one that the row owns."""
        turns = self.trajectory.turns
        return turns[0].start if turns else len(self.trajectory.token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.trajectory.token_ids

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.trajectory.token_ids[: self.prompt_length]

    @property
    def response_ids(self) -> tuple[int, ...]:
        return self.trajectory.token_ids[self.prompt_length :]

    @property
    def response_mask(self) -> tuple[int, ...]:
        return self.trajectory.loss_mask[self.prompt_length :]

    @property
    def response_logprobs(self) -> tuple[float, ...]:
        """Log-probabilities of the response; 0.0 where the mask is 0."""
        return self.trajectory.logprobs[self.prompt_length :]

    @property
    def versions(self) -> tuple[int, int]:
        """Lowest and highest policy version that sampled a token of the row."""
        spans = self.trajectory.versions
        return min(span.low for span in spans), max(span.high for span in spans)

    def columns(self, record: RolloutRecord) -> RowColumns:
        """Convert to columns. Raises ValueError if the rollout does not train."""
        row, start = self.trajectory, self.prompt_length
        if record.score is None:
            raise ValueError(f"{self.where}: {NOT_TRAINED}")
        return RowColumns(
            rollout_id=self.rollout_id,
            group_id=self.group_id,
            row=self.index,
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
            response_mask=self.response_mask,
            logprobs=self.response_logprobs,
            versions=shift_spans(row.versions, start, len(row.token_ids)),
            turns=tuple(structs.replace(t, start=t.start - start, end=t.end - start) for t in self.turns),
            weight=row.weight,
            score=record.score,
            rewards=record.outcome.rewards,
            failure=failure_kind(record.outcome),
            attempts=record.attempts,
        )


class RowColumns(Struct, frozen=True, kw_only=True):
    """Row as files and tensors store it: prompt and response separate, with the rollout's score.

    Offsets of turns and versions count from the first response token.
    """

    rollout_id: str
    """Rollout id."""
    group_id: str
    """Group id."""
    row: int
    """Position among the rows of its rollout, from 0."""
    prompt_ids: tuple[int, ...]
    """Token ids before the first owned token."""
    response_ids: tuple[int, ...]
    """Token ids from the first owned token on."""
    response_mask: tuple[int, ...]
    """1 for owned response tokens, else 0."""
    logprobs: tuple[float, ...]
    """Log-probability of each response token when sampled; 0.0 where the mask is 0."""
    versions: tuple[VersionSpan, ...]
    """Policy versions of the owned tokens."""
    turns: tuple[OwnedTurn, ...]
    """Turns that the row owns."""
    weight: float
    """Share of the rollout's trained tokens, above 0 and at most 1."""
    score: float
    """Reward of the rollout that trains."""
    rewards: dict[str, float] = {}
    """Named rewards of the rollout."""
    failure: str = ""
    """Failure kind of the rollout; empty without a failure."""
    attempts: int = 1
    """Number of attempts of the rollout."""

    def __post_init__(self) -> None:
        where = self.where
        if not self.prompt_ids:
            raise ValueError(f"{where}: the row has no prompt tokens before its first sampled token")
        lengths = (len(self.response_ids), len(self.response_mask), len(self.logprobs))
        if len(set(lengths)) != 1:
            raise ValueError(
                f"{where}: the row has {lengths[0]} response ids, {lengths[1]} mask entries and {lengths[2]}"
                " log-probabilities; it must have as many of each"
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

    def _check_mask(self) -> None:
        """Check that the mask is 1 exactly on the tokens of the turns."""
        if not self.turns or self.turns[0].start != 0:
            raise ValueError(f"{self.where}: the response does not begin with a sampled token")
        end = 0
        for turn in self.turns:
            where = f"rollout {self.rollout_id}, turn {turn.id}"
            if not end <= turn.start < turn.end <= len(self.response_ids):
                raise ValueError(f"{where}: tokens {turn.start} to {turn.end} are not a part of the row")
            check_logprobs(self.logprobs[turn.start : turn.end], where)
            expected = (0,) * (turn.start - end) + (1,) * (turn.end - turn.start)
            if self.response_mask[end : turn.end] != expected:
                raise ValueError(f"{where}: the mask is not 1 exactly where the row owns tokens")
            end = turn.end
        if any(self.response_mask[end:]):
            raise ValueError(f"{self.where}: the mask marks tokens that belong to no turn of the row")
        for mask, logprob in zip(self.response_mask, self.logprobs, strict=True):
            if logprob and not mask:
                raise ValueError(
                    f"{self.where}: a token with mask 0 has the log-probability {logprob:g}; set it to 0.0"
                )

    def to_row(self, record: RolloutRecord | None) -> Row:
        """Convert to a row. Raises ValueError if the columns differ from the rollout's record."""
        if record is None:
            raise ValueError(f"{self.where}: {NO_RECORD}")
        if not record.trains:
            raise ValueError(f"{self.where}: {NOT_TRAINED}")
        expected = (
            record.rollout.group_id,
            record.score,
            record.outcome.rewards,
            failure_kind(record.outcome),
        )
        if (self.group_id, self.score, self.rewards, self.failure) != expected:
            raise ValueError(
                f"{self.where}: group, score, rewards or failure of the row differ from the rollout's record"
            )
        if self.attempts != record.attempts:
            raise ValueError(
                f"{self.where}: the row has {self.attempts} attempts, but the rollout's record has"
                f" {record.attempts}"
            )
        start = len(self.prompt_ids)
        trajectory = Trajectory(
            token_ids=self.prompt_ids + self.response_ids,
            loss_mask=(0,) * start + self.response_mask,
            logprobs=(0.0,) * start + self.logprobs,
            versions=tuple(VersionSpan(start + s.start, start + s.end, s.low, s.high) for s in self.versions),
            turns=tuple(structs.replace(t, start=start + t.start, end=start + t.end) for t in self.turns),
            weight=self.weight,
        )
        return Row(rollout_id=self.rollout_id, group_id=self.group_id, index=self.row, trajectory=trajectory)


class RolloutRecord(Struct, frozen=True, kw_only=True):
    """A rollout and its outcome, trained or not."""

    rollout: Rollout
    """Rollout with its task."""
    outcome: Outcome
    """Reward or failure; for a rollout that trains, per-turn rewards are keyed by ids of trained turns."""
    epoch: int
    """Epoch of the data set, from 0."""
    score: float | None = None
    """Reward to train with; None if the rollout is not trained."""
    attempts: int = 1
    """Number of attempts."""
    excluded: tuple[Exclusion, ...] = ()
    """Sampled turns that are not trained, with reasons."""
    baseline: bool = False
    """Whether it is the greedy baseline of its group, which has no rows."""

    @property
    def trains(self) -> bool:
        return self.score is not None and not self.baseline


class Batch(Struct, frozen=True, kw_only=True):
    """The rows of a set of groups, and a record of every rollout in them."""

    form: Form
    """Rows, one per path of the turn tree (`linear`) or per turn (`per_turn`)."""
    rows: tuple[Row, ...]
    """Rows to train on."""
    rollouts: tuple[RolloutRecord, ...]
    """Record of every rollout, including those without rows."""

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise ValueError(f"unknown form {self.form!r}; choose one of: {', '.join(get_args(Form))}")
        records = records_by_id(self.rollouts)
        by_rollout: dict[str, list[Row]] = {}
        for row in self.rows:
            row.columns(record_of_row(row, records))
            by_rollout.setdefault(row.rollout_id, []).append(row)
        for rows in by_rollout.values():
            check_rollout(rows)
            check_lineage(rows)
            if self.form == "per_turn" and (longer := [row for row in rows if len(row.turns) > 1]):
                raise ValueError(
                    f"{longer[0].where}: the row has {len(longer[0].turns)} turns; form per_turn allows one"
                )
        for rollout_id, record in records.items():
            check_rewards(record, {turn.id for row in by_rollout.get(rollout_id, []) for turn in row.turns})

    def rows_of(self, rollout_id: str) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.rollout_id == rollout_id)


# --- rows of a rollout ---------------------------------------------------------------------------


def rows_of(result: RolloutResult, advantages: TurnAdvantages | None = None) -> list[Row]:
    """Rows, one per trajectory of a rollout, with its images and the advantage of each owned turn."""
    return [
        Row(
            rollout_id=result.rollout.id,
            group_id=result.rollout.group_id,
            index=index,
            trajectory=trajectory,
            advantages=() if advantages is None else per_turn(advantages, result.rollout.id, trajectory),
            images=row_images(result, trajectory),
        )
        for index, trajectory in enumerate(result.trajectories)
    ]


def per_turn(advantages: TurnAdvantages, rollout_id: str, trajectory: Trajectory) -> tuple[float, ...]:
    """Advantage of each owned turn. Raises UsageError for a turn without one."""
    if isinstance(advantages, int | float):
        return (float(advantages),) * len(trajectory.turns)
    if missing := [turn.id for turn in trajectory.turns if turn.id not in advantages]:
        raise UsageError(
            f"rollout {rollout_id}, turn {missing[0]}: it has no advantage; give one for each turn"
        )
    return tuple(advantages[turn.id] for turn in trajectory.turns)


def row_images(result: RolloutResult, trajectory: Trajectory) -> tuple[Image, ...]:
    """Images of a trajectory in order. Raises UsageError for one that the rollout did not keep."""
    by_digest = {image.digest: image for image in result.images}
    if missing := [span.digest for span in trajectory.images if span.digest not in by_digest]:
        raise UsageError(
            f"rollout {result.rollout.id}: the data of image {missing[0][:12]} is missing from the rollout;"
            " collect the rollout again with this version of afield"
        )
    return tuple(by_digest[span.digest] for span in trajectory.images)


def shift_spans(spans: Iterable[VersionSpan], start: int, end: int) -> tuple[VersionSpan, ...]:
    """Cut spans to tokens [start, end) and count from `start`."""
    inside = ((max(s.start, start), min(s.end, end), s) for s in spans)
    return tuple(VersionSpan(a - start, b - start, s.low, s.high) for a, b, s in inside if a < b)


def in_order(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Sort the rows of each rollout by index, within the positions that its rows had."""
    rows = list(rows)
    by_rollout: dict[str, list[Row]] = {}
    for row in rows:
        by_rollout.setdefault(row.rollout_id, []).append(row)
    ordered = {name: iter(sorted(mine, key=lambda row: row.index)) for name, mine in by_rollout.items()}
    return tuple(next(ordered[row.rollout_id]) for row in rows)


# --- checks --------------------------------------------------------------------------------------


def check_ids(ids: Iterable[int], where: str) -> None:
    if stray := next((i for i in ids if not 0 <= i < MAX_TOKEN_ID), None):
        raise ValueError(f"{where}: token id {stray} must be from 0 to {MAX_TOKEN_ID - 1}")


def check_logprobs(logprobs: Iterable[float], where: str) -> None:
    for value in logprobs:
        if not math.isfinite(value):
            raise ValueError(f"{where}: a log-probability is not a finite number")
        if value > ROUNDING:
            raise ValueError(
                f"{where}: the log-probability {value:g} is above 0; give natural logarithms of probabilities"
            )


def records_by_id(records: Iterable[RolloutRecord]) -> dict[str, RolloutRecord]:
    """Records by rollout id. Raises ValueError for duplicates and for failed rollouts with a score."""
    by_id: dict[str, RolloutRecord] = {}
    for record in records:
        if record.rollout.id in by_id:
            raise ValueError(f"rollout {record.rollout.id} is in the batch more than once")
        if record.score is not None and record.outcome.reward_or_floor(0.0) is None:
            raise ValueError(f"rollout {record.rollout.id} failed and yet has a score")
        by_id[record.rollout.id] = record
    return by_id


def record_of_row(row: Row, records: Mapping[str, RolloutRecord]) -> RolloutRecord:
    """Record of a row's rollout. Raises ValueError if it is missing, does not train or differs in group."""
    record = records.get(row.rollout_id)
    if record is None:
        raise ValueError(f"{row.where}: {NO_RECORD}")
    if not record.trains:
        raise ValueError(f"{row.where}: {NOT_TRAINED}")
    if row.group_id != record.rollout.group_id:
        raise ValueError(
            f"{row.where}: the row has the group {row.group_id!r}, but the rollout's record has"
            f" {record.rollout.group_id!r}"
        )
    return record


def check_rollout(rows: list[Row]) -> None:
    """Check that the rows of one rollout are complete and that no two own the same turn."""
    if [row.index for row in rows] != list(range(len(rows))):
        raise ValueError(f"{rows[0].where}: row numbers {[row.index for row in rows]} must be 0, 1, 2, ...")
    turns = [turn for row in rows for turn in row.turns]
    seen: set[str] = set()
    for turn in turns:
        if turn.id in seen:
            raise ValueError(
                f"rollout {rows[0].rollout_id}, turn {turn.id}: more than one row owns this turn"
            )
        seen.add(turn.id)
    if sorted(turn.order for turn in turns) != list(range(len(turns))):
        raise ValueError(
            f"{rows[0].where}: the rollout's turns have the positions {[turn.order for turn in turns]};"
            f" each number from 0 to {len(turns) - 1} must occur once"
        )
    weight = math.fsum(row.trajectory.weight for row in rows)
    if abs(weight - 1) > 1e-6:
        raise ValueError(
            f"{rows[0].where}: the weights of its rows add up to {weight}, not 1: a row is missing"
        )
    total = sum(row.owned for row in rows)
    for row in rows:
        if not math.isclose(row.trajectory.weight, row.owned / total, rel_tol=1e-6):
            raise ValueError(
                f"{row.where}: weight {row.trajectory.weight} is not the row's share of the rollout's trained"
                f" tokens, {row.owned} of {total}"
            )


def check_lineage(rows: list[Row]) -> None:
    """Check that turns follow their parents, and that a row begins with the ids of its branch point."""
    owners = {turn.id: (row, turn) for row in rows for turn in row.turns}
    for row in rows:
        previous = None
        for turn in row.turns:
            where = f"rollout {row.rollout_id}, turn {turn.id}"
            if previous is not None and turn.parent != previous:
                raise ValueError(
                    f"{where}: the row has this turn after {previous}, but the turn's parent is"
                    f" {turn.parent!r}"
                )
            previous = turn.id
            if not turn.parent:
                continue
            if turn.parent not in owners or owners[turn.parent][1].order >= turn.order:
                raise ValueError(f"{where}: its parent {turn.parent} does not come before it")
            owner, parent = owners[turn.parent]
            end = parent.end
            if owner is not row and (end > row.prompt_length or owner.token_ids[:end] != row.token_ids[:end]):
                raise ValueError(
                    f"{where}: its prompt does not begin with the tokens of its parent, turn {parent.id}"
                )


def check_rewards(record: RolloutRecord, owned: set[str]) -> None:
    """Check that every turn with a reward is owned by a row."""
    outcome = record.outcome
    rewarded = set(outcome.turn_rewards).union(*outcome.named_turn_rewards.values())
    if stray := sorted(rewarded - owned) if record.trains else []:
        where = f"rollout {record.rollout.id}, turn {stray[0]}"
        raise ValueError(
            f"{where}: the outcome has a reward for this turn, but the batch does not train the turn;"
            " add the turn, or remove its reward"
        )


# --- reading -------------------------------------------------------------------------------------


def failure_kind(outcome: Outcome) -> str:
    """Failure kind as text; empty without a failure."""
    return str(outcome.failure.kind) if outcome.failure else ""


def describe_columns(columns: Mapping[str, Any]) -> str:
    """Format rollout and first turn of a possibly malformed row or node, for error messages."""
    turns = columns.get("turns") or [columns.get("turn")]
    first = turns[0] if isinstance(turns, list | tuple) else None
    turn = first.get("id") if isinstance(first, Mapping) else None
    return f"rollout {columns.get('rollout_id') or '(none)'}, turn {turn or '(none)'}"


def convert_columns(columns: Mapping[str, Any], into: type[T]) -> T:
    """Convert to a struct, with rollout and turn in the message of a type error."""
    try:
        return msgspec.convert(columns, into)
    except msgspec.ValidationError as error:
        message = str(error)
        if not message.startswith("rollout "):
            message = f"{describe_columns(columns)}: {message}"
        raise ValueError(message) from error


@contextmanager
def usage_errors(context: str) -> Generator[None]:
    """Raise malformed data as UsageError, with `context` in front."""
    try:
        yield
    except (ValueError, msgspec.MsgspecError) as error:
        raise UsageError(f"{context}: {error}") from error
