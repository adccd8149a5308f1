"""Recording engine: wraps an engine and records every call it serves.

A record has the token ids, log-probabilities and versions exactly as they left the engine; it is written,
to memory or as a JSON line to a file, before the last chunk is passed on. Refused calls and the gateway's
weight probes leave no record. Tests compare trajectories with the records to prove that nothing is lost or
altered on the way to the trainer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from enum import StrEnum
from pathlib import Path
from typing import Self

from msgspec import Struct

from afield.errors import Unavailable
from afield.interfaces.engine import Chunk, Engine, EngineInfo, GenerateRequest
from afield.interfaces.weight_probe import SESSION
from afield.types import FinishReason, Sampling, VersionSpan
from afield.utils.private_files import private_file
from afield.wire import decode, encode


class CallStatus(StrEnum):
    """Outcome of a recorded call."""

    COMPLETE = "complete"
    """The engine sent a finish reason."""
    ABANDONED = "abandoned"
    """The caller closed the stream early."""
    FAILED = "failed"
    """The engine raised Unavailable."""


class RecordedCall(Struct, frozen=True, kw_only=True):
    """Call as the engine served it."""

    call_id: str
    """Id of the `GenerateRequest`."""
    session_id: str
    """Id of the session that made the call."""
    prompt_ids: tuple[int, ...]
    """Prompt as the engine saw it, with images expanded."""
    token_ids: tuple[int, ...]
    """Sampled tokens."""
    logprobs: tuple[float, ...]
    """Log-probability of each sampled token."""
    versions: tuple[VersionSpan, ...]
    """Weight versions, counted from the first sampled token."""
    finish: FinishReason | None
    """Finish reason; None if the call did not end."""
    sampling: Sampling
    """Sampling parameters of the call."""
    served: CallStatus
    """Outcome of the call."""


class RecordingEngine:
    """Engine wrapper that records calls in `recorded`, or as JSON lines in the file at `path`."""

    def __init__(self, engine: Engine, path: str | Path | None = None) -> None:
        self._engine = engine
        self._path = None if path is None else Path(path)
        self.recorded: list[RecordedCall] = []

    async def __aenter__(self) -> Self:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            private_file(self._path)
        await self._engine.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._engine.__aexit__(*exc)

    async def info(self) -> EngineInfo:
        return await self._engine.info()

    async def load(self, version: int, path: str) -> None:
        await self._engine.load(version, path)

    def generate(self, call: GenerateRequest) -> AsyncGenerator[Chunk]:
        chunks = self._engine.generate(call)
        return chunks if call.session_id == SESSION else record(call, chunks, self._write)

    def _write(self, entry: RecordedCall) -> None:
        if self._path is None:
            self.recorded.append(entry)
            return
        # Opened each time, because calls that fail as the engine closes are written after `__aexit__`.
        with self._path.open("ab") as file:
            file.write(encode(entry) + b"\n")


def read_recording(path: str | Path) -> list[RecordedCall]:
    """Read the JSON lines that `RecordingEngine` wrote."""
    lines = Path(path).read_bytes().splitlines()
    return [decode(line, RecordedCall, f"{path}, line {n}") for n, line in enumerate(lines, 1)]


async def record(
    call: GenerateRequest, chunks: AsyncGenerator[Chunk], write: Callable[[RecordedCall], None]
) -> AsyncGenerator[Chunk]:
    """Yield chunks unchanged; writes a record when the call ends, fails or is abandoned.

    A refused call (ValueError) leaves no record.
    """
    seen: list[Chunk] = []
    owed: CallStatus | None = CallStatus.ABANDONED
    try:
        async for chunk in chunks:
            seen.append(chunk)
            if chunk.finish is not None:
                write(_entry(call, seen, CallStatus.COMPLETE))
                owed = None
            yield chunk
    except ValueError:
        owed = None
        raise
    except Unavailable:
        owed = CallStatus.FAILED
        raise
    finally:
        if owed is not None:
            write(_entry(call, seen, owed))
        await chunks.aclose()


def _entry(call: GenerateRequest, chunks: list[Chunk], served: CallStatus) -> RecordedCall:
    return RecordedCall(
        call_id=call.id,
        session_id=call.session_id,
        prompt_ids=next((c.prompt_ids for c in chunks[:1] if c.prompt_ids is not None), call.prompt_ids),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        versions=_spans(chunks),
        finish=chunks[-1].finish if chunks else None,
        sampling=call.sampling,
        served=served,
    )


def _spans(chunks: list[Chunk]) -> tuple[VersionSpan, ...]:
    """Version spans: those of the last chunk if it has any, else those of the chunks, merged."""
    if chunks and chunks[-1].versions is not None:
        return chunks[-1].versions
    spans: list[VersionSpan] = []
    end = 0
    for chunk in chunks:
        if not chunk.token_ids:
            continue
        start, end = end, end + len(chunk.token_ids)
        if spans and (spans[-1].low, spans[-1].high) == (chunk.low, chunk.high):
            start = spans.pop().start
        spans.append(VersionSpan(start, end, chunk.low, chunk.high))
    return tuple(spans)
