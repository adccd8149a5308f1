"""Adapters on a real vLLM, published while calls are in flight: none fails, and every token is its version's.

Everything sampled is scored again by transformers and peft.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests.real.vllm_server import serving_vllm
from transformers import AutoModelForCausalLM

from afield.engines.probe import checked
from afield.engines.torch.engine import TorchEngine
from afield.engines.vllm.engine import VllmEngine
from afield.errors import UsageError
from afield.gateway.engine_pool import EnginePool
from afield.interfaces import Chunk, Engine, GenerateRequest
from afield.interfaces.weight_probe import read_weight_probe
from afield.settings.trainer import LoraOptions
from afield.trainers.model import PolicyModel
from afield.types import FinishReason, Sampling
from support.gateways import POLICY

pytestmark = [pytest.mark.real, pytest.mark.anyio]
VERSIONS = 5
ROOM = 2
BOUND_S = 600
LONG = 500
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """By version; those of a policy whose adapters are shaken each time. Of version 0 there is none."""
    root = tmp_path_factory.mktemp("adapters")
    torch.set_num_threads(1)
    policy = PolicyModel(POLICY, device=torch.device("cpu"), lora=LoraOptions(rank=8))
    for version in range(1, VERSIONS):
        torch.manual_seed(version)
        for tensor in policy.trainable:
            tensor.data += 0.05 * torch.randn(tensor.shape)
        policy.export_adapter(root / str(version))
        assert read_weight_probe(root / str(version)) is not None
    return [root / str(version) for version in range(VERSIONS)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("server") / "vllm.log"
    options = ("--enable-lora", "--max-loras", str(ROOM), "--max-lora-rank", "8")
    with serving_vllm(POLICY, log, *options) as url:
        yield url


def a_call(*, stream: bool, n: int = LONG) -> GenerateRequest:
    return GenerateRequest(
        id="c",
        session_id="s",
        prompt_ids=tuple(4 + (7 * i) % 600 for i in range(50)),
        sampling=Sampling(),
        max_tokens=n,
        stop_ids=(),
        stream=stream,
    )


async def answer(engine: Engine, call: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(call)]


def versions(chunks: list[Chunk]) -> list[int]:
    """One for each token; -1 where calls on the base weights ran beside an adapter, which is not exact."""
    assert all(chunk.low in (0, chunk.high) and chunk.versions is None for chunk in chunks)
    return [chunk.low if chunk.low == chunk.high else -1 for chunk in chunks for _ in chunk.token_ids]


def check_tokens(chunks: list[Chunk], by_version: list[Any]) -> None:
    """Every token has the log-probability of the version it names, and not of another."""
    ids = [token for chunk in chunks for token in chunk.token_ids]
    drawn = torch.tensor([p for chunk in chunks for p in chunk.logprobs])
    named = torch.tensor(versions(chunks))
    prompt = a_call(stream=True).prompt_ids
    given = torch.tensor([[*prompt, *ids]])
    with torch.no_grad():
        scored = [model(given).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for model in by_version]
    of = torch.stack([s.gather(1, given[0, len(prompt) :, None])[:, 0] for s in scored])
    for version in set(named.tolist()) - {-1}:
        mine = named == version
        off = (of[:, mine] - drawn[mine]).abs().max(1).values
        assert off[version] < TOLERANCE
        if mine.sum() >= 40:
            assert (off > 100 * TOLERANCE).sum() == VERSIONS - 1


async def test_adapters_are_published_under_load_and_every_token_is_of_the_version_it_names(
    server: str, adapters: list[Path]
) -> None:
    by_version = [AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32).eval() for _ in adapters]
    for version in range(1, VERSIONS):
        wrapped: Any = peft.PeftModel.from_pretrained(by_version[version], str(adapters[version]))
        by_version[version] = wrapped.merge_and_unload().eval()
    workers: dict[str, Engine] = {"vllm": VllmEngine(server, vocab_size=656)}
    async with asyncio.timeout(BOUND_S), EnginePool(workers, check=checked) as pool:
        async with asyncio.TaskGroup() as group:
            calls = []
            for version in range(VERSIONS):
                if version:
                    await pool.load(version, str(adapters[version]))
                calls += [group.create_task(answer(pool, a_call(stream=stream))) for stream in (True, False)]
                await asyncio.sleep(0.3)
        assert pool.failovers == 0
        assert (await pool.info()).version == VERSIONS - 1
        first = await answer(pool, a_call(stream=False, n=1))
    answers = [call.result() for call in calls]
    assert versions(first) == [VERSIONS - 1]
    for number, chunks in enumerate(answers):
        named = versions_of_any(chunks)
        assert len(named) == LONG
        assert chunks[-1].finish is FinishReason.LENGTH
        exact = [version for version in named if version >= 0]
        assert exact == sorted(exact)
        if number >= 2:  # calls on the base weights may share a batch with an adapter, and have an interval
            assert exact == named
            assert named[0] == number // 2
    for chunks in answers[2:]:
        check_tokens(chunks, by_version)


def versions_of_any(chunks: list[Chunk]) -> list[int]:
    """Those of calls on the weights below the adapters come with the last chunk."""
    if chunks[-1].versions is None:
        return versions(chunks)
    return [span.low for span in chunks[-1].versions for _ in range(span.start, span.end)]


async def test_an_adapter_that_does_not_fit_is_refused_and_the_others_are_served(
    server: str, adapters: list[Path], tmp_path: Path
) -> None:
    policy = PolicyModel(POLICY, device=torch.device("cpu"), lora=LoraOptions(rank=16))
    policy.export_adapter(tmp_path / "wide")
    async with asyncio.timeout(BOUND_S), VllmEngine(server, vocab_size=656) as engine:
        served = (await engine.info()).version
        with pytest.raises(UsageError, match=r"did not take the adapter .*rank.*--max-lora-rank"):
            await engine.load(served + 1, str(tmp_path / "wide"))
        assert (await engine.info()).version == served
        assert len(await answer(engine, a_call(stream=False, n=3))) == 1


async def test_the_embedded_engine_and_vllm_give_an_adapter_the_same_probabilities(
    server: str, adapters: list[Path]
) -> None:
    """Greedy, after the same adapter: the one has it merged, the other beside."""
    call = GenerateRequest(
        id="c",
        session_id="s",
        prompt_ids=(5, 6, 7, 8),
        sampling=Sampling(temperature=0.0),
        max_tokens=30,
        stop_ids=(),
    )
    async with (
        asyncio.timeout(BOUND_S),
        VllmEngine(server, vocab_size=656) as one,
        TorchEngine(POLICY) as other,
    ):
        version = (await one.info()).version + 1
        for engine in (one, other):
            await engine.load(version, str(adapters[3]))
        first, second = await answer(one, call), await answer(other, call)
    assert [t for c in first for t in c.token_ids] == [t for c in second for t in c.token_ids]
    pairs = zip([p for c in first for p in c.logprobs], [p for c in second for p in c.logprobs], strict=True)
    assert max(abs(p - q) for p, q in pairs) < TOLERANCE
