"""`afield demo`: watch a real agent learn, on this machine, offline."""

from __future__ import annotations

import argparse
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from afield.cli.options import add_run_arguments
from afield.cli.train import start
from afield.demo import cloud
from afield.errors import UsageError
from afield.orchestrator.state import RunDirectory
from afield.settings import TrainConfig, agent_environment, lend
from afield.types import Task

AGENTS = ("openai", "strands", "langgraph")
# Found by measurement over many seeds. Sampling depends on the names of rollouts, so that these have
# to be the same for a seed to give the same run.
RECIPE = {
    "exp_id": "demo",
    "shuffle": False,  # the shop's tasks come balanced as they are
    "steps": 20,
    "tasks_per_step": 8,
    "rollouts": 16,
    "lr": 1.5e-3,
    "minibatches": 2,
    "grad_clip": 0.1,
    "adam_eps": 1e-4,
    "scale_advantages": False,
    "max_tokens": 64,
    "max_calls": 8,
    "concurrency": 64,
    "attempt_timeout_s": 60.0,
}


def add(commands: Any) -> None:
    command = commands.add_parser(
        "demo",
        help="watch an agent learn in about a minute",
        usage="afield demo [options]",
        description="Watch a real agent learn, on this machine, offline.",
    )
    command.add_argument("--agent", help=f"which agent: {', '.join(AGENTS)} (default: openai)")
    add_run_arguments(command, RECIPE)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from afield import demo as package
    from afield.demo import shop

    if args.agent not in (None, *AGENTS):
        raise UsageError(f"unknown agent {args.agent!r}; choose one of: {', '.join(AGENTS)}")
    here = Path(package.__file__).parent
    if args.agent or not args.resume:
        args.agent = f"{here / 'agents' / f'{args.agent or AGENTS[0]}_agent.py'}:agent"

    def make_tasks(config: TrainConfig) -> list[Task]:
        rows = shop.tasks(config.seed, config.steps * config.tasks_per_step)
        return [Task(row["id"], row) for row in rows]

    told = {**RECIPE, "model": str(here / "policy")}
    if args.runtime == "agentcore":
        told |= cloud.values()
    if args.runtime == "ray":
        told["ray"] = {"cpus": 0.05}  # the shop's agents mostly wait
    return start(args, "demo", told, make_tasks, around)


@contextmanager
def around(run: RunDirectory, config: TrainConfig) -> Generator[None]:
    """A cloud on this machine, for a demo on AgentCore that named none."""
    if not cloud.on_this_machine(config):
        yield
        return
    lend(cloud.KEYS)
    with cloud.running(config, agent_environment(), run.logs):
        yield
