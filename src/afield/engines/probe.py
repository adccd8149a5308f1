"""Engine probe: checks a worker against the engine contract before use.

1. Raises UsageError, with the remedy, when the worker does not take token ids as sent, reports tokens without
   one finite log-probability each, ignores a stop id, streams other tokens than a whole reply has, or reports
   log-probabilities of another distribution than it claims.
2. Adds a note to `EngineInfo` when a seed does not reproduce the tokens.
3. `measure_logprob_mode` finds out which log-probabilities a server reports.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

from msgspec import Struct, structs

from afield.errors import UsageError
from afield.interfaces.engine import Chunk, Engine, EngineInfo, GenerateRequest, LogprobMode
from afield.types import FinishReason, Sampling

PROMPT = (3, 1, 4, 1, 5)
TOKENS = 12
LONG = 4096
SAME = 1e-3  # tolerated difference of log-probabilities: batch size changes the last bits
MODE_PROMPTS = ((1, 2, 3), (3, 1), (5, 6, 7, 8))
MODE_TOKENS = 8
COLD = 0.1
CERTAIN = -0.02  # log-probabilities above this cannot distinguish the modes
TokenLogprobs = list[tuple[int, float]]


class ProbeReport(Struct, frozen=True, kw_only=True):
    """Result of probing a worker that may be used."""

    info: EngineInfo
    """Properties of the engine, with the notes of the probe."""
    seeded: bool
    """Whether the same seed samples the same tokens."""


async def probe(engine: Engine) -> ProbeReport:
    """Check the engine contract; raises UsageError for a worker that breaks it."""
    info = await engine.info()
    whole = await _generate(engine, _call(stream=False))
    _check_counts(whole, info)
    _check_same(whole, await _generate(engine, _call(stream=True)), info)
    await _check_stop(engine, whole, info)
    await _check_context(engine, info)
    await _check_mode(engine, info)
    seeded = await _repeats(engine)
    if not seeded:
        info = structs.replace(info, notes=(*info.notes, "the same seed samples other tokens"))
    return ProbeReport(info=info, seeded=seeded)


async def checked(engine: Engine) -> EngineInfo:
    """Probe a worker for an engine pool; raises UsageError if it cannot be used."""
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


async def _generate(engine: Engine, call: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(call)]


def _ids(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def _logprobs(chunks: list[Chunk]) -> list[float]:
    return [p for chunk in chunks for p in chunk.logprobs]


def _check_counts(chunks: list[Chunk], info: EngineInfo) -> None:
    ids, logprobs = _ids(chunks), _logprobs(chunks)
    expected = min(TOKENS, info.max_context - len(PROMPT))
    if len(ids) != expected or chunks[-1].finish is not FinishReason.LENGTH:
        raise UsageError(
            f"{info.kind} sampled {len(ids)} tokens for max_tokens {expected} without stop ids;"
            " it must stop only at the ids of the call (ignore_eos)"
        )
    if len(logprobs) != len(ids) or not all(math.isfinite(p) and p <= SAME for p in logprobs):
        raise UsageError(
            f"{info.kind} reports logprobs {logprobs} for {len(ids)} tokens; each token needs a finite one"
        )
    if not all(0 <= token < info.vocab_size for token in ids):
        raise UsageError(f"{info.kind} sampled ids {ids} outside its vocabulary of {info.vocab_size}")


def _check_same(whole: list[Chunk], streamed: list[Chunk], info: EngineInfo) -> None:
    ids, logprobs = _ids(streamed), _logprobs(streamed)
    close = [abs(p - q) < SAME for p, q in zip(_logprobs(whole), logprobs, strict=False)]
    if ids != _ids(whole) or len(logprobs) != len(ids) or not all(close):
        raise UsageError(
            f"{info.kind} streams {ids} but replies {_ids(whole)} without streaming;"
            " greedy sampling must give the same tokens"
        )


async def _check_stop(engine: Engine, free: list[Chunk], info: EngineInfo) -> None:
    ids = _ids(free)
    stop = ids[len(ids) // 2]
    expected = ids[: ids.index(stop) + 1]
    chunks = await _generate(engine, _call(stream=True, stop_ids=(stop,)))
    if _ids(chunks) != expected or chunks[-1].finish is not FinishReason.STOP:
        raise UsageError(
            f"{info.kind} sampled {_ids(chunks)} ({chunks[-1].finish}) for the stop id {stop}, expected"
            f" {expected}; a stop id ends the call and is its last token"
        )


async def _check_context(engine: Engine, info: EngineInfo) -> None:
    """Check the claimed context length to its last token, at most `LONG` tokens of it."""
    length = min(info.max_context, LONG) - 1
    expected = min(2, info.max_context - length)
    try:
        chunks = await _generate(engine, _call(stream=False, prompt_ids=(1,) * length, max_tokens=2))
    except ValueError as error:
        raise UsageError(
            f"{info.kind} claims a context of {info.max_context} but refuses a prompt of {length}: {error}"
        ) from error
    if len(_ids(chunks)) != expected:
        raise UsageError(
            f"{info.kind} sampled {len(_ids(chunks))} tokens after a prompt of {length}; its context of"
            f" {info.max_context} allows {expected}"
        )


async def _check_mode(engine: Engine, info: EngineInfo) -> None:
    """Verify a claim of processed log-probabilities; engines with another mode refuse calls themselves."""
    if info.logprobs != "processed":
        return

    async def sample(call: GenerateRequest) -> TokenLogprobs:
        chunks = await _generate(engine, call)
        return list(zip(_ids(chunks), _logprobs(chunks), strict=True))

    mode = await measure_logprob_mode(sample)
    if mode != "processed":
        raise UsageError(
            f"{info.kind} reports {mode} log-probabilities but claims processed ones; restart it so that it"
            " reports them (vLLM: --logprobs-mode processed_logprobs)"
        )


async def _repeats(engine: Engine) -> bool:
    call = _call(stream=False, sampling=Sampling(seed=7))
    return _ids(await _generate(engine, call)) == _ids(await _generate(engine, call))


# --- log-probability mode -------------------------------------------------------------------------


def mode_call(prompt: tuple[int, ...], **sampling: float) -> GenerateRequest:
    """Short call for measuring a server."""
    return GenerateRequest(
        id="probe",
        session_id="probe",
        prompt_ids=prompt,
        sampling=Sampling(**sampling),  # type: ignore[arg-type]
        max_tokens=MODE_TOKENS,
        stop_ids=(),
    )


async def measure_logprob_mode(sample: Callable[[GenerateRequest], Awaitable[TokenLogprobs]]) -> LogprobMode:
    """Measure whether log-probabilities are before temperature ("raw"), after it but before truncation
    ("tempered"), or of the distribution that is sampled ("processed").

    A low temperature or top_k 1 forces tokens, so a processed log-probability goes to 0. A model that is
    always certain shows no difference and counts as raw: an error is better than a wrong number.
    """
    tempered = truncated = 0
    for prompt in MODE_PROMPTS:
        greedy = await sample(mode_call(prompt, temperature=0.0))
        tempered += _moved(greedy, await sample(mode_call(prompt, temperature=COLD)))
        truncated += _moved(greedy, await sample(mode_call(prompt, top_k=1)))
    if tempered <= 0:
        return "raw"
    return "processed" if truncated > 0 else "tempered"


def _moved(greedy: TokenLogprobs, forced: TokenLogprobs) -> int:
    """Number of tokens whose log-probability moved towards 0 when forced, minus those where it stayed."""
    score = 0
    for (token, p), (other, q) in zip(greedy, forced, strict=False):
        if token != other:
            break
        if p < CERTAIN:
            score += 1 if q > 0.7 * p else -1
    return score
