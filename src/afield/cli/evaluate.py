"""`afield eval`: evaluate an agent on tasks, with confidence intervals."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import secrets
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from afield.cli import compare
from afield.cli.flags import add_config_arguments, add_flags, flag_values
from afield.cli.report import me, short
from afield.cli.tables import print_note, print_table, printable
from afield.cli.train import add_agent_arguments, choose_agent, named, save_config, saved_config
from afield.datasets import read_tasks
from afield.errors import AfieldError, NoRewards, UsageError
from afield.jobs.evaluation import EvalSummary, evaluate, summarize
from afield.jobs.tracking import Tracking, describe_failures, read_states
from afield.orchestrator.state import RunDirectory, RunInfo, find_run
from afield.runs.cost import describe_cost
from afield.settings.environment import Environment
from afield.settings.train import REMOTE, RESUMABLE_KEYS, LearningSettings, PriceSettings, TrainConfig, build
from afield.settings.values import assigned, from_file, merged, with_paths
from afield.types import Outcome, Rollout, RolloutResult, Split, Task
from afield.utils.durable_files import write_whole
from afield.utils.statistics import Estimate, paired_difference

COLUMNS = ("task", "attempts", "passed", "reward", "left_out", "seconds", "question")
UNUSED = (
    *("agent", "model", "tasks", "steps", "epochs", "tasks_per_step", "rollouts", "shuffle", "mode"),
    *("max_staleness", "on_stale", "quorum", "extra", "straggler_s", "straggler_after"),
    *("val_tasks", "val_every", "val_rollouts", "val_temperature", "temperature"),
    *("keep_weights", "keep_rollouts_gb"),
    *LearningSettings.__struct_fields__,
)
"""Settings of `afield train` that have no flag here: those of training, and those with flags of their own."""
MAY_CHANGE = (*RESUMABLE_KEYS, "val_rollouts", "freeze_weights")
"""Settings that may change when an evaluation is continued."""
SHOWN_FAILURES = 5
"""Distinct failure messages that are printed."""


def add(commands: Any) -> None:
    command = commands.add_parser(
        "eval",
        help="evaluate an agent",
        usage="afield eval AGENT --tasks FILE [--model DIR | --gateway URL | --endpoint URL]",
        description="Attempt tasks with your agent, or a ready harness, without training, and print mean"
        " reward and pass@k with 95 % confidence intervals clustered by task. Attempts without a reward, such"
        " as infrastructure failures, are left out and counted.",
    )
    add_agent_arguments(command, "evaluate")
    command.add_argument("--tasks", metavar="FILE", help="tasks, in the formats of afield train")
    command.add_argument(
        "--model", metavar="DIR", help="model directory to serve; with --endpoint, the model's name there"
    )
    command.add_argument(
        "--endpoint",
        metavar="URL",
        help="OpenAI-compatible endpoint that agents call, without capture; its key is in"
        " AFIELD_ENDPOINT_KEY",
    )
    command.add_argument("-k", "--attempts", type=int, metavar="K", help="attempts of each task (default: 1)")
    command.add_argument(
        "--temperature", type=float, metavar="T", help="sampling temperature; 0 is greedy (default: 0)"
    )
    command.add_argument(
        "--pass-reward", type=float, default=1.0, metavar="R", help="smallest reward that passes (default: 1)"
    )
    command.add_argument("--min", type=float, metavar="R", help="exit with 1 if the mean reward is below R")
    command.add_argument(
        "--compare", metavar="RUN", help="compare with another run on common tasks, with a paired test"
    )
    command.add_argument("--run", dest="name", metavar="NAME", help="run name; resumes it if it exists")
    add_config_arguments(command)
    command.add_argument(
        "--json", action="store_true", help="print one line of JSON; progress goes to stderr"
    )
    add_flags(command, TrainConfig, without=UNUSED)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    choose_agent(args)
    environment = Environment.read()
    stamp = time.strftime("%Y%m%d-%H%M%S")
    run_path = RunDirectory(environment.runs / (named(args) or f"eval-{stamp}-{secrets.token_hex(2)}"))
    other = find_run(environment.runs, args.compare) if args.compare else None
    for option, value in (("--min", args.min), ("--pass-reward", args.pass_reward)):
        if value is not None and not math.isfinite(value):
            raise UsageError(f"{option} {value} must be a finite number")
    new = not run_path.is_run
    config, info, tasks = prepare(args, run_path, environment)
    baseline = rewards_to_compare(other, tasks) if other else None
    if new:
        with run_path.locked("create", wait=True):
            run_path.write_tasks(tasks)
            save_config(run_path, config)
    else:
        prices = {name: getattr(config, name) for name in PriceSettings.__struct_fields__}
        save_config(run_path, structs.replace(saved_config(run_path), **prices))
    screen = EvaluationProgress(config.val_rollouts * len(tasks), resumed=not new)
    screen.say(
        f"afield eval {run_path.id}  agent {short(info.agent)}  {len(tasks)} tasks x {config.val_rollouts}"
    )
    if run_path.summary.exists():
        screen.say(
            "this run is finished: its saved attempts count again, also if the agent has changed;"
            " to measure anew, give another --run"
        )
    try:
        asyncio.run(_evaluate(config, run_path, tasks, info, screen, environment))
    except (AfieldError, OSError, BaseExceptionGroup):
        if new and not run_path.has_begun:
            shutil.rmtree(run_path.path, ignore_errors=True)  # nothing was attempted
        raise
    with run_path.index as index:
        index.refresh()
        summary = summarize(run_path, tasks, config.val_rollouts, args.pass_reward)
        write_whole(run_path.summary, msgspec.json.format(msgspec.json.encode(summary)))
        with Tracking(config, run_path, "eval") as tracking:
            tracking.start()
            tracking.evaluated(summary)
        for failure in describe_failures(read_states(run_path.path)):
            screen.say(f"tracker {failure}")
        return report(args, run_path, summary, other, baseline)


def rewards_to_compare(other: RunDirectory, tasks: list[Task]) -> compare.Rewards:
    """Rewards of the other run by task; raises UsageError if nothing could be compared."""
    with other.index as index:
        index.refresh()
        found = compare.rewards_by_split(other)
    own = {str(Split.VAL): {task.id: [] for task in tasks}}
    try:
        _, split = compare.comparable_splits(own, found)
    except UsageError:
        number = len({task for rewards in found.values() for task in rewards})
        raise UsageError(
            f"--compare {other.id}: its {number} tasks with rewards have other ids than these"
            f" {len(tasks)}, such as {tasks[0].id!r}; compare with a run on the same tasks"
        ) from None
    return found[split]


async def _evaluate(
    config: TrainConfig,
    run: RunDirectory,
    tasks: list[Task],
    info: RunInfo,
    screen: EvaluationProgress,
    environment: Environment,
) -> None:
    from afield import factory

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    endpoint = factory.endpoint_gateway(info.endpoint, environment.endpoint_key) if info.endpoint else None
    try:
        await evaluate(config, run, tasks, info, screen, admin_key=environment.admin_key, endpoint=endpoint)
    except asyncio.CancelledError:
        screen.say(f"stopped; continue with: {me()} eval --run {run.id}")
        raise


# --- settings ----------------------------------------------------------------------------------------


def prepare(
    args: argparse.Namespace, run: RunDirectory, environment: Environment
) -> tuple[TrainConfig, RunInfo, list[Task]]:
    """Settings, description and tasks of a new evaluation, or of one that is continued."""
    if args.attempts is not None and args.attempts < 1:
        raise UsageError(f"--attempts {args.attempts} must be at least 1")
    values = settings_given(args)
    if run.is_run:
        if run.info.kind != "eval":
            raise UsageError(
                f"run {run.id} is not an evaluation but of `afield {run.info.kind}`; give another --run"
            )
        config, endpoint = continued(run, values), run.info.endpoint
        if args.endpoint and args.endpoint != endpoint:
            raise UsageError(
                f"run {run.id} uses the endpoint {endpoint or '(none)'} and cannot change it; leave"
                " --endpoint out, or give another --run"
            )
        tasks = run.read_tasks()
        if values.get("tasks") and Path(config.tasks).exists() and read_tasks(Path(config.tasks)) != tasks:
            raise UsageError(
                f"{config.tasks} has changed since evaluation {run.id} began; start a new run, or continue"
                f" with the tasks that it began with: {me()} eval --run {run.id}"
            )
    else:
        endpoint = args.endpoint or ""
        config, tasks = new_config(args, values)
    check(config, endpoint, environment)
    info = RunInfo(
        kind="eval",
        agent=config.agent or config.runtime,
        model=config.model,
        tasks=config.tasks,
        attempts=config.val_rollouts,
        sampling={
            "temperature": config.val_temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "max_tokens": config.max_tokens,
            "seed": config.seed,
        },
        endpoint=endpoint,
    )
    return config, info, tasks


def settings_given(args: argparse.Namespace) -> dict[str, Any]:
    """Settings on the command line; paths are relative to the directory."""
    options = {
        "tasks": args.tasks,
        "agent": args.agent,
        "val_rollouts": args.attempts,
        "val_temperature": args.temperature,
        "model": None if args.endpoint else args.model,
    }
    flags = {name: value for name, value in flag_values(args, TrainConfig).items() if name not in UNUSED}
    own = {name: value for name, value in options.items() if value is not None}
    values = with_paths(merged({**flags, **own}, assigned(args.set or ())), TrainConfig, Path())
    if args.endpoint and args.model:
        values["model"] = args.model
    return values


def new_config(args: argparse.Namespace, values: dict[str, Any]) -> tuple[TrainConfig, list[Task]]:
    """Settings and tasks of a new evaluation."""
    from afield import factory

    file = from_file(args.config, TrainConfig, "train") if args.config else {}
    values = merged(file, values)
    if not values.get("tasks"):
        raise UsageError("no tasks: give a file with --tasks FILE")
    if args.endpoint and values.get("gateway"):
        raise UsageError("--endpoint and --gateway both name what agents call; give one of them")
    if args.endpoint and not args.model:
        raise UsageError("--endpoint needs the name of the model there: --model NAME")
    if not values.get("model") and values.get("gateway"):
        values["model"] = "policy"
    fixed = {"freeze_weights": True, "epochs": None, "quorum": 1}
    config = build(merged(factory.agent_defaults(values), values) | fixed, "the command line")
    # The ids of a validation before training, so that both sample alike; shared gateways need others.
    shared = config.gateway or "://" in config.outcomes or config.runtime_name in REMOTE
    if not shared and not config.exp_id:
        config = structs.replace(config, exp_id="train")
    tasks = read_tasks(Path(config.tasks))
    if "attempt_timeout_s" not in values:
        config = structs.replace(config, attempt_timeout_s=factory.attempt_timeout(config, tasks))
    return config, tasks


def continued(run: RunDirectory, values: dict[str, Any]) -> TrainConfig:
    """Settings of an evaluation to continue: those it was started with; only a few may change."""
    saved = msgspec.to_builtins(saved_config(run))
    if fixed := [key for key in values if key not in MAY_CHANGE and values[key] != saved.get(key)]:
        raise UsageError(f"{', '.join(fixed)} cannot change in evaluation {run.id}; start a new run")
    return build(merged(saved, values), "the command line")


def check(config: TrainConfig, endpoint: str, environment: Environment) -> None:
    """Check everything before anything is started."""
    from afield import factory

    if endpoint:
        factory.check_collection(config)
        if not endpoint.startswith(("http://", "https://")):
            raise UsageError(f"--endpoint {endpoint!r} must be an address, such as https://api.openai.com/v1")
        if config.delivery == "gateway":
            raise UsageError(
                "--endpoint has no gateway to deliver outcomes to, which this runtime or the verifier needs:"
                " choose --runtime process, or a gateway in front of the model"
            )
    elif config.gateway:
        factory.check_collection(config)
        if not environment.admin_key:
            raise UsageError(f"the gateway at {config.gateway} needs an admin key: set AFIELD_ADMIN_KEY")
    else:
        factory.check_choices(config)
        factory.check_model(config, trains=False)


# --- output ------------------------------------------------------------------------------------------


class EvaluationProgress:
    """Prints the progress of an evaluation to stderr; an observer of rollouts."""

    def __init__(self, attempts: int, *, resumed: bool) -> None:
        self._attempts = attempts
        self._resumed = resumed
        self._finished = 0
        self._failures: Counter[str] = Counter()
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def attempt_ended(self, rollout: Rollout, outcome: Outcome, will_retry: bool) -> None:
        failure = outcome.failure
        if failure is None:
            return
        message = f"{failure.kind}/{failure.reason}: {printable(failure.message)[:200]}"
        self._failures[message] += 1
        if self._failures[message] == 1 and len(self._failures) <= SHOWN_FAILURES:
            self.say(f"{outcome.session_id}: {message}{' (tried again)' if will_retry else ''}")

    def rollout_finished(self, result: RolloutResult) -> None:
        self._finished += 1
        if self._finished % max(1, self._attempts // 10) == 0:
            count = f"{self._finished} more" if self._resumed else f"{self._finished} of {self._attempts}"
            self.say(f"{count} attempts ended, {time.monotonic() - self._began:.0f} s")


def report(
    args: argparse.Namespace,
    run: RunDirectory,
    summary: EvalSummary,
    other: RunDirectory | None,
    baseline: compare.Rewards | None,
) -> int:
    """Print the result; returns the exit code."""
    difference = None
    if baseline is not None:
        rewards = compare.rewards_of(run, "val") if summary.reward else {}
        if any(task in baseline for task in rewards):
            difference = paired_difference(rewards, baseline)
    if args.json:
        result = msgspec.to_builtins(summary)
        result["reward"] = summary.reward._asdict() if summary.reward else None
        result["pass_at"] = {k: estimate._asdict() for k, estimate in summary.pass_at.items()}
        if difference is not None and other is not None:
            result["compare"] = {"run": other.id, **compare.as_json(difference)}
        print(json.dumps(result))
    else:
        print_table(map(msgspec.to_builtins, summary.by_task), COLUMNS)
        print_note(describe(summary))
        if difference is not None and other is not None:
            print_note(f"compared with {other.id}: {compare.describe(difference)}")
        elif other is not None:
            print_note(f"not compared with {other.id}: no attempt at a common task has a reward")
        print_note(f"details: {me()} show {run.id} --rollouts")
    if summary.reward is None:
        raise NoRewards(f"no attempt has a reward; left out: {summary.left_out}; see {me()} show {run.id}")
    if args.min is not None and summary.reward.mean < args.min:
        print(f"afield: mean reward {summary.reward.mean:.4f} is below --min {args.min:g}", file=sys.stderr)
        return 1
    return 0


def describe(summary: EvalSummary) -> str:
    """Result of an evaluation in a few lines."""
    lines = []
    if summary.reward is not None:
        lines.append(f"mean reward {interval(summary.reward)}")
    lines += [f"pass@{k:7s} {interval(estimate)}" for k, estimate in summary.pass_at.items()]
    missing = summary.requested - summary.attempts
    reasons = ", ".join(f"{reason} {count}" for reason, count in summary.left_out.items())
    lines.append(
        f"{summary.attempts} of {summary.requested} attempts of {summary.tasks} tasks count;"
        f" left out {missing}{f' ({reasons})' if reasons else ''}"
    )
    if summary.refused:
        refused = ", ".join(f"{code} {count}" for code, count in summary.refused.items())
        lines.append(f"refused model calls: {refused}")
    if summary.cost:
        lines.append(f"cost {describe_cost(summary.cost, 'eval')}")
    return "\n".join(lines)


def interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.mean:.3f} (an interval needs at least two tasks)"
    return (
        f"{estimate.mean:.3f}  95 % interval {estimate.low:.3f} to {estimate.high:.3f}"
        f"  ({estimate.tasks} tasks, {estimate.attempts} attempts)"
    )
