"""OpenAI Responses dialect: output items, stream events, input items.

Item ids name the turn (`rs_t3`, `msg_t3_0`, `fc_t3_0`), so that echoed items identify it. Tool calls
are emitted when complete. Reasoning text is included if the client requests a summary or its content.
`responses_request` decodes requests.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import Raw

from afield.chat import ChatTokenizer, Event, ReasoningDelta, TextDelta, ToolArguments, ToolEnd, ToolStart
from afield.gateway.api_error import ApiError
from afield.gateway.dialects import responses_request
from afield.gateway.dialects.base import EVENTS, RawRequest, ResponseOptions, event
from afield.gateway.dialects.chat import error_body
from afield.gateway.dialects.logprobs import TokenText
from afield.gateway.dialects.responses_request import EchoedOptions, free_text, summary_of
from afield.gateway.model_request import CallDelta, CallFinished, CallStarted, ModelRequest
from afield.gateway.turn_ids import item_id, response_id, seal, seal_summary
from afield.interfaces import Image
from afield.interfaces.engine import TopLogprobs
from afield.types import FinishReason, Message, ToolCall, Turn

Json = dict[str, Any]
# Error codes of OpenAI; other errors have codes of the gateway.
CODES = {429: "rate_limit_exceeded", 500: "server_error", 502: "server_error", 503: "server_error"}


class Items:
    """Builds the output items and the response object of one turn."""

    def __init__(self, started: CallStarted, options: ResponseOptions, texts: TokenText) -> None:
        self._started = started
        self._options = options
        self._texts = texts
        self.echoed: EchoedOptions = options.echo["echoed"]
        self._made: dict[str, int] = {}

    def message(self) -> Json:
        item = {"id": self._id("msg", self._count("msg")), "type": "message", "status": "in_progress"}
        return item | {"role": "assistant", "content": []}

    def reasoning(self) -> Json:
        item: Json = {"id": self._id("rs", self._count("rs") or None), "type": "reasoning"}
        item |= {"summary": [], "status": "in_progress"}
        if self.echoed.sealed:
            item["encrypted_content"] = seal(self._started.turn_id)
        return item

    def call(self, call: ToolCall) -> Json:
        """Builds a call item. Arguments of a custom tool that are not one `input` are passed raw."""
        named = self.echoed.toolbox.to_client(call.name)
        index = self._count("call")
        if named.custom:
            text = free_text(call.arguments)
            item = {"id": self._id("ctr" if text is None else "ctc", index), "type": "custom_tool_call"}
            item["input"] = call.arguments if text is None else text
        else:
            item = {"id": self._id("fc", index), "type": "function_call", "arguments": call.arguments}
        item |= {"status": "completed", "call_id": call.id, "name": named.name}
        return item | ({"namespace": named.namespace} if named.namespace else {})

    def logprobs(
        self,
        places: Sequence[int],
        ids: Sequence[int],
        logprobs: Sequence[float],
        tops: Sequence[TopLogprobs],
    ) -> list[Raw]:
        """Encodes the log-probabilities of tokens at positions, if requested."""
        if not self._options.logprobs:
            return []
        chosen = [tops[n] for n in places] if tops else ()
        sampled = ([ids[n] for n in places], [logprobs[n] for n in places])
        return self._texts.entries(*sampled, chosen, self._options.top_logprobs)

    def fill(self, item: Json, text: str, status: str = "completed", logprobs: Sequence[Raw] = ()) -> Json:
        """Returns the item with its text."""
        if item["type"] == "message":
            return item | {"content": [text_part(text, logprobs)], "status": status}
        if self.echoed.summary:
            return item | {"summary": [{"type": "summary_text", "text": text}], "status": status}
        if not self.echoed.content:
            return item | {"status": status}
        return item | {"content": [{"type": "reasoning_text", "text": text}], "status": status}

    def of_reply(self, reply: Message, status: str, logprobs: Sequence[Raw] = ()) -> list[Json]:
        output = [self.fill(self.reasoning(), reply.reasoning)] if reply.reasoning else []
        if reply.content or not (output or reply.tool_calls):
            output.append(self.fill(self.message(), reply.content, status, logprobs))
        return output + [self.call(call) for call in reply.tool_calls]

    def response(self, status: str, output: list[Json], **rest: Any) -> Json:
        sampling = self._started.sampling
        response: Json = {
            "id": response_id(self._started.session_id, self._started.turn_id),
            "object": "response",
            "created_at": int(self._started.created),
            "completed_at": None,
            "status": status,
            "background": False,
            "conversation": None,
            "error": None,
            "frequency_penalty": 0.0,
            "incomplete_details": None,
            "model": self._options.model,
            "moderation": None,
            "output": output,
            "presence_penalty": 0.0,
            "prompt": None,
            "prompt_cache_options": None,
            "service_tier": "default",
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        return response | self.echoed.fields | rest

    def ended(self, finished: CallFinished, output: list[Json]) -> Json:
        rest: Json = {"usage": usage(finished)}
        if finished.turn.ended is not None and not cut(finished):
            rest["completed_at"] = int(finished.turn.ended)
        if self._options.token_ids:
            rest |= {"prompt_token_ids": self._started.prompt_ids, "token_ids": finished.turn.token_ids}
        if cut(finished):
            rest["incomplete_details"] = {"reason": "max_output_tokens"}
        return self.response("incomplete" if cut(finished) else "completed", output, **rest)

    def _id(self, kind: str, index: int | None = None) -> str:
        return item_id(kind, self._started.turn_id, index)

    def _count(self, kind: str) -> int:
        self._made[kind] = self._made.get(kind, -1) + 1
        return self._made[kind]


def text_part(text: str, logprobs: Sequence[Raw] = ()) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def cut(finished: CallFinished) -> bool:
    return finished.turn.finish_reason is FinishReason.LENGTH


def usage(finished: CallFinished) -> Json:
    sampled = len(finished.turn.token_ids)
    return {
        "input_tokens": finished.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": finished.reasoning_tokens},
        "total_tokens": finished.prompt_tokens + sampled,
    }


def output_of(items: Items, finished: CallFinished) -> list[Json]:
    """Returns the items of a reply."""
    status = "incomplete" if cut(finished) and not finished.reply.tool_calls else "completed"
    return items.of_reply(finished.reply, status, spoken(items, finished))


def spoken(items: Items, finished: CallFinished) -> list[Raw]:
    """Returns the log-probabilities of the reply's text."""
    scores = finished.scores
    if scores is None or scores.text_positions is None:
        return []
    return items.logprobs(scores.text_positions, finished.turn.token_ids, finished.turn.logprobs, scores.top)


class ResponsesStream:
    """Encodes events. Text after a call is a separate item."""

    content_type = EVENTS

    def __init__(self, started: CallStarted, options: ResponseOptions, texts: TokenText) -> None:
        self._items = Items(started, options, texts)
        self._logprobs = options.logprobs
        self._ids: list[int] = []
        self._values: list[float] = []
        self._tops: list[TopLogprobs] = []
        self._told: list[Raw] = []  # log-probabilities for the next text
        self._shown: list[Raw] = []  # log-probabilities of the open item
        self._opened = False
        self._sequence = 0
        self._output: list[Json] = []
        self._open: Json | None = None
        self._text: list[str] = []
        self._calls: dict[int, tuple[ToolStart, list[str]]] = {}

    def begin(self) -> bytes:
        """Encodes the first events; empty if a keepalive has started the stream."""
        if self._opened:
            return b""
        self._opened = True
        response = self._items.response("in_progress", [])
        return self._send("response.created", response=response) + self._progress()

    def delta(self, delta: CallDelta) -> bytes:
        if self._logprobs:
            self._ids += delta.token_ids
            self._values += delta.logprobs
            self._tops += delta.top_logprobs
            self._told = self._items.logprobs(delta.text_positions, self._ids, self._values, self._tops)
        return b"".join([self._event(event) for event in delta.events])

    def end(self, finished: CallFinished) -> bytes:
        out = b""
        if self._open is None and not self._output:
            out = self._start("message")
        out += self._finish("incomplete" if cut(finished) else "completed")
        response = self._items.ended(finished, self._output)
        return out + self._send(f"response.{response['status']}", response=response)

    def error(self, error: ApiError) -> bytes:
        out = self.begin()
        fault = {"code": CODES.get(error.status, error.code), "message": error.text}
        response = self._items.response("failed", self._output, error=fault)
        return out + self._send("response.failed", response=response)

    def keepalive(self) -> bytes:
        # An event, not a comment: clients reset their idle timeout on events.
        return self._progress() if self._opened else self.begin()

    def _progress(self) -> bytes:
        return self._send("response.in_progress", response=self._items.response("in_progress", []))

    def _send(self, kind: str, **fields: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return event(kind, {"type": kind, "sequence_number": number, **fields})

    def _event(self, event: Event) -> bytes:
        if isinstance(event, TextDelta):
            return self._say("message", event.text)
        if isinstance(event, ReasoningDelta):
            return self._say("reasoning", event.text)
        if isinstance(event, ToolStart):
            self._calls[event.index] = (event, [])
        elif isinstance(event, ToolArguments):
            self._calls[event.index][1].append(event.text)
        elif isinstance(event, ToolEnd):
            start, arguments = self._calls.pop(event.index)
            return self._finish() + self._call(ToolCall(start.id, start.name, "".join(arguments)))
        return b""

    def _say(self, kind: str, text: str) -> bytes:
        out = b""
        if self._open is None or self._open["type"] != kind:
            out = self._finish() + self._start(kind)
        self._text.append(text)
        if self._hidden:
            return out
        if kind == "message":
            logprobs, self._told = self._told, []
            self._shown += logprobs
            return out + self._send("response.output_text.delta", **self._at(), delta=text, logprobs=logprobs)
        name = "reasoning_summary_text" if self._items.echoed.summary else "reasoning_text"
        return out + self._send(f"response.{name}.delta", **self._at(), delta=text)

    def _at(self) -> Json:
        """Position of the open text."""
        assert self._open is not None
        index = "summary_index" if self._summarises else "content_index"
        return {"item_id": self._open["id"], "output_index": len(self._output), index: 0}

    @property
    def _summarises(self) -> bool:
        return bool(self._open and self._open["type"] == "reasoning" and self._items.echoed.summary)

    @property
    def _hidden(self) -> bool:
        """Whether the open item is reasoning that the client did not request."""
        options = self._items.echoed
        return bool(
            self._open and self._open["type"] == "reasoning" and not (options.summary or options.content)
        )

    def _part(self, text: str) -> tuple[str, Json]:
        assert self._open is not None
        if self._open["type"] == "message":
            return "content_part", text_part(text, self._shown)
        if self._summarises:
            return "reasoning_summary_part", {"type": "summary_text", "text": text}
        return "content_part", {"type": "reasoning_text", "text": text}

    def _start(self, kind: str) -> bytes:
        self._open = self._items.message() if kind == "message" else self._items.reasoning()
        self._text, self._shown = [], []
        name, part = self._part("")
        out = self._send("response.output_item.added", output_index=len(self._output), item=self._open)
        if self._hidden:
            return out
        return out + self._send(f"response.{name}.added", **self._at(), part=part)

    def _finish(self, status: str = "completed") -> bytes:
        """Closes the open item."""
        if self._open is None:
            return b""
        text = "".join(self._text)
        if self._hidden:
            item, self._open = self._items.fill(self._open, text, status), None
            return self._done(item)
        if self._open["type"] == "message":
            out = self._send("response.output_text.done", **self._at(), text=text, logprobs=self._shown)
        else:
            name = "reasoning_summary_text" if self._summarises else "reasoning_text"
            out = self._send(f"response.{name}.done", **self._at(), text=text)
        name, part = self._part(text)
        out += self._send(f"response.{name}.done", **self._at(), part=part)
        item, self._open = self._items.fill(self._open, text, status, self._shown), None
        return out + self._done(item)

    def _call(self, call: ToolCall) -> bytes:
        item = self._items.call(call)
        custom = item["type"] == "custom_tool_call"
        field = "input" if custom else "arguments"
        name = "custom_tool_call_input" if custom else "function_call_arguments"
        position = {"item_id": item["id"], "output_index": len(self._output)}
        started = item | {field: "", "status": "in_progress"}
        out = self._send("response.output_item.added", output_index=len(self._output), item=started)
        if item[field]:
            out += self._send(f"response.{name}.delta", **position, delta=item[field])
        fields = {field: item[field]} | ({} if custom else {"name": item["name"]})
        return out + self._send(f"response.{name}.done", **position, **fields) + self._done(item)

    def _done(self, item: Json) -> bytes:
        out = self._send("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return out


def image_url(image: Image) -> str | None:
    if image.data is None:
        return image.url
    return f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"


class InputItems:
    """Converts stored messages to input items. `items` returns a turn's builder, `image` an image URL."""

    def __init__(self, items: Callable[[Turn], Items], image: Callable[[str], str | None]) -> None:
        self._items = items
        self._image = image
        self._custom: set[str] = set()  # calls of custom tools
        self._sent = 0

    def of(self, path: Iterable[Turn], instructions: str | None) -> list[Json]:
        """Returns the input of the last turn of a path."""
        turns = list(path)
        items: list[Json] = []
        for turn in turns:
            sampled = turn is not turns[-1]
            messages = turn.messages[:-1]
            if turn is turns[0] and instructions and messages[:1] and messages[0].role == "system":
                messages = messages[1:]
            for message in messages:
                items += self.message(message, turn)
            if sampled:
                items += self._reply(turn.messages[-1], self._items(turn))
        return items

    def message(self, message: Message, turn: Turn) -> list[Json]:
        """Converts a message of the client."""
        if (summary := summary_of(message)) is not None:
            sealed = seal_summary(turn.id, summary)
            return [{"type": "compaction", "id": self._id("cmp", turn), "encrypted_content": sealed}]
        if message.role == "assistant":
            return self._echoed(message, turn)
        if message.role == "tool":
            kind = "custom_tool_call" if message.tool_call_id in self._custom else "function_call"
            output = message.content if not message.images else self._content(message)
            item = {"type": f"{kind}_output", "id": self._id("fco", turn), "call_id": message.tool_call_id}
            return [item | {"output": output, "status": "completed"}]
        item = {"type": "message", "id": self._id("msg", turn), "role": message.role}
        return [item | {"content": self._content(message), "status": "completed"}]

    def _id(self, kind: str, turn: Turn) -> str:
        self._sent += 1
        return f"{kind}_in_{turn.id}_{self._sent}"

    def _content(self, message: Message) -> list[Json]:
        parts: list[Json] = []
        start = 0
        for image in message.images:
            parts += (
                [{"type": "input_text", "text": message.content[start : image.offset]}]
                if image.offset > start
                else []
            )
            start = image.offset
            url = self._image(image.digest)
            parts.append({"type": "input_image", "image_url": url, "detail": "auto", "file_id": None})
        rest = message.content[start:]
        return [*parts, {"type": "input_text", "text": rest}] if rest or not parts else parts

    def _echoed(self, message: Message, turn: Turn) -> list[Json]:
        """Converts an assistant message that was not sampled here."""
        items = self._reply(message, self._items(turn))
        for item in items:
            item["id"] = self._id(item["id"].partition("_")[0], turn)
            item.pop("encrypted_content", None)
        return items

    def _reply(self, reply: Message, items: Items) -> list[Json]:
        reply_items = items.of_reply(reply, "completed")
        self._custom |= {item["call_id"] for item in reply_items if item["type"] == "custom_tool_call"}
        return reply_items


class Responses:
    """OpenAI Responses dialect."""

    name = "responses"

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    def decode(self, raw: RawRequest) -> tuple[ModelRequest, ResponseOptions]:
        return responses_request.decode(raw)

    def encode_error(self, error: ApiError) -> dict[str, Any]:
        return error_body(error)

    def count(self, tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def response(
        self, started: CallStarted, finished: CallFinished, options: ResponseOptions
    ) -> dict[str, Any]:
        items = Items(started, options, TokenText(self._tokenizer, options))
        return items.ended(finished, output_of(items, finished))

    def stream(self, started: CallStarted, options: ResponseOptions) -> ResponsesStream:
        return ResponsesStream(started, options, TokenText(self._tokenizer, options))
