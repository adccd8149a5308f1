"""`afield doctor`: check the parts of a training run before it starts."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from afield.cli.flags import add_config_arguments, add_flags, flag_layer
from afield.cli.tables import printable
from afield.diagnosis.doctor import CheckResult, Doctor
from afield.errors import UsageError
from afield.settings.environment import Environment
from afield.settings.train import TrainConfig, train_config, train_layers

MARKS = {"ok": "ok", "warning": "WARNING", "failed": "FAILED", "skipped": "skipped"}


def add(commands: Any) -> None:
    command = commands.add_parser(
        "doctor",
        help="check a run before it starts",
        usage="afield doctor [RUN.toml | FILE.py:NAME] [options of afield train]",
        description="Check what a training run needs: settings, tasks, model, chat template, directories,"
        " store, queue, gateway, engine and runtime. The last check launches a probe in the run's own"
        " runtime that calls the model through the gateway. Exit code: 0 if no check failed, 1 if one did,"
        " 2 for wrong settings.",
    )
    command.add_argument(
        "what",
        nargs="?",
        metavar="RUN.toml",
        help="configuration file with a [train] table, or the agent as FILE.py:NAME",
    )
    command.add_argument(
        "--agent", dest="agent", metavar="AGENT", help="agent of the run: FILE.py:NAME or package.module:NAME"
    )
    add_config_arguments(command)
    command.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS", help="timeout of each check (default: 120)"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object per check")
    add_flags(command, TrainConfig, without=("agent",))
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from afield import factory

    if args.what and args.what.endswith(".toml"):
        if args.config:
            raise UsageError(
                f"two configuration files: {args.what} and --config {args.config}; give one of them"
            )
        args.config = Path(args.what)
    elif args.what:
        if args.agent:
            raise UsageError(f"two agents: {args.what!r} and --agent {args.agent!r}; give one of them")
        args.agent = args.what
    flags = flag_layer(args, TrainConfig, args.set or ())
    values = train_layers(args.config, flags).values
    config = train_config(args.config, flags, **factory.agent_defaults(values))
    environment = Environment.read()
    doctor = Doctor(config, environment.runs, environment.admin_key, timeout_s=args.timeout)
    with _without_warnings():
        results = asyncio.run(_print(doctor, as_json=args.json))
    bad = [result.check for result in results if result.status == "failed"]
    warnings = sum(result.status == "warning" for result in results)
    if not args.json:
        verdict = f"failed: {', '.join(dict.fromkeys(bad))}" if bad else "ready to run"
        print(f"{verdict}; {warnings} warnings")
    return 1 if bad else 0


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Log errors only: warnings are results of the checks."""
    logger = logging.getLogger("afield")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


async def _print(doctor: Doctor, *, as_json: bool) -> list[CheckResult]:
    results: list[CheckResult] = []
    async for result in doctor.results():
        results.append(result)
        if as_json:
            print(json.dumps(msgspec.to_builtins(result)), flush=True)
            continue
        print(f"{MARKS[result.status]:8} {result.check:18} {printable(result.evidence)}", flush=True)
        if result.remedy:
            print(f"{'':8} {'':18} -> {printable(result.remedy)}", flush=True)
    sys.stdout.flush()
    return results
