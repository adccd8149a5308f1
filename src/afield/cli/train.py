"""`afield train`: train your own agent on your own tasks."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from afield.cli.options import add_run_arguments
from afield.cli.report import Summary, draw, me, summarise
from afield.errors import AfieldError, NoRewards, UsageError
from afield.orchestrator.state import RunDirectory, find_run, write_whole
from afield.settings import (
    ELSEWHERE,
    PATHS,
    Environment,
    TrainConfig,
    assigned,
    build,
    from_file,
    located,
    merged,
    read_tasks,
    train_config,
)
from afield.training_run import RunRole, training
from afield.types import Task, check_id

OVERRIDABLE = (
    *("keep_rollouts_gb", "keep_sessions_h", "durable"),
    *("steps", "keep_weights", "workers", "concurrency", "gateway", "runtime", "launch_rate", "launching"),
    *("cold_start_s", "unavailable_timeout_s", "sandbox", "container", "agentcore", "kubernetes", "ray"),
)
WHERE = ("device", "devices", "max_tokens_per_pass", "checkpointing")  # of `learn`: may change as well


def add(commands: Any) -> None:
    command = commands.add_parser(
        "train",
        help="train your agent",
        usage="afield train FILE.py:NAME --tasks FILE --model DIR [options]",
        description="Train your own agent on your own tasks.",
    )
    command.add_argument(
        "agent", nargs="?", metavar="FILE.py:NAME", help="your agent; or package.module:name"
    )
    command.add_argument("--tasks", metavar="FILE", help="JSONL, one task per line")
    command.add_argument("--model", metavar="DIR", help="a Hugging Face model directory to start from")
    add_run_arguments(command, {})
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    return start(args, "train", {"exp_id": "train"}, given_tasks)


def given_tasks(config: TrainConfig) -> list[Task]:
    if not config.tasks:
        raise UsageError("no tasks: give a JSONL file with --tasks FILE, one JSON object per line")
    return read_tasks(Path(config.tasks))


def start(
    args: argparse.Namespace,
    kind: str,
    defaults: dict[str, Any],
    make_tasks: Callable[[TrainConfig], list[Task]],
    around: Callable[[RunDirectory, TrainConfig], AbstractContextManager[None]] | None = None,
) -> int:
    """A new run, or an old one again; then train until it is done, with `around` it what it needs."""
    environment = Environment.read()
    part = RunRole(args.part)
    run, config, tasks, new = prepare(args, kind, defaults, make_tasks, environment)
    run.durable = config.durable
    with run.locked(*(("collect", "learn") if part is RunRole.ALL else (part,))):
        try:
            with around(run, config) if around else nullcontext():
                work = train(config, run, tasks, part, environment.admin_key, kind=kind, as_json=args.json)
                return asyncio.run(work)
        except (AfieldError, OSError, BaseExceptionGroup):
            run.check_present()  # if it is gone, that is why, whatever failed first
            if new and not run.has_begun and part is RunRole.ALL:
                shutil.rmtree(run.path, ignore_errors=True)  # nothing was attempted; the message says why
            raise


def prepare(
    args: argparse.Namespace,
    kind: str,
    defaults: dict[str, Any],
    make_tasks: Callable[[TrainConfig], list[Task]],
    environment: Environment,
) -> tuple[RunDirectory, TrainConfig, list[Task], bool]:
    """A run, and whether it is new. What is wrong with the values is said before there is a directory."""
    if args.name and args.resume:
        raise UsageError("--run goes on with a run that is there; give --run or --resume, not both")
    runs = environment.runs
    stamp = time.strftime("%Y%m%d-%H%M%S")
    run = RunDirectory(runs / (named(args) or f"{kind}-{stamp}-{secrets.token_hex(2)}"))
    if args.resume:
        run = find_run(runs, args.resume, kind)
    if run.config.exists():
        return run, *resume(run, args, environment), False
    config, tasks = checked(args, defaults, make_tasks)
    check_gateway(args, config, environment)
    with run.locked("create", wait=True):
        if run.config.exists():  # the other half was quicker
            return run, *resume(run, args, environment), False
        run.durable = config.durable
        run.write_tasks(tasks)
        save_config(run, config)
    return run, config, tasks, True


def named(args: argparse.Namespace) -> str:
    try:
        if args.name is not None:
            check_id(args.name, "run name")
    except ValueError as error:
        raise UsageError(str(error)) from error
    return args.name or ""


def check_gateway(args: argparse.Namespace, config: TrainConfig, environment: Environment) -> None:
    if args.part != RunRole.ALL and not config.gateway:
        raise UsageError(f"--part {args.part} needs a gateway that both halves can reach: --gateway URL")
    if config.gateway and not environment.admin_key:
        raise UsageError(f"the gateway at {config.gateway} takes an admin key: set AFIELD_ADMIN_KEY")


def given(args: argparse.Namespace) -> dict[str, Any]:
    values = {k: v for k, v in vars(args).items() if k in TrainConfig.__struct_fields__ and v is not None}
    values = merged(values, assigned(args.set or ()))
    return values | {key: located(key, values[key], Path()) for key in PATHS if key in values}


def checked(
    args: argparse.Namespace, defaults: dict[str, Any], make_tasks: Callable[[TrainConfig], list[Task]]
) -> tuple[TrainConfig, list[Task]]:
    """The values and tasks of a new run."""
    named = {key: value for key, value in defaults.items() if key != "exp_id"}
    config = train_config(args.config, given(args), **named)
    # Rollouts of the same name are sampled alike. Where other runs may be met, names are the run's own.
    alone = not config.gateway and "://" not in config.outcomes and config.place not in ELSEWHERE
    if alone and not config.exp_id:
        config = structs.replace(config, exp_id=defaults["exp_id"])
    tasks = make_tasks(config)
    if config.epochs is not None:
        steps = -(-config.epochs * len(tasks) // config.tasks_per_step)
        config = structs.replace(config, steps=steps)
    check(args, config)
    return config, tasks


def check(args: argparse.Namespace, config: TrainConfig) -> None:
    """Of a new run and of one that goes on: what is wrong is said before anything is started."""
    from afield import factory
    from afield.cli import model_checks

    check_tables(config, assigned(args.set or ()))
    factory.check_choices(config)
    model_checks.check(config, args.part)
    if config.val_tasks:
        read_tasks(Path(config.val_tasks))


def check_tables(config: TrainConfig, said: dict[str, Any]) -> None:
    """A file may have tables for several places; what is said of one right here is meant."""
    from afield import factory

    used = {config.place, config.verifier_runtime} if config.verifier else {config.place}
    for table in factory.TOLD:
        if table in said and table not in used:
            raise UsageError(
                f"--set {table}.{next(iter(said[table]), '')} does nothing with --runtime {config.runtime};"
                f" leave it out, or choose --runtime {table}"
            )


def resume(
    run: RunDirectory, args: argparse.Namespace, environment: Environment
) -> tuple[TrainConfig, list[Task]]:
    """A run goes on with the values it was started with; a few may change. Said again, they are the same."""
    if args.config and args.resume:
        raise UsageError("a resumed run keeps its configuration; --config is for a new one")
    config = saved_config(run)
    changes = merged(from_file(args.config) if args.config else {}, given(args))
    if unknown := changes.keys() - set(TrainConfig.__struct_fields__):
        raise UsageError(f"unknown keys in {args.config}: {', '.join(sorted(unknown))}")
    saved = msgspec.to_builtins(config)
    after = kept(merged(saved, changes))
    if fixed := [k for k in changes if k not in OVERRIDABLE and after[k] != kept(saved)[k]]:
        raise UsageError(f"a resumed run keeps its {', '.join(fixed)}; start a new run to change that")
    if config.epochs and changes.get("steps", config.steps) != config.steps:
        raise UsageError(f"a run of {config.epochs} epochs keeps its {config.steps} steps")
    config = build(merged(saved, changes), "the command line")
    check(args, config)
    check_gateway(args, config, environment)
    return config, run.read_tasks()


def kept(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without what says only where and in how many parts is learned, not what."""
    learn = values["learn"]
    rest = {k: v for k, v in learn.items() if k not in WHERE} if isinstance(learn, Mapping) else learn
    return {**values, "learn": rest}


def save_config(run: RunDirectory, config: TrainConfig) -> None:
    """Read by its owner alone: what a place is told may hold keys of the user's."""
    text = msgspec.json.format(msgspec.json.encode(config))
    write_whole(run.config, text, private=True, durable=run.durable)


def saved_config(run: RunDirectory) -> TrainConfig:
    try:
        return msgspec.json.decode(run.config.read_bytes(), type=TrainConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"cannot read {run.config}: {error}") from error


async def train(
    config: TrainConfig,
    run: RunDirectory,
    tasks: list[Task],
    part: RunRole,
    admin_key: str | None,
    *,
    kind: str,
    as_json: bool,
) -> int:
    from afield import factory

    began = time.monotonic()
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    screen = factory.load("cli.live_chart:Screen")(config, run, to_stderr=as_json)
    given_up: NoRewards | None = None
    try:
        with screen:
            val_tasks = read_tasks(Path(config.val_tasks)) if config.val_tasks else []
            async with training(
                *(config, run, tasks, screen, screen.step_done),
                part=part,
                admin_key=admin_key,
                val_tasks=val_tasks,
            ) as started:
                save_config(run, config)  # what a resumed run was told to change works: it counts from now on
                screen.ready()
                await started.run()
                run.check_present()
    except NoRewards as error:
        given_up = error
    except asyncio.CancelledError:
        done = run.last_state()
        at = f"after step {done.step}" if done else "before the first step was done"
        half = "" if part is RunRole.ALL else f" --part {part}"
        print(f"stopped {at}; go on with: {me()} {kind} --resume {run.id}{half}", file=sys.stderr)
        raise
    if part is RunRole.COLLECT:
        screen.collected()
        return 0
    summary = summarise(run, config, wall_s=time.monotonic() - began)
    write_whole(run.summary, msgspec.json.format(msgspec.json.encode(summary)))
    await asyncio.to_thread(draw, run)
    screen.farewell(summary)
    if as_json:
        print(msgspec.json.encode(summary).decode(), flush=True)
    if given_up or not summary.trained:
        raise given_up or fruitless(summary)
    return 0


def fruitless(summary: Summary) -> NoRewards:
    """However short a run is. Rewards that do not differ were trained, if to no effect: that is told, too."""
    told = f"nothing was trained: of {summary.rollouts} rollouts {summary.failed} have no reward"
    if summary.dropped_groups:
        told += f", and {summary.dropped_groups} groups were dropped"
    return NoRewards(f"{told}; {me()} show {Path(summary.run).name} says more")
