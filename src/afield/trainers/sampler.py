"""Synchronous sampling through an engine, for training loops without asyncio.

The engine runs in an event loop on its own thread from `start` to `close`. Ids, log-probabilities and
versions of a reply are the engine's; text is never tokenized again. Sampling is deterministic: the same
program samples the same replies.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Struct

from afield.batches.rows import Row
from afield.chat import ChatTokenizer, Tool
from afield.errors import UsageError
from afield.interfaces.engine import Chunk, Engine, GenerateRequest
from afield.types import FinishReason, Message, Sampling, ToolCall, Trajectory, TurnRange, VersionSpan
from afield.utils.loop_thread import LoopThread

T = TypeVar("T")
CLOSED = "the engine is not running; use `with open_tuner(...) as tuner:`"
MESSAGE_FIELDS = {*Message.__struct_fields__, "reasoning_content"}
Prompt = Sequence[int] | Sequence[Message | Mapping[str, Any]] | str


class SampledReply(Struct, frozen=True, kw_only=True):
    """A reply that an engine sampled, and the conversation before it."""

    id: str
    """Id of the engine request, and rollout id of the row: `reply-N`."""
    prompt_ids: tuple[int, ...]
    """All ids before the reply, those of earlier replies included."""
    token_ids: tuple[int, ...]
    """Sampled token ids."""
    logprobs: tuple[float, ...]
    """Log-probability of each sampled token, from the engine."""
    versions: tuple[VersionSpan, ...]
    """Version spans, counted from the first sampled token."""
    finish: FinishReason
    """Reason why sampling ended."""
    sampling: Sampling
    """Sampling parameters of the request."""
    message: Message
    """The reply, parsed."""
    previous: SampledReply | None = None
    """Reply that the prompt continues; None at the start of a conversation."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of prompt and reply."""
        return (*self.prompt_ids, *self.token_ids)

    @property
    def text(self) -> str:
        return self.message.content

    def conversation(self) -> Iterator[SampledReply]:
        """The replies of the conversation, this one last."""
        if self.previous is not None:
            yield from self.previous.conversation()
        yield self

    def to_row(self, advantage: float | Sequence[float]) -> Row:
        """The conversation as one training row, with one advantage for all replies or one for each.

        Every sampled token is trained once, as it was sampled. Advantages may be numpy or torch numbers.
        """
        replies = [reply for reply in self.conversation() if reply.token_ids]
        ids = self.ids
        mask, logprobs = [0] * len(ids), [0.0] * len(ids)
        turns: list[TurnRange] = []
        versions: list[VersionSpan] = []
        for reply in replies:
            start = len(reply.prompt_ids)
            end = start + len(reply.token_ids)
            mask[start:end] = [1] * (end - start)
            logprobs[start:end] = reply.logprobs
            turns.append(
                TurnRange(reply.id, start, end, reply.sampling.temperature, reply.sampling.truncated)
            )
            versions += [VersionSpan(start + s.start, start + s.end, s.low, s.high) for s in reply.versions]
        single = isinstance(advantage, int | float) or getattr(advantage, "ndim", None) == 0
        advantages = [advantage] * len(turns) if single else list(cast("Sequence[float]", advantage))
        if len(advantages) != len(turns):
            raise UsageError(f"reply {self.id}: {len(advantages)} advantages for {len(turns)} replies")
        trajectory = Trajectory(
            token_ids=ids,
            loss_mask=tuple(mask),
            logprobs=tuple(logprobs),
            versions=tuple(versions),
            turns=tuple(turns),
            weight=1.0,
        )
        return Row(
            rollout_id=self.id,
            trajectory=trajectory,
            advantages=tuple(map(float, cast("list[float]", advantages))),
        )


class EngineSampler:
    """Samples replies from an engine that it starts and closes."""

    def __init__(self, path: Path, engine: Engine) -> None:
        self.path = path
        self.calls = 0
        """Number of sampled replies; ids are numbered by it."""
        self.version = 0
        """Version of the weights that the engine serves."""
        self.dtype = ""
        """Dtype of the engine's weights, if it reports one."""
        self._engine = engine
        self._loop: LoopThread | None = None

    def start(self) -> int:
        """Start the engine; returns the version that it serves."""
        self._loop = LoopThread("afield-sampler").start()
        try:
            self._await(self._engine.__aenter__())
            info = self._await(self._engine.info())
            self.version, self.dtype = info.version, info.dtype
        except BaseException:
            self._halt()
            raise
        return self.version

    def close(self) -> None:
        """Close the engine; idempotent."""
        if self._loop is not None:
            try:
                self._await(self._engine.__aexit__(None, None, None))
            finally:
                self._halt()

    def _halt(self) -> None:
        if self._loop is not None:
            self._loop.stop()
            self._loop.join()
        self._loop = None

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            work.close()
            raise UsageError(CLOSED)
        return self._loop.submit(work).result()

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        """The model's chat tokenizer."""
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
        """Sample a reply per prompt; a prompt with a reply continues its conversation."""
        parsed = [_tool(tool) for tool in tools]
        requests = [
            (f"reply-{number}", self._ids(prompt, parsed, after), after)
            for number, (prompt, after) in enumerate(prompts, self.calls)
        ]
        self.calls += len(requests)
        return self._await(self._generate(requests, sampling, parsed))

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
        truncated = after.finish is not FinishReason.STOP
        delta = self.tokenizer.append(messages, truncated=truncated, tools=tools, stop=after.token_ids[-1])
        if delta is None:
            raise UsageError(
                f"{self.path}: the chat template cannot append messages with the roles"
                f" {[message.role for message in messages]} after a sampled reply;"
                " pass their token ids instead"
            )
        return (*after.ids, *delta[1])

    async def _generate(
        self,
        requests: list[tuple[str, tuple[int, ...], SampledReply | None]],
        sampling: Sampling,
        tools: list[Tool],
    ) -> list[SampledReply]:
        context = (await self._engine.info()).max_context
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._reply(*request, sampling, tools, context)) for request in requests
                ]
        except ExceptionGroup as broken:
            first = broken.exceptions[0]  # the first failure cancels the other requests
            if type(first) is ValueError:  # a request that the engine cannot serve
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


def _message(value: Message | Mapping[str, Any]) -> Message:
    """A message in OpenAI's form, or a `Message`."""
    if isinstance(value, Message):
        if value.images:
            raise UsageError(
                "sample() takes no images; sample through a gateway and train on rows_from_groups()"
            )
        return value
    if unknown := sorted(value.keys() - MESSAGE_FIELDS):
        raise UsageError(f"a message has {unknown[0]!r}; it may have: {', '.join(sorted(MESSAGE_FIELDS))}")
    fields = {name: item for name, item in value.items() if item is not None}
    if "reasoning_content" in fields:
        fields["reasoning"] = fields.pop("reasoning_content")
    try:
        fields["tool_calls"] = [_call(call) for call in fields.get("tool_calls", ())]
        return msgspec.convert(fields, Message)
    except (msgspec.ValidationError, KeyError, TypeError) as error:
        raise UsageError(f"message {dict(value)!r} cannot be read: {error!r}") from error


def _call(value: ToolCall | Mapping[str, Any]) -> ToolCall:
    if isinstance(value, ToolCall):
        return value
    function = value.get("function", value)
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(value.get("id", ""), function["name"], text)


def _tool(tool: Mapping[str, Any]) -> Tool:
    """A tool in OpenAI's form."""
    function = tool.get("function", tool)
    return Tool(function["name"], function.get("description", ""), function.get("parameters", {}), dict(tool))
