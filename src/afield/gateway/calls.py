"""One model call, from a decoded request to a durable turn.

The order is the promise: the intent is durable before the engine is asked; every chunk is folded into
the turn before anything of it is emitted; `Done` is emitted only when the turn is durable. A call that
ends any other way (the client left, the session was aborted, the engine broke) leaves its partial as
an aborted turn. Non-streaming callers fold the same items.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from msgspec import Struct, structs

from afield.errors import Unavailable
from afield.forest import extend_digest
from afield.gateway import lineage
from afield.gateway.refusal import bad_request, context_exceeded, engine_down
from afield.gateway.sessions import Session, Sessions
from afield.gateway.stops import StopStrings
from afield.gateway.store import Store, TurnRow
from afield.seams import Call, Chunk, Engine, EngineInfo
from afield.tokens import ChatTokens, Event, Parser, Tool
from afield.types import FinishReason, Message, ToolCall, Turn, TurnStatus, VersionSpan

log = logging.getLogger("afield.gateway")
LAST = 1 << 62  # calls that never ended sort behind those that did
INLINE_CHARACTERS = 20_000  # longer conversations are rendered off the event loop


class ModelRequest(Struct, frozen=True, kw_only=True):
    """A request in no dialect. What it asks of sampling beyond these is the trainer's to decide."""

    dialect: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False


class Started(Struct, frozen=True):
    turn_id: str
    prompt_ids: tuple[int, ...]


class Piece(Struct, frozen=True):
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    events: list[Event]


class Done(Struct, frozen=True):
    turn: Turn
    reply: Message
    prompt_tokens: int


Item = Started | Piece | Done


class Partial:
    """What has been sampled so far."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[VersionSpan] = []
        self.first_token: float | None = None
        self.finish: FinishReason | None = None

    def fold(self, chunk: Chunk, now: float) -> None:
        if len(chunk.token_ids) != len(chunk.logprobs):
            raise Unavailable(f"the engine gave {len(chunk.token_ids)} ids, {len(chunk.logprobs)} logprobs")
        if not all(math.isfinite(p) for p in chunk.logprobs):
            raise Unavailable("the engine gave a log-probability that is not a finite number")
        if chunk.token_ids:
            self.first_token = self.first_token or now
            start, end = len(self.ids), len(self.ids) + len(chunk.token_ids)
            if self.spans and (self.spans[-1].low, self.spans[-1].high) == (chunk.low, chunk.high):
                start = self.spans.pop().start
            self.spans.append(VersionSpan(start, end, chunk.low, chunk.high))
            self.ids.extend(chunk.token_ids)
            self.logprobs.extend(chunk.logprobs)
        self.finish = chunk.finish


class Calls:
    def __init__(
        self,
        *,
        store: Store,
        sessions: Sessions,
        engine: Engine,
        info: EngineInfo,
        tokens: ChatTokens,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._engine = engine
        self._info = info
        self._tokens = tokens
        self._clock = clock

    async def run(self, session: Session, request: ModelRequest) -> AsyncGenerator[Item]:
        """Started, then Pieces, then Done. Close it early to abandon the call."""
        session.check_open(self._clock())
        if request.tools and self._tokens.certificate.tool_format is None:
            raise bad_request(
                f"the chat template of {self._tokens.name!r} has a tool-call format afield cannot parse",
                "call without tools, or use a model whose tool format is known (hermes)",
            )
        place = await self._place(session, request)
        if twin := await self._sessions.redeliver(session, place.parent, place.delta_ids):
            log.info("session %s: turn %s is delivered again to a client that missed it", session.id, twin.id)
            for item in self._replay(twin, place):
                yield item
            return
        call = self._call(session, request, place)
        session.calls += 1
        session.last_activity = self._clock()
        n = session.calls
        intent = self._intent(session, request, place, call, n)
        await self._store.put_turn(session.id, TurnRow(n, LAST, intent))
        session.rows[n] = TurnRow(n, LAST, intent)
        async with aclosing(self._sample(session, request, place, call, n, intent)) as items:
            async for item in items:
                yield item

    async def _place(self, session: Session, request: ModelRequest) -> lineage.Place:
        arguments = (session.forest, self._tokens, request.messages, request.tools)
        try:
            if sum(len(m.content) for m in request.messages) > INLINE_CHARACTERS:
                return await asyncio.to_thread(lineage.place, *arguments)
            return lineage.place(*arguments)
        except ValueError as error:
            raise bad_request(f"the chat template refuses these messages: {error}") from error

    def _call(self, session: Session, request: ModelRequest, place: lineage.Place) -> Call:
        spec = session.row.spec
        limit = min(self._info.max_context, spec.budget.context or self._info.max_context)
        room = limit - len(place.prompt_ids)
        if room < 1:
            raise context_exceeded(len(place.prompt_ids), limit)
        left = None if spec.budget.tokens is None else spec.budget.tokens - session.sampled_tokens
        bounds = (room, left, request.max_tokens, spec.sampling.max_tokens)
        turn_id = f"t{session.calls + 1}"
        return Call(
            id=f"{session.id}/{turn_id}",
            session_id=session.id,
            prompt_ids=place.prompt_ids,
            sampling=spec.sampling,
            max_tokens=min(b for b in bounds if b is not None),
            stop_ids=self._tokens.stop_ids,
            stream=request.stream or bool(request.stop),
        )

    def _intent(
        self, session: Session, request: ModelRequest, place: lineage.Place, call: Call, n: int
    ) -> Turn:
        return Turn(
            id=f"t{n}",
            root=place.root,
            parent=place.parent,
            delta_ids=place.delta_ids,
            status=TurnStatus.DANGLING,
            sampling=structs.replace(call.sampling, max_tokens=call.max_tokens),
            tier=place.tier,
            dialect=request.dialect,
            messages=place.new,
            digest=place.digest,
            tools_digest=place.root,
            links=place.links,
            started=self._clock(),
        )

    async def _sample(
        self,
        session: Session,
        request: ModelRequest,
        place: lineage.Place,
        call: Call,
        n: int,
        intent: Turn,
    ) -> AsyncGenerator[Item]:
        partial = Partial()
        # Calls are shown when they are closed, so that a client never sees one that turns out malformed.
        parser = self._tokens.parser(tools=bool(request.tools), hold_calls=True)
        stops = StopStrings(request.stop)
        chunks = self._engine.generate(call)
        ended = False
        try:
            yield Started(intent.id, place.prompt_ids)
            async for chunk in chunks:
                partial.fold(chunk, self._clock())
                events = stops.filter(parser.feed(chunk.token_ids))
                if chunk.finish or stops.hit:
                    partial.finish = chunk.finish or FinishReason.STOP
                    events += [] if stops.hit else stops.filter(parser.finish(), last=True)
                if not partial.finish:
                    yield Piece(chunk.token_ids, chunk.logprobs, events)
                    continue
                turn, reply = await self._commit(session, intent, partial, parser, stops, n)
                ended = True
                yield Piece(chunk.token_ids, chunk.logprobs, events)
                yield Done(turn, reply, len(place.prompt_ids))
                return
            raise Unavailable("the engine's stream ended without a finish")
        except ValueError as error:
            raise bad_request(f"the engine refuses this prompt: {error}") from error
        except Unavailable as error:
            log.error("session %s turn %s: %s", session.id, intent.id, error)
            raise engine_down(str(error)) from error
        finally:
            await chunks.aclose()
            if not ended:
                await asyncio.shield(self._abort(session, intent, partial, n))

    async def _commit(
        self, session: Session, intent: Turn, partial: Partial, parser: Parser, stops: StopStrings, n: int
    ) -> tuple[Turn, Message]:
        reply = with_call_ids(stops.cut(parser.reply), intent.id)
        turn = self._ended(intent, partial, TurnStatus.COMMITTED, reply)
        await asyncio.shield(self._record(session, turn, n))
        return turn, reply

    async def _abort(self, session: Session, intent: Turn, partial: Partial, n: int) -> None:
        partial.finish = FinishReason.ABORTED
        await self._record(session, self._ended(intent, partial, TurnStatus.ABORTED, None), n)

    async def _record(self, session: Session, turn: Turn, n: int) -> None:
        session.commits += 1
        row = TurnRow(n, session.commits, turn)
        await self._store.put_turn(session.id, row)
        session.record(row)

    def _ended(self, intent: Turn, partial: Partial, status: TurnStatus, reply: Message | None) -> Turn:
        return structs.replace(
            intent,
            token_ids=tuple(partial.ids),
            logprobs=tuple(partial.logprobs),
            versions=tuple(partial.spans),
            finish_reason=partial.finish,
            status=status,
            messages=(*intent.messages, reply) if reply else intent.messages,
            digest=extend_digest(intent.digest, reply) if reply else intent.digest,
            first_token=partial.first_token,
            ended=self._clock(),
        )

    def _replay(self, turn: Turn, place: lineage.Place) -> list[Item]:
        parser = self._tokens.parser(tools=True, hold_calls=True)
        events = parser.feed(turn.token_ids) + parser.finish()
        return [
            Started(turn.id, place.prompt_ids),
            Piece(turn.token_ids, turn.logprobs, events),
            Done(turn, turn.messages[-1], len(place.prompt_ids)),
        ]


def with_call_ids(reply: Message, turn_id: str) -> Message:
    calls = enumerate(reply.tool_calls)
    named = tuple(ToolCall(lineage.call_id(turn_id, i), call.name, call.arguments) for i, call in calls)
    return structs.replace(reply, tool_calls=named)
