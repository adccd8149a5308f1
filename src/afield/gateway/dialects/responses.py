"""OpenAI Responses: decoding is `responses_request`'s, showing `responses_view`'s.

Sampling parameters belong to the trainer and are ignored; `max_output_tokens` may only lower what the
session allows. Nothing is kept for later: a `previous_response_id` names a turn of the session.
"""

from __future__ import annotations

from typing import Any

from afield.chat import ChatTokens
from afield.gateway.api_error import Refusal
from afield.gateway.dialects import responses_request
from afield.gateway.dialects.base import Asked, Wish
from afield.gateway.dialects.chat import error
from afield.gateway.dialects.logprobs import TokenText
from afield.gateway.dialects.responses_stream import Items, ResponsesView, output_of
from afield.gateway.model_request import Done, ModelRequest, Started


class Responses:
    name = "responses"

    def __init__(self, tokens: ChatTokens) -> None:
        self._tokens = tokens

    def decode(self, asked: Asked) -> tuple[ModelRequest, Wish]:
        return responses_request.decode(asked)

    def error(self, refusal: Refusal) -> dict[str, Any]:
        return error(refusal)

    def count(self, tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def answer(self, started: Started, done: Done, wish: Wish) -> dict[str, Any]:
        items = Items(started, wish, TokenText(self._tokens, wish))
        return items.ended(done, output_of(items, done))

    def view(self, started: Started, wish: Wish) -> ResponsesView:
        return ResponsesView(started, wish, TokenText(self._tokens, wish))
