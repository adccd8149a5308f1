"""What someone's own loop learns from: replies that were sampled, and sequences with what they earned.

A reply knows the one its prompt goes on from, so that a conversation of several turns is one sequence in
which every sampled token is trained once, exactly as it was sampled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from msgspec import Struct, structs

from afield.advantages import AdvantageEstimator, compute_advantages
from afield.errors import UsageError
from afield.trainers.batch import Row, to_batch
from afield.trainers.diagnostics import check_against_turns
from afield.types import FinishReason, Group, Image, Message, Sampling, Trajectory, TurnRange, VersionSpan


class Datum(Struct, frozen=True, kw_only=True):
    """A sequence, and what each of its trained turns earned. Sequences of one rollout share its id; their
    weights add up to at most 1. `images` has one for each that the trajectory has.
    """

    rollout_id: str
    trajectory: Trajectory
    advantages: tuple[float, ...]
    images: tuple[Image, ...] = ()


class SampledReply(Struct, frozen=True, kw_only=True):
    """What the policy said to a prompt. `prompt_ids` is all that came before, earlier replies included."""

    id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]  # counted from the first sampled token
    finish: FinishReason
    sampling: Sampling
    message: Message
    previous: SampledReply | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """All there is so far."""
        return (*self.prompt_ids, *self.token_ids)

    @property
    def text(self) -> str:
        return self.message.content

    def conversation(self) -> Iterator[SampledReply]:
        """From the first reply to this one."""
        if self.previous is not None:
            yield from self.previous.conversation()
        yield self

    def to_row(self, advantage: float | Sequence[float]) -> Datum:
        """The whole conversation as one sequence; with one advantage for all replies, or one for each.
        Numbers may be those of numpy or torch."""
        replies = [reply for reply in self.conversation() if reply.token_ids]
        ids = self.ids
        mask, logprobs = [0] * len(ids), [0.0] * len(ids)
        turns: list[TurnRange] = []
        versions: list[VersionSpan] = []
        for reply in replies:
            start = len(reply.prompt_ids)
            end = start + len(reply.token_ids)
            mask[start:end] = [1] * (end - start)
            logprobs[start:end] = reply.logprobs
            how = reply.sampling
            turns.append(TurnRange(reply.id, start, end, how.temperature, how.truncated))
            versions += [VersionSpan(start + s.start, start + s.end, s.low, s.high) for s in reply.versions]
        single = isinstance(advantage, int | float) or getattr(advantage, "ndim", None) == 0
        earned = [advantage] * len(turns) if single else list(cast("Sequence[float]", advantage))
        if len(earned) != len(turns):
            raise UsageError(f"reply {self.id}: {len(earned)} advantages for {len(turns)} replies")
        trajectory = Trajectory(
            token_ids=ids,
            loss_mask=tuple(mask),
            logprobs=tuple(logprobs),
            versions=tuple(versions),
            turns=tuple(turns),
            weight=1.0,
        )
        return Datum(
            rollout_id=self.id,
            trajectory=trajectory,
            advantages=tuple(map(float, cast("list[float]", earned))),
        )


def supervised_row(
    name: str, prompt_ids: Sequence[int], token_ids: Sequence[int], weight: float = 1.0
) -> Datum:
    """A sequence nobody sampled, to be imitated: for the loss "cross_entropy"."""
    start, end = len(prompt_ids), len(prompt_ids) + len(token_ids)
    if start == end:
        raise UsageError(f"rollout {name}: there are no tokens to imitate")
    trajectory = Trajectory(
        token_ids=(*prompt_ids, *token_ids),
        loss_mask=(0,) * start + (1,) * (end - start),
        logprobs=(0.0,) * end,
        versions=(VersionSpan(start, end, 0, 0),),
        turns=(TurnRange(name, start, end, 1.0),),
        weight=1.0,
    )
    return Datum(rollout_id=name, trajectory=trajectory, advantages=(float(weight),))


def rows_from_groups(
    groups: Sequence[Group], advantage: AdvantageEstimator = "grpo", *, floor: float = 0.0
) -> list[Datum]:
    """The rollouts that afield collected, with their advantages, checked against their recorded turns."""
    check_against_turns(groups)
    rows = to_batch(groups, compute_advantages(groups, advantage, floor=floor)).rows
    return [
        Datum(
            rollout_id=row.rollout_id,
            trajectory=row.trajectory,
            advantages=row.advantages,
            images=row.images,
        )
        for row in rows
    ]


def to_rows(data: Iterable[Datum], *, imitate: bool = False) -> list[Row]:
    """`imitate`: it does not matter how they were sampled."""
    data = list(data)
    weights: Counter[str] = Counter()
    for datum in data:
        weights[datum.rollout_id] += datum.trajectory.weight  # pyright: ignore[reportArgumentType]
    if heavy := [name for name, weight in weights.items() if weight > 1 + 1e-6]:
        raise UsageError(
            f"rollout {heavy[0]}: its sequences weigh {weights[heavy[0]]:g} together; give each reply once,"
            " and sequences of different rollouts different ids"
        )
    rows: list[Row] = []
    for number, datum in enumerate(data):
        trajectory = datum.trajectory
        if imitate:
            plain = [structs.replace(turn, temperature=1.0, truncated=False) for turn in trajectory.turns]
            trajectory = structs.replace(trajectory, turns=tuple(plain))
        if (given := [image.digest for image in datum.images]) != [i.digest for i in trajectory.images]:
            raise UsageError(
                f"rollout {datum.rollout_id}: {len(given)} images for the {len(trajectory.images)} that its"
                " sequence has; give them in their order"
            )
        rows.append(Row(number, datum.rollout_id, "", trajectory, datum.advantages, datum.images))
    return rows
