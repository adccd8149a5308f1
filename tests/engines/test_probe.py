"""The probe: a worker that keeps the promises passes, and each broken promise is named."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest
from msgspec import structs

from afield.engines.probe import checked, probe
from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.engines.torch.engine import TorchEngine
from afield.engines.vllm.engine import VllmEngine
from afield.errors import UsageError
from afield.gateway.engine_pool import EnginePool
from afield.interfaces.engine import Chunk, EngineInfo, GenerateRequest
from afield.types import FinishReason
from support.fake_vllm import FakeVllm, serving
from support.tiny_model import build_tiny_model

pytestmark = pytest.mark.anyio


def script(call: GenerateRequest) -> ScriptedReply:
    start = sum(call.prompt_ids)
    return ScriptedReply(token_ids=tuple((start + 7 * n) % 400 for n in range(40)), chunks=(1, 3))


Change = Callable[[GenerateRequest, Chunk], Chunk]


class Worker(ScriptedEngine):
    """Keeps every promise, but for what `change` does to a chunk."""

    def __init__(self, change: Change = lambda call, chunk: chunk) -> None:
        super().__init__(script, max_context=128, vocab_size=400)
        self._change = change

    async def generate(self, call: GenerateRequest) -> AsyncGenerator[Chunk]:
        forced = call.sampling.top_k == 1 or 0 < call.sampling.temperature < 0.2
        async with aclosing(super().generate(call)) as chunks:
            async for chunk in chunks:
                if forced:
                    chunk = structs.replace(chunk, logprobs=(0.0,) * len(chunk.logprobs))
                yield self._change(call, chunk)


async def test_a_worker_that_keeps_its_promises_passes() -> None:
    async with Worker() as worker:
        report = await probe(worker)
    assert report.seeded
    assert report.info.notes == ()
    assert report.info.max_context == 128


async def test_the_embedded_engine_passes(tmp_path: Path) -> None:
    async with TorchEngine(build_tiny_model(tmp_path / "model", max_positions=128)) as engine:
        report = await probe(engine)
    assert report.info.logprobs == "processed"
    assert report.seeded


async def test_a_downgrade_the_engine_admits_is_a_note() -> None:
    async with serving(FakeVllm(ScriptedEngine(script), raw=True)) as url, VllmEngine(url) as engine:
        report = await probe(engine)
    assert report.info.logprobs == "raw"
    assert "--logprobs-mode processed_logprobs" in report.info.notes[0]


def shifted(call: GenerateRequest, chunk: Chunk) -> Chunk:
    return structs.replace(chunk, token_ids=tuple((t + call.stream) % 400 for t in chunk.token_ids))


def without_stop(call: GenerateRequest, chunk: Chunk) -> Chunk:
    if not call.stop_ids or chunk.finish is None:
        return chunk
    return structs.replace(chunk, token_ids=chunk.token_ids[:-1], logprobs=chunk.logprobs[:-1])


def never_forced(call: GenerateRequest, chunk: Chunk) -> Chunk:
    return structs.replace(chunk, logprobs=(-1.0,) * len(chunk.logprobs))


def untruncated(call: GenerateRequest, chunk: Chunk) -> Chunk:
    forced = 0 < call.sampling.temperature < 0.2
    return structs.replace(chunk, logprobs=(0.0 if forced else -1.0,) * len(chunk.logprobs))


def missing(call: GenerateRequest, chunk: Chunk) -> Chunk:
    return structs.replace(chunk, logprobs=chunk.logprobs[:-1])


def not_a_number(call: GenerateRequest, chunk: Chunk) -> Chunk:
    return structs.replace(chunk, logprobs=(*chunk.logprobs[:-1], float("nan")))


def stopping(call: GenerateRequest, chunk: Chunk) -> Chunk:
    return structs.replace(chunk, finish=FinishReason.STOP) if chunk.finish else chunk


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (shifted, "greedy sampling must give the same tokens"),
        (without_stop, "a stop id ends the call and is its last token"),
        (never_forced, "reports raw log-probabilities but claims"),
        (untruncated, "reports tempered log-probabilities but claims"),
        (missing, "each token needs a finite one"),
        (not_a_number, "each token needs a finite one"),
        (stopping, "it must stop only at the ids of the call"),
    ],
)
async def test_a_broken_promise_is_refused_by_name(change: Change, complaint: str) -> None:
    async with Worker(change) as worker:
        with pytest.raises(UsageError, match=complaint):
            await probe(worker)


@pytest.mark.parametrize(
    ("claim", "complaint"),
    [
        ({"vocab_size": 50}, "outside its vocabulary of 50"),
        ({"max_context": 200}, "claims a context of 200 but refuses a prompt of 199"),
        ({"max_context": 100}, "its context of 100 allows 1"),
    ],
)
async def test_a_claim_that_does_not_hold_is_refused(claim: dict[str, int], complaint: str) -> None:
    async with Worker() as worker:
        with pytest.raises(UsageError, match=complaint):
            await probe(Claims(worker, claim))


class Claims:
    """An engine's answers under other claims than its own."""

    def __init__(self, worker: Worker, claim: dict[str, int]) -> None:
        self._worker, self._claim = worker, claim

    async def __aenter__(self) -> Claims:
        return self

    async def __aexit__(self, *exc: object) -> None: ...

    async def info(self) -> EngineInfo:
        return structs.replace(await self._worker.info(), **self._claim)

    async def load(self, version: int, path: str) -> None:
        await self._worker.load(version, path)

    def generate(self, call: GenerateRequest) -> AsyncGenerator[Chunk]:
        return self._worker.generate(call)


async def test_a_pool_takes_only_workers_that_pass() -> None:
    async with EnginePool(
        {"a": Worker()}, connect=lambda kind, url: Worker(never_forced), check=checked
    ) as pool:
        with pytest.raises(UsageError, match="reports raw"):
            await pool.add("scripted", "http://elsewhere")
        assert [worker.id for worker in pool.list()] == ["a"]
