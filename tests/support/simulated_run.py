"""A training run in simulated time, with a verifier and components that a script makes faulty.

Real: rollout runner, group scheduler, training loop, run state, rollout store, run directory, engine pool and
transport. Written here: a gateway in memory, agents and verifiers as tasks of the event loop, a sandbox in
memory, and a trainer that records its groups.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from msgspec import Struct, field

from afield import trajectories, wire
from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.errors import (
    Conflict,
    InfrastructureFailure,
    NotFound,
    RolloutFailure,
    TaskFailure,
    Unavailable,
    VerifierFailure,
)
from afield.gateway.engine_pool import EnginePool
from afield.interfaces import (
    Capabilities,
    ExecResult,
    Exit,
    GenerateRequest,
    SessionCredentials,
    SessionRecord,
    SessionSpec,
    SessionState,
    SessionStatus,
    StepReport,
    Transport,
)
from afield.orchestrator.config import RolloutConfig
from afield.orchestrator.deadlines import Deadlines
from afield.orchestrator.groups import GroupRunner, GroupScheduler, Schedule, StalenessWindow
from afield.orchestrator.rollout import RolloutRunner
from afield.orchestrator.state import RolloutStore, RunDirectory, RunState
from afield.orchestrator.training_loop import LoopConfig, TrainingLoop
from afield.runtimes.base import AttemptTable, failed_exit
from afield.sdk.classify import attributed
from afield.transports.stores.memory import MemoryTransport
from afield.turn_tree import TurnTree
from afield.types import (
    Attempt,
    Failure,
    FailureKind,
    FinishReason,
    Group,
    Outcome,
    Policy,
    Reason,
    Rollout,
    RolloutResult,
    Sampling,
    Task,
    Turn,
    TurnStatus,
    VersionSpan,
)
from afield.wire import Invocation, OutcomeRecord, Submission
from support.faults import (
    FaultyEngine,
    FaultyGateway,
    FaultyRuntime,
    FaultySandbox,
    FaultyTrainer,
    FaultyTransport,
    Script,
    Scripts,
)
from support.virtual_time import VirtualLoop

EXP = "faults"
TASKS, ROLLOUTS, BATCH = 4, 8, 2  # 32 rollouts in two steps
ANSWER = ScriptedReply(token_ids=(11, 12, 13), chunks=(1,), delay_s=0.5)
PROMPT = (1, 2, 3)
THINKS_S = 2.0  # an agent between two calls
GRADES_S = 1.0


class Session(Struct):
    """What the gateway knows of one session."""

    spec: SessionSpec
    phase: str = "open"
    turns: list[Turn] = field(default_factory=list)
    calls: set[asyncio.Task[Any]] = field(default_factory=set)
    begun: int = 0
    active: float = 0.0
    alive: float | None = None
    submission: Submission | None = None
    failed: list[Failure] = field(default_factory=list)
    outcome: Outcome | None = None


class SmallGateway:
    """Sessions in memory, sampling through a pool, and outcomes that go on to the transport."""

    def __init__(self, pool: EnginePool, transport: Transport) -> None:
        self._pool = pool
        self._transport = transport
        self.sessions: dict[str, Session] = {}
        self._bringing: set[asyncio.Task[None]] = set()

    # --- what agents and verifiers use -----------------------------------------------------------

    async def call(self, session_id: str) -> None:
        """One model call of an agent."""
        session = self._session(session_id)
        if session.phase != "open":
            raise Unavailable(f"session {session_id} is {session.phase}")
        session.begun += 1
        task = asyncio.current_task()
        assert task is not None
        session.calls.add(task)
        ids: list[int] = []
        logprobs: list[float] = []
        turn_id = f"t{session.begun}"
        call = GenerateRequest(
            id=f"{session_id}/{turn_id}",
            session_id=session_id,
            prompt_ids=PROMPT,
            sampling=Sampling(),
            max_tokens=64,
            stop_ids=(),
            stream=True,
        )
        low = high = 0
        try:
            async for chunk in self._pool.generate(call):
                ids += chunk.token_ids
                logprobs += chunk.logprobs
                low, high = chunk.low, chunk.high
        finally:
            session.calls.discard(task)
            session.active = _now()
        before = session.turns[-1] if session.turns else None
        session.turns.append(
            Turn(
                id=turn_id,
                root=before.root if before else turn_id,
                parent=before.id if before else None,
                delta_ids=PROMPT,
                token_ids=tuple(ids),
                logprobs=tuple(logprobs),
                versions=(VersionSpan(0, len(ids), low, high),),
                finish_reason=FinishReason.STOP,
                status=TurnStatus.COMMITTED,
                sampling=Sampling(),
            )
        )

    def beat(self, session_id: str) -> None:
        self._session(session_id).alive = _now()

    def hand_in(self, session_id: str, failure: Failure | None) -> None:
        session = self._session(session_id)
        if session.phase != "open":
            return
        session.phase = "completed"
        if failure is None:
            session.submission = Submission(artifacts={"answer": "yes"})
        else:
            self._settle(session, wire.failed(*_named(session.spec), failure))

    def grade(self, session_id: str, reward: float | None, failure: Failure | None) -> None:
        session = self._session(session_id)
        if session.outcome is not None:
            return
        if failure is None:
            rollout_id, attempt = _named(session.spec)
            self._settle(session, Outcome(rollout_id=rollout_id, attempt=attempt, reward=reward))
        else:
            session.failed.append(failure)
            if len(session.failed) >= session.spec.verdicts:
                self._settle(session, wire.failed(*_named(session.spec), failure))

    def _settle(self, session: Session, outcome: Outcome) -> None:
        session.outcome = outcome
        task = asyncio.create_task(self._bring(session, outcome))
        self._bringing.add(task)
        task.add_done_callback(self._bringing.discard)

    async def _bring(self, session: Session, outcome: Outcome) -> None:
        """To the store, until it answers: as the gateway's outbox does."""
        rollout_id, attempt = _named(session.spec)
        invocation = Invocation(
            exp_id=EXP,
            input_id=session.spec.input_id or "",
            rollout_id=rollout_id,
            attempt=attempt,
            group_id=session.spec.group_id or "",
            session_id=outcome.session_id,
            base_url="http://gateway.invalid",
            api_key="key",
            model_id="policy",
            outcome_url="http://gateway.invalid/outcome",
        )
        while True:
            try:
                async with asyncio.timeout(20):
                    await self._transport.deliver(invocation, OutcomeRecord.of(invocation, outcome))
                return
            except Exception:  # noqa: BLE001  it is tried until it is taken
                await asyncio.sleep(1)

    async def close(self) -> None:
        for task in list(self._bringing):
            task.cancel()
        await asyncio.gather(*self._bringing, return_exceptions=True)

    # --- what collectors and trainers use --------------------------------------------------------

    async def open(self, spec: SessionSpec) -> SessionCredentials:
        assert spec.id is not None
        session = self.sessions.setdefault(spec.id, Session(spec, active=_now()))
        if session.spec != spec:
            raise Conflict(f"session {spec.id} was opened with another spec")
        base = f"http://gateway.invalid/s/{spec.id}"
        return SessionCredentials(
            id=spec.id, api_key="key", base_url=base, openai_base_url=f"{base}/v1", verifier_key="verifier"
        )

    async def state(self, session_id: str) -> SessionState:
        session = self._session(session_id)
        rollout_id, attempt = _named(session.spec)
        return SessionState(
            id=session_id,
            phase=session.phase,
            rollout_id=rollout_id,
            attempt=attempt,
            group_id=session.spec.group_id,
            calls=session.begun,
            turns=len(session.turns),
            branches=1,
            tokens={"sampled": sum(len(turn.token_ids) for turn in session.turns)},
            dangling=0,
            versions=None,
            rewards=[],
            graded=session.outcome is not None and not session.outcome.failure,
            failed_verdicts=tuple(session.failed),
            created=0.0,
            last_activity=session.active,
            in_flight=len(session.calls),
            idle_s=0.0 if session.calls else _now() - session.active,
            unseen_s=None if session.alive is None else _now() - session.alive,
            waited_s=self._pool.queue_time.waited_s(session_id),
        )

    async def states(self, session_ids: Sequence[str]) -> dict[str, SessionState]:
        return {one: await self.state(one) for one in session_ids if one in self.sessions}

    async def version(self) -> int:
        return self._pool.stats()["version"]

    async def abort(self, session_id: str, reason: str) -> None:
        session = self._session(session_id)
        if session.phase in ("open", "completed"):
            session.phase = "aborted"
            for call in list(session.calls):
                call.cancel()

    async def finalize(self, session_id: str) -> SessionRecord:
        session = self._session(session_id)
        excluded = {turn.id: session.phase for turn in session.turns} if session.phase == "aborted" else {}
        built = trajectories.linear(TurnTree(session.turns), excluded)
        return SessionRecord(
            trajectories=built.trajectories, excluded=built.excluded, turns=tuple(session.turns)
        )

    async def submission(self, session_id: str) -> Submission | None:
        return self._session(session_id).submission

    async def publish(self, policy: Policy, path: str) -> None:
        await self._pool.load(policy.version, path)

    def _session(self, session_id: str) -> Session:
        if session_id not in self.sessions:
            raise NotFound(f"no session {session_id}")
        return self.sessions[session_id]


class SmallRuntime:
    """Runs `work` for each attempt, as a task of this loop."""

    def __init__(self, work: Callable[[Invocation], Awaitable[None]]) -> None:
        self._work = work
        self._attempts = AttemptTable()
        self._running: dict[str, asyncio.Task[None]] = {}
        self.launched: Counter[str] = Counter()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(isolation="none")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def check(self) -> None:
        """Always there."""

    async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        session_id = attempt.session_id
        if not self._attempts.begin(session_id):
            return
        self.launched[attempt.rollout_id] += 1
        invocation = wire.read_payload(payload)
        task = self._running[session_id] = asyncio.create_task(self._live(invocation, session_id))
        task.add_done_callback(lambda _: self._running.pop(session_id, None))

    async def _live(self, invocation: Invocation, name: str) -> None:
        try:
            await self._work(invocation)
        finally:
            self._attempts.record_exit(name, Exit())

    async def adopt(self, attempt: Attempt) -> bool | None:
        return self._attempts.is_running(attempt.session_id)

    async def wait(self, attempt: Attempt) -> Exit:
        return await self._attempts.wait(attempt.session_id)

    async def stop(self, attempt: Attempt) -> None:
        self._attempts.record_exit(attempt.session_id, failed_exit("stopped", Reason.CANCELLED))
        if task := self._running.get(attempt.session_id):
            task.cancel()

    async def status(self, attempt: Attempt) -> SessionStatus:
        return self._attempts.status(attempt.session_id)

    async def list(self) -> list[SessionStatus]:
        return [self._attempts.status(session_id) for session_id in self._attempts]

    async def logs(self, attempt: Attempt) -> str:
        return ""


class SmallSandbox:
    """Files in memory; a command is the path of a file, and prints it."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._files.clear()

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float = 600.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        path = command if isinstance(command, str) else command[0]
        data = self._files.get(path)
        return ExecResult(exit_code=1) if data is None else ExecResult(exit_code=0, stdout=data.decode())

    async def upload(self, path: str, data: bytes) -> None:
        self._files[path] = data

    async def download(self, path: str) -> bytes:
        if path not in self._files:
            raise NotFound(f"there is no {path}")
        return self._files[path]


class SmallTrainer:
    """Notes what it is given. `restore` forgets what came after the checkpoint."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, ...]] = []

    @property
    def context(self) -> int | None:
        return None

    def step(self, groups: Sequence[Group]) -> StepReport:
        finished = [f for group in groups for f in group.finished]
        carrying = [f for f in finished if f.outcome.reward_or_floor(0.0) is not None]
        self.steps.append(tuple(f.rollout.id for f in carrying))
        return StepReport(
            rollouts=len(carrying), tokens=sum(t.owned for f in carrying for t in f.trajectories)
        )

    def export(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)

    def save(self, directory: Path) -> None:
        lines = [",".join(step) for step in self.steps]
        (directory / "steps").write_text("\n".join(lines))

    def restore(self, directory: Path) -> None:
        self.steps = [tuple(line.split(",")) for line in (directory / "steps").read_text().splitlines()]


class Told(Struct):
    """A watcher that remembers what ended, and how."""

    failures: dict[str, list[Failure]] = field(default_factory=dict)

    def attempt_ended(self, rollout: Rollout, outcome: Outcome, will_retry: bool) -> None:
        if outcome.failure:
            self.failures.setdefault(rollout.id, []).append(outcome.failure)

    def rollout_finished(self, result: RolloutResult) -> None: ...


class Result(Struct, frozen=True, kw_only=True):
    """What a run came to. `finished` has every rollout as the run directory shows it."""

    trained: Counter[str]
    finished: dict[str, RolloutResult]
    failures: dict[str, list[Failure]]
    seconds: float

    @property
    def others(self) -> Callable[[str], list[str]]:
        return lambda rollout: [one for one in every_rollout() if one != rollout]


def every_rollout() -> list[str]:
    return [f"{EXP}-e0-t{task}-r{k}" for task in range(TASKS) for k in range(ROLLOUTS)]


def plan(**values: Any) -> RolloutConfig:
    deadlines = Deadlines(
        attempt_timeout_s=80.0,
        launch_timeout_s=20.0,
        verifier_timeout_s=25.0,
        upload_timeout_s=5.0,
        teardown_timeout_s=10.0,
    )
    usual: dict[str, Any] = {"exp_id": EXP, "model_id": "policy", "rollouts": ROLLOUTS, "quorum": 2}
    usual |= {"concurrency": 64, "deadlines": deadlines, "deliver": "gateway", "separate_verifier": True}
    usual |= {"retries": {FailureKind.TASK: 1, FailureKind.VERIFIER: 1, FailureKind.INFRASTRUCTURE: 1}}
    return RolloutConfig(**usual | {"unavailable_timeout_s": 50.0, "call_timeout_s": 15.0} | values)


class Parts:
    """The parts of one run, faulty as the script says. `store` outlives a run that is ended and resumed."""

    def __init__(
        self,
        script: Script | Scripts,
        store: MemoryTransport,
        gateway: SmallGateway | None = None,
        stuck: str | None = None,
    ) -> None:
        self.script = script
        self._stuck = stuck  # the session whose agent never ends by itself
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.transport = FaultyTransport(store, script)
        self.pool = EnginePool({"engine": FaultyEngine(ScriptedEngine(lambda _: ANSWER), script)})
        self.inner = SmallGateway(self.pool, self.transport)
        if gateway is not None:
            self.inner.sessions = gateway.sessions
        self.gateway = FaultyGateway(self.inner, script)
        self.agents = FaultyRuntime(SmallRuntime(self.agent), script, "Runtime")
        self.verifiers = FaultyRuntime(SmallRuntime(self.verifier), script, "Verifiers")
        self.trainer = FaultyTrainer(SmallTrainer(), script, loop.spend)

    async def agent(self, invocation: Invocation) -> None:
        """Two model calls, and something handed in; what it raises is attributed as the SDK does it."""
        session_id = invocation.session_id
        failure: Failure | None = None
        try:
            with attributed(TaskFailure):
                for _ in range(2):
                    self.inner.beat(session_id)
                    await self._model(session_id)
                    await asyncio.sleep(THINKS_S)
                if session_id == self._stuck:
                    await asyncio.Event().wait()
        except RolloutFailure as error:
            failure = error.failure
        self.inner.hand_in(session_id, failure)

    async def _model(self, session_id: str) -> None:
        """What a client library makes of an engine that does not answer."""
        try:
            await self.inner.call(session_id)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise InfrastructureFailure(f"the model did not answer: {error}", Reason.ENGINE) from error

    async def verifier(self, invocation: Invocation) -> None:
        session_id = Attempt(invocation.rollout_id, (invocation.attempt - 1) % 1000 + 1).session_id
        reward: float | None = None
        failure: Failure | None = None
        try:
            with attributed(VerifierFailure):
                box = FaultySandbox(SmallSandbox(), self.script, invocation.rollout_id)
                async with box:
                    await box.upload("answer", b"yes")
                    ran = await box.exec("answer")
                    reward = float(ran.stdout == "yes" and await box.download("answer") == b"yes")
                await asyncio.sleep(GRADES_S)
        except RolloutFailure as error:
            failure = error.failure
        self.inner.grade(session_id, reward, failure)


async def run(place: Path, parts: Parts, **values: Any) -> Result:
    """Run from the state of the run directory to the last step. Raises what ends the run."""
    record, told = RunDirectory(place), Told()
    config = plan(**values)
    tasks = [Task(f"t{n}", {}) for n in range(TASKS)]
    schedule = Schedule(tasks, EXP, 0, shuffle=False)
    window = StalenessWindow(mode="sync", groups=TASKS, batch=BATCH)
    with RunState(record.run_state) as run_state:
        stores: dict[str, Any] = {"run_state": run_state, "rollout_store": RolloutStore(record.rollout_store)}
        rollout_runner = RolloutRunner(
            config,
            gateway=parts.gateway,
            runtime=parts.agents,
            transport=parts.transport,
            observer=told,
            verifiers=parts.verifiers,
            **stores,
        )
        training_loop = TrainingLoop(
            window,
            LoopConfig(policy="policy"),
            epoch_of=schedule.epoch,
            trainer=parts.trainer,
            gateway=parts.gateway,
            run=record,
            on_step=lambda _: None,
            **stores,
        )
        async with parts.pool, parts.transport, parts.agents, parts.verifiers:
            try:
                async with rollout_runner:
                    group_runner = GroupRunner(config, rollout_runner, stores["rollout_store"])
                    scheduler = GroupScheduler(window, schedule, group_runner=group_runner, **stores)
                    async with asyncio.TaskGroup() as tasks_of_run:
                        tasks_of_run.create_task(scheduler.run())
                        tasks_of_run.create_task(training_loop.run())
            finally:
                await parts.inner.close()
    return result(record, told)


def result(record: RunDirectory, told: Told) -> Result:
    state = record.last_state()
    assert state is not None
    finished = {f.rollout.id: f for step in record.steps() for f in record.read_rollouts(step)}
    trained: Counter[str] = Counter()
    for step in record.steps():
        rows = record.read_rollouts(step)
        trained.update(f.rollout.id for f in rows if f.outcome.reward_or_floor(0.0) is not None)
    return Result(trained=trained, finished=finished, failures=told.failures, seconds=_now())


def _named(spec: SessionSpec) -> tuple[str, int]:
    assert spec.rollout_id is not None and spec.attempt is not None
    return spec.rollout_id, spec.attempt


def _now() -> float:
    return asyncio.get_running_loop().time()
