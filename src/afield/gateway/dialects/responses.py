"""OpenAI Responses: decoding is `responses_request`'s, showing `responses_view`'s.

Sampling parameters belong to the trainer and are ignored; `max_output_tokens` may only lower what the
session allows. Nothing is kept for later: a `previous_response_id` names a turn of the session.
"""

from __future__ import annotations

from typing import Any

from afield.chat import ChatTokenizer
from afield.gateway.api_error import ApiError
from afield.gateway.dialects import responses_request
from afield.gateway.dialects.base import RawRequest, ResponseOptions
from afield.gateway.dialects.chat import error
from afield.gateway.dialects.logprobs import TokenText
from afield.gateway.dialects.responses_stream import Items, ResponsesStream, output_of
from afield.gateway.model_request import CallFinished, CallStarted, ModelRequest


class Responses:
    name = "responses"

    def __init__(self, tokens: ChatTokenizer) -> None:
        self._tokens = tokens

    def decode(self, asked: RawRequest) -> tuple[ModelRequest, ResponseOptions]:
        return responses_request.decode(asked)

    def error(self, refusal: ApiError) -> dict[str, Any]:
        return error(refusal)

    def count(self, tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def answer(self, started: CallStarted, done: CallFinished, wish: ResponseOptions) -> dict[str, Any]:
        items = Items(started, wish, TokenText(self._tokens, wish))
        return items.ended(done, output_of(items, done))

    def view(self, started: CallStarted, wish: ResponseOptions) -> ResponsesStream:
        return ResponsesStream(started, wish, TokenText(self._tokens, wish))
