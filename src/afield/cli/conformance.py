"""`afield conformance`: real clients against the gateway, with the engine's ledger as the judge."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from afield.config import Environment, agent_environment
from afield.errors import UsageError


def add(commands: Any) -> None:
    command = commands.add_parser(
        "conformance",
        help="run real clients against the gateway and compare every token",
        description="Run real clients, at pinned versions and offline, against a gateway in front of the"
        " scripted engine, and hold what was recorded against the engine's ledger. Clients are"
        " installed on demand, into a cache outside the project.",
    )
    command.add_argument("clients", nargs="*", metavar="CLIENT", help="which ones; default: all")
    command.add_argument("--json", action="store_true", help="end with one line of JSON")
    command.add_argument("--keep", type=Path, metavar="DIR", help="keep records, ledgers and logs here")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from afield.conformance.clients import chosen

    clients = chosen(args.clients)
    if args.keep and args.keep.exists() and any(args.keep.iterdir()):
        raise UsageError(f"{args.keep} is not empty; give --keep a new folder")
    with tempfile.TemporaryDirectory(prefix="afield-", ignore_cleanup_errors=True) as made:
        folder = (args.keep or Path(made)).absolute()
        verdicts = {client.name: _check(client, folder) for client in clients}
    if args.json:
        told = {name: _told(verdict) for name, verdict in verdicts.items()}
        print(json.dumps({"clients": told}))
    return 0 if all(verdict.ok for verdict in verdicts.values()) else 1


def _check(client: Any, folder: Path) -> Any:
    from afield.conformance.suite import check

    path = agent_environment().get("PATH", "")
    verdict = asyncio.run(check(client, Environment.read().envs, folder / client.name, path))
    counts = f"{verdict.calls:5} calls {verdict.matched:5} matched {verdict.duplicates:3} duplicates"
    print(f"{client.name:20} {counts} {verdict.branches:3} branches  {'ok' if verdict.ok else 'NOT OK'}")
    for problem in verdict.problems:
        print(f"{'':20} - {problem}", file=sys.stderr)
    sys.stdout.flush()
    return verdict


def _told(verdict: Any) -> dict[str, Any]:
    names = ("calls", "matched", "duplicates", "branches", "ok")
    return {name: getattr(verdict, name) for name in names}
