"""Messages between a gateway and its engine process.

A frame is a length and a list of messages in MessagePack.
"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
from msgspec import Struct

from afield.errors import Conflict, Unavailable, UsageError
from afield.interfaces.engine import Chunk, EngineInfo, GenerateRequest

HEADER = 4
ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (ValueError, UsageError, Conflict, Unavailable)
}


class EngineOptions(Struct, frozen=True, kw_only=True, tag="start"):
    """Arguments of `TorchEngine`."""

    model_path: str
    version: int = 0
    max_slots: int | None = None
    max_context: int | None = None
    device: str | None = None
    dtype: str | None = None
    seed: int = 0
    cache_tokens: int | None = None
    prefill_tokens: int | None = None
    fixed_steps: bool | None = None


class CallMessage(Struct, frozen=True, tag="call"):
    """A call to sample."""

    number: int
    call: GenerateRequest


class CancelMessage(Struct, frozen=True, tag="cancel"):
    """A call whose chunks are no longer wanted."""

    number: int


class LoadMessage(Struct, frozen=True, tag="load"):
    """Weights to serve."""

    number: int
    version: int
    path: str


class InfoMessage(Struct, frozen=True, tag="info"):
    """A request for the engine's info."""

    number: int


class ChunkMessage(Struct, frozen=True, tag="chunk"):
    """Sampled tokens of a call."""

    number: int
    chunk: Chunk


class ReplyMessage(Struct, frozen=True, tag="reply"):
    """The engine's info, after it started, after weights were loaded, or as requested."""

    number: int
    info: EngineInfo


class ErrorMessage(Struct, frozen=True, tag="error"):
    """Failure of a call or request; `kind` is a key of `ERRORS`."""

    number: int
    kind: str
    text: str

    @classmethod
    def of(cls, number: int, error: Exception) -> ErrorMessage:
        kind = next((name for name, kind in ERRORS.items() if isinstance(error, kind)), Unavailable.__name__)
        return cls(number, kind, str(error))

    def to_exception(self) -> Exception:
        return ERRORS.get(self.kind, Unavailable)(self.text)


Request = EngineOptions | CallMessage | CancelMessage | LoadMessage | InfoMessage
Reply = ChunkMessage | ReplyMessage | ErrorMessage
START = 0
"""Number of the reply to `EngineOptions`."""


class MessageWriter:
    """Collects messages of one turn of the event loop into one frame."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._messages: list[Request | Reply] = []

    def send(self, message: Request | Reply) -> None:
        if not self._messages:
            asyncio.get_running_loop().call_soon(self._flush)
        self._messages.append(message)

    def _flush(self) -> None:
        if not self._messages:
            return
        frame = self._encoder.encode(self._messages)
        self._messages.clear()
        if not self._writer.is_closing():
            self._writer.write(len(frame).to_bytes(HEADER, "little") + frame)

    async def close(self) -> None:
        """Send what is left, then close the connection."""
        self._flush()
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame; None after the end."""
    try:
        header = await reader.readexactly(HEADER)
        return await reader.readexactly(int.from_bytes(header, "little"))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
