"""OpenAI Responses' compaction: a conversation in, its user messages and a summary out.

The summary is sampled like any other turn, after the conversation itself and a request for it, and the turn
has the tag `compaction`. Its text is in the compaction item, so the item is readable in any session.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import structs

from afield.chat import ChatTokenizer, Tool
from afield.gateway.api_error import ApiError, bad_request
from afield.gateway.dialects.base import RawRequest, ResponseOptions
from afield.gateway.dialects.logprobs import TokenText
from afield.gateway.dialects.responses import Responses
from afield.gateway.dialects.responses_items import InputItems
from afield.gateway.dialects.responses_stream import Items, usage
from afield.gateway.dialects.summaries import ASK, COMPACTION, summary_of
from afield.gateway.model_request import CallFinished, CallStarted, ModelRequest
from afield.gateway.turn_ids import item_id, response_id, seal_summary
from afield.types import Message, Turn

UNUSED = ("unenforced:text.format", "unenforced:tool_choice")  # of the reply that is asked for later


class Compaction(Responses):
    """For one session: `path` is the turns that lead to one of its turns, `tools` those that a turn was asked
    with, `image` the URL of an image."""

    def __init__(
        self,
        tokens: ChatTokenizer,
        path: Callable[[str], list[Turn]],
        tools: Callable[[str], tuple[Tool, ...]],
        image: Callable[[str], str | None],
    ) -> None:
        super().__init__(tokens)
        self._path = path
        self._tools = tools
        self._image = image

    def decode(self, asked: RawRequest) -> tuple[ModelRequest, ResponseOptions]:
        request, wish = super().decode(asked)
        if not request.model:
            raise bad_request("a compaction needs a model", "name it in model")
        if request.stream:
            raise bad_request("stream is not served for a compaction", "ask without stream")
        # The SDKs' requests for a compaction have no tools: those of the conversation are meant.
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
            shown=b"",
            shared=None,
        )
        return request, wish

    def answer(self, started: CallStarted, done: CallFinished, wish: ResponseOptions) -> dict[str, Any]:
        if not done.reply.content:
            raise ApiError(
                502, "no_summary", "the model wrote no summary", "try again, or leave it more room"
            )

        def items(_: Turn) -> Items:
            return Items(started, wish, TokenText(self._tokens, wish))

        made = InputItems(items, self._image)
        path = self._path(done.turn.id)
        sent = [(message, turn) for turn in path for message in turn.messages]
        kept = [
            item
            for message, turn in sent
            if message.role == "user" and message.content != ASK and summary_of(message) is None
            for item in made.message(message, turn)
        ]
        sealed = seal_summary(done.turn.id, done.reply.content)
        summary = {"type": "compaction", "id": item_id("cmp", done.turn.id), "encrypted_content": sealed}
        return {
            "id": response_id(started.session_id, started.turn_id),
            "object": "response.compaction",
            "created_at": int(started.created),
            "output": [*kept, summary],
            "usage": usage(done),
        }
