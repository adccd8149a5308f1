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
    """Directory with config.json, safetensors weights and tokenizer.json."""
    version: int = 0
    """Version of the weights in `model_path`."""
    max_slots: int | None = None
    """Calls that run at once; None is 64 on a CPU, and on CUDA what free memory holds, at most 512."""
    max_context: int | None = None
    """Prompt plus reply length in tokens; None uses the model's limit."""
    device: str | None = None
    """Torch device; None picks CUDA if available."""
    dtype: str | None = None
    """float32, bfloat16 or float16; None means float32 on a CPU and bfloat16 on CUDA."""
    seed: int = 0
    """Seed of the engine."""
    cache_tokens: int | None = None
    """Tokens of the KV cache; None is what free memory holds on CUDA, no limit on a CPU."""
    prefill_tokens: int | None = None
    """Tokens per prefill step; None chooses by device."""
    fixed_steps: bool | None = None
    """Whether to decode in steps of fixed shapes; None means on CUDA only."""


class CallMessage(Struct, frozen=True, tag="call"):
    """A call to sample."""

    number: int
    """Number of the call, unique in the connection."""
    call: GenerateRequest
    """Prompt and sampling parameters."""


class CancelMessage(Struct, frozen=True, tag="cancel"):
    """A call whose chunks are no longer wanted."""

    number: int
    """Number of the call."""


class LoadMessage(Struct, frozen=True, tag="load"):
    """Weights to serve."""

    number: int
    """Number of the request."""
    version: int
    """Version of the weights."""
    path: str
    """Directory of the weights."""


class InfoMessage(Struct, frozen=True, tag="info"):
    """A request for the engine's info."""

    number: int
    """Number of the request."""


class ChunkMessage(Struct, frozen=True, tag="chunk"):
    """Sampled tokens of a call."""

    number: int
    """Number of the call."""
    chunk: Chunk
    """Tokens with their log-probabilities."""


class ReplyMessage(Struct, frozen=True, tag="reply"):
    """The engine's info, after it started, after weights were loaded, or as requested."""

    number: int
    """Number of the request; `START` after the start."""
    info: EngineInfo
    """State of the engine."""


class ErrorMessage(Struct, frozen=True, tag="error"):
    """Failure of a call or request."""

    number: int
    """Number of the call or request."""
    kind: str
    """Exception class, a key of `ERRORS`."""
    text: str
    """Error message."""

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
