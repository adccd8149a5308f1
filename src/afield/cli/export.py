"""`afield export`: write a run's training data for another trainer."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from afield import __version__
from afield.batches.atif import is_atif, read_atif, write_atif
from afield.batches.groups import from_groups, to_groups
from afield.batches.hf import write_hf
from afield.batches.jsonl import write_jsonl
from afield.batches.parquet import write_parquet
from afield.batches.rewards import weigh_rewards
from afield.batches.rows import Batch
from afield.batches.sft import best_rollouts, write_sft
from afield.batches.tree import TreeBatch, to_tree
from afield.cli.runs import open_run
from afield.errors import UsageError
from afield.orchestrator.state import RunDirectory, RunState
from afield.types import Group, RolloutResult, Split

WRITERS = {"jsonl": write_jsonl, "parquet": write_parquet, "hf": write_hf}
FORMATS = (*WRITERS, "atif", "sft")
FORMS = ("linear", "per-turn", "tree")


def add(commands: Any) -> None:
    command = commands.add_parser(
        "export",
        help="write the training data of a run to a file",
        description="Write the groups that a run was trained on to one file, for another trainer to read.",
    )
    command.add_argument(
        "name",
        nargs="?",
        default="latest",
        metavar="RUN",
        help="run id, path, or latest; or a file or directory of ATIF trajectories (default: latest)",
    )
    command.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="file to write, or with --format hf or atif a directory; replaced if it exists",
    )
    command.add_argument(
        "--format",
        choices=FORMATS,
        default="jsonl",
        help="file format; hf writes a directory for load_from_disk of Hugging Face datasets, atif writes"
        " one trajectory file per rollout, sft a line of JSON with prompt and completion for the best"
        " rollouts of each group (default: jsonl)",
    )
    command.add_argument(
        "--form",
        choices=FORMS,
        default="linear",
        help="linear: a row per trajectory; per-turn: a row per turn; tree: a node per turn"
        " (default: linear)",
    )
    command.add_argument("--step", type=int, metavar="N", help="training step to export (default: all)")
    command.add_argument(
        "--reward",
        type=float,
        metavar="X",
        help="reward for ATIF trajectories without one, such as demonstrations",
    )
    command.add_argument(
        "--best",
        type=int,
        default=1,
        metavar="N",
        help="rollouts of each group, with --format sft (default: 1)",
    )
    command.add_argument(
        "--min-reward", type=float, metavar="X", help="smallest reward of a rollout, with --format sft"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)


class ExportSource(Struct, frozen=True, kw_only=True):
    """Groups to export, and what is known about them."""

    groups: list[Group]
    """Groups in order."""
    dropped: int = 0
    """Number of groups that were not trained on."""
    left_out: tuple[str, ...] = ()
    """ATIF files and steps without rows, with reasons."""
    agent: str = ""
    """Agent of the run; empty if unknown."""
    model: str = ""
    """Model of the run; empty if unknown."""


def run(args: argparse.Namespace) -> int:
    source = _read(args)
    if args.format == "sft":
        return _export_sft(args, source)
    form = "per_turn" if args.form == "per-turn" else "linear"
    batch = from_groups(source.groups, form)
    exported = to_tree(batch) if args.form == "tree" else batch
    if args.format == "atif":
        with _write_errors(args.out):
            write_atif(args.out, source.groups, agent=source.agent, version=__version__, model=source.model)
    else:
        write(args.out, args.format, exported)
    summary = {
        "out": str(args.out),
        "format": args.format,
        "form": args.form,
        "groups": len(source.groups),
        "dropped_groups": source.dropped,
        "rollouts": len(batch.rollouts),
        "rows": len(exported.nodes if isinstance(exported, TreeBatch) else exported.rows),
        "sampled_tokens": sum(row.owned for row in batch.rows),
    }
    if source.left_out:
        summary["left_out"] = source.left_out
    if args.json:
        print(json.dumps(summary))
        return 0
    print(
        f"wrote {summary['rows']} {'nodes' if args.form == 'tree' else 'rows'}"
        f" with {summary['sampled_tokens']} sampled tokens of {summary['rollouts']} rollouts"
        f" in {summary['groups']} groups to {args.out}"
    )
    if source.dropped:
        print(f"left out {source.dropped} dropped groups, which were not trained on")
    for reason in source.left_out:
        print(f"left out {reason}")
    return 0


def _export_sft(args: argparse.Namespace, source: ExportSource) -> int:
    if args.best < 1:
        raise UsageError(f"--best {args.best} must be at least 1")
    chosen = best_rollouts(source.groups, args.best, args.min_reward)
    partial = args.out.with_name(f"{args.out.name}.partial")
    with _write_errors(args.out):
        try:
            count = write_sft(partial, chosen)
            partial.replace(args.out)
        finally:
            partial.unlink(missing_ok=True)
    summary: dict[str, Any] = {
        "out": str(args.out),
        "format": "sft",
        "groups": len(source.groups),
        "pairs": count,
    }
    if source.left_out:
        summary["left_out"] = source.left_out
    text = f"wrote {count} pairs of {len(source.groups)} groups to {args.out}"
    text += "".join(f"\nleft out {reason}" for reason in source.left_out)
    print(json.dumps(summary) if args.json else text)
    return 0


def _read(args: argparse.Namespace) -> ExportSource:
    path = Path(args.name)
    if not RunDirectory(path).is_run and is_atif(path):
        atif = read_atif(path, reward=args.reward)
        if not atif.batch.rows:
            reasons = "\n  ".join(atif.left_out) or "no rollout has a reward"
            raise UsageError(f"nothing in {args.name} can be trained on:\n  {reasons}")
        return ExportSource(groups=to_groups(atif.batch), left_out=atif.left_out)
    run_path = open_run(args.name)
    info = run_path.info
    if info.kind in ("train", "demo"):
        groups, dropped = trained_groups(run_path, args.step)
    else:  # the run does not know what its caller trained; an evaluation trains nothing
        split = Split.VAL if info.kind == "eval" else Split.TRAIN
        groups, dropped = collected_groups(run_path, args.step, split), 0
    if not groups:
        what = "has trained on nothing" if info.kind in ("train", "demo") else "has no rollouts"
        raise UsageError(f"run {run_path.id} {what}{'' if args.step is None else f' in step {args.step}'}")
    groups, left_out = without_pending(groups)
    if run_path.config.exists() and (weights := reward_weights(json.loads(run_path.config.read_bytes()))):
        groups = weigh_rewards(groups, weights)
    return ExportSource(
        groups=groups, dropped=dropped, left_out=left_out, agent=info.agent, model=Path(info.model).name
    )


def without_pending(groups: list[Group]) -> tuple[list[Group], tuple[str, ...]]:
    """Groups without the rollouts whose reward is still to be given, and how many were left out."""
    pending = sum(one.outcome.reward_pending for group in groups for one in group.finished)
    if not pending:
        return groups, ()
    rewarded = [
        structs.replace(
            group, finished=tuple(one for one in group.finished if not one.outcome.reward_pending)
        )
        for group in groups
    ]
    reason = f"{pending} rollouts whose reward is still to be given; give it with RolloutClient.reward"
    return [group for group in rewarded if group.finished], (reason,)


def write(out: Path, format: str, batch: Batch | TreeBatch) -> None:
    """Write a file or a dataset atomically: under a temporary name, then renamed."""
    if format == "hf" and out.exists() and not (out / "state.json").is_file():
        raise UsageError(f"{out} exists and is no Hugging Face dataset; give --out a new directory")
    partial = out.with_name(f"{out.name}.partial")
    with _write_errors(out):
        try:
            WRITERS[format](partial, batch)
            if out.is_dir() and format == "hf":
                shutil.rmtree(out)
            partial.replace(out)
        finally:
            if partial.is_dir():
                shutil.rmtree(partial)
            partial.unlink(missing_ok=True)


@contextmanager
def _write_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error}") from error


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


def collected_groups(run: RunDirectory, step: int | None = None, split: Split = Split.TRAIN) -> list[Group]:
    """Groups of a run that another program trains on, or of an evaluation."""
    where = "split=? AND removed=0" + ("" if step is None else " AND step=?")
    members: dict[str, list[RolloutResult]] = {}
    with run.index as index:
        index.refresh()
        for row in index.rollouts(where, str(split), *([] if step is None else [step])):
            members.setdefault(row.group_id, []).append(index.read(row))
    return [
        Group(id=g, task_id=m[0].rollout.task.id, epoch=0, split=split, finished=tuple(m))
        for g, m in members.items()
    ]


def reward_weights(config: dict[str, Any]) -> dict[str, float]:
    """Weights of named rewards, if the run was trained on their weighted sum; otherwise empty."""
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
