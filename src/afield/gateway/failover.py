"""A call that continues on another worker after an interruption.

The next worker gets the prompt, all sampled tokens and the rest of the token budget. A seed does not
survive the move: the next worker's generator starts from the beginning.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from typing import Any

from msgspec import structs

from afield.errors import Unavailable
from afield.interfaces import Chunk, Engine, GenerateRequest
from afield.types import FinishReason, VersionSpan


class ResumableCall:
    """Runs a call on one engine after another: `start_on`, `next`, `fold`, `leave`, `interrupt`."""

    __slots__ = (
        "_base",
        "_call",
        "_chunks",
        "_cut",
        "_ids",
        "_leaving",
        "_refined",
        "_spans",
        "_waiting",
        "aborted",
        "failures",
        "started_at",
    )

    def __init__(self, call: GenerateRequest) -> None:
        self._call = call
        self._ids: list[int] = []
        self._spans: list[VersionSpan] = []
        self._base = 0  # index of the current worker's first token
        self._refined = False
        self._chunks: AsyncGenerator[Chunk] | None = None
        self._waiting: asyncio.Task[Any] | None = None  # task that waits for the engine
        self._leaving: asyncio.Task[None] | None = None
        self._cut = False
        self.aborted = False  # the current worker aborted the call
        self.started_at = math.inf  # monotonic time of the request to the current worker
        self.failures: list[str] = []

    @property
    def session_id(self) -> str:
        return self._call.session_id

    @property
    def sampled(self) -> int:
        return len(self._ids)

    @property
    def streams(self) -> bool:
        return self._call.stream

    @property
    def awaits_first_token(self) -> bool:
        """Whether the current worker has not returned any token yet."""
        return self.started_at < math.inf and len(self._ids) == self._base

    def start_on(self, engine: Engine) -> None:
        """Requests the rest of the call from an engine."""
        self.started_at = time.monotonic()
        self._base = len(self._ids)
        self._cut = self.aborted = False
        rest = self._call
        if self._ids and rest.constraint is not None:
            raise Unavailable("its worker was lost, and no other worker can continue a constrained reply")
        if self._ids:
            rest = structs.replace(
                self._call,
                prompt_ids=(*self._call.prompt_ids, *self._ids),
                max_tokens=self._call.max_tokens - len(self._ids),
                prompt_logprobs=None,
            )
        self._chunks = engine.generate(rest)

    async def next(self) -> Chunk | None:
        """Returns the engine's next chunk; None after an interruption."""
        if self._cut or self._chunks is None:
            return None
        self._waiting = task = asyncio.current_task()
        cancelling_before = task.cancelling() if task else 0
        try:
            return await anext(self._chunks)
        except StopAsyncIteration as error:
            raise Unavailable("the engine's stream ended without a finish reason") from error
        except asyncio.CancelledError:
            # Swallows the cancellation of `interrupt` only.
            if self._cut and task and task.uncancel() <= cancelling_before:
                return None
            raise
        finally:
            self._waiting = None

    async def interrupt(self) -> bool:
        """Interrupts the current worker and keeps its tokens. Returns True if the engine has been left."""
        if self._cut:
            return False
        self._cut = True
        if self._waiting is not None:
            self._waiting.cancel()
            return False
        await self.leave()
        return True

    async def leave(self) -> None:
        """Leaves the engine. Idempotent: consumer and `interrupt` both call it."""
        if self._leaving is not None:
            await asyncio.shield(self._leaving)
        elif self._chunks is not None:
            chunks, self._chunks = self._chunks, None
            if not self._cut:
                await chunks.aclose()
                return
            self._leaving = asyncio.create_task(chunks.aclose())
            await asyncio.shield(self._leaving)
            self._leaving = None

    def complete(self, max_context: int) -> Chunk | None:
        """Returns the final chunk if nothing is left to sample."""
        if not self._ids:
            return None
        full = len(self._call.prompt_ids) + len(self._ids) >= max_context
        if self._ids[-1] in self._call.stop_ids:
            finish = FinishReason.STOP
        elif full or len(self._ids) >= self._call.max_tokens:
            finish = FinishReason.LENGTH
        else:
            return None
        last = self._spans[-1]
        return Chunk(
            token_ids=(),
            logprobs=(),
            low=last.low,
            high=last.high,
            finish=finish,
            versions=tuple(self._spans) if self._refined else None,
        )

    def fold(self, chunk: Chunk) -> Chunk | None:
        """Returns the chunk for the consumer; None if it is empty."""
        moved = self._base > 0
        self._note(chunk)
        if chunk.versions is not None:
            self._refine(chunk.versions)
        self.aborted = aborted = chunk.finish is FinishReason.ABORTED
        self._cut = self._cut or aborted
        if not (moved or aborted):
            return chunk
        if aborted and not chunk.token_ids:
            return None
        ends = chunk.finish is not None and not aborted
        return structs.replace(
            chunk,
            finish=chunk.finish if ends else None,
            prompt_ids=None if moved else chunk.prompt_ids,
            versions=tuple(self._spans) if ends and self._refined else None,
        )

    def _note(self, chunk: Chunk) -> None:
        if not chunk.token_ids:
            return
        start, end = len(self._ids), len(self._ids) + len(chunk.token_ids)
        self._ids.extend(chunk.token_ids)
        self._append(VersionSpan(start, end, chunk.low, chunk.high))

    def _append(self, span: VersionSpan) -> None:
        last = self._spans[-1] if self._spans else None
        if last and (last.low, last.high) == (span.low, span.high):
            self._spans[-1] = VersionSpan(last.start, span.end, span.low, span.high)
        else:
            self._spans.append(span)

    def _refine(self, exact: tuple[VersionSpan, ...]) -> None:
        """Replaces the version intervals of the current worker's tokens by exact versions."""
        earlier = [span for span in self._spans if span.start < self._base]
        self._spans = [VersionSpan(s.start, min(s.end, self._base), s.low, s.high) for s in earlier]
        for span in exact:
            self._append(VersionSpan(span.start + self._base, span.end + self._base, span.low, span.high))
        self._refined = True
