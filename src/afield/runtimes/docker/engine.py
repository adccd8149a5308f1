"""Client of a Docker or Podman engine, and helpers for containers.

1. `DockerEngine` makes the calls, which block, in a thread pool. The connection opens at first use. It raises
`Unavailable` if the engine does not answer and `EngineRefused` with the engine's message if it reports an
error; objects that do not exist are None.
2. `container_name` derives a container's name from the session id, so that any process finds it.
3. `host_config` drops all capabilities except those in `keep`, sets `no-new-privileges`, and applies the
limits.
4. `status_from_row`, `status_from_inspect` and `describe_exit` interpret the engine's answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from msgspec import Struct

from afield.errors import AfieldError, Unavailable, UsageError
from afield.interfaces.runtime import Limit, Phase, SessionStatus
from afield.settings.runtimes import ContainerOptions, ResourceLimits

if TYPE_CHECKING:
    from docker import APIClient

RUN, SESSION = "afield.run", "afield.session"
PREFIX = "afield-"
# Docker accepts longer names, but some tools do not.
MAX_NAME = 128
LOG_MB = 16
MB = 2**20
ENDED = frozenset({"exited", "stopped", "dead", "removing"})
STARTING = frozenset({"created", "configured", "initialized", "restarting"})


def container_name(session_id: str) -> str:
    """Container name of a session; the end of a long name is replaced by a digest."""
    name = f"{PREFIX}{session_id}"
    if len(name) <= MAX_NAME:
        return name
    # The digest keeps shortened names unique.
    digest = hashlib.sha256(session_id.encode()).hexdigest()[:32]
    return f"{name[: MAX_NAME - 33]}-{digest}"


def container_labels(run: str, session_id: str) -> dict[str, str]:
    return {RUN: run, SESSION: session_id}


def enforced_limits(limits: ResourceLimits) -> frozenset[Limit]:
    """Limits that are set in the options and thus enforced by the engine."""
    named: dict[Limit, float | None] = {
        "cpu": limits.cpus,
        "memory": limits.memory_mb,
        "pids": limits.pids,
        "disk": limits.disk_mb,
    }
    return frozenset(name for name, value in named.items() if value is not None)


def host_config(options: ContainerOptions) -> dict[str, Any]:
    """Arguments for `APIClient.create_host_config`, without ports."""
    limits = options.limits
    config: dict[str, Any] = {
        "network_mode": options.network,
        "binds": list(options.mounts),
        "cap_drop": ["ALL"],
        "cap_add": list(options.keep),
        "security_opt": ["no-new-privileges"],
        "init": options.init,
        "log_config": {"type": "json-file", "config": {"max-size": f"{LOG_MB}m"}},
    }
    if options.runtime:
        config["runtime"] = options.runtime
    if limits.cpus is not None:
        config["nano_cpus"] = int(limits.cpus * 1e9)
    if limits.memory_mb is not None:
        # Memory plus swap: equal values leave no swap.
        config["mem_limit"] = config["memswap_limit"] = limits.memory_mb * MB
    if limits.pids is not None:
        config["pids_limit"] = limits.pids
    if limits.files is not None:
        config["ulimits"] = [{"Name": "nofile", "Soft": limits.files, "Hard": limits.files}]
    if limits.disk_mb is not None:
        config["read_only"] = True
        config["tmpfs"] = {"/tmp": f"size={limits.disk_mb}m", "/run": "size=16m", "/var/tmp": "size=16m"}
    return config


def phase_of(state: str) -> Phase:
    state = state.lower()
    if state in ENDED:
        return Phase.ENDED
    return Phase.STARTING if state in STARTING else Phase.RUNNING


def status_from_row(row: Mapping[str, Any]) -> SessionStatus:
    """Session status from one row of the engine's list."""
    names: Iterable[str] = row.get("Names") or ()
    where = next((name.lstrip("/") for name in names), str(row["Id"])[:12])
    return SessionStatus(
        session_id=row["Labels"][SESSION],
        phase=phase_of(row["State"]),
        where=f"container {where}",
        since=float(row["Created"]),
    )


def status_from_inspect(session_id: str, container: Mapping[str, Any]) -> SessionStatus:
    """Session status from the engine's description of one container."""
    return SessionStatus(
        session_id=session_id,
        phase=phase_of(container["State"]["Status"]),
        where=f"container {container['Name'].lstrip('/')}",
        since=_seconds(container.get("Created")),
    )


def networks_of(container: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Networks of a container; old engines describe one of them at the top level."""
    settings = container.get("NetworkSettings") or {}
    return [*(settings.get("Networks") or {}).values(), settings]


def gateway_of(container: Mapping[str, Any]) -> tuple[str, str]:
    """Gateway address and subnet of a container's network; both empty if the engine reports none."""
    for network in networks_of(container):
        if network.get("Gateway"):
            return network["Gateway"], f"{network['Gateway']}/{network.get('IPPrefixLen') or 32}"
    return "", ""


def describe_exit(state: Mapping[str, Any], limits: ResourceLimits) -> str:
    """Why a container ended, in words."""
    code = int(state.get("ExitCode") or 0)
    if state.get("OOMKilled"):
        bound = f" ({limits.memory_mb} MB)" if limits.memory_mb is not None else ""
        return f"ran out of memory{bound}, exit code {code}"
    error = f": {state['Error']}" if state.get("Error") else ""
    if code > 128:
        # Some engines do not report OOMKilled.
        bounded = code == 137 and limits.memory_mb is not None
        hint = f"; too much memory ends so, at {limits.memory_mb} MB here" if bounded else ""
        return f"ended with exit code {code} (signal {code - 128}, {_signal(code - 128)}{hint}){error}"
    return f"ended with exit code {code}{error}"


def _signal(number: int) -> str:
    return signal.strsignal(number) or "unknown" if number in signal.valid_signals() else "unknown"


def _seconds(stamp: str | None) -> float | None:
    """Seconds since the epoch. Drops the fraction, because Python does not parse nanoseconds."""
    if not stamp:
        return None
    head, _, fraction = stamp.partition(".")
    digits = fraction.rstrip("Z")
    offset = next((digits[i:] for i, c in enumerate(digits) if c in "+-"), "+00:00")
    try:
        return datetime.fromisoformat(head.rstrip("Z") + offset).timestamp()
    except ValueError:
        return None


THREADS = 16
CALL_S = 60
PULL_S = 1800.0
TAIL_LINES = 40
# BedrockAgentCoreApp listens on all addresses only if it detects a container; it does not detect Podman.
IN_CONTAINER = {"DOCKER_CONTAINER": "1"}
T = TypeVar("T")


class EngineRefused(AfieldError):
    """The engine answered with an error."""


class PortBinding(Struct, frozen=True):
    """Host address at which the engine publishes a container's port."""

    host_ip: str
    """Address on the engine's machine that the port is bound to."""
    address: str
    """Address at which this process reaches the port."""


class DockerEngine:
    """Client of one engine; use it with `async with` from one event loop."""

    def __init__(self, options: ContainerOptions) -> None:
        self._options = options
        self._api: APIClient | None = None
        self._connecting = asyncio.Lock()
        self._pulling = asyncio.Lock()
        self._images: set[str] = set()  # those that were found or pulled
        self.url = options.socket
        self.kind = ""

    async def __aenter__(self) -> DockerEngine:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="container-engine")
        return self

    async def __aexit__(self, *exc: object) -> None:
        # Do not wait: a thread may block on an engine that hangs.
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._api is not None:
            self._api.close()

    async def call(self, work: Callable[[APIClient], T]) -> T:
        """Run `work` with the API client in a thread; raises Unavailable or EngineRefused."""
        if self._api is None:
            async with self._connecting:
                if self._api is None:
                    self._api = await self._run(self._connect)
        api = self._api
        return await self._run(lambda: work(api))

    @property
    def bind(self) -> PortBinding:
        """Binding for published ports: loopback for a local engine, all addresses for a remote one."""
        parts = urlsplit(self.url)
        if parts.scheme in ("tcp", "http", "https") and parts.hostname not in (
            "127.0.0.1",
            "localhost",
            None,
        ):
            return PortBinding("0.0.0.0", parts.hostname)
        return PortBinding("127.0.0.1", "127.0.0.1")

    @property
    def is_local(self) -> bool:
        return self.bind.address == "127.0.0.1"

    # --- containers ------------------------------------------------------------------------------

    async def create(
        self, name: str, labels: Mapping[str, str], *, serve: bool, image: str = "", **config: Any
    ) -> str:
        """Create a container, by default of the options' image, and return its id.

        Raises EngineRefused if the name exists.
        """
        options, publish = self._options, self.bind.host_ip
        image = image or options.image
        await self.ensure_image(image)

        def create(api: APIClient) -> str:
            ports = {"port_bindings": {options.port: (publish,)}} if serve else {}
            container = api.create_container(
                image,
                environment={**IN_CONTAINER, **options.env},
                user=options.user or None,
                labels=dict(labels),
                name=name,
                ports=[options.port] if serve else None,
                host_config=api.create_host_config(**host_config(options), **ports),
                use_config_proxy=False,
                **config,
            )
            return container["Id"]

        return await self.call(create)

    async def start(self, name: str) -> None:
        """Start a container; harmless if it runs."""
        await self.call(lambda api: api.start(name))

    async def inspect(self, name: str) -> dict[str, Any] | None:
        return await self._call_or_none(lambda api: api.inspect_container(name))

    async def list(self, label: str) -> list[dict[str, Any]]:
        return await self.call(lambda api: api.containers(all=True, filters={"label": [label]}))

    async def logs(self, name: str, tail: int | None = TAIL_LINES) -> str:
        """Last `tail` lines of the log, or all for None; empty if the container does not exist."""
        lines: Any = "all" if tail is None else tail
        output = await self._call_or_none(lambda api: api.logs(name, stdout=True, stderr=True, tail=lines))
        return "" if output is None else output.decode("utf-8", "replace").strip()

    async def remove(self, name: str) -> None:
        """Kill and remove a container and its volumes; harmless if it does not exist."""
        await self._call_or_none(lambda api: api.remove_container(name, force=True, v=True))

    # --- images ----------------------------------------------------------------------------------

    async def ensure_image(self, image: str) -> None:
        """Pull an image once, as the pull policy demands; raises UsageError if it is not available."""
        pull = self._options.pull
        if image in self._images:
            return
        if not image:
            raise UsageError("the container runtime needs an image; set image, such as image = 'my/agent:1'")
        async with self._pulling:
            if image in self._images:
                return
            present = await self._call_or_none(lambda api: api.inspect_image(image)) is not None
            if not present and pull == "never":
                message = f"image {image!r} is not at {self.url}, and pull = 'never'"
                raise UsageError(f"{message}; build or load it there, or set pull = 'missing'")
            if not present or pull == "always":
                await self._pull(image)
            self._images.add(image)

    async def _pull(self, image: str) -> None:
        def pull(api: APIClient) -> str:
            name, _, digest = image.partition("@")
            head, colon, tag = name.rpartition(":")
            tagged = bool(colon) and "/" not in tag
            repository, wanted = (head, tag) if tagged else (name, "latest")
            rows = api.pull(repository, tag=digest or wanted, stream=True, decode=True)
            # An engine may answer 200 and report an error in the stream.
            return next((row["error"] for row in rows if "error" in row), "")

        try:
            async with asyncio.timeout(PULL_S):
                problem = await self.call(pull)
        except (EngineRefused, TimeoutError) as error:
            problem = str(error) or f"it took more than {PULL_S:g} s"
        if problem:
            remedy = "check its name and `docker login`, or build it there and set pull = 'never'"
            raise UsageError(
                f"the container engine at {self.url} cannot pull image {image!r}: {problem}; {remedy}"
            )

    # --- helpers ---------------------------------------------------------------------------------

    async def _call_or_none(self, work: Callable[[APIClient], T]) -> T | None:
        """Like `call`, but None if the engine answers "not found"."""
        from docker.errors import NotFound

        def ask(api: APIClient) -> T | None:
            try:
                return work(api)
            except NotFound:
                return None

        return await self.call(ask)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._translated, work)

    def _translated(self, work: Callable[[], T]) -> T:
        from docker.errors import APIError, DockerException
        from requests.exceptions import RequestException

        try:
            return work()
        except APIError as error:
            message = str(error.explanation or error)
            hint = "; install it on the engine's machine, or set init = false" if "-init" in message else ""
            raise EngineRefused(message + hint) from error
        except (DockerException, RequestException, OSError) as error:
            raise Unavailable(f"the container engine at {self.url} does not answer: {error}") from error

    def _connect(self) -> APIClient:
        from docker import APIClient
        from docker.utils import kwargs_from_env

        connection = {"base_url": self._options.socket} if self._options.socket else kwargs_from_env()
        self.url = connection.get("base_url") or _default_socket()
        if self.url.startswith("unix://"):
            # Connect first: the client library hides the reason and leaks its socket.
            _try_connect(self.url.removeprefix("unix://"))
        api = APIClient(
            **{**connection, "base_url": self.url}, version="auto", timeout=CALL_S, max_pool_size=THREADS
        )
        self.kind = "podman" if "podman" in str(api.version()).lower() else "docker"
        return api


def check_library() -> None:
    """Raise UsageError if the `docker` library is not installed."""
    try:
        import docker  # noqa: F401
    except ImportError as error:
        raise UsageError("containers need the docker library: pip install 'afield[container]'") from error


def _default_socket() -> str:
    """First socket with a listening engine; if there is none, the most common path, for the error message."""
    home, user = Path.home(), os.getuid()
    places = (
        "/var/run/docker.sock",
        "/run/podman/podman.sock",
        f"/run/user/{user}/docker.sock",
        f"/run/user/{user}/podman/podman.sock",
        f"{home}/.docker/run/docker.sock",
        f"{home}/.local/share/containers/podman/machine/podman.sock",
    )
    return f"unix://{next(filter(_listens, places), places[0])}"


def _listens(path: str) -> bool:
    try:
        _try_connect(path)
    except OSError:
        return False
    return True


def _try_connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(CALL_S)
        one.connect(path)
