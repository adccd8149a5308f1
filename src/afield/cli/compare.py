"""`afield compare`: two runs task by task, with a paired test."""

from __future__ import annotations

import argparse
import json
from itertools import product
from typing import Any

import msgspec

from afield.cli.runs import open_run
from afield.cli.tables import print_note, print_table
from afield.errors import UsageError
from afield.orchestrator.state import RunDirectory
from afield.runs.cost import cost_of
from afield.types import Split
from afield.utils.statistics import Difference, clustered_mean, paired_difference

Rewards = dict[str, list[float]]
"""Rewards by task."""
RewardsBySplit = dict[str, Rewards]
COLUMNS = ("task", "first", "second", "difference", "attempts", "question")


def add(commands: Any) -> None:
    command = commands.add_parser(
        "compare",
        help="compare two runs",
        description="Compare the rewards of two runs on the tasks that both attempted, with a paired test.",
    )
    command.add_argument("first", metavar="RUN", help="run id or path")
    command.add_argument("second", metavar="OTHER", help="run id or path")
    command.add_argument(
        "--split",
        choices=[str(split) for split in Split],
        help="rollouts to compare (default: validation, or else training, where the runs have common tasks)",
    )
    command.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="training step or validation (default: all; the last validation)",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    runs = [open_run(name) for name in (args.first, args.second)]
    for directory in runs:
        directory.index.refresh()
    found = [rewards_by_split(directory, args.split, args.step) for directory in runs]
    splits = comparable_splits(*found)
    first, second = (rewards[split] for rewards, split in zip(found, splits, strict=True))
    difference = paired_difference(first, second)
    questions = {
        row["task_id"]: row["question"]
        for row in runs[0].index.query("SELECT task_id, question FROM rollouts GROUP BY task_id")
    }
    tasks = [
        {
            "task": task,
            "first": mean(first[task]),
            "second": mean(second[task]),
            "difference": mean(first[task]) - mean(second[task]),
            "attempts": f"{len(first[task])}/{len(second[task])}",
            "question": questions.get(task),
        }
        for task in first
        if second.get(task)
    ]
    tasks.sort(key=lambda row: row["difference"])
    if args.json:
        summary = {
            "runs": [directory.id for directory in runs],
            "splits": splits,
            **as_json(difference),
            "costs": [
                msgspec.to_builtins(cost_of(directory.path, directory.info.kind, directory.index.query))
                for directory in runs
            ],
        }
        print(json.dumps({**summary, "tasks": tasks}))
        return 0
    print_table(tasks, COLUMNS)
    for name, directory, split, rewards in zip(
        ("first", "second"), runs, splits, (first, second), strict=True
    ):
        estimate = clustered_mean(rewards)
        average = f"mean reward {estimate.mean:.3f} of {estimate.attempts} rollouts ({split})"
        print_note(f"{name:7s} {directory.id}: {average}")
    print_note(describe(difference))
    for directory in runs:
        directory.index.close()
    return 0


def rewards_by_split(run: RunDirectory, split: str | None = None, step: int | None = None) -> RewardsBySplit:
    """Rewards of each split that has some, or of `split`; raises UsageError without any."""
    splits = [split] if split else [str(Split.VAL), str(Split.TRAIN)]
    found = {name: rewards for name in splits if (rewards := rewards_of(run, name, step))}
    if not found:
        steps = "" if step is None else f" in step {step}"
        raise UsageError(
            f"run {run.id} has no rollout with a reward{f' in split {split}' if split else ''}{steps}"
        )
    return found


def comparable_splits(first: RewardsBySplit, second: RewardsBySplit) -> tuple[str, str]:
    """Splits of two runs with common tasks: equal ones if possible, and validation before training."""
    pairs = sorted(product(first, second), key=lambda pair: pair[0] != pair[1])
    for one, other in pairs:
        if first[one].keys() & second[other].keys():
            return one, other
    raise UsageError("the runs cannot be compared: they have no task in common")


def rewards_of(run: RunDirectory, split: str, step: int | None = None) -> Rewards:
    """Rewards by task; of validations the last one, unless `step` names another."""
    if step is None and split == Split.VAL:
        (row,) = run.index.query("SELECT max(step) AS step FROM rollouts WHERE split='val'")
        step = row["step"]
    where = "split=? AND reward IS NOT NULL" + ("" if step is None else " AND step=?")
    rewards: Rewards = {}
    for row in run.index.rollouts(where, split, *([] if step is None else [step])):
        assert row.reward is not None
        rewards.setdefault(row.task_id, []).append(row.reward)
    return rewards


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def as_json(difference: Difference) -> dict[str, Any]:
    estimate = difference.estimate
    return {
        "difference": estimate.mean,
        "standard_error": estimate.standard_error,
        "low": estimate.low,
        "high": estimate.high,
        "p_value": difference.p_value,
        "common_tasks": estimate.tasks,
        "better": difference.better,
        "worse": difference.worse,
    }


def describe(difference: Difference) -> str:
    """The paired test in one line."""
    estimate = difference.estimate
    text = f"difference {estimate.mean:+.3f} over {estimate.tasks} common tasks"
    if estimate.low is None or estimate.high is None or difference.p_value is None:
        return f"{text}; a test needs at least two"
    p = "p < 0.001" if difference.p_value < 0.001 else f"p = {difference.p_value:.3g}"
    return (
        f"{text}, 95 % interval {estimate.low:+.3f} to {estimate.high:+.3f}, {p}"
        f" (paired t-test by task); better in {difference.better}, worse in {difference.worse}"
    )
