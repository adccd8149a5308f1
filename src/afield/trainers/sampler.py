"""Prompts to replies through an engine, for programs that are not asynchronous.

The engine lives in an event loop on a thread of its own from `start` to `close`. A reply's log-probabilities,
ids and versions are the engine's; nothing is tokenised again. The same program draws the same replies.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from afield.chat import ChatTokenizer, Tool
from afield.errors import UsageError
from afield.interfaces.engine import Chunk, Engine, GenerateRequest
from afield.trainers.datum import SampledReply
from afield.types import FinishReason, Message, Sampling, ToolCall, VersionSpan

T = TypeVar("T")
CLOSED = "the engine is not running; use `with Tuner.open(...) as tuner:`"
KNOWN = {*Message.__struct_fields__, "reasoning_content"}
Prompt = Sequence[int] | Sequence[Message | Mapping[str, Any]] | str


class EngineSampler:
    """`calls` counts what was sampled, and names it; `version` is that of the weights the engine has."""

    def __init__(self, path: Path, engine: Engine) -> None:
        self.path = path
        self.calls = 0
        self.version = 0
        self.dtype = ""  # in which the engine holds its weights, if it says so
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        """The version that the engine begins with."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="afield-sampler", daemon=True)
        self._thread.start()
        try:
            self._await(self._engine.__aenter__())
            info = self._await(self._engine.info())
            self.version, self.dtype = info.version, info.dtype
        except BaseException:
            self._halt()
            raise
        return self.version

    def close(self) -> None:
        """Repeating is harmless."""
        if self._loop is not None:
            try:
                self._await(self._engine.__aexit__(None, None, None))
            finally:
                self._halt()

    def _halt(self) -> None:
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        self._loop = self._thread = None

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            work.close()
            raise UsageError(CLOSED)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        """How this model writes messages as ids, and reads them."""
        return ChatTokenizer.load(self.path)

    def load(self, version: int, weights: Path) -> None:
        self._await(self._engine.load(version, str(weights)))
        self.version = version

    def sample(
        self,
        prompts: Sequence[tuple[Prompt, SampledReply | None]],
        sampling: Sampling,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[SampledReply]:
        """One reply to each prompt, which goes on from a reply where it has one."""
        known = [_tool(tool) for tool in tools]
        asked = [
            (f"reply-{number}", self._ids(prompt, known, after), after)
            for number, (prompt, after) in enumerate(prompts, self.calls)
        ]
        self.calls += len(asked)
        return self._await(self._generate(asked, sampling, known))

    def _ids(self, prompt: Prompt, tools: Sequence[Tool], after: SampledReply | None) -> tuple[int, ...]:
        if isinstance(prompt, str):
            prompt = [Message(role="user", content=prompt)]
        new = [part for part in prompt if isinstance(part, int)]
        if len(new) == len(prompt):
            return (*after.ids, *new) if after else tuple(new)
        if new:
            raise UsageError(f"a prompt is ids or messages; this one has both, such as the id {new[0]}")
        messages = [_message(part) for part in prompt if not isinstance(part, int)]
        if after is None:
            return tuple(self.tokenizer.render(messages, tools))
        cut = after.finish is not FinishReason.STOP
        found = self.tokenizer.append(messages, truncated=cut, tools=tools, stop=after.token_ids[-1])
        if found is None:
            raise UsageError(
                f"{self.path}: its template cannot go on after a sampled reply with"
                f" {[message.role for message in messages]}; give the ids that follow instead"
            )
        return (*after.ids, *found[1])

    async def _generate(
        self,
        asked: list[tuple[str, tuple[int, ...], SampledReply | None]],
        sampling: Sampling,
        tools: list[Tool],
    ) -> list[SampledReply]:
        context = (await self._engine.info()).max_context
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._reply(*one, sampling, tools, context)) for one in asked]
        except ExceptionGroup as broken:
            first = broken.exceptions[0]  # the others were stopped because of it
            if type(first) is ValueError:  # an engine that is asked what it cannot
                raise UsageError(str(first)) from first
            raise first from None
        return [task.result() for task in tasks]

    async def _reply(
        self,
        name: str,
        ids: tuple[int, ...],
        after: SampledReply | None,
        sampling: Sampling,
        tools: list[Tool],
        context: int,
    ) -> SampledReply:
        room = context - len(ids)
        if room < 1:
            raise UsageError(f"a prompt of {len(ids)} tokens leaves no room in a context of {context}")
        call = GenerateRequest(
            id=name,
            session_id=name,
            prompt_ids=ids,
            sampling=sampling,
            max_tokens=min(sampling.max_tokens or room, room),
            stop_ids=self.tokenizer.stop_ids,
        )
        async with aclosing(self._engine.generate(call)) as stream:
            chunks = [chunk async for chunk in stream]
        sampled = tuple(token for chunk in chunks for token in chunk.token_ids)
        parser = self.tokenizer.parser(tools=tools)
        parser.feed(sampled)
        parser.finish()
        return SampledReply(
            id=name,
            prompt_ids=ids,
            token_ids=sampled,
            logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
            versions=tuple(_spans(chunks)),
            finish=chunks[-1].finish or FinishReason.ABORTED,
            sampling=sampling,
            message=parser.reply,
            previous=after,
        )


def _spans(chunks: Sequence[Chunk]) -> list[VersionSpan]:
    last = chunks[-1]
    if last.versions is not None:
        return list(last.versions)
    spans: list[VersionSpan] = []
    start = 0
    for chunk in chunks:
        if chunk.token_ids:
            spans.append(VersionSpan(start, start + len(chunk.token_ids), chunk.low, chunk.high))
            start += len(chunk.token_ids)
    return spans


def _message(given: Message | Mapping[str, Any]) -> Message:
    """As the OpenAI API has it, or one of ours."""
    if isinstance(given, Message):
        if given.images:
            raise UsageError(
                "sample() takes no images; sample through a gateway and train on rows_from_groups()"
            )
        return given
    if unknown := sorted(given.keys() - KNOWN):
        raise UsageError(f"a message has {unknown[0]!r}; it may have: {', '.join(sorted(KNOWN))}")
    told = {name: value for name, value in given.items() if value is not None}
    if "reasoning_content" in told:
        told["reasoning"] = told.pop("reasoning_content")
    try:
        told["tool_calls"] = [_call(call) for call in told.get("tool_calls", ())]
        return msgspec.convert(told, Message)
    except (msgspec.ValidationError, KeyError, TypeError) as error:
        raise UsageError(f"message {dict(given)!r} cannot be read: {error!r}") from error


def _call(given: ToolCall | Mapping[str, Any]) -> ToolCall:
    if isinstance(given, ToolCall):
        return given
    function = given.get("function", given)
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(given.get("id", ""), function["name"], text)


def _tool(given: Mapping[str, Any]) -> Tool:
    """As the OpenAI API has it."""
    function = given.get("function", given)
    return Tool(
        function["name"], function.get("description", ""), function.get("parameters", {}), dict(given)
    )
