"""Foreign test suites: install, run and evaluate tests of other projects.

A suite runs in variants (one per provider, with or without reasoning), each a command with its own session.
The command appends one JSON line per test to the file `$AFIELD_SUITE_RESULTS`,
`{"test", "outcome", "detail"}`, and a last line `{"finished": true}`. A command that ends without that line
has failed.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from afield import factory
from afield.conformance.clients.base import run
from afield.conformance.model import CONTROL, IMAGE, SWITCHABLE_TEMPLATE, write_model
from afield.conformance.runner import RunningGateway, run_gateway
from afield.conformance.suites.rule_model import RuleModel
from afield.errors import Unavailable
from afield.harnesses.base import ClientCommand, Stage
from afield.interfaces import SessionSpec
from afield.types import Sampling

RESULTS = "AFIELD_SUITE_RESULTS"
MAX_CONTEXT = 32_768
Outcome = Literal["passed", "failed", "skipped"]


class CaseResult(Struct, frozen=True):
    """Result of one test, as the suite reports it."""

    test: str
    """Name of the test, with its variant."""
    outcome: Outcome
    """Whether the test passed, failed or was skipped."""
    detail: str = ""
    """Reason of a failure or skip; empty if the suite reports none."""


class ForeignSuite(Struct, frozen=True, kw_only=True):
    """Test suite of another project."""

    name: str
    """Name on the command line and in results."""
    install: Callable[[Path], Path]
    """Installs the suite into the cache directory; returns the directory of its programs."""
    command: Callable[[Stage, str], ClientCommand]
    """Function from stage and variant to the command that runs it."""
    variants: tuple[str, ...] = ("",)
    """Variants, each with its own session; the prefix of their test names unless empty."""
    without_reasoning: tuple[str, ...] = ()
    """Variants without reasoning."""
    not_ours: Mapping[str, str] = {}
    """Expected failures that are not faults of the gateway: reason by test."""
    optional: bool = False
    """Whether the suite may be skipped if it cannot be installed."""
    timeout_s: float = 300.0
    """Time limit of each variant, in seconds."""


class SuiteResult(Struct, frozen=True, kw_only=True):
    """Result of one suite."""

    passed: int = 0
    """Number of passed tests."""
    failed: int = 0
    """Number of problems."""
    skipped: int = 0
    """Number of skipped tests; 1 for a skipped suite."""
    not_ours: Mapping[str, str] = {}
    """Expected failures: reason by test."""
    problems: tuple[str, ...] = ()
    """Unexpected failures, duplicate tests and stale entries of expected failures."""
    skips: Mapping[str, str] = {}
    """Skipped tests: reason by test."""
    unavailable: str = ""
    """Reason why the suite could not be installed; empty if it was."""

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.failed and not self.problems


def judge(outcomes: Sequence[CaseResult], not_ours: Mapping[str, str]) -> SuiteResult:
    """Evaluate outcomes; an expected failure that does not fail is a problem too."""
    by_name = {tested.test: tested for tested in outcomes}
    counts = Counter(tested.test for tested in outcomes)
    problems = [f"{name}: reported {count} times" for name, count in counts.items() if count > 1]
    problems += [
        f"{tested.test}: {tested.detail.strip() or 'failed'}"
        for tested in by_name.values()
        if tested.outcome == "failed" and tested.test not in not_ours
    ]
    for name in not_ours:
        if name not in by_name:
            problems.append(f"{name}: listed as not ours, but there is no such test; remove the entry")
        elif by_name[name].outcome != "failed":
            problems.append(f"{name}: listed as not ours, but it {by_name[name].outcome}; remove the entry")
    passed = sum(tested.outcome == "passed" for tested in by_name.values())
    if not passed:
        problems.append("no test passed")
    return SuiteResult(
        passed=passed,
        failed=len(problems),
        skipped=sum(tested.outcome == "skipped" for tested in by_name.values()),
        not_ours={name: not_ours[name] for name in not_ours if name in by_name},
        problems=tuple(problems),
        skips={t.test: t.detail for t in by_name.values() if t.outcome == "skipped"},
    )


async def check_suite(suite: ForeignSuite, cache: Path, folder: Path, path: str) -> SuiteResult:
    """Install and run one suite; all its output stays in `folder`. `path` is the PATH of its processes."""
    try:
        programs = await asyncio.to_thread(suite.install, cache)
    except Unavailable as error:
        if suite.optional:
            return SuiteResult(skipped=1, unavailable=str(error))
        return SuiteResult(failed=1, problems=(f"not installed: {error}",), unavailable=str(error))
    model = write_model(folder / "model", SWITCHABLE_TEMPLATE, (*CONTROL, IMAGE))
    vocabulary = factory.vocabulary_of(model)
    engine = factory.load("engine", "scripted", factory.ENGINES)(
        RuleModel(vocabulary, frozenset(_session_id(suite, variant) for variant in suite.without_reasoning)),
        max_context=MAX_CONTEXT,
        vocab_size=vocabulary.size,
        image_id=vocabulary.id_of(IMAGE),
        model=model if find_spec("xgrammar") else None,  # to check replies against constraints
    )
    outcomes: list[CaseResult] = []
    async with run_gateway(engine, model, folder) as up:
        for variant in suite.variants:
            outcomes += await _variant(suite, variant, up, programs, folder / (variant or "run"), path)
    return judge(outcomes, suite.not_ours)


def _session_id(suite: ForeignSuite, variant: str) -> str:
    return f"{suite.name}-{variant or 'run'}"


async def _variant(
    suite: ForeignSuite, variant: str, up: RunningGateway, programs: Path, folder: Path, path: str
) -> list[CaseResult]:
    ticket = await up.gateway.open(
        SessionSpec(id=_session_id(suite, variant), sampling=Sampling(max_tokens=4096))
    )
    stage = Stage(
        home=folder / "home",
        work=folder / "work",
        programs=programs,
        base_url=ticket.base_url,
        api_key=ticket.api_key,
        model="m",
        path=path,
    )
    stage.home.mkdir(parents=True)
    stage.work.mkdir()
    results = folder / "results.jsonl"
    results.touch()
    command = suite.command(stage, variant)
    admin = {"SUITE_GATEWAY_URL": up.url, "SUITE_ADMIN_KEY": up.admin_key}
    own = ClientCommand(command.argv, {**command.environment, **admin, RESULTS: str(results)})
    problem = await run(own, stage, path, folder / "suite.log", suite.timeout_s)
    prefix = f"{variant}/" if variant else ""
    outcomes, finished = _read(results, prefix)
    if not finished:
        outcomes.append(
            CaseResult(f"{prefix}the whole run", "failed", problem or "ended before its last test")
        )
    return outcomes


def _read(results: Path, prefix: str) -> tuple[list[CaseResult], bool]:
    outcomes: list[CaseResult] = []
    finished = False
    for line in results.read_text(encoding="utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        if row.get("finished"):
            finished = True
            continue
        outcomes.append(CaseResult(prefix + row["test"], row["outcome"], row.get("detail", "")))
    return outcomes, finished
