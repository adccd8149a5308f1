"""Stored responses and compaction of OpenAI Responses.

A response is its turn plus options stored with it, so that it can be fetched while its session exists.
Deleting hides it; the turn stays in the record and is trained. Responses with `store: false` cannot be
fetched. Compaction samples a summary as a turn with the tag `compaction`, and returns the user messages
and the summary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from msgspec import structs

from afield.chat import ChatTokenizer, Tool
from afield.gateway.api_error import ApiError, bad_request, not_found
from afield.gateway.dialects.base import RawRequest, ResponseOptions
from afield.gateway.dialects.logprobs import TokenText
from afield.gateway.dialects.responses import InputItems, Items, Responses, image_url, output_of, usage
from afield.gateway.dialects.responses_request import (
    ASK,
    COMPACTION,
    LOGPROBS,
    STORED_OPTIONS,
    EchoedOptions,
    restore_options,
    summary_of,
)
from afield.gateway.http import Scope
from afield.gateway.model_request import CallFinished, CallStarted, ModelRequest
from afield.gateway.prompts import off_loop
from afield.gateway.sessions import Session, SessionManager
from afield.gateway.store import GatewayStore, TurnRow
from afield.gateway.turn_ids import item_id, response_id, seal_summary, turn_of_response
from afield.types import Message, Turn, TurnStatus

UNUSED = ("unenforced:text.format", "unenforced:tool_choice")
"""Tags of parameters that apply to the later reply, not to the summary."""


class Compaction(Responses):
    """Compaction of one session's conversation. `path` returns the turns up to a turn, `tools` its tools,
    `image` an image URL.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        path: Callable[[str], list[Turn]],
        tools: Callable[[str], tuple[Tool, ...]],
        image: Callable[[str], str | None],
    ) -> None:
        super().__init__(tokenizer)
        self._path = path
        self._tools = tools
        self._image = image

    def decode(self, raw: RawRequest) -> tuple[ModelRequest, ResponseOptions]:
        request, options = super().decode(raw)
        if not request.model:
            raise bad_request("a compaction needs a model", "name it in model")
        if request.stream:
            raise bad_request("stream is not served for a compaction", "send the request without stream")
        # Compaction requests of the SDKs have no tools: those of the conversation apply.
        last = request.after or max(request.hints, key=lambda turn: int(turn[1:]), default=None)
        request = structs.replace(
            request,
            tools=request.tools or (self._tools(last) if last else ()),
            messages=(*request.messages, Message(role="user", content=ASK)),
            may_call=False,
            must_call=False,
            callable_tools=(),
            output=None,
            tags=(*(tag for tag in request.tags if tag not in UNUSED), COMPACTION),
            stored_options=b"",
            shared_text=None,
        )
        return request, options

    def response(
        self, started: CallStarted, finished: CallFinished, options: ResponseOptions
    ) -> dict[str, Any]:
        if not finished.reply.content:
            raise ApiError(
                502, "no_summary", "the model wrote no summary", "try again, or leave it more room"
            )

        def items(_: Turn) -> Items:
            return Items(started, options, TokenText(self._tokenizer, options))

        input_items = InputItems(items, self._image)
        path = self._path(finished.turn.id)
        sent = [(message, turn) for turn in path for message in turn.messages]
        kept = [
            item
            for message, turn in sent
            if message.role == "user" and message.content != ASK and summary_of(message) is None
            for item in input_items.message(message, turn)
        ]
        sealed = seal_summary(finished.turn.id, finished.reply.content)
        summary = {"type": "compaction", "id": item_id("cmp", finished.turn.id), "encrypted_content": sealed}
        return {
            "id": response_id(started.session_id, started.turn_id),
            "object": "response.compaction",
            "created_at": int(started.created),
            "output": [*kept, summary],
            "usage": usage(finished),
        }


Json = dict[str, Any]
_ROUTE = re.compile(r"/v1/responses/(?P<id>[^/]+)(?P<rest>/input_items|/cancel)?")
ROUTES = (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel"))
SEALED, IMAGES = "reasoning.encrypted_content", "message.input_image.image_url"
MAX_ITEMS, DEFAULT_ITEMS = 100, 20
"""Maximum and default number of items per page."""


def match(method: str, path: str) -> Mapping[str, str | None] | None:
    match = _ROUTE.fullmatch(path)
    return match.groupdict() if match and (method, match["rest"] or "") in ROUTES else None


class StoredResponses:
    """Serves stored responses: retrieve, delete, cancel, input items."""

    def __init__(self, store: GatewayStore, sessions: SessionManager, tokenizer: ChatTokenizer) -> None:
        self._store = store
        self._sessions = sessions
        self._tokenizer = tokenizer

    def compaction(self, session: Session) -> Compaction:
        return Compaction(
            self._tokenizer,
            session.tree.path,
            lambda turn_id: self._tools(session, turn_id),
            lambda digest: self._image(session, digest),
        )

    def _tools(self, session: Session, turn_id: str) -> tuple[Tool, ...]:
        """Returns the tools of a stored response."""
        row = session.rows.get(int(turn_id[1:]))
        return self._options(session, row, [])[0].toolbox.tools if row and row.stored_options else ()

    async def serve(self, session: Session, scope: Scope, parts: Mapping[str, str | None]) -> Json:
        params = parse_qsl(scope.get("query_string", b"").decode("latin-1"))
        row = self._row(session, parts["id"] or "")
        if parts["rest"] == "/cancel":
            raise bad_request(
                "only responses with background=true can be cancelled, and none is served",
                "close the connection of a request to end it",
            )
        if scope["method"] == "DELETE":
            await self._sessions.delete_response(session, row.turn.id)
            return {"id": parts["id"], "object": "response", "deleted": True}
        include = [value for name, value in params if name in ("include", "include[]")]
        if parts["rest"]:
            return self._input_items(session, row, dict(params), include)
        if dict(params).get("stream") == "true":
            raise bad_request("a stored response cannot be streamed", "fetch it without stream")
        return await self._response(session, row, include)

    def _row(self, session: Session, response_id: str) -> TurnRow:
        turn_id = turn_of_response(response_id, session.id)
        row = session.rows.get(int(turn_id[1:])) if turn_id else None
        there = row is not None and row.turn.status is TurnStatus.COMMITTED and row.stored_options
        if row is None or not there or row.turn.id in session.row.deleted_responses:
            raise not_found(
                f"response {response_id[:80]!r} is not stored in this session",
                "it was deleted, asked for with store false, or belongs to another session",
            )
        return row

    def _options(
        self, session: Session, row: TurnRow, include: list[str]
    ) -> tuple[EchoedOptions, ResponseOptions]:
        stored = STORED_OPTIONS.decode(row.stored_options)
        echoed = restore_options(stored, self._store.text(session.id, stored.shared))
        if SEALED in include:
            echoed = structs.replace(echoed, sealed=True)
        logprobs, count = LOGPROBS in include, int(echoed.fields.get("top_logprobs") or 0)
        return echoed, ResponseOptions(
            model=stored.model, logprobs=logprobs, top_logprobs=count, echo={"echoed": echoed}
        )

    async def _response(self, session: Session, row: TurnRow, include: list[str]) -> Json:
        _, options = self._options(session, row, include)
        turn, reply = row.turn, row.turn.messages[-1]
        thought = 0
        if reply.reasoning:
            parser = self._tokenizer.parser(tools=())
            thought = await off_loop(len(reply.reasoning), parser.thought, turn.token_ids)
        prompt = session.tree.length(turn.id) - len(turn.token_ids)
        finished = CallFinished(turn, reply, prompt, reasoning_tokens=thought, scores=row.scores)
        items = self._items(session, turn, options)
        return items.ended(finished, output_of(items, finished))

    def _items(self, session: Session, turn: Turn, options: ResponseOptions) -> Items:
        started = CallStarted(session.id, turn.id, (), turn.started, sampling=turn.sampling)
        return Items(started, options, TokenText(self._tokenizer, options))

    def _image(self, session: Session, digest: str) -> str | None:
        return image_url(self._store.image(session.id, digest))

    def _input_items(
        self, session: Session, row: TurnRow, params: Mapping[str, str], include: list[str]
    ) -> Json:
        echoed, options = self._options(session, row, include)
        images = (lambda digest: self._image(session, digest)) if IMAGES in include else (lambda _: None)
        input_items = InputItems(lambda turn: self._items(session, turn, options), images)
        items = input_items.of(session.tree.path(row.turn.id), echoed.fields["instructions"])
        return _page(items, params)


def _page(items: list[Json], params: Mapping[str, str]) -> Json:
    order, limit = params.get("order", "desc"), params.get("limit", str(DEFAULT_ITEMS))
    if order not in ("asc", "desc"):
        raise bad_request(f"order={order!r} is unknown", "choose one of: asc, desc")
    if not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= MAX_ITEMS:
        raise bad_request(f"limit={limit[:20]!r} must be between 1 and {MAX_ITEMS}")
    if order == "desc":
        items = items[::-1]
    if (after := params.get("after")) is not None:
        places = [n for n, item in enumerate(items) if item["id"] == after]
        if not places:
            raise bad_request(f"after={after!r} is not an item of this list")
        items = items[places[0] + 1 :]
    page = items[: int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": "", "last_id": ""}
    return {"object": "list", "data": page, **ends, "has_more": len(page) < len(items)}
