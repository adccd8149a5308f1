"""The SGLang client, against a small server that speaks its format, and against what a real one answered.

The real one was SGLang 0.5.23 on a CPU, in float32, with the demo policy; see `scripts/record_sglang.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from afield.engines.probe import probe
from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.engines.sglang.engine import SglangEngine
from afield.errors import Conflict, Unavailable, UsageError
from afield.interfaces.engine import Chunk, GenerateRequest, Image
from afield.types import FinishReason, Sampling, VersionSpan
from support.engine_calls import BOUND_S, a_call, answer, begin, counting_on, finish, ids, versions
from support.fake_sglang import FakeSglang, serving_sglang
from support.replay_sglang import replaying

pytestmark = pytest.mark.anyio


def counting(call: GenerateRequest) -> ScriptedReply:
    return ScriptedReply(token_ids=tuple(range(20, 60)), chunks=(1, 2), delay_s=0.002)


def logprobs(chunks: list[Chunk]) -> list[float]:
    return [p for chunk in chunks for p in chunk.logprobs]


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
            "ignore_eos": False,
            "no_stop_trim": True,
            "sampling_seed": 3,
        },
        "return_logprob": True,
        "stream": True,
    }


@pytest.mark.parametrize("stream", [True, False])
async def test_versions_are_exact_where_the_engine_reports_them_and_intervals_otherwise(stream: bool) -> None:
    def script(call: GenerateRequest) -> ScriptedReply:
        return ScriptedReply(token_ids=tuple(range(20, 32)), bump_after=5 if call.max_tokens == 12 else None)

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
        with pytest.raises(ValueError, match="reports log-probabilities before truncation; ask for top_p 1"):
            await answer(engine, a_call(sampling=Sampling(top_p=0.9)))
    async with connected(FakeSglang(ScriptedEngine(counting), original=True)) as engine:
        assert (await engine.info()).logprobs == "raw"
        with pytest.raises(ValueError, match="before temperature and truncation"):
            await answer(engine, a_call(sampling=Sampling(temperature=0.5)))


@pytest.mark.parametrize("incremental", [False, True], ids=["cumulative", "incremental"])
@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("die", "closed the connection"),
        ("error", "failed in the middle of a reply: out of memory"),
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


async def test_a_refusal_in_a_stream_is_the_callers_fault() -> None:
    async with connected(FakeSglang(ScriptedEngine(counting), faults=["refused"])) as engine:
        with pytest.raises(ValueError, match=f"{engine.url} refuses the call: Input length"):
            await answer(engine, a_call())


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
        assert [path for path, _ in fake.asked[-4:]] == [
            "/pause_generation",
            "/flush_cache",
            "/update_weights_from_disk",
            "/continue_generation",
        ]
        assert fake.asked[-4][1] == {"mode": "retract"}
        assert (await engine.info()).version == 2
        assert (await answer(engine, a_call()))[-1].versions == (VersionSpan(0, 12, 2, 2),)
        with pytest.raises(Conflict):
            await engine.load(1, str(tmp_path / "good"))


@pytest.fixture
def weights(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("incremental", [False, True], ids=["cumulative", "incremental"])
async def test_calls_that_keep_a_server_from_flushing_are_ended_and_continue(
    weights: str, stream: bool, incremental: bool
) -> None:
    fake = FakeSglang(ScriptedEngine(counting_on), flushes_waiting=False, incremental=incremental)
    async with connected(fake) as engine:
        call = await begin(fake, engine, a_call(max_tokens=30, stream=stream))
        await engine.load(1, weights)
        await engine.load(2, weights)
        chunks = await finish(fake, call)
    assert not fake.dead
    assert ids(chunks) == list(range(8, 38))
    assert chunks[-1].finish is FinishReason.LENGTH
    spans = chunks[-1].versions or tuple(_spans_of(chunks))
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == 30
    assert (spans[0].low, spans[-1].low) == (0, 2)


def _spans_of(chunks: list[Chunk]) -> list[VersionSpan]:
    spans, start = list[VersionSpan](), 0
    for chunk in chunks:
        spans.append(VersionSpan(start, start + len(chunk.token_ids), chunk.low, chunk.high))
        start = spans[-1].end
    return spans


async def test_weights_may_take_longer_to_load_than_a_call_may_be_silent(weights: str) -> None:
    fake = FakeSglang(SlowToLoad(counting_on))
    async with connected(fake, idle_s=0.3) as engine:
        call = await begin(fake, engine, a_call(max_tokens=10))
        await engine.load(1, weights)
        assert ids(await finish(fake, call)) == list(range(8, 18))


class SlowToLoad(ScriptedEngine):
    async def load(self, version: int, path: str) -> None:
        await asyncio.sleep(0.6)
        await super().load(version, path)


@pytest.mark.parametrize("spans", [True, False], ids=["exact", "intervals"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_server_that_was_started_again_is_found_out_by_its_answer(
    weights: str, stream: bool, spans: bool
) -> None:
    fake = FakeSglang(ScriptedEngine(counting), spans=spans)
    async with connected(fake) as engine:
        await engine.load(3, weights)
        fake.restart(ScriptedEngine(counting))
        chunks = await answer(engine, a_call(stream=stream))
        told = chunks[-1].versions or tuple(_spans_of(chunks))
        assert {(span.low, span.high) for span in told} == {(0, 0)}
        with pytest.raises(Unavailable, match="lost version 3: it was restarted with older weights"):
            await answer(engine, a_call(stream=stream))
        assert (await engine.info()).version == 0
        await engine.load(3, weights)
        assert {chunk.low for chunk in await answer(engine, a_call(stream=stream))} == {3}


async def test_images_go_beside_the_ids() -> None:
    fake = FakeSglang(ScriptedEngine(counting, image_id=6, image_length=3), images=True)
    image = Image(digest="d", media_type="image/png", url="https://example.org/a.png")
    async with connected(fake) as engine:
        assert (await engine.info()).images
        for stream in (True, False):
            chunks = await answer(engine, a_call(images=(image,), stream=stream))
            assert [chunk.prompt_ids for chunk in chunks if chunk.prompt_ids] == [(5, 6, 6, 6, 7)]
    assert fake.bodies[-1]["image_data"] == ["https://example.org/a.png"]


async def test_ids_that_would_end_the_server_never_reach_it() -> None:
    fake = FakeSglang(ScriptedEngine(counting))
    async with connected(fake, vocab_size=100) as engine:
        asked = len(fake.bodies)
        for stray in (100, -1):
            with pytest.raises(ValueError, match=f"has the id {stray}; the vocabulary has 100"):
                await answer(engine, a_call(prompt_ids=(5, stray, 7)))
        assert len(fake.bodies) == asked


# --- what a real server answered -----------------------------------------------------------------

FREE = [402, 402, 402, 597, 426, 402, 4, 2, 4, 2, 4, 2]
OWN_END = 2  # the end id of the model that was served


# --- adapters ------------------------------------------------------------------------------------


def adapter(path: Path, name: str) -> str:
    (path / name).mkdir()
    (path / name / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    return str(path / name)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_keeps_the_adapter_it_began_with(tmp_path: Path, stream: bool) -> None:
    fake = FakeSglang(ScriptedEngine(counting_on), loras=4)
    async with connected(fake) as engine:
        begun = []
        for version in (1, 2, 3):
            path = adapter(tmp_path, str(version))
            async with SglangEngine(engine.url) as other:  # of another process, and first
                await other.load(version, path)
            await engine.load(version, path)
            begun.append(await begin(fake, engine, a_call(max_tokens=30, stream=stream)))
        assert (await engine.info()).version == 3
        for version, call in enumerate(begun, 1):
            chunks = await finish(fake, call)
            assert ids(chunks) == list(range(8, 38))
            assert versions(chunks) == [version] * 30
        await engine.load(4, adapter(tmp_path, "4"))
        assert [name[:9] for name in fake.adapters] == ["policy-v3", "policy-v4"]
    assert "/pause_generation" not in {path for path, _ in fake.asked}


@pytest.mark.parametrize("stream", [True, False])
async def test_there_are_never_more_versions_in_use_than_the_server_has_room_for(
    tmp_path: Path, stream: bool
) -> None:
    fake = FakeSglang(ScriptedEngine(counting_on), loras=2)
    async with connected(fake) as engine:
        begun = []
        for version in (1, 2, 3, 4):
            await engine.load(version, adapter(tmp_path, str(version)))
            begun.append(await begin(fake, engine, a_call(max_tokens=50, stream=stream)))
        answers = [await finish(fake, call) for call in begun]
    assert fake.most_at_once == 2
    assert all(ids(chunks) == list(range(8, 58)) for chunks in answers)
    assert all(versions(chunks) == sorted(versions(chunks)) for chunks in answers)
    assert len({*versions(answers[0])}) > 1


async def test_an_adapter_the_server_refuses_changes_nothing(tmp_path: Path) -> None:
    async with connected(FakeSglang(ScriptedEngine(counting), loras=2)) as engine:
        await engine.load(1, adapter(tmp_path, "1"))
        with pytest.raises(UsageError, match=r"did not take the adapter .*rank 16.*--max-lora-rank"):
            await engine.load(2, adapter(tmp_path, "broken"))
        assert versions(await answer(engine, a_call())) == [1] * 12
    async with connected(FakeSglang(ScriptedEngine(counting))) as engine:
        with pytest.raises(UsageError, match="serves 0 adapters at a time; start it with --enable-lora"):
            await engine.load(1, str(tmp_path / "1"))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_server_that_lost_its_adapters_is_not_the_callers_fault(tmp_path: Path, stream: bool) -> None:
    fake = FakeSglang(ScriptedEngine(counting), loras=2)
    async with connected(fake) as engine:
        await engine.load(1, adapter(tmp_path, "1"))
        fake.restart(ScriptedEngine(counting))
        with pytest.raises(Unavailable, match="lost the adapter of version 1"):
            await answer(engine, a_call(stream=stream))
        assert (await engine.info()).version == 0
        await engine.load(1, str(tmp_path / "1"))
        assert versions(await answer(engine, a_call(stream=stream))) == [1] * 12


async def test_whole_weights_loaded_by_another_gateway_replace_adapters(tmp_path: Path, weights: str) -> None:
    fake = FakeSglang(ScriptedEngine(counting), loras=2)
    async with connected(fake) as engine, SglangEngine(engine.url) as other:
        await engine.load(1, adapter(tmp_path, "1"))
        await other.load(2, weights)
        await engine.load(2, weights)
        assert (await engine.info()).version == 2
        assert (await answer(engine, a_call()))[-1].versions == (VersionSpan(0, 12, 2, 2),)


@pytest.fixture(params=["cumulative", "incremental"])
async def recorded(request: pytest.FixtureRequest) -> AsyncIterator[SglangEngine]:
    async with (
        asyncio.timeout(BOUND_S),
        replaying(request.param) as url,
        SglangEngine(url, vocab_size=656) as engine,
    ):
        yield engine


def greedy(**changes: Any) -> GenerateRequest:
    return a_call(prompt_ids=(1,), sampling=Sampling(temperature=0.0), **changes)


async def test_a_real_server_is_found_fit_and_known_for_what_it_is(recorded: SglangEngine) -> None:
    report = await probe(recorded)
    assert (report.info.max_context, report.info.logprobs, report.info.version) == (250, "tempered", 0)
    assert not report.seeded


@pytest.mark.parametrize("stream", [True, False])
async def test_a_real_servers_answer_ends_where_it_should(recorded: SglangEngine, stream: bool) -> None:
    for stops, length, reason in [
        ((), 12, FinishReason.LENGTH),
        ((4,), 7, FinishReason.STOP),
        ((650,), FREE.index(OWN_END) + 1, FinishReason.STOP),
    ]:
        chunks = await answer(recorded, greedy(stop_ids=stops, stream=stream))
        assert ids(chunks) == FREE[:length]
        assert chunks[-1].finish is reason


async def test_a_real_servers_stream_is_its_whole_answer(recorded: SglangEngine) -> None:
    streamed = await answer(recorded, greedy(stop_ids=()))
    whole = await answer(recorded, greedy(stop_ids=(), stream=False))
    pairs = zip(logprobs(streamed), logprobs(whole), strict=True)
    assert max(abs(p - q) for p, q in pairs) < 1e-5
    assert all(p < 0 for p in logprobs(whole))


async def test_a_real_server_tells_which_weights_sampled_what(
    recorded: SglangEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other-weights").mkdir()
    (tmp_path / "other-weights" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    before = await answer(recorded, greedy(stop_ids=(), stream=False))
    await recorded.pause()
    await recorded.resume()
    await recorded.load(1, "other-weights")
    crossing = structs.replace(greedy(stop_ids=(), max_tokens=30), prompt_ids=(3, 3))
    assert (await answer(recorded, crossing))[-1].versions == (
        VersionSpan(0, 3, 0, 0),
        VersionSpan(3, 30, 1, 1),
    )
    after = await answer(recorded, greedy(stop_ids=(), stream=False))
    assert [(c.low, c.high) for c in (*before, *after)] == [(0, 0), (1, 1)]
    assert logprobs(before) != logprobs(after)
