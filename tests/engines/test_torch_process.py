"""The embedded engine in a process of its own: the same tokens, the same errors, and nothing outlives it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from contextlib import aclosing
from pathlib import Path

import pytest
from msgspec import structs

from afield.engines.torch.engine import TorchEngine
from afield.engines.torch.process import TorchEngineProcess
from afield.errors import Conflict, Unavailable, UsageError
from afield.interfaces.engine import Chunk, Engine, GenerateRequest
from afield.types import Sampling
from support.processes import alive
from support.tiny_model import build_tiny_model, reseed

pytestmark = pytest.mark.anyio
BOUND_S = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "v0", max_positions=9000)


def call(number: int, **values: object) -> GenerateRequest:
    prompt = tuple(3 + (number * 7 + n) % 380 for n in range(20 + 5 * number))
    first = GenerateRequest(
        id=f"c{number}",
        session_id=f"s{number}",
        prompt_ids=prompt,
        sampling=Sampling(),
        max_tokens=24,
        stop_ids=(),
    )
    return structs.replace(first, **values)


async def drain(engine: Engine, request: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request)]


def tokens(chunks: list[Chunk]) -> list[tuple[int, float]]:
    return [pair for c in chunks for pair in zip(c.token_ids, c.logprobs, strict=True)]


async def ended(pid: int) -> None:
    async with asyncio.timeout(BOUND_S):
        while alive(pid):
            await asyncio.sleep(0.05)


async def test_process_samples_what_the_engine_samples_in_this_process(model: Path, tmp_path: Path):
    new = reseed(model, tmp_path / "v1", seed=1)
    calls = [call(n, stream=n % 2 == 0, top_logprobs=n % 3) for n in range(6)]
    async with TorchEngine(model, seed=5) as local, TorchEngineProcess(model, seed=5) as engine:
        expected = [await drain(local, request) for request in calls]
        got = await asyncio.gather(*(drain(engine, request) for request in calls))
        for one, other in zip(expected, got, strict=True):
            assert [t for t, _ in tokens(one)] == [t for t, _ in tokens(other)]
            assert [p for _, p in tokens(other)] == pytest.approx([p for _, p in tokens(one)], abs=1e-4)
            assert len([top for c in other for top in c.top_logprobs]) == len(
                [t for c in one for t in c.top_logprobs]
            )
        assert await engine.info() == await local.info()

        for bad, error in [(call(1, prompt_ids=()), ValueError), (call(1, top_logprobs=99), ValueError)]:
            with pytest.raises(error, match="call 'c1'"):
                await drain(engine, bad)
        await engine.load(3, str(new))
        assert (await engine.info()).version == 3
        with pytest.raises(Conflict, match="older"):
            await engine.load(2, str(new))
        with pytest.raises(UsageError):
            await engine.load(4, str(tmp_path / "nowhere"))
        assert {c.low for c in await drain(engine, call(1))} == {3}

        async with aclosing(engine.generate(call(2, max_tokens=8000, stream=True))) as stream:
            await anext(stream)
        assert len(tokens(await drain(engine, call(3)))) == 24

        asking = asyncio.create_task(drain(engine, call(4, max_tokens=8000)))
        await asyncio.sleep(0.2)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="ended with signal SIGKILL"):
            await asking
        with pytest.raises(Unavailable, match="SIGKILL"):
            await drain(engine, call(5))


async def test_a_model_that_cannot_be_loaded_is_refused_with_the_reason(tmp_path: Path):
    with pytest.raises(UsageError, match="nowhere"):
        async with TorchEngineProcess(tmp_path / "nowhere"):
            pass


OWNER = """
import asyncio, sys
from afield.engines.torch.process import TorchEngineProcess

async def main():
    engine = TorchEngineProcess(sys.argv[1])
    starting = asyncio.create_task(engine.__aenter__())
    while engine.pid is None:
        await asyncio.sleep(0.01)
    if sys.argv[2] == "started":
        await starting
    print(engine.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("state", ["started", "loading"])
async def test_engine_process_ends_with_an_owner_that_was_killed(model: Path, tmp_path: Path, state: str):
    if state == "loading":  # for ever: the weights are a pipe that nobody writes to
        model = shutil.copytree(model, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
        os.mkfifo(model / "model.safetensors")
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, str(model), state, stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    pid = int(await owner.stdout.readline())
    owner.kill()
    await owner.wait()
    await ended(pid)
