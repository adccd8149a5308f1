"""Whether a worker keeps the engine's promises, tried out before it is used.

Refused (UsageError with the remedy): ids that are not taken as ids, tokens without one finite
log-probability each, a stop id that does not end a call or is missing from it, a stream that differs from
the whole answer, log-probabilities of another distribution than the engine claims. Told as a note:
whatever the engine itself says it cannot do, and a seed that does not repeat.
"""

from __future__ import annotations

import math

from msgspec import Struct, structs

from afield.engines.logprob_mode import Drawn, measure
from afield.errors import UsageError
from afield.interfaces.engine import Chunk, Engine, EngineInfo, GenerateRequest
from afield.types import FinishReason, Sampling

PROMPT = (3, 1, 4, 1, 5)
TOKENS = 12
LONG = 4096
SAME = 1e-3  # batches of another size change the last bits


class Report(Struct, frozen=True, kw_only=True):
    """A worker that may be used: what it is, and what to know about it."""

    info: EngineInfo
    seeded: bool

    @property
    def notes(self) -> tuple[str, ...]:
        return self.info.notes


async def probe(engine: Engine) -> Report:
    info = await engine.info()
    free = await _answer(engine, _call(stream=False))
    _check_lengths(free, info)
    streamed = await _answer(engine, _call(stream=True))
    _check_same(free, streamed, info)
    await _check_stop(engine, free, info)
    await _check_length(engine, info)
    await _check_mode(engine, info)
    seeded = await _repeats(engine)
    if not seeded:
        info = structs.replace(info, notes=(*info.notes, "the same seed gives other tokens"))
    return Report(info=info, seeded=seeded)


async def checked(engine: Engine) -> EngineInfo:
    """For a pool: the worker's facts, or why it cannot be used."""
    return (await probe(engine)).info


def _call(*, stream: bool, **changes: object) -> GenerateRequest:
    call = GenerateRequest(
        id="probe",
        session_id="probe",
        prompt_ids=PROMPT,
        sampling=Sampling(temperature=0.0),
        max_tokens=TOKENS,
        stop_ids=(),
        stream=stream,
    )
    return structs.replace(call, **changes)


async def _answer(engine: Engine, call: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(call)]


def _ids(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def _logprobs(chunks: list[Chunk]) -> list[float]:
    return [p for chunk in chunks for p in chunk.logprobs]


def _check_lengths(chunks: list[Chunk], info: EngineInfo) -> None:
    ids, logprobs = _ids(chunks), _logprobs(chunks)
    expected = min(TOKENS, info.max_context - len(PROMPT))
    if len(ids) != expected or chunks[-1].finish is not FinishReason.LENGTH:
        raise UsageError(
            f"{info.kind} sampled {len(ids)} tokens where {expected} were asked for and no stop id was given;"
            " it must stop for the ids in the call only (ignore_eos)"
        )
    if len(logprobs) != len(ids) or not all(math.isfinite(p) and p <= SAME for p in logprobs):
        raise UsageError(
            f"{info.kind} gave {len(ids)} tokens logprobs {logprobs}; one finite one each is needed"
        )
    if not all(0 <= token < info.vocab_size for token in ids):
        raise UsageError(f"{info.kind} sampled ids {ids} outside its vocabulary of {info.vocab_size}")


def _check_same(whole: list[Chunk], streamed: list[Chunk], info: EngineInfo) -> None:
    ids, logprobs = _ids(streamed), _logprobs(streamed)
    close = [abs(p - q) < SAME for p, q in zip(_logprobs(whole), logprobs, strict=False)]
    if ids != _ids(whole) or len(logprobs) != len(ids) or not all(close):
        raise UsageError(
            f"{info.kind} streams {ids} where the whole answer is {_ids(whole)};"
            " a greedy answer must be the same"
        )


async def _check_stop(engine: Engine, free: list[Chunk], info: EngineInfo) -> None:
    ids = _ids(free)
    stop = ids[len(ids) // 2]
    until = ids[: ids.index(stop) + 1]
    chunks = await _answer(engine, _call(stream=True, stop_ids=(stop,)))
    if _ids(chunks) != until or chunks[-1].finish is not FinishReason.STOP:
        raise UsageError(
            f"{info.kind} gave {_ids(chunks)} ({chunks[-1].finish}) for the stop id {stop}, where {until} was"
            " due; a stop id ends the call and is its last token"
        )


async def _check_length(engine: Engine, info: EngineInfo) -> None:
    """The context it claims, to the last token; of a long one only the beginning."""
    length = min(info.max_context, LONG) - 1
    due = min(2, info.max_context - length)
    try:
        chunks = await _answer(engine, _call(stream=False, prompt_ids=(1,) * length, max_tokens=2))
    except ValueError as error:
        raise UsageError(
            f"{info.kind} claims a context of {info.max_context} but refuses a prompt of {length}: {error}"
        ) from error
    if len(_ids(chunks)) != due:
        raise UsageError(
            f"{info.kind} gave {len(_ids(chunks))} tokens after a prompt of {length}, where its context of"
            f" {info.max_context} allows {due}"
        )


async def _check_mode(engine: Engine, info: EngineInfo) -> None:
    """One that claims the right log-probabilities shows them; one that claims less refuses calls itself."""
    if info.logprobs != "processed":
        return

    async def draw(call: GenerateRequest) -> Drawn:
        chunks = await _answer(engine, call)
        return list(zip(_ids(chunks), _logprobs(chunks), strict=True))

    mode = await measure(draw)
    if mode != "processed":
        raise UsageError(
            f"{info.kind} reports {mode} log-probabilities but claims those of the distribution drawn from;"
            " restart it so that it reports them (vLLM: --logprobs-mode processed_logprobs)"
        )


async def _repeats(engine: Engine) -> bool:
    call = _call(stream=False, sampling=Sampling(seed=7))
    return _ids(await _answer(engine, call)) == _ids(await _answer(engine, call))
