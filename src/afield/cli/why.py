"""`afield why`: explain what is wrong with a run or a rollout."""

from __future__ import annotations

import argparse
import json
from typing import Any

import msgspec

from afield.cli.report import me
from afield.cli.runs import open_run
from afield.cli.tables import printable
from afield.diagnosis.evidence import STAGES, Finding, RunEvidence
from afield.diagnosis.registry import applicable, diagnose
from afield.errors import NotFound, UsageError
from afield.orchestrator.state import RunDirectory, find_run
from afield.runs.index import RolloutRow
from afield.settings.environment import Environment


def add(commands: Any) -> None:
    command = commands.add_parser(
        "why",
        help="explain what is wrong with a run or a rollout",
        description="Explain what is wrong with a run or a rollout: findings by stage, with evidence and a"
        " remedy. Exit code: 0 without a finding, 1 with findings, 2 for invalid input.",
    )
    command.add_argument(
        "name",
        nargs="?",
        default="latest",
        metavar="RUN",
        help="run id, path or latest; or a rollout of the latest run (default: latest)",
    )
    command.add_argument("rollout", nargs="?", metavar="ROLLOUT", help="rollout or session id")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    run, row = resolve(args.name, args.rollout)
    with run.index:
        evidence = RunEvidence(run, row)
        findings = [with_names(finding, run, row) for finding in diagnose(evidence)]
        if args.json:
            print(json.dumps(as_json(evidence, findings), ensure_ascii=False))
        else:
            print_findings(evidence, findings)
    return 1 if findings else 0


def resolve(name: str, rollout: str | None) -> tuple[RunDirectory, RolloutRow | None]:
    """The run, and the row of a rollout if one is named; a single name may be one of the latest run."""
    try:
        run = open_run(name)
    except UsageError:
        if rollout is not None or not (match := in_latest_run(name)):
            raise
        return match
    run.index.refresh()
    if rollout is None:
        return run, None
    try:
        return run, run.index.find(rollout)
    except NotFound as error:
        raise UsageError(f"run {error}; afield show {run.id} --rollouts lists them") from None


def in_latest_run(rollout: str) -> tuple[RunDirectory, RolloutRow] | None:
    """The latest run and this rollout of it; None if it has no such rollout."""
    try:
        run = find_run(Environment.read().runs, "latest")
        run.index.refresh()
        return run, run.index.find(rollout)
    except (NotFound, UsageError):
        return None


def with_names(finding: Finding, run: RunDirectory, row: RolloutRow | None) -> Finding:
    """The finding with commands, files and pages of this run."""
    listed = Environment.read().runs / run.id
    name = run.id if listed.exists() and listed.samefile(run.path) else str(run.path)
    rollouts = (row.id,) if row is not None else finding.rollouts
    commands = [f"afield show {name} {rollout}" for rollout in rollouts]
    commands += [command.format(run=name) for command in finding.commands if row is None]
    pages = [f"#/r/{run.id}/o/{rollout}" for rollout in rollouts]
    pages += [page.format(run=run.id) for page in finding.pages]
    return msgspec.structs.replace(
        finding,
        rollouts=rollouts,
        commands=tuple(commands),
        pages=tuple(pages),
        files=tuple(str(run.path / file) for file in finding.files),
        evidence=tuple(filter(None, finding.evidence)),
    )


def as_json(run: RunEvidence, findings: list[Finding]) -> dict[str, Any]:
    return {
        "run": run.run.id,
        "path": str(run.run.path),
        "rollout": run.rollout.id if run.rollout else None,
        "kind": run.info.kind,
        "status": run.run.status,
        "rollouts": len(run.rollouts),
        "steps": len(run.steps),
        "findings": msgspec.to_builtins(findings),
        "checked": [check.name for check in applicable(run)],
    }


def print_findings(run: RunEvidence, findings: list[Finding]) -> None:
    about = f"run {run.run.id} ({run.info.kind}, {run.run.status})"
    if run.rollout:
        print(f"rollout {run.rollout.id} of {about}")
    else:
        print(f"{about}: {len(run.rollouts)} rollouts, {len(run.steps)} steps")
    for number, finding in enumerate(findings, 1):
        print(f"\n{number}. {finding.name} ({finding.stage}): {printable(finding.problem)}")
        print_lines("evidence", finding.evidence)
        places = [command.replace("afield", me(), 1) for command in finding.commands]
        if finding.pages:
            places.append(f"{me()} ui {run.run.id}, {', '.join(finding.pages)}")
        print_lines("look at", [*places, *finding.files])
        print_lines("remedy", [finding.remedy])
    if findings:
        if len(findings) > 1:
            print("\nfindings of a lower stage often explain those after them: start with the first")
        return
    print("nothing found; checked:")
    for stage in STAGES:
        if names := [check.name for check in applicable(run) if check.stage == stage]:
            print(f"  {stage:15s} {', '.join(names)}")


def print_lines(label: str, lines: Any) -> None:
    for line in lines:
        print(f"   {label:9s} {printable(line)}")
        label = ""
