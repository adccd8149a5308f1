"""Scripted engine: replies from a script, for tests and `--engine scripted=FILE`.

1. A script is a function from the call to a `ScriptedReply`, or a list of replies used in order;
   `read_script` makes one from a JSONL file.
2. The engine follows the engine contract (context, `max_tokens`, stop ids, versions) and records every
   call.
3. Replies may fail, hang or change the weight version in the middle.
4. With an `image_id` the engine accepts images; each expands to `image_length` ids in the prompt.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, Self

import msgspec
from msgspec import Struct, structs

from afield.engines.checks import check_call, is_newer
from afield.engines.recording import RecordedCall, record
from afield.errors import Unavailable, UsageError
from afield.interfaces.engine import Chunk, EngineInfo, GenerateRequest, TopLogprobs
from afield.types import FinishReason

if TYPE_CHECKING:
    from afield.models.masks import ConstraintMasks, ConstraintMatcher

Failing = Literal["unavailable", "hang"]
MAX_TOP_LOGPROBS = 20


class ScriptedReply(Struct, frozen=True, kw_only=True):
    """Reply of a script."""

    token_ids: tuple[int, ...] = ()
    """Tokens to sample; cut at stop ids and `max_tokens` of the call."""
    logprobs: tuple[float, ...] | None = None
    """Log-probability of each token; None uses numbers that depend on token and position."""
    finish: FinishReason | None = None
    """Finish reason; None derives it from stop ids and `max_tokens`."""
    chunks: tuple[int, ...] = (1,)
    """Sizes of streamed chunks in tokens, the last one repeated."""
    delay_s: float = 0.0
    """Seconds to wait before each chunk."""
    bump_after: int | None = None
    """Number of tokens after which the weight version grows by one; None never."""
    fail: Failing | None = None
    """Failure after the tokens: raise Unavailable, or hang until the engine breaks; None for no failure."""

    def __post_init__(self) -> None:
        if not self.token_ids and self.fail is None:
            raise ValueError("a scripted reply has neither token_ids nor fail; set one of them")
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} token_ids but {len(self.logprobs)} logprobs")
        if not self.chunks or min(self.chunks) < 1:
            raise ValueError(f"chunk sizes {self.chunks} must be positive")


Script = Callable[[GenerateRequest], ScriptedReply] | Sequence[ScriptedReply]


class ScriptedEngine:
    """Engine that replies from a script and records calls in `recorded` and weight loads in `loaded`."""

    def __init__(
        self,
        script: Script,
        *,
        version: int = 0,
        max_context: int = 4096,
        vocab_size: int = 1 << 18,
        image_id: int | None = None,
        image_length: int = 4,
        model: str | Path | None = None,
    ) -> None:
        """Create an engine.

        Args:
            script: function from call to reply, or replies used in order.
            version: initial weight version.
            max_context: prompt plus reply length in tokens.
            vocab_size: number of token ids.
            image_id: placeholder id of images; None refuses images.
            image_length: ids per image in the expanded prompt.
            model: directory with a tokenizer, for calls with a constraint: scripted replies are checked
                against the constraint, and calls without a scripted reply are sampled from its masks. None
                ignores constraints.
        """
        self._answer = script if callable(script) else _in_order(script)
        self._version = version
        self._max_context, self._vocab_size = max_context, vocab_size
        self._image_id, self._image_length = image_id, image_length
        self._model = model
        self._known_masks: ConstraintMasks | None = None
        self._moving = asyncio.Event()
        self._moving.set()
        self._broken: str | None = None
        self._breaking = asyncio.Event()
        self.recorded: list[RecordedCall] = []
        self.loaded: list[tuple[int, str]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.break_down("the engine was closed")

    def break_down(self, reason: str = "the scripted engine broke") -> None:
        """Fail all running and future calls. Idempotent."""
        self._broken = self._broken or reason
        self._breaking.set()
        self._moving.set()

    async def info(self) -> EngineInfo:
        self._check_up()
        return EngineInfo(
            kind="scripted",
            version=self._version,
            max_context=self._max_context,
            vocab_size=self._vocab_size,
            images=self._image_id is not None,
            constraints=True,
            max_top_logprobs=MAX_TOP_LOGPROBS,
            prompt_logprobs=True,
        )

    async def pause(self) -> None:
        self._check_up()
        self._moving.clear()

    async def resume(self) -> None:
        self._check_up()
        self._moving.set()

    async def load(self, version: int, path: str) -> None:
        self._check_up()
        if is_newer(version, self._version):
            self._version = version
            self.loaded.append((version, path))

    def generate(self, call: GenerateRequest) -> AsyncGenerator[Chunk]:
        return record(call, self._chunks(call), self.recorded.append)

    async def _chunks(self, call: GenerateRequest) -> AsyncGenerator[Chunk]:
        expanded = self._expanded(call)
        check_call(structs.replace(call, prompt_ids=expanded), await self.info())
        answer = self._held(call)
        tokens, finish = _as_sampled(answer, call, self._max_context - len(expanded))
        logprobs = answer.logprobs or tuple(_logprob(token, n) for n, token in enumerate(tokens))
        logprobs = logprobs[: len(tokens)]
        for start, end in _cuts(answer, len(tokens), call.stream):
            await self._pause(answer.delay_s)
            if start == answer.bump_after:
                self._version += 1
            ends = end == len(tokens) and answer.fail is None
            yield Chunk(
                token_ids=tokens[start:end],
                logprobs=logprobs[start:end],
                low=self._version,
                high=self._version,
                finish=finish if ends else None,
                prompt_ids=expanded if call.images and start == 0 else None,
                top_logprobs=_tops(tokens, logprobs, call.top_logprobs)[start:end],
                prompt_logprobs=_prompt_tops(expanded, call.prompt_logprobs) if start == 0 else None,
            )
        if answer.fail == "hang":
            await self._breaking.wait()
            self._check_up()
        if answer.fail == "unavailable":
            raise Unavailable(f"the script fails call {call.id!r} here")

    def _held(self, call: GenerateRequest) -> ScriptedReply:
        if call.constraint is None or self._model is None or (masks := self._masks(self._model)) is None:
            return self._answer(call)
        walker = masks.walk(call.constraint)
        try:
            answer = self._answer(call)
        except Unavailable:
            return _drawn(call, walker, self._vocab_size)
        for position, token in enumerate(answer.token_ids):
            if not walker.accept(token):
                raise ValueError(
                    f"the script answers call {call.id!r} with the ids {answer.token_ids}, and its constraint"
                    f" does not allow the one at position {position}"
                )
        return answer

    def _masks(self, model: str | Path) -> ConstraintMasks | None:
        """Constraint masks of the model; None without xgrammar."""
        from afield.models.masks import ConstraintMasks

        if self._known_masks is None:
            self._known_masks = ConstraintMasks(model, self._vocab_size)
        return None if self._known_masks.missing else self._known_masks

    def _expanded(self, call: GenerateRequest) -> tuple[int, ...]:
        """Prompt with every image expanded to `image_length` ids."""
        if not call.images:
            return call.prompt_ids
        if self._image_id is None:
            raise ValueError(
                f"call {call.id!r} has images, which this engine does not support; leave them out"
            )
        placeholders = call.prompt_ids.count(self._image_id)
        if placeholders != len(call.images):
            raise ValueError(
                f"call {call.id!r} has {len(call.images)} images"
                f" and {placeholders} image placeholders in its prompt"
            )
        longer = ((t,) * (self._image_length if t == self._image_id else 1) for t in call.prompt_ids)
        return tuple(chain.from_iterable(longer))

    async def _pause(self, seconds: float) -> None:
        # Yields to the event loop even without a delay, as a real engine does.
        await asyncio.sleep(0)
        if seconds:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._breaking.wait(), seconds)
        await self._moving.wait()
        self._check_up()

    def _check_up(self) -> None:
        if self._broken is not None:
            raise Unavailable(self._broken)


def _drawn(call: GenerateRequest, walker: ConstraintMatcher, vocabulary: int) -> ScriptedReply:
    """Sample a reply uniformly from the tokens that the constraint allows; stops as soon as it may."""
    from afield.models.bitmasks import allowed

    rng = random.Random(call.draw or call.id)
    ids: list[int] = []
    logprobs: list[float] = []
    while len(ids) < call.max_tokens and not (ids and ids[-1] in call.stop_ids):
        may = allowed(walker.mask, vocabulary).nonzero().flatten().tolist()
        ends = [token for token in may if token in call.stop_ids]
        ids.append(rng.choice(ends or may))
        logprobs.append(-math.log(len(ends or may)))
        walker.accept(ids[-1])
    return ScriptedReply(token_ids=tuple(ids), logprobs=tuple(logprobs))


def _in_order(answers: Sequence[ScriptedReply]) -> Callable[[GenerateRequest], ScriptedReply]:
    left = iter(answers)

    def answer(call: GenerateRequest) -> ScriptedReply:
        for scripted in left:
            return scripted
        raise Unavailable(f"the script's {len(answers)} answers are used up; write one for call {call.id!r}")

    return answer


def _as_sampled(
    answer: ScriptedReply, call: GenerateRequest, room: int
) -> tuple[tuple[int, ...], FinishReason]:
    """Tokens up to the first stop id, `max_tokens` or the end of the context, and the finish reason."""
    limit = min(call.max_tokens, room)
    stops = (n for n, token in enumerate(answer.token_ids, 1) if token in call.stop_ids)
    stop = next(stops, None)
    if stop is not None and stop <= limit:
        return answer.token_ids[:stop], answer.finish or FinishReason.STOP
    cut = len(answer.token_ids) >= limit
    return answer.token_ids[:limit], answer.finish or (FinishReason.LENGTH if cut else FinishReason.STOP)


def _cuts(answer: ScriptedReply, length: int, stream: bool) -> Iterator[tuple[int, int]]:
    """Start and end of each chunk; a chunk has tokens of one weight version only."""
    sizes = chain(answer.chunks, repeat(answer.chunks[-1])) if stream else repeat(length)
    start = 0
    while start < length:
        end = min(start + next(sizes), length)
        if answer.bump_after is not None and start < answer.bump_after < end:
            end = answer.bump_after
        yield start, end
        start = end


def _logprob(token: int, position: int) -> float:
    """Number that depends on token and position, so that a test detects a mix-up."""
    return -((token * 31 + position * 7) % 97 + 1) / 64


def _tops(ids: Sequence[int], logprobs: Sequence[float], count: int) -> tuple[TopLogprobs, ...]:
    """Top log-probabilities: the token itself, then its neighbours in the vocabulary, ever less likely."""
    pairs = zip(ids, logprobs, strict=True)
    return tuple(_top(token, logprob, count) for token, logprob in pairs) if count else ()


def _top(token: int, logprob: float, count: int) -> TopLogprobs:
    others = chain(range(token - 1, -1, -1), range(token + 1, token + count))
    ids = chain((token,), others)
    return tuple((other, logprob - n / 4) for n, other in zip(range(count), ids, strict=False))


def _prompt_tops(ids: Sequence[int], count: int | None) -> tuple[TopLogprobs, ...] | None:
    if count is None:
        return None
    return ((), *(_top(token, _logprob(token, n), max(1, count)) for n, token in enumerate(ids[1:], 1)))


# --- script files ---------------------------------------------------------------------------------


class Codec(Protocol):
    """Tokenizer; `encode` recognises special tokens."""

    def encode(self, text: str) -> Sequence[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ScriptRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Line of a script file: one reply."""

    text: str | None = None
    """Reply text; the first stop id of the call is appended."""
    one_of: tuple[str, ...] = ()
    """Reply texts, one of which is chosen by the call's `draw` or id."""
    token_ids: tuple[int, ...] = ()
    """Reply as token ids, instead of `text` or `one_of`."""
    logprobs: tuple[float, ...] | None = None
    """See `ScriptedReply.logprobs`."""
    finish: FinishReason | None = None
    """See `ScriptedReply.finish`."""
    chunks: tuple[int, ...] = (1,)
    """See `ScriptedReply.chunks`."""
    delay_s: float = 0.0
    """Seconds to wait before each chunk."""
    match: str | None = None
    """Text of the prompts that this row answers, any number of times; None uses rows once, in order."""
    fail: Failing | None = None
    """See `ScriptedReply.fail`."""

    def __post_init__(self) -> None:
        if (self.text is not None) + bool(self.one_of) + bool(self.token_ids) > 1:
            raise ValueError("a row has exactly one of text, one_of and token_ids")
        if self.text is None and not self.one_of:
            self.answer(self.token_ids)

    def words(self, call: GenerateRequest) -> str | None:
        """Reply text for a call; None for a row of token ids."""
        if not self.one_of:
            return self.text
        drawn = random.Random(call.draw or call.id).random()
        return self.one_of[int(drawn * len(self.one_of))]

    def answer(self, token_ids: tuple[int, ...]) -> ScriptedReply:
        return ScriptedReply(
            token_ids=token_ids,
            logprobs=self.logprobs,
            finish=self.finish,
            chunks=self.chunks,
            delay_s=self.delay_s,
            fail=self.fail,
        )


def read_script(path: str | Path, codec: Codec | None = None) -> Callable[[GenerateRequest], ScriptedReply]:
    """Read a script from a JSONL file; rows with `text`, `one_of` or `match` need a codec."""
    rows = _read_rows(Path(path), codec)
    matching = [row for row in rows if row.match is not None]
    in_order = iter([row for row in rows if row.match is None])

    def answer(call: GenerateRequest) -> ScriptedReply:
        prompt = codec.decode(call.prompt_ids) if codec and matching else ""
        row = next((r for r in matching if r.match is not None and r.match in prompt), None)
        row = row or next(in_order, None)
        if row is None:
            raise Unavailable(
                f"{path} has no answer left for call {call.id!r}; add a row, or one with 'match'"
            )
        words = row.words(call)
        if words is None or codec is None:
            return row.answer(row.token_ids)
        return row.answer((*codec.encode(words), *call.stop_ids[:1]))

    return answer


def _read_rows(path: Path, codec: Codec | None) -> list[ScriptRow]:
    if not path.is_file():
        raise UsageError(f"script {str(path)!r} does not exist; expected a JSONL file of answers")
    rows: list[ScriptRow] = []
    for n, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=ScriptRow)
        except msgspec.MsgspecError as error:
            raise UsageError(f"{path}, line {n}: {error}") from error
        if codec is None and (row.text is not None or row.one_of or row.match is not None):
            raise UsageError(
                f"{path}, line {n}: 'text', 'one_of' and 'match' need a tokenizer; write 'token_ids' instead"
            )
        rows.append(row)
    if not rows:
        raise UsageError(f"script {str(path)!r} has no rows; write at least one answer")
    return rows
