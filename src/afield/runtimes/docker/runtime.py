"""Docker runtime: one container per attempt, with Docker or Podman.

1. The image serves `/invocations` and `/ping` and needs no changes. The container's name derives from the
session id, so repeated launches use one container and any process finds it.
2. One list call for all containers detects dead ones, with exit code and log tail. `/ping` detects agents
that have finished; their containers stay until `stop`.
3. Containers outlive a killed process: the next one adopts them, or `afield cleanup` removes them. `remove`
saves a container's log in `log_dir`.
4. `docker.loopback` lets containers reach this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Self

import aiohttp

from afield.errors import (
    AfieldError,
    InfrastructureFailure,
    RateLimited,
    RolloutFailure,
    Unavailable,
    UsageError,
)
from afield.interfaces.runtime import Capabilities, Exit, Phase, SessionStatus
from afield.runtimes import invocations
from afield.runtimes.base import BaseRuntime, image_of_row
from afield.runtimes.docker.engine import (
    RUN,
    SESSION,
    DockerEngine,
    EngineRefused,
    check_library,
    container_labels,
    container_name,
    describe_exit,
    enforced_limits,
    gateway_of,
    networks_of,
    phase_of,
    status_from_inspect,
    status_from_row,
)
from afield.runtimes.docker.loopback import LoopbackRelays, loopback_ports, rewrite_addresses
from afield.runtimes.invocations import NO_ANSWER, PingResponse
from afield.settings.runtimes import ContainerOptions
from afield.types import Attempt, Reason
from afield.utils.backoff import Backoff

log = logging.getLogger(__name__)

LOG_LINES = 10_000
"""Largest number of lines of a container's log that are kept."""
EXIT_POLL_S = 0.1
"""Seconds between two checks whether a container has ended."""
KEEPALIVE_S = 3.0
"""Seconds that idle connections are kept; below the 5 s after which common servers close them."""
PING_S = 5.0
"""Timeout of a ping, in seconds."""
LIST_INTERVAL_S = 10.0
"""Seconds between two lists of all containers; a failed ping triggers a list at once."""
FIRST_PING_S, MAX_PING_INTERVAL_S = 0.02, 0.5
"""Seconds between two pings of a starting container: first value and maximum."""
NETWORKS_WITHOUT_ADDRESS = ("", "host", "none")
"""Networks in which a container has no address of its own."""


class RunContainers:
    """Containers of one run, by session id.

    Never touches a container of another run, even with the same session id. `log_dir` keeps the logs of
    removed containers.
    """

    def __init__(self, engine: DockerEngine, options: ContainerOptions, run: str, log_dir: Path) -> None:
        self._engine = engine
        self._options = options
        self._run = run
        self._log_dir = log_dir

    async def create(self, session_id: str, image: str) -> None:
        """Create the session's container; raises EngineRefused if it exists."""
        command = list(self._options.command) or None
        labels = container_labels(self._run, session_id)
        name = container_name(session_id)
        await self._engine.create(name, labels, serve=True, image=image, command=command)

    async def find(self, session_id: str) -> dict[str, Any] | None:
        """Return the engine's description of the session's container, or None.

        Raises EngineRefused if the container belongs to another run.
        """
        container = await self._engine.inspect(container_name(session_id))
        if container is None:
            return None
        run = (container["Config"].get("Labels") or {}).get(RUN)
        if run != self._run:
            message = f"container {container_name(session_id)} belongs to run {run!r}, not to {self._run!r}"
            raise EngineRefused(f"{message}; give rollouts other ids, or stop that run")
        return container

    async def check_running(self, session_id: str, watch_s: float = 0.0) -> dict[str, Any]:
        """Return the description of a running container.

        Raises InfrastructureFailure with the log tail if the container has ended, or ends within `watch_s`
        seconds.
        """
        end = asyncio.get_running_loop().time() + watch_s
        name = container_name(session_id)
        while True:
            container = await self.find(session_id)
            if container is None:
                raise InfrastructureFailure(
                    f"container {name} is gone: another program removed it", Reason.DIED
                )
            if phase_of(container["State"]["Status"]) is Phase.ENDED:
                tail = await self._engine.logs(name)
                command = " ".join((container["Config"].get("Image", ""), *self._options.command))
                ending = describe_exit(container["State"], self._options.limits)
                message = f"container {name} ({command}) {ending}; its log ends: {tail}"
                raise InfrastructureFailure(message, Reason.DIED)
            if asyncio.get_running_loop().time() >= end:
                return container
            await asyncio.sleep(EXIT_POLL_S)

    async def list(self) -> list[SessionStatus]:
        """Status of all containers of the run, with one call of the engine."""
        rows = await self._engine.list(f"{RUN}={self._run}")
        return [status_from_row(row) for row in rows if SESSION in (row.get("Labels") or {})]

    async def logs(self, session_id: str) -> str:
        """Log of the container, or the copy that was saved when it was removed; empty without either."""
        if await self.find(session_id) is not None:
            return await self._engine.logs(container_name(session_id), LOG_LINES)
        with contextlib.suppress(FileNotFoundError):
            return self._log_path(session_id).read_text(errors="replace")
        return ""

    async def remove(self, session_id: str) -> None:
        """Save the log, then remove the container with all its processes; harmless if there is none."""
        try:
            container = await self.find(session_id)
        except EngineRefused as error:
            log.warning("%s was not stopped: %s", session_id, error)
            return
        if container is not None:
            await self._save_log(session_id)
            await self._engine.remove(container_name(session_id))

    def url(self, container: dict[str, Any] | None) -> str:
        """URL of the agent; empty while the container has no address."""
        if container is None:
            return ""
        published = (container["NetworkSettings"].get("Ports") or {}).get(f"{self._options.port}/tcp")
        if published:
            return f"http://{self._engine.bind.address}:{published[0]['HostPort']}"
        # Internal networks publish no ports, but this machine is part of them.
        address = next((n["IPAddress"] for n in networks_of(container) if n.get("IPAddress")), "")
        return f"http://{address}:{self._options.port}" if address and self._engine.is_local else ""

    async def _save_log(self, session_id: str) -> None:
        """Save the container's log in `log_dir`; an error is logged."""
        try:
            if output := await self._engine.logs(container_name(session_id), LOG_LINES):
                path = self._log_path(session_id)
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.write_text(output + "\n")
        except (OSError, EngineRefused) as error:
            log.warning("what %s printed was not kept: %s", session_id, error)

    def _log_path(self, session_id: str) -> Path:
        return self._log_dir / f"{session_id}.log"


class ContainerRuntime(BaseRuntime):
    """Runs agents in containers.

    - `options`: engine, image, limits and network of the containers.
    - `name`: the run; containers carry it as a label, and `list` returns only those.
    - `log_dir`: directory for the logs of removed containers.
    - `start_timeout_s`: seconds that a container has to answer its first ping.
    - `poll_s`: seconds between two pings of a working agent.
    """

    def __init__(
        self,
        options: ContainerOptions,
        *,
        name: str,
        log_dir: Path,
        start_timeout_s: float = 60.0,
        poll_s: float = 0.5,
    ) -> None:
        super().__init__()
        self._options = options
        self._name = name
        self._start_timeout_s = start_timeout_s
        self._poll_s = poll_s
        self._engine = DockerEngine(options)
        self._containers = RunContainers(self._engine, options, name, log_dir)
        self._relays = LoopbackRelays()
        self._urls: dict[str, str | None] = {}
        """URLs of agents whose containers this process removes on close; None until the URL is known."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._ping_failed = asyncio.Event()
        """Set when an agent does not answer, to list all containers at once."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            isolation="container",
            limits=enforced_limits(self._options.limits),
            exec=True,
            lists=True,
            reaches=True,
            outlives=True,
            lingers=True,
        )

    async def __aenter__(self) -> Self:
        check_library()
        await self._engine.__aenter__()
        self._http = await invocations.http_session(KEEPALIVE_S).__aenter__()
        self._group = await asyncio.TaskGroup().__aenter__()
        self._create_task(self._watch())
        self._open = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._open = False
        self._attempts.cancel_all()
        closing = asyncio.create_task(self._close())
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            # Finish closing, or containers would be left running; each engine call has a timeout.
            await closing
            raise

    async def _close(self) -> None:
        try:
            # Do not cancel launches: a container that is being created would not be removed.
            if self._attempts.launches:
                await asyncio.wait(self._attempts.launches.values())
            for task in self._tasks:
                task.cancel()
            await self._group.__aexit__(None, None, None)
            results = await asyncio.gather(*map(self._remove, list(self._urls)), return_exceptions=True)
            for error in results:
                if error is not None:
                    log.warning("a container of run %s may be left: %s", self._name, error)
        finally:
            await self._relays.__aexit__()
            await self._http.close()
            await self._engine.__aexit__()

    # --- runtime interface -----------------------------------------------------------------------

    async def check(self) -> None:
        options = self._options
        if options.network in NETWORKS_WITHOUT_ADDRESS or options.network.startswith("container:"):
            raise UsageError(
                f"network {options.network!r} gives containers no address of their own, and every one serves"
                f" port {options.port}; use 'bridge' or the name of a network"
            )
        try:
            await self._engine.call(lambda api: api.version())
        except Unavailable as error:
            remedy = "start it (podman system service --time 0, or dockerd), or set socket = 'unix:///...'"
            raise UsageError(f"{error}; {remedy}") from error
        for mount in options.mounts if self._engine.is_local else ():
            source = mount.partition(":")[0]
            if not await asyncio.to_thread(Path(source).exists):
                raise UsageError(f"mount {mount!r}: there is no {source} here")
        if options.image or not options.image_key:
            await self._engine.ensure_image(options.image)

    async def adopt(self, attempt: Attempt) -> bool | None:
        session_id = attempt.session_id
        if self._attempts.is_running(session_id):
            return True
        container = await self._containers.find(session_id)
        if container is None or phase_of(container["State"]["Status"]) is Phase.ENDED:
            return False
        url = self._containers.url(container)
        with contextlib.suppress(*NO_ANSWER):
            if url and not _is_working(await invocations.ping(self._http, url, PING_S), session_id):
                return False
        if self._attempts.begin(session_id):
            self._urls[session_id] = url
            self._create_task(self._follow(session_id))
        return self._attempts.is_running(session_id)

    async def stop(self, attempt: Attempt) -> None:
        session_id = attempt.session_id
        self._attempts.record_stop(session_id)
        if task := self._attempts.launches.get(session_id):
            await asyncio.wait([task])
        await self._remove(session_id)

    async def status(self, attempt: Attempt) -> SessionStatus:
        container = await self._containers.find(attempt.session_id)
        if container is None:
            return SessionStatus(session_id=attempt.session_id, phase=Phase.UNKNOWN)
        return status_from_inspect(attempt.session_id, container)

    async def list(self) -> list[SessionStatus]:
        return await self._containers.list()

    async def logs(self, attempt: Attempt) -> str:
        """Log of the container, or the copy that was saved when it was removed."""
        return await self._containers.logs(attempt.session_id)

    # --- launching -------------------------------------------------------------------------------

    async def _launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        """Start a container with the payload; after an error, remove it and record the failed launch."""
        session_id = attempt.session_id
        failure: AfieldError
        try:
            await self._start(attempt, payload)
            return
        except (RateLimited, RolloutFailure) as error:
            failure = error
        except (AfieldError, OSError) as error:
            failure = InfrastructureFailure(f"{session_id} was not launched: {error}", Reason.LAUNCH)
        self._attempts.record_failed_launch(session_id, failure)
        with contextlib.suppress(AfieldError):  # `stop` or closing tries again.
            await self._remove(session_id)
        raise failure

    async def _start(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        """Create the container, wait until it serves, post the payload and follow it."""
        session_id = attempt.session_id
        name = container_name(session_id)
        image = image_of_row(payload, self._options.image_key, self._options.image)
        await self._engine.ensure_image(image)
        self._urls[session_id] = None
        try:
            await self._containers.create(session_id, image)
        except EngineRefused:
            # An earlier launch may have created the container. Engines word that error differently, so look
            # it up.
            if await self._containers.find(session_id) is None:
                raise
        self._attempts.check_not_stopped(session_id)
        await self._engine.start(name)
        url, reply = await self._wait_serving(session_id)
        self._urls[session_id] = url
        # Otherwise an earlier launch has posted: the server lists no sessions, but is busy with this one.
        if reply.active is not None or reply.status == "Healthy":
            await self._post(attempt, url, await self._container_payload(session_id, payload))
        self._create_task(self._follow(session_id))

    async def _wait_serving(self, session_id: str) -> tuple[str, PingResponse]:
        """Wait until the container answers a ping; returns its URL and the answer."""
        backoff, url = Backoff(FIRST_PING_S, MAX_PING_INTERVAL_S), ""
        problem = "it has no address"
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while True:
                    self._attempts.check_not_stopped(session_id)
                    container = await self._containers.check_running(session_id)
                    if url := self._containers.url(container):
                        try:
                            return url, await invocations.ping(self._http, url, PING_S)
                        except NO_ANSWER as error:
                            problem = f"{type(error).__name__}: {error}"
                    await backoff.sleep()
        except TimeoutError:
            name = container_name(session_id)
            endpoint = f"GET {url}/ping" if url else f"port {self._options.port}"
            tail = await self._engine.logs(name)
            message = f"{endpoint} of {name} did not answer within {self._start_timeout_s:g} s: {problem}"
            raise InfrastructureFailure(f"{message}; its log ends: {tail}", Reason.LAUNCH) from None

    async def _container_payload(self, session_id: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Payload with addresses that work inside the container."""
        ports = loopback_ports(payload)
        if not ports:
            return payload
        if self._options.host:
            return rewrite_addresses(payload, self._options.host)
        if not self._engine.is_local:
            message = f"{session_id} is sent to 127.0.0.1, which {self._engine.url} cannot reach"
            remedy = "start the gateway with --host 0.0.0.0 --public-url http://THIS_MACHINE:PORT"
            raise InfrastructureFailure(f"{message}; {remedy}", Reason.LAUNCH)
        gateway, subnet = gateway_of(await self._containers.check_running(session_id))
        if gateway and await self._relays.open(gateway, subnet, ports):
            return rewrite_addresses(payload, gateway)
        # The engine runs in a virtual machine or rootless; it provides a host name for this machine.
        name = "host.containers.internal" if self._engine.kind == "podman" else "host.docker.internal"
        return rewrite_addresses(payload, name)

    async def _post(self, attempt: Attempt, url: str, payload: dict[str, Any]) -> None:
        """Post with one retry if the connection breaks; posting is idempotent."""
        for last in (False, True):
            self._attempts.check_not_stopped(attempt.session_id)
            try:
                await invocations.post(self._http, url, attempt, payload)
                return
            except (aiohttp.ClientError, OSError) as error:
                await self._containers.check_running(attempt.session_id, watch_s=1.0)
                if last or isinstance(error, TimeoutError):
                    name, problem = container_name(attempt.session_id), f"{type(error).__name__}: {error}"
                    message = f"{name} did not take its payload: {problem}"
                    raise InfrastructureFailure(message, Reason.LAUNCH) from error

    # --- exit detection --------------------------------------------------------------------------

    async def _follow(self, session_id: str) -> None:
        """Poll until the agent has finished or the container has ended."""
        while self._attempts.is_running(session_id):
            await asyncio.sleep(self._poll_s)
            try:
                url = self._urls.get(session_id) or self._containers.url(
                    await self._containers.find(session_id)
                )
                if not url:
                    raise OSError(f"{session_id} has no address")
                self._urls[session_id] = url
                reply = await invocations.ping(self._http, url, PING_S)
            except (*NO_ANSWER, Unavailable, EngineRefused):
                self._ping_failed.set()
                continue
            if not _is_working(reply, session_id):
                self._attempts.record_exit(session_id, Exit(lingers=True))

    async def _watch(self) -> None:
        """Detect dead containers with one list call for all."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LIST_INTERVAL_S):
                    await self._ping_failed.wait()
            self._ping_failed.clear()
            # Select sessions before the list call: a container created during the call is missing from its
            # answer.
            followed = [
                s
                for s in self._attempts
                if self._urls.get(s) is not None and s not in self._attempts.launches
            ]
            if followed:
                try:
                    await self._fail_exited(followed)
                except (Unavailable, EngineRefused) as error:
                    log.warning("run %s cannot see its containers: %s", self._name, error)
            await asyncio.sleep(self._poll_s)

    async def _fail_exited(self, followed: list[str]) -> None:
        """Record the exit of sessions whose containers have ended."""
        statuses = await self._containers.list()
        alive = {status.session_id for status in statuses if status.phase is not Phase.ENDED}
        for session_id in followed:
            if session_id not in alive and self._attempts.is_running(session_id):
                try:
                    await self._containers.check_running(session_id)
                except InfrastructureFailure as error:
                    tail = await self._engine.logs(container_name(session_id))
                    self._attempts.record_exit(session_id, Exit(error.failure, tail, lingers=True))

    # --- helpers ---------------------------------------------------------------------------------

    async def _remove(self, session_id: str) -> None:
        """Remove the session's container, which `close` then leaves alone."""
        await self._containers.remove(session_id)
        self._urls.pop(session_id, None)

    def _create_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _is_working(reply: PingResponse, session_id: str) -> bool:
    """Whether the agent works on the session; a server that does not list sessions has only this one."""
    return reply.status != "Healthy" if reply.active is None else session_id in reply.active
