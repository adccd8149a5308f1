"""Relay server: forwards agents' requests to processes that dialled out.

1. `GET /c/CLUSTER/challenge` and `/c/CLUSTER/connect` authenticate a process and open its link.
2. `/c/CLUSTER/g/GATEWAY/t/TOKEN/...` is a route: the token is checked first (401), then the request becomes a
   stream over the link of the gateway process that has the session.
3. A request waits `hold_s` for a gateway that is not connected. When a link is lost, its streams stay open
   for `resume_s`, until the same process dials again.

The relay keeps no state on disk and reads no session keys. Agents' connections end with it; their clients
repeat the request, and `relay.client` answers a repeated request with the response that was under way.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import logging
import re
import secrets
import socket
import ssl
import struct
import termios
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from aiohttp.http_websocket import WSMsgType
from msgspec import Struct

from afield.errors import WireError
from afield.relay.auth import Challenges, LinkRequest, admits
from afield.relay.streams import (
    HOP_BY_HOP,
    MAX_MESSAGE,
    WINDOW,
    ByteBudget,
    Frame,
    FrameType,
    KnownStreams,
    Multiplexer,
    RequestHead,
    ResponseHead,
    Stream,
    StreamReset,
    decode_frames,
    decode_streams,
    encode_head,
)

log = logging.getLogger("afield.relay")

FULL = "its memory for requests and responses is full"

ROUTE = re.compile(r"/c/([^/]+)/g/([^/]+)/t/([^/]+)(/.*)?")
SESSION = re.compile(r"/s/([^/]+)")
DRAIN_POLL_S = (0.0, 0.002, 0.01, 0.05, 0.2)
"""Pauses between looks at the bytes that an agent has not acknowledged, in seconds; the last one repeats."""
SHED = 1.25
"""Share of a limit of held bytes above which responses end whose agents do not read them."""
DRAIN_S = 30.0
"""Seconds after which a response that the agent does not acknowledge counts as delivered."""


class RelayLimits(Struct, frozen=True, kw_only=True):
    """Limits of a relay."""

    streams: int = 8192
    """Requests in flight per link."""
    body_bytes: int = 64 * 1024 * 1024
    """Bytes of one request body."""
    connections: int = 32_768
    """Agents' connections."""
    per_address: int = 16_384
    """Connections of one address."""
    held_bytes: int = 768 * 1024 * 1024
    """Bytes of requests and responses that the relay holds; above it new requests get 503."""
    held_bytes_per_cluster: int = 512 * 1024 * 1024
    """Bytes of requests and responses that the relay holds for one cluster."""
    head_s: float = 30.0
    """Seconds until the head of a connection's first request is complete."""
    body_idle_s: float = 60.0
    """Seconds that a request body may pause."""
    hold_s: float = 30.0
    """Seconds that a request waits for a gateway that is not connected."""
    resume_s: float = 60.0
    """Seconds that the streams of a lost link stay open."""
    heartbeat_s: float = 5.0
    """Seconds between pings of a link; one that misses a pong is lost."""


class RelayMetrics:
    """Counters of one cluster."""

    def __init__(self) -> None:
        self.requests = 0
        self.refused = 0
        self.reset = 0
        self.links = 0
        self.bytes_in = 0
        self.bytes_out = 0


class AgentStream(Stream):
    """Request with the agent's connection."""

    def __init__(
        self, id: int, link: GatewayLink, held: ByteBudget, transport: asyncio.Transport | None
    ) -> None:
        super().__init__(id, link.wake, held=held)
        self.transport = transport

    @property
    def is_stalled(self) -> bool:
        """Whether the agent is behind by half a window and takes no bytes now."""
        if self.transport is None or self.incoming.received - self.incoming.consumed < WINDOW // 2:
            return False
        return self.transport.get_write_buffer_size() > 0


class GatewayLink(Multiplexer):
    """Streams of one gateway process, with its connection while there is one."""

    def __init__(self, request: LinkRequest, ids: Iterator[int], held: ByteBudget) -> None:
        """`ids` numbers the streams of all links of a relay; `held` counts their bytes."""
        super().__init__()
        self.request = request
        self.held = held
        self.dials = 0
        """Number of connections that the process has opened."""
        self.connected = asyncio.Event()
        self.socket: web.WebSocketResponse | None = None
        self.writing: asyncio.Task[None] | None = None
        self.lost_at: float | None = None
        self._ids = ids

    def open(self, head: RequestHead, transport: asyncio.Transport | None) -> AgentStream:
        stream = AgentStream(next(self._ids), self, self.held, transport)
        encoded = encode_head(head)
        self.streams[stream.id] = stream
        stream.outgoing.append(encoded)
        return stream

    def reset(self, stream: Stream, reason: str) -> None:
        """End a stream on both sides."""
        self.send(Frame(FrameType.RESET, stream.id, payload=reason.encode()))
        self.remove(stream)
        stream.reset(reason)

    def delivered(self, stream: Stream) -> None:
        self.send(Frame(FrameType.DELIVERED, stream.id))
        self.remove(stream)

    def reset_all(self, reason: str) -> None:
        for stream in list(self.streams.values()):
            self.remove(stream)
            stream.reset(reason)


class Relay:
    """HTTP application of a relay. `clusters` maps names to secrets."""

    def __init__(self, clusters: Mapping[str, bytes], limits: RelayLimits | None = None) -> None:
        self._clusters = dict(clusters)
        self._limits = limits or RelayLimits()
        self.instance = secrets.token_hex(8)
        self._challenges = Challenges()
        self._ids = itertools.count(1)
        held = ByteBudget(self._limits.held_bytes)
        self._held = {name: ByteBudget(self._limits.held_bytes_per_cluster, held) for name in clusters}
        self._links: dict[tuple[str, str], dict[int, GatewayLink]] = {}
        self._link_added = asyncio.Condition()
        self._metrics = {name: RelayMetrics() for name in clusters}
        self._closing: set[asyncio.Task[None]] = set()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if isinstance(request.protocol, _LimitedHandler):
            request.protocol.has_request = True
        path = request.rel_url.raw_path
        match = ROUTE.fullmatch(path)
        if match:
            return await self._forward(request, *match.groups(default="/"))
        if path == "/health":
            return web.json_response({"status": "ok", "relay": self.instance})
        parts = path.strip("/").split("/")
        if len(parts) == 3 and parts[0] == "c" and parts[1] in self._clusters:
            if parts[2] == "challenge":
                challenge = {"challenge": self._challenges.issue(), "relay": self.instance}
                return web.json_response(challenge)
            if parts[2] == "connect":
                return await self._connect(request, parts[1])
            if parts[2] == "metrics":
                return self._show_metrics(request, parts[1])
        if len(parts) == 3 and parts[0] == "c":
            return _error(401, "unauthorized", f"cluster {parts[1]!r} is not served here")
        return _error(404, "not_found", f"{path[:200]} is not a route of this relay")

    # --- agents ----------------------------------------------------------------------------------

    async def _forward(
        self, request: web.BaseRequest, cluster: str, gateway: str, token: str, rest: str
    ) -> web.StreamResponse:
        secret = self._clusters.get(cluster)
        if secret is None or not admits(secret, gateway, unquote(token), unquote(rest)):
            if cluster in self._metrics:
                self._metrics[cluster].refused += 1
            return _error(401, "unauthorized", "the route token of this URL is not valid")
        metrics = self._metrics[cluster]
        metrics.requests += 1
        if (request.content_length or 0) > self._limits.body_bytes:
            return _error(413, "request_too_large", f"a body has at most {self._limits.body_bytes} bytes")
        session = SESSION.match(rest)
        link = await self._link(cluster, gateway, session[1] if session else token)
        if link is None:
            return _error(
                503, "gateway_not_connected", f"gateway {gateway} of {cluster} is not connected", retry=True
            )
        if len(link.streams) >= self._limits.streams or link.held.is_full():
            return _busy(gateway, link)
        headers = tuple(
            (name.lower(), value) for name, value in request.raw_headers if name.lower() not in HOP_BY_HOP
        )
        head = RequestHead(
            request.method, rest, request.rel_url.raw_query_string, headers, request.remote or ""
        )
        try:
            stream = link.open(head, request.transport)
        except WireError as error:
            return _error(431, "headers_too_large", str(error))
        sending = asyncio.create_task(self._send_body(request, stream, link.held, metrics))
        try:
            return await self._answer(request, link, stream, metrics)
        except _BodyRefused as refused:
            link.reset(stream, refused.message)
            return _error(refused.status, refused.code, refused.message, retry=refused.status == 503)
        except BaseException:  # the agent is gone, or the relay stops
            if stream.id in link.streams:
                metrics.reset += 1
                link.reset(stream, "the agent disconnected")
            raise
        finally:
            sending.cancel()
            stream.release()

    async def _link(self, cluster: str, gateway: str, session: str) -> GatewayLink | None:
        """Return the link of a session's gateway process, waiting for its connection."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.hold_s), self._link_added:
                while True:
                    links = self._links.get((cluster, gateway), {})
                    count = next((link.request.processes for link in links.values()), 1)
                    link = links.get(owner(session, count))
                    if link is not None and link.connected.is_set():
                        return link
                    await self._link_added.wait()
        return None

    async def _has_room(self, held: ByteBudget) -> bool:
        """Wait for room in a full budget; False if that takes too long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.body_idle_s):
                while held.is_full():
                    await held.wait_for_room()
            return True
        return False

    async def _send_body(
        self, request: web.BaseRequest, stream: Stream, held: ByteBudget, metrics: RelayMetrics
    ) -> None:
        """Read the agent's body as fast as the gateway takes it."""
        size = 0
        try:
            if request.headers.get("Expect", "").lower() == "100-continue":
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                request.writer.output_size = 0
            while True:
                async with asyncio.timeout(self._limits.body_idle_s):
                    data = await request.content.readany()
                if not data:
                    break
                size += len(data)
                metrics.bytes_in += len(data)
                if size > self._limits.body_bytes:
                    message = f"a body has at most {self._limits.body_bytes} bytes"
                    stream.incoming.fail(_BodyRefused(413, "request_too_large", message))
                    return
                if held.is_full() and not await self._has_room(held):
                    stream.incoming.fail(_BodyRefused(503, "relay_full", FULL))
                    return
                stream.outgoing.append(data)
                await stream.outgoing.wait_for_space()
            stream.outgoing.finish()
        except TimeoutError:
            message = f"the body paused for {self._limits.body_idle_s:g} s"
            stream.incoming.fail(_BodyRefused(408, "request_timeout", message))
        except (StreamReset, aiohttp.ClientError, ConnectionError, web.HTTPException):
            pass  # `_answer` ends the request

    async def _answer(
        self, request: web.BaseRequest, link: GatewayLink, stream: Stream, metrics: RelayMetrics
    ) -> web.StreamResponse:
        try:
            head = await stream.incoming.read_head(ResponseHead)
        except StreamReset as error:
            return _error(502, "gateway_lost", f"{error}; repeat the request", retry=True)
        response = web.StreamResponse(status=head.status)
        for name, value in head.headers:
            if name not in HOP_BY_HOP:
                response.headers.add(name.decode("latin-1"), value.decode("latin-1"))
        await response.prepare(request)
        try:
            while (data := await stream.incoming.read()) is not None:
                metrics.bytes_out += len(data)
                await response.write(data)
        except StreamReset as error:
            if request.transport is not None:
                request.transport.abort()  # a response without its end must not look complete
            raise ConnectionResetError(str(error)) from error
        await response.write_eof()
        self._run(self._confirm(request.transport, link, stream))
        return response

    async def _confirm(self, transport: asyncio.Transport | None, link: GatewayLink, stream: Stream) -> None:
        """Tell the gateway that the agent's machine has the whole response."""
        waited_s, pauses = 0.0, iter(DRAIN_POLL_S)
        pause_s = 0.0
        while transport is not None and not transport.is_closing() and _unacknowledged(transport):
            pause_s = next(pauses, pause_s)
            await asyncio.sleep(pause_s)
            waited_s += pause_s
            if waited_s > DRAIN_S:
                break
        if stream.id in link.streams:
            link.delivered(stream)

    # --- links -----------------------------------------------------------------------------------

    async def _connect(self, request: web.BaseRequest, cluster: str) -> web.StreamResponse:
        secret = self._clusters[cluster]
        hello = LinkRequest.from_header(request.headers.get("Authorization", ""))
        if (
            hello is None
            or not hello.is_genuine(cluster, secret)
            or not self._challenges.use(hello.challenge)
        ):
            self._metrics[cluster].refused += 1
            log.warning("relay: link refused cluster=%s peer=%s reason=proof", cluster, request.remote)
            return _error(401, "unauthorized", f"the proof for cluster {cluster!r} is not valid")
        if self._is_taken(cluster, hello):
            message = f"gateway {hello.gateway!r} of {cluster!r} is connected from another process"
            return _error(409, "name_in_use", f"{message}; give this one another name")
        socket = web.WebSocketResponse(
            heartbeat=self._limits.heartbeat_s, max_msg_size=MAX_MESSAGE, compress=False, autoping=True
        )
        await socket.prepare(request)
        link = self._links.get((cluster, hello.gateway), {}).get(hello.process)
        if link and link.request.instance != hello.instance:
            link.reset_all("the gateway was restarted")
            link = None
        link = link or GatewayLink(hello, self._ids, self._held[cluster])
        link.dials += 1
        dial = link.dials
        await self._disconnect(cluster, link)  # the process dialled again before its connection was lost
        received = {str(stream): offset for stream, offset in link.received().items()}
        proof = hello.relay_proof(cluster, secret)
        await socket.send_str(json.dumps({"relay": self.instance, "proof": proof, "streams": received}))
        try:
            theirs = await self._hello(socket)
        except (TimeoutError, WireError) as error:
            log.warning("relay: link refused cluster=%s gateway=%s reason=%s", cluster, hello.gateway, error)
            await socket.close()
            return socket
        if self._is_taken(cluster, hello) or dial != link.dials:
            name = (cluster, hello.gateway)
            log.warning("relay: link refused cluster=%s gateway=%s reason=connected meanwhile", *name)
            await socket.close()
            return socket
        await self._serve_link(cluster, link, socket, theirs)
        return socket

    def _is_taken(self, cluster: str, hello: LinkRequest) -> bool:
        """Whether the name is connected from another process, or from a gateway of another process count."""
        return any(
            link.connected.is_set()
            and link.request.instance != hello.instance
            and (link.request.process == hello.process or link.request.processes != hello.processes)
            for link in self._links.get((cluster, hello.gateway), {}).values()
        )

    async def _disconnect(self, cluster: str, link: GatewayLink) -> None:
        """Stop writing to the old connection of a link, and close it in the background."""
        old, writing = link.socket, link.writing
        link.socket = link.writing = None
        if old:
            self._lost(cluster, link)
        if writing:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        if old:
            self._run(old.close())

    def _run(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _hello(self, socket: web.WebSocketResponse) -> KnownStreams:
        """Read the streams that the process knows."""
        message = await socket.receive(timeout=self._limits.heartbeat_s)
        if message.type is not WSMsgType.TEXT:
            raise WireError("the process sent no streams")
        return decode_streams(message.data)

    async def _serve_link(
        self, cluster: str, link: GatewayLink, socket: web.WebSocketResponse, theirs: KnownStreams
    ) -> None:
        name = (cluster, link.request.gateway, link.request.process)
        for stream in link.resume(theirs.streams):
            if stream.id in theirs.ended:
                link.remove(stream)
                stream.reset("the gateway ended the request")
            elif stream.outgoing.rewinds_to(0):  # the process has not seen this request
                stream.outgoing.rewind(0)
            else:
                link.remove(stream)
                stream.reset("the gateway gave up the request while the relay was unreachable")
        for unknown in theirs.streams.keys() - link.streams.keys():
            link.send(Frame(FrameType.RESET, unknown, payload=b"the agent disconnected"))
        link.socket, link.lost_at = socket, None
        writing = link.writing = asyncio.create_task(link.write(socket.send_bytes))
        self._register(cluster, link)
        self._metrics[cluster].links += 1
        log.info("relay: link up cluster=%s gateway=%s process=%d streams=%d", *name, len(link.streams))
        try:
            async with self._link_added:
                self._link_added.notify_all()
            async for message in socket:
                if message.type is WSMsgType.BINARY:
                    self._receive(link, message.data)
        except WireError as error:
            log.error("relay: link closed cluster=%s gateway=%s process=%d error=%s", *name, error)
        finally:
            if link.socket is socket:  # before any await, which the end of the connection may cancel
                link.socket = link.writing = None
                self._lost(cluster, link)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            await socket.close()

    def _register(self, cluster: str, link: GatewayLink) -> None:
        """Route requests to a link; those of a gateway with another number of processes are older."""
        links = self._links.setdefault((cluster, link.request.gateway), {})
        for other in list(links.values()):
            if other.request.processes != link.request.processes:
                other.reset_all("the gateway was restarted")
                del links[other.request.process]
        links[link.request.process] = link
        link.connected.set()

    def _lost(self, cluster: str, link: GatewayLink) -> None:
        """Record that a link has no connection; its streams end unless the process dials again in time."""
        name = (cluster, link.request.gateway, link.request.process)
        log.info("relay: link lost cluster=%s gateway=%s process=%d", *name)
        link.connected.clear()
        loop = asyncio.get_running_loop()
        link.lost_at = loop.time()
        loop.call_later(self._limits.resume_s, self._expire, cluster, link, link.lost_at)

    def _receive(self, link: GatewayLink, message: bytes) -> None:
        shedding = link.held.is_full(SHED)
        for frame in decode_frames(message):
            if frame.type is FrameType.RESET:
                if stream := link.streams.get(frame.stream):
                    link.remove(stream)
                    stream.reset(frame.payload.decode(errors="replace") or "the gateway ended the request")
            else:
                link.dispatch(frame)  # a stream that was reset here is ignored
                if shedding:
                    self._shed(link, frame)

    def _shed(self, link: GatewayLink, frame: Frame) -> None:
        """Free the memory of a response that its agent does not read."""
        stream = link.streams.get(frame.stream)
        if isinstance(stream, AgentStream) and stream.is_stalled and stream.transport is not None:
            log.warning("relay: response ended stream=%d reason=memory", stream.id)
            stream.transport.abort()

    def _expire(self, cluster: str, link: GatewayLink, lost_at: float) -> None:
        """Give up the streams of a link that was lost at a time and not replaced since."""
        if link.lost_at != lost_at:
            return
        name = (cluster, link.request.gateway)
        log.warning("relay: link gone cluster=%s gateway=%s process=%d", *name, link.request.process)
        link.reset_all("the gateway did not reconnect")
        if (links := self._links.get(name, {})).get(link.request.process) is link:
            del links[link.request.process]
            if not links:
                del self._links[name]

    # --- operation -------------------------------------------------------------------------------

    def _show_metrics(self, request: web.BaseRequest, cluster: str) -> web.StreamResponse:
        """Metrics of one cluster in Prometheus text format, for holders of its secret."""
        secret = self._clusters[cluster]
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not admits(secret, "metrics", token, "/"):
            return _error(401, "unauthorized", "this needs a route token for 'metrics' with scope all")
        metrics = self._metrics[cluster]
        links = [link for key, links in self._links.items() if key[0] == cluster for link in links.values()]
        rows = [
            ("requests_total", metrics.requests),
            ("refused_total", metrics.refused),
            ("reset_total", metrics.reset),
            ("links_total", metrics.links),
            ("bytes_in_total", metrics.bytes_in),
            ("bytes_out_total", metrics.bytes_out),
            ("links", sum(link.connected.is_set() for link in links)),
            ("streams", sum(len(link.streams) for link in links)),
            ("held_bytes", self._held[cluster].used),
        ]
        text = "".join(f'afield_relay_{name}{{cluster="{cluster}"}} {value}\n' for name, value in rows)
        return web.Response(text=text, content_type="text/plain")

    async def close(self) -> None:
        for (cluster, _), links in list(self._links.items()):
            for link in list(links.values()):
                link.reset_all("the relay is being stopped")
                await self._disconnect(cluster, link)
        if closing := list(self._closing):
            _, late = await asyncio.wait(closing, timeout=1.0)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


class _BodyRefused(Exception):
    """The request body exceeds a limit of the relay."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


def owner(session: str, processes: int) -> int:
    """Process of a session; the hash of `gateway.shards.owner`, which saves the gateway a hop."""
    return zlib.crc32(unquote(session).encode()) % processes


def _busy(gateway: str, link: GatewayLink) -> web.Response:
    if link.held.is_full():
        return _error(503, "relay_full", FULL, retry=True)
    return _error(503, "too_many_requests", f"{gateway} has {len(link.streams)} requests", retry=True)


def _error(status: int, code: str, message: str, *, retry: bool = False) -> web.Response:
    headers = {"Retry-After": "1"} if retry else {}
    return web.json_response(
        {"error": {"type": code, "code": code, "message": f"relay: {message}"}},
        status=status,
        headers=headers,
    )


def _unacknowledged(transport: asyncio.Transport) -> int:
    """Bytes of a connection that its peer has not acknowledged yet."""
    waiting = transport.get_write_buffer_size()
    handle = transport.get_extra_info("socket")
    if handle is None:
        return waiting
    with suppress(OSError, ValueError):
        packed = fcntl.ioctl(handle.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
        return waiting + struct.unpack("i", packed)[0]
    return waiting


# --- serving -------------------------------------------------------------------------------------


class _LimitedHandler(web.RequestHandler):
    """A connection that is closed if its first request does not come, or its address has too many."""

    def __init__(
        self, manager: web.Server, limits: RelayLimits, connections: Counter[str], **options: Any
    ) -> None:
        super().__init__(manager, **options)
        self._limits = limits
        self._open = connections
        self._address: str | None = None
        self.has_request = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self._address = str(peer[0]) if peer else ""
        self._open[self._address] += 1
        limits = self._limits
        if self._open[self._address] > limits.per_address or self._open.total() > limits.connections:
            log.warning("relay: connection refused address=%s reason=limit", self._address)
            self.force_close()
            return
        asyncio.get_running_loop().call_later(limits.head_s, self._check_head)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._address is not None:
            self._open[self._address] -= 1
            if not self._open[self._address]:
                del self._open[self._address]
            self._address = None
        super().connection_lost(exc)

    def _check_head(self) -> None:
        """Close a connection that has not sent one complete request head."""
        if not self.has_request:
            self.force_close()


@asynccontextmanager
async def serve_relay(
    relay: Relay,
    listener: socket.socket,
    *,
    limits: RelayLimits | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[None]:
    """Serve a relay on a listening socket."""
    chosen = limits or RelayLimits()
    connections: Counter[str] = Counter()
    server = web.Server(relay.handle, handler_cancellation=True)
    loop = asyncio.get_running_loop()
    options = {"loop": loop, "access_log": None, "auto_decompress": False, "keepalive_timeout": 75.0}

    def connection() -> _LimitedHandler:
        return _LimitedHandler(server, chosen, connections, **options)

    serving = await loop.create_server(connection, sock=listener, ssl=tls)
    try:
        yield
    finally:
        serving.close()
        await relay.close()
        await server.shutdown(5.0)
