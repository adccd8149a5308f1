"""`afield conformance`: check the gateway with real clients and recorded engine calls."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from afield.errors import UsageError
from afield.factory import needs
from afield.settings.environment import Environment, agent_environment


def add(commands: Any) -> None:
    command = commands.add_parser(
        "conformance",
        help="run real clients against the gateway and compare every token",
        description="Run real clients, at pinned versions and offline, against a gateway in front of the"
        " scripted engine. Compare the recorded turns with the calls that the engine received, and every"
        " prompt of the engine with the HTTP request. Clients are installed on demand, into a cache outside"
        " the project.",
    )
    command.add_argument(
        "clients", nargs="*", metavar="NAME", help="client to run, or suite with --suites (default: all)"
    )
    command.add_argument(
        "--template",
        action="append",
        default=[],
        metavar="FAMILY",
        help="family of chat templates to test with; may be repeated (default: chatml and qwen3.5)",
    )
    command.add_argument(
        "--suites",
        action="store_true",
        help="instead of clients, run the test suites of other projects against the gateway",
    )
    command.add_argument("--json", action="store_true", help="print a summary as the last line, in JSON")
    command.add_argument(
        "--keep", type=Path, metavar="DIR", help="new directory to keep records, engine calls and logs in"
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from afield.conformance.clients import select_clients
    from afield.conformance.model import select_families

    if args.keep and args.keep.exists() and any(args.keep.iterdir()):
        raise UsageError(f"{args.keep} is not empty; give --keep a new folder")
    if args.suites:
        return _run_suites(args)
    clients, templates = select_clients(args.clients), select_families(args.template)
    with tempfile.TemporaryDirectory(prefix="afield-", ignore_cleanup_errors=True) as scratch:
        folder = (args.keep or Path(scratch)).absolute()
        verdicts = {
            client.name: {family.name: _check(client, family, folder) for family in templates}
            for client in clients
        }
    if args.json:
        print(json.dumps({"clients": {name: _summary(of) for name, of in verdicts.items()}}))
    return 0 if all(verdict.ok for of in verdicts.values() for verdict in of.values()) else 1


def _run_suites(args: argparse.Namespace) -> int:
    from afield.conformance.suites.registry import select_suites

    if args.template:
        raise UsageError("--template applies to clients only; with --suites, leave it out")
    suites = select_suites(args.clients)
    with tempfile.TemporaryDirectory(prefix="afield-", ignore_cleanup_errors=True) as scratch:
        folder = (args.keep or Path(scratch)).absolute()
        results = {suite.name: _check_suite(suite, folder / suite.name) for suite in suites}
    if args.json:
        print(json.dumps({"suites": {name: _counts(result) for name, result in results.items()}}))
    return 0 if all(result.ok for result in results.values()) else 1


def _check_suite(suite: Any, folder: Path) -> Any:
    from afield.conformance.suites.runner import check_suite

    path = agent_environment().get("PATH", "")
    result = asyncio.run(check_suite(suite, Environment.read().envs, folder, path))
    counts = f"{result.passed:5} passed {result.failed:4} failed {result.skipped:4} skipped"
    print(f"{suite.name:16} {counts} {len(result.not_ours):4} not ours  {'ok' if result.ok else 'NOT OK'}")
    if result.unavailable and result.ok:
        print(f"{'':16} skipped: {result.unavailable}")
    for test, reason in result.not_ours.items():
        print(f"{'':16} not ours: {test}: {reason}")
    for reason, count in Counter(result.skips.values()).most_common():
        print(f"{'':16} {count} skipped: {reason}")
    for problem in result.problems:
        print(f"{'':16} - {problem}", file=sys.stderr)
    sys.stdout.flush()
    return result


def _counts(result: Any) -> dict[str, Any]:
    counts: dict[str, Any] = {name: getattr(result, name) for name in ("passed", "failed", "skipped")}
    counts["not_ours"] = dict(result.not_ours)
    return counts | ({"unavailable": result.unavailable} if result.unavailable else {})


def _check(client: Any, family: Any, folder: Path) -> Any:
    with needs("gateway"):
        from afield.conformance.runner import check

    path = agent_environment().get("PATH", "")
    place = folder / client.name / family.name
    verdict = asyncio.run(check(client, Environment.read().envs, place, path, family))
    counts = f"{verdict.calls:5} calls {verdict.matched:5} matched {verdict.duplicates:3} duplicates"
    excluded = ", ".join(f"{reason} {n}" for reason, n in sorted(verdict.excluded.items())) or "none"
    print(
        f"{client.name:20} {family.name:8} {counts} {verdict.branches:3} branches"
        f"  excluded: {excluded}  {'ok' if verdict.ok else 'NOT OK'}"
    )
    for problem in verdict.problems:
        print(f"{'':20} - {problem}", file=sys.stderr)
    sys.stdout.flush()
    return verdict


COUNTS = ("calls", "matched", "duplicates", "branches")


def _summary(verdicts: Mapping[str, Any]) -> dict[str, Any]:
    """The sums over all template families, and each of them."""
    excluded: Counter[str] = Counter()
    for verdict in verdicts.values():
        excluded.update(verdict.excluded)
    templates = {
        family: {name: getattr(verdict, name) for name in (*COUNTS, "excluded", "ok")}
        for family, verdict in verdicts.items()
    }
    sums = {name: sum(getattr(verdict, name) for verdict in verdicts.values()) for name in COUNTS}
    ok = all(verdict.ok for verdict in verdicts.values())
    return {**sums, "excluded": dict(excluded), "templates": templates, "ok": ok}
