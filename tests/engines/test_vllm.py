"""The vLLM client: what it sends, what it makes of answers, and what it refuses."""

from __future__ import annotations

import asyncio
import base64
import time
from contextlib import aclosing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from afield.engines.http import SseParser
from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.engines.vllm.engine import VllmEngine
from afield.errors import Conflict, Unavailable, UsageError
from afield.gateway.engine_pool import EnginePool
from afield.interfaces.engine import GenerateRequest, Image
from afield.types import FinishReason, Sampling, VersionSpan
from support.engine_calls import BOUND_S, a_call, answer, ids
from support.fake_vllm import FakeVllm, serving
from support.vllm_calls import connected, counting

pytestmark = pytest.mark.anyio


# --- events --------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 40), max_size=60), st.sampled_from([b"\n", b"\r\n"]))
def test_events_are_the_same_wherever_the_bytes_are_cut(cuts: list[int], end: bytes) -> None:
    lines = [
        'data: {"text": "größer 漢字"}',
        "",
        ": a comment",
        "",
        "data: [1,",
        "data: 2]",
        "",
        "data: x",
        "",
        "",
    ]
    stream = end.join(line.encode() for line in lines)
    events, found = SseParser(), []
    for size in [*cuts, len(stream)]:
        found += events.feed(stream[:size])
        stream = stream[size:]
    assert found == ['{"text": "größer 漢字"}'.encode(), b"[1,\n2]", b"x"]
    assert not events.unfinished


# --- good answers --------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_out", [True, False], ids=["generate", "completions"])
@pytest.mark.parametrize("pieces", [None, 7], ids=["whole frames", "frames in pieces"])
async def test_streamed_or_not_the_same_tokens_come(scale_out: bool, pieces: int | None) -> None:
    fake = FakeVllm(ScriptedEngine(counting), scale_out=scale_out, pieces=pieces)
    async with connected(fake) as engine:
        streamed = await answer(engine, a_call())
        whole = await answer(engine, a_call(stream=False))
    assert ids(streamed) == ids(whole) == list(range(20, 32))
    assert [p for c in streamed for p in c.logprobs] == [p for c in whole for p in c.logprobs]
    assert len(whole) == 1
    assert streamed[-1].finish is whole[-1].finish is FinishReason.LENGTH
    assert streamed[-1].versions == ((VersionSpan(0, 12, 0, 0),) if scale_out else None)


async def test_what_arrives_together_is_one_chunk() -> None:
    async with connected(FakeVllm(ScriptedEngine(counting))) as engine:
        chunks = engine.generate(a_call(max_tokens=30))
        first = await anext(chunks)
        await asyncio.sleep(0.2)
        async with aclosing(chunks):
            rest = [chunk async for chunk in chunks]
    assert len(first.token_ids) + len(ids(rest)) == 30
    assert len(rest) <= 2


async def test_the_body_says_what_the_call_says_and_nothing_of_the_server_s_defaults() -> None:
    fake = FakeVllm(ScriptedEngine(counting))
    async with connected(fake) as engine:
        await answer(engine, a_call(sampling=Sampling(temperature=0.7, top_p=0.9, top_k=4, seed=3)))
    body = fake.bodies[-1]
    assert body["token_ids"] == [5, 6, 7]
    assert body["sampling_params"] == {
        "max_tokens": 12,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 4,
        "seed": 3,
        "stop_token_ids": [0],
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    assert fake.sessions[-1] == "rollout.1"


async def test_versions_that_change_in_mid_answer_are_exact() -> None:
    def script(call: GenerateRequest) -> ScriptedReply:
        return ScriptedReply(token_ids=tuple(range(20, 32)), bump_after=5 if call.max_tokens == 12 else None)

    async with connected(FakeVllm(ScriptedEngine(script, version=3)), version=3) as engine:
        streamed = await answer(engine, a_call())
        assert streamed[-1].versions == (VersionSpan(0, 5, 3, 3), VersionSpan(5, 12, 4, 4))
        whole = await answer(engine, a_call(stream=False))
        assert [(len(c.token_ids), c.low, c.high) for c in whole] == [(5, 4, 4), (7, 5, 5)]
        assert [c.finish for c in whole] == [None, FinishReason.LENGTH]


async def test_a_label_that_is_no_number_is_the_version_given() -> None:
    async with connected(FakeVllm(ScriptedEngine(counting)), version=6) as engine:
        assert (await engine.info()).version == 6
        assert (await answer(engine, a_call()))[-1].versions == (VersionSpan(0, 12, 6, 6),)


async def test_images_go_beside_the_ids_and_the_expanded_prompt_comes_back() -> None:
    fake = FakeVllm(ScriptedEngine(counting, image_id=6, image_length=3))
    image = Image(digest="sha-1", media_type="image/png", data=b"\x89PNG")
    async with connected(fake, images=True) as engine:
        for stream in (True, False):
            chunks = await answer(engine, a_call(images=(image,), stream=stream))
            assert chunks[0].prompt_ids == (5, 6, 6, 6, 7)
        with_url = structs.replace(image, data=None, url="https://example.org/a.png")
        await answer(engine, a_call(images=(with_url,)))
    sent = "data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()
    assert fake.bodies[-2]["content_parts"] == [{"type": "image_url", "url": sent, "uuid": "sha-1"}]
    assert fake.bodies[-1]["content_parts"][0]["url"] == "https://example.org/a.png"
    async with connected(FakeVllm(ScriptedEngine(counting))) as engine:
        with pytest.raises(ValueError, match=r"has images, which http://.* does not take"):
            await answer(engine, a_call(images=(image,)))


# --- log-probabilities ---------------------------------------------------------------------------


async def test_a_server_with_raw_log_probabilities_is_found_out() -> None:
    async with connected(FakeVllm(ScriptedEngine(counting), raw=True)) as engine:
        info = await engine.info()
        assert info.logprobs == "raw"
        assert "--logprobs-mode processed_logprobs" in info.notes[0]
        for fine in (Sampling(), Sampling(temperature=0)):
            assert len(ids(await answer(engine, a_call(sampling=fine)))) == 12
        for wrong in (Sampling(temperature=0.5), Sampling(top_p=0.9), Sampling(top_k=5)):
            with pytest.raises(
                ValueError, match=r"before temperature and truncation; start vLLM with --logprobs-mode"
            ):
                await answer(engine, a_call(sampling=wrong))
    async with connected(FakeVllm(ScriptedEngine(counting))) as engine:
        assert (await engine.info()).logprobs == "processed"
        assert len(ids(await answer(engine, a_call(sampling=Sampling(top_k=5))))) == 12


# --- bad answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("scale_out", [True, False], ids=["generate", "completions"])
@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("500", "answers 500: EngineCore encountered an issue"),
        ("die", "closed the connection"),
        ("hang", "sent nothing for 1 s"),
        ("fewer", r"gave \d+ ids but \d+ log-probabilities"),
        ("nan", "sent an unexpected response"),
        ("null", "sent an unexpected response"),
        ("clamped", "has no finite log-probability"),
        ("garbage", "sent an unexpected response .*502 Bad Gateway"),
    ],
)
async def test_a_server_that_misbehaves_is_unavailable_and_named(
    fault: str, complaint: str, scale_out: bool, stream: bool
) -> None:
    fake = FakeVllm(ScriptedEngine(counting), scale_out=scale_out, faults=[fault])
    patience = 1.0 if fault == "hang" else 10.0
    async with connected(fake, idle_s=patience, answer_s=patience) as engine:
        with pytest.raises(Unavailable, match=f"{engine.url} {complaint}"):
            await answer(engine, a_call(stream=stream))
        assert len(ids(await answer(engine, a_call(stream=stream)))) == 12


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("error", "failed in the middle of a reply: out of memory"),
        ("no end", "ended a stream without a finish reason after 5"),
    ],
)
async def test_a_stream_that_ends_early_is_unavailable(fault: str, complaint: str) -> None:
    async with connected(FakeVllm(ScriptedEngine(counting), faults=[fault])) as engine:
        with pytest.raises(Unavailable, match=complaint):
            await answer(engine, a_call())


async def test_connection_refused_raises_unavailable() -> None:
    with pytest.raises(Unavailable, match=r"cannot connect to http://127.0.0.1:9: .*[Cc]onnect"):
        async with VllmEngine("http://127.0.0.1:9"):
            pass
    with pytest.raises(Unavailable, match="not connected; enter it"):
        await answer(VllmEngine("http://127.0.0.1:9"), a_call())


@pytest.mark.parametrize(("stream", "told"), [(False, "answers 400: "), (True, "refuses the call: ")])
async def test_a_prompt_the_server_refuses_is_the_callers_fault(stream: bool, told: str) -> None:
    async with connected(FakeVllm(ScriptedEngine(counting, vocab_size=100))) as engine:
        with pytest.raises(ValueError, match=f"{told}.*has the id 101"):
            await answer(engine, a_call(prompt_ids=(5, 101), stream=stream))


async def test_a_model_the_server_does_not_have_is_refused_with_those_it_has() -> None:
    with pytest.raises(UsageError, match="does not serve 'big'; choose one of: tiny"):
        async with connected(FakeVllm(ScriptedEngine(counting)), model="big"):
            pass


async def test_leaving_early_ends_the_call_at_the_server() -> None:
    inner = ScriptedEngine(lambda call: ScriptedReply(token_ids=(5,) * 500, delay_s=0.01))
    async with connected(FakeVllm(inner)) as engine:
        before = len(inner.recorded)
        async with aclosing(engine.generate(a_call(max_tokens=500))) as chunks:
            await anext(chunks)
        async with asyncio.timeout(60):
            while len(inner.recorded) == before:
                await asyncio.sleep(0.01)
        assert inner.recorded[-1].served == "abandoned"


# --- weights -------------------------------------------------------------------------------------


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


async def test_weights_are_swapped_in_a_pause_that_keeps_calls(weights: Path) -> None:
    inner = ScriptedEngine(lambda call: ScriptedReply(token_ids=tuple(range(20, 60)), delay_s=0.01))
    fake = FakeVllm(inner)
    async with connected(fake) as engine:
        call = asyncio.create_task(answer(engine, a_call(max_tokens=40)))
        await asyncio.sleep(0.1)
        await engine.load(2, str(weights))
        await engine.load(2, str(weights))
        chunks = await call
        assert [path.partition("?")[0] for path in fake.asked] == [
            "/pause",
            "/collective_rpc",
            "/update_weight_version",
            "/reset_prefix_cache",
            "/resume",
        ]
        assert (await engine.info()).version == 2
        with pytest.raises(Conflict, match="version 1 is older"):
            await engine.load(1, str(weights))
    assert ids(chunks) == list(range(20, 60))
    spans = chunks[-1].versions
    assert spans is not None
    assert [span.low for span in spans] == [0, 2]
    assert {(chunk.low, chunk.high) for chunk in chunks} == {(0, 0), (0, 2)}


async def test_a_pause_is_not_taken_for_a_hang() -> None:
    fake = FakeVllm(ScriptedEngine(lambda call: ScriptedReply(token_ids=(5,) * 20, delay_s=0.01)))
    async with connected(fake, idle_s=0.2) as engine:
        call = asyncio.create_task(answer(engine, a_call()))
        await asyncio.sleep(0.05)
        await engine.pause()
        await asyncio.sleep(0.6)
        assert not call.done()
        await engine.resume()
        assert len(ids(await call)) == 12


async def test_a_server_is_not_left_paused_and_one_that_is_is_not_waited_for() -> None:
    fake = FakeVllm(ScriptedEngine(counting))
    async with asyncio.timeout(BOUND_S), serving(fake) as url:
        async with VllmEngine(url) as engine:
            await engine.pause()
        assert fake.moving.is_set()
        fake.moving.clear()
        with pytest.raises(Unavailable, match="is paused; POST /resume there"):
            async with VllmEngine(url):
                pass


async def test_a_load_within_a_pause_leaves_the_server_paused(weights: Path) -> None:
    fake = FakeVllm(ScriptedEngine(counting))
    async with connected(fake) as engine:
        await engine.pause()
        await engine.load(1, str(weights))
        assert not fake.moving.is_set()
        await engine.resume()
        assert fake.moving.is_set()


async def test_a_server_that_failed_to_load_serves_nothing_until_it_has(tmp_path: Path) -> None:
    for name in ("broken", "good"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    async with connected(FakeVllm(ScriptedEngine(counting))) as engine:
        with pytest.raises(Unavailable, match="answers 500: no such tensor"):
            await engine.load(1, str(tmp_path / "broken"))
        with pytest.raises(Unavailable, match="failed to load version 1 and may hold parts of it"):
            await answer(engine, a_call())
        await engine.load(1, str(tmp_path / "good"))
        assert len(ids(await answer(engine, a_call()))) == 12


async def test_a_cache_that_cannot_be_reset_yet_is_reset_before_calls_continue(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("afield.engines.vllm.engine.RESET_PAUSES_S", (0.0, 0.01, 0.01, 0.01))
    fake = FakeVllm(ScriptedEngine(counting))
    async with connected(fake) as engine:
        fake.stuck = 2
        await engine.load(1, str(weights))
        assert fake.stuck == 0
        fake.stuck = 100
        with pytest.raises(Unavailable, match="keeps its prefix cache of the old weights"):
            await engine.load(2, str(weights))
        with pytest.raises(Unavailable, match="failed to load version 2"):
            await answer(engine, a_call())


@pytest.mark.parametrize("scale_out", [True, False], ids=["generate", "completions"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_server_that_was_started_again_is_found_out_by_its_answer(
    weights: Path, stream: bool, scale_out: bool
) -> None:
    fake = FakeVllm(ScriptedEngine(counting), scale_out=scale_out)
    async with connected(fake) as engine:
        await engine.load(3, str(weights))
        fake.restart(ScriptedEngine(counting))
        last = (await answer(engine, a_call(stream=stream)))[-1]
        told = last.versions or (VersionSpan(0, 12, last.low, last.high),)
        assert {span.low for span in told} == {0}
        with pytest.raises(Unavailable, match="lost version 3: it was restarted with older weights"):
            await answer(engine, a_call(stream=stream))
        await engine.load(3, str(weights))
        assert {chunk.low for chunk in await answer(engine, a_call(stream=stream))} == {3}


async def test_a_pool_brings_a_worker_that_was_started_again_to_its_weights(weights: Path) -> None:
    fake = FakeVllm(ScriptedEngine(counting), scale_out=False)
    async with asyncio.timeout(BOUND_S), serving(fake) as url, EnginePool({"a": VllmEngine(url)}) as pool:
        await pool.load(3, str(weights))
        fake.restart(ScriptedEngine(counting))
        answers = [await answer(pool, a_call(id=f"call-{n}")) for n in range(3)]
    versions = [chunks[-1].versions or (VersionSpan(0, 12, chunks[-1].low, 3),) for chunks in answers]
    assert [spans[0].low for spans in versions] == [0, 3, 3]


async def test_a_pause_whose_answer_got_lost_does_not_outlive_the_load(weights: Path) -> None:
    fake = FakeVllm(ScriptedEngine(counting))
    async with connected(fake) as engine:
        fake.lost_answers = ["/pause"]
        with pytest.raises(Unavailable, match="closed the connection"):
            await engine.load(1, str(weights))
        assert fake.moving.is_set()
        assert len(ids(await answer(engine, a_call()))) == 12


async def test_what_the_server_cannot_do_is_refused_with_the_remedy(weights: Path) -> None:
    async with connected(FakeVllm(ScriptedEngine(counting), dev=False, scale_out=False)) as engine:
        with pytest.raises(UsageError, match="start it with VLLM_SERVER_DEV_MODE=1"):
            await engine.load(1, str(weights))
        with pytest.raises(UsageError, match="VLLM_SERVER_DEV_MODE=1"):
            await engine.pause()
        info = await engine.info()
        assert not info.exact_versions
        assert "--enable-scale-out" in " ".join(info.notes)
    fake = FakeVllm(ScriptedEngine(counting))
    async with connected(fake) as engine:
        with pytest.raises(UsageError, match="is not a model directory"):
            await engine.load(1, str(weights / "nowhere"))
        assert not fake.asked


async def test_reading_a_long_stream_costs_little() -> None:
    """Processor time of client and fake server together; the client alone is a fraction of it."""
    inner = ScriptedEngine(lambda call: ScriptedReply(token_ids=(5,) * 4000, chunks=(1,)))
    async with connected(FakeVllm(inner)) as engine:
        started = time.process_time()
        chunks = await answer(engine, a_call(max_tokens=4000))
        spent = time.process_time() - started
    assert len(ids(chunks)) == 4000
    assert len(chunks) < 2000
    assert spent < 4.0
