"""What every engine promises. A new engine adds a fixture parameter here and is done when it passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import msgspec
import pytest

from afield.engines.recording import RecordingEngine
from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.engines.sglang.engine import SglangEngine
from afield.engines.torch.engine import TorchEngine
from afield.engines.vllm.engine import VllmEngine
from afield.errors import Conflict, Unavailable
from afield.gateway.engine_pool import EnginePool
from afield.interfaces.engine import Chunk, Engine, GenerateRequest
from afield.types import FinishReason, Sampling
from support.fake_sglang import FakeSglang, serving_sglang
from support.fake_vllm import FakeVllm, serving
from support.tiny_model import build_tiny_model, reseed

pytestmark = pytest.mark.anyio
BOUND_S = 60


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    first = build_tiny_model(root / "v0", max_positions=128)
    return [first, reseed(first, root / "v1", 1), reseed(first, root / "v2", 2)]


def nonsense(call: GenerateRequest) -> ScriptedReply:
    """Depends on the prompt only, like a greedy model."""
    start = sum(call.prompt_ids)
    return ScriptedReply(token_ids=tuple((start + 7 * n) % 400 for n in range(200)), chunks=(1, 3, 2))


# Servers are stood in for by small ones that speak their format; the real one is in tests/real.
ENGINES = [
    "scripted",
    "torch",
    "ledger over torch",
    "pool of two",
    "vllm",
    "vllm without scale-out",
    "sglang",
]


@pytest.fixture(params=ENGINES)
async def engine(request: pytest.FixtureRequest, models: list[Path]) -> AsyncIterator[Engine]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(BOUND_S))
        made = await make_engine(request.param, models, stack)
        yield await stack.enter_async_context(made)


async def make_engine(name: str, models: list[Path], stack: AsyncExitStack) -> Engine:
    if name == "torch":
        return TorchEngine(models[0], max_slots=4)
    if name == "ledger over torch":
        return RecordingEngine(TorchEngine(models[0], max_slots=4))
    if name == "pool of two":
        return EnginePool({worker: TorchEngine(models[0], max_slots=4) for worker in "ab"})
    scripted = ScriptedEngine(nonsense, max_context=128, vocab_size=400)
    if name.startswith("vllm"):
        fake = FakeVllm(scripted, scale_out=name == "vllm")
        return VllmEngine(await stack.enter_async_context(serving(fake)), vocab_size=400)
    if name == "sglang":
        url = await stack.enter_async_context(serving_sglang(FakeSglang(scripted)))
        return SglangEngine(url, vocab_size=400)
    return scripted


def a_call(**changes: object) -> GenerateRequest:
    call = GenerateRequest(
        id="call-1",
        session_id="rollout.1",
        prompt_ids=tuple(range(20, 40)),
        sampling=Sampling(),
        max_tokens=12,
        stop_ids=(),
    )
    return msgspec.structs.replace(call, **changes)


async def answer(engine: Engine, call: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(call)]


def ids(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


async def test_info_says_what_is_served(engine: Engine) -> None:
    info = await engine.info()
    assert (info.version, info.max_context, info.vocab_size) == (0, 128, 400)
    assert info.kind


async def test_streaming_and_not_streaming_give_the_same_tokens(engine: Engine) -> None:
    whole, streamed = await answer(engine, a_call()), await answer(engine, a_call(stream=True))
    assert ids(whole) == ids(streamed)
    assert len(ids(whole)) == 12
    assert len(whole) == 1
    assert len(streamed) > 1


@pytest.mark.parametrize("stream", [False, True])
async def test_the_top_logprobs_tokens_of_greedy_calls_begin_with_the_sampled_one(
    engine: Engine, stream: bool
) -> None:
    greedy = a_call(stream=stream, sampling=Sampling(temperature=0.0), top_logprobs=3)
    chunks = await answer(engine, greedy)
    tops = [top for chunk in chunks for top in chunk.top_logprobs]
    sampled = [pair for chunk in chunks for pair in zip(chunk.token_ids, chunk.logprobs, strict=True)]
    assert [top[0] for top in tops] == sampled
    assert [len(chunk.top_logprobs) for chunk in chunks] == [len(chunk.token_ids) for chunk in chunks]
    for top in tops:
        assert len(top) == len({token for token, _ in top}) == 3
        assert [p for _, p in top] == sorted((p for _, p in top), reverse=True)
    assert all(not chunk.top_logprobs for chunk in await answer(engine, a_call(stream=stream)))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_scored_with_the_first_chunk(engine: Engine, stream: bool) -> None:
    call = a_call(stream=stream, prompt_logprobs=2)
    first, *later = await answer(engine, call)
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == len(call.prompt_ids)
    assert first.prompt_logprobs[0] == ()
    assert [top[0][0] for top in first.prompt_logprobs[1:]] == list(call.prompt_ids[1:])
    assert all(2 <= len(top) <= 3 for top in first.prompt_logprobs[1:])
    assert all(chunk.prompt_logprobs is None for chunk in later)
    again, *_ = await answer(engine, msgspec.structs.replace(call, prompt_logprobs=0))
    assert again.prompt_logprobs is not None
    assert [top[0] for top in again.prompt_logprobs[1:]] == [top[0] for top in first.prompt_logprobs[1:]]


async def test_more_log_probabilities_than_there_are_to_be_had_are_refused(engine: Engine) -> None:
    most = (await engine.info()).max_top_logprobs
    assert most == 20
    with pytest.raises(ValueError, match="top_logprobs"):
        await answer(engine, a_call(top_logprobs=most + 1))


@pytest.mark.parametrize("stream", [False, True])
async def test_exactly_the_last_chunk_has_a_finish(engine: Engine, stream: bool) -> None:
    chunks = await answer(engine, a_call(stream=stream))
    assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + [FinishReason.LENGTH]


@pytest.mark.parametrize("stream", [False, True])
async def test_every_token_has_one_log_probability(engine: Engine, stream: bool) -> None:
    for chunk in await answer(engine, a_call(stream=stream)):
        assert chunk.token_ids
        assert len(chunk.token_ids) == len(chunk.logprobs)
        assert all(logprob <= 0 for logprob in chunk.logprobs)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_id_ends_the_call_and_is_included(engine: Engine, stream: bool) -> None:
    free = ids(await answer(engine, a_call()))
    stop = free[5]
    chunks = await answer(engine, a_call(stop_ids=(399, stop), stream=stream))
    assert ids(chunks) == free[: free.index(stop) + 1]
    assert chunks[-1].finish is FinishReason.STOP


async def test_the_end_of_the_context_ends_the_call(engine: Engine) -> None:
    chunks = await answer(engine, a_call(prompt_ids=tuple(range(125)), max_tokens=50))
    assert len(ids(chunks)) == 3
    assert chunks[-1].finish is FinishReason.LENGTH


async def test_many_calls_at_once_are_all_answered(engine: Engine) -> None:
    calls = [a_call(id=f"call-{n}", prompt_ids=tuple(range(n, n + 30)), stream=n % 2 == 0) for n in range(20)]
    answers = await asyncio.gather(*(answer(engine, call) for call in calls))
    assert [len(ids(chunks)) for chunks in answers] == [12] * 20


async def test_new_weights_are_served_and_repeating_a_version_is_harmless(
    engine: Engine, models: list[Path]
) -> None:
    await engine.load(3, str(models[1]))
    await engine.load(3, str(models[1]))
    assert (await engine.info()).version == 3
    assert {(chunk.low, chunk.high) for chunk in await answer(engine, a_call(stream=True))} == {(3, 3)}


async def test_an_older_version_is_refused(engine: Engine, models: list[Path]) -> None:
    await engine.load(3, str(models[1]))
    with pytest.raises(Conflict, match="version 2 is older than version 3"):
        await engine.load(2, str(models[2]))
    assert (await engine.info()).version == 3


async def test_closing_early_abandons_the_call_and_the_engine_continues(engine: Engine) -> None:
    for n in range(10):
        async with aclosing(engine.generate(a_call(id=f"short-{n}", stream=True, max_tokens=100))) as chunks:
            async for _ in chunks:
                break
    assert len(ids(await answer(engine, a_call()))) == 12


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"prompt_ids": ()}, "empty prompt"),
        ({"prompt_ids": tuple(range(128))}, "prompt of 128 ids; the context of 128 leaves room for 127"),
        ({"prompt_ids": (5, 400)}, "has the id 400; the vocabulary has 400"),
        ({"prompt_ids": (5, -1)}, "has the id -1"),
        ({"max_tokens": 0}, "has max_tokens 0"),
    ],
)
async def test_a_call_that_cannot_be_answered_is_refused_by_name(
    engine: Engine, changes: dict[str, object], complaint: str
) -> None:
    # A server looks at the ids itself, and does not know what we call the call.
    with pytest.raises(ValueError, match=f"call '.*' .*{complaint}"):
        await answer(engine, a_call(**changes))
    assert len(ids(await answer(engine, a_call()))) == 12


async def test_a_closed_engine_is_unavailable(models: list[Path]) -> None:
    for engine in (TorchEngine(models[0]), ScriptedEngine(nonsense)):
        async with asyncio.timeout(BOUND_S), engine:
            await answer(engine, a_call())
        with pytest.raises(Unavailable):
            await answer(engine, a_call())
        with pytest.raises(Unavailable):
            await engine.load(1, str(models[1]))
