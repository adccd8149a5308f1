"""Fault injection: one wrapper class per interface, and the script that says which calls are faulty.

A wrapper forwards every call and asks its script first. A script names calls by method and by rollout, or by
number, and says what they get: an error, no answer at all, a slow one, a second one, a late one, or an
answer that is lost after the work was done.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from msgspec import Struct

from afield.errors import (
    Conflict,
    DamagedFile,
    InfrastructureFailure,
    NoRewards,
    NotFound,
    RateLimited,
    TaskFailure,
    Unavailable,
    UsageError,
    VerifierFailure,
    WireError,
)
from afield.interfaces import (
    Capabilities,
    Chunk,
    Engine,
    EngineInfo,
    ExecResult,
    Exit,
    Fence,
    Gateway,
    GenerateRequest,
    PendingAttempt,
    Runtime,
    Sandbox,
    SessionCredentials,
    SessionRecord,
    SessionSpec,
    SessionState,
    SessionStatus,
    StepReport,
    Trainer,
    Transport,
)
from afield.types import Attempt, Group, Policy
from afield.wire import Invocation, OutcomeRecord, Submission

T = TypeVar("T")
Kind = Literal["raise", "hang", "slow", "twice", "late", "lost"]
MARK = "injected fault"

# Each of our error classes that a part may raise, and what foreign code raises.
ERRORS: dict[str, Callable[[str], BaseException]] = {
    "UsageError": UsageError,
    "DamagedFile": DamagedFile,
    "WireError": WireError,
    "Conflict": Conflict,
    "NotFound": NotFound,
    "Unavailable": Unavailable,
    "RateLimited": RateLimited,
    "NoRewards": NoRewards,
    "TaskFailure": TaskFailure,
    "VerifierFailure": VerifierFailure,
    "InfrastructureFailure": InfrastructureFailure,
    "OSError": OSError,
    "TimeoutError": TimeoutError,
    "RuntimeError": RuntimeError,
    "sqlite3.OperationalError": sqlite3.OperationalError,
}


class Fault(Struct, frozen=True, kw_only=True):
    """What a faulty call gets in place of its answer."""

    kind: Kind
    """raise: `error`. hang: nothing. slow: the answer after `seconds`. twice: the work is done twice. late:
    the work is done, and the answer comes after `seconds`. lost: the work is done, then `error`."""
    error: str = "Unavailable"
    """A name in `ERRORS`."""
    seconds: float = 8.0
    """How slow, or how late."""

    @property
    def name(self) -> str:
        return (
            self.error if self.kind == "raise" else f"{self.kind} {self.error}".removesuffix(" Unavailable")
        )


def every_fault() -> list[Fault]:
    raised = [Fault(kind="raise", error=error) for error in ERRORS]
    return [*raised, *(Fault(kind=kind) for kind in ("hang", "slow", "twice", "late", "lost"))]


class Script:
    """Which calls are faulty: those of one method about one rollout, or the calls with these numbers.

    Numbers count the calls of the method from 0. `most` bounds how many calls are faulty. `met` counts the
    faults that were injected, by method.
    """

    def __init__(
        self,
        method: str,
        fault: Fault,
        *,
        rollout: str | None = None,
        numbers: Iterable[int] | None = None,
        most: int | None = None,
    ) -> None:
        self.method = method
        self.fault = fault
        self._rollout = rollout
        self._numbers = None if numbers is None else frozenset(numbers)
        self._most = most
        self._calls = 0
        self.met: Counter[str] = Counter()

    def consult(self, method: str, rollouts: Iterable[str]) -> Fault | None:
        if method != self.method:
            return None
        number, self._calls = self._calls, self._calls + 1
        if self._most is not None and self.met[method] >= self._most:
            return None
        if self._rollout is not None and self._rollout not in rollouts:
            return None
        if self._numbers is not None and number not in self._numbers:
            return None
        self.met[method] += 1
        return self.fault


class Scripts:
    """Several scripts at once: the first that makes a call faulty does."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        self.scripts = scripts

    def consult(self, method: str, rollouts: Iterable[str]) -> Fault | None:
        about = list(rollouts)
        faults = [script.consult(method, about) for script in self.scripts]
        return next((fault for fault in faults if fault is not None), None)


def injected(fault: Fault, method: str) -> BaseException:
    """The error that a faulty call raises: its message names the method."""
    return ERRORS[fault.error](f"{MARK} in {method}")


class Faulty:
    """Consults the script, then forwards. `_name` is the interface, for a script's `method`."""

    _name: str

    def __init__(self, inner: Any, script: Script | Scripts) -> None:
        self.inner = inner
        self.script = script

    def _fault(self, method: str, about: Iterable[str]) -> Fault | None:
        return self.script.consult(f"{self._name}.{method}", about)

    async def _call(self, method: str, about: Iterable[str], call: Callable[[], Awaitable[T]]) -> T:
        fault = self._fault(method, about)
        if fault is None:
            return await call()
        match fault.kind:
            case "raise":
                raise injected(fault, f"{self._name}.{method}")
            case "hang":
                await asyncio.Event().wait()
            case "slow":
                await asyncio.sleep(fault.seconds)
            case "twice":
                await call()
            case "late":
                answer = await call()
                await asyncio.sleep(fault.seconds)
                return answer
            case "lost":
                await call()
                raise injected(fault, f"{self._name}.{method}")
        return await call()

    def _now(
        self, method: str, about: Iterable[str], call: Callable[[], T], wait: Callable[[float], None]
    ) -> T:
        """The same for a call that blocks; `wait` is how its thread lets time pass."""
        fault = self._fault(method, about)
        if fault is None:
            return call()
        if fault.kind == "raise":
            raise injected(fault, f"{self._name}.{method}")
        if fault.kind in ("slow", "hang"):
            wait(fault.seconds)
        if fault.kind == "twice":
            call()
        answer = call()
        if fault.kind == "late":
            wait(fault.seconds)
        if fault.kind == "lost":
            raise injected(fault, f"{self._name}.{method}")
        return answer


def _of(session_id: str) -> str:
    return Attempt.from_session_id(session_id).rollout_id


class FaultyGateway(Faulty):
    _name = "Gateway"
    inner: Gateway

    async def open(self, spec: SessionSpec) -> SessionCredentials:
        return await self._call("open", [spec.rollout_id or ""], lambda: self.inner.open(spec))

    async def state(self, session_id: str) -> SessionState:
        return await self._call("state", [_of(session_id)], lambda: self.inner.state(session_id))

    async def states(self, session_ids: Sequence[str]) -> dict[str, SessionState]:
        about = [_of(session_id) for session_id in session_ids]
        return await self._call("states", about, lambda: self.inner.states(session_ids))

    async def version(self) -> int:
        return await self._call("version", [], self.inner.version)

    async def abort(self, session_id: str, reason: str) -> None:
        await self._call("abort", [_of(session_id)], lambda: self.inner.abort(session_id, reason))

    async def finalize(self, session_id: str) -> SessionRecord:
        return await self._call("finalize", [_of(session_id)], lambda: self.inner.finalize(session_id))

    async def submission(self, session_id: str) -> Submission | None:
        return await self._call("submission", [_of(session_id)], lambda: self.inner.submission(session_id))

    async def publish(self, policy: Policy, path: str) -> None:
        await self._call("publish", [], lambda: self.inner.publish(policy, path))


class FaultyRuntime(Faulty):
    """`name` tells the runtime of agents from that of verifiers."""

    inner: Runtime

    def __init__(self, inner: Runtime, script: Script | Scripts, name: str = "Runtime") -> None:
        super().__init__(inner, script)
        self._name = name

    @property
    def capabilities(self) -> Capabilities:
        return self._now("capabilities", [], lambda: self.inner.capabilities, lambda _: None)

    async def __aenter__(self) -> Self:
        await self.inner.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.inner.__aexit__(*exc)

    async def check(self) -> None:
        await self._call("check", [], self.inner.check)

    async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        await self._call("launch", [attempt.rollout_id], lambda: self.inner.launch(attempt, payload))

    async def adopt(self, attempt: Attempt) -> bool | None:
        return await self._call("adopt", [attempt.rollout_id], lambda: self.inner.adopt(attempt))

    async def wait(self, attempt: Attempt) -> Exit:
        return await self._call("wait", [attempt.rollout_id], lambda: self.inner.wait(attempt))

    async def stop(self, attempt: Attempt) -> None:
        await self._call("stop", [attempt.rollout_id], lambda: self.inner.stop(attempt))

    async def status(self, attempt: Attempt) -> SessionStatus:
        return await self._call("status", [attempt.rollout_id], lambda: self.inner.status(attempt))

    async def list(self) -> list[SessionStatus]:
        return await self._call("list", [], self.inner.list)

    async def logs(self, attempt: Attempt) -> str:
        return await self._call("logs", [attempt.rollout_id], lambda: self.inner.logs(attempt))


class FaultyTransport(Faulty):
    _name = "Transport"
    inner: Transport

    async def __aenter__(self) -> Self:
        await self.inner.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.inner.__aexit__(*exc)

    @property
    def held_s(self) -> float:
        return self._now("held_s", [], lambda: self.inner.held_s, lambda _: None)

    def address(self, exp_id: str) -> dict[str, Any]:
        return self._now("address", [], lambda: self.inner.address(exp_id), lambda _: None)

    async def deliver(self, invocation: Invocation, record: OutcomeRecord) -> bool:
        about = [invocation.rollout_id]
        return await self._call("deliver", about, lambda: self.inner.deliver(invocation, record))

    async def decision(self, waiting: PendingAttempt) -> OutcomeRecord | Fence | None:
        return await self._call("decision", [waiting.rollout.id], lambda: self.inner.decision(waiting))

    async def commit_result(self, waiting: PendingAttempt) -> OutcomeRecord | Fence | None:
        about = [waiting.rollout.id]
        return await self._call("commit_result", about, lambda: self.inner.commit_result(waiting))

    async def fence(self, waiting: PendingAttempt, reason: str) -> OutcomeRecord | Fence:
        return await self._call("fence", [waiting.rollout.id], lambda: self.inner.fence(waiting, reason))

    async def hints(self, exp_id: str, wait_s: float) -> list[Attempt]:
        return await self._call("hints", [], lambda: self.inner.hints(exp_id, wait_s))

    async def acknowledge(self, exp_id: str, attempts: Sequence[Attempt]) -> None:
        about = [attempt.rollout_id for attempt in attempts]
        await self._call("acknowledge", about, lambda: self.inner.acknowledge(exp_id, attempts))

    async def unacknowledged(self, exp_id: str) -> list[Attempt]:
        return await self._call("unacknowledged", [], lambda: self.inner.unacknowledged(exp_id))

    async def sweep(self, waiting: Sequence[PendingAttempt]) -> list[Attempt]:
        about = [one.rollout.id for one in waiting]
        return await self._call("sweep", about, lambda: self.inner.sweep(waiting))

    async def late(self, exp_id: str) -> list[Attempt]:
        return await self._call("late", [], lambda: self.inner.late(exp_id))


class FaultyEngine(Faulty):
    """A fault of `generate` comes before the first chunk; "late" and "lost" after the last but one."""

    _name = "Engine"
    inner: Engine

    async def __aenter__(self) -> Self:
        await self.inner.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.inner.__aexit__(*exc)

    async def info(self) -> EngineInfo:
        return await self._call("info", [], self.inner.info)

    async def generate(self, call: GenerateRequest) -> AsyncGenerator[Chunk]:
        fault = self._fault("generate", [_of(call.session_id)] if "." in call.session_id else [])
        kind = fault.kind if fault else None
        if fault and kind == "raise":
            raise injected(fault, "Engine.generate")
        if kind == "hang":
            await asyncio.Event().wait()
        if fault and kind == "slow":
            await asyncio.sleep(fault.seconds)
        if kind == "twice":
            async for _ in self.inner.generate(call):
                pass
        async for chunk in self.inner.generate(call):
            if fault and chunk.finish is not None and kind == "late":
                await asyncio.sleep(fault.seconds)
            if fault and chunk.finish is not None and kind == "lost":
                raise injected(fault, "Engine.generate")
            yield chunk

    async def load(self, version: int, path: str) -> None:
        await self._call("load", [], lambda: self.inner.load(version, path))


class FaultySandbox(Faulty):
    """The sandbox of one rollout."""

    _name = "Sandbox"
    inner: Sandbox

    def __init__(self, inner: Sandbox, script: Script | Scripts, rollout: str) -> None:
        super().__init__(inner, script)
        self._about = [rollout]

    async def __aenter__(self) -> Self:
        await self.inner.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.inner.__aexit__(*exc)

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float = 600.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        how: dict[str, Any] = {"timeout": timeout, "cwd": cwd, "env": env, "stdin": stdin}
        return await self._call("exec", self._about, lambda: self.inner.exec(command, **how))

    async def upload(self, path: str, data: bytes) -> None:
        await self._call("upload", self._about, lambda: self.inner.upload(path, data))

    async def download(self, path: str) -> bytes:
        return await self._call("download", self._about, lambda: self.inner.download(path))


class FaultyTrainer(Faulty):
    """It blocks, in a thread: `wait` lets time pass there."""

    _name = "Trainer"
    inner: Trainer

    def __init__(self, inner: Trainer, script: Script | Scripts, wait: Callable[[float], None]) -> None:
        super().__init__(inner, script)
        self._wait = wait
        self._lock = threading.Lock()

    def _do(self, method: str, call: Callable[[], T]) -> T:
        with self._lock:
            return self._now(method, [], call, self._wait)

    @property
    def context(self) -> int | None:
        return self._do("context", lambda: self.inner.context)

    def step(self, groups: Sequence[Group]) -> StepReport:
        return self._do("step", lambda: self.inner.step(groups))

    def export(self, directory: Path) -> None:
        self._do("export", lambda: self.inner.export(directory))

    def save(self, directory: Path) -> None:
        self._do("save", lambda: self.inner.save(directory))

    def restore(self, directory: Path) -> None:
        self._do("restore", lambda: self.inner.restore(directory))


WRAPPERS: dict[type, type[Faulty]] = {
    Engine: FaultyEngine,
    Gateway: FaultyGateway,
    Runtime: FaultyRuntime,
    Sandbox: FaultySandbox,
    Trainer: FaultyTrainer,
    Transport: FaultyTransport,
}


def methods_of(interface: type) -> list[str]:
    """Every method and property of a Protocol, read from the class itself; entering and leaving are not."""
    return sorted(name for name in vars(interface) if not name.startswith("_"))
