"""`afield train`: train an agent on a file of tasks."""

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
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from afield.cli.flags import add_config_arguments, add_flags, flag_layer
from afield.cli.report import Summary, draw, me, summarise
from afield.datasets import read_tasks
from afield.errors import AfieldError, NoRewards, UsageError
from afield.jobs.tracking import Tracking
from afield.jobs.training import RunRole, training
from afield.orchestrator.state import RunDirectory, RunInfo, RunKind, find_run, write_whole
from afield.orchestrator.training_loop import StepMetrics
from afield.settings.environment import Environment
from afield.settings.train import (
    REMOTE,
    RESUMABLE_KEYS,
    RuntimeTables,
    TrainConfig,
    build,
    train_config,
    train_layers,
)
from afield.settings.values import assigned, merged
from afield.types import Task, check_id

if TYPE_CHECKING:
    from afield.cli.live_chart import Screen

HARDWARE = ("device", "devices", "max_tokens_per_pass", "checkpointing")
"""Keys of `learn` that may change when a run is resumed, since they do not affect results."""


def add(commands: Any) -> None:
    command = commands.add_parser(
        "train",
        help="train your agent",
        usage="afield train AGENT --tasks FILE --model DIR [options]",
        description="Train your own agent, or a ready harness, on your own tasks. Give options of runtimes"
        " and of the trainer in the --config file or with --set.",
    )
    add_agent_arguments(command, "train")
    add_run_arguments(command)
    add_flags(command, TrainConfig, without=("agent",))
    command.set_defaults(run=run)


def add_agent_arguments(command: argparse.ArgumentParser, verb: str) -> None:
    """Add the agent as the first argument and as --agent."""
    command.add_argument(
        "agent",
        nargs="?",
        metavar="AGENT",
        help=f"agent to {verb}: FILE.py:NAME, package.module:NAME, or a harness such as claude-code",
    )
    command.add_argument(
        "--agent", dest="agent_flag", metavar="AGENT", help=f"agent to {verb}, instead of the first argument"
    )


def choose_agent(args: argparse.Namespace) -> None:
    """Take the agent from either argument."""
    if args.agent and args.agent_flag:
        raise UsageError(f"two agents: {args.agent!r} and --agent {args.agent_flag!r}; give one of them")
    args.agent = args.agent or args.agent_flag


def add_run_arguments(command: argparse.ArgumentParser) -> None:
    """Arguments of `train` and `demo` that are not settings."""
    add_config_arguments(command, "such as learn.loss=cispo")
    command.add_argument("--run", dest="name", metavar="NAME", help="run name; resumes it if it exists")
    command.add_argument(
        "--resume", nargs="?", const="latest", metavar="RUN", help="resume a run, by default the newest"
    )
    command.add_argument(
        "--role",
        choices=[role.value for role in RunRole],
        default=RunRole.ALL.value,
        help="part of the run that this process executes; collect and learn share one --run and one"
        " --gateway (default: all)",
    )
    command.add_argument(
        "--json", action="store_true", help="print the summary as one line of JSON; progress goes to stderr"
    )


def run(args: argparse.Namespace) -> int:
    choose_agent(args)
    return start(args, "train", {"exp_id": "train"}, tasks_of)


def tasks_of(config: TrainConfig) -> list[Task]:
    if not config.tasks:
        raise UsageError("no tasks: give a JSONL file with --tasks FILE, one JSON object per line")
    return read_tasks(Path(config.tasks))


def start(
    args: argparse.Namespace,
    kind: RunKind,
    defaults: dict[str, Any],
    make_tasks: Callable[[TrainConfig], list[Task]],
    around: Callable[[RunDirectory, TrainConfig], AbstractContextManager[None]] | None = None,
) -> int:
    """Prepare a new or resumed run, then train until it is done, inside the context `around`."""
    environment = Environment.read()
    role = RunRole(args.role)
    run, config, tasks, new = prepare(args, kind, defaults, make_tasks, environment)
    run.durable = config.durable
    with run.locked(*(("collect", "learn") if role is RunRole.ALL else (role,))):
        try:
            with around(run, config) if around else nullcontext():
                work = train(config, run, tasks, role, environment.admin_key, kind=kind, as_json=args.json)
                return asyncio.run(work)
        except (AfieldError, OSError, BaseExceptionGroup):
            run.check_present()  # if the directory was removed, report that instead of its consequences
            if new and not run.has_begun and role is RunRole.ALL:
                shutil.rmtree(run.path, ignore_errors=True)  # nothing was attempted
            raise


def prepare(
    args: argparse.Namespace,
    kind: RunKind,
    defaults: dict[str, Any],
    make_tasks: Callable[[TrainConfig], list[Task]],
    environment: Environment,
) -> tuple[RunDirectory, TrainConfig, list[Task], bool]:
    """A run with its settings and tasks, and whether it is new; wrong settings leave no directory."""
    if args.name and args.resume:
        raise UsageError("--run resumes a run that exists; give --run or --resume, not both")
    runs = environment.runs
    stamp = time.strftime("%Y%m%d-%H%M%S")
    run = RunDirectory(runs / (named(args) or f"{kind}-{stamp}-{secrets.token_hex(2)}"))
    if args.resume:
        run = find_run(runs, args.resume, kind)
    if run.config.exists():
        return run, *resume(run, args, kind, environment), False
    config, tasks = checked(args, defaults, make_tasks)
    check_gateway(args, config, environment)
    with run.locked("create", wait=True):
        if run.config.exists():  # the process of the other role created it
            return run, *resume(run, args, kind, environment), False
        run.durable = config.durable
        run.write_tasks(tasks)
        save_config(run, config)
        run.write_info(info_of(config, kind))
    return run, config, tasks, True


def info_of(config: TrainConfig, kind: RunKind) -> RunInfo:
    """Description of a training run."""
    return RunInfo(
        kind=kind,
        agent=config.agent or config.runtime,
        model=config.model,
        tasks=config.tasks,
        steps=config.steps,
        attempts=config.rollouts,
        sampling={
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "max_tokens": config.max_tokens,
        },
    )


def named(args: argparse.Namespace) -> str:
    try:
        if args.name is not None:
            check_id(args.name, "run name")
    except ValueError as error:
        raise UsageError(str(error)) from error
    return args.name or ""


def check_gateway(args: argparse.Namespace, config: TrainConfig, environment: Environment) -> None:
    if args.role != RunRole.ALL and not config.gateway:
        raise UsageError(f"--role {args.role} needs a gateway that both processes can reach: --gateway URL")
    if config.gateway and not environment.admin_key:
        raise UsageError(f"the gateway at {config.gateway} needs an admin key: set AFIELD_ADMIN_KEY")


def checked(
    args: argparse.Namespace, defaults: dict[str, Any], make_tasks: Callable[[TrainConfig], list[Task]]
) -> tuple[TrainConfig, list[Task]]:
    """The settings and tasks of a new run."""
    from afield import factory

    others = {key: value for key, value in defaults.items() if key != "exp_id"}
    flags = flag_layer(args, TrainConfig, args.set or ())
    values = train_layers(args.config, flags).values
    others |= factory.agent_defaults(values)
    config = train_config(args.config, flags, **others)
    # Rollout ids seed sampling. Runs that share a gateway or store need ids of their own.
    shared = config.gateway or "://" in config.outcomes or config.runtime_name in REMOTE
    if not shared and not config.exp_id:
        config = structs.replace(config, exp_id=defaults["exp_id"])
    tasks = make_tasks(config)
    if "attempt_timeout_s" not in values:
        config = structs.replace(config, attempt_timeout_s=factory.attempt_timeout(config, tasks))
    if config.epochs is not None:
        steps = -(-config.epochs * len(tasks) // config.tasks_per_step)
        config = structs.replace(config, steps=steps)
    check(args, config)
    return config, tasks


def check(args: argparse.Namespace, config: TrainConfig) -> None:
    """Check a new or resumed run before anything is started."""
    from afield import factory

    check_tables(config, assigned(args.set or ()))
    factory.check_choices(config)
    factory.check_model(config, trains=args.role != RunRole.COLLECT)
    if config.val_tasks:
        factory.check_harbor_tasks(config, read_tasks(Path(config.val_tasks)))


def check_tables(config: TrainConfig, assigned: dict[str, Any]) -> None:
    """Refuse --set for a runtime that is not used; a file may have tables for several."""
    used = {config.runtime_name, config.on, *([config.verifier_runtime] if config.verifier else [])}
    for table in RuntimeTables.__struct_fields__:
        if table in assigned and table not in used:
            raise UsageError(
                f"--set {table}.{next(iter(assigned[table]), '')} has no effect with --runtime"
                f" {config.runtime}; leave it out, or choose --runtime {table}"
            )


def resume(
    run: RunDirectory, args: argparse.Namespace, kind: RunKind, environment: Environment
) -> tuple[TrainConfig, list[Task]]:
    """The settings of a run to resume: those it was started with; only a few may change."""
    if args.config and args.resume:
        raise UsageError("--resume keeps the settings of the run: leave --config out")
    if run.info.kind != kind:
        raise UsageError(
            f"run {run.id} is of `afield {run.info.kind}`, not of `afield {kind}`; name another run"
        )
    config = saved_config(run)
    layers = train_layers(args.config, flag_layer(args, TrainConfig, args.set or ()))
    changes = layers.values
    if unknown := changes.keys() - set(TrainConfig.__struct_fields__):
        raise UsageError(f"unknown keys in {args.config}: {', '.join(sorted(unknown))}")
    saved = msgspec.to_builtins(config)
    after = without_hardware(merged(saved, changes))
    if fixed := [k for k in changes if k not in RESUMABLE_KEYS and after[k] != without_hardware(saved)[k]]:
        raise UsageError(f"{', '.join(fixed)} cannot change in a resumed run; start a new run")
    if config.epochs and changes.get("steps", config.steps) != config.steps:
        raise UsageError(f"steps ({config.steps}) cannot change in a resumed run of {config.epochs} epochs")
    config = build(merged(saved, changes), layers.origin)
    check(args, config)
    check_gateway(args, config, environment)
    return config, run.read_tasks()


def without_hardware(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without the keys that may change when a run is resumed."""
    learn = values["learn"]
    rest = {k: v for k, v in learn.items() if k not in HARDWARE} if isinstance(learn, Mapping) else learn
    return {**values, "learn": rest}


def save_config(run: RunDirectory, config: TrainConfig) -> None:
    """Write run.json, which only its owner can read: options of runtimes may hold keys."""
    text = msgspec.json.format(msgspec.json.encode(config))
    write_whole(run.config, text, private=True, durable=run.durable)


def saved_config(run: RunDirectory) -> TrainConfig:
    """Read run.json."""
    try:
        return msgspec.json.decode(run.config.read_bytes(), type=TrainConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"cannot read {run.config}: {error}") from error


async def train(
    config: TrainConfig,
    run: RunDirectory,
    tasks: list[Task],
    role: RunRole,
    admin_key: str | None,
    *,
    kind: RunKind,
    as_json: bool,
) -> int:
    from afield import factory

    with factory.needs("train"):
        from afield.cli.live_chart import Screen

    began = time.monotonic()
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    screen = Screen(config, run, to_stderr=as_json)
    no_rewards: NoRewards | None = None
    try:
        with screen, Tracking(config, run, kind) as tracking:
            val_tasks = read_tasks(Path(config.val_tasks)) if config.val_tasks else []
            async with training(
                *(config, run, tasks, screen, lambda line: step_done(line, screen, tracking)),
                role=role,
                admin_key=admin_key,
                val_tasks=val_tasks,
                on_validation=screen.validated,
            ) as started:
                save_config(run, config)  # save changed settings of a resumed run once it has started
                run.write_info(info_of(config, kind))
                if role is not RunRole.COLLECT:
                    tracking.start()
                trains = role is not RunRole.COLLECT and not config.freeze_weights
                screen.ready(factory.weight_transfer(config).description if trains else "")
                await started.run()
                run.check_present()
    except NoRewards as error:
        no_rewards = error
    except asyncio.CancelledError:
        state = run.last_state()
        position = f"after step {state.step}" if state else "before the first step was done"
        option = "" if role is RunRole.ALL else f" --role {role}"
        print(f"stopped {position}; resume with: {me()} {kind} --resume {run.id}{option}", file=sys.stderr)
        raise
    if role is RunRole.COLLECT:
        screen.collected()
        return 0
    summary = summarise(run, config, wall_s=time.monotonic() - began)
    write_whole(run.summary, msgspec.json.format(msgspec.json.encode(summary)))
    await asyncio.to_thread(draw, run)
    screen.finished(summary)
    if as_json:
        print(msgspec.json.encode(summary).decode(), flush=True)
    if no_rewards or not summary.trained:
        raise no_rewards or nothing_trained(summary)
    return 0


def step_done(line: StepMetrics, screen: Screen, tracking: Tracking) -> None:
    screen.step_done(line)
    tracking.step_done(line)


def nothing_trained(summary: Summary) -> NoRewards:
    """The error of a run in which no rollout was trained."""
    message = f"nothing was trained: of {summary.rollouts} rollouts {summary.failed} have no reward"
    if summary.dropped_groups:
        message += f", and {summary.dropped_groups} groups were dropped"
    return NoRewards(f"{message}; see {me()} show {Path(summary.run).name}")
