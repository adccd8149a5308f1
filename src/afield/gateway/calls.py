"""Model calls: from a decoded request to a durable turn.

1. The intent of a call is durable before the engine is called.
2. Each chunk is added to the turn before any part of it is emitted.
3. `CallFinished` is emitted after the turn is durable.
4. A call that ends early (disconnected client, aborted session, failed engine) leaves an aborted turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from msgspec import structs

from afield.chat import ChatTokenizer, Event, ReplyParser, ToolStart
from afield.errors import Unavailable
from afield.gateway import constraints, prompts
from afield.gateway.api_error import ApiError, bad_request, engine_down
from afield.gateway.call_accumulator import CallAccumulator, TextPositions
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
from afield.gateway.sessions import Reservation, Session, SessionManager
from afield.gateway.stop_strings import StopStrings, sampled
from afield.gateway.store import GatewayStore, TurnRow, shield_and_wait
from afield.gateway.thinking import template_arguments
from afield.gateway.turn_ids import call_id
from afield.interfaces import Chunk, Engine, EngineInfo, GenerateRequest, Image
from afield.runs.turn_facts import EMPTY_SCHEMA, ENGINE_FAILED, MALFORMED
from afield.turn_tree import extend_digest
from afield.types import Constraint, FinishReason, Message, Sampling, ToolCall, Turn, TurnStatus

log = logging.getLogger(__name__)
RULE = "render:"
"""Prefix of the tag for a message rule that the chat template needed."""
LAST = 1 << 62
"""Sequence number of unfinished calls, which sort last."""
LEAVING_S = 5.0
"""Timeout for leaving an engine, in seconds."""


class Calls:
    """Runs the model calls of a gateway."""

    def __init__(
        self,
        *,
        store: GatewayStore,
        sessions: SessionManager,
        engine: Engine,
        info: EngineInfo,
        tokenizer: ChatTokenizer,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._engine = engine
        self._info = info
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._clock = clock
        self._image_checker = Checker()

    async def run(self, session: Session, request: ModelRequest) -> AsyncGenerator[Item]:
        """Yields `CallStarted`, `CallDelta`s, then `CallFinished`. Closing it early abandons the call."""
        session.check_open(self._clock())
        self._check(session, request)
        if request.top_logprobs or request.prompt_logprobs is not None:
            request = self._with_logprobs(session, request)
        if request.images:
            await self._take_images(session, request)
        self._sampling(session, request)
        tokenizer, request = await self._tokenizer_for(session, request)
        prompt = await prompts.build_limited_prompt(session, tokenizer, request, self._info.max_context)
        limit = prompts.token_limit(session, request, prompt, self._info.max_context)
        if request.only_score:
            for item in await self._score(session, request, prompt):
                yield item
            return
        constraint: Constraint | None = None
        if fields := constraints.wanted(request):
            request, constraint = await self._constrain(session, tokenizer, request, fields)
        if items := await self._repeat_answer(session, tokenizer, request, prompt, limit, constraint):
            for item in items:
                yield item
            return
        if prompt.parent is not None:  # continuing a turn proves its delivery
            await self._sessions.redeliver(session, prompt.parent)
        granted_tokens = await session.reserve(limit, self._clock)
        n = session.charge(self._clock())
        with session.reserved(granted_tokens) as reservation:
            items = self._sample(session, tokenizer, request, prompt, limit, reservation, n, constraint)
            async with aclosing(items):
                async for item in items:
                    yield item

    async def count(self, session: Session, request: ModelRequest) -> int:
        """Counts the prompt tokens of a request without recording it."""
        self._check(session, request)
        tokenizer, request = await self._tokenizer_for(session, request)
        prompt = await prompts.build_limited_prompt(session, tokenizer, request, self._info.max_context)
        return len(prompt.prompt_ids)

    def _sampling(self, session: Session, request: ModelRequest) -> Sampling:
        spec = session.row.spec
        try:
            return apply_sampling(spec.sampling, request.requested_sampling, spec.client_sampling)
        except (ValueError, OverflowError) as error:
            raise bad_request(str(error)) from error

    async def _tokenizer_for(
        self, session: Session, request: ModelRequest
    ) -> tuple[ChatTokenizer, ModelRequest]:
        """Returns the tokenizer with the session's policies and the requested reasoning."""
        tokenizer, spec = self._tokenizer, session.row.spec
        if request.reasoning is not NO_REASONING:
            ignore = spec.unsupported == "ignore"
            arguments, tags = template_arguments(tokenizer, request, ignore=ignore)
            tokenizer = tokenizer.variant(arguments) or await asyncio.to_thread(
                tokenizer.make_variant, arguments
            )
            if tags:
                request = structs.replace(request, tags=(*request.tags, *tags))
        return tokenizer.under(thinking=spec.thinking, escape=spec.escape, render=spec.render), request

    async def _constrain(
        self, session: Session, tokenizer: ChatTokenizer, request: ModelRequest, fields: Sequence[str]
    ) -> tuple[ModelRequest, Constraint | None]:
        """Builds the reply's constraint, or drops it if the session's policy ignores constraints."""
        names = [request.names.get(field, field) for field in fields]
        spec = session.row.spec
        if spec.constrained_turns == "ignore":
            return constraints.without(request, [f"ignored:{name}" for name in names]), None
        try:
            if not self._info.constraints:
                raise ValueError(f"the engine ({self._info.kind}) cannot enforce a constraint")
            constraint = prompts.off_loop(
                constraints.size(request), constraints.constraint, tokenizer, request
            )
            return constraints.with_budget(request), await constraint
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
        """Limits requested log-probabilities to those of the engine; raises 400 unless the session ignores
        it.
        """
        info, ignore = self._info, session.row.spec.unsupported == "ignore"
        name = request.names.get("prompt_logprobs", "prompt_logprobs")
        if request.prompt_logprobs is not None and not info.prompt_logprobs:
            message = f"{name}: the engine ({info.kind}) does not tell the log-probabilities of prompts"
            tags = unsupported(name, message, "ask without it", ignore=ignore)
            request = structs.replace(request, prompt_logprobs=None, tags=(*request.tags, *tags))
        maximum = info.max_top_logprobs
        for field in ("top_logprobs", "prompt_logprobs"):
            requested, name = getattr(request, field) or 0, request.names.get(field, field)
            if requested > maximum:
                message = f"{name}={requested}: the engine ({info.kind}) returns at most {maximum}"
                tags = unsupported(name, message, "use an engine that tells more", ignore=ignore)
                request = structs.replace(request, tags=(*request.tags, *tags), **{field: maximum})
        return request

    def _reads_calls(self, session: Session) -> bool:
        profile = self._tokenizer.profile
        if session.row.spec.render == "strict" and "fold-tools" in profile.rules:
            return False
        return profile.tool_format is not None

    def _unsupported(self, session: Session) -> ApiError:
        """The error for requests with tools; it applies to every such request of the session."""
        error = ApiError(
            400,
            "unsupported_by_model",
            f"the chat template of {self._tokenizer.name!r} has no tool calls that can be read",
            "open sessions with render 'fold', call without tools, or use a model whose tool format is known"
            " (afield inspect-template MODEL)",
        )
        session.unsupported = error.text
        return error

    # --- repeated requests ---

    async def _repeat_answer(
        self,
        session: Session,
        tokenizer: ChatTokenizer,
        request: ModelRequest,
        prompt: prompts.Prompt,
        limit: int,
        constraint: Constraint | None,
    ) -> list[Item]:
        """Returns the recorded answer to a repeated request, or an empty list.

        A request repeats an undelivered answer, or names an earlier request by its idempotency key.
        """
        key = request.idempotency_key
        if running_call := session.keyed_calls.get(key):
            await asyncio.wait([running_call])
        for turn in reversed(session.tree.turns_of_request(prompt.request_digest)):
            if not _repeatable(session, turn, key, (prompt.parent, prompt.delta_ids, limit, constraint)):
                continue
            scores = self._scores_again(session, request, turn)
            if _asks_scores(request) and scores is None:
                continue
            parser, stops = self._parsers(tokenizer, request, constraint)
            deltas = self._deltas_again(request, turn, scores, parser, stops)
            reply = self._with_ids(stops.cut(parser.reply), turn.id)
            if reply != turn.messages[-1]:
                continue
            undelivered = await self._sessions.redeliver(session, turn.id)
            if undelivered or key or turn.id in session.maybe_undelivered:
                session.maybe_undelivered.discard(turn.id)
                log.info("session %s turn %s: recorded answer repeated", session.id, turn.id)
                self._metrics.retries += 1
                started = CallStarted(
                    session.id,
                    turn.id,
                    prompt.prompt_ids,
                    turn.started,
                    must_deliver=undelivered,
                    sampling=turn.sampling,
                )
                thought = await _count_reasoning(tokenizer, turn, reply)
                finished = CallFinished(turn, reply, len(prompt.prompt_ids), stops.matched, thought, scores)
                return [started, *deltas, finished]
        return []

    def _deltas_again(
        self,
        request: ModelRequest,
        turn: Turn,
        scores: Scores | None,
        parser: ReplyParser,
        stops: StopStrings,
    ) -> list[CallDelta]:
        """Replays a turn as one chunk."""
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
        partial.fold(chunk, turn.started)
        return self._deltas(chunk, partial, stops, turn.id, _text_positions(request, parser))

    def _scores_again(self, session: Session, request: ModelRequest, turn: Turn) -> Scores | None:
        """Returns the scores of a turn if they cover this request."""
        scores = session.rows[int(turn.id[1:])].scores
        requested = (request.top_logprobs, request.prompt_logprobs, request.by_token)
        return scores if scores and scores.answers(*requested) else None

    def _parsers(
        self, tokenizer: ChatTokenizer, request: ModelRequest, constraint: Constraint | None
    ) -> tuple[ReplyParser, StopStrings]:
        verbatim = constraint is not None
        if request.prompt is not None:
            parser = tokenizer.plain_parser(verbatim=verbatim)
        else:
            # Calls are emitted when complete, so that clients never see a malformed one.
            tools = request.tools if request.may_call else ()
            parser = tokenizer.parser(tools=tools, verbatim=verbatim)
        return parser, StopStrings(request.stop, parser)

    # --- scored prompts ---

    async def _score(self, session: Session, request: ModelRequest, prompt: prompts.Prompt) -> list[Item]:
        """Scores a prompt. Takes one call from the budget and records no turn."""
        n = session.charge(self._clock())
        intent = self._intent(session, request, prompt, 1, n)
        scored = None
        if request.prompt_logprobs is not None:
            call = self._call(session, request, prompt, 1, intent.id, n)
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
        started = CallStarted(session.id, turn.id, prompt.prompt_ids, turn.started, False, turn.sampling)
        delta = CallDelta((), (), [], prompt_logprobs=scored)
        return [started, delta, CallFinished(turn, reply, len(prompt.prompt_ids), scores=scores)]

    # --- sampling ---

    async def _sample(
        self,
        session: Session,
        tokenizer: ChatTokenizer,
        request: ModelRequest,
        prompt: prompts.Prompt,
        limit: int,
        reserved: Reservation,
        n: int,
        constraint: Constraint | None,
    ) -> AsyncGenerator[Item]:
        """`limit` is the number of requested tokens, `n` the number of the call."""
        intent = self._intent(session, request, prompt, limit, n, constraint)
        partial = CallAccumulator()
        parser, stops = self._parsers(tokenizer, request, constraint)
        positions = _text_positions(request, parser)
        await self._store_shared_text(session, request)
        call = self._call(session, request, prompt, reserved.left, intent.id, n, constraint)
        chunks = sampled(self._engine, call, stops) if call.stop else self._engine.generate(call)
        failure_tags: tuple[str, ...] = ()
        prompt_tokens = len(prompt.prompt_ids)
        turn: Turn | None = None
        call_future = session.begin_keyed_call(request.idempotency_key)
        session.running.add(n)
        self._metrics.call_started(intent)
        try:
            await self._write_intent(session, intent, n)
            yield CallStarted(
                session.id, intent.id, prompt.prompt_ids, intent.started, sampling=intent.sampling
            )
            async for chunk in chunks:
                now, sampled_before = self._clock(), len(partial.ids)
                partial.fold(chunk, now)
                if chunk.prompt_ids is not None:
                    intent = self._expanded(session, intent, chunk.prompt_ids)
                    prompt_tokens = len(chunk.prompt_ids)
                deltas = self._deltas(chunk, partial, stops, intent.id, positions)
                reserved.spend(len(partial.ids) - sampled_before, now)
                if not partial.finish:
                    for delta in deltas:
                        yield delta
                    continue
                _check_ended(partial.finish)
                reply = self._with_ids(stops.cut(parser.reply), intent.id)
                reply_tags = (MALFORMED,) if parser.malformed else ()
                session.check_unsealed()
                turn = self._ended(intent, partial, TurnStatus.COMMITTED, reply, reply_tags)
                # From here on the commit completes, even if the client disconnects.
                scores = _scores(request, partial, positions)
                await self._commit(session, request, prompt, turn, n, scores)
                thought = await _count_reasoning(tokenizer, turn, reply)
                finished = CallFinished(turn, reply, prompt_tokens, stops.matched, thought, scores)
                for item in (*deltas, finished):
                    yield item
                return
            raise Unavailable("the engine's stream ended without a finish reason")
        except ValueError as error:
            if constraint is not None:
                names = ", ".join(request.names.get(field, field) for field in constraints.wanted(request))
                raise bad_request(f"{names}: {error}", "ask for something simpler") from error
            if partial.ids:
                raise
            raise bad_request(f"the engine refuses this prompt: {error}") from error
        except Unavailable as error:
            failure_tags = (ENGINE_FAILED,)
            session.charged -= 1
            log.error("session %s turn %s: engine failed error=%s", session.id, intent.id, error)
            raise engine_down(str(error)) from error
        finally:
            partial.finish = partial.finish if turn else FinishReason.ABORTED
            final_turn = turn or self._ended(intent, partial, TurnStatus.ABORTED, None, failure_tags)
            try:
                await (
                    chunks.aclose()
                    if turn
                    else shield_and_wait(self._abandon(session, request, final_turn, chunks, n))
                )
            finally:
                reserved.release()
                session.running.discard(n)
                session.end_keyed_call(request.idempotency_key, call_future)
                self._metrics.call_ended(final_turn, prompt_tokens)

    async def _store_shared_text(self, session: Session, request: ModelRequest) -> None:
        """Stores text that several turns of the session share, once."""
        if request.shared_text is not None and request.shared_text[0] not in session.texts:
            await self._store.put_text(session.id, *request.shared_text)
            session.texts.add(request.shared_text[0])

    async def _abandon(
        self, session: Session, request: ModelRequest, turn: Turn, chunks: AsyncGenerator[Chunk], n: int
    ) -> None:
        """Leaves the engine and records the sampled tokens as an aborted turn."""
        try:
            async with asyncio.timeout(LEAVING_S):
                await chunks.aclose()
        except TimeoutError:
            log.error("session %s turn %s: engine did not release the call", session.id, turn.id)
        if session.sealed:
            tokens = len(turn.token_ids)
            log.error(
                "session %s turn %s: sampled after the record was taken tokens=%d",
                session.id,
                turn.id,
                tokens,
            )
            return
        try:
            await self._record(session, request, turn, n)
        except Unavailable as error:
            raise engine_down(str(error)) from error

    def _expanded(self, session: Session, intent: Turn, prompt_ids: tuple[int, ...]) -> Turn:
        """Records the prompt as the engine expanded it (images)."""
        parent_ids = session.tree.ids(intent.parent) if intent.parent else ()
        if prompt_ids[: len(parent_ids)] != parent_ids:
            raise Unavailable(
                f"session {session.id}, turn {intent.id}: the engine expanded an image of an earlier turn"
                " into other tokens than before; give all engines the same model and image processor"
            )
        delta = tuple(prompt_ids[len(parent_ids) :])
        sent = intent.sent_ids or intent.delta_ids
        digests = [image.digest for message in intent.messages for image in message.images]
        images = image_spans(sent, delta, digests, self._tokenizer.image_id)
        return structs.replace(intent, delta_ids=delta, sent_ids=sent, images=images)

    def _deltas(
        self,
        chunk: Chunk,
        partial: CallAccumulator,
        stops: StopStrings,
        turn_id: str,
        positions: TextPositions | None,
    ) -> list[CallDelta]:
        """Converts a chunk into one delta, or into one per token with the text positions."""
        if positions is None:
            return [self._delta(chunk, partial, stops, turn_id)]
        deltas: list[CallDelta] = []
        last = len(chunk.token_ids) - 1
        for n, token in enumerate(chunk.token_ids):
            single = structs.replace(
                chunk,
                token_ids=(token,),
                logprobs=chunk.logprobs[n : n + 1],
                top_logprobs=chunk.top_logprobs[n : n + 1],
                prompt_logprobs=chunk.prompt_logprobs if n == 0 else None,
                finish=chunk.finish if n == last else None,
            )
            delta = self._delta(single, partial, stops, turn_id)
            deltas.append(structs.replace(delta, text_positions=positions.feed(token, delta.events)))
        if not chunk.token_ids:
            delta = self._delta(chunk, partial, stops, turn_id)
            deltas.append(structs.replace(delta, text_positions=positions.tell(delta.events)))
        return deltas

    def _delta(self, chunk: Chunk, partial: CallAccumulator, stops: StopStrings, turn_id: str) -> CallDelta:
        """Converts a chunk into a delta, and drops tokens after a stop string."""
        kept_count, events = stops.feed(chunk.token_ids)
        if chunk.finish or stops.hit:
            events += stops.finish()
        if stops.hit:
            partial.trim(len(chunk.token_ids) - kept_count)
            partial.trim(stops.beyond(partial.ids))
            partial.finish = FinishReason.STOP
        delta = CallDelta(
            chunk.token_ids[:kept_count], chunk.logprobs[:kept_count], self._named(events, turn_id)
        )
        if chunk.top_logprobs or chunk.prompt_logprobs is not None:
            top, prompt = chunk.top_logprobs[:kept_count], chunk.prompt_logprobs
            return structs.replace(delta, top_logprobs=top, prompt_logprobs=prompt)
        return delta

    async def _take_images(self, session: Session, request: ModelRequest) -> None:
        """Checks and stores the images that are new to the session."""
        new = [image for digest, image in request.images.items() if digest not in session.images]
        if new:
            new = await self._image_checker.check(new, request.image_places)
            await self._store.put_images(session.id, new)
            session.images.update(image.digest for image in new)

    def _images(self, session: Session, prompt: prompts.Prompt) -> tuple[Image, ...]:
        """Returns all images of the conversation in prompt order."""
        path = session.tree.path(prompt.parent) if prompt.parent else []
        messages = [m for turn in path for m in turn.messages] + list(prompt.new)
        digests = [image.digest for message in messages for image in message.images]
        return tuple(self._store.image(session.id, digest) for digest in digests)

    def _image_places(self, session: Session, prompt: prompts.Prompt) -> tuple[int, ...]:
        """Returns the positions of image placeholders that were not sampled."""
        ids, spans = prompt.sent_ids or prompt.prompt_ids, []
        if prompt.parent:
            spans = session.tree.sampled(prompt.parent)
        sampled = {n for start, end in spans for n in range(start, end)}
        image_id = self._tokenizer.image_id
        return tuple(n for n, token in enumerate(ids) if token == image_id and n not in sampled)

    def _call(
        self,
        session: Session,
        request: ModelRequest,
        prompt: prompts.Prompt,
        max_tokens: int,
        turn_id: str,
        n: int,
        constraint: Constraint | None = None,
    ) -> GenerateRequest:
        spec, sampling = session.row.spec, self._sampling(session, request)
        images = self._images(session, prompt) if self._info.images else ()
        return GenerateRequest(
            id=f"{session.id}/{turn_id}",
            session_id=session.id,
            prompt_ids=prompt.sent_ids or prompt.prompt_ids,
            sampling=sampling,
            max_tokens=max_tokens,
            stop_ids=self._tokenizer.stop_ids,
            # With a constraint, the engine could not continue after a stop string outside the text.
            stop=() if constraint is not None else tuple(stop for stop in request.stop if stop),
            stream=request.stream or bool(request.stop),
            base_ids=prompt.base_ids,
            images=images,
            image_places=self._image_places(session, prompt) if images else (),
            # A retried call after a gateway crash draws the same sample.
            draw=f"{spec.draw or session.id}/t{n - session.dangling}",
            top_logprobs=request.top_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            constraint=constraint,
        )

    def _intent(
        self,
        session: Session,
        request: ModelRequest,
        prompt: prompts.Prompt,
        limit: int,
        n: int,
        constraint: Constraint | None = None,
    ) -> Turn:
        sampling = self._sampling(session, request)
        return Turn(
            id=f"t{n}",
            root=prompt.root,
            parent=prompt.parent,
            delta_ids=prompt.delta_ids,
            status=TurnStatus.DANGLING,
            sampling=structs.replace(sampling, max_tokens=limit),
            tier=prompt.tier,
            dialect=request.dialect,
            messages=prompt.new,
            request_digest=prompt.request_digest,
            digest=prompt.request_digest,
            tools_digest=prompt.tools_digest,
            tags=(
                *request.tags,
                *(f"{RULE}{rule}" for rule in prompt.rules),
                *(f"{EMPTY_SCHEMA}{name}" for name in prompt.empty_tools),
                *((RETRY,) if request.retry else ()),
                *override_tags(sampling, request.requested_sampling),
            ),
            links=prompt.links,
            constraint=constraint,
            started=self._clock(),
        )

    async def _write_intent(self, session: Session, intent: Turn, n: int) -> None:
        session.check_unsealed()
        await self._write(session, TurnRow(n, LAST, intent), session.intend)

    async def _commit(
        self,
        session: Session,
        request: ModelRequest,
        prompt: prompts.Prompt,
        turn: Turn,
        n: int,
        scores: Scores | None,
    ) -> None:
        await self._record(session, request, turn, n, scores)
        if not turn.sent_ids:
            session.tree.keep(turn.id, prompt.prompt_ids)

    async def _record(
        self, session: Session, request: ModelRequest, turn: Turn, n: int, scores: Scores | None = None
    ) -> None:
        session.commits += 1
        row = TurnRow(
            n, session.commits, turn, request.idempotency_key, request.thread, scores, request.stored_options
        )
        await self._write(session, row, session.record)

    async def _write(self, session: Session, row: TurnRow, then: Callable[[TurnRow], None]) -> None:
        """Writes a row; memory and store agree even if the caller is cancelled."""
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

    # --- tool-call ids ---

    def _with_ids(self, reply: Message, turn_id: str) -> Message:
        """Assigns ids to the tool calls for which the model sampled none."""
        if not reply.tool_calls:
            return reply
        calls = enumerate(reply.tool_calls)
        calls_with_ids = (
            ToolCall(call.id or self._id(turn_id, n), call.name, call.arguments) for n, call in calls
        )
        return structs.replace(reply, tool_calls=tuple(calls_with_ids))

    def _named(self, events: Sequence[Event], turn_id: str) -> list[Event]:
        return [
            structs.replace(event, id=self._id(turn_id, event.index))
            if isinstance(event, ToolStart) and not event.id
            else event
            for event in events
        ]

    def _id(self, turn_id: str, index: int) -> str:
        return call_id(turn_id, index, self._tokenizer.profile.call_ids)


def _repeatable(
    session: Session,
    turn: Turn,
    key: str,
    requested: tuple[str | None, tuple[int, ...], int, Constraint | None],
) -> bool:
    """Returns whether a turn may answer a repeated request.

    With an idempotency key the key decides. Without one, only an undelivered answer is repeated, so that
    a new request never gets the answer of an equal one.
    """
    if turn.status is not TurnStatus.COMMITTED or session.key_of(turn.id) != key:
        return False
    same = (turn.parent, turn.sent_ids or turn.delta_ids, turn.sampling.max_tokens, turn.constraint)
    if requested != same:
        return False
    return bool(key) or turn.id in session.row.excluded or turn.id in session.maybe_undelivered


def _check_ended(finish: FinishReason) -> None:
    if finish is FinishReason.ABORTED:
        raise Unavailable("the engine aborted the call")


def _asks_scores(request: ModelRequest) -> bool:
    return request.top_logprobs > 0 or request.prompt_logprobs is not None or request.by_token


def _text_positions(request: ModelRequest, parser: ReplyParser) -> TextPositions | None:
    return TextPositions(parser.size) if request.by_token else None


def _scores(
    request: ModelRequest, partial: CallAccumulator, positions: TextPositions | None
) -> Scores | None:
    if not _asks_scores(request):
        return None
    return Scores(
        count=request.top_logprobs,
        top=tuple(partial.tops),
        prompt_count=request.prompt_logprobs,
        prompt=partial.prompt_tops,
        text_positions=None if positions is None else tuple(positions.all),
    )


async def _count_reasoning(tokenizer: ChatTokenizer, turn: Turn, reply: Message) -> int:
    """Counts the reasoning tokens of a reply."""
    if not reply.reasoning:
        return 0
    parser = tokenizer.parser(tools=())
    return await prompts.off_loop(len(reply.reasoning), parser.thought, turn.token_ids)
