"""The ledger: what an engine really served, call by call, written down beside it.

`Ledger(engine)` is an engine itself. It keeps an entry per call, in memory or as a JSON line in a
file, with the ids, log-probabilities and versions exactly as they left the engine. An entry is
there before its last chunk is handed on. Calls the engine refused leave none, nor do a gateway's own
questions about weights. Trajectories are compared with it to prove that nothing was lost or altered on
the way to the trainer.
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
from afield.private_files import private_file
from afield.types import FinishReason, Sampling, VersionSpan
from afield.wire import decode, encode


class CallStatus(StrEnum):
    COMPLETE = "complete"
    ABANDONED = "abandoned"
    FAILED = "failed"


class RecordedCall(Struct, frozen=True, kw_only=True):
    """One call as served: the prompt as the engine saw it; `versions` counts from the first sampled token."""

    call_id: str
    session_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    finish: FinishReason | None
    sampling: Sampling
    served: CallStatus


class RecordingEngine:
    """An engine that watches another. Without a path the entries are in `entries`, else in the file."""

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
        # Opened each time: calls that a closing engine fails are written after it has closed.
        with self._path.open("ab") as file:
            file.write(encode(entry) + b"\n")


def read_recording(path: str | Path) -> list[RecordedCall]:
    lines = Path(path).read_bytes().splitlines()
    return [decode(line, RecordedCall, f"{path}, line {n}") for n, line in enumerate(lines, 1)]


async def record(
    call: GenerateRequest, chunks: AsyncGenerator[Chunk], write: Callable[[RecordedCall], None]
) -> AsyncGenerator[Chunk]:
    """The same chunks; an entry is written when the call ends, however it does."""
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
    """Neighbouring chunks of the same versions are one span; what the engine says at the end is final."""
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
