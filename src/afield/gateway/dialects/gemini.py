"""Gemini generateContent and streamGenerateContent, the answering half; `gemini_request` reads requests.

Reasoning is a thought part, for clients that ask for thoughts; its signature, and that of each call, names
the turn. A stream is of
server-sent events with `alt=sse`, else one JSON array. Calls come whole. A client that asks for
`responseLogprobs` gets the ids and log-probabilities that are recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Raw

from afield.chat import ChatTokenizer, Event, ReasoningDelta, TextDelta, ToolArguments, ToolEnd, ToolStart
from afield.gateway.api_error import ApiError, bad_request
from afield.gateway.dialects import gemini_request
from afield.gateway.dialects.base import EVENTS, RawRequest, ResponseOptions, data, encode
from afield.gateway.dialects.json_arguments import as_object
from afield.gateway.dialects.logprobs import recorded
from afield.gateway.model_request import CallDelta, CallFinished, CallStarted, ModelRequest
from afield.gateway.turn_ids import item_id, seal
from afield.types import FinishReason

STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


class Gemini:
    name = "gemini"

    def __init__(self, tokens: ChatTokenizer) -> None:
        self._tokens = tokens

    def decode(self, asked: RawRequest) -> tuple[ModelRequest, ResponseOptions]:
        try:
            return gemini_request.decode(asked)
        except RecursionError as error:
            raise bad_request("the request is nested too deeply to be read") from error

    def error(self, refusal: ApiError) -> dict[str, Any]:
        return error(refusal)

    def count(self, tokens: int) -> dict[str, Any]:
        return {"totalTokens": tokens}

    def answer(self, started: CallStarted, done: CallFinished, wish: ResponseOptions) -> dict[str, Any]:
        reply = done.reply
        signature = seal(started.turn_id)
        parts = [thought(reply.reasoning, signature)] if reply.reasoning and wish.reasoning else []
        if reply.content or not reply.tool_calls:
            parts.append({"text": reply.content})
        parts += [function_call(call.id, call.name, call.arguments, signature) for call in reply.tool_calls]
        return chunk(parts, started, wish, ending(done, wish, self._tokens), done)

    def view(self, started: CallStarted, wish: ResponseOptions) -> GeminiStream:
        return GeminiStream(started, wish, self._tokens)


def error(refusal: ApiError) -> dict[str, Any]:
    text = refusal.text
    if refusal.sizes:
        prompt, limit = refusal.sizes
        text = f"The input token count ({prompt}) exceeds the maximum number of tokens allowed ({limit})."
    return {
        "error": {"code": refusal.status, "message": text, "status": STATUS.get(refusal.status, "INTERNAL")}
    }


def thought(text: str, signature: str) -> dict[str, Any]:
    return {"text": text, "thought": True, "thoughtSignature": signature}


def function_call(id: str, name: str, arguments: str, signature: str) -> dict[str, Any]:
    call = {"id": id, "name": name, "args": Raw(as_object(arguments).encode())}
    return {"functionCall": call, "thoughtSignature": signature}


def chunk(
    parts: Sequence[dict[str, Any]],
    started: CallStarted,
    wish: ResponseOptions,
    candidate: dict[str, Any] | None = None,
    done: CallFinished | None = None,
) -> dict[str, Any]:
    content = {"role": "model", "parts": parts}
    shown: dict[str, Any] = {
        "candidates": [{"content": content, "index": 0, **(candidate or {})}],
        "modelVersion": wish.model,
        "responseId": item_id("resp", started.turn_id),
        "usageMetadata": _usage(done.prompt_tokens, len(done.turn.token_ids), done.thought)
        if done
        else _usage(len(started.prompt_ids), 0, 0),
    }
    if done and wish.token_ids:
        shown |= {"prompt_token_ids": started.prompt_ids, "token_ids": done.turn.token_ids}
    return shown


def _usage(prompt: int, sampled: int, thought: int) -> dict[str, int]:
    """What was thought is not among a candidate's tokens here."""
    counted = {"candidatesTokenCount": sampled - thought} if sampled else {}
    counted |= {"thoughtsTokenCount": thought} if thought else {}
    return {"promptTokenCount": prompt, **counted, "totalTokenCount": prompt + sampled}


def ending(done: CallFinished, wish: ResponseOptions, tokens: ChatTokenizer) -> dict[str, Any]:
    stopped = done.turn.finish_reason is FinishReason.STOP or done.stop is not None
    end: dict[str, Any] = {"finishReason": "STOP" if stopped else "MAX_TOKENS"}
    if wish.logprobs:
        sampled = zip(done.turn.token_ids, done.turn.logprobs, strict=True)
        total = sum(done.turn.logprobs)
        result: dict[str, Any] = {"logProbabilitySum": total}
        result["chosenCandidates"] = [_candidate(*pair, tokens) for pair in sampled]
        if wish.top_logprobs and done.scores:
            places = zip(done.turn.token_ids, done.turn.logprobs, done.scores.top, strict=True)
            tops = [recorded(top[: wish.top_logprobs], token, p) for token, p, top in places]
            result["topCandidates"] = [
                {"candidates": [_candidate(*pair, tokens) for pair in top]} for top in tops
            ]
        end["avgLogprobs"] = total / max(1, len(done.turn.logprobs))
        end["logprobsResult"] = result
    return end


def _candidate(token: int, logprob: float, tokens: ChatTokenizer) -> dict[str, Any]:
    text = tokens.piece(token).decode(errors="replace")
    return {"token": text, "tokenId": token, "logProbability": logprob}


class GeminiStream:
    def __init__(self, started: CallStarted, wish: ResponseOptions, tokens: ChatTokenizer) -> None:
        self._started = started
        self._wish = wish
        self._tokens = tokens
        self._sse = bool(wish.echo.get("sse"))
        self.content_type = EVENTS if self._sse else b"application/json"
        self._signature = seal(started.turn_id)
        self._call = ToolStart(0, "")
        self._arguments: list[str] = []
        self._begun = False

    def opening(self) -> bytes:
        return b"" if self._sse else b"["

    def piece(self, piece: CallDelta) -> bytes:
        parts = [part for event in piece.events if (part := self._part(event))]
        return self._write(chunk(parts, self._started, self._wish)) if parts else b""

    def closing(self, done: CallFinished) -> bytes:
        # Clients take a chunk without parts for an answer gone wrong.
        end = ending(done, self._wish, self._tokens)
        last = self._write(chunk([{"text": ""}], self._started, self._wish, end, done))
        return last if self._sse else last + b"]\n"

    def failing(self, refusal: ApiError) -> bytes:
        return self._write(error(refusal)) if self._sse else self._write(error(refusal)) + b"]\n"

    def keepalive(self) -> bytes:
        """A blank line: Google's client takes a comment for data."""
        return b"\n"

    def _write(self, value: object) -> bytes:
        if self._sse:
            return data(value)
        between = b",\n" if self._begun else b""
        self._begun = True
        return between + encode(value)

    def _part(self, event: Event) -> dict[str, Any] | None:
        if isinstance(event, TextDelta):
            return {"text": event.text}
        if isinstance(event, ReasoningDelta):
            return thought(event.text, self._signature) if self._wish.reasoning else None
        if isinstance(event, ToolStart):
            self._call, self._arguments = event, []
        elif isinstance(event, ToolArguments):
            self._arguments.append(event.text)
        elif isinstance(event, ToolEnd):
            return function_call(self._call.id, self._call.name, "".join(self._arguments), self._signature)
        return None
