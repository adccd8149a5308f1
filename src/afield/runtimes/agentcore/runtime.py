"""AgentCore runtime: one AWS Bedrock AgentCore session per attempt.

1. Also works with a compatible server. The service's session id derives from afield's, so that any process
with the same options can stop a session.
2. The service neither lists sessions nor reports when an agent has finished. A table records the sessions;
outcomes and heartbeats detect the end.
3. A stop counts as done once the service has answered. A session that continues anyway is harmless: the
gateway has revoked its key, and its idle timeout or lifetime ends it.
4. Data for the agent travels in its payload, never in its environment.
5. Logs come from CloudWatch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

from msgspec import structs

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
from afield.runtimes.agentcore.api import (
    COLD_START_MARGIN,
    QUOTA_S,
    AgentCoreApi,
    AgentCoreNoAnswer,
    AgentCoreRefused,
    launch_error,
)
from afield.runtimes.agentcore.deploy import LONGEST_S, Deployed, check_options, deploy, find
from afield.runtimes.agentcore.sessions import SLACK_S, AgentCoreSession, InvokeState, SessionTable
from afield.runtimes.base import BaseRuntime
from afield.runtimes.invocations import check_accepted
from afield.settings.runtimes import AgentCoreOptions
from afield.types import Attempt, Reason

KEPT_CHARACTERS = 64 * 1024
PAGES = 50
LONGEST_DAYS = 2  # a session lasts at most 8 hours, and may span midnight


def log_group(entry: AgentCoreSession) -> str:
    return f"/aws/bedrock-agentcore/runtimes/{entry.arn.rpartition('/')[2]}-{entry.qualifier}"


async def session_log(api: AgentCoreApi, entry: AgentCoreSession) -> str:
    """Read a session's log from CloudWatch; empty if there is none yet.

    Raises Unavailable if it cannot be read.
    """
    began = datetime.fromtimestamp(entry.since, UTC)
    days = [f"{began + timedelta(days=n):%Y/%m/%d}" for n in range(LONGEST_DAYS)]
    filters: list[dict[str, Any]] = [
        {"logStreamNamePrefix": f"{day}/[runtime-logs-{entry.name}]"} for day in days
    ]
    if not api.local:
        filters.append({"filterPattern": f'"{entry.name}"', "startTime": int((entry.since - 60) * 1000)})
    try:
        for log_filter in filters:
            if text := await _text(api, logGroupName=log_group(entry), **log_filter):
                return text
    except (AgentCoreRefused, AgentCoreNoAnswer) as error:
        if isinstance(error, AgentCoreRefused) and error.code == "ResourceNotFoundException":
            return ""  # the log group does not exist before the first output
        remedy = "allow logs:FilterLogEvents for these credentials"
        raise Unavailable(
            f"the logs of {entry.session_id} are in {log_group(entry)}: {error}; {remedy}"
        ) from error
    return ""


async def _text(api: AgentCoreApi, **log_filter: Any) -> str:
    text, more = "", {}
    for _ in range(PAGES):
        page = await api.ask("filter_log_events", **log_filter, **more)
        text += "".join(f"{event['message'].rstrip()}\n" for event in page["events"])
        text = text[-KEPT_CHARACTERS:]
        if not page.get("nextToken"):
            break
        more = {"nextToken": page["nextToken"]}
    return text


log = logging.getLogger(__name__)

CONFLICT_S = 1.0
# Statuses that guarantee that no session has started.
NOT_BEGUN = frozenset({400, 401, 402, 403, 404, 429})
# Extra time for closing beyond what the stop rate needs, in seconds.
CLOSING_S = 60.0
LATE_S = (0.5, 1.0, 2.0, 4.0)  # pauses between retries of `_stop_late`, in seconds
PHASES = {
    InvokeState.ASKED: Phase.STARTING,
    InvokeState.TAKEN: Phase.RUNNING,
    InvokeState.STOPPED: Phase.ENDED,
}


class AgentCoreRuntime(BaseRuntime):
    """Runs agents on AgentCore.

    `name` is the run. `session_table` is the path of the session table that all processes of the run share.
    """

    def __init__(self, options: AgentCoreOptions, *, name: str, session_table: Path) -> None:
        super().__init__()
        self._options = options
        self._name = name
        self._table = SessionTable(session_table)
        self._api = AgentCoreApi(options)
        self._owned: set[str] = set()
        self._slot_free = asyncio.Event()
        self._finding = asyncio.Lock()
        self._deployed: Deployed | None = None
        self._lifetimes: dict[str, float] = {}  # longest lifetime of a session in seconds, by ARN

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
        self._attempts.cancel_all()
        self._slot_free.set()
        try:
            await self._stop_ours()
            if self._attempts.launches:
                # An invoke in progress may start its session after the stop; its launch then stops it again.
                await asyncio.wait(
                    self._attempts.launches.values(),
                    timeout=COLD_START_MARGIN * self._options.cold_start_s + sum(LATE_S),
                )
            for task in self._attempts.launches.values():
                task.cancel()
            await self._group.__aexit__(None, None, None)
        finally:
            self._api.close()
            self._table.close()

    # --- runtime interface -----------------------------------------------------------------------

    async def check(self) -> None:
        """Create or update the agent runtime if the options say so, and wait until it is ready."""
        options = self._options
        if options.arns and not (options.arn or options.agent_name):
            targets = [structs.replace(options, arn=arn) for arn in dict.fromkeys(options.arns.values())]
        else:
            targets = [options, *(structs.replace(options, arn=arn) for arn in options.arns.values())]
        for target in targets:
            check_options(target)
        await self._api.check()
        for target in targets:
            deployed = await deploy(self._api, target)
            self._lifetimes[deployed.arn] = deployed.lifetime_s
            if target is options:
                self._deployed = deployed

    async def adopt(self, attempt: Attempt) -> bool | None:
        """None for a session in the table: only heartbeats tell whether its agent works."""
        session_id = attempt.session_id
        if self._attempts.is_running(session_id):
            return True
        entry = self._table.get(session_id)
        if entry is None or not entry.alive:
            return False
        self._attempts.begin(session_id)
        self._owned.add(session_id)
        return None

    async def wait(self, attempt: Attempt) -> Exit:
        """Wait until the session is stopped or the runtime is closed.

        AgentCore does not report an agent's end.
        """
        return await self._attempts.wait(attempt.session_id)

    async def stop(self, attempt: Attempt) -> None:
        """Ask the service once to stop the session.

        Raises RateLimited, or a failure if the service did not answer; the session then stays in the table.
        """
        session_id = attempt.session_id
        self._attempts.record_stop(session_id)
        self._slot_free.set()
        entry = self._table.get(session_id)
        if entry is not None and not entry.alive:
            return
        if entry is None and session_id in self._owned:
            return  # the session never started
        if entry is None:
            for arn in await self._arns():
                await self._end(session_id, arn, self._options.qualifier)
        else:
            await self._end(session_id, entry.arn, entry.qualifier)

    async def status(self, attempt: Attempt) -> SessionStatus:
        entry = self._table.get(attempt.session_id)
        if entry is None:
            return SessionStatus(session_id=attempt.session_id, phase=Phase.UNKNOWN)
        return _status(entry)

    async def list(self) -> list[SessionStatus]:
        return [_status(entry) for entry in self._table.alive(self._name)]

    async def logs(self, attempt: Attempt) -> str:
        """Log from CloudWatch, with a delay of some seconds; a compatible server has no delay."""
        entry = self._table.get(attempt.session_id)
        return "" if entry is None else await session_log(self._api, entry)

    # --- launching -------------------------------------------------------------------------------

    async def _launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        session_id = attempt.session_id
        self._owned.add(session_id)
        try:
            body = _body(session_id, payload)
            entry = await self._recorded(session_id, await self._arn_of(payload))
            if entry.phase is InvokeState.ASKED:
                await self._invoke(entry, body)
        except RolloutFailure as failure:
            self._attempts.record_exit(session_id, Exit(failure.failure, lingers=True))
            raise
        if not self._attempts.is_running(session_id):
            await self._stop_late(entry)
        self._attempts.check_not_stopped(session_id)

    async def _recorded(self, session_id: str, arn: str) -> AgentCoreSession:
        """Wait until fewer than `options.sessions` sessions are alive, then record this one."""
        now, lifetime_s = time.time(), self._lifetimes.get(arn, LONGEST_S)
        wanted = AgentCoreSession(
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
        while True:
            self._attempts.check_not_stopped(session_id)
            if entry := self._table.note(wanted, most):
                break
            self._slot_free.clear()
            try:
                async with asyncio.timeout_at(end):
                    await self._slot_free.wait()
            except TimeoutError as error:
                message = f"{session_id} has to wait: sessions = {most} are alive"
                raise RateLimited(message, QUOTA_S) from error
        if not entry.alive:
            raise InfrastructureFailure(f"{session_id} was launched before, and has ended", Reason.CANCELLED)
        return entry

    async def _invoke(self, entry: AgentCoreSession, body: bytes) -> None:
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
                self._table.mark(entry.session_id, InvokeState.TAKEN)
                check_accepted(entry.session_id, answer, entry.arn)
                return
            except (AgentCoreRefused, AgentCoreNoAnswer) as error:
                conflict = isinstance(error, AgentCoreRefused) and error.status == 409
                if isinstance(error, AgentCoreRefused) and error.status in NOT_BEGUN:
                    self._table.forget(entry.session_id)
                    self._slot_free.set()
                if last or not conflict or not self._attempts.is_running(entry.session_id):
                    raise launch_error(error, entry.session_id, entry.arn) from error
            await asyncio.sleep(CONFLICT_S)

    async def _arn_of(self, payload: Mapping[str, Any]) -> str:
        """ARN of the agent runtime for a task row: that of its image, or the only one."""
        options = self._options
        image = payload.get(options.image_key) if options.image_key else None
        if image is None and (options.arn or options.agent_name):
            return await self._arn()
        if isinstance(image, str) and image in options.arns:
            return options.arns[image]
        raise TaskFailure(
            f"{options.image_key} = {image!r} of the task row has no agent runtime: add its ARN to"
            f" agentcore.arns, which has: {', '.join(options.arns) or 'nothing'}",
            Reason.LAUNCH,
        )

    async def _arns(self) -> list[str]:
        """ARNs of all agent runtimes that sessions may run on."""
        own = [await self._arn()] if self._options.arn or self._options.agent_name else []
        return list(dict.fromkeys([*own, *self._options.arns.values()]))

    async def _arn(self) -> str:
        """ARN of the agent runtime, looked up once by name."""
        if self._options.arn:
            return self._options.arn
        async with self._finding:
            if self._deployed is None:
                check_options(self._options)
                try:
                    runtime = await find(self._api, self._options.agent_name)
                except (AgentCoreRefused, AgentCoreNoAnswer) as error:
                    raise InfrastructureFailure(str(error), Reason.LAUNCH) from error
                if runtime is None:
                    raise UsageError(
                        f"there is no agent runtime named {self._options.agent_name!r}; check() makes it"
                    )
                self._deployed = Deployed(runtime["agentRuntimeArn"], LONGEST_S)
        return self._deployed.arn

    # --- stopping --------------------------------------------------------------------------------

    async def _stop_late(self, entry: AgentCoreSession) -> None:
        """Stop a session that started after it was stopped."""
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
        except AgentCoreRefused as error:
            # 404: the session does not exist or has ended.
            if error.status != 404:
                raise launch_error(error, session_id, arn) from error
        except AgentCoreNoAnswer as error:
            raise launch_error(error, session_id, arn) from error
        self._table.mark(session_id, InvokeState.STOPPED)
        self._owned.discard(session_id)
        self._slot_free.set()

    async def _stop_ours(self) -> None:
        """Stop all sessions that this process launched or adopted, at the stop rate."""
        left = [e.session_id for e in self._table.alive(self._name) if e.session_id in self._owned]
        limiter = LocalLimiter(RateLimits(rate_per_s=self._options.stop_rate))
        try:
            async with asyncio.timeout(CLOSING_S + len(left) / self._options.stop_rate):
                await asyncio.gather(*(self._surely_stop(session_id, limiter) for session_id in left))
        except TimeoutError:
            still = [e.session_id for e in self._table.alive(self._name) if e.session_id in self._owned]
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
    """Validate and encode a payload before a session is started; raises TaskFailure."""
    try:
        wire.read_payload(payload)
        return wire.encode(payload)
    except WireError as error:
        raise TaskFailure(f"the payload of {session_id}: {error}", Reason.LAUNCH) from error


def _status(entry: AgentCoreSession) -> SessionStatus:
    phase = PHASES[entry.phase] if entry.alive else Phase.ENDED
    where = f"{entry.name} of {entry.arn}"
    return SessionStatus(session_id=entry.session_id, phase=phase, where=where, since=entry.since)
