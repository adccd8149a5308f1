"""The SGLang client, against a server that speaks the format of SGLang 0.5.23 as its source has it.

No reply was recorded from a running SGLang: it has no package for CPUs. Replies recorded elsewhere with
`scripts/record_sglang.py` are read from tests/fixtures/sglang when they are there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from msgspec import structs

from afield.engines.scripted import Scripted, ScriptedEngine
from afield.engines.sglang import SglangEngine
from afield.errors import Conflict, Unavailable
from afield.seams.engine import Call, Chunk, Engine, Image
from afield.types import FinishReason, Sampling, VersionSpan
from fake_sglang import FakeSglang, serving_sglang

pytestmark = pytest.mark.anyio
BOUND_S = 20
RECORDED = Path(__file__).parent / "fixtures" / "sglang"


def a_call(**changes: Any) -> Call:
    call = Call(
        id="call-1",
        session_id="rollout.1",
        prompt_ids=(5, 6, 7),
        sampling=Sampling(),
        max_tokens=12,
        stop_ids=(0,),
        stream=True,
    )
    return structs.replace(call, **changes)


def counting(call: Call) -> Scripted:
    return Scripted(token_ids=tuple(range(20, 60)), chunks=(1, 2), delay_s=0.002)


async def answer(engine: Engine, call: Call) -> list[Chunk]:
    async with asyncio.timeout(BOUND_S):
        return [chunk async for chunk in engine.generate(call)]


def ids(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


@asynccontextmanager
async def connected(fake: FakeSglang, **options: Any) -> AsyncIterator[SglangEngine]:
    async with asyncio.timeout(BOUND_S), serving_sglang(fake) as url, SglangEngine(url, **options) as engine:
        yield engine


@pytest.mark.parametrize("incremental", [False, True], ids=["cumulative", "incremental"])
async def test_streamed_or_not_the_same_tokens_come(incremental: bool) -> None:
    async with connected(FakeSglang(ScriptedEngine(counting), incremental=incremental)) as engine:
        streamed = await answer(engine, a_call())
        whole = await answer(engine, a_call(stream=False))
    assert ids(streamed) == ids(whole) == list(range(20, 32))
    assert [p for c in streamed for p in c.logprobs] == [p for c in whole for p in c.logprobs]
    assert len(streamed) > 1
    assert streamed[-1].finish is whole[-1].finish is FinishReason.LENGTH


async def test_the_body_says_what_the_call_says() -> None:
    fake = FakeSglang(ScriptedEngine(counting))
    async with connected(fake) as engine:
        await answer(engine, a_call(sampling=Sampling(temperature=0.7, seed=3)))
    assert fake.bodies[-1] == {
        "input_ids": [5, 6, 7],
        "sampling_params": {
            "max_new_tokens": 12,
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": -1,
            "stop_token_ids": [0],
            "ignore_eos": True,
            "no_stop_trim": True,
            "sampling_seed": 3,
        },
        "return_logprob": True,
        "stream": True,
    }


@pytest.mark.parametrize("stream", [True, False])
async def test_versions_are_exact_where_told_and_intervals_otherwise(stream: bool) -> None:
    def script(call: Call) -> Scripted:
        return Scripted(token_ids=tuple(range(20, 32)), bump_after=5 if call.max_tokens == 12 else None)

    async with connected(FakeSglang(ScriptedEngine(script, version=3)), version=3) as engine:
        chunks = await answer(engine, a_call(stream=stream))
        if stream:
            assert chunks[-1].versions == (VersionSpan(0, 5, 3, 3), VersionSpan(5, 12, 4, 4))
        else:
            assert [(len(c.token_ids), c.low, c.high) for c in chunks] == [(5, 3, 3), (7, 4, 4)]
    async with connected(FakeSglang(ScriptedEngine(script, version=3), spans=False), version=3) as engine:
        chunks = await answer(engine, a_call(stream=stream))
        assert chunks[-1].versions is None
        assert (chunks[-1].low, chunks[-1].high) == (3, 4)


async def test_log_probabilities_before_truncation_are_refused_where_that_matters() -> None:
    async with connected(FakeSglang(ScriptedEngine(counting))) as engine:
        assert (await engine.info()).logprobs == "tempered"
        await answer(engine, a_call(sampling=Sampling(temperature=0.5)))
        with pytest.raises(ValueError, match="are those before truncation; ask for top_p 1"):
            await answer(engine, a_call(sampling=Sampling(top_p=0.9)))
    async with connected(FakeSglang(ScriptedEngine(counting), original=True)) as engine:
        assert (await engine.info()).logprobs == "raw"
        with pytest.raises(ValueError, match="before temperature and truncation"):
            await answer(engine, a_call(sampling=Sampling(temperature=0.5)))


@pytest.mark.parametrize("incremental", [False, True], ids=["cumulative", "incremental"])
@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("die", "broke off"),
        ("error", "gave up in mid-answer: out of memory"),
        ("fewer", r"gave \d+ ids and \d+ log-probabilities"),
        ("other", "gave log-probabilities of other tokens"),
        ("lowest", "has no finite log-probability"),
    ],
)
async def test_a_server_that_misbehaves_is_unavailable_and_named(
    fault: str, complaint: str, incremental: bool
) -> None:
    fake = FakeSglang(ScriptedEngine(counting), faults=[fault], incremental=incremental)
    async with connected(fake) as engine:
        with pytest.raises(Unavailable, match=f"{engine.url} {complaint}"):
            await answer(engine, a_call())
        assert len(ids(await answer(engine, a_call()))) == 12


async def test_weights_are_swapped_while_calls_are_retracted(tmp_path: Path) -> None:
    for name in ("broken", "good"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    fake = FakeSglang(ScriptedEngine(counting))
    async with connected(fake) as engine:
        with pytest.raises(Unavailable, match=r"did not load .*Failed to get model"):
            await engine.load(1, str(tmp_path / "broken"))
        with pytest.raises(Unavailable, match="may hold parts of it"):
            await answer(engine, a_call())
        await engine.load(2, str(tmp_path / "good"))
        assert [path for path, _ in fake.asked[-3:]] == [
            "/pause_generation",
            "/update_weights_from_disk",
            "/continue_generation",
        ]
        assert fake.asked[-3][1] == {"mode": "retract"}
        assert (await engine.info()).version == 2
        assert (await answer(engine, a_call()))[-1].versions == (VersionSpan(0, 12, 2, 2),)
        with pytest.raises(Conflict):
            await engine.load(1, str(tmp_path / "good"))


async def test_images_go_beside_the_ids() -> None:
    fake = FakeSglang(ScriptedEngine(counting, image_id=6, image_length=3), images=True)
    image = Image(digest="d", media_type="image/png", url="https://example.org/a.png")
    async with connected(fake) as engine:
        assert (await engine.info()).images
        for stream in (True, False):
            chunks = await answer(engine, a_call(images=(image,), stream=stream))
            assert [chunk.prompt_ids for chunk in chunks if chunk.prompt_ids] == [(5, 6, 6, 6, 7)]
    assert fake.bodies[-1]["image_data"] == ["https://example.org/a.png"]


@pytest.mark.parametrize("name", ["whole", "stream"])
async def test_replies_of_a_real_server_are_read(name: str) -> None:
    path = RECORDED / f"{name}.json"
    if not path.exists():
        pytest.skip("no reply of a real SGLang was recorded; see scripts/record_sglang.py")
    recorded = json.loads(path.read_text())

    async def replay(request: web.Request) -> web.Response:
        body = await request.json()
        if body["input_ids"] != recorded["body"]["input_ids"]:
            return web.json_response(recorded["probe"])
        return web.Response(text=recorded["reply"], content_type=recorded["content_type"])

    app = web.Application()
    app.router.add_post("/generate", replay)
    for route in ("/v1/models", "/model_info"):
        app.router.add_get(route, lambda request: web.json_response(recorded[request.path]))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        async with SglangEngine(f"http://{host}:{port}") as engine:
            prompt = tuple(recorded["body"]["input_ids"])
            chunks = await answer(engine, a_call(prompt_ids=prompt, stream=name == "stream"))
            assert ids(chunks) == recorded["output_ids"]
            assert chunks[-1].finish is not None
    finally:
        await runner.cleanup()
