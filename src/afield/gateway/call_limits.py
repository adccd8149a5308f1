"""Where a call stands in its session, and how much it may sample there.

The conversation a client left to us is put in front of what it sent. What is much to render is rendered
off the event loop; what cannot fit the context is refused before it is tokenised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import msgspec
from msgspec import structs

from afield.chat import ChatTokenizer
from afield.gateway import prompts
from afield.gateway.api_error import ApiError, bad_request, context_exceeded
from afield.gateway.model_request import ModelRequest
from afield.gateway.session import Session
from afield.types import Message, TurnStatus

INLINE_CHARACTERS = 8_000  # more new text than this is rendered off the event loop
P = ParamSpec("P")
R = TypeVar("R")


async def build_limited_prompt(
    session: Session, tokens: ChatTokenizer, request: ModelRequest, most: int
) -> prompts.Prompt:
    """`most` is how long a conversation the engine takes."""
    forest = session.forest
    try:
        if request.prompt is not None:
            raw = prompts.find_raw_parent(forest, tokens, request.prompt)
            if isinstance(raw.rest, str):
                _check_size(_context(session, most), tokens, len(raw.rest))
            text, delta = await off_loop(len(raw.rest), prompts.render_raw, tokens, raw)
            return prompts.build_raw_prompt(forest, raw, text, delta)
        if request.after is not None:
            request = _with_history(session, request)
        missed = frozenset(session.undelivered)
        again = missed | session.unsure | session.keyed(request.idempotency_key)
        clues = prompts.Clues(recall=session.recall, missed=missed, again=again, thread_of=session.thread_of)
        spot = prompts.find_parent(forest, tokens, request, clues)
        size = sum(map(_size, spot.new if spot.parent else spot.messages))
        if not spot.parent:
            size += sum(len(msgspec.json.encode(tool.raw)) for tool in request.tools)
        _check_size(_context(session, most), tokens, size)
        rendered = await off_loop(size, prompts.render, tokens, spot, request.tools)
        return prompts.build_prompt(forest, spot, rendered, request)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the chat template refuses these messages: {error}") from error


def limit(session: Session, request: ModelRequest, place: prompts.Prompt, most: int) -> int:
    """How many tokens the call may sample: what context, session and client allow."""
    spec = session.row.spec
    context = _context(session, most)
    room = context - len(place.prompt_ids)
    if room < 1:
        raise context_exceeded(len(place.prompt_ids), context)
    bounds = (room, request.max_tokens, spec.sampling.max_tokens)
    return min(bound for bound in bounds if bound is not None)


async def off_loop(size: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What takes long because of its size does not hold up the other calls."""
    return (
        await asyncio.to_thread(work, *args, **kwargs) if size > INLINE_CHARACTERS else work(*args, **kwargs)
    )


def _with_history(session: Session, request: ModelRequest) -> ModelRequest:
    """The conversation a client left to us to remember."""
    after = request.after
    turn = session.forest[after] if after is not None and after in session.forest else None
    if turn is None or turn.status is not TurnStatus.COMMITTED or after in session.row.deleted_responses:
        name = f"previous response of turn {after!r}"
        raise ApiError(400, "previous_response_not_found", f"{name} is not of this session")
    history = [m for step in session.forest.path(turn.id) for m in step.messages]
    new = request.messages
    if new and new[0].role == "system":  # instructions are not inherited
        history = [m for m in history[:1] if m.role != "system"] + history[1:]
        return structs.replace(request, messages=(new[0], *history, *new[1:]), hints=request.hints | {after})
    return structs.replace(request, messages=(*history, *new), hints=request.hints | {turn.id})


def _context(session: Session, most: int) -> int:
    return min(most, session.row.spec.budget.context or most)


def _check_size(context: int, tokens: ChatTokenizer, characters: int) -> None:
    """A text that cannot fit is not tokenised to find that out."""
    at_least = characters // tokens.longest_token
    if at_least > context:
        raise context_exceeded(at_least, context)


def _size(message: Message) -> int:
    return len(message.content) + len(message.reasoning) + sum(len(c.arguments) for c in message.tool_calls)
