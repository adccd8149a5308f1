"""Groups of rollouts made of random ids, as a trainer gets them."""

from __future__ import annotations

import random

from afield.trajectories import linear
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
    Trajectory,
    Turn,
    TurnStatus,
    VersionSpan,
)

BROKEN = Failure(FailureKind.INFRASTRUCTURE, Reason.DIED, "the machine went away")


def forest(
    seed: int, *, turns: int = 2, sampling: Sampling | None = None, version: int = 0, tier: str = ""
) -> TurnTree:
    """A conversation of random ids, sampled by something near the policy."""
    rng = random.Random(seed)
    tree = TurnTree()
    for n in range(turns):
        sampled = tuple(rng.randrange(300) for _ in range(rng.randint(2, 5)))
        tree.add(
            Turn(
                id=f"t{n}",
                root="root",
                parent=f"t{n - 1}" if n else None,
                delta_ids=tuple(rng.randrange(300) for _ in range(rng.randint(2, 6))),
                token_ids=sampled,
                logprobs=tuple(-rng.uniform(5.0, 7.0) for _ in sampled),
                versions=(VersionSpan(0, len(sampled), version, version),),
                finish_reason=FinishReason.STOP,
                status=TurnStatus.COMMITTED,
                sampling=sampling or Sampling(),
                tier=tier,
                digest=f"d{n}",
            )
        )
    return tree


def finished(
    name: str, reward: float | None, trajectories: tuple[Trajectory, ...], group: str = "g"
) -> RolloutResult:
    rollout = Rollout(id=f"{group}-{name}", exp_id="exp", group_id=group, task=Task("task", {}))
    failure = BROKEN if reward is None else None
    outcome = Outcome(rollout_id=rollout.id, attempt=1, reward=reward, failure=failure)
    return RolloutResult(rollout=rollout, outcome=outcome, trajectories=trajectories)


def group(*rollouts: RolloutResult, name: str = "g") -> Group:
    return Group(id=name, task_id="task", epoch=0, split=Split.TRAIN, finished=rollouts)


def group_of(rewards: list[float], *, name: str = "g", seed: int = 0, **how) -> Group:
    rows = [linear(forest(seed + n, **how)).trajectories for n in range(len(rewards))]
    parts = zip(rewards, rows, strict=True)
    return group(*(finished(str(n), r, t, name) for n, (r, t) in enumerate(parts)), name=name)
