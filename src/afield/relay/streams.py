"""Resumable, flow-controlled streams over one WebSocket.

A stream carries one HTTP request and its response, each as a numbered sequence of bytes that begins with a
head. The frames of all streams share a connection:

1. DATA carries bytes with their offset; the last one has the END flag. Overlapping bytes are ignored, so a
   sender may repeat them after a reconnect.
2. ACK names the offset up to which the reader has consumed. A sender keeps unacknowledged bytes and sends at
   most a window beyond the last ACK: a slow reader stalls its own stream only.
3. RESET ends a stream early. DELIVERED tells that the agent has the whole response.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from afield.errors import AfieldError, WireError

WINDOW = 128 * 1024
"""Bytes that a sender may be ahead of the last ACK of a stream."""
CHUNK = 32 * 1024
"""Largest payload of a DATA frame, so that streams take turns."""
MESSAGE = 256 * 1024
"""Size above which a WebSocket message takes no further frames."""
ACK_EVERY = 32 * 1024
"""Bytes that are consumed before an ACK is sent; the end is acknowledged at once."""
COUNT_EVERY = 4 * 1024
"""Change of the bytes held by a stream that is counted in a budget."""
MAX_HEAD = 256 * 1024
"""Largest head of a request or response, in bytes."""

HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding"),
        *(b"upgrade", b"host", b"expect"),
    }
)
MAX_MESSAGE = 4 * 1024 * 1024
"""Largest WebSocket message, in bytes."""

_FRAME = struct.Struct(">BQI")
_OFFSET = struct.Struct(">QB")
_LENGTH = struct.Struct(">I")
END = 1
T = TypeVar("T")


class StreamReset(AfieldError):
    """The other side ended the stream, or it could not be resumed."""


class FrameType(IntEnum):
    """Kind of a frame."""

    DATA = 1
    ACK = 2
    RESET = 3
    DELIVERED = 4


class Frame(NamedTuple):
    """Frame of a stream."""

    type: FrameType
    """Kind of the frame."""
    stream: int
    """Stream id, chosen by the relay."""
    offset: int = 0
    """DATA: offset of the first byte. ACK: number of consumed bytes."""
    payload: bytes = b""
    """DATA: bytes. RESET: reason."""
    end: bool = False
    """DATA: whether these are the last bytes."""

    def encode(self) -> bytes:
        if self.type in (FrameType.DATA, FrameType.ACK):
            offset = _OFFSET.pack(self.offset, END if self.end else 0)
            return (
                _FRAME.pack(self.type, self.stream, len(self.payload) + len(offset)) + offset + self.payload
            )
        return _FRAME.pack(self.type, self.stream, len(self.payload)) + self.payload


def decode_frames(message: bytes) -> Iterator[Frame]:
    """Decode a WebSocket message; raises WireError if it is malformed."""
    position, view = 0, memoryview(message)
    while position < len(message):
        try:
            kind, stream, length = _FRAME.unpack_from(message, position)
            body = view[position + _FRAME.size : position + _FRAME.size + length]
            if len(body) != length:
                raise ValueError(f"a frame of {length} bytes has {len(body)}")
            type_ = FrameType(kind)
            if type_ in (FrameType.DATA, FrameType.ACK):
                offset, flags = _OFFSET.unpack_from(body)
                yield Frame(type_, stream, offset, bytes(body[_OFFSET.size :]), bool(flags & END))
            else:
                yield Frame(type_, stream, payload=bytes(body))
        except (ValueError, struct.error) as error:
            raise WireError(f"malformed relay frame at byte {position}: {error}") from error
        position += _FRAME.size + length


class KnownStreams(Struct, frozen=True):
    """Handshake message: streams of one side, from which both continue."""

    streams: dict[int, int]
    """Bytes received per stream."""
    ended: tuple[int, ...] = ()
    """Streams that this side has ended and forgotten."""


def decode_streams(text: str) -> KnownStreams:
    try:
        return msgspec.json.decode(text, type=KnownStreams)
    except msgspec.MsgspecError as error:
        raise WireError(f"malformed relay handshake: {error}") from error


# --- heads ---------------------------------------------------------------------------------------


class RequestHead(Struct, frozen=True, array_like=True):
    """Head of a request, without the route prefix of its path."""

    method: str
    """HTTP method."""
    path: str
    """Path of the gateway, percent-encoded."""
    query: str
    """Query string."""
    headers: tuple[tuple[bytes, bytes], ...]
    """Headers with lower-case names, without hop-by-hop headers."""
    peer: str
    """Address of the agent, as the relay sees it."""


class ResponseHead(Struct, frozen=True, array_like=True):
    """Head of a response."""

    status: int
    """HTTP status."""
    headers: tuple[tuple[bytes, bytes], ...]
    """Headers with lower-case names, without hop-by-hop headers."""


def encode_head(head: Struct) -> bytes:
    body = msgspec.msgpack.encode(head)
    if len(body) > MAX_HEAD:
        raise WireError(f"the headers have {len(body)} bytes; the relay accepts at most {MAX_HEAD}")
    return _LENGTH.pack(len(body)) + body


# --- sequences of bytes --------------------------------------------------------------------------


class ByteBudget:
    """Bytes that many streams hold together, with a limit."""

    def __init__(self, limit: int, whole: ByteBudget | None = None) -> None:
        """`whole` is a larger budget, which counts these bytes too."""
        self.limit = limit
        self.used = 0
        self._whole = whole
        self._room = asyncio.Event()
        self._awaited = False

    def add(self, size: int) -> None:
        """Count bytes; a negative size gives them back."""
        self.used += size
        if self._awaited and self.used < self.limit:
            self._awaited = False
            self._room.set()
        if self._whole is not None:
            self._whole.add(size)

    def is_full(self, share: float = 1.0) -> bool:
        """Whether a share of the limit, of this budget or of the larger one, is used."""
        if self.used >= share * self.limit:
            return True
        return self._whole is not None and self._whole.is_full(share)

    async def wait_for_room(self) -> None:
        if self._whole is not None:
            await self._whole.wait_for_room()
        while self.used >= self.limit:
            self._awaited = True
            self._room.clear()
            await self._room.wait()


class Outgoing:
    """Bytes of one direction at their sender."""

    def __init__(
        self,
        wake: Callable[[], None],
        *,
        held: ByteBudget | None = None,
        replay_limit: int = 0,
        replays: ByteBudget | None = None,
    ) -> None:
        """`wake` is called when there is something to send. `held` counts unacknowledged bytes.
        The first `replay_limit` bytes are kept for `move`, as long as `replays` has room for them."""
        self._wake = wake
        self._held = held
        self._parts: deque[bytes] = deque()
        self._first = 0  # offset of the first kept part
        self.acknowledged = 0
        self._sent = 0
        self._end_sent = False
        self.size = 0
        self.ended = False
        self._reset: str | None = None
        self._space = asyncio.Event()
        self._space.set()
        self._replay: list[bytes] | None = [] if replay_limit else None
        self._replay_limit = replay_limit
        self._replays = replays

    def append(self, data: bytes) -> None:
        """Add bytes without waiting for space. After a reset they are dropped."""
        if not data or self._reset is not None:
            return
        self._parts.append(data)
        if self._held is not None:
            self._held.add(len(data))
        if self._replay is not None:
            self._keep(self._replay, data)
        self.size += len(data)
        if self.size - self.acknowledged >= WINDOW:
            self._space.clear()
        self._wake()

    async def wait_for_space(self) -> None:
        """Wait until the reader is less than a window behind. Raises StreamReset."""
        await self._space.wait()
        if self._reset is not None:
            raise StreamReset(self._reset)

    def reset(self, reason: str) -> None:
        self._reset = reason
        self._space.set()

    def finish(self) -> None:
        self.ended = True
        self._wake()

    def _keep(self, replay: list[bytes], data: bytes) -> None:
        budget = self._replays
        if self.size + len(data) > self._replay_limit or (
            budget is not None and budget.used + len(data) > budget.limit
        ):
            self.drop_replay()
            return
        replay.append(data)
        if budget is not None:
            budget.add(len(data))

    @property
    def is_kept(self) -> bool:
        """Whether all bytes are kept for `move`."""
        return self._replay is not None

    def drop_replay(self) -> None:
        """Forget the bytes that are kept for `move`."""
        if self._replay is not None and self._replays is not None:
            self._replays.add(-self.size)
        self._replay = None

    def move(self, wake: Callable[[], None]) -> Outgoing | None:
        """Return a successor that begins at offset 0 again; None if the bytes are no longer kept.

        Writers that wait for space here continue, and then wait at the successor.
        """
        if self._replay is None:
            return None
        kept = self._replay
        self.drop_replay()
        again = Outgoing(wake, held=self._held, replay_limit=self._replay_limit, replays=self._replays)
        for part in kept:
            again.append(part)
        again.ended = self.ended
        self._parts.clear()
        self._space.set()
        return again

    def release(self) -> None:
        """Give back what the budgets count; later bytes are not counted."""
        self.drop_replay()
        if self._held is not None:
            self._held.add(self.acknowledged - self.size)
            self._held = None

    @property
    def has_frames(self) -> bool:
        limit = self.acknowledged + WINDOW
        return min(self.size, limit) > self._sent or (
            self.ended and not self._end_sent and self._sent == self.size
        )

    @property
    def is_acknowledged(self) -> bool:
        return self.ended and self._end_sent and self.acknowledged == self.size

    def next_frame(self, stream: int) -> Frame:
        """Return the next DATA frame; call only if `has_frames`."""
        stop = min(self.size, self.acknowledged + WINDOW, self._sent + CHUNK)
        data = self._slice(self._sent, stop)
        frame = Frame(FrameType.DATA, stream, self._sent, data, self.ended and stop == self.size)
        self._sent = stop
        self._end_sent = self._end_sent or frame.end
        return frame

    def acknowledge(self, offset: int) -> None:
        """Forget bytes that the reader has consumed."""
        if not self.acknowledged <= offset <= self.size:
            raise WireError(f"ACK of byte {offset}, outside {self.acknowledged}..{self.size}")
        if self._held is not None:
            self._held.add(self.acknowledged - offset)
        self.acknowledged = offset
        while self._parts and self._first + len(self._parts[0]) <= offset:
            self._first += len(self._parts.popleft())
        if self.size - offset < WINDOW:
            self._space.set()
        self._wake()

    def rewinds_to(self, offset: int) -> bool:
        """Whether the bytes from this offset on are kept."""
        return self._first <= offset <= self.size

    def rewind(self, received: int) -> None:
        """Continue at the offset that the reader has received, after a reconnect."""
        if not self.rewinds_to(received):
            raise WireError(f"byte {received} cannot be sent again; {self._first}..{self.size} are kept")
        self._sent, self._end_sent = received, False
        self._wake()

    def _slice(self, start: int, stop: int) -> bytes:
        parts: list[bytes] = []
        position = self._first
        for part in self._parts:
            if position >= stop:
                break
            if position + len(part) > start:
                parts.append(part[max(0, start - position) : stop - position])
            position += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Incoming:
    """Bytes of one direction at their reader."""

    def __init__(self, wake: Callable[[], None], *, held: ByteBudget | None = None) -> None:
        """`wake` is called when an ACK is due. `held` counts bytes until the read after theirs."""
        self._wake = wake
        self._held = held
        self._counted = 0  # bytes in `held`
        self._unsettled = 0  # bytes that came and went since
        self._parts: deque[bytes] = deque()
        self.received = 0
        self.consumed = 0
        self.acknowledged = 0
        self.ended = False
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def accept(self, frame: Frame) -> None:
        if frame.offset > self.received:
            raise WireError(f"bytes {self.received}..{frame.offset} of stream {frame.stream} are missing")
        fresh = frame.payload[self.received - frame.offset :]
        if fresh:
            if self.received + len(fresh) - self.consumed > WINDOW + MAX_HEAD:
                raise WireError(f"stream {frame.stream} exceeds its window of {WINDOW} bytes")
            self._parts.append(fresh)
            self.received += len(fresh)
            self._unsettled += len(fresh)
            self._settle()
        if frame.end:
            self.ended = True
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Have `read` raise an error once the received bytes are read."""
        self._error = self._error or error
        self._arrived.set()

    async def read(self) -> bytes | None:
        """Return the next bytes; None at the end. Raises StreamReset."""
        self._unsettled = self.received - self.consumed - self._counted  # it is done with the last bytes
        self._settle()
        while not self._parts:
            if self.ended:
                return None
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()
        data = self._parts.popleft() if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self.consumed += len(data)
        if self.ack_due:
            self._wake()
        return data

    def _settle(self) -> None:
        """Count bytes in steps, since most responses come and go in small parts."""
        if self._held is not None and abs(self._unsettled) >= COUNT_EVERY:
            self._held.add(self._unsettled)
            self._counted += self._unsettled
            self._unsettled = 0

    def release(self) -> None:
        """Give back what the budget counts; later bytes are not counted."""
        if self._held is not None:
            self._held.add(-self._counted)
            self._held = None

    def unread(self) -> bytes:
        """Bytes that have arrived and were not read."""
        return b"".join(self._parts)

    async def read_head(self, kind: type[T]) -> T:
        """Read the head; the bytes behind it stay unread."""
        data = b""
        while len(data) < _LENGTH.size or len(data) < _LENGTH.size + _LENGTH.unpack_from(data)[0]:
            more = await self.read()
            if more is None:
                raise StreamReset("the stream ended in its head")
            data += more
            if len(data) >= _LENGTH.size and _LENGTH.unpack_from(data)[0] > MAX_HEAD:
                raise WireError(f"a head of {_LENGTH.unpack_from(data)[0]} bytes; {MAX_HEAD} are allowed")
        stop = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        if rest := data[stop:]:
            self._parts.appendleft(rest)
            self.consumed -= len(rest)
            self._arrived.set()
        try:
            return msgspec.msgpack.decode(data[_LENGTH.size : stop], type=kind)
        except msgspec.MsgspecError as error:
            raise WireError(f"malformed head of a stream: {error}") from error

    @property
    def ack_due(self) -> bool:
        pending = self.consumed - self.acknowledged
        return pending >= ACK_EVERY or (pending > 0 and self.ended and self.consumed == self.received)

    def take_ack(self) -> int:
        self.acknowledged = self.consumed
        return self.consumed


class Stream:
    """Request and its response, at either end."""

    def __init__(
        self,
        id: int,
        wake: Callable[[Stream], None],
        *,
        held: ByteBudget | None = None,
        replay_limit: int = 0,
        replays: ByteBudget | None = None,
    ) -> None:
        """See `Outgoing` and `Incoming` for the budgets."""
        self.id = id
        self.outgoing = Outgoing(lambda: wake(self), held=held, replay_limit=replay_limit, replays=replays)
        self.incoming = Incoming(lambda: wake(self), held=held)

    def reset(self, reason: str) -> None:
        """End both directions: their users get StreamReset."""
        self.outgoing.reset(reason)
        self.incoming.fail(StreamReset(reason))

    def release(self) -> None:
        """Give back what budgets count."""
        self.outgoing.release()
        self.incoming.release()


class Multiplexer:
    """Sends the frames of many streams over the current connection, in turns."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self._waiting: dict[Stream, None] = {}
        self._control: deque[Frame] = deque()
        self._awake = asyncio.Event()

    def wake(self, stream: Stream) -> None:
        """Send frames of a stream, unless it was removed: its number may be another stream's by now."""
        if self.streams.get(stream.id) is not stream:
            return
        self._waiting[stream] = None
        self._awake.set()

    def send(self, frame: Frame) -> None:
        """Send a RESET or DELIVERED frame; it is lost if the connection is."""
        self._control.append(frame)
        self._awake.set()

    def remove(self, stream: Stream) -> None:
        if self.streams.get(stream.id) is stream:
            del self.streams[stream.id]
        self._waiting.pop(stream, None)

    def resume(self, received: dict[int, int]) -> Iterable[Stream]:
        """Rewind streams to what the other side has received; returns those it does not know."""
        self._control.clear()
        self._waiting.clear()
        unknown: list[Stream] = []
        for stream in list(self.streams.values()):
            if stream.id not in received:
                unknown.append(stream)
                continue
            stream.outgoing.rewind(received[stream.id])
            stream.incoming.acknowledged = -1  # acknowledge again: the last ACK may be lost
            self.wake(stream)
        return unknown

    def received(self) -> dict[int, int]:
        return {stream.id: stream.incoming.received for stream in self.streams.values()}

    def dispatch(self, frame: Frame) -> bool:
        """Deliver a DATA or ACK frame to its stream; False if the stream is unknown."""
        stream = self.streams.get(frame.stream)
        if stream is None:
            return False
        if frame.type is FrameType.DATA:
            stream.incoming.accept(frame)
        elif frame.type is FrameType.ACK:
            stream.outgoing.acknowledge(max(frame.offset, stream.outgoing.acknowledged))
        return True

    async def write(self, send_bytes: Callable[[bytes], Any]) -> None:
        """Send frames until cancelled."""
        while True:
            await self._awake.wait()
            self._awake.clear()
            while message := self._next_message():
                await send_bytes(message)

    def _next_message(self) -> bytes:
        """Collect frames: control frames first, then one chunk of each stream in turn."""
        parts: list[bytes] = []
        size = 0
        while self._control and size < MESSAGE:
            parts.append(self._control.popleft().encode())
            size += len(parts[-1])
        while self._waiting and size < MESSAGE:
            stream = next(iter(self._waiting))
            del self._waiting[stream]
            if stream.incoming.ack_due or stream.incoming.acknowledged < 0:
                parts.append(Frame(FrameType.ACK, stream.id, stream.incoming.take_ack()).encode())
            if stream.outgoing.has_frames:
                parts.append(stream.outgoing.next_frame(stream.id).encode())
                if stream.outgoing.has_frames:
                    self._waiting[stream] = None
            size += len(parts[-1]) if parts else 0
        return b"".join(parts)
