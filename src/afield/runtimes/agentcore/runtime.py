"""Agents on AWS Bedrock AgentCore, or a server that is compatible with it: one session per attempt.

A session's name there follows from its id alone, so that any process with the same options can stop it. The
service tells neither which sessions there are nor when an agent has ended: a ledger of our own does the one,
outcomes and signs of life do the other. A stop that was answered is believed, as nothing could confirm
it; a session that runs on nonetheless can do no harm, since the gateway has closed its key, and ends with
its idle timeout or lifetime, both finite. What an agent is told travels in its payload, never in its
environment.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

from afield import wire
from afield.errors import (
    AfieldError,
    InfrastructureFailure,
    RateLimited,
    RolloutFailure,
    TaskFailure,
    Unavailable,
    UsageError,
    WireError,
)
from afield.interfaces.runtime import Capabilities, Exit, Phase, SessionStatus
from afield.ratelimit import LocalLimiter, RateLimits
from afield.runtimes.agentcore.api import QUOTA_S, SLOW, Api, Refused, Silent, meaning
from afield.runtimes.agentcore.deploy import LONGEST_S, Deployed, check_options, deploy, find
from afield.runtimes.agentcore.sessions import SLACK_S, Entry, Noted, SessionLedger
from afield.runtimes.attempt_table import Attempts, broken
from afield.runtimes.invocations import check_taken
from afield.settings.runtimes import AgentCoreOptions
from afield.types import Attempt, Reason

KEPT_CHARACTERS = 64 * 1024
PAGES = 50
LONGEST_DAYS = 2  # a session lives 8 hours at most, and may see midnight


def log_group(entry: Entry) -> str:
    return f"/aws/bedrock-agentcore/runtimes/{entry.arn.rpartition('/')[2]}-{entry.qualifier}"


async def session_log(api: Api, entry: Entry) -> str:
    """Empty where there is none (yet). Raises Unavailable when CloudWatch does not let us see."""
    began = datetime.fromtimestamp(entry.since, UTC)
    days = [f"{began + timedelta(days=n):%Y/%m/%d}" for n in range(LONGEST_DAYS)]
    asked: list[dict[str, Any]] = [
        {"logStreamNamePrefix": f"{day}/[runtime-logs-{entry.name}]"} for day in days
    ]
    if not api.local:
        asked.append({"filterPattern": f'"{entry.name}"', "startTime": int((entry.since - 60) * 1000)})
    try:
        for which in asked:
            if text := await _text(api, logGroupName=log_group(entry), **which):
                return text
    except (Refused, Silent) as error:
        if isinstance(error, Refused) and error.code == "ResourceNotFoundException":
            return ""  # Nothing was ever printed there.
        remedy = "allow logs:FilterLogEvents for these credentials"
        raise Unavailable(
            f"the logs of {entry.session_id} are in {log_group(entry)}: {error}; {remedy}"
        ) from error
    return ""


async def _text(api: Api, **which: Any) -> str:
    text, more = "", {}
    for _ in range(PAGES):
        page = await api.ask("filter_log_events", **which, **more)
        text += "".join(f"{event['message'].rstrip()}\n" for event in page["events"])
        text = text[-KEPT_CHARACTERS:]
        if not page.get("nextToken"):
            break
        more = {"nextToken": page["nextToken"]}
    return text


log = logging.getLogger("afield.runtimes")

CONFLICT_S = 1.0
# Refused at the door: there is no session.
NOT_BEGUN = frozenset({400, 401, 402, 403, 404, 429})
# How long closing may take beyond what the rate of stops asks for.
CLOSING_S = 60.0
LATE_S = (0.5, 1.0, 2.0, 4.0)  # between tries to stop what began late
PHASES = {Noted.ASKED: Phase.STARTING, Noted.TAKEN: Phase.RUNNING, Noted.STOPPED: Phase.ENDED}


class AgentCoreRuntime:
    """`name` is the run's; `ledger` a file that all processes of the run share."""

    def __init__(self, options: AgentCoreOptions, *, name: str, ledger: Path) -> None:
        self._options = options
        self._name = name
        self._ledger = SessionLedger(ledger)
        self._api = Api(options)
        self._attempts = Attempts()
        self._launches: dict[str, asyncio.Task[AfieldError | None]] = {}
        self._ours: set[str] = set()
        self._room = asyncio.Event()
        self._finding = asyncio.Lock()
        self._deployed: Deployed | None = None
        self._open = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            isolation="machine",
            limits=frozenset({"time"}),
            exec=True,
            lists=True,
            reaches=True,
            outlives=True,
            tells_end=False,
            lingers=True,
        )

    async def __aenter__(self) -> Self:
        self._group = await asyncio.TaskGroup().__aenter__()
        self._open = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._open = False
        for session_id in self._attempts:
            said = f"{session_id}: the runtime was closed"
            self._attempts.settle(session_id, broken(said, Reason.CANCELLED))
        self._room.set()
        try:
            await self._stop_ours()
            if self._launches:
                # A call that is under way may start a session after its stop; the launch then ends it.
                await asyncio.wait(
                    self._launches.values(), timeout=SLOW * self._options.cold_start_s + sum(LATE_S)
                )
            for task in self._launches.values():
                task.cancel()
            await self._group.__aexit__(None, None, None)
        finally:
            self._api.close()
            self._ledger.close()

    # --- the verbs -------------------------------------------------------------------------------

    async def check(self) -> None:
        """Creates or updates the agent runtime where it is ours to do so, and waits until it is ready."""
        check_options(self._options)
        await self._api.check()
        self._deployed = await deploy(self._api, self._options)

    async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        if not self._open:
            raise RuntimeError("launch is called inside 'async with runtime'")
        await self._attempts.once(
            attempt.session_id,
            self._launches,
            lambda: self._group.create_task(self._launch(attempt, payload)),
        )

    async def adopt(self, attempt: Attempt) -> bool | None:
        """None where the ledger has it: whether its agent still works, only signs of life tell."""
        session_id = attempt.session_id
        if self._attempts.running(session_id):
            return True
        entry = self._ledger.get(session_id)
        if entry is None or not entry.alive:
            return False
        self._attempts.begin(session_id)
        self._ours.add(session_id)
        return None

    async def wait(self, attempt: Attempt) -> Exit:
        """Until it is stopped, or the runtime closed: an agent's own end is not told."""
        return await self._attempts.exit(attempt.session_id)

    async def stop(self, attempt: Attempt) -> None:
        """Asks the service once. Raises Throttled, or the failure of a stop that was not answered: such a
        session stays in the ledger.
        """
        session_id = attempt.session_id
        self._attempts.settle(session_id, broken(f"{session_id} was stopped", Reason.CANCELLED))
        self._room.set()
        entry = self._ledger.get(session_id)
        if entry is not None and not entry.alive:
            return
        if entry is None and session_id in self._ours:
            return  # It never began.
        if entry is None:
            await self._end(session_id, await self._arn(), self._options.qualifier)
        else:
            await self._end(session_id, entry.arn, entry.qualifier)

    async def status(self, attempt: Attempt) -> SessionStatus:
        entry = self._ledger.get(attempt.session_id)
        if entry is None:
            return SessionStatus(session_id=attempt.session_id, phase=Phase.UNKNOWN)
        return _live(entry)

    async def list(self) -> list[SessionStatus]:
        return [_live(entry) for entry in self._ledger.alive(self._name)]

    async def logs(self, attempt: Attempt) -> str:
        """From CloudWatch, where lines arrive some seconds late; from a compatible server at once."""
        entry = self._ledger.get(attempt.session_id)
        return "" if entry is None else await session_log(self._api, entry)

    # --- launching -------------------------------------------------------------------------------

    async def _launch(self, attempt: Attempt, payload: dict[str, Any]) -> AfieldError | None:
        session_id = attempt.session_id
        self._ours.add(session_id)
        try:
            body = _body(session_id, payload)
            entry = await self._noted(session_id)
            if entry.phase is Noted.ASKED:
                await self._invoke(entry, body)
        except RolloutFailure as failure:
            self._attempts.settle(session_id, Exit(failure.failure, lingers=True))
            return failure
        except AfieldError as error:
            # It was not taken, and may be asked for again.
            self._attempts.forget(session_id, broken(str(error), Reason.LAUNCH))
            return error
        if not self._attempts.running(session_id):
            await self._end_late(entry)
            return _unwanted(session_id)
        return None

    async def _noted(self, session_id: str) -> Entry:
        """In the ledger, once fewer sessions are alive than are allowed."""
        arn, now = await self._arn(), time.time()
        lifetime_s = self._deployed.lifetime_s if self._deployed else LONGEST_S
        wanted = Entry(
            session_id=session_id,
            name=wire.runtime_session_id(session_id),
            arn=arn,
            qualifier=self._options.qualifier,
            run=self._name,
            since=now,
            until=now + lifetime_s + SLACK_S,
        )
        most = self._options.sessions
        end = asyncio.get_running_loop().time() + QUOTA_S
        while self._attempts.running(session_id):
            if entry := self._ledger.note(wanted, most):
                break
            self._room.clear()
            try:
                async with asyncio.timeout_at(end):
                    await self._room.wait()
            except TimeoutError as error:
                said = f"{session_id} has to wait: sessions = {most} are alive"
                raise RateLimited(said, QUOTA_S) from error
        else:
            raise _unwanted(session_id)
        if not entry.alive:
            raise InfrastructureFailure(f"{session_id} was launched before, and has ended", Reason.CANCELLED)
        return entry

    async def _invoke(self, entry: Entry, body: bytes) -> None:
        for last in (False, True):
            try:
                answer = await self._api.invoke(
                    agentRuntimeArn=entry.arn,
                    qualifier=entry.qualifier,
                    runtimeSessionId=entry.name,
                    contentType="application/json",
                    accept="application/json",
                    payload=body,
                )
                self._ledger.mark(entry.session_id, Noted.TAKEN)
                check_taken(entry.session_id, answer, entry.arn)
                return
            except (Refused, Silent) as error:
                conflict = isinstance(error, Refused) and error.status == 409
                if isinstance(error, Refused) and error.status in NOT_BEGUN:
                    self._ledger.forget(entry.session_id)
                    self._room.set()
                if last or not conflict or not self._attempts.running(entry.session_id):
                    raise meaning(error, entry.session_id, entry.arn) from error
            await asyncio.sleep(CONFLICT_S)

    async def _arn(self) -> str:
        """Of the agent runtime; one that is known by name only is looked up once."""
        if self._options.arn:
            return self._options.arn
        async with self._finding:
            if self._deployed is None:
                check_options(self._options)
                try:
                    found = await find(self._api, self._options.agent_name)
                except (Refused, Silent) as error:
                    raise InfrastructureFailure(str(error), Reason.LAUNCH) from error
                if found is None:
                    raise UsageError(
                        f"there is no agent runtime named {self._options.agent_name!r}; check() makes it"
                    )
                self._deployed = Deployed(found["agentRuntimeArn"], LONGEST_S)
        return self._deployed.arn

    # --- stopping --------------------------------------------------------------------------------

    async def _end_late(self, entry: Entry) -> None:
        """One that began after it had been stopped: nobody else will ask again."""
        for pause_s in (*LATE_S, 0.0):
            try:
                await self._end(entry.session_id, entry.arn, entry.qualifier)
                return
            except AfieldError as error:
                if not pause_s or not isinstance(error, RateLimited):
                    log.warning("%s could not be stopped: %s", entry.session_id, error)
                    return
            await asyncio.sleep(pause_s)

    async def _end(self, session_id: str, arn: str, qualifier: str) -> None:
        try:
            await self._api.ask(
                "stop_runtime_session",
                agentRuntimeArn=arn,
                qualifier=qualifier,
                runtimeSessionId=wire.runtime_session_id(session_id),
            )
        except Refused as error:
            # 404: there is no such session, or it has ended.
            if error.status != 404:
                raise meaning(error, session_id, arn) from error
        except Silent as error:
            raise meaning(error, session_id, arn) from error
        self._ledger.mark(session_id, Noted.STOPPED)
        self._ours.discard(session_id)
        self._room.set()

    async def _stop_ours(self) -> None:
        """Everything this process launched or adopted and that was not stopped yet, at the rate of stops."""
        left = [e.session_id for e in self._ledger.alive(self._name) if e.session_id in self._ours]
        limiter = LocalLimiter(RateLimits(rate_per_s=self._options.stop_rate))
        try:
            async with asyncio.timeout(CLOSING_S + len(left) / self._options.stop_rate):
                await asyncio.gather(*(self._surely_stop(session_id, limiter) for session_id in left))
        except TimeoutError:
            still = [e.session_id for e in self._ledger.alive(self._name) if e.session_id in self._ours]
            log.warning("%d sessions could not be stopped: %s", len(still), ", ".join(still[:10]))

    async def _surely_stop(self, session_id: str, limiter: LocalLimiter) -> None:
        attempt = Attempt.from_session_id(session_id)
        while True:
            async with limiter.call_slot():
                try:
                    await self.stop(attempt)
                    return
                except RateLimited as error:
                    limiter.slow_down(error.retry_after_s, stop=True)
                except AfieldError as error:
                    log.warning("%s could not be stopped: %s", session_id, error)
                    return


def _body(session_id: str, payload: dict[str, Any]) -> bytes:
    """A payload that no agent would take costs no session."""
    try:
        wire.read_payload(payload)
        return wire.encode(payload)
    except WireError as error:
        raise TaskFailure(f"the payload of {session_id}: {error}", Reason.LAUNCH) from error


def _unwanted(session_id: str) -> InfrastructureFailure:
    return InfrastructureFailure(f"{session_id} was stopped before it started", Reason.CANCELLED)


def _live(entry: Entry) -> SessionStatus:
    phase = PHASES[entry.phase] if entry.alive else Phase.ENDED
    where = f"{entry.name} of {entry.arn}"
    return SessionStatus(session_id=entry.session_id, phase=phase, where=where, since=entry.since)
