"""Random groups with branches, failures, baselines, rewards of all kinds; and one made by hand."""

from __future__ import annotations

import random

from afield import trajectories
from afield.turn_tree import TurnTree
from afield.types import (
    Failure,
    FailureKind,
    FinishReason,
    Group,
    Outcome,
    Reason,
    Rollout,
    RolloutResult,
    Sampling,
    Split,
    Task,
    Turn,
    TurnStatus,
    VersionSpan,
)

KINDS = [None, None, None, *FailureKind]
SHARED = (7, 7, 7)  # what prompts of a group begin with, now and then


class Maker:
    """Groups of a seed; drawing every number from hypothesis would take seconds."""

    def __init__(self, seed: int, kept: bool | None) -> None:
        self.random = random.Random(seed)
        self.kept = kept

    def number(self) -> float:
        return self.random.uniform(-100, 100)

    def ids(self, least: int = 1) -> tuple[int, ...]:
        return tuple(self.random.randrange(4) for _ in range(self.random.randint(least, 4)))

    def spans(self, length: int) -> tuple[VersionSpan, ...]:
        made, start = [], 0
        while start < length:
            end, low = self.random.randint(start + 1, length), self.random.randrange(9)
            made.append(VersionSpan(start, end, low, low + self.random.randrange(3)))
            start = end
        return tuple(made)

    def forest(self) -> TurnTree:
        """Several roots, branches, twins, empty and aborted turns."""
        forest = TurnTree()
        for n in range(self.random.randint(1, 8)):
            committed = [t for t in forest.turns if t.status is TurnStatus.COMMITTED]
            parent = self.random.choice([None, *committed, *committed])
            aborted = self.random.random() < 0.2
            sampled = self.ids(0 if aborted else 1)
            opening = SHARED if parent is None and self.random.random() < 0.5 else ()
            finish = self.random.choice([FinishReason.STOP, FinishReason.LENGTH])
            forest.add(
                Turn(
                    id=f"t{n}",
                    root=parent.root if parent else f"root{self.random.randrange(3)}",
                    parent=parent.id if parent else None,
                    delta_ids=opening + self.ids(),
                    token_ids=sampled,
                    logprobs=tuple(-self.random.uniform(0.001, 20) for _ in sampled),
                    versions=self.spans(len(sampled)),
                    finish_reason=FinishReason.ABORTED if aborted else finish,
                    status=TurnStatus.ABORTED if aborted else TurnStatus.COMMITTED,
                    sampling=Sampling(
                        temperature=self.random.choice([0.7, 1.0]), top_k=self.random.choice([0, 0, 9])
                    ),
                    tier=self.random.choice(["bridge", "full"]),
                )
            )
        return forest

    def finished(self, rollout_id: str, group_id: str) -> RolloutResult:
        """A rollout of any fate; with its turns, or with rows alone."""
        forest = self.forest()
        committed = [t for t in forest.turns if t.status is TurnStatus.COMMITTED]
        withheld = {t.id: "side:declared" for t in committed if self.random.random() < 0.15}
        assembled = trajectories.linear(forest, withheld)
        keeps = self.random.random() < 0.5 if self.kept is None else self.kept
        owned = [turn.id for row in assembled.trajectories for turn in row.turns]
        named = [turn.id for turn in committed] if keeps else owned
        kind = self.random.choice(KINDS)
        rewarded = kind is None or (kind is FailureKind.POLICY and self.random.random() < 0.5)
        outcome = Outcome(
            rollout_id=rollout_id,
            attempt=self.random.randint(1, 3),
            reward=self.number() if rewarded else None,
            rewards={name: self.number() for name in "ab" if rewarded and self.random.random() < 0.5},
            turn_rewards={t: self.number() for t in named if rewarded and self.random.random() < 0.5},
            failure=Failure(kind, Reason.RAISED, "it broke", "its traceback") if kind else None,
        )
        task = Task(f"task of {group_id}", {"q": 1})
        return RolloutResult(
            rollout=Rollout(id=rollout_id, exp_id="exp", group_id=group_id, task=task),
            outcome=outcome,
            trajectories=assembled.trajectories,
            excluded=assembled.excluded,
            turns=tuple(forest.turns) if keeps else (),
            attempts=outcome.attempt,
        )

    def groups(self) -> list[Group]:
        made = []
        for g in range(self.random.randint(1, 2)):
            members = [self.finished(f"g{g}-r{k}", f"g{g}") for k in range(self.random.randint(1, 4))]
            greedy = self.finished(f"g{g}-greedy", f"g{g}") if self.random.random() < 0.5 else None
            made.append(
                Group(
                    id=f"g{g}",
                    task_id=f"task of g{g}",
                    epoch=self.random.randrange(4),
                    split=Split.TRAIN,
                    finished=tuple(members),
                    baseline=greedy,
                )
            )
        return made


def turn(
    id: str, parent: str | None, delta: tuple[int, ...], sampled: tuple[int, ...], version: int = 3
) -> Turn:
    return Turn(
        id=id,
        root="root",
        parent=parent,
        delta_ids=delta,
        token_ids=sampled,
        logprobs=tuple(-0.1 * i for i in sampled),
        versions=(VersionSpan(0, len(sampled), version, version),),
        finish_reason=FinishReason.STOP,
        status=TurnStatus.COMMITTED,
        sampling=Sampling(),
        tier="bridge",
    )


def branching(rollout_id: str, reward: float | None, **outcome) -> RolloutResult:
    """t1, then t2 and t3 both behind t1."""
    turns = (
        turn("t1", None, (1, 2, 3), (10, 11)),
        turn("t2", "t1", (4,), (12,), 4),
        turn("t3", "t1", (5, 6), (13, 14)),
    )
    assembled = trajectories.linear(TurnTree(turns))
    broke = None if reward is not None else Failure(FailureKind.INFRASTRUCTURE, Reason.DIED, "it went away")
    return RolloutResult(
        rollout=Rollout(id=rollout_id, exp_id="exp", group_id="g", task=Task("task", {})),
        outcome=Outcome(rollout_id=rollout_id, attempt=1, reward=reward, failure=broke, **outcome),
        trajectories=assembled.trajectories,
        turns=turns,
    )


def group(*members: RolloutResult, baseline: RolloutResult | None = None) -> Group:
    return Group(id="g", task_id="task", epoch=0, split=Split.TRAIN, finished=members, baseline=baseline)
