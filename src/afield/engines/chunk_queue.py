"""Queue of one call's chunks, which merges chunks that wait."""

from __future__ import annotations

import asyncio
from collections import deque

from afield.interfaces.engine import Chunk

Item = Chunk | Exception


class ChunkQueue:
    """Chunks of one call, in order, and at last perhaps an error."""

    def __init__(self) -> None:
        self._arrived: deque[Item] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def receive(self, item: Item) -> None:
        self._arrived.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> Chunk:
        """Wait for chunks and merge all queued ones of the same weight version; raises a queued error."""
        if not self._arrived:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        first = self._arrived.popleft()
        if isinstance(first, Exception):
            raise first
        chunks = [first]
        while self._arrived and isinstance(more := self._arrived[0], Chunk) and more.low == first.low:
            chunks.append(more)
            self._arrived.popleft()
        if len(chunks) == 1:
            return first
        return Chunk(
            token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
            logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
            low=first.low,
            high=first.high,
            finish=chunks[-1].finish,
            prompt_ids=first.prompt_ids,
            queued_s=first.queued_s,
            top_logprobs=tuple(top for chunk in chunks for top in chunk.top_logprobs),
            prompt_logprobs=first.prompt_logprobs,
        )
