"""Redis Streams notifier: one stream and one consumer group per experiment.

A message that is not acknowledged within its lease is claimed by the next reader. The newest 10,000 dead
letters are in `NAME:dead:EXPERIMENT`.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

from afield.errors import Unavailable, UsageError
from afield.sdk.deliver import CONNECT_S, REDIS_FIELD, HintServer, import_redis, without_password
from afield.transports.notifiers.base import LEASE_S, Leased

BLOCK_S = 0.5
BATCH = 500
GROUP = "collectors"
DEAD_KEPT = 10_000


class RedisNotifier:
    """Hints through `redis://HOST:PORT/DB[?name=NAME]`; NAME is the key prefix (default `afield`)."""

    def __init__(self, url: str, *, lease_s: float = LEASE_S) -> None:
        self.server = HintServer.of(url)
        self._lease_ms = round(lease_s * 1000)
        self._consumer = uuid.uuid4().hex
        self._redis: Any = None
        self._groups: set[str] = set()
        self._client: Any = None

    async def __aenter__(self) -> Self:
        self._redis = import_redis()
        self._client = self._redis.asyncio.Redis.from_url(
            self.server.url, socket_connect_timeout=CONNECT_S, socket_timeout=CONNECT_S + BLOCK_S
        )
        try:
            async with self._request() as client:
                await client.ping()
        except Unavailable:
            await self._client.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    def address(self, exp_id: str) -> dict[str, Any]:
        return {"hint_url": self.server.hint_url()}

    async def send(self, exp_id: str, body: bytes) -> None:
        async with self._request() as client:
            await client.xadd(self.server.stream_key(exp_id), {REDIS_FIELD: body})

    async def lease(self, exp_id: str, wait_s: float) -> list[Leased]:
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s
        async with self._request() as client:
            key = await self._stream(client, exp_id)
            while True:
                if claimed := await self._claimed(client, key, exp_id):
                    return claimed
                left = end - loop.time()
                # In Redis, block=0 waits forever and block=None does not wait.
                block = max(1, round(1000 * min(left, BLOCK_S))) if left > 0 else None
                fresh = await client.xreadgroup(GROUP, self._consumer, {key: ">"}, count=BATCH, block=block)
                if fresh or left <= 0:
                    return [
                        self._leased(exp_id, key, message, 1) for _, messages in fresh for message in messages
                    ]

    async def extend(self, leased: Leased, seconds: float) -> None:
        key, number = leased.receipt
        idle = max(0, self._lease_ms - round(seconds * 1000))
        async with self._request() as client:
            await client.xclaim(key, GROUP, self._consumer, 0, [number], idle=idle, justid=True)

    async def ack(self, leased: Sequence[Leased]) -> None:
        if not leased:
            return
        async with self._request() as client, client.pipeline(transaction=True) as steps:
            for key, number in (lease.receipt for lease in leased):
                steps.xack(key, GROUP, number)
                steps.xdel(key, number)
            await steps.execute()

    async def dead(self, letter: Leased, reason: str) -> None:
        key, number = letter.receipt
        fields = {REDIS_FIELD: letter.body, b"reason": reason}
        async with self._request() as client, client.pipeline(transaction=True) as steps:
            steps.xadd(self.server.stream_key(letter.exp_id, "dead"), fields, maxlen=DEAD_KEPT)
            steps.xack(key, GROUP, number)
            steps.xdel(key, number)
            await steps.execute()

    async def _claimed(self, client: Any, key: str, exp_id: str) -> list[Leased]:
        _, messages, *_ = await client.xautoclaim(key, GROUP, self._consumer, self._lease_ms, count=BATCH)
        if not messages:
            return []
        first, last = messages[0][0], messages[-1][0]
        pending = await client.xpending_range(key, GROUP, first, last, len(messages), self._consumer)
        times = {entry["message_id"]: int(entry["times_delivered"]) for entry in pending}
        return [self._leased(exp_id, key, message, times.get(message[0], 1)) for message in messages]

    def _leased(self, exp_id: str, key: str, message: Any, times: int) -> Leased:
        number, fields = message
        return Leased(exp_id=exp_id, body=fields.get(REDIS_FIELD, b""), receipt=(key, number), times=times)

    async def _stream(self, client: Any, exp_id: str) -> str:
        key = self.server.stream_key(exp_id)
        if key not in self._groups:
            try:
                await client.xgroup_create(key, GROUP, id="0", mkstream=True)
            except self._redis.exceptions.ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise
            self._groups.add(key)
        return key

    @contextlib.asynccontextmanager
    async def _request(self) -> AsyncIterator[Any]:
        if self._client is None:
            raise UsageError("the transport is not open; use it inside 'async with'")
        try:
            yield self._client
        except (self._redis.exceptions.RedisError, OSError) as error:
            # Groups are created again if the server lost them.
            self._groups.clear()
            raise Unavailable(
                f"{without_password(self.server.url)}: {error}; start redis-server there or correct the URL"
            ) from error
