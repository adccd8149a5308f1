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
from afield.gateway.sessions import ENGINE_FAILED, Session, Sessions
from afield.gateway.stops import StopStrings
from afield.gateway.store import Store, TurnRow, to_its_end
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
        limit = self._limit(session, request, place)
        if items := await self._missed(session, request, place, limit):
            for item in items:
                yield item
            return
        n = session.charge(self._clock())
        async with aclosing(self._sample(session, request, place, limit, n)) as sampled:
            async for item in sampled:
                yield item

    async def _place(self, session: Session, request: ModelRequest) -> lineage.Place:
        missed = frozenset(session.row.undelivered)
        arguments = (session.forest, self._tokens, request.messages, request.tools, missed)
        try:
            if sum(map(_size, request.messages)) > INLINE_CHARACTERS:
                return await asyncio.to_thread(lineage.place, *arguments)
            return lineage.place(*arguments)
        except (ValueError, RecursionError) as error:
            raise bad_request(f"the chat template refuses these messages: {error}") from error

    def _limit(self, session: Session, request: ModelRequest, place: lineage.Place) -> int:
        """How many tokens the call may sample: what context, session and client allow."""
        spec = session.row.spec
        context = min(self._info.max_context, spec.budget.context or self._info.max_context)
        room = context - len(place.prompt_ids)
        if room < 1:
            raise context_exceeded(len(place.prompt_ids), context)
        bounds = (room, request.max_tokens, spec.sampling.max_tokens)
        return min(bound for bound in bounds if bound is not None)

    async def _missed(
        self, session: Session, request: ModelRequest, place: lineage.Place, limit: int
    ) -> list[Item]:
        """The answer a client missed and asks for again, so that its retry samples nothing new."""
        wanted = (place.root, place.parent, place.delta_ids, limit)
        for turn in [session.forest[turn_id] for turn_id in session.row.undelivered]:
            if (turn.root, turn.parent, turn.delta_ids, turn.sampling.max_tokens) != wanted:
                continue
            parser, stops = self._readers(request)
            events = stops.filter(parser.feed(turn.token_ids))
            events += [] if stops.hit else stops.filter(parser.finish(), last=True)
            reply = with_call_ids(stops.cut(parser.reply), turn.id)
            if reply == turn.messages[-1] and await self._take(session, turn):
                log.info("session %s: turn %s goes to a client that missed it", session.id, turn.id)
                started = Started(turn.id, place.prompt_ids)
                piece = Piece(turn.token_ids, turn.logprobs, events)
                return [started, piece, Done(turn, reply, len(place.prompt_ids))]
        return []

    async def _take(self, session: Session, turn: Turn) -> bool:
        try:
            return await self._sessions.redeliver(session, turn.id)
        except asyncio.CancelledError:
            await asyncio.shield(self._sessions.withhold(session, turn.id))
            raise

    def _readers(self, request: ModelRequest) -> tuple[Parser, StopStrings]:
        # Calls are shown when they are closed, so that a client never sees one that turns out malformed.
        parser = self._tokens.parser(tools=bool(request.tools), hold_calls=True)
        return parser, StopStrings(request.stop)

    async def _sample(
        self, session: Session, request: ModelRequest, place: lineage.Place, limit: int, n: int
    ) -> AsyncGenerator[Item]:
        intent = self._intent(session, request, place, limit, n)
        partial = Partial()
        parser, stops = self._readers(request)
        chunks = self._engine.generate(self._call(session, request, place, limit, intent.id))
        broke: tuple[str, ...] = ()
        ended = False
        try:
            await to_its_end(self._note_intent(session, intent, n))
            yield Started(intent.id, place.prompt_ids)
            async for chunk in chunks:
                partial.fold(chunk, self._clock())
                session.spend(len(chunk.token_ids), self._clock())
                events = stops.filter(parser.feed(chunk.token_ids))
                partial.finish = chunk.finish or self._why_cut(session, stops)
                if not partial.finish:
                    yield Piece(chunk.token_ids, chunk.logprobs, events)
                    continue
                events += [] if stops.hit else stops.filter(parser.finish(), last=True)
                reply = with_call_ids(stops.cut(parser.reply), intent.id)
                turn = self._ended(intent, partial, TurnStatus.COMMITTED, reply)
                ended = True  # whatever comes now, the commit is carried through
                await to_its_end(self._record(session, turn, n))
                yield Piece(chunk.token_ids, chunk.logprobs, events)
                yield Done(turn, reply, len(place.prompt_ids))
                return
            raise Unavailable("the engine's stream ended without a finish")
        except ValueError as error:
            if partial.ids:
                raise
            raise bad_request(f"the engine refuses this prompt: {error}") from error
        except Unavailable as error:
            broke = (ENGINE_FAILED,)
            session.charged -= 1
            log.error("session %s turn %s: %s", session.id, intent.id, error)
            raise engine_down(str(error)) from error
        finally:
            await chunks.aclose()
            if not ended:
                partial.finish = FinishReason.ABORTED
                turn = self._ended(intent, partial, TurnStatus.ABORTED, None, broke)
                await to_its_end(self._record(session, turn, n))

    def _why_cut(self, session: Session, stops: StopStrings) -> FinishReason | None:
        """Reasons of ours to end a call that the engine would go on with."""
        if stops.hit:
            return FinishReason.STOP
        return FinishReason.LENGTH if session.out_of_tokens else None

    def _call(
        self, session: Session, request: ModelRequest, place: lineage.Place, limit: int, turn_id: str
    ) -> Call:
        spec = session.row.spec
        watched = bool(request.stop) or spec.budget.tokens is not None
        return Call(
            id=f"{session.id}/{turn_id}",
            session_id=session.id,
            prompt_ids=place.prompt_ids,
            sampling=spec.sampling,
            max_tokens=limit,
            stop_ids=self._tokens.stop_ids,
            stream=request.stream or watched,
        )

    def _intent(
        self, session: Session, request: ModelRequest, place: lineage.Place, limit: int, n: int
    ) -> Turn:
        return Turn(
            id=f"t{n}",
            root=place.root,
            parent=place.parent,
            delta_ids=place.delta_ids,
            status=TurnStatus.DANGLING,
            sampling=structs.replace(session.row.spec.sampling, max_tokens=limit),
            tier=place.tier,
            dialect=request.dialect,
            messages=place.new,
            digest=place.digest,
            tools_digest=place.tools_digest,
            links=place.links,
            started=self._clock(),
        )

    async def _note_intent(self, session: Session, intent: Turn, n: int) -> None:
        row = TurnRow(n, LAST, intent)
        await self._store.put_turn(session.id, row)
        session.rows[n] = row

    async def _record(self, session: Session, turn: Turn, n: int) -> None:
        session.commits += 1
        row = TurnRow(n, session.commits, turn)
        await self._store.put_turn(session.id, row)
        session.record(row)

    def _ended(
        self,
        intent: Turn,
        partial: Partial,
        status: TurnStatus,
        reply: Message | None,
        tags: tuple[str, ...] = (),
    ) -> Turn:
        return structs.replace(
            intent,
            token_ids=tuple(partial.ids),
            logprobs=tuple(partial.logprobs),
            versions=tuple(partial.spans),
            finish_reason=partial.finish,
            status=status,
            messages=(*intent.messages, reply) if reply else intent.messages,
            digest=extend_digest(intent.digest, reply) if reply else intent.digest,
            tags=tags,
            first_token=partial.first_token,
            ended=self._clock(),
        )


def _size(message: Message) -> int:
    return len(message.content) + len(message.reasoning) + sum(len(c.arguments) for c in message.tool_calls)


def with_call_ids(reply: Message, turn_id: str) -> Message:
    calls = enumerate(reply.tool_calls)
    named = tuple(ToolCall(lineage.call_id(turn_id, i), call.name, call.arguments) for i, call in calls)
    return structs.replace(reply, tool_calls=named)
