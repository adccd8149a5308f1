"""The judge: what a session recorded, held against what the engine really served.

Calls are told apart by what they are (prompt, sampled ids, log-probabilities), never by ids the gateway
made up. Every call of the ledger has to be in the record once; every stretch of training tokens has to
be one call's tokens behind that call's prompt; every committed call is trained once or excluded with
a reason; no prompt is trained twice; the forest has the branches it should have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from afield.seams import Record
from afield.types import Trajectory, Turn, TurnStatus

Key = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]


class Served(Protocol):
    """A ledger's entry."""

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def logprobs(self) -> tuple[float, ...]: ...


class Verdict(Struct, frozen=True, kw_only=True):
    calls: int = 0
    matched: int = 0
    duplicates: int = 0
    branches: int = 0
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


def judge(ledger: Sequence[Served], record: Record, branches: int) -> Verdict:
    served = Counter(_key(entry) for entry in ledger)
    turns = {turn.id: turn for turn in record.turns}
    recorded = {turn.id: (_prompt(turns, turn), turn.token_ids, turn.logprobs) for turn in record.turns}
    held = Counter(recorded.values())
    trained, problems = _trained(served, record.trajectories)
    excluded = {e.turn: e.reason for e in record.excluded}
    problems += [f"call {_name(key)} is not in the record" for key in served - held]
    problems += [f"the record has a call {_name(key)} that the engine never served" for key in held - served]
    problems += _unaccounted(turns, recorded, trained, excluded)
    duplicates = _twice(trained)
    problems += [f"{duplicates} calls are trained besides another with the same prompt"] * bool(duplicates)
    found = _branches(record.turns)
    problems += [f"{found} branches, expected {branches}"] * (found != branches)
    return Verdict(
        calls=len(ledger),
        matched=sum((served & held).values()),
        duplicates=duplicates,
        branches=found,
        problems=tuple(problems),
    )


def _key(entry: Served) -> Key:
    return entry.prompt_ids, entry.token_ids, entry.logprobs


def _prompt(turns: Mapping[str, Turn], turn: Turn) -> tuple[int, ...]:
    parts = [turn.delta_ids]
    while turn.parent is not None:
        turn = turns[turn.parent]
        parts += [turn.token_ids, turn.delta_ids]
    return tuple(token for part in reversed(parts) for token in part)


def _trained(served: Counter[Key], rows: Sequence[Trajectory]) -> tuple[Counter[Key], list[str]]:
    """The calls that are in the loss, and stretches of the loss that are no call."""
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


def _twice(trained: Counter[Key]) -> int:
    prompts = Counter(prompt for prompt, _, _ in trained.elements())
    return sum(times - 1 for times in prompts.values())


def _branches(turns: Sequence[Turn]) -> int:
    committed = [turn for turn in turns if turn.status is TurnStatus.COMMITTED]
    parents = {turn.parent for turn in committed}
    return sum(turn.id not in parents for turn in committed)


def _name(key: Key) -> str:
    return f"of {len(key[0])} prompt and {len(key[1])} sampled tokens"
