"""Checks of a training run's parts before it starts, by trying them.

`diagnose` runs all checks and returns their results. A check that raises has failed; the error is its
evidence. The last check starts the gateway and launches a probe agent in the run's own runtime, so that the
whole path is tried: launch, model call, outcome, store.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import math
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, structs

from afield import __version__, factory, harnesses
from afield.datasets import read_tasks
from afield.errors import AfieldError, UsageError, root_cause
from afield.interfaces import PendingAttempt
from afield.jobs.training import open_collector
from afield.orchestrator.state import RunDirectory, RunInfo
from afield.sdk.probe import TOOL
from afield.settings.train import TrainConfig
from afield.types import Attempt, Outcome, Rollout, RolloutResult, Task

log = logging.getLogger(__name__)
Status = Literal["ok", "warning", "failed", "skipped"]
PROBE = "afield.sdk.probe:probe"
GB = 1e9
LEAST_GB = 1.0
"""Free disk space below which a run fails the check, in 10^9 bytes."""
COPIES = 6
"""Copies of the weights that a run keeps: two checkpoints with optimizer state, and two exports."""
NEEDED = (
    *("settings", "tasks", "model", "template", "run directory", "store", "queue", "gateway"),
    *("engine", "runtime"),
)
"""Checks that must not have failed before an attempt is launched."""
SKEW_S = 2.0
"""Difference of clocks that is reported, in seconds."""
PACKAGES = ("msgspec", "aiohttp", "torch", "transformers", "vllm", "sglang", "ray", "boto3", "openai")
MINIMUM = re.compile(r"([\w-]+)(?:\[[^\]]*\])?>=([\d.]+)")
"""A requirement with an oldest version."""
REMEDIES = (
    (
        r"does not answer|Connection refused|Cannot connect|connect call failed",
        "start it, or correct its address",
    ),
    (
        r"Permission denied|Read-only file system|cannot be kept",
        "set AFIELD_RUNS to a directory you can write",
    ),
    (r"No space left", "free disk space, or set AFIELD_RUNS to another disk"),
    (r"admin key", "set AFIELD_ADMIN_KEY to the key that the gateway printed"),
    (r"bubblewrap|bwrap", "apt-get install bubblewrap, or choose another --runtime"),
)
"""Remedies by text of an error that names none itself."""


class CheckResult(Struct, frozen=True, kw_only=True):
    """Result of one check."""

    check: str
    """Name of the check."""
    status: Status
    """Outcome: ok, warning, failed, or skipped because an earlier check failed."""
    evidence: str
    """Observation on which the status rests."""
    remedy: str = ""
    """Remedy; empty if the check needs none."""


class Doctor:
    """Runs the checks of one run's settings."""

    def __init__(
        self, config: TrainConfig, runs: Path, admin_key: str | None, *, timeout_s: float = 120.0
    ) -> None:
        self._config = config
        self._runs = runs
        self._admin_key = admin_key
        self._timeout_s = timeout_s
        self._tokenizer: Any = None
        self._tasks: list[Task] = []
        self._failed: set[str] = set()

    async def results(self) -> AsyncIterator[CheckResult]:
        """Results of all checks, in order, as they are known."""
        checks: Sequence[tuple[str, tuple[str, ...], Callable[[], Awaitable[Iterator[CheckResult]]]]] = (
            ("versions", (), self._in_thread(self._versions)),
            ("settings", (), self._in_thread(self._settings)),
            ("tasks", (), self._in_thread(self._read_tasks)),
            ("model", (), self._in_thread(self._model)),
            ("template", ("model",), self._in_thread(self._template)),
            ("tools", ("template",), self._in_thread(self._tools)),
            ("run directory", (), self._in_thread(self._directory)),
            ("disk", ("run directory",), self._in_thread(self._disk)),
            ("store", ("settings",), self._store),
            ("queue", ("settings", "store"), self._queue),
            ("gateway", (), self._gateway),
            ("engine", ("model",), self._engine),
            ("runtime", ("settings", "store", "queue"), self._runtime),
            ("reach", NEEDED, self._reach),
        )
        for name, needs, check in checks:
            missing = [need for need in needs if need in self._failed]
            if missing:
                self._failed.add(name)
                evidence = f"not tried: {', '.join(missing)} failed"
                yield CheckResult(check=name, status="skipped", evidence=evidence)
                continue
            for result in await self._tried(name, check):
                if result.status == "failed":
                    self._failed.add(name)
                yield result

    async def _tried(
        self, name: str, check: Callable[[], Awaitable[Iterator[CheckResult]]]
    ) -> list[CheckResult]:
        limit = self._timeout_s
        try:
            async with asyncio.timeout(limit):
                return list(await check())
        except TimeoutError:
            evidence = f"no answer in {limit:g} s"
            return [failed(name, evidence, "look at its log, or raise --timeout")]
        except (Exception, ExceptionGroup) as error:
            cause = root_cause(error)
            text = str(cause) if isinstance(cause, AfieldError) else f"{type(cause).__name__}: {cause}"
            return [failed(name, text, remedy_of(text))]

    def _in_thread(self, check: Callable[[], Iterator[CheckResult]]) -> Callable[[], Awaitable[Any]]:
        return lambda: asyncio.to_thread(lambda: iter(list(check())))

    # --- on this machine ---------------------------------------------------------------------------

    def _versions(self) -> Iterator[CheckResult]:
        versions = {name: version for name in PACKAGES if (version := _version(name))}
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        yield ok("versions", f"afield {__version__}, Python {platform.python_version()}, {listed}")
        for name, version, oldest in too_old(_requirements(), _version):
            evidence = f"{name} {version} is older than {oldest}, the oldest that afield supports"
            yield warning("versions", evidence, f"pip install '{name}>={oldest}'")

    def _settings(self) -> Iterator[CheckResult]:
        config = self._config
        factory.check_choices(config)
        if self._tasks:
            factory.check_trust(config, self._tasks)
        tracked = f", trackers {', '.join(config.track)}" if config.track else ""
        agent = config.agent or "of the image"
        yield ok("settings", f"agent {agent}, runtime {config.runtime}, transport {config.outcomes}{tracked}")

    def _read_tasks(self) -> Iterator[CheckResult]:
        if not self._config.tasks:
            yield failed("tasks", "no tasks are named", "give a file with --tasks FILE")
            return
        self._tasks = read_tasks(Path(self._config.tasks))
        validation = len(read_tasks(Path(self._config.val_tasks))) if self._config.val_tasks else 0
        yield ok("tasks", f"{len(self._tasks)} tasks, {validation} for validation")

    def _model(self) -> Iterator[CheckResult]:
        factory.check_model(self._config, trains=True)
        self._tokenizer = factory.chat_tokenizer(Path(self._config.model))
        yield ok("model", f"{self._config.model}: vocabulary of {self._tokenizer.vocab_size}")

    def _template(self) -> Iterator[CheckResult]:
        profile = self._tokenizer.profile
        again = [pattern for pattern, tier in profile.appends.items() if tier is None]
        appended = [pattern for pattern, tier in profile.appends.items() if tier is not None]
        if again:
            yield warning(
                "template",
                f"not prefix-stable: conversations are rendered again after {', '.join(again)}",
                "expect branches instead of one sequence per rollout; use a template that appends messages"
                f" (afield inspect-template {self._config.model})",
            )
        else:
            yield ok("template", f"prefix-stable: {len(appended)} patterns of new messages are appended")
        for note in profile.notes:
            yield warning("template", note, "")

    def _tools(self) -> Iterator[CheckResult]:
        from afield.chat import Tool
        from afield.types import Message

        profile = self._tokenizer.profile
        if profile.tool_format is None:
            yield warning(
                "tools",
                "tool calls of this template cannot be read: requests with tools are refused",
                "use a model that was trained to call tools, if the agent has any",
            )
            return
        function = TOOL["function"]
        assert isinstance(function, dict)
        tool = Tool(function["name"], function["description"], function["parameters"], TOOL)
        prompt = self._tokenizer.render([Message(role="user", content="What is 2 + 3?")], tools=(tool,))
        text = self._tokenizer.decode(prompt)
        if "add" not in text or "number" not in text:
            yield failed("tools", "a tool's name or schema is not in the prompt", "correct the chat template")
            return
        calls = "parallel calls" if profile.parallel_calls else "one call per turn"
        yield ok("tools", f"shown in the prompt, parsed as {profile.tool_format}, {calls}")

    def _directory(self) -> Iterator[CheckResult]:
        runs = self._runs.absolute()
        try:
            runs.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=runs, prefix=".doctor-") as file:
                file.write(bytes(1 << 20))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UsageError(
                f"run directories cannot be created in {runs}: {error}; set AFIELD_RUNS to another directory"
            ) from error
        yield ok("run directory", f"{runs} can be written")

    def _disk(self) -> Iterator[CheckResult]:
        free = shutil.disk_usage(self._runs).free / GB
        weights = sum(file.stat().st_size for file in Path(self._config.model).glob("*.safetensors")) / GB
        needed = LEAST_GB + (0 if self._config.freeze_weights else COPIES * weights)
        evidence = f"{free:.1f} GB free at {self._runs.absolute()}, about {needed:.1f} GB needed"
        if free < LEAST_GB:
            yield failed("disk", evidence, "free disk space, or set AFIELD_RUNS to another disk")
        elif free < needed:
            yield warning("disk", evidence, "free disk space, lower keep_weights, or set AFIELD_RUNS")
        else:
            yield ok("disk", evidence)

    # --- services ----------------------------------------------------------------------------------

    async def _store(self) -> Iterator[CheckResult]:
        from afield.transports.stores.memory import MemoryNotifier
        from afield.transports.transport import StoreTransport

        with tempfile.TemporaryDirectory() as folder:
            whole = factory.transport(self._config, RunDirectory(Path(folder) / "run"))
            assert isinstance(whole, StoreTransport)
            async with StoreTransport(whole.store, MemoryNotifier()) as transport:
                began = time.monotonic()
                await transport.decision(_probe_attempt())
                seconds = time.monotonic() - began
        return iter([ok("store", f"{self._config.outcomes} answers in {seconds * 1000:.0f} ms")])

    async def _queue(self) -> Iterator[CheckResult]:
        with tempfile.TemporaryDirectory() as folder:
            async with factory.transport(self._config, RunDirectory(Path(folder) / "run")) as transport:
                await transport.hints("doctor", 0.1)
        return iter([ok("queue", f"notifications of {self._config.outcomes} can be received")])

    async def _gateway(self) -> Iterator[CheckResult]:
        config = self._config
        if not config.gateway:
            return iter([ok("gateway", "the run starts its own")])
        if not self._admin_key:
            raise UsageError(f"the gateway at {config.gateway} needs an admin key: set AFIELD_ADMIN_KEY")
        unavailable_timeout_s = min(10.0, self._timeout_s / 2)
        delivers = config.delivery == "gateway"
        async with factory.gateway_client(
            config.gateway, self._admin_key, unavailable_timeout_s=unavailable_timeout_s, delivers=delivers
        ) as gateway:
            served = await gateway.served_policy()
            context = await gateway.context()
        factory.check_served_model(Path(config.model), served.model, served.version, config.gateway)
        name = served.model.name if served.model else "unknown"
        evidence = f"{config.gateway} serves {name} version {served.version}, context {context}"
        return iter([ok("gateway", evidence)])

    async def _engine(self) -> Iterator[CheckResult]:
        config = self._config
        kind, _, where = config.engine.partition("=")
        if config.gateway:
            return iter([ok("engine", f"behind the gateway {config.gateway}")])
        if not factory.ENGINES[kind].server:
            return iter([ok("engine", f"{kind}, started with the gateway; `reach` tries it")])
        report, served = await factory.probe_server(kind, where, Path(config.model))
        info = report.info
        results = [
            ok("engine", f"{config.engine}: context {info.max_context}, log-probabilities {info.logprobs}")
        ]
        vocabulary = self._tokenizer.vocab_size
        if info.vocab_size != vocabulary:
            results = [
                failed(
                    "engine",
                    f"{config.engine} has a vocabulary of {info.vocab_size},"
                    f" {config.model} one of {vocabulary}",
                    f"start the server with the model {config.model}, or name its model with --model",
                )
            ]
        elif served and Path(served).name != self._tokenizer.name:
            results.append(
                warning(
                    "engine",
                    f"the server calls its model {served!r}, --model is {config.model}",
                    "check that both are the same model",
                )
            )
        results += [warning("engine", note, "") for note in info.notes]
        return iter(results)

    async def _runtime(self) -> Iterator[CheckResult]:
        config = self._config
        with tempfile.TemporaryDirectory() as folder:
            run = RunDirectory(Path(folder) / "run")
            async with AsyncExitStack() as stack:
                transport = await stack.enter_async_context(factory.transport(config, run))
                runtimes = [factory.runtime(config, run, transport)]
                if verifier := factory.verifier_runtime(config, run, transport):
                    runtimes.append(verifier)
                for runtime in runtimes:
                    await stack.enter_async_context(runtime)
                    await runtime.check()
        verifier_text = f", verifier in {config.verifier_runtime}" if config.verifier else ""
        return iter([ok("runtime", f"{config.runtime} can start the agent{verifier_text}")])

    # --- the whole path ----------------------------------------------------------------------------

    async def _reach(self) -> Iterator[CheckResult]:
        """Launch one attempt with a gateway: the probe agent, or the image's own on the first task."""
        config, probed = self._probe_config()
        with tempfile.TemporaryDirectory(prefix="afield-doctor-") as folder:
            run = RunDirectory(Path(folder) / "doctor")
            result = await self._attempt(config, run, probed)
            child_log = _tail(run.logs / "gateway.log")
        return iter(list(judge(result, config, probed=probed, gateway_log=child_log)))

    def _probe_config(self) -> tuple[TrainConfig, bool]:
        config = self._config
        probed = factory.RUNTIMES[config.runtime_name].takes_agent and not harnesses.find(config.agent)
        changes: dict[str, Any] = {
            "freeze_weights": True,
            "retries_infrastructure": 0,
            "retries_task": 0,
            "rollouts": 1,
            "quorum": 1,
            "tasks_per_step": 1,
            "workers": 1,
            "track": (),
            "exp_id": f"doctor-{int(time.time())}",
        }
        if probed:
            timeout_s = min(config.attempt_timeout_s, self._timeout_s)
            changes |= {"agent": PROBE, "verifier": "", "attempt_timeout_s": timeout_s, "agent_args": {}}
        return structs.replace(config, **changes), probed

    async def _attempt(self, config: TrainConfig, run: RunDirectory, probed: bool) -> RolloutResult:
        reads_tools = self._tokenizer.profile.tool_format is not None
        task = Task("doctor", {"tools": reads_tools}) if probed else self._tasks[0]
        observer = LastResult()
        info = RunInfo(kind="eval", agent=config.agent, model=config.model)
        async with open_collector(
            config, run, [task], info, observer, admin_key=self._admin_key
        ) as collector:
            rollout = Rollout(
                id=f"{config.exp_id}-r0", exp_id=config.exp_id, group_id=config.exp_id, task=task
            )
            await collector.rollout_runner.run(rollout)
        assert observer.result is not None
        return observer.result


class LastResult:
    """Observer that keeps the result of a rollout."""

    def __init__(self) -> None:
        self.result: RolloutResult | None = None

    def attempt_ended(self, rollout: Rollout, outcome: Outcome, will_retry: bool) -> None:
        pass

    def rollout_finished(self, result: RolloutResult) -> None:
        self.result = result


def judge(
    result: RolloutResult, config: TrainConfig, *, probed: bool, gateway_log: str = ""
) -> Iterator[CheckResult]:
    """Results about reach, log-probabilities and clocks, from one attempt."""
    outcome, turns = result.outcome, result.turns
    for refused in result.refused:
        yield failed("reach", f"the gateway refused a call: {refused.status} {refused.message}", "")
    if outcome.failure is not None:
        failure = outcome.failure
        text = f"{failure.kind}/{failure.reason}: {failure.message}"
        if not turns:
            text += "; no model call came through"
        where = config.gateway or config.gateway_url or f"{config.gateway_host}:{config.gateway_port or '*'}"
        remedy = remedy_of(text) or (
            f"see that agents in {config.runtime} reach the gateway at {where}: gateway_host, gateway_url,"
            " --relay"
        )
        yield failed("reach", f"{text}{f'; gateway: {gateway_log}' if gateway_log else ''}", remedy)
        return
    who = "a probe" if probed else "the image's agent on the first task"
    yield ok("reach", f"{who} in {config.runtime} made {len(turns)} model calls, its outcome arrived")
    logprobs = [p for turn in turns for p in turn.logprobs]
    if not logprobs or not all(math.isfinite(p) and p <= 1e-3 for p in logprobs):
        yield failed("log-probabilities", f"of {len(logprobs)} tokens: {logprobs[:5]}", "check the engine")
    elif all(p == 0.0 for p in logprobs) and config.temperature > 0:
        yield warning(
            "log-probabilities",
            f"all {len(logprobs)} are 0: nothing can be learned from them",
            "check the engine",
        )
    else:
        mean = sum(logprobs) / len(logprobs)
        yield ok("log-probabilities", f"{len(logprobs)} tokens, mean {mean:.3f}, lowest {min(logprobs):.3f}")
    yield from clocks(result)


def clocks(result: RolloutResult) -> Iterator[CheckResult]:
    """Compare the clocks of the agent and the gateway with this machine's."""
    times = result.times
    low, high = times.attempted or 0.0, times.ended or math.inf
    seen = {"gateway": result.turns[0].started} if result.turns else {}
    if (agent := result.outcome.metrics.get("clock")) is not None:
        seen["agent"] = agent
    skews = {name: min(at - low, 0.0) or max(at - high, 0.0) for name, at in seen.items()}
    wrong = {name: skew for name, skew in skews.items() if abs(skew) > SKEW_S}
    if wrong:
        text = ", ".join(f"{name} {skew:+.0f} s" for name, skew in wrong.items())
        yield warning("clocks", f"differ from this machine's: {text}", "set the clocks by NTP")
    elif seen:
        yield ok("clocks", f"{' and '.join(seen)} agree with this machine's within {SKEW_S:g} s")


def ok(check: str, evidence: str) -> CheckResult:
    return CheckResult(check=check, status="ok", evidence=evidence)


def warning(check: str, evidence: str, remedy: str) -> CheckResult:
    return CheckResult(check=check, status="warning", evidence=evidence, remedy=remedy)


def failed(check: str, evidence: str, remedy: str) -> CheckResult:
    return CheckResult(check=check, status="failed", evidence=evidence, remedy=remedy)


def remedy_of(text: str) -> str:
    """Remedy for an error that names none itself; empty if unknown."""
    if ";" in text:  # what to do follows the error
        return ""
    return next((remedy for pattern, remedy in REMEDIES if re.search(pattern, text)), "")


def too_old(requirements: Iterable[str], version_of: Callable[[str], str]) -> Iterator[tuple[str, str, str]]:
    """Name, version and oldest supported version of installed packages below a `NAME>=VERSION`."""
    for requirement in sorted(set(requirements)):
        match = MINIMUM.match(requirement)
        version = version_of(match[1]) if match else ""
        if match and version and _numbers(version) < _numbers(match[2]):
            yield match[1], version, match[2]


def _numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version, without zeros at the end: 2.6 is 2.6.0."""
    leading = re.match(r"\d+(?:\.\d+)*", version)
    text = re.sub(r"(?:\.0+)+$", "", leading[0]) if leading else "0"
    return tuple(map(int, text.split(".")))


def _requirements() -> list[str]:
    """Requirements of afield and its extras; empty if it is not installed as a package."""
    try:
        return [text.partition(";")[0] for text in importlib.metadata.requires("afield") or ()]
    except importlib.metadata.PackageNotFoundError:
        return []


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return " | ".join(lines[-2:])[:500]


def _probe_attempt() -> PendingAttempt:
    rollout = Rollout(id="doctor", exp_id="doctor", group_id="doctor", task=Task("doctor", {}))
    return PendingAttempt(rollout, Attempt(rollout.id, 1))
