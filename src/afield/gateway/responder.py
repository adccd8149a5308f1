"""Responds to one model call, whole or as a stream.

A disconnect ends the call. Its turn is recorded as aborted, or as undelivered if it was already
committed. Streams send the dialect's keepalives while nothing is sampled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

from afield.gateway.api_error import ApiError, conflict, engine_down
from afield.gateway.dialects import Dialect, ResponseOptions, StreamEncoder
from afield.gateway.http import ByteStream, Receive, Send, send_json
from afield.gateway.model_request import CallDelta, CallFinished, CallStarted, Item, ModelRequest
from afield.gateway.service import LocalGateway
from afield.gateway.sessions import Session

KEEPALIVE_S = 10.0
"""Interval between keepalives, in seconds."""
# Codex compacts the conversation after this error in a stream, but fails after it as an HTTP error.
TOLD_IN_STREAM = {("responses", "context_length_exceeded")}


class Responder:
    """Encodes the events of a call as a response, and ends the call when the client disconnects."""

    def __init__(self, gateway: LocalGateway) -> None:
        self._gateway = gateway

    async def respond(
        self,
        session: Session,
        dialect: Dialect,
        request: ModelRequest,
        options: ResponseOptions,
        receive: Receive,
        send: Send,
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        session.request_started(task)
        out = ByteStream(send)
        watch = asyncio.create_task(_cancel_when_gone(receive, task, out))
        encoder: StreamEncoder | None = None
        started: CallStarted | None = None
        try:
            async with aclosing(self._gateway.calls.run(session, request)) as items:
                first = await anext(items)
                assert isinstance(first, CallStarted)
                started = first
                if request.stream:
                    encoder = dialect.stream(first, options)
                    out.content_type = encoder.content_type
                    await self._stream(session, items, encoder, out)
                else:
                    finished = await _last(items)
                    await send_json(send, 200, dialect.response(first, finished, options))
                    out.delivered = True
        except ApiError as error:
            if out.started or not request.stream or (dialect.name, error.code) not in TOLD_IN_STREAM:
                raise
            session.refuse(error)
            nothing = CallStarted(session.id, "t0", (), time.time())
            await out.close(dialect.stream(nothing, options).error(error))
        except asyncio.CancelledError:
            if out.delivered:
                return
            if started and started.must_deliver and started.turn_id in session.tree:
                await asyncio.shield(self._gateway.sessions.exclude_turn(session, started.turn_id))
            if watch.done():
                raise
            await _tell_the_end(_why_ended(session), encoder, out)
        finally:
            session.request_ended(task)
            watch.cancel()

    async def _stream(
        self, session: Session, items: AsyncIterator[Item], encoder: StreamEncoder, out: ByteStream
    ) -> None:
        pinging = asyncio.create_task(send_keepalives(encoder, out))
        opened = False
        try:
            async for item in items:
                opening = b"" if opened else encoder.begin()
                opened = True
                if isinstance(item, CallDelta):
                    await out.emit(opening + encoder.delta(item))
                elif isinstance(item, CallFinished):
                    await out.close(opening + encoder.end(item))
                    out.delivered = True
        except ApiError as error:
            if not out.started:
                raise
            session.refuse(error)
            await out.close(encoder.error(error))
        finally:
            pinging.cancel()


async def send_keepalives(encoder: StreamEncoder, out: ByteStream, interval_s: float = KEEPALIVE_S) -> None:
    """Send a keepalive whenever nothing else was sent for `interval_s`, until cancelled."""
    while True:
        seen = out.sent
        # A pause that starts right after a check lasts at most two waits.
        await asyncio.sleep(interval_s / 2)
        if out.sent == seen:
            await out.emit(encoder.keepalive())


async def _last(items: AsyncIterator[Item]) -> CallFinished:
    finished: Item | None = None
    async for item in items:
        finished = item
    assert isinstance(finished, CallFinished)
    return finished


def _why_ended(session: Session) -> ApiError:
    if session.closed:
        return conflict(f"session {session.id} was ended while this call ran")
    return engine_down("the gateway is being stopped")


async def _tell_the_end(ended: ApiError, encoder: StreamEncoder | None, out: ByteStream) -> None:
    if encoder is None or not out.started:
        raise ended from None
    with suppress(TimeoutError):  # the client may no longer read
        async with asyncio.timeout(1):
            await out.close(encoder.error(ended))


async def _cancel_when_gone(receive: Receive, task: asyncio.Task[Any], out: ByteStream) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    if not out.delivered:  # a disconnect after the answer is normal
        task.cancel()
