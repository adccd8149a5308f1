"""Prompt oracle: renders raw requests and compares them with engine prompts.

The oracle shares no code with the gateway: `decoders` reads the requests, plain Jinja renders them with the
model's template, and prompts are compared block by block (a block begins at the token `<|im_start|>`):

1. System, user and tool blocks and the generation prompt have equal text; control tokens differ from text
   that looks like them.
2. An assistant block is either the ids that an earlier call sampled after the same ids, if the client sent
   that reply back, or the client's message as the template renders it. The block may contain parts of a
   reply (reasoning) that the client did not send back.
3. The prompt of a continued conversation begins with the ids of the earlier call.
4. Engine calls and requests match one to one, except for requests that the proxy refused or that repeat one
   whose response was interrupted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Struct

from afield.conformance.decoders import ClientCall, ClientMessage, ClientRequest, UnknownShape, decode
from afield.conformance.judge import ServedCall
from afield.conformance.model import TemplateFamily
from afield.conformance.proxy import CapturedRequest
from afield.conformance.scenario import ModelReply, NetworkFault

HEADER = "<|im_start|>"
MARK = "\ue001"  # inserted before every control token
QUOTE = "\ue000"  # breaks a literal in content, so that it does not match as a control token
NO_THOUGHT = re.compile(rf"{MARK}<think>\n\n{MARK}</think>\n\n")
SHOWN = 160  # characters of a difference in a message


class Block(Struct, frozen=True):
    """Message in a prompt."""

    text: str
    """Text from the header on, with marked control tokens."""
    start: int = 0
    """Index of the header in the prompt ids."""
    end: int = 0
    """Index after the block in the prompt ids."""

    @property
    def assistant(self) -> bool:
        """Whether the block is an assistant message."""
        return self.text.startswith(f"{MARK}{HEADER}assistant\n")


class Expected(Struct):
    """Expected prompt of one request."""

    sent: CapturedRequest
    """Raw request."""
    request: ClientRequest
    """Decoded request."""
    blocks: list[Block]
    """Rendered prompt; the last block is the generation prompt."""
    whole: list[Block]
    """Prompt rendered with complete model replies where the client sent them back."""
    call: ServedCall | None = None
    """Engine call of the request; None until matched."""

    @property
    def spoken(self) -> list[ClientMessage]:
        """Assistant messages of the request."""
        return [message for message in self.request.messages if message.role == "assistant"]


class Renderer:
    """Renders requests and engine prompts to text, for one model directory."""

    def __init__(self, model: Path, family: TemplateFamily) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._family = family
        added = self._tokenizer.get_added_tokens_decoder()
        self._control = {n: token.content for n, token in added.items()}
        self._header = next(n for n, text in self._control.items() if text == HEADER)
        literals = sorted(self._control.values(), key=len, reverse=True)
        self._literal = re.compile("|".join(map(re.escape, literals)))
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
        environment.globals["raise_exception"] = _raise
        self._template = environment.from_string((model / "chat_template.jinja").read_text(encoding="utf-8"))

    def render(self, request: ClientRequest) -> list[Block]:
        """Blocks of a request's prompt."""
        messages = fold_system(request.messages) if self._family.system_first else request.messages
        text = self._template.render(
            messages=[self._quoted(_as_dict(message)) for message in messages],
            tools=[self._quoted(tool) for tool in request.tools] or None,
            add_generation_prompt=True,
            eos_token="<|im_end|>",
        )
        marked = self._literal.sub(lambda match: MARK + match[0], text).replace(QUOTE, "")
        head, *parts = marked.split(MARK + HEADER)
        return [*([Block(head)] if head else []), *(Block(MARK + HEADER + part) for part in parts)]

    def _quoted(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._literal.sub(lambda match: match[0][0] + QUOTE + match[0][1:], value)
        if isinstance(value, list):
            return [self._quoted(item) for item in value]
        if isinstance(value, dict):
            return {self._quoted(key): self._quoted(item) for key, item in value.items()}
        return value

    def blocks(self, ids: Sequence[int]) -> list[Block]:
        """Blocks of an engine prompt."""
        starts = [n for n, token in enumerate(ids) if token == self._header]
        if not starts or starts[0]:
            starts.insert(0, 0)
        ends = [*starts[1:], len(ids)]
        return [Block(self.text(ids[s:e]), s, e) for s, e in zip(starts, ends, strict=True)]

    def text(self, ids: Sequence[int]) -> str:
        """Text of ids, with marked control tokens."""
        parts: list[str] = []
        run: list[int] = []
        for token in (*ids, None):
            if token is not None and token not in self._control:
                run.append(token)
                continue
            parts.append(self._tokenizer.decode(run, skip_special_tokens=False) if run else "")
            run = []
            parts.append("" if token is None else MARK + self._control[token])
        return "".join(parts)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _as_dict(message: ClientMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.calls:
        fields["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.calls
        ]
    if message.call_id:
        fields["tool_call_id"] = message.call_id
    return fields


def fold_system(messages: Sequence[ClientMessage]) -> list[ClientMessage]:
    """Documented rules for templates that accept a system message only as the first message.

    System messages at the beginning become one, joined by an empty line; a later one becomes a user message
    in `<system>` tags.
    """
    leading = list(takewhile(lambda message: message.role == "system", messages))
    text = "\n\n".join(message.content for message in leading if message.content)
    folded = [ClientMessage(role="system", content=text)] if leading else []
    for message in messages[len(leading) :]:
        if message.role == "system":
            text = f"<system>\n{message.content}\n</system>"
            message = ClientMessage(role="user", content=text)
        folded.append(message)
    return folded


class Oracle:
    """Compares the clients' requests with the engine's prompts."""

    def __init__(
        self,
        renderer: Renderer,
        sent: Sequence[CapturedRequest],
        calls: Sequence[ServedCall],
        replies: Mapping[str, ModelReply],
    ) -> None:
        """Render all requests; `calls` are the recorded engine calls, `replies` the replies by call id."""
        self._renderer = renderer
        self._calls = calls
        self._replies = replies
        self._problems: list[str] = []
        self._expected = list(self._rendered(sent))

    def _rendered(self, sent: Sequence[CapturedRequest]) -> Iterator[Expected]:
        for n, request in enumerate(sent):
            try:
                if (decoded := decode(request)) is not None:
                    whole = ClientRequest(messages=self._whole(decoded.messages), tools=decoded.tools)
                    render = self._renderer.render
                    yield Expected(request, decoded, render(decoded), render(whole))
            except (UnknownShape, jinja2.TemplateError, LookupError, TypeError, ValueError) as error:
                self._problems.append(f"request {n} ({request.path}) cannot be rendered: {error!r}")

    def _whole(self, messages: Sequence[ClientMessage]) -> tuple[ClientMessage, ...]:
        """Messages with the complete text of the replies that the client sent back."""
        replies = list(self._replies.values())
        matches = [
            next((r for r in replies if m.role == "assistant" and echoes(m, r)), None) for m in messages
        ]
        return tuple(m if r is None else _in_full(m, r) for m, r in zip(messages, matches, strict=True))

    @cached_property
    def problems(self) -> list[str]:
        """Differences found; empty if the prompts are right."""
        problems = list(self._problems)
        for call in self._calls:
            blocks = self._renderer.blocks(call.prompt_ids)
            free = [e for e in self._expected if e.call is None and e.sent.fault is not NetworkFault.REFUSE]
            match = next((e for e in free if self._difference(e, call, blocks) is None), None)
            if match is not None:
                match.call = call
            else:
                problems.append(self._unmatched(call, blocks, free))
        problems += [text for e in self._expected if e.call and (text := self._not_continued(e, e.call))]
        problems += [text for n, e in enumerate(self._expected) if (text := self._unasked(n, e))]
        return problems

    def _difference(self, expected: Expected, call: ServedCall, blocks: Sequence[Block]) -> str | None:
        """First block in which the engine's prompt differs from the request; None if it does not."""
        spoken = iter(expected.spoken)
        for n, wanted in enumerate(expected.blocks):
            if n >= len(blocks):
                return f"block {n} of {len(expected.blocks)} is missing: {wanted.text[:SHOWN]!r}"
            block, last = blocks[n], n == len(expected.blocks) - 1
            message = next(spoken, None) if wanted.assistant and not last else None
            if message is not None and block.assistant:
                if not self._said(message, call, block, (wanted.text, expected.whole[n].text)):
                    return f"block {n}, assistant: {_apart(block.text, wanted.text)}"
            elif block.text != wanted.text:
                return f"block {n}: {_apart(block.text, wanted.text)}"
        if len(blocks) > len(expected.blocks):
            return (
                f"block {len(expected.blocks)} is one too many: {blocks[len(expected.blocks)].text[:SHOWN]!r}"
            )
        return None

    def _said(self, message: ClientMessage, call: ServedCall, block: Block, wanted: tuple[str, str]) -> bool:
        """Whether an assistant block is the client's message, as sampled or as rendered."""
        sampled = self._sampled(call.prompt_ids, block)
        if sampled is not None:
            return echoes(message, self._replies[sampled.call_id])
        return NO_THOUGHT.sub("", block.text) in [NO_THOUGHT.sub("", text) for text in wanted]

    def _sampled(self, prompt: tuple[int, ...], block: Block) -> ServedCall | None:
        """Call whose prompt and sampled ids the prompt contains up to the end of this block."""
        for call in self._calls:
            start, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.token_ids)
            if not block.start < start < end <= block.end or call.finish is None:
                continue
            if prompt[start:end] != call.token_ids or prompt[:start] != call.prompt_ids:
                continue
            if self._renderer.text(prompt[end : block.end]) == "\n":
                return call
        return None

    def _not_continued(self, expected: Expected, call: ServedCall) -> str | None:
        """Problem of a request that continues an earlier call while its prompt does not."""
        messages = expected.request.messages
        for at in range(len(messages) - 1, 0, -1):
            if messages[at].role != "assistant":
                continue
            before = [e for e in self._expected if e.call and self._continues(expected, at, e)]
            calls = [e.call for e in before if e.call and e.call.finish is not None]
            if calls and not any(_begins(call.prompt_ids, earlier) for earlier in calls):
                return (
                    f"the prompt of call {call.call_id} does not begin with the ids of the call it goes on"
                    f" from, {calls[-1].call_id}"
                )
            if calls:
                return None
        return None

    def _continues(self, expected: Expected, at: int, earlier: Expected) -> bool:
        assert earlier.call is not None
        reply = self._replies[earlier.call.call_id]
        return (
            earlier.request.tools == expected.request.tools
            and earlier.request.messages == expected.request.messages[:at]
            and echoes(expected.request.messages[at], reply)
        )

    def _unasked(self, n: int, expected: Expected) -> str | None:
        """Problem of a request without an engine call; None if a fault or a repetition explains it."""
        if expected.call is not None or expected.sent.fault is NetworkFault.REFUSE:
            return None
        twins = [e for e in self._expected[:n] if e.call and e.request == expected.request]
        if any(twin.sent.fault for twin in twins) or (twins and expected.sent.repeats):
            return None
        return f"a request to {expected.sent.path} was never asked: {expected.blocks[-2].text[-SHOWN:]!r}"

    def _unmatched(self, call: ServedCall, blocks: Sequence[Block], free: Sequence[Expected]) -> str:
        nearest = max(free, key=lambda e: _shared(e.blocks, blocks), default=None)
        if nearest is None:
            return f"call {call.call_id} belongs to no request: all were asked already"
        return f"the prompt of call {call.call_id} is no request's; {self._difference(nearest, call, blocks)}"


def _begins(prompt: tuple[int, ...], earlier: ServedCall) -> bool:
    whole = (*earlier.prompt_ids, *earlier.token_ids)
    return prompt[: len(whole)] == whole


def _shared(wanted: Sequence[Block], blocks: Sequence[Block]) -> int:
    equal = [w.text == b.text or (w.assistant and b.assistant) for w, b in zip(wanted, blocks, strict=False)]
    return next((n for n, same in enumerate(equal) if not same), len(equal))


def _in_full(message: ClientMessage, reply: ModelReply) -> ClientMessage:
    uses = zip(message.calls, reply.uses, strict=True)
    calls = tuple(ClientCall(call.id, call.name, use.arguments) for call, use in uses)
    return ClientMessage(role="assistant", content=reply.text, reasoning=reply.reasoning, calls=calls)


def echoes(message: ClientMessage, reply: ModelReply) -> bool:
    """Whether an assistant message is this reply; text and reasoning may be missing but not changed."""
    calls = [(call.name, call.arguments) for call in message.calls]
    if calls != [(use.name, use.arguments) for use in reply.uses]:
        return False
    texts = ("", reply.text.strip()) if calls else (reply.text.strip(),)
    return message.content.strip() in texts and message.reasoning.strip() in ("", reply.reasoning.strip())


def _apart(text: str, wanted: str) -> str:
    at = next(
        (n for n, (a, b) in enumerate(zip(text, wanted, strict=False)) if a != b), min(len(text), len(wanted))
    )
    start = max(0, at - 40)
    return f"the engine has {text[start : at + SHOWN]!r} where the request has {wanted[start : at + SHOWN]!r}"
