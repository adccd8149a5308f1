"""Kubernetes API client: configuration, requests, errors and watches.

The `kubernetes_asyncio` library reads kubeconfigs and service accounts and handles TLS and tokens. Requests
and answers are plain JSON, because the library's models cost more CPU than the rest of a request. Idempotent
requests are retried while the server is unavailable.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import aiohttp
import msgspec
from msgspec import Struct

from afield.errors import AfieldError, RateLimited, Unavailable, UsageError
from afield.runtimes.kubernetes.objects import ApiStatus, ObjectList, ObjectMeta, WatchEvent
from afield.settings.runtimes import KubernetesOptions
from afield.utils.backoff import Backoff

log = logging.getLogger(__name__)

REQUEST_S = 30.0
CONNECT_S = 10.0
PAGE = "500"
EXPIRED = 410
TRIES = 4
PAUSE_S = (0.6, 2.4)  # pause after a failed request, in seconds: first value and maximum
TOKEN_S = 60.0  # time until a token is read or created again, in seconds
NO_ANSWER = (aiohttp.ClientError, OSError)  # TimeoutError is an OSError
T = TypeVar("T")


class KubernetesRefused(AfieldError):
    """The API server answered with a 4xx status other than rate limiting."""

    def __init__(self, message: str, status: int, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class KubernetesCluster:
    """Client of one API server, opened by `open_cluster`. Paths are relative to its address."""

    def __init__(self, client: Any, namespace: str) -> None:
        self._client = client
        self.namespace = namespace
        self.host: str = client.configuration.host

    async def close(self) -> None:
        await self._client.close()

    def jobs(self, name: str = "") -> str:
        return f"/apis/batch/v1/namespaces/{self.namespace}/jobs" + (f"/{name}" if name else "")

    def core(self, kind: str, name: str = "") -> str:
        return f"/api/v1/namespaces/{self.namespace}/{kind}" + (f"/{name}" if name else "")

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: aiohttp.ClientTimeout | None = None,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Send one request; raises one of NO_ANSWER if there is no answer."""
        rest = self._client.rest_client
        sent = {"Accept": "application/json", "User-Agent": "afield", **(headers or {})}
        if body is not None:
            sent.setdefault("Content-Type", "application/json")
        if token := (await self._client.configuration.auth_settings()).get("BearerToken"):
            sent["Authorization"] = token["value"]
        how: dict[str, Any] = {}
        if rest.proxy:
            how |= {"proxy": rest.proxy, "proxy_headers": rest.proxy_headers}
        if rest.server_hostname:
            how["server_hostname"] = rest.server_hostname
        timeout = timeout or aiohttp.ClientTimeout(total=REQUEST_S, sock_connect=CONNECT_S)
        async with rest.pool_manager.request(
            method, self.host + path, params=params, data=body, headers=sent, timeout=timeout, **how
        ) as response:
            yield response

    async def call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = REQUEST_S,
    ) -> bytes:
        """Send one request and return the body; raises RateLimited, Unavailable or KubernetesRefused."""
        sent = None if body is None else msgspec.json.encode(body)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, CONNECT_S))
        try:
            async with self.request(
                method, path, params=params, body=sent, headers=headers, timeout=timeout
            ) as response:
                message = await response.read()
        except NO_ANSWER as error:
            raise Unavailable(f"{self.host} does not answer: {describe(error)}") from error
        if response.status >= 300:
            raise error_of(response.status, message, response.headers.get("Retry-After", ""))
        return message

    async def get(self, path: str, kind: type[T], **how: Any) -> T:
        message = await retry_unavailable(lambda: self.call("GET", path, **how))
        try:
            return msgspec.json.decode(message, type=kind)
        except msgspec.MsgspecError as error:
            raise Unavailable(
                f"the answer of {self.host}{path} is not one of the Kubernetes API: {error}"
            ) from error

    async def list(self, path: str, kind: type[T], params: Mapping[str, str]) -> tuple[list[T], str]:
        """List all objects page by page; returns them with their resource version.

        If the version of the first page has expired (410), everything is listed in one request.
        """
        items: list[T] = []
        more = ""
        while True:
            page = {**params, "limit": PAGE, **({"continue": more} if more else {})}
            try:
                listed = await self.get(path, ObjectList[kind], params=page)
            except KubernetesRefused as error:
                if error.status != EXPIRED or not more:
                    raise
                items = []
                listed = await self.get(path, ObjectList[kind], params=params)
            items += listed.items or []
            more = listed.metadata.continue_
            if not more:
                return items, listed.metadata.resource_version


async def retry_unavailable(ask: Callable[[], Awaitable[T]]) -> T:
    """Retry an idempotent request while the server is unavailable."""
    backoff = Backoff(*PAUSE_S)
    for _ in range(1, TRIES):
        try:
            return await ask()
        except Unavailable as error:
            log.info("%s; asked again", error)
        await backoff.sleep()
    return await ask()


def error_of(status: int, body: bytes, retry_after: str = "") -> AfieldError:
    parsed = parse_status(body)
    message = parsed.message or body[:500].decode("utf-8", "replace")
    summary = f"the API server answered {status}: {message}"
    quota = status == 403 and "exceeded quota" in message
    if status == 429 or quota:
        return RateLimited(summary, float(retry_after) if retry_after.isdigit() else None)
    if status >= 500:
        return Unavailable(summary)
    return KubernetesRefused(summary, status, parsed.reason)


def parse_status(body: bytes) -> ApiStatus:
    """Decode the API server's Status object; empty if the answer is not from the API server."""
    try:
        status = msgspec.json.decode(body, type=ApiStatus)
    except msgspec.MsgspecError:
        return ApiStatus()
    return status if status.kind == "Status" else ApiStatus()


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


async def open_cluster(options: KubernetesOptions, token_s: float = TOKEN_S) -> KubernetesCluster:
    """Client of the cluster that the options name. Sends nothing.

    Raises UsageError if the configuration cannot be read.
    """
    try:
        from kubernetes_asyncio import client
    except ImportError as error:
        message = "the kubernetes runtime needs a library: pip install 'afield[kubernetes]'"
        raise UsageError(f"{message} ({error})") from error
    configuration = client.Configuration()
    configuration.connection_pool_maxsize = 0  # unlimited
    await _configure(configuration, options, token_s)
    try:
        return KubernetesCluster(client.ApiClient(configuration), options.namespace)
    except OSError as error:  # unreadable certificates
        raise UsageError(f"the certificates of {configuration.host} cannot be used: {error}") from error


def _is_there(kubeconfig: str) -> bool:
    return any(Path(file).expanduser().is_file() for file in kubeconfig.split(":"))


async def _configure(configuration: Any, options: KubernetesOptions, token_s: float) -> None:
    from kubernetes_asyncio import config
    from yaml import YAMLError

    # Exceptions that the library raises for an invalid kubeconfig.
    unreadable = (
        config.ConfigException,
        YAMLError,
        OSError,
        AssertionError,
        TypeError,
        AttributeError,
        ValueError,
    )
    named_file = options.kubeconfig or None
    if named_file and not _is_there(named_file):
        raise UsageError(f"there is no kubeconfig {named_file}; leave kubeconfig out for the usual one")
    try:
        loader = await config.load_kube_config(
            config_file=named_file,
            context=options.context or None,
            client_configuration=configuration,
            persist_config=False,
        )
    except unreadable as error:
        if not (options.kubeconfig or options.context):
            try:
                config.load_incluster_config(client_configuration=configuration)
                return
            except config.ConfigException as inside:
                raise UsageError(
                    f"no cluster is known: no kubeconfig ({error}), and this is not a pod ({inside});"
                    " name a kubeconfig, or set KUBECONFIG"
                ) from error
        where = options.kubeconfig or "the usual kubeconfig"
        context = f", context {options.context!r}" if options.context else ""
        raise UsageError(f"{where}{context} cannot be used: {error}; kubectl config view shows it") from error
    configuration.refresh_api_key_hook = _refreshing(loader, unreadable, token_s)


def _refreshing(
    loader: Any, unreadable: tuple[type[BaseException], ...], token_s: float
) -> Callable[[Any], Awaitable[None]]:
    """Hook that reads or creates the token again every `token_s` seconds, since tokens expire."""
    read_at = time.monotonic()

    async def refresh(configuration: Any) -> None:
        nonlocal read_at
        if time.monotonic() - read_at < token_s:
            return
        # set before the first await, so that concurrent requests keep the old token
        read_at = time.monotonic()
        try:
            await loader.load_and_set(configuration)
        except unreadable as error:
            log.warning("token refresh failed: %s", error)

    return refresh


WATCH_PAUSE_S = (0.2, 15.0)  # pause after a failed watch, in seconds: first value and maximum
WATCH_S = 60
SLACK_S = 15.0
GONE = 410


class Object(Protocol):
    """Kubernetes object with metadata."""

    @property
    def metadata(self) -> ObjectMeta: ...


K = TypeVar("K", bound=Object)


class _Expired(Exception):
    """The server has dropped the resource version of the watch."""


class _Bare(Struct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()


class Watch(Generic[K]):
    """Watches all objects of one kind with one list and one watch request, until cancelled.

    `changed` gets each object once per version, `gone` the last version of a deleted object. A watch that
    ends, breaks or stays silent resumes at its version. If the server has dropped that version (410),
    everything is listed again, and missing objects count as deleted; the library's own watch does not do
    that.
    """

    def __init__(
        self,
        cluster: KubernetesCluster,
        path: str,
        kind: type[K],
        selector: str,
        *,
        changed: Callable[[K], None],
        gone: Callable[[K], None],
    ) -> None:
        self._cluster = cluster
        self._path = path
        self._kind = kind
        self._selector = selector
        self._changed = changed
        self._gone = gone
        self._objects: dict[str, K] = {}
        self._version = ""

    async def run(self) -> None:
        backoff = Backoff(*WATCH_PAUSE_S, jitter=True)
        while True:
            try:
                if not self._version:
                    await self._list()
                began = asyncio.get_running_loop().time()
                async for change in self._changes():
                    backoff.reset()
                    self._take(change)
                # The server ends each watch after a while; back off if it does so at once.
                if asyncio.get_running_loop().time() - began > backoff.next_s:
                    continue
            except _Expired:
                log.info("%s: watch expired, restarting", self._path)
                self._version = ""
            except NO_ANSWER as error:
                log.info("%s: the watch broke (%s) and is taken up again", self._path, describe(error))
            except (AfieldError, msgspec.MsgspecError) as error:
                log.warning("%s cannot be watched: %s; tried again", self._path, error)
            await backoff.sleep()

    async def _list(self) -> None:
        items, version = await self._cluster.list(self._path, self._kind, {"labelSelector": self._selector})
        there = {item.metadata.uid: item for item in items}
        for uid in self._objects.keys() - there.keys():
            self._gone(self._objects.pop(uid))
        for item in there.values():
            self._put(item)
        self._version = version

    async def _changes(self) -> AsyncGenerator[WatchEvent]:
        params: Mapping[str, str] = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "labelSelector": self._selector,
            "resourceVersion": self._version,
            "timeoutSeconds": str(WATCH_S),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=WATCH_S + SLACK_S)
        async with self._cluster.request("GET", self._path, params=params, timeout=timeout) as response:
            if response.status == GONE:
                raise _Expired
            if response.status >= 300:
                message = await response.read()
                raise error_of(response.status, message, response.headers.get("Retry-After", ""))
            async for line in response.content:
                # A line without a line end was cut off with the connection.
                if line.endswith(b"\n") and line.strip():
                    yield msgspec.json.decode(line, type=WatchEvent)

    def _take(self, change: WatchEvent) -> None:
        match change.type:
            case "ERROR":
                status = msgspec.json.decode(change.object, type=ApiStatus)
                if status.code == GONE:
                    raise _Expired
                raise Unavailable(f"the watch says {status.code}: {status.message}")
            case "BOOKMARK":
                self._version = msgspec.json.decode(change.object, type=_Bare).metadata.resource_version
            case "DELETED":
                item = msgspec.json.decode(change.object, type=self._kind)
                self._objects.pop(item.metadata.uid, None)
                self._gone(item)
                self._version = item.metadata.resource_version
            case _:
                item = msgspec.json.decode(change.object, type=self._kind)
                self._put(item)
                self._version = item.metadata.resource_version

    def _put(self, item: K) -> None:
        before = self._objects.get(item.metadata.uid)
        self._objects[item.metadata.uid] = item
        if before is None or before.metadata.resource_version != item.metadata.resource_version:
            self._changed(item)
