"""Run directories written without running anything, with rewards by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from afield.orchestrator.state import RunDirectory, RunInfo, RunKind
from afield.settings.train import train_config
from afield.types import (
    Exclusion,
    FinishReason,
    Outcome,
    Rollout,
    RolloutResult,
    RolloutTimes,
    Sampling,
    Split,
    Task,
    Turn,
    TurnStatus,
    VersionSpan,
)


def turns() -> tuple[Turn, ...]:
    """Two calls, the second of which continues the first: prompts of 2 and 5 tokens, replies of 1 token."""
    return tuple(
        Turn(
            id=f"t{n}",
            root="root",
            parent=parent,
            delta_ids=(1, 2),
            token_ids=(3,),
            logprobs=(-0.5,),
            versions=(VersionSpan(0, 1, 0, 0),),
            finish_reason=FinishReason.STOP,
            status=TurnStatus.COMMITTED,
            sampling=Sampling(),
        )
        for n, parent in ((1, None), (2, "t1"))
    )


def results(rewards: Mapping[str, Sequence[float]], split: Split, start: float = 0.0) -> list[RolloutResult]:
    """Rollouts of these rewards; each takes an hour from `start`, all at once."""
    return [
        RolloutResult(
            rollout=Rollout(
                id=f"{split}-{start:g}-{task}-r{n}",
                exp_id="e",
                group_id=f"{split}-{start:g}-{task}",
                task=Task(task, {"question": task}),
                split=split,
            ),
            outcome=Outcome(rollout_id=f"{split}-{start:g}-{task}-r{n}", attempt=1, reward=reward),
            turns=turns(),
            excluded=(Exclusion("t1", 1, "aborted"), Exclusion("t2", 1, "aborted")),
            attempts=1,
            times=RolloutTimes(submitted=start, started=start, attempted=start, ended=start + 3600.0),
        )
        for task, values in rewards.items()
        for n, reward in enumerate(values)
    ]


def write_run(
    path: Path,
    kind: RunKind,
    *,
    train: Mapping[str, Sequence[float]] | None = None,
    val: Mapping[str, Sequence[float]] | None = None,
    prices: Mapping[str, float] | None = None,
) -> RunDirectory:
    """A run with these rewards by task: of step 1 for `train`, without steps for the others."""
    run = RunDirectory(path)
    path.mkdir(parents=True)
    run.write_info(RunInfo(kind=kind))
    if prices is not None:
        run.config.write_bytes(msgspec.json.encode(train_config(None, {"model": "m", **prices})))
    if train:
        run.append_rollouts(1 if kind == "train" else None, results(train, Split.TRAIN))
    if val and kind == "eval":
        run.append_rollouts(None, results(val, Split.VAL))
    elif val:
        run.write_validation({"step": 0, "reward": None, "rollouts": 1}, results(val, Split.VAL))
    run.index.close()
    return run
