"""`afield demo`: train a small agent offline on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from afield.cli.flags import add_flags
from afield.cli.train import add_run_arguments, start
from afield.demo import cloud
from afield.errors import UsageError
from afield.orchestrator.state import RunDirectory
from afield.settings.environment import agent_environment, set_environment
from afield.settings.train import TrainConfig
from afield.types import Task

AGENTS = ("openai", "strands", "langgraph")
LIBRARIES = ("aiohttp", "openai", "tokenizers", "torch", "transformers")
DEFAULTS = {
    "exp_id": "demo",
    "shuffle": False,  # tasks are balanced in their order
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
"""Default settings of the demo, chosen by measurement over many seeds. Sampling depends on rollout ids, so a
seed reproduces a run only with the same exp_id."""


def add(commands: Any) -> None:
    command = commands.add_parser(
        "demo",
        help="train a small agent in about a minute",
        usage="afield demo [options]",
        description="Train a small agent on this machine, offline.",
    )
    command.add_argument(
        "--agent", metavar="NAME", help=f"agent framework: {', '.join(AGENTS)} (default: openai)"
    )
    add_run_arguments(command)
    add_flags(command, TrainConfig, without=("agent", "model", "tasks"), defaults=DEFAULTS)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from afield import demo as package
    from afield.demo import shop

    if args.agent not in (None, *AGENTS):
        raise UsageError(f"unknown agent {args.agent!r}; choose one of: {', '.join(AGENTS)}")
    if missing := [library for library in LIBRARIES if find_spec(library) is None]:
        raise UsageError(f"not installed: {', '.join(missing)}; pip install 'afield[demo]'")
    here = Path(package.__file__).parent
    if args.agent or not args.resume:
        args.agent = f"{here / 'agents' / f'{args.agent or AGENTS[0]}_agent.py'}:agent"

    def make_tasks(config: TrainConfig) -> list[Task]:
        rows = shop.tasks(config.seed, config.steps * config.tasks_per_step)
        return [Task(row["id"], row) for row in rows]

    values = {**DEFAULTS, "model": str(here / "policy")}
    if args.runtime == "agentcore":
        values |= cloud.values()
    if args.runtime == "ray":
        values["ray"] = {"cpus": 0.05}  # demo agents mostly wait for the model
    return start(args, "demo", values, make_tasks, local_services)


@contextmanager
def local_services(run: RunDirectory, config: TrainConfig) -> Generator[None]:
    """Local AWS services, for a demo on AgentCore without an account."""
    if not cloud.on_this_machine(config):
        yield
        return
    set_environment(cloud.KEYS)
    with cloud.running(config, agent_environment(), run.logs):
        yield
