"""Relay client: dials out and serves an ASGI application through a relay.

1. Connects with mutual proof of the cluster's secret, and reconnects with back-off for ever.
2. Each stream is one ASGI request. A lost connection does not end it: after a reconnect both sides continue
   at the byte that the other one has received.
3. A restarted relay has lost its agents' connections. Their requests go on and wait `claim_s` for a repeated
   request (same method, path, key and body), which gets the whole response: nothing is generated twice.
   Requests that nobody repeats, and those whose response is not kept, end as a client's disconnect does.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote, urlsplit

import aiohttp
from aiohttp.http_websocket import WSMsgType

from afield.errors import UsageError, WireError
from afield.relay.auth import LinkRequest
from afield.relay.streams import (
    HOP_BY_HOP,
    MAX_MESSAGE,
    ByteBudget,
    Frame,
    FrameType,
    Multiplexer,
    RequestHead,
    ResponseHead,
    Stream,
    StreamReset,
    decode_frames,
    decode_streams,
    encode_head,
)
from afield.utils.backoff import Backoff

log = logging.getLogger("afield.relay")

App = Callable[[MutableMapping[str, Any], Callable[..., Any], Callable[..., Any]], Awaitable[None]]
REPLAY_LIMIT = 16 * 1024 * 1024
"""Size up to which a response is kept for a repeated request, in bytes."""
REPLAYS_LIMIT = 256 * 1024 * 1024
"""Size of all responses that are kept for repeated requests, in bytes."""
BACKOFF_S = (0.05, 5.0)
"""First and longest pause between connections, in seconds."""
CONNECT_S = 10.0
"""Timeout of a connection, in seconds."""
HEARTBEAT_S = 5.0
"""Interval of pings, in seconds; a link that misses a pong is lost."""
NAME_HEARTBEATS = 3
"""Heartbeats for which a name that another process has is asked for again: it may be gone without a FIN."""
KEY_HEADERS = frozenset({b"authorization", b"x-api-key", b"x-goog-api-key"})


class NameInUse(UsageError):
    """Another process is connected under the same name."""


class RelayedRequest(Stream):
    """A request that came through the relay, with the task that answers it."""

    def __init__(self, id: int, wake: Callable[[Stream], None], replays: ByteBudget) -> None:
        super().__init__(id, wake, replay_limit=REPLAY_LIMIT, replays=replays)
        self.head: RequestHead | None = None
        self.digest = hashlib.sha256()
        self.body_complete = False
        self.task: asyncio.Task[None] | None = None
        self.gone = asyncio.Event()
        """Set when the agent is gone: the application gets `http.disconnect`."""
        self.target: RelayedRequest | None = None
        """Repeated request that has taken over this response."""

    @property
    def current(self) -> RelayedRequest:
        """Stream that the response goes to: the last repeated request, or this one."""
        stream = self
        while stream.target is not None:
            stream = stream.target
        return stream

    def key(self) -> tuple[str, str, str, tuple[bytes, ...]]:
        """Fields besides the body that identify a repeated request."""
        assert self.head is not None
        keys = tuple(value for name, value in self.head.headers if name in KEY_HEADERS)
        return self.head.method, self.head.path, self.head.query, keys

    def abandon(self, reason: str) -> None:
        """Have the application see a disconnect, also where it waits to send."""
        self.gone.set()
        self.reset(reason)
        self.release()

    def body_digest(self) -> bytes:
        """Digest of a body that has arrived as a whole, whether the application has read it or not."""
        digest = self.digest.copy()
        digest.update(self.incoming.unread())
        return digest.digest()


class RelayClient(Multiplexer):
    """Serves `app` through the relay at `url`, as `gateway` of `cluster`.

    Without `claim_s`, requests of a lost relay end at once.
    """

    def __init__(
        self,
        app: App,
        *,
        url: str,
        cluster: str,
        gateway: str,
        secret: bytes,
        process: int = 0,
        processes: int = 1,
        state: dict[str, Any] | None = None,
        claim_s: float = 60.0,
        resume_s: float = 60.0,
        heartbeat_s: float = HEARTBEAT_S,
        replays_limit: int = REPLAYS_LIMIT,
        tls: Any = None,
    ) -> None:
        super().__init__()
        self._app = app
        self._url = url.rstrip("/")
        self._cluster = cluster
        self._gateway = gateway
        self._secret = secret
        self._process = process
        self._processes = processes
        self._state = state or {}
        self._claim_s = claim_s
        self._resume_s = resume_s
        self._heartbeat_s = heartbeat_s
        self._tls = tls
        self._instance = secrets.token_hex(8)
        self._relay: str | None = None
        self._ended: deque[int] = deque(maxlen=10_000)
        self._replays = ByteBudget(replays_limit)
        self._orphans: dict[tuple[Any, ...], list[RelayedRequest]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._backoff = Backoff(*BACKOFF_S, jitter=True)
        self._links = 0  # number of lost links
        self.connected = asyncio.Event()

    async def run(self) -> None:
        """Serve until cancelled. Raises UsageError if the relay refuses the secret or the name."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        clock = asyncio.get_running_loop().time
        give_up = clock() + NAME_HEARTBEATS * self._heartbeat_s
        try:
            async with aiohttp.ClientSession(timeout=timeout) as http:
                while True:
                    try:
                        await self._link(http)
                    except UsageError as error:
                        freed = isinstance(error, NameInUse) and clock() < give_up
                        if self._relay is None and not freed:  # never connected: a wrong setting
                            raise
                        log.warning("relay: link refused relay=%s error=%s", self._url, error)
                    except (aiohttp.ClientError, TimeoutError, OSError, WireError) as error:
                        log.warning(
                            "relay: link down relay=%s retry_s=%.2f error=%s",
                            self._url,
                            self._backoff.next_s,
                            error,
                        )
                    finally:
                        if self.connected.is_set():
                            self.connected.clear()
                            self._links += 1
                            self._after(self._resume_s, self._expire_unresumed, self._links)
                    await self._backoff.sleep()
        finally:
            await self._close()

    async def _close(self) -> None:
        for stream in [*self.streams.values(), *self._all_orphans()]:
            assert isinstance(stream, RelayedRequest)
            stream.abandon("the gateway is being stopped")
        running = [task for task in self._tasks if not task.done()]
        if running:
            await asyncio.wait(running, timeout=5.0)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    # --- the link --------------------------------------------------------------------------------

    async def _link(self, http: aiohttp.ClientSession) -> None:
        """Connect, resume streams, and receive frames until the connection is lost."""
        base = f"{self._url}/c/{self._cluster}"
        async with asyncio.timeout(CONNECT_S):
            async with http.get(f"{base}/challenge", ssl=self._tls or True) as response:
                if response.status == 401:
                    raise UsageError(
                        f"the relay {self._url} does not serve cluster {self._cluster!r}: correct the name"
                        f" here, or start the relay with --cluster {self._cluster}=FILE"
                    )
                response.raise_for_status()
                challenge = self._challenge(await response.read())
            request = LinkRequest(
                gateway=self._gateway,
                process=self._process,
                processes=self._processes,
                instance=self._instance,
                challenge=challenge,
                nonce=secrets.token_hex(16),
            ).signed(self._cluster, self._secret)
            socket = await self._upgrade(http, f"{base}/connect", request)
        async with socket:
            async with asyncio.timeout(CONNECT_S):
                hello = await socket.receive()
                if hello.type is not WSMsgType.TEXT:
                    raise WireError("the relay closed the link during the handshake")
                relay = self._check_relay(hello.data, request)
                await self._resume(relay, decode_streams(hello.data).streams, socket)
            log.info(
                "relay: link up relay=%s gateway=%s streams=%d", self._url, self._gateway, len(self.streams)
            )
            self.connected.set()
            self._backoff.reset()
            writing = asyncio.create_task(self.write(socket.send_bytes))
            try:
                async for message in socket:
                    if message.type is WSMsgType.BINARY:
                        self._receive(message.data)
            finally:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
        raise WireError(f"the relay closed the link (code {socket.close_code})")

    async def _upgrade(
        self, http: aiohttp.ClientSession, url: str, request: LinkRequest
    ) -> aiohttp.ClientWebSocketResponse:
        headers = {"Authorization": request.to_header()}
        try:
            return await http.ws_connect(
                url,
                headers=headers,
                heartbeat=self._heartbeat_s,
                max_msg_size=MAX_MESSAGE,
                ssl=self._tls or True,
            )
        except aiohttp.WSServerHandshakeError as error:
            if error.status == 401:
                raise UsageError(
                    f"the relay {self._url} refuses the secret of cluster {self._cluster!r};"
                    " the relay and the gateway need the same secret"
                ) from error
            if error.status == 409:
                raise NameInUse(
                    f"another process is connected to {self._url} as {self._gateway!r} of {self._cluster!r};"
                    " choose another relay name"
                ) from error
            raise

    def _challenge(self, body: bytes) -> str:
        try:
            return str(json.loads(body)["challenge"])
        except (ValueError, KeyError, TypeError) as error:
            raise WireError(f"{self._url} sent no challenge, so it may not be a relay: {error}") from error

    def _check_relay(self, text: str, request: LinkRequest) -> str:
        try:
            hello = json.loads(text)
            relay, proof = str(hello["relay"]), str(hello["proof"])
        except (ValueError, KeyError, TypeError) as error:
            raise WireError(f"malformed relay handshake: {error}") from error
        if not secrets.compare_digest(proof, request.relay_proof(self._cluster, self._secret)):
            raise UsageError(
                f"{self._url} does not have the secret of cluster {self._cluster!r}: not a relay of it"
            )
        return relay

    async def _resume(
        self, relay: str, theirs: dict[int, int], socket: aiohttp.ClientWebSocketResponse
    ) -> None:
        if relay != self._relay:
            self._orphan_all()
            self._ended.clear()
        self._relay = relay
        received = {str(stream): offset for stream, offset in self.received().items()}
        for stream in self.resume(theirs):
            assert isinstance(stream, RelayedRequest)
            self.remove(stream)  # delivered, or its agent is gone
            if stream.outgoing.is_acknowledged:
                stream.release()
            else:
                stream.abandon("the agent disconnected")
        ended = [stream for stream in self._ended if stream in theirs]  # their RESET may be lost
        await socket.send_str(json.dumps({"streams": received, "ended": ended}))

    def _receive(self, message: bytes) -> None:
        for frame in decode_frames(message):
            stream = self.streams.get(frame.stream)
            if frame.type is FrameType.DATA and stream is None:
                if frame.offset:
                    if frame.stream in self._ended:
                        continue  # sent before the relay got the RESET
                    raise WireError(f"stream {frame.stream} begins at byte {frame.offset}")
                stream = self._begin(frame.stream)
            if stream is None:
                continue
            if frame.type in (FrameType.DATA, FrameType.ACK):
                self.dispatch(frame)
            else:
                assert isinstance(stream, RelayedRequest)
                self.remove(stream)
                if frame.type is FrameType.RESET:
                    stream.abandon(frame.payload.decode(errors="replace"))
                else:
                    stream.release()

    # --- requests --------------------------------------------------------------------------------

    def _begin(self, id: int) -> RelayedRequest:
        stream = RelayedRequest(id, self.wake, self._replays)
        self.streams[id] = stream
        stream.task = asyncio.create_task(self._serve(stream))
        self._tasks.add(stream.task)
        stream.task.add_done_callback(self._tasks.discard)
        return stream

    async def _serve(self, stream: RelayedRequest) -> None:
        try:
            stream.head = await stream.incoming.read_head(RequestHead)
            body: list[bytes] = []
            if stream.key() in self._orphans:
                await self._read_body(stream, body)
                if self._claim(stream):
                    return
            await self._respond(stream, stream.head, body)
        except StreamReset:
            pass
        except WireError as error:
            self._fail(stream, str(error))
        except Exception as error:
            log.exception("relay: request failed stream=%d", stream.id)
            self._fail(stream, f"the gateway failed at this request: {type(error).__name__}")

    def _fail(self, stream: RelayedRequest, reason: str) -> None:
        """End a request whose response the application has not finished."""
        stream = stream.current
        if stream.outgoing.ended:
            return
        self._forget(stream)
        stream.release()
        if self.streams.get(stream.id) is not stream:
            return  # the relay does not know it; another request may have its number at a new relay
        self.send(Frame(FrameType.RESET, stream.id, payload=reason.encode()[:1000]))
        self._ended.append(stream.id)
        self.remove(stream)

    async def _read_body(self, stream: RelayedRequest, body: list[bytes]) -> None:
        while (data := await stream.incoming.read()) is not None:
            stream.digest.update(data)
            body.append(data)
        stream.body_complete = True

    async def _respond(self, stream: RelayedRequest, head: RequestHead, body: list[bytes]) -> None:
        """Run the application on one request; `body` holds what was read already."""
        parts = iter(body)
        complete = stream.body_complete
        ended = False

        async def receive() -> dict[str, Any]:
            nonlocal ended
            if not ended and (data := next(parts, None)) is not None:
                return {"type": "http.request", "body": data, "more_body": True}
            if complete and not ended:
                ended = True
                return {"type": "http.request", "body": b"", "more_body": False}
            if not ended:
                with suppress(StreamReset):
                    data = await stream.incoming.read()
                    if data is not None:
                        stream.digest.update(data)
                        return {"type": "http.request", "body": data, "more_body": True}
                    ended = stream.body_complete = True
                    return {"type": "http.request", "body": b"", "more_body": False}
                ended = True
            await stream.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            out = stream.current.outgoing
            if message["type"] == "http.response.start":
                headers = tuple(
                    (k.lower(), v) for k, v in message.get("headers", ()) if k.lower() not in HOP_BY_HOP
                )
                out.append(encode_head(ResponseHead(message["status"], headers)))
                return
            out.append(message.get("body", b""))
            if not message.get("more_body", False):
                out.finish()
                return
            with suppress(StreamReset):  # the disconnect is told by `receive`
                await out.wait_for_space()
                while (successor := stream.current.outgoing) is not out:  # of a repeated request
                    out = successor
                    await out.wait_for_space()

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": head.method,
            "scheme": urlsplit(self._url).scheme,
            "path": unquote(head.path),
            "raw_path": head.path.encode(),
            "query_string": head.query.encode(),
            "root_path": "",
            "headers": list(head.headers),
            "client": (head.peer, 0),
            "server": None,
            "state": dict(self._state),
        }
        await self._app(scope, receive, send)
        self._fail(stream, "the gateway ended the request")  # unless it is complete

    # --- repeated requests -----------------------------------------------------------------------

    def _orphan_all(self) -> None:
        """Keep the responses that the agents of a lost relay may not have."""
        for stream in list(self.streams.values()):
            assert isinstance(stream, RelayedRequest)
            self.remove(stream)
            arrived = stream.head is not None and (stream.body_complete or stream.incoming.ended)
            if not arrived or not stream.outgoing.is_kept or not self._claim_s:
                stream.abandon("the relay was restarted")
                continue
            self._orphans.setdefault(stream.key(), []).append(stream)
            self._after(self._claim_s, self._expire_orphan, stream)

    def _claim(self, repeated: RelayedRequest) -> bool:
        """Answer a repeated request with the response that is kept for it."""
        for orphan in list(self._orphans.get(repeated.key(), [])):
            if orphan is repeated or orphan.body_digest() != repeated.body_digest():
                continue
            self._forget(orphan)
            outgoing = orphan.outgoing.move(lambda: self.wake(repeated))
            if outgoing is None:
                orphan.abandon("the response is no longer kept")
                continue
            # The application goes on writing for the stream of the repeated request.
            repeated.outgoing = outgoing
            repeated.gone = orphan.gone
            repeated.body_complete = True
            orphan.target = repeated
            self.wake(repeated)
            log.info("relay: repeated request gets its response stream=%d", repeated.id)
            return True
        return False

    def _forget(self, orphan: RelayedRequest) -> None:
        if orphan.head is None:
            return
        waiting = self._orphans.get(orphan.key(), [])
        if orphan in waiting:
            waiting.remove(orphan)
            if not waiting:
                del self._orphans[orphan.key()]

    def _all_orphans(self) -> list[RelayedRequest]:
        return [orphan for orphans in self._orphans.values() for orphan in orphans]

    def _expire_orphan(self, orphan: RelayedRequest) -> None:
        if orphan in self._orphans.get(orphan.key(), []):
            self._forget(orphan)
            orphan.abandon("the agent did not repeat the request")

    def _expire_unresumed(self, lost: int) -> None:
        """Give up streams if the link that was lost as number `lost` was not replaced in `resume_s`."""
        if not self.connected.is_set() and lost == self._links:
            for stream in list(self.streams.values()):
                assert isinstance(stream, RelayedRequest)
                self.remove(stream)
                self._ended.append(stream.id)
                stream.abandon("the relay was unreachable")

    def _after(self, seconds: float, action: Callable[[Any], None], argument: object) -> None:
        asyncio.get_running_loop().call_later(seconds, action, argument)
