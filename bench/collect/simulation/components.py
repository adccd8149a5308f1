"""Simulated gateway, runtime with agents, and trainer.

Tokens have real ids, log-probabilities and version spans, and trajectories are assembled as the gateway does
it, so staleness and waste are measured on what would be trained.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from msgspec import Struct, field

from afield import trajectories, wire
from afield.errors import Conflict, NotFound, Unavailable
from afield.interfaces import (
    Capabilities,
    Exit,
    Phase,
    SessionCredentials,
    SessionRecord,
    SessionSpec,
    SessionState,
    SessionStatus,
    StepReport,
    Transport,
)
from afield.runtimes.base import AttemptTable, failed_exit
from afield.turn_tree import TurnTree
from afield.types import (
    Attempt,
    FinishReason,
    Group,
    Outcome,
    Policy,
    Reason,
    Sampling,
    Turn,
    TurnStatus,
    VersionSpan,
)
from bench.collect.simulation.agent_schedule import Habits, life_of
from bench.collect.simulation.engine import Engine

IDS = tuple(range(1, 1001))
LOGPROBS = (-1.0,) * 1000
PROMPT, REPLY = 32, 16  # tokens of a first prompt, and of what a tool answers
REMEMBERED = 100
SAMPLING = Sampling()


class Session(Struct):
    spec: SessionSpec
    phase: str = "open"
    turns: list[Turn] = field(default_factory=list)
    calls: set[asyncio.Task[Any]] = field(default_factory=set)
    active: float = 0.0
    begun: int = 0


class SimulatedGateway:
    """Of sessions that ended, the latest are kept; a real one keeps them on disk."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.aborted = 0
        self._sessions: dict[str, Session] = {}
        self._ended: dict[str, None] = {}
        self._loop = asyncio.get_running_loop()

    async def call(self, session_id: str, tokens: int, *, dying: bool = False) -> None:
        """A model call of an agent; one of a dying agent ends in the middle."""
        session = self._session(session_id)
        if session.phase != "open":
            raise Unavailable(f"session {session_id} is {session.phase}")
        me = asyncio.current_task()
        assert me is not None
        session.calls.add(me)
        session.begun += 1
        try:
            versions = await self.engine.sample(tokens)
        finally:
            session.calls.discard(me)
            session.active = self._loop.time()
        if tokens:
            status = TurnStatus.ABORTED if dying else TurnStatus.COMMITTED
            session.turns.append(_turn(session, session_id, tokens, versions, status))

    async def open(self, spec: SessionSpec) -> SessionCredentials:
        assert spec.id is not None
        session = self._sessions.setdefault(spec.id, Session(spec, active=self._loop.time()))
        if session.spec != spec:
            raise Conflict(f"session {spec.id} was opened with another spec")
        base = f"http://gateway.invalid/s/{spec.id}"
        return SessionCredentials(
            id=spec.id, api_key=f"key-{spec.id}", base_url=base, openai_base_url=f"{base}/v1"
        )

    async def state(self, session_id: str) -> SessionState:
        session = self._session(session_id)
        spans = [span for turn in session.turns for span in turn.versions]
        return SessionState(
            id=session_id,
            phase=session.phase,
            rollout_id=session.spec.rollout_id,
            attempt=session.spec.attempt,
            group_id=session.spec.group_id,
            calls=session.begun,
            turns=len(session.turns),
            branches=1,
            tokens={"sampled": sum(len(turn.token_ids) for turn in session.turns)},
            dangling=0,
            versions=(min(s.low for s in spans), max(s.high for s in spans)) if spans else None,
            rewards=[],
            created=0.0,
            last_activity=session.active,
            in_flight=len(session.calls),
            idle_s=0.0 if session.calls else self._loop.time() - session.active,
        )

    async def states(self, session_ids: Sequence[str]) -> dict[str, SessionState]:
        return {one: await self.state(one) for one in session_ids if one in self._sessions}

    async def version(self) -> int:
        return self.engine.version

    async def abort(self, session_id: str, reason: str) -> None:
        session = self._session(session_id)
        if session.phase == "open":
            self._end(session_id, "aborted")
            self.aborted += 1
            for call in list(session.calls):
                call.cancel()

    async def finalize(self, session_id: str) -> SessionRecord:
        session = self._session(session_id)
        if session.phase == "open":
            self._end(session_id, "completed")
        withheld = {turn.id: session.phase for turn in session.turns} if session.phase == "aborted" else {}
        assembled = trajectories.linear(TurnTree(session.turns), withheld)
        return SessionRecord(
            trajectories=assembled.trajectories, excluded=assembled.excluded, turns=tuple(session.turns)
        )

    async def submission(self, session_id: str) -> None:
        """Its agents give their own rewards."""

    async def publish(self, policy: Policy, path: str) -> None:
        if policy.version < self.engine.version:
            raise Conflict(f"version {policy.version} is lower than {self.engine.version}")
        if policy.version > self.engine.version:
            self.engine.publish(policy.version)

    def _session(self, session_id: str) -> Session:
        if session_id not in self._sessions:
            raise NotFound(f"no session {session_id}")
        return self._sessions[session_id]

    def _end(self, session_id: str, phase: str) -> None:
        self._sessions[session_id].phase = phase
        self._ended[session_id] = None
        if len(self._ended) > REMEMBERED:
            oldest = next(iter(self._ended))
            del self._ended[oldest], self._sessions[oldest]


def _turn(
    session: Session, session_id: str, tokens: int, versions: tuple[VersionSpan, ...], status: TurnStatus
) -> Turn:
    parent = session.turns[-1].id if session.turns else None
    return Turn(
        id=f"{session_id}-{len(session.turns)}",
        root=f"{session_id}-0",
        parent=parent,
        delta_ids=IDS[:REPLY] if parent else IDS[:PROMPT],
        token_ids=IDS[:tokens],
        logprobs=LOGPROBS[:tokens],
        versions=versions,
        finish_reason=FinishReason.STOP if status is TurnStatus.COMMITTED else None,
        status=status,
        sampling=SAMPLING,
    )


class SimulatedRuntime:
    """Agents that call the model, use tools, and sometimes die. All of them are tasks of this loop."""

    def __init__(self, habits: Habits, seed: int, gateway: SimulatedGateway, transport: Transport) -> None:
        self._habits, self._seed = habits, seed
        self._gateway, self._transport = gateway, transport
        self._attempts = AttemptTable()
        self._agents: dict[str, asyncio.Task[None]] = {}
        self.launched = self.died = self.lost = 0  # attempts, those that died, and what those had sampled
        self.last_first = 0.0  # when the last rollout began, retries not counted

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(isolation="none")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for agent in list(self._agents.values()):
            agent.cancel()
        await asyncio.gather(*self._agents.values(), return_exceptions=True)

    async def check(self) -> None:
        """Always there."""

    async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        if not self._attempts.begin(attempt.session_id):
            return
        self.launched += 1
        if attempt.n == 1:
            self.last_first = asyncio.get_running_loop().time()
        invocation = wire.read_payload(payload)
        agent = asyncio.create_task(self._live(invocation), name=f"agent {attempt.session_id}")
        self._agents[attempt.session_id] = agent
        agent.add_done_callback(lambda _: self._gone(attempt.session_id))

    async def adopt(self, attempt: Attempt) -> bool | None:
        return self._attempts.is_running(attempt.session_id)

    async def wait(self, attempt: Attempt) -> Exit:
        return await self._attempts.wait(attempt.session_id)

    async def status(self, attempt: Attempt) -> SessionStatus:
        running = self._attempts.is_running(attempt.session_id)
        return SessionStatus(session_id=attempt.session_id, phase=Phase.RUNNING if running else Phase.UNKNOWN)

    async def list(self) -> list[SessionStatus]:
        return [SessionStatus(session_id=session_id, phase=Phase.RUNNING) for session_id in self._attempts]

    async def logs(self, attempt: Attempt) -> str:
        return ""

    async def stop(self, attempt: Attempt) -> None:
        if agent := self._agents.get(attempt.session_id):
            agent.cancel()
            await asyncio.wait([agent])
        self._attempts.record_exit(attempt.session_id, failed_exit("stopped", Reason.CANCELLED))

    def _gone(self, session_id: str) -> None:
        del self._agents[session_id]
        self._attempts.record_exit(session_id, failed_exit(f"{session_id} was ended", Reason.CANCELLED))

    async def _live(self, invocation: wire.Invocation) -> None:
        life = life_of(self._habits, self._seed, invocation.rollout_id, invocation.attempt)
        left = life.dies_after
        with contextlib.suppress(Unavailable):  # its session was taken away
            for turn, tool in zip(life.turns, (*life.tools, 0.0), strict=True):
                if left is not None and left <= turn:
                    await self._gateway.call(invocation.session_id, left, dying=True)
                    self.died += 1
                    self.lost += life.dies_after or 0
                    died = failed_exit(f"the sandbox of {invocation.session_id} died", Reason.DIED)
                    return self._attempts.record_exit(invocation.session_id, died)
                left = None if left is None else left - turn
                await self._gateway.call(invocation.session_id, turn)
                await asyncio.sleep(tool)
            outcome = Outcome(
                rollout_id=invocation.rollout_id, attempt=invocation.attempt, reward=life.reward
            )
            await self._transport.deliver(invocation, wire.OutcomeRecord.of(invocation, outcome))
        return self._attempts.record_exit(invocation.session_id, Exit())


class Step(Struct, frozen=True, kw_only=True):
    """What a simulated step was given."""

    at: float
    version: int
    groups: tuple[str, ...]
    rollouts: tuple[str, ...]
    lengths: tuple[int, ...]
    stalest: int


class SimulatedTrainer:
    """Looks at what it is given and lets the time of a step pass. `spend` blocks the thread for it."""

    def __init__(self, seconds: float, engine: Engine, spend: Callable[[float], None]) -> None:
        self.engine, self._seconds, self._spend = engine, seconds, spend
        self.steps: list[Step] = []
        self.tokens = 0

    def step(self, groups: Sequence[Group]) -> StepReport:
        version = self.engine.version
        trained = [f for g in groups for f in g.finished if f.outcome.reward_or_floor(0.0) is not None]
        lows = [span.low for f in trained for t in f.trajectories for span in t.versions]
        step = Step(
            at=self.engine.now,
            version=version,
            groups=tuple(g.id for g in groups),
            rollouts=tuple(f.rollout.id for f in trained),
            lengths=tuple(sum(t.owned for t in f.trajectories) for f in trained),
            stalest=version - min(lows, default=version),
        )
        self.steps.append(step)
        self.tokens += sum(step.lengths)
        self._spend(self._seconds)
        return StepReport(rollouts=len(trained), tokens=sum(step.lengths))

    def export(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)

    def save(self, directory: Path) -> None:
        (directory / "steps").write_text(str(len(self.steps)))

    def restore(self, directory: Path) -> None:
        raise NotImplementedError("a simulation is run from its beginning")
