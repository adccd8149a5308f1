"""Conformance judge: compares a session record with the recorded engine calls.

Calls are identified by prompt, sampled ids and log-probabilities, never by ids of the gateway. Checks:

1. The record contains every engine call once, and no others.
2. Every run of training tokens is the sampled tokens of one call after that call's prompt.
3. Every committed call is trained once, unless the scenario lists it as excluded with the reason.
4. No prompt is trained twice.
5. The turn tree has the expected number of branches.

`oracle` checks the prompts against the client's requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from afield.conformance.scenario import ABANDONED
from afield.interfaces import SessionRecord
from afield.types import Trajectory, Turn, TurnStatus

Key = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]


class ServedCall(Protocol):
    """Fields of a recorded engine call that the judge and the oracle read."""

    @property
    def call_id(self) -> str:
        """Id of the engine call."""
        ...

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Prompt of the engine call."""
        ...

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Sampled tokens."""
        ...

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Log-probability of each sampled token."""
        ...

    @property
    def finish(self) -> str | None:
        """Finish reason; None if the call did not end."""
        ...


class Verdict(Struct, frozen=True, kw_only=True):
    """Result of one client on one template family."""

    calls: int = 0
    """Number of engine calls."""
    matched: int = 0
    """Number of engine calls that the record contains exactly."""
    duplicates: int = 0
    """Number of trained calls beyond the first with the same prompt."""
    branches: int = 0
    """Number of committed leaves of the turn tree, without abandoned replies."""
    excluded: dict[str, int] = {}
    """Number of calls excluded from training, by reason."""
    problems: tuple[str, ...] = ()
    """Problems found; empty if the client conforms."""

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


def judge(
    engine_calls: Sequence[ServedCall],
    record: SessionRecord,
    branches: int,
    allowed: Mapping[str, Sequence[str]],
    places: Mapping[str, str],
) -> Verdict:
    """Compare a session record with the engine calls.

    Args:
        engine_calls: recorded engine calls.
        record: record of the session.
        branches: expected number of committed leaves of the turn tree.
        allowed: markers or phrases of the calls that may be excluded from training, by reason.
        places: marker or phrase of each engine call, by call id.
    """
    served = Counter(_key(entry) for entry in engine_calls)
    turns = {turn.id: turn for turn in record.turns}
    recorded = {turn.id: (_prompt(turns, turn), turn.token_ids, turn.logprobs) for turn in record.turns}
    held = Counter(recorded.values())
    trained, problems = _trained(served, record.trajectories)
    excluded = {e.turn: e.reason for e in record.excluded}
    problems += _unlisted(engine_calls, record, recorded, allowed, places)
    problems += [f"call {_name(key)} is not in the record" for key in served - held]
    problems += [f"the record has a call {_name(key)} that the engine never served" for key in held - served]
    problems += _unaccounted(turns, recorded, trained, excluded)
    duplicates = _twice(trained)
    problems += [f"{duplicates} calls are trained besides another with the same prompt"] * bool(duplicates)
    branch_count = _branches([turn for turn in record.turns if excluded.get(turn.id) != ABANDONED])
    problems += [f"{branch_count} branches, expected {branches}"] * (branch_count != branches)
    return Verdict(
        calls=len(engine_calls),
        matched=sum((served & held).values()),
        duplicates=duplicates,
        branches=branch_count,
        excluded=dict(Counter(e.reason for e in record.excluded)),
        problems=tuple(problems),
    )


def _key(entry: ServedCall) -> Key:
    return entry.prompt_ids, entry.token_ids, entry.logprobs


def _prompt(turns: Mapping[str, Turn], turn: Turn) -> tuple[int, ...]:
    parts = [turn.delta_ids]
    while turn.parent is not None:
        turn = turns[turn.parent]
        parts += [turn.token_ids, turn.delta_ids]
    return tuple(token for part in reversed(parts) for token in part)


def _trained(served: Counter[Key], rows: Sequence[Trajectory]) -> tuple[Counter[Key], list[str]]:
    """Calls in the loss, and problems of loss runs that are not exactly one call."""
    trained: Counter[Key] = Counter()
    problems: list[str] = []
    for n, row in enumerate(rows):
        for start, end in _stretches(row.loss_mask):
            key = (row.token_ids[:start], row.token_ids[start:end], row.logprobs[start:end])
            if served[key]:
                trained[key] += 1
            else:
                problems.append(
                    f"trajectory {n}, tokens {start} to {end}: trained, but no call of the engine"
                )
    problems += [
        f"call {_name(key)} is trained {extra} times too often" for key, extra in (trained - served).items()
    ]
    return trained, problems


def _stretches(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    start: int | None = None
    for n, bit in enumerate((*mask, 0)):
        if bit and start is None:
            start = n
        elif not bit and start is not None:
            yield start, n
            start = None


def _unaccounted(
    turns: Mapping[str, Turn], recorded: Mapping[str, Key], trained: Counter[Key], excluded: Mapping[str, str]
) -> list[str]:
    problems: list[str] = []
    for turn in turns.values():
        in_loss, why_not = bool(trained[recorded[turn.id]]), excluded.get(turn.id)
        if turn.status is TurnStatus.DANGLING:
            problems.append(f"turn {turn.id} is dangling")
        elif turn.status is TurnStatus.ABORTED and (in_loss or why_not is None):
            problems.append(f"turn {turn.id} was aborted; in the loss: {in_loss}, excluded: {why_not}")
        elif turn.status is TurnStatus.COMMITTED and in_loss == (why_not is not None):
            problems.append(f"turn {turn.id} was committed; in the loss: {in_loss}, excluded: {why_not}")
    return problems


def _unlisted(
    engine_calls: Sequence[ServedCall],
    record: SessionRecord,
    recorded: Mapping[str, Key],
    allowed: Mapping[str, Sequence[str]],
    places: Mapping[str, str],
) -> list[str]:
    """Problems of exclusions that the scenario does not list, or whose turn or token count is wrong."""
    where = {_key(entry): places.get(entry.call_id, "nowhere") for entry in engine_calls}
    left = Counter((reason, place) for reason, listed in allowed.items() for place in listed)
    problems: list[str] = []
    for exclusion in record.excluded:
        key = recorded.get(exclusion.turn)
        if key is None:
            problems.append(f"an exclusion names turn {exclusion.turn}, which is not in the record")
            continue
        if exclusion.tokens != len(key[1]):
            problems.append(
                f"turn {exclusion.turn} has {len(key[1])} tokens, its exclusion says {exclusion.tokens}"
            )
        place = where.get(key, "nowhere")
        if left[exclusion.reason, place] < 1:
            problems.append(f"the call at {place!r} is excluded as {exclusion.reason!r}, which is not listed")
        left[exclusion.reason, place] -= 1
    return problems


def _twice(trained: Counter[Key]) -> int:
    prompts = Counter(prompt for prompt, _, _ in trained.elements())
    return sum(times - 1 for times in prompts.values())


def _branches(turns: Sequence[Turn]) -> int:
    committed = [turn for turn in turns if turn.status is TurnStatus.COMMITTED]
    parents = {turn.parent for turn in committed}
    return sum(turn.id not in parents for turn in committed)


def _name(key: Key) -> str:
    return f"of {len(key[0])} prompt and {len(key[1])} sampled tokens"
