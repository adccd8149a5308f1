"""The embedded engine: exact log-probabilities whatever happens around a call."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from afield.engines.recording import CallStatus, RecordedCall, RecordingEngine, read_recording
from afield.engines.torch.engine import TorchEngine
from afield.engines.torch.sampler import draw
from afield.errors import Unavailable, UsageError
from afield.interfaces.engine import Chunk, GenerateRequest
from afield.types import FinishReason, Sampling
from support.tiny_model import build_tiny_model, reseed

pytestmark = pytest.mark.anyio
TOLERANCE = 1e-4
BOUND_S = 60
# Tokens that take seconds to draw, so that a test on a slow machine still meets the call in flight.
ENDLESS = 8000
LONG = tuple(3 + n % 380 for n in range(300))
SAMPLINGS = [
    Sampling(temperature=0.7),
    Sampling(temperature=1.0),
    Sampling(temperature=1.3),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=1.3, top_k=5),
    Sampling(temperature=0.7, top_k=20, top_p=0.8),
    Sampling(temperature=0.0),
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "v0", max_positions=ENDLESS + 100)


@pytest.fixture(scope="module")
def other_weights(model: Path) -> Path:
    return reseed(model, model.with_name("v1"), seed=1, shard_size="100KB")


def a_call(
    call_id: str,
    prompt: Sequence[int],
    sampling: Any = Sampling(),  # noqa: B008
    **rest: object,
) -> GenerateRequest:
    fields = {"max_tokens": 24, "stop_ids": (2,), **rest}
    return GenerateRequest(
        id=call_id, session_id="s.1", prompt_ids=tuple(prompt), sampling=sampling, **fields
    )


def a_prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 400, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


async def answer(engine: TorchEngine | RecordingEngine, call: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(call)]


def ids(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


async def test_calls_of_the_same_name_of_numbers_are_drawn_alike(model: Path) -> None:
    async with TorchEngine(model, seed=3) as engine:
        prompt = a_prompt(7, 12)
        first = ids(await answer(engine, a_call("a", prompt, draw="r.1/t1")))
        assert ids(await answer(engine, a_call("b", prompt, draw="r.1/t1"))) == first
        assert ids(await answer(engine, a_call("b", prompt, draw="r.2/t1"))) != first


# --- rescoring ------------------------------------------------------------------------------------


def reference(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probabilities of one position, as a textbook would compute them."""
    scores = logits.double() / (sampling.temperature or 1.0)
    if sampling.temperature and sampling.top_k:
        scores[scores < scores.topk(sampling.top_k).values[-1]] = -torch.inf
    if sampling.temperature and sampling.top_p < 1:
        kept, mass, probabilities = [], 0.0, scores.softmax(-1).tolist()
        for token in scores.argsort(descending=True).tolist():
            kept.append(token)
            mass += probabilities[token]
            if mass >= sampling.top_p:
                break
        nucleus = torch.full_like(scores, -torch.inf)
        nucleus[kept] = scores[kept]
        scores = nucleus
    return scores.log_softmax(-1)


@cache
def plain_model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def worst_error(entry: RecordedCall, weights: dict[int, Path]) -> float:
    """Recorded log-probabilities against a plain forward over the whole sequence, version by version."""
    sequence = torch.tensor([[*entry.prompt_ids, *entry.token_ids]])
    worst = 0.0
    for span in entry.versions:
        with torch.no_grad():
            logits = plain_model(weights[span.low])(sequence).logits[0]
        for n in range(span.start, span.end):
            expected = reference(logits[len(entry.prompt_ids) + n - 1], entry.sampling)
            error = abs(expected[entry.token_ids[n]].item() - entry.logprobs[n])
            worst = max(worst, error if error == error else torch.inf)
    return worst


@pytest.mark.parametrize(
    ("family", "tied", "fixed_steps"),
    [("qwen3", False, False), ("qwen2", True, False), ("llama", True, False), ("qwen3", True, True)],
)
async def test_rescoring_gives_the_recorded_log_probabilities(
    tmp_path: Path, family: str, tied: bool, fixed_steps: bool
) -> None:
    """Ragged prompts, calls joining in mid-flight, second turns on reused prefixes, more calls than slots."""
    directory = build_tiny_model(tmp_path / "model", family=family, tied=tied)
    async with (
        asyncio.timeout(BOUND_S),
        RecordingEngine(
            TorchEngine(directory, max_slots=24, prefill_tokens=100, fixed_steps=fixed_steps)
        ) as engine,
    ):

        async def conversation(n: int) -> None:
            await asyncio.sleep(0.002 * n)
            sampling, stream = SAMPLINGS[n % len(SAMPLINGS)], n % 2 == 0
            # Neighbours share the beginning of their prompts.
            first = a_prompt(n // 4, 40) + a_prompt(n, 5 * (n % 9))
            said = ids(await answer(engine, a_call(f"{n}-a", first, sampling, stream=stream)))
            second = [*first, *said, *a_prompt(n, 7)]
            await answer(engine, a_call(f"{n}-b", second, sampling, stream=stream))

        await asyncio.gather(*(conversation(n) for n in range(44)))
        assert len(engine.recorded) == 88
        assert {entry.served for entry in engine.recorded} == {CallStatus.COMPLETE}
    assert max(worst_error(entry, {0: directory}) for entry in engine.recorded) < TOLERANCE


@pytest.mark.parametrize("fixed_steps", [False, True])
async def test_after_a_swap_every_token_is_scored_by_the_version_that_drew_it(
    model: Path, other_weights: Path, fixed_steps: bool
) -> None:
    served = TorchEngine(model, prefill_tokens=200, fixed_steps=fixed_steps)
    async with asyncio.timeout(BOUND_S), RecordingEngine(served) as engine:
        drawing: set[int] = set()

        async def until_well_after_the_swap(n: int) -> list[Chunk]:
            chunks: list[Chunk] = []
            call = a_call(
                f"c{n}", a_prompt(n, 10 + n), SAMPLINGS[n % 6], max_tokens=ENDLESS, stop_ids=(), stream=True
            )
            async with aclosing(engine.generate(call)) as stream:
                async for chunk in stream:
                    chunks.append(chunk)
                    drawing.add(n)
                    if sum(len(c.token_ids) for c in chunks if c.low == 7) > 20:
                        break
            return chunks

        calls = [asyncio.create_task(until_well_after_the_swap(n)) for n in range(12)]
        call = a_call("whole", a_prompt(99, 30), max_tokens=1000, stop_ids=())
        whole = asyncio.create_task(answer(engine, call))
        while len(drawing) < 12:
            await asyncio.sleep(0.001)
        await engine.load(7, str(other_weights))
        for chunks in await asyncio.gather(*calls):
            assert all(chunk.low == chunk.high for chunk in chunks)
            assert [chunk.low for chunk in chunks] == sorted(chunk.low for chunk in chunks)
            assert {chunk.low for chunk in chunks} == {0, 7}
        assert [(chunk.low, chunk.finish) for chunk in await whole] == [(0, None), (7, FinishReason.LENGTH)]
    weights = {0: model, 7: other_weights}
    assert max(worst_error(entry, weights) for entry in engine.recorded) < TOLERANCE


# --- sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixed_steps", [False, True])
async def test_a_call_gives_the_same_tokens_alone_and_in_company(model: Path, fixed_steps: bool) -> None:
    calls = [a_call(f"c{n}", a_prompt(n, 5 + n), SAMPLINGS[n % len(SAMPLINGS)]) for n in range(14)]
    async with asyncio.timeout(BOUND_S), TorchEngine(model, seed=3, fixed_steps=fixed_steps) as engine:
        together = await asyncio.gather(*(answer(engine, call) for call in calls))
    async with asyncio.timeout(BOUND_S), TorchEngine(model, seed=3, max_slots=1) as engine:
        alone = [await answer(engine, call) for call in calls]
    assert [ids(chunks) for chunks in alone] == [ids(chunks) for chunks in together]


async def test_the_seed_of_a_call_or_else_its_id_decides_what_is_drawn(model: Path) -> None:
    prompt = a_prompt(0, 20)
    seeded = Sampling(seed=5)

    async def drawn(seed: int, *calls: GenerateRequest) -> list[list[int]]:
        async with asyncio.timeout(BOUND_S), TorchEngine(model, seed=seed) as engine:
            return [ids(await answer(engine, call)) for call in calls]

    by_id, by_other_id, by_seed, by_seed_again = await drawn(
        0,
        a_call("a", prompt),
        a_call("b", prompt),
        a_call("a", prompt, seeded),
        a_call("b", prompt, seeded),
    )
    assert by_id != by_other_id
    assert by_seed == by_seed_again
    assert by_seed != by_id
    assert await drawn(1, a_call("a", prompt)) != [by_id]


def test_uniform_numbers_give_tokens_in_proportion_to_their_probability() -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -30.0])
    rows = 10_000
    tokens, logprobs = draw(
        logits.expand(rows, -1), [Sampling(temperature=0.5)] * rows, [(n + 0.5) / rows for n in range(rows)]
    )
    expected = (logits / 0.5).softmax(-1)
    share = torch.bincount(torch.tensor(tokens), minlength=5) / rows
    assert torch.allclose(share, expected, atol=2 / rows)
    assert torch.allclose(torch.tensor(logprobs).exp(), expected[tokens], atol=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_token_that_was_cut_off_is_never_drawn(uniform: float) -> None:
    logits = torch.linspace(0, 1, 50)[None]
    for sampling in (Sampling(top_k=3), Sampling(top_p=0.05)):
        (token,), (logprob,) = draw(logits, [sampling], [uniform])
        assert token >= 47
        assert logprob > -2


# --- slots ----------------------------------------------------------------------------------------


async def test_a_second_turn_computes_only_what_is_new(model: Path) -> None:
    async with asyncio.timeout(BOUND_S), TorchEngine(model) as engine:
        first = a_prompt(0, 50)
        said = ids(await answer(engine, a_call("a", first, stop_ids=())))
        await answer(engine, a_call("b", [*first, *said, *a_prompt(1, 9)]))
        # The last sampled token was never fed to the model.
        assert engine.counters.reused_tokens == 50 + 24 - 1
        assert engine.counters.prompt_tokens == 50 + (50 + 24 + 9)


async def test_a_prompt_shared_with_a_call_in_flight_is_not_computed_again(model: Path) -> None:
    async with asyncio.timeout(BOUND_S), RecordingEngine(inner := TorchEngine(model)) as engine:
        shared = a_prompt(0, 60)
        async with aclosing(
            engine.generate(a_call("a", shared, max_tokens=ENDLESS, stream=True, stop_ids=()))
        ) as long:
            await anext(long)
            await answer(engine, a_call("b", [*shared, 9, 9, 9]))
            assert inner.counters.reused_tokens == 60
            await anext(long)
    assert max(worst_error(entry, {0: model}) for entry in engine.recorded) < TOLERANCE


async def test_calls_beyond_the_slots_are_served_in_the_order_they_came(model: Path) -> None:
    finished: list[int] = []

    async def call(n: int) -> None:
        await answer(engine, a_call(f"c{n}", a_prompt(n, 10), max_tokens=5, stop_ids=()))
        finished.append(n)

    async with asyncio.timeout(BOUND_S), TorchEngine(model, max_slots=1) as engine:
        await asyncio.gather(*(call(n) for n in range(12)))
    assert finished == list(range(12))


async def test_closing_a_call_frees_its_slot_for_the_next(model: Path) -> None:
    async with asyncio.timeout(BOUND_S), TorchEngine(model, max_slots=1) as engine:
        endless = a_call("endless", a_prompt(0, 10), max_tokens=ENDLESS, stop_ids=(), stream=True)
        async with aclosing(engine.generate(endless)) as chunks:
            await anext(chunks)
            queued = asyncio.create_task(answer(engine, a_call("next", a_prompt(1, 10))))
        assert (await queued)[-1].finish
        assert engine.counters.sampled_tokens < ENDLESS


async def test_call_whose_event_loop_ended_does_not_affect_other_calls(model: Path) -> None:
    async with asyncio.timeout(BOUND_S), TorchEngine(model, max_slots=1) as engine:

        def elsewhere() -> None:
            loop = asyncio.new_event_loop()
            endless = engine.generate(
                a_call("x", a_prompt(0, 10), max_tokens=ENDLESS, stop_ids=(), stream=True)
            )
            loop.run_until_complete(anext(endless))
            loop.close()

        thread = threading.Thread(target=elsewhere)
        thread.start()
        await asyncio.to_thread(thread.join, BOUND_S)
        assert (await answer(engine, a_call("y", a_prompt(1, 10))))[-1].finish


# --- what is refused, and what breaks -------------------------------------------------------------


def edited(model: Path, into: Path, **changes: torch.Tensor | None) -> Path:
    """A copy of a model directory with some tensors replaced, or removed."""
    shutil.copytree(model, into)
    tensors = load_file(model / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    return into


def configured(model: Path, into: Path, **changes: object) -> Path:
    """A copy of a model directory with another configuration."""
    shutil.copytree(model, into)
    config = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps({**config, **changes}))
    return into


async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve(
    model: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    torn = edited(model, tmp_path / "torn")
    (torn / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    wrong = {
        "lack the tensor 'model.norm.weight'": edited(model, tmp_path / "a", **{"model.norm.weight": None}),
        r"'model.norm.weight' has shape \[7\], the model being served \[64\]": edited(
            model, tmp_path / "b", **{"model.norm.weight": torch.ones(7)}
        ),
        "have no model.safetensors; expected a directory": empty,
        "model.safetensors cannot be read": torn,
    }
    call = a_call("c", a_prompt(0, 10))
    async with asyncio.timeout(BOUND_S), TorchEngine(model) as engine:
        before = ids(await answer(engine, call))
        for complaint, path in wrong.items():
            with pytest.raises(UsageError, match=complaint) as refused:
                await engine.load(1, str(path))
            assert str(path) in str(refused.value)
        assert ids(await answer(engine, call)) == before
        assert (await engine.info()).version == 0


async def test_a_tied_model_takes_tied_weights_only(tmp_path: Path) -> None:
    tied = build_tiny_model(tmp_path / "tied", tied=True)
    better = reseed(tied, tmp_path / "better", seed=1)
    untied = edited(better, tmp_path / "untied", **{"lm_head.weight": torch.ones(400, 64)})
    async with asyncio.timeout(BOUND_S), RecordingEngine(TorchEngine(tied)) as engine:
        with pytest.raises(UsageError, match="differ, but the model being served ties them"):
            await engine.load(1, str(untied))
        await engine.load(1, str(better))
        await answer(engine, a_call("c", a_prompt(0, 10)))
    assert worst_error(engine.recorded[0], {1: better}) < TOLERANCE


async def test_a_path_that_is_no_model_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    no_config = tmp_path / "no-config"
    no_config.mkdir()
    nonsense = edited(model, tmp_path / "nonsense")
    (nonsense / "config.json").write_text("{")
    unknown = edited(model, tmp_path / "unknown")
    (unknown / "config.json").write_text('{"model_type": "abacus"}')
    lacking = edited(model, tmp_path / "lacking", **{"model.norm.weight": None})
    for path in (tmp_path / "nowhere", no_config, nonsense, unknown, lacking):
        with pytest.raises(UsageError, match=str(path)):
            async with TorchEngine(path):
                pass
    with pytest.raises(
        UsageError, match=r"expected a directory with config\.json, model\.safetensors and tok"
    ):
        async with TorchEngine(no_config):
            pass


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "'dynamic' positions",
        ),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention' layers"),
    ],
)
async def test_a_model_that_cannot_be_served_exactly_is_refused(
    model: Path, tmp_path: Path, setting: dict[str, object], complaint: str
) -> None:
    path = configured(model, tmp_path / "strange", **setting)
    with pytest.raises(UsageError, match=f"{complaint}, which the embedded engine cannot serve exactly"):
        async with TorchEngine(path):
            pass


async def test_a_sliding_window_bounds_the_context(model: Path, tmp_path: Path) -> None:
    layers = ["full_attention", "sliding_attention"]
    path = configured(model, tmp_path / "m", layer_types=layers, use_sliding_window=True, sliding_window=64)
    async with asyncio.timeout(BOUND_S), RecordingEngine(TorchEngine(path)) as engine:
        assert (await engine.info()).max_context == 64
        await answer(engine, a_call("c", a_prompt(0, 30), max_tokens=100, stop_ids=()))
    assert len(engine.recorded[0].token_ids) == 34
    assert worst_error(engine.recorded[0], {0: path}) < TOLERANCE


async def test_settings_that_make_no_sense_are_refused(model: Path) -> None:
    with pytest.raises(UsageError, match="max_context 9000 must be between 2 and the model's 8100"):
        async with TorchEngine(model, max_context=9000):
            pass
    with pytest.raises(UsageError, match="unknown dtype 'float3'; choose one of"):
        async with TorchEngine(model, dtype="float3"):
            pass
    with pytest.raises(UsageError, match="max_slots 0"):
        TorchEngine(model, max_slots=0)


async def test_an_engine_that_breaks_fails_every_call_and_says_why(model: Path, tmp_path: Path) -> None:
    broken = edited(model, tmp_path / "nan", **{"model.norm.weight": torch.full((64,), torch.nan)})
    async with asyncio.timeout(BOUND_S), TorchEngine(model, max_slots=2) as engine:
        calls = [
            asyncio.create_task(
                answer(engine, a_call(f"c{n}", a_prompt(n, 10), max_tokens=ENDLESS, stop_ids=()))
            )
            for n in range(5)
        ]
        async with aclosing(engine.generate(a_call("first", [5], max_tokens=ENDLESS, stream=True))) as chunks:
            await asyncio.sleep(0)
            await engine.load(1, str(broken))
            with pytest.raises(Unavailable, match="weights of version 1 are not all finite"):
                async for _ in chunks:
                    pass
        for call in calls:
            with pytest.raises(Unavailable, match="the engine broke"):
                await call
        for attempt in (answer(engine, a_call("late", [5])), engine.load(2, str(model)), engine.info()):
            with pytest.raises(Unavailable, match="the engine broke"):
                await attempt


class Unchecked(NamedTuple):
    """Sampling values that were never validated."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


@pytest.mark.parametrize("fixed_steps", [False, True])
async def test_a_call_without_finite_scores_is_aborted_alone(model: Path, fixed_steps: bool) -> None:
    async with asyncio.timeout(BOUND_S), TorchEngine(model, fixed_steps=fixed_steps) as engine:
        samplings = (Sampling(), Unchecked(temperature=1e-39), Sampling(temperature=0.5))
        calls = [a_call(f"c{n}", a_prompt(n, 6), s, stop_ids=()) for n, s in enumerate(samplings)]
        first, bad, last = await asyncio.gather(*(answer(engine, call) for call in calls))
        assert bad[-1].finish is FinishReason.ABORTED
        assert ids(bad) == []
        assert first[-1].finish is last[-1].finish is FinishReason.LENGTH
        assert len(ids(await answer(engine, a_call("later", a_prompt(0, 6), stop_ids=())))) == 24


async def test_an_engine_that_is_closed_fails_the_calls_in_flight(model: Path) -> None:
    async with asyncio.timeout(BOUND_S):
        async with TorchEngine(model) as engine:
            endless = engine.generate(
                a_call("x", a_prompt(0, 10), max_tokens=ENDLESS, stop_ids=(), stream=True)
            )
            await anext(endless)
        with pytest.raises(Unavailable):
            async for _ in endless:
                pass


# --- the ledger -----------------------------------------------------------------------------------


async def test_the_ledger_file_says_what_was_served_and_what_was_abandoned(
    model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "runs" / "ledger.jsonl"
    call = a_call("whole", a_prompt(0, 10))
    async with asyncio.timeout(BOUND_S), RecordingEngine(TorchEngine(model), path) as engine:
        (chunk,) = await answer(engine, call)
        cut = msgspec.structs.replace(call, id="cut", stream=True, max_tokens=ENDLESS, stop_ids=())
        async with aclosing(engine.generate(cut)) as chunks:
            begun = await anext(chunks)
        with pytest.raises(ValueError, match="empty prompt"):
            await answer(engine, a_call("refused", []))
    whole, abandoned = read_recording(path)
    assert (whole.call_id, whole.served, whole.prompt_ids) == ("whole", CallStatus.COMPLETE, call.prompt_ids)
    assert (whole.token_ids, whole.logprobs, whole.finish) == (chunk.token_ids, chunk.logprobs, chunk.finish)
    assert (abandoned.call_id, abandoned.served, abandoned.finish) == ("cut", CallStatus.ABANDONED, None)
    assert abandoned.token_ids[: len(begun.token_ids)] == begun.token_ids


async def test_a_call_says_how_long_there_was_no_slot_for_it(model: Path) -> None:
    async with asyncio.timeout(BOUND_S), TorchEngine(model, max_slots=1) as engine:
        loop = asyncio.get_running_loop()
        endless = a_call("a", [5, 6], max_tokens=ENDLESS, stream=True, stop_ids=())
        async with aclosing(engine.generate(endless)) as first:
            assert (await anext(first)).queued_s < 5.0
            asked = loop.time()
            second = asyncio.create_task(answer(engine, a_call("b", [7, 8], max_tokens=4, stop_ids=())))
            await asyncio.sleep(1.0)
        chunks = await second
    assert 0.2 < sum(chunk.queued_s for chunk in chunks) <= loop.time() - asked
    assert all(chunk.queued_s == 0.0 for chunk in chunks[1:])


# --- log-probabilities of other tokens, and of prompts ------------------------------------------------


def answer_of(engine: TorchEngine) -> Callable[[GenerateRequest], Awaitable[list[Chunk]]]:
    async def answer(call: GenerateRequest) -> list[Chunk]:
        return [chunk async for chunk in engine.generate(call)]

    return answer


@pytest.mark.parametrize("fixed_steps", [False, True])
@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.7), Sampling(top_k=3), Sampling(temperature=0.0)]
)
async def test_the_likeliest_tokens_are_those_of_the_distribution_drawn_from(
    model: Path, sampling: Sampling, fixed_steps: bool
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model)
    async with TorchEngine(model, fixed_steps=fixed_steps) as engine:
        call = a_call("top", (5, 6, 7, 8), sampling, top_logprobs=5, max_tokens=12, stream=True, stop_ids=())
        plain = structs.replace(call, top_logprobs=0, stream=False)
        both = await asyncio.gather(*map(answer_of(engine), (call, plain)))
    chunks, whole = both
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    assert tokens == list(whole[0].token_ids)
    with torch.inference_mode():
        logits = reference(torch.tensor([[*call.prompt_ids, *tokens]])).logits[0, 3:-1].float()
    scores = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
    if sampling.top_k:
        kept = scores.topk(sampling.top_k)
        scores = torch.full_like(scores, float("-inf")).scatter(1, kept.indices, kept.values).log_softmax(-1)
    sampled = [pair for chunk in chunks for pair in zip(chunk.token_ids, chunk.logprobs, strict=True)]
    tops = [top for chunk in chunks for top in chunk.top_logprobs]
    assert len(tops) == len(tokens)
    for top, row, (token, logprob) in zip(tops, scores, sampled, strict=True):
        assert len(top) == (sampling.top_k or 5)
        expected = row.topk(len(top)).values.tolist()
        assert [p for _, p in top] == pytest.approx(expected, abs=TOLERANCE)
        assert all(p == pytest.approx(row[t].item(), abs=TOLERANCE) for t, p in top)
        assert dict(top).get(token, logprob) == logprob


@pytest.mark.parametrize("temperature", [0.0, 0.5])
async def test_prompts_are_scored_as_by_a_direct_forward_pass(model: Path, temperature: float) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model)
    with torch.inference_mode():
        logprobs = reference(torch.tensor([LONG])).logits[0].float().log_softmax(-1)
    async with TorchEngine(model) as engine:
        call = a_call("score", LONG, Sampling(temperature=temperature), max_tokens=4)
        cached = [chunk async for chunk in engine.generate(call)]
        scoring = structs.replace(call, prompt_logprobs=3)
        beside = a_call("beside", LONG[:50], max_tokens=30)
        chunks, _ = await asyncio.gather(*map(answer_of(engine), (scoring, beside)))
    assert [c.token_ids for c in chunks] == [c.token_ids for c in cached]
    prompt_logprobs = chunks[0].prompt_logprobs
    assert prompt_logprobs is not None and prompt_logprobs[0] == ()
    for n in range(1, len(LONG)):
        (token, own), *others = prompt_logprobs[n]
        assert token == LONG[n]
        assert own == pytest.approx(logprobs[n - 1, token].item(), abs=TOLERANCE)
        best = logprobs[n - 1].topk(3)
        assert {*best.indices.tolist()} <= {token, *(other for other, _ in others)}
        assert [p for t, p in others] == pytest.approx(
            [p for t, p in zip(best.indices.tolist(), best.values.tolist(), strict=True) if t != token],
            abs=TOLERANCE,
        )


async def test_weights_that_change_while_a_prompt_is_scored_score_all_of_it(
    model: Path, other_weights: Path
) -> None:
    """Or none of it: no score is of a mixture."""
    references = [AutoModelForCausalLM.from_pretrained(path) for path in (model, other_weights)]
    with torch.inference_mode():
        rows = [r(torch.tensor([LONG])).logits[0].float().log_softmax(-1) for r in references]
    expected = [[row[n - 1, LONG[n]].item() for n in range(1, len(LONG))] for row in rows]
    async with TorchEngine(model) as engine:
        call = a_call("score", LONG, prompt_logprobs=0, max_tokens=40)

        async def score() -> list[Chunk]:
            return [chunk async for chunk in engine.generate(call)]

        under_way = [asyncio.create_task(score()) for _ in range(4)]
        await engine.load(1, str(other_weights))
        answers = await asyncio.gather(*under_way)
    for first, *_ in answers:
        assert first.prompt_logprobs is not None
        own = [top[0][1] for top in first.prompt_logprobs[1:]]
        assert any(own == pytest.approx(row, abs=TOLERANCE) for row in expected)


@pytest.mark.parametrize("fixed_steps", [False, True])
async def test_calls_wait_for_the_memory_of_the_cache_and_sample_the_same(model: Path, fixed_steps: bool):
    """Long calls among short ones: slots are given up and lengths shrink while other calls run."""
    sizes = [(20, 12), (40, 30), (700, 40), (15, 200), (25, 12), (300, 60), (30, 12), (900, 20), (10, 90)]
    calls = [a_call(f"m{n}", a_prompt(n, size), max_tokens=new) for n, (size, new) in enumerate(sizes * 2)]
    async with TorchEngine(model, seed=3, fixed_steps=fixed_steps) as free:
        expected = await asyncio.gather(*(answer(free, call) for call in calls))
    async with TorchEngine(model, seed=3, fixed_steps=fixed_steps, cache_tokens=1024) as small:
        assert (await small.info()).max_context == 1024
        got = await asyncio.gather(*(answer(small, call) for call in calls))
    assert [ids(chunks) for chunks in got] == [ids(chunks) for chunks in expected]
