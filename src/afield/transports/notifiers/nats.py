"""NATS JetStream notifier: one work queue, a durable pull consumer per experiment.

The stream and the dead letter stream (`NAME-dead`) are created if missing and keep messages for two weeks.
Acknowledged messages are removed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

from afield.errors import Unavailable, UsageError
from afield.sdk.deliver import CONNECT_S, HintServer, import_nats, without_password
from afield.transports.notifiers.base import LEASE_S, Leased

MIN_FETCH_S = 0.1
NEXT_FETCH_S = 1.0
BATCH = 256
FORTNIGHT_S = 14 * 86_400
REASON = "Afield-Reason"
REMEDY = "start nats-server there or correct the URL"


class NatsNotifier:
    """Hints through `nats://HOST:PORT[?name=NAME]`; NAME is the stream (default `afield`)."""

    def __init__(self, url: str, *, lease_s: float = LEASE_S) -> None:
        self.server = HintServer.of(url)
        self._location = without_password(url)
        self._lease_s = lease_s
        self._nats: Any = None
        self._connection: Any = None
        self._pulls: dict[str, Any] = {}

    async def __aenter__(self) -> Self:
        self._nats = import_nats()
        try:
            async with asyncio.timeout(2 * CONNECT_S):
                self._connection = await self._nats.connect(
                    self.server.url, connect_timeout=CONNECT_S, max_reconnect_attempts=-1, error_cb=_ignore
                )
            async with self._request():
                await self._make_streams()
        except (OSError, TimeoutError, self._nats.errors.Error) as error:
            raise Unavailable(f"{self._location}: {error!r}; {REMEDY}") from error
        except Unavailable:
            await self._connection.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None
            self._pulls.clear()

    def address(self, exp_id: str) -> dict[str, Any]:
        return {"hint_url": self.server.hint_url()}

    async def send(self, exp_id: str, body: bytes) -> None:
        async with self._request() as stream:
            await stream.publish(self.server.subject(exp_id), body, timeout=CONNECT_S)

    async def lease(self, exp_id: str, wait_s: float) -> list[Leased]:
        async with self._request():
            pull = await self._pull(exp_id)
            try:
                # A fetch of several messages waits until all of them have arrived.
                messages = await pull.fetch(1, timeout=max(MIN_FETCH_S, wait_s))
                if more := min(BATCH, messages[0].metadata.num_pending):
                    messages += await pull.fetch(more, timeout=NEXT_FETCH_S)
            except TimeoutError:
                messages = []
        return [
            Leased(exp_id=exp_id, body=message.data, receipt=message, times=message.metadata.num_delivered)
            for message in messages
        ]

    async def extend(self, leased: Leased, seconds: float) -> None:
        async with self._request():
            if seconds < self._lease_s:
                await leased.receipt.nak(delay=seconds)
            else:
                await leased.receipt.in_progress()

    async def ack(self, leased: Sequence[Leased]) -> None:
        async with self._request():
            for lease in leased:
                with contextlib.suppress(self._nats.errors.MsgAlreadyAckdError):
                    await lease.receipt.ack()

    async def dead(self, letter: Leased, reason: str) -> None:
        headers = {REASON: reason[:200].encode("ascii", "replace").decode().replace("\n", " ")}
        async with self._request() as stream:
            await stream.publish(self.server.subject(letter.exp_id, "dead"), letter.body, headers=headers)
            await letter.receipt.term()

    @contextlib.asynccontextmanager
    async def _request(self) -> AsyncIterator[Any]:
        if self._connection is None:
            raise UsageError("the transport is not open; use it inside 'async with'")
        if not self._connection.is_connected:
            raise Unavailable(
                f"{self._location} does not respond; start nats-server there or correct the URL"
            )
        try:
            yield self._connection.jetstream(timeout=CONNECT_S)
        except (self._nats.errors.Error, TimeoutError, OSError) as error:
            # Streams are created again if the server lost them.
            self._pulls.clear()
            raise Unavailable(f"{self._location}: {error!r}") from error

    async def _pull(self, exp_id: str) -> Any:
        if exp_id not in self._pulls:
            await self._make_streams()
            from nats.js.api import AckPolicy, ConsumerConfig

            subject = self.server.subject(exp_id)
            config = ConsumerConfig(
                ack_policy=AckPolicy.EXPLICIT, ack_wait=self._lease_s, max_deliver=-1, max_ack_pending=100_000
            )
            self._pulls[exp_id] = await self._connection.jetstream().pull_subscribe(
                subject, durable=subject.replace(".", "-"), stream=self.server.name, config=config
            )
        return self._pulls[exp_id]

    async def _make_streams(self) -> None:
        from nats.js.api import RetentionPolicy, StreamConfig

        name = self.server.name
        streams = [
            StreamConfig(
                name=name,
                subjects=[f"{name}.hints.*"],
                retention=RetentionPolicy.WORK_QUEUE,
                max_age=FORTNIGHT_S,
            ),
            StreamConfig(name=f"{name}-dead", subjects=[f"{name}.dead.*"], max_age=FORTNIGHT_S),
        ]
        stream = self._connection.jetstream(timeout=CONNECT_S)
        for config in streams:
            try:
                await stream.add_stream(config)
            except self._nats.js.errors.BadRequestError as error:
                raise UsageError(
                    f"the stream {config.name!r} at {self._location} has another configuration"
                    f" ({error}); choose another name with ?name=NAME"
                ) from error


async def _ignore(error: Exception) -> None:
    """Ignore connection errors: the client reconnects, and requests fail meanwhile."""
