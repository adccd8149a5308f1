"""The scripted engine: what the script says, and what a real engine would make of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import pytest
from msgspec import structs

from afield.engines.recording import CallStatus
from afield.engines.scripted import ScriptedEngine, ScriptedReply, read_script
from afield.errors import Unavailable, UsageError
from afield.interfaces.engine import Chunk, GenerateRequest, Image
from afield.types import FinishReason, Sampling, VersionSpan

pytestmark = pytest.mark.anyio
BOUND_S = 90


class Characters:
    """A tokenizer whose ids are code points."""

    def encode(self, text: str) -> Sequence[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def a_call(prompt: str = "hello", *, stream: bool = True, max_tokens: int = 50) -> GenerateRequest:
    return GenerateRequest(
        id="c1",
        session_id="r.1",
        prompt_ids=tuple(map(ord, prompt)),
        sampling=Sampling(),
        max_tokens=max_tokens,
        stop_ids=(0,),
        stream=stream,
    )


async def answer(engine: ScriptedEngine, call: GenerateRequest) -> list[Chunk]:
    async with asyncio.timeout(BOUND_S):
        return [chunk async for chunk in engine.generate(call)]


async def test_answers_are_used_up_in_order() -> None:
    engine = ScriptedEngine(
        [ScriptedReply(token_ids=(7, 0)), ScriptedReply(token_ids=(8, 9, 0), logprobs=(-1, -2, -3))]
    )
    assert [chunk.token_ids for chunk in await answer(engine, a_call())] == [(7,), (0,)]
    (whole,) = await answer(engine, a_call(stream=False))
    assert (whole.token_ids, whole.logprobs, whole.finish) == ((8, 9, 0), (-1, -2, -3), FinishReason.STOP)
    with pytest.raises(Unavailable, match="the script's 2 answers are used up"):
        await answer(engine, a_call())


async def test_streamed_chunks_have_the_sizes_given() -> None:
    engine = ScriptedEngine([ScriptedReply(token_ids=tuple(range(1, 9)), chunks=(1, 3, 2))])
    assert [len(chunk.token_ids) for chunk in await answer(engine, a_call())] == [1, 3, 2, 2]


async def test_a_version_that_changes_in_mid_answer_splits_the_chunk() -> None:
    engine = ScriptedEngine([ScriptedReply(token_ids=(5, 6, 7, 0), chunks=(4,), bump_after=3)], version=4)
    chunks = await answer(engine, a_call())
    assert [(chunk.token_ids, chunk.low, chunk.high) for chunk in chunks] == [((5, 6, 7), 4, 4), ((0,), 5, 5)]
    assert (await engine.info()).version == 5
    assert engine.recorded[0].versions == (VersionSpan(0, 3, 4, 4), VersionSpan(3, 4, 5, 5))


async def test_a_scripted_failure_comes_after_its_tokens_and_is_in_the_ledger() -> None:
    engine = ScriptedEngine([ScriptedReply(token_ids=(5, 6), fail="unavailable")])
    seen: list[Chunk] = []
    with pytest.raises(Unavailable, match="the script fails call 'c1'"):
        async for chunk in engine.generate(a_call()):
            seen.append(chunk)  # noqa: PERF401 (what came before the failure counts)
    assert [chunk.finish for chunk in seen] == [None, None]
    (entry,) = engine.recorded
    assert (entry.served, entry.token_ids, entry.finish) == (CallStatus.FAILED, (5, 6), None)


async def test_a_call_that_hangs_ends_when_it_is_closed_or_the_engine_breaks() -> None:
    engine = ScriptedEngine(lambda call: ScriptedReply(token_ids=(5,), fail="hang"))
    async with asyncio.timeout(BOUND_S), aclosing(engine.generate(a_call())) as chunks:
        await anext(chunks)
    hanging = asyncio.create_task(answer(engine, a_call()))
    slow = ScriptedEngine(lambda call: ScriptedReply(token_ids=(5,), delay_s=3600))
    waiting = asyncio.create_task(answer(slow, a_call()))
    await asyncio.sleep(0.01)
    engine.break_down("out of memory")
    slow.break_down("out of memory")
    for call in (hanging, waiting, answer(engine, a_call())):
        with pytest.raises(Unavailable, match="out of memory"):
            await call
    assert [entry.served for entry in engine.recorded] == [
        CallStatus.ABANDONED,
        CallStatus.FAILED,
        CallStatus.FAILED,
    ]


async def test_a_file_answers_matching_prompts_and_the_others_in_order(tmp_path: Path) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text(
        '{"text": "hi"}\n\n{"match": "weather", "text": "sunny", "chunks": [2]}\n{"token_ids": [65, 66]}\n'
        '{"fail": "unavailable"}\n'
    )
    engine = ScriptedEngine(read_script(path, Characters()))
    said = [
        "".join(chr(token) for chunk in await answer(engine, a_call(prompt)) for token in chunk.token_ids)
        for prompt in ("what weather?", "hello", "weather again", "hello")
    ]
    assert said == ["sunny\0", "hi\0", "sunny\0", "AB"]
    with pytest.raises(Unavailable, match="the script fails"):
        await answer(engine, a_call())
    with pytest.raises(Unavailable, match="has no answer left for call 'c1'; add a row"):
        await answer(engine, a_call())


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"text": "a"', "line 2: "),
        ('{"txt": "a"}', "line 2: .*unknown field `txt`"),
        ('{"text": "a", "token_ids": [1]}', "line 2: a row has exactly one of text, one_of and token_ids"),
        ("{}", "line 2: a scripted reply has neither token_ids nor fail"),
        ('{"fail": "explode"}', "line 2: .*explode"),
        ('{"token_ids": [1, 2], "logprobs": [-1]}', "line 2: 2 token_ids but 1 logprobs"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text(f'{{"token_ids": [1]}}\n{line}\n')
    with pytest.raises(UsageError, match=complaint):
        read_script(path, Characters())


def test_a_script_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "script.jsonl"
    with pytest.raises(UsageError, match="does not exist"):
        read_script(path)
    path.write_text("\n")
    with pytest.raises(UsageError, match="has no rows"):
        read_script(path)
    path.write_text('{"text": "hi"}')
    with pytest.raises(UsageError, match="line 1: 'text', 'one_of' and 'match' need a tokenizer"):
        read_script(path)


def an_image(digest: str) -> Image:
    return Image(digest=digest, media_type="image/png", data=digest.encode())


async def test_images_expand_in_the_prompt_and_the_first_chunk_has_the_expanded_ids() -> None:
    engine = ScriptedEngine(
        lambda call: ScriptedReply(token_ids=(5, 6, 0)), image_id=ord("#"), image_length=3
    )
    assert (await engine.info()).images
    call = structs.replace(a_call("a#b#"), images=(an_image("x"), an_image("y")))
    chunks = await answer(engine, call)
    expanded = tuple(map(ord, "a###b###"))
    assert [chunk.prompt_ids for chunk in chunks] == [expanded, None, None]
    assert engine.recorded[0].prompt_ids == expanded
    (whole,) = await answer(engine, structs.replace(call, stream=False))
    assert whole.prompt_ids == expanded


async def test_images_the_prompt_has_no_places_for_are_refused() -> None:
    engine = ScriptedEngine(lambda call: ScriptedReply(token_ids=(5, 0)), image_id=ord("#"), max_context=9)
    with pytest.raises(ValueError, match="has 1 images and 2 image placeholders"):
        await answer(engine, structs.replace(a_call("a##"), images=(an_image("x"),)))
    with pytest.raises(ValueError, match="prompt of 9 ids"):
        await answer(engine, structs.replace(a_call("a##"), images=(an_image("x"), an_image("y"))))
    blind = ScriptedEngine(lambda call: ScriptedReply(token_ids=(5, 0)))
    with pytest.raises(ValueError, match="does not support; leave them out"):
        await answer(blind, structs.replace(a_call("#"), images=(an_image("x"),)))


async def test_a_truncated_reply_with_log_probabilities_of_its_own_has_top_log_probabilities() -> None:
    engine = ScriptedEngine(lambda call: ScriptedReply(token_ids=(5, 6, 7), logprobs=(-1.0, -2.0, -3.0)))
    call = structs.replace(a_call(), max_tokens=2, top_logprobs=2, stream=False)
    (chunk,) = await answer(engine, call)
    assert chunk.logprobs == (-1.0, -2.0)
    assert [top[0] for top in chunk.top_logprobs] == [(5, -1.0), (6, -2.0)]


async def test_a_paused_engine_stands_still() -> None:
    engine = ScriptedEngine(lambda call: ScriptedReply(token_ids=(5, 6, 0)))
    async with asyncio.timeout(BOUND_S), aclosing(engine.generate(a_call())) as chunks:
        await anext(chunks)
        await engine.pause()
        going_on = asyncio.ensure_future(anext(chunks))
        done, _ = await asyncio.wait([going_on], timeout=0.05)
        assert not done
        await engine.resume()
        assert (await going_on).token_ids == (6,)
