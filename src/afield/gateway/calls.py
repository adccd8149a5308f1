"""One model call, from a decoded request to a durable turn.

The order is the promise: the intent is durable before the engine is asked; every chunk is folded into
the turn before anything of it is emitted; `CallFinished` is emitted only when the turn is durable. A call
that
ends any other way (the client left, the session was aborted, the engine broke) leaves its partial as
an aborted turn. Non-streaming callers fold the same items.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from msgspec import structs

from afield.chat import ChatTokenizer, Event, Parser, ToolStart
from afield.errors import Unavailable
from afield.gateway import constraints, prompts
from afield.gateway.api_error import ApiError, bad_request, engine_down
from afield.gateway.call_accumulator import CallAccumulator, Spoken
from afield.gateway.images import Checker, image_spans
from afield.gateway.metrics import Metrics
from afield.gateway.model_request import (
    NO_REASONING,
    CallDelta,
    CallFinished,
    CallStarted,
    Item,
    ModelRequest,
    Scores,
    apply_sampling,
    override_tags,
)
from afield.gateway.parameters import unsupported
from afield.gateway.repeats import RETRY
from afield.gateway.sessions import ENGINE_FAILED, Reservation, Session, Sessions
from afield.gateway.stop_strings import StopStrings, sampled
from afield.gateway.store import Store, TurnRow, shield_and_wait
from afield.gateway.thinking import template_arguments
from afield.gateway.turn_ids import call_id
from afield.interfaces import Chunk, Engine, EngineInfo, GenerateRequest, Image
from afield.turn_tree import extend_digest
from afield.types import Constraint, FinishReason, Message, Sampling, ToolCall, Turn, TurnStatus

log = logging.getLogger("afield.gateway")
MALFORMED = "malformed-call"  # tag of a turn with a call that could not be read and stayed text
RULE = "render:"  # tag of a turn whose new messages were changed by a rule to suit the chat template
LAST = 1 << 62  # calls that never ended sort behind those that did
LEAVING_S = 5.0


class Calls:
    def __init__(
        self,
        *,
        store: Store,
        sessions: Sessions,
        engine: Engine,
        info: EngineInfo,
        tokens: ChatTokenizer,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._engine = engine
        self._info = info
        self._tokens = tokens
        self._metrics = metrics
        self._clock = clock
        self._pictures = Checker()

    async def run(self, session: Session, request: ModelRequest) -> AsyncGenerator[Item]:
        """Started, then Pieces, then Done. Close it early to abandon the call."""
        session.check_open(self._clock())
        self._check(session, request)
        if request.top_logprobs or request.prompt_logprobs is not None:
            request = self._with_logprobs(session, request)
        if request.images:
            await self._take_images(session, request)
        self._sampling(session, request)
        tokens, request = await self._rendered_by(session, request)
        place = await prompts.build_limited_prompt(session, tokens, request, self._info.max_context)
        limit = prompts.limit(session, request, place, self._info.max_context)
        if request.only_score:
            for item in await self._score(session, request, place):
                yield item
            return
        held: Constraint | None = None
        if asked := constraints.wanted(request):
            request, held = await self._hold(session, tokens, request, asked)
        if items := await self._again(session, tokens, request, place, limit, held):
            for item in items:
                yield item
            return
        if place.parent is not None:  # a client that goes on from a turn did get it
            await self._sessions.redeliver(session, place.parent)
        room = await session.reserve(limit, self._clock)
        n = session.charge(self._clock())
        with session.reserved(room) as reservation:
            items = self._sample(session, tokens, request, place, limit, reservation, n, held)
            async with aclosing(items):
                async for item in items:
                    yield item

    async def count(self, session: Session, request: ModelRequest) -> int:
        """How many tokens the prompt of a request has. Nothing is recorded."""
        self._check(session, request)
        tokens, request = await self._rendered_by(session, request)
        place = await prompts.build_limited_prompt(session, tokens, request, self._info.max_context)
        return len(place.prompt_ids)

    def _sampling(self, session: Session, request: ModelRequest) -> Sampling:
        spec = session.row.spec
        try:
            return apply_sampling(spec.sampling, request.wishes, spec.client_sampling)
        except (ValueError, OverflowError) as error:
            raise bad_request(str(error)) from error

    async def _rendered_by(
        self, session: Session, request: ModelRequest
    ) -> tuple[ChatTokenizer, ModelRequest]:
        """The tokens with the session's policies and the thinking that the request asks for."""
        tokens, spec = self._tokens, session.row.spec
        if request.reasoning is not NO_REASONING:
            ignore = spec.unsupported == "ignore"
            arguments, tags = template_arguments(tokens, request, ignore=ignore)
            tokens = tokens.variant(arguments) or await asyncio.to_thread(tokens.make_variant, arguments)
            if tags:
                request = structs.replace(request, tags=(*request.tags, *tags))
        return tokens.under(thinking=spec.thinking, escape=spec.escape, render=spec.render), request

    async def _hold(
        self, session: Session, tokens: ChatTokenizer, request: ModelRequest, asked: Sequence[str]
    ) -> tuple[ModelRequest, Constraint | None]:
        """The constraint of the reply; or the request without it, where the session says so."""
        names = [request.names.get(field, field) for field in asked]
        spec = session.row.spec
        if spec.constrained_turns == "ignore":
            return constraints.without(request, [f"ignored:{name}" for name in names]), None
        try:
            if not self._info.constraints:
                raise ValueError(f"the engine ({self._info.kind}) cannot hold a reply to a form")
            made = prompts.off_loop(constraints.size(request), constraints.constraint, tokens, request)
            return constraints.with_budget(request), await made
        except ValueError as error:
            if spec.unsupported == "ignore":
                return constraints.without(request, [f"ignored:{name}" for name in names]), None
            raise bad_request(
                f"{', '.join(names)}: {error}",
                "ask for something simpler, or open the session with unsupported: ignore",
            ) from error

    def _check(self, session: Session, request: ModelRequest) -> None:
        if request.tools and not self._reads_calls(session):
            raise self._unsupported(session)
        if request.images and not self._info.images:
            raise bad_request(
                f"the engine ({self._info.kind}) takes no images",
                "send text, or serve a model and an engine that take images",
            )

    def _with_logprobs(self, session: Session, request: ModelRequest) -> ModelRequest:
        """The request with what the engine can tell; one that asks for more is refused, or goes without."""
        info, ignore = self._info, session.row.spec.unsupported == "ignore"
        name = request.names.get("prompt_logprobs", "prompt_logprobs")
        if request.prompt_logprobs is not None and not info.prompt_logprobs:
            told = f"{name}: the engine ({info.kind}) does not tell the log-probabilities of prompts"
            tags = unsupported(name, told, "ask without it", ignore=ignore)
            request = structs.replace(request, prompt_logprobs=None, tags=(*request.tags, *tags))
        most = info.max_top_logprobs
        for field in ("top_logprobs", "prompt_logprobs"):
            asked, name = getattr(request, field) or 0, request.names.get(field, field)
            if asked > most:
                told = f"{name}={asked}: the engine ({info.kind}) tells the {most} likeliest tokens at most"
                tags = unsupported(name, told, "use an engine that tells more", ignore=ignore)
                request = structs.replace(request, tags=(*request.tags, *tags), **{field: most})
        return request

    def _reads_calls(self, session: Session) -> bool:
        certificate = self._tokens.certificate
        if session.row.spec.render == "strict" and "fold-tools" in certificate.rules:
            return False
        return certificate.tool_format is not None

    def _unsupported(self, session: Session) -> ApiError:
        """Nothing of this request's own: whatever else the agent asks with tools is refused alike."""
        refusal = ApiError(
            400,
            "unsupported_by_model",
            f"the chat template of {self._tokens.name!r} has no tool calls that can be read",
            "open sessions with render 'fold', call without tools, or use a model whose tool format is known"
            " (afield inspect-template MODEL)",
        )
        session.unsupported = refusal.text
        return refusal

    # --- asked again -----------------------------------------------------------------------------

    async def _again(
        self,
        session: Session,
        tokens: ChatTokenizer,
        request: ModelRequest,
        place: prompts.Prompt,
        limit: int,
        held: Constraint | None,
    ) -> list[Item]:
        """The answer that a client missed, or names by its idempotency key: nothing new is sampled for it."""
        key = request.idempotency_key
        if flight := session.flights.get(key):
            await asyncio.wait([flight])
        for turn in reversed(session.forest.asked(place.asked)):
            if not _repeatable(session, turn, key, (place.parent, place.delta_ids, limit, held)):
                continue
            scores = self._scores_again(session, request, turn)
            if _asks_scores(request) and scores is None:
                continue
            parser, stops = self._readers(tokens, request, held)
            pieces = self._pieces_again(request, turn, scores, parser, stops)
            reply = self._with_ids(stops.cut(parser.reply), turn.id)
            if reply != turn.messages[-1]:
                continue
            missed = await self._sessions.redeliver(session, turn.id)
            if missed or key or turn.id in session.unsure:
                session.unsure.discard(turn.id)
                log.info("session %s: turn %s goes to a client that asks again", session.id, turn.id)
                self._metrics.retries += 1
                started = CallStarted(
                    session.id, turn.id, place.prompt_ids, turn.started, owed=missed, sampling=turn.sampling
                )
                thought = await _thought(tokens, turn, reply)
                end = CallFinished(turn, reply, len(place.prompt_ids), stops.found, thought, scores)
                return [started, *pieces, end]
        return []

    def _pieces_again(
        self, request: ModelRequest, turn: Turn, scores: Scores | None, parser: Parser, stops: StopStrings
    ) -> list[CallDelta]:
        """A turn as one chunk."""
        chunk = Chunk(
            token_ids=turn.token_ids,
            logprobs=turn.logprobs,
            low=0,
            high=0,
            finish=turn.finish_reason,
            top_logprobs=scores.top if scores else (),
            prompt_logprobs=scores.prompt if scores else None,
        )
        partial = CallAccumulator()
        chunk = partial.fold(chunk, turn.started)
        return self._pieces(chunk, partial, stops, turn.id, _spoken(request, parser))

    def _scores_again(self, session: Session, request: ModelRequest, turn: Turn) -> Scores | None:
        """What was told with a turn, if this request asks for no more."""
        scores = session.rows[int(turn.id[1:])].scores
        asked = (request.top_logprobs, request.prompt_logprobs, request.by_token)
        return scores if scores and scores.answers(*asked) else None

    def _readers(
        self, tokens: ChatTokenizer, request: ModelRequest, held: Constraint | None
    ) -> tuple[Parser, StopStrings]:
        verbatim = held is not None
        if request.prompt is not None:
            parser = tokens.plain_parser(verbatim=verbatim)
        else:
            # Calls are shown when they are closed: a client never sees one that turns out malformed.
            tools = request.tools if request.may_call else ()
            parser = tokens.parser(tools=tools, hold_calls=True, verbatim=verbatim)
        return parser, StopStrings(request.stop, parser)

    # --- prompts that are scored and not answered ------------------------------------------------

    async def _score(self, session: Session, request: ModelRequest, place: prompts.Prompt) -> list[Item]:
        """The log-probabilities of a prompt. It takes a call from the budget and leaves no turn: there is
        nothing that anybody sampled, but for the one token that engines want to be asked for."""
        n = session.charge(self._clock())
        intent = self._intent(session, request, place, 1, n)
        scored = None
        if request.prompt_logprobs is not None:
            call = self._call(session, request, place, 1, intent.id, n)
            try:
                async with aclosing(self._engine.generate(call)) as chunks:
                    async for chunk in chunks:
                        scored = chunk.prompt_logprobs if scored is None else scored
            except ValueError as error:
                raise bad_request(f"the engine refuses this prompt: {error}") from error
            except Unavailable as error:
                session.charged -= 1
                raise engine_down(str(error)) from error
        turn = structs.replace(intent, status=TurnStatus.COMMITTED, finish_reason=FinishReason.LENGTH)
        scores = Scores(prompt_count=request.prompt_logprobs, prompt=scored)
        reply = Message(role="assistant")
        started = CallStarted(session.id, turn.id, place.prompt_ids, turn.started, False, turn.sampling)
        piece = CallDelta((), (), [], prompt_logprobs=scored)
        return [started, piece, CallFinished(turn, reply, len(place.prompt_ids), scores=scores)]

    # --- sampling --------------------------------------------------------------------------------

    async def _sample(
        self,
        session: Session,
        tokens: ChatTokenizer,
        request: ModelRequest,
        place: prompts.Prompt,
        limit: int,
        reserved: Reservation,
        n: int,
        held: Constraint | None,
    ) -> AsyncGenerator[Item]:
        """`limit` is how many tokens were asked for, `n` the number of the call."""
        intent = self._intent(session, request, place, limit, n, held)
        partial = CallAccumulator()
        parser, stops = self._readers(tokens, request, held)
        spoken = _spoken(request, parser)
        await self._keep(session, request)
        call = self._call(session, request, place, reserved.left, intent.id, n, held)
        chunks = sampled(self._engine, call, stops) if call.stop else self._engine.generate(call)
        broke: tuple[str, ...] = ()
        asked = len(place.prompt_ids)
        turn: Turn | None = None
        flight = session.takes_off(request.idempotency_key)
        session.running.add(n)
        self._metrics.began(intent)
        try:
            await self._note_intent(session, intent, n)
            yield CallStarted(
                session.id, intent.id, place.prompt_ids, intent.started, sampling=intent.sampling
            )
            async for given in chunks:
                now, before = self._clock(), len(partial.ids)
                chunk = partial.fold(given, now)
                if chunk.prompt_ids is not None:
                    intent = self._expanded(session, intent, chunk.prompt_ids)
                    asked = len(chunk.prompt_ids)
                pieces = self._pieces(chunk, partial, stops, intent.id, spoken)
                reserved.spend(len(partial.ids) - before, now)
                if not partial.finish:
                    for piece in pieces:
                        yield piece
                    continue
                _check_ended(partial.finish)
                reply = self._with_ids(stops.cut(parser.reply), intent.id)
                spoilt = (MALFORMED,) if parser.malformed else ()
                session.check_unsealed()
                turn = self._ended(intent, partial, TurnStatus.COMMITTED, reply, spoilt)
                # From here on, whatever comes, the commit is carried through.
                scores = _scores(request, partial, spoken)
                await self._commit(session, request, place, turn, n, scores)
                thought = await _thought(tokens, turn, reply)
                end = CallFinished(turn, reply, asked, stops.found, thought, scores)
                for item in (*pieces, end):
                    yield item
                return
            raise Unavailable("the engine's stream ended without a finish")
        except ValueError as error:
            if held is not None:
                names = ", ".join(request.names.get(field, field) for field in constraints.wanted(request))
                raise bad_request(f"{names}: {error}", "ask for something simpler") from error
            if partial.ids:
                raise
            raise bad_request(f"the engine refuses this prompt: {error}") from error
        except Unavailable as error:
            broke = (ENGINE_FAILED,)
            session.charged -= 1
            log.error("session %s turn %s: %s", session.id, intent.id, error)
            raise engine_down(str(error)) from error
        finally:
            partial.finish = partial.finish if turn else FinishReason.ABORTED
            ended = turn or self._ended(intent, partial, TurnStatus.ABORTED, None, broke)
            try:
                await (
                    chunks.aclose()
                    if turn
                    else shield_and_wait(self._abandon(session, request, ended, chunks, n))
                )
            finally:
                reserved.release()
                session.running.discard(n)
                session.lands(request.idempotency_key, flight)
                self._metrics.ended(ended, asked)

    async def _keep(self, session: Session, request: ModelRequest) -> None:
        """What the turn refers to, once for the session."""
        if request.shared is not None and request.shared[0] not in session.texts:
            await self._store.put_text(session.id, *request.shared)
            session.texts.add(request.shared[0])

    async def _abandon(
        self, session: Session, request: ModelRequest, turn: Turn, chunks: AsyncGenerator[Chunk], n: int
    ) -> None:
        """Leave the engine, and keep what it gave."""
        try:
            async with asyncio.timeout(LEAVING_S):
                await chunks.aclose()
        except TimeoutError:
            log.error("session %s turn %s: the engine does not let go of it", session.id, turn.id)
        if session.sealed:
            tokens = len(turn.token_ids)
            log.error("session %s turn %s: %d tokens come after its record", session.id, turn.id, tokens)
            return
        try:
            await self._record(session, request, turn, n)
        except Unavailable as error:
            raise engine_down(str(error)) from error

    def _expanded(self, session: Session, intent: Turn, prompt_ids: tuple[int, ...]) -> Turn:
        """The prompt as the engine made it of ours, images expanded: that is what is recorded."""
        before = session.forest.ids(intent.parent) if intent.parent else ()
        if prompt_ids[: len(before)] != before:
            raise Unavailable("the engine expanded an earlier image in another way than before")
        delta = tuple(prompt_ids[len(before) :])
        sent = intent.sent_ids or intent.delta_ids
        digests = [image.digest for message in intent.messages for image in message.images]
        images = image_spans(sent, delta, digests, self._tokens.image_id)
        return structs.replace(intent, delta_ids=delta, sent_ids=sent, images=images)

    def _pieces(
        self,
        chunk: Chunk,
        partial: CallAccumulator,
        stops: StopStrings,
        turn_id: str,
        spoken: Spoken | None,
    ) -> list[CallDelta]:
        """A chunk, or its tokens one by one, each with the places of the tokens whose text it tells."""
        if spoken is None:
            return [self._piece(chunk, partial, stops, turn_id)]
        pieces: list[CallDelta] = []
        last = len(chunk.token_ids) - 1
        for n, token in enumerate(chunk.token_ids):
            one = structs.replace(
                chunk,
                token_ids=(token,),
                logprobs=chunk.logprobs[n : n + 1],
                top_logprobs=chunk.top_logprobs[n : n + 1],
                prompt_logprobs=chunk.prompt_logprobs if n == 0 else None,
                finish=chunk.finish if n == last else None,
            )
            piece = self._piece(one, partial, stops, turn_id)
            pieces.append(structs.replace(piece, spoken=spoken.feed(token, piece.events)))
        if not chunk.token_ids:
            piece = self._piece(chunk, partial, stops, turn_id)
            pieces.append(structs.replace(piece, spoken=spoken.tell(piece.events)))
        return pieces

    def _piece(self, chunk: Chunk, partial: CallAccumulator, stops: StopStrings, turn_id: str) -> CallDelta:
        """What a chunk tells. What was sampled after a stop string is not recorded."""
        kept, events = stops.feed(chunk.token_ids)
        if chunk.finish or stops.hit:
            events += stops.finish()
        if stops.hit:
            partial.trim(len(chunk.token_ids) - kept)
            partial.trim(stops.beyond(partial.ids))
            partial.finish = FinishReason.STOP
        piece = CallDelta(chunk.token_ids[:kept], chunk.logprobs[:kept], self._named(events, turn_id))
        if chunk.top_logprobs or chunk.prompt_logprobs is not None:
            top, prompt = chunk.top_logprobs[:kept], chunk.prompt_logprobs
            return structs.replace(piece, top_logprobs=top, prompt_logprobs=prompt)
        return piece

    async def _take_images(self, session: Session, request: ModelRequest) -> None:
        """Keep those that are new to the session, decoded once; refuse what is no image."""
        new = [image for digest, image in request.images.items() if digest not in session.images]
        if new:
            new = await self._pictures.check(new, request.image_places)
            await self._store.put_images(session.id, new)
            session.images.update(image.digest for image in new)

    def _images(self, session: Session, place: prompts.Prompt) -> tuple[Image, ...]:
        """All images of the conversation, in the order of their places in the prompt."""
        path = session.forest.path(place.parent) if place.parent else []
        messages = [m for turn in path for m in turn.messages] + list(place.new)
        digests = [image.digest for message in messages for image in message.images]
        return tuple(self._store.image(session.id, digest) for digest in digests)

    def _image_places(self, session: Session, place: prompts.Prompt) -> tuple[int, ...]:
        """Where the prompt has a placeholder that nobody sampled."""
        ids, spans = place.sent_ids or place.prompt_ids, []
        if place.parent:
            spans = session.forest.sampled(place.parent)
        sampled = {n for start, end in spans for n in range(start, end)}
        wanted = self._tokens.image_id
        return tuple(n for n, token in enumerate(ids) if token == wanted and n not in sampled)

    def _call(
        self,
        session: Session,
        request: ModelRequest,
        place: prompts.Prompt,
        room: int,
        turn_id: str,
        n: int,
        held: Constraint | None = None,
    ) -> GenerateRequest:
        spec, sampling = session.row.spec, self._sampling(session, request)
        images = self._images(session, place) if self._info.images else ()
        return GenerateRequest(
            id=f"{session.id}/{turn_id}",
            session_id=session.id,
            prompt_ids=place.sent_ids or place.prompt_ids,
            sampling=sampling,
            max_tokens=room,
            stop_ids=self._tokens.stop_ids,
            # An engine that ends at a stop string outside of the text would have to go on in mid-grammar.
            stop=() if held is not None else tuple(stop for stop in request.stop if stop),
            stream=request.stream or bool(request.stop),
            base_ids=place.base_ids,
            images=images,
            image_places=self._image_places(session, place) if images else (),
            # A call that a gateway died under is asked again, and is not to be drawn anew.
            draw=f"{spec.draw or session.id}/t{n - session.dangling}",
            top_logprobs=request.top_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            constraint=held,
        )

    def _intent(
        self,
        session: Session,
        request: ModelRequest,
        place: prompts.Prompt,
        limit: int,
        n: int,
        held: Constraint | None = None,
    ) -> Turn:
        sampling = self._sampling(session, request)
        return Turn(
            id=f"t{n}",
            root=place.root,
            parent=place.parent,
            delta_ids=place.delta_ids,
            status=TurnStatus.DANGLING,
            sampling=structs.replace(sampling, max_tokens=limit),
            tier=place.tier,
            dialect=request.dialect,
            messages=place.new,
            asked=place.asked,
            digest=place.asked,
            tools_digest=place.tools_digest,
            tags=(
                *request.tags,
                *(f"{RULE}{rule}" for rule in place.rules),
                *((RETRY,) if request.retry else ()),
                *override_tags(sampling, request.wishes),
            ),
            links=place.links,
            constraint=held,
            started=self._clock(),
        )

    async def _note_intent(self, session: Session, intent: Turn, n: int) -> None:
        session.check_unsealed()
        await self._write(session, TurnRow(n, LAST, intent), session.intend)

    async def _commit(
        self,
        session: Session,
        request: ModelRequest,
        place: prompts.Prompt,
        turn: Turn,
        n: int,
        scores: Scores | None,
    ) -> None:
        await self._record(session, request, turn, n, scores)
        if not turn.sent_ids:
            session.forest.keep(turn.id, place.prompt_ids)

    async def _record(
        self, session: Session, request: ModelRequest, turn: Turn, n: int, scores: Scores | None = None
    ) -> None:
        session.commits += 1
        row = TurnRow(
            n, session.commits, turn, request.idempotency_key, request.thread, scores, request.shown
        )
        await self._write(session, row, session.record)

    async def _write(self, session: Session, row: TurnRow, then: Callable[[TurnRow], None]) -> None:
        """Whatever comes while it is being written, what is stored and what is in memory agree."""
        with session.writing():
            writing = asyncio.ensure_future(self._store.put_turn(session.id, row))
            try:
                await shield_and_wait(writing)
            finally:
                if writing.done() and not writing.cancelled() and writing.exception() is None:
                    then(row)

    def _ended(
        self,
        intent: Turn,
        partial: CallAccumulator,
        status: TurnStatus,
        reply: Message | None,
        tags: tuple[str, ...] = (),
    ) -> Turn:
        return structs.replace(
            intent,
            token_ids=tuple(partial.ids),
            logprobs=tuple(partial.logprobs),
            versions=partial.spans,
            finish_reason=partial.finish,
            status=status,
            messages=(*intent.messages, reply) if reply else intent.messages,
            digest=extend_digest(intent.digest, reply) if reply else intent.digest,
            tags=(*intent.tags, *tags),
            first_token=partial.first_token,
            ended=self._clock(),
        )

    # --- ids -------------------------------------------------------------------------------------

    def _with_ids(self, reply: Message, turn_id: str) -> Message:
        """Calls get the ids we hand out, unless the model spelled their own."""
        if not reply.tool_calls:
            return reply
        calls = enumerate(reply.tool_calls)
        named = (ToolCall(call.id or self._id(turn_id, n), call.name, call.arguments) for n, call in calls)
        return structs.replace(reply, tool_calls=tuple(named))

    def _named(self, events: Sequence[Event], turn_id: str) -> list[Event]:
        return [
            structs.replace(event, id=self._id(turn_id, event.index))
            if isinstance(event, ToolStart) and not event.id
            else event
            for event in events
        ]

    def _id(self, turn_id: str, index: int) -> str:
        return call_id(turn_id, index, self._tokens.certificate.call_ids)


def _repeatable(
    session: Session, turn: Turn, key: str, asked: tuple[str | None, tuple[int, ...], int, Constraint | None]
) -> bool:
    """Whether a turn may be given to a client that asks the same again.

    An idempotency key says which try of a request this is. Without one, only that an answer was missed says
    that it may be: a retry must not get the answer of another request that asked the same.
    """
    if turn.status is not TurnStatus.COMMITTED or session.key_of(turn.id) != key:
        return False
    same = (turn.parent, turn.sent_ids or turn.delta_ids, turn.sampling.max_tokens, turn.constraint)
    if asked != same:
        return False
    return bool(key) or turn.id in session.row.withheld or turn.id in session.unsure


def _check_ended(finish: FinishReason) -> None:
    if finish is FinishReason.ABORTED:
        raise Unavailable("the engine gave the call up")


def _asks_scores(request: ModelRequest) -> bool:
    return request.top_logprobs > 0 or request.prompt_logprobs is not None or request.by_token


def _spoken(request: ModelRequest, parser: Parser) -> Spoken | None:
    return Spoken(parser.size) if request.by_token else None


def _scores(request: ModelRequest, partial: CallAccumulator, spoken: Spoken | None) -> Scores | None:
    if not _asks_scores(request):
        return None
    return Scores(
        count=request.top_logprobs,
        top=tuple(partial.tops),
        prompt_count=request.prompt_logprobs,
        prompt=partial.prompt_tops,
        spoken=None if spoken is None else tuple(spoken.all),
    )


async def _thought(tokens: ChatTokenizer, turn: Turn, reply: Message) -> int:
    """Counted id by id, and only where something was thought."""
    if not reply.reasoning:
        return 0
    parser = tokens.parser(tools=())
    return await prompts.off_loop(len(reply.reasoning), parser.thought, turn.token_ids)
