"""Rollouts made by hand, and veRL's own configuration, for the suites that run beside a real veRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module

from afield import trajectories
from afield.turn_tree import TurnTree
from afield.types import (
    Failure,
    FailureKind,
    FinishReason,
    Outcome,
    Reason,
    Rollout,
    RolloutResult,
    Sampling,
    Task,
    Turn,
    TurnStatus,
    VersionSpan,
)

POLICY = Path(__file__).parents[2] / "src" / "afield" / "demo" / "policy"
AGENT = f"{Path(__file__).parent / 'verl_agents.py'}:agent"


def veRL_config(*overrides: str) -> Any:
    """As `main_ppo` composes it."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[f"actor_rollout_ref.model.path={POLICY}", *overrides])


def turn(id: str, parent: str | None, delta: tuple[int, ...], sampled: tuple[int, ...], version: int) -> Turn:
    return Turn(
        id=id,
        root="root",
        parent=parent,
        delta_ids=delta,
        token_ids=sampled,
        logprobs=tuple(-0.01 * i for i in sampled),
        versions=(VersionSpan(0, len(sampled), version, version),),
        finish_reason=FinishReason.STOP,
        status=TurnStatus.COMMITTED,
        sampling=Sampling(),
        started=float(len(delta)),
        ended=float(len(delta)) + 0.5,
    )


def finished(
    rollout_id: str, reward: float | None, *, branched: bool = False, version: int = 3
) -> RolloutResult:
    """Two calls; if it branched, a third one that goes on from the first. Without a reward, it died."""
    turns = [turn("t1", None, (1, 2, 3), (10, 11), version), turn("t2", "t1", (4,), (12,), version + 1)]
    if branched:
        turns.append(turn("t3", "t1", (5, 6), (13, 14), version))
    assembled = trajectories.linear(TurnTree(turns))
    broke = None if reward is not None else Failure(FailureKind.INFRASTRUCTURE, Reason.DIED, "it went away")
    return RolloutResult(
        rollout=Rollout(id=rollout_id, exp_id="exp", group_id="g", task=Task("task", {})),
        outcome=Outcome(rollout_id=rollout_id, attempt=1, reward=reward, failure=broke, metrics={"acc": 1.0}),
        trajectories=assembled.trajectories,
        turns=tuple(turns),
    )
