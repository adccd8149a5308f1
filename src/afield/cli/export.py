"""`afield export`: write a run's training data for another trainer."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import msgspec

from afield.batches.groups import from_groups
from afield.batches.jsonl import write_jsonl
from afield.batches.parquet import write_parquet
from afield.batches.rewards import weigh_rewards
from afield.batches.rows import Batch
from afield.batches.tree import TreeBatch, to_tree
from afield.errors import UsageError
from afield.orchestrator.state import RunDirectory, RunState, find_run
from afield.settings.environment import Environment
from afield.types import Group, RolloutResult

WRITERS = {"jsonl": write_jsonl, "parquet": write_parquet}
FORMS = ("linear", "per-turn", "tree")


def add(commands: Any) -> None:
    command = commands.add_parser(
        "export",
        help="write the training data of a run to a file",
        description="Write the groups that a run was trained on to one file, for another trainer to read.",
    )
    command.add_argument(
        "name", nargs="?", default="latest", metavar="RUN", help="run id, path, or latest (default: latest)"
    )
    command.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="file to write; replaced if it exists"
    )
    command.add_argument("--format", choices=WRITERS, default="jsonl", help="file format (default: jsonl)")
    command.add_argument(
        "--form",
        choices=FORMS,
        default="linear",
        help="linear: a row per trajectory; per-turn: a row per turn; tree: a node per turn"
        " (default: linear)",
    )
    command.add_argument("--step", type=int, metavar="N", help="training step to export (default: all)")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    run_path = find_run(Environment.read().runs, args.name)
    groups, dropped = trained_groups(run_path, args.step)
    if not groups:
        raise UsageError(
            f"run {run_path.id} has trained on nothing{'' if args.step is None else f' in step {args.step}'}"
        )
    if weights := reward_weights(run_path):
        groups = weigh_rewards(groups, weights)
    batch = from_groups(groups, "per_turn" if args.form == "per-turn" else "linear")
    exported = to_tree(batch) if args.form == "tree" else batch
    write(args.out, args.format, exported)
    summary = {
        "out": str(args.out),
        "format": args.format,
        "form": args.form,
        "groups": len(groups),
        "dropped_groups": dropped,
        "rollouts": len(batch.rollouts),
        "rows": len(exported.nodes if isinstance(exported, TreeBatch) else exported.rows),
        "sampled_tokens": sum(row.owned for row in batch.rows),
    }
    if args.json:
        print(json.dumps(summary))
        return 0
    print(
        f"wrote {summary['rows']} {'nodes' if args.form == 'tree' else 'rows'}"
        f" with {summary['sampled_tokens']} sampled tokens of {summary['rollouts']} rollouts"
        f" in {summary['groups']} groups to {args.out}"
    )
    if dropped:
        print(f"left out {dropped} dropped groups, which were not trained on")
    return 0


def write(out: Path, format: str, batch: Batch | TreeBatch) -> None:
    """Write the file atomically: under a temporary name, then renamed."""
    partial = out.with_name(f"{out.name}.partial")
    try:
        WRITERS[format](partial, batch)
        partial.replace(out)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def trained_groups(run: RunDirectory, only: int | None = None) -> tuple[list[Group], int]:
    """Groups that completed steps trained on, and the number of dropped groups."""
    steps = run.steps()
    if only is not None and only not in steps:
        available = f"{steps[0]} to {steps[-1]}" if steps else "none"
        raise UsageError(f"run {run.id} has no step {only}; it has: {available}")
    lost = {line["step"]: line["dropped_groups"] for line in run.read_metrics()}
    groups: list[Group] = []
    dropped = 0
    with RunState(run.run_state) as state:
        for step in steps if only is None else [only]:
            if step not in lost:  # the metrics line is written last, so the step is incomplete
                continue
            members: dict[str, list[RolloutResult]] = {}
            for finished in run.read_rollouts(step):
                members.setdefault(finished.rollout.group_id, []).append(finished)
            dropped += len(lost[step])
            groups += [
                group_of(m, state.group_members(g)[1]) for g, m in members.items() if g not in lost[step]
            ]
    return groups, dropped


def reward_weights(run: RunDirectory) -> dict[str, float]:
    """Weights of named rewards, if the run was trained on their weighted sum; otherwise empty."""
    config = msgspec.json.decode(run.config.read_bytes())
    return {} if config.get("freeze_weights") else config.get("learn", {}).get("rewards", {})


def group_of(members: list[RolloutResult], baseline: str | None) -> Group:
    """Rebuild a group from its rollouts; `baseline` is the id of the greedy rollout, if any."""
    rollout = members[0].rollout
    epoch = re.match(rf"{re.escape(rollout.exp_id)}-e(\d+)-", rollout.group_id)
    if epoch is None:
        raise UsageError(f"group {rollout.group_id} is not of a training run: its id has no epoch")
    return Group(
        id=rollout.group_id,
        task_id=rollout.task.id,
        epoch=int(epoch[1]),
        split=rollout.split,
        finished=tuple(f for f in members if f.rollout.id != baseline),
        baseline=next((f for f in members if f.rollout.id == baseline), None),
    )
