"""A real vLLM on the CPU behind our client, our pool and our gateway.

One server for the whole file, in an environment of its own under the cache. The policy is the demo's;
other versions are the same with noise on every tensor. Everything sampled is scored again by transformers.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file
from tests.real.vllm_server import serving_vllm
from transformers import AutoModelForCausalLM

from afield.engines.probe import checked, probe
from afield.engines.torch.engine import TorchEngine
from afield.engines.vllm.engine import VllmEngine
from afield.gateway.engine_pool import EnginePool
from afield.interfaces import Chunk, Engine, GenerateRequest, SessionSpec
from afield.types import FinishReason, Message, Sampling, VersionSpan
from support.dialect_clients import DIALECTS, Ask, read, write
from support.gateways import POLICY, Running, running

pytestmark = [pytest.mark.real, pytest.mark.anyio]
BOUND_S = 600
VERSIONS = 3
TOLERANCE = 1e-4
SYSTEM = "You work in a shop. Look up the number with a tool, then answer."
BLOCK = 32


def tool(name: str, description: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS = (tool("get_price", "The price of an item."), tool("get_stock", "How many of an item are left."))


# --- the server ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Model directories by version."""
    root = tmp_path_factory.mktemp("weights")
    tensors = load_file(POLICY / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for version in range(VERSIONS):
        shutil.copytree(POLICY, root / str(version))
        noise = {
            k: 0.05 * version * t.std() * torch.randn(t.shape, generator=generator)
            for k, t in tensors.items()
        }
        save_file({k: t + noise[k] for k, t in tensors.items()}, root / str(version) / "model.safetensors")
    return [root / str(version) for version in range(VERSIONS)]


@pytest.fixture(scope="module")
def server(weights: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("server") / "vllm.log"
    with serving_vllm(weights[0], log, "--block-size", str(BLOCK)) as url:
        yield url


@pytest.fixture
async def engine(server: str) -> AsyncIterator[VllmEngine]:
    async with asyncio.timeout(BOUND_S), VllmEngine(server, vocab_size=656) as engine:
        yield engine


# --- scoring -------------------------------------------------------------------------------------


class Scores:
    """Log-probabilities by transformers, of any version."""

    def __init__(self, weights: list[Path]) -> None:
        torch.set_num_threads(1)
        self._models = [AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32).eval() for p in weights]

    def of(self, ids: list[int], version: int, temperature: float = 1.0) -> list[float]:
        """Of every id given all before it; 0 for the first."""
        given = torch.tensor([ids])
        with torch.no_grad():
            logits = self._models[version](given).logits[0, :-1] / temperature
        return [0.0, *logits.log_softmax(-1).gather(1, given[0, 1:, None])[:, 0].tolist()]


@pytest.fixture(scope="module")
def scores(weights: list[Path]) -> Scores:
    return Scores(weights)


def a_call(
    n: int = 60, *, stream: bool = True, temperature: float = 0.0, length: int = 200, **more: Any
) -> GenerateRequest:
    prompt = tuple(4 + (7 * i) % 600 for i in range(length))
    sampling = Sampling(temperature=temperature, **more)
    return GenerateRequest(
        id="c", session_id="s", prompt_ids=prompt, sampling=sampling, max_tokens=n, stop_ids=(), stream=stream
    )


async def answer(engine: Engine, call: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(call)]


def ids(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def logprobs(chunks: list[Chunk]) -> list[float]:
    return [p for chunk in chunks for p in chunk.logprobs]


def worst(a: list[float], b: list[float]) -> float:
    return max(abs(p - q) for p, q in zip(a, b, strict=True))


# --- tests; those that load weights come last ----------------------------------------------------


async def test_the_server_passes_the_probe(engine: VllmEngine) -> None:
    report = await probe(engine)
    assert report.info.logprobs == "processed"
    assert report.info.exact_versions
    assert report.info.max_context == 2048
    assert report.info.notes == ()


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
async def test_streamed_or_not_the_logprobs_are_those_of_the_distribution_sampled(
    engine: VllmEngine, scores: Scores, temperature: float
) -> None:
    for stream in (True, False):
        call = a_call(stream=stream, temperature=temperature, seed=5)
        chunks = await answer(engine, call)
        assert len(ids(chunks)) == 60
        assert chunks[-1].finish is FinishReason.LENGTH
        again = scores.of([*call.prompt_ids, *ids(chunks)], 0, temperature or 1.0)
        assert worst(again[200:], logprobs(chunks)) < TOLERANCE
    greedy = [ids(await answer(engine, a_call(stream=stream))) for stream in (True, False)]
    assert greedy[0] == greedy[1]


async def test_truncated_sampling_reports_the_truncated_distribution(engine: VllmEngine) -> None:
    chunks = await answer(engine, a_call(temperature=1.0, top_k=1))
    assert max(map(abs, logprobs(chunks))) < TOLERANCE


@pytest.mark.parametrize("endpoint", ["generate", "completions"])
async def test_the_likeliest_tokens_and_the_prompts_scores_are_those_of_the_model(
    engine: VllmEngine, weights: list[Path], monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    assert (await engine.info()).max_top_logprobs == 20
    monkeypatch.setattr(engine, "_exact", endpoint == "generate")
    model = AutoModelForCausalLM.from_pretrained(weights[0], dtype=torch.float32).eval()
    for stream, temperature, count in ((True, 0.0, 3), (False, 1.3, 3), (True, 1.3, 20)):
        call = a_call(12, stream=stream, temperature=temperature, length=40, seed=5)
        chunks = await answer(engine, structs.replace(call, top_logprobs=count))
        tops = [top for chunk in chunks for top in chunk.top_logprobs]
        with torch.no_grad():
            logits = model(torch.tensor([[*call.prompt_ids, *ids(chunks)]])).logits[0, 39:-1]
        rows = (logits / (temperature or 1.0)).log_softmax(-1)
        for top, row, token, own in zip(tops, rows, ids(chunks), logprobs(chunks), strict=True):
            assert len(top) == count
            best = row.topk(count)
            # Asked for as many as it tells, the server puts the sampled token in place of the last of them.
            among = count < 20 or token in best.indices.tolist()
            shown = count if among else count - 1
            assert worst([p for _, p in top[:shown]], best.values.tolist()[:shown]) < TOLERANCE
            assert dict(top).get(token, own) == own
            assert temperature or top[0] == (token, own)
    scoring = structs.replace(a_call(4, length=40), prompt_logprobs=2)
    first, *later = await answer(engine, scoring)
    assert first.prompt_logprobs is not None and not any(chunk.prompt_logprobs for chunk in later)
    with torch.no_grad():
        rows = model(torch.tensor([scoring.prompt_ids])).logits[0].log_softmax(-1)
    assert first.prompt_logprobs[0] == ()
    for n, top in enumerate(first.prompt_logprobs[1:], 1):
        assert top[0][0] == scoring.prompt_ids[n]
        assert worst([p for _, p in top], [rows[n - 1, token].item() for token, _ in top]) < TOLERANCE
        assert set(rows[n - 1].topk(2).indices.tolist()) <= {token for token, _ in top}


async def test_a_prompt_with_an_unknown_id_is_the_callers_fault(server: str) -> None:
    async with VllmEngine(server) as engine:
        with pytest.raises(ValueError, match="out of vocabulary"):
            await answer(engine, structs.replace(a_call(), prompt_ids=(5, 99_999)))


async def say(up: Running, session_id: str, key: str, path: str, body: bytes) -> bytes:
    headers = {"authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{up.url}/s/{session_id}{path}", data=body, headers=headers) as response,
    ):
        data = await response.read()
        assert response.status == 200, data
        return data


def prefix_hits(server: str) -> float:
    with urllib.request.urlopen(f"{server}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return sum(float(v) for v in re.findall(r"^vllm:prefix_cache_hits_total\{[^}]*\} (\S+)$", text, re.M))


async def trajectories(up: Running, session_id: str) -> list[dict[str, Any]]:
    status, told = await up.ask("GET", f"/sessions/{session_id}/trajectories")
    assert status == 200
    assert told["excluded"] == []
    return told["trajectories"]


def check_rows(rows: list[dict[str, Any]], scores: Scores) -> int:
    """Every trained token has the log-probability these weights give it."""
    checked = 0
    for row in rows:
        again = scores.of(row["token_ids"], 0)
        for mask, p, q in zip(row["loss_mask"], row["logprobs"], again, strict=True):
            assert not mask or abs(p - q) < TOLERANCE
            checked += mask
        assert {(low, high) for _, _, low, high in row["versions"]} == {(0, 0)}
    return checked


def next_messages(reply: Message, turn: int) -> list[Message]:
    if not reply.tool_calls:
        return [reply, Message(role="user", content="How many red lamps are left?")]
    results = [
        Message(role="tool", content=str(20 + turn), tool_call_id=call.id) for call in reply.tool_calls
    ]
    return [reply, *results]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_tool_session_in_every_dialect_streams_and_is_exact(
    server: str, scores: Scores, tmp_path: Path, dialect: str
) -> None:
    turns, hits = 6, []
    messages = [
        Message(role="system", content=SYSTEM),
        Message(role="user", content="How much is the teal mug?"),
    ]
    async with asyncio.timeout(BOUND_S), running(VllmEngine(server, vocab_size=656), tmp_path) as up:
        ticket = await up.client.open(SessionSpec(id="r.1", sampling=Sampling(max_tokens=60)))
        tools_used = 0
        for turn in range(turns):
            before = prefix_hits(server)
            path, body = write(
                dialect, Ask(messages=tuple(messages), tools=TOOLS, max_tokens=60, stream=True)
            )
            heard = read(dialect, True, await say(up, "r.1", ticket.api_key, path, body))
            hits.append(prefix_hits(server) - before)
            tools_used += len(heard.reply.tool_calls)
            messages += next_messages(heard.reply, turn)
        rows = await trajectories(up, "r.1")
    assert tools_used >= 1
    assert len(rows) == 1
    assert len(rows[0]["turns"]) == turns
    assert check_rows(rows, scores) >= turns
    # Each turn finds the whole blocks of the one before it in the cache.
    assert hits[-1] > hits[1] >= BLOCK
    assert hits[1:] == sorted(hits[1:])


async def test_completions_stream_and_are_exact(server: str, scores: Scores, tmp_path: Path) -> None:
    async with asyncio.timeout(BOUND_S), running(VllmEngine(server, vocab_size=656), tmp_path) as up:
        ticket = await up.client.open(SessionSpec(id="r.1"))
        prompt = "How much is the red mug?"
        for _ in range(3):
            body = {"model": "m", "prompt": prompt, "max_tokens": 12, "stream": True}
            said = await say(up, "r.1", ticket.api_key, "/v1/completions", json.dumps(body).encode())
            events = [
                json.loads(line[6:]) for line in said.decode().split("\n") if line.startswith("data: {")
            ]
            prompt += "".join(c["text"] for event in events for c in event["choices"])
        rows = await trajectories(up, "r.1")
    assert check_rows(rows, scores) >= 3


class Wire:
    """A wire to the server. Once `fuse` is set, it breaks for good after that many bytes of an answer."""

    def __init__(self, server: str) -> None:
        host, port = server.removeprefix("http://").split(":")
        self._server = host, int(port)
        self.fuse: int | None = None

    @property
    def broken(self) -> bool:
        return self.fuse is not None and self.fuse <= 0

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.broken:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection(*self._server)
        await asyncio.gather(self._pump(reader, far_writer, 0), self._pump(far_reader, writer, 1))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, burns: int) -> None:
        try:
            while not self.broken and (data := await reader.read(65536)):
                passed = data[: self.fuse] if burns else data
                if self.fuse is not None and burns:
                    self.fuse -= len(passed)
                writer.write(passed)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def breakable(server: str) -> AsyncIterator[tuple[str, Wire]]:
    wire = Wire(server)
    ends = await asyncio.start_server(wire.accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{ends.sockets[0].getsockname()[1]}", wire
    finally:
        ends.close()


async def test_a_call_continues_in_another_engine_when_the_server_is_cut_off(
    engine: VllmEngine, server: str, weights: list[Path], scores: Scores
) -> None:
    undisturbed = ids(await answer(engine, a_call(600)))
    async with breakable(server) as (url, wire):
        workers: dict[str, Engine] = {
            "vllm": VllmEngine(url, vocab_size=656),
            "torch": TorchEngine(weights[0]),
        }
        async with EnginePool(workers) as pool:
            wire.fuse = 20_000  # a hundred tokens at most; the answer has many times that
            seen = await answer(pool, a_call(600))
            numbers = pool.stats()
    assert ids(seen) == undisturbed
    assert numbers["failovers"] == 1
    assert numbers["workers"]["torch"]["calls"] == 1
    assert worst(scores.of([*a_call().prompt_ids, *undisturbed], 0)[200:], logprobs(seen)) < TOLERANCE


LONG = 900
# Calls at once. An attempt that came too late, on a fast machine, is made again with more of them.
CROWDS = (8, 16, 32, 64, 128)
ENOUGH = 40  # tokens of one version, so that another one gives some of them another probability


@asynccontextmanager
async def under_way(engine: Engine, temperature: float, many: int) -> AsyncIterator[list[list[Chunk]]]:
    """Long calls whose sampling has begun; they have ended when this is left.

    Only the first is streamed: writing events would keep this server busier than sampling does.
    """
    answers: list[list[Chunk]] = [[] for _ in range(many)]
    calls = [a_call(LONG, stream=n == 0, temperature=temperature) for n in range(many)]
    async with asyncio.timeout(BOUND_S), asyncio.TaskGroup() as group:
        for seen, call in zip(answers, calls, strict=True):
            group.create_task(into(seen, engine, call))
        await some_of(answers[0])
        yield answers


async def into(seen: list[Chunk], engine: Engine, call: GenerateRequest) -> None:
    async for chunk in engine.generate(call):
        seen.append(chunk)  # noqa: PERF401 (others look while it grows)


async def some_of(seen: list[Chunk]) -> None:
    """Until there are tokens enough more than now, or all there will be."""
    before = len(ids(seen))
    while len(ids(seen)) < before + ENOUGH and not ended(seen):
        await asyncio.sleep(0.005)


async def stilled(seen: list[Chunk]) -> None:
    """Until nothing has come for two seconds. What is under way comes first; whatever is sampled on comes
    within far less, until the answer ends."""
    before = -1
    while before != len(ids(seen)) and not ended(seen):
        before = len(ids(seen))
        await asyncio.sleep(2)


def ended(seen: list[Chunk]) -> bool:
    return bool(seen) and seen[-1].finish is not None


@pytest.mark.parametrize("in_flight", ["keep", "resume"])
async def test_a_pause_stills_the_server_and_calls_end_as_if_undisturbed(
    engine: VllmEngine, server: str, in_flight: Literal["keep", "resume"]
) -> None:
    undisturbed = ids(await answer(engine, a_call(LONG)))
    for many in CROWDS:
        async with (
            EnginePool({"vllm": VllmEngine(server, vocab_size=656)}) as pool,
            under_way(pool, 0.0, many) as answers,
        ):
            await pool.pause(in_flight)
            await stilled(answers[0])
            in_time = not any(map(ended, answers))
            if in_time:
                assert pool.stats()["in_flight" if in_flight == "keep" else "waiting"] == many
            await pool.resume()
        assert {tuple(ids(chunks)) for chunks in answers} == {tuple(undisturbed)}
        if in_time:
            return
    pytest.fail("every answer had ended before the pause came; make LONG longer")


async def test_answers_the_server_aborts_are_resumed(engine: VllmEngine, server: str) -> None:
    undisturbed = ids(await answer(engine, a_call(LONG)))
    for many in (*CROWDS, *CROWDS):  # a busy machine may need another try
        async with (
            aiohttp.ClientSession() as http,
            EnginePool({"vllm": VllmEngine(server, vocab_size=656)}) as pool,
            under_way(pool, 0.0, many) as answers,
        ):
            await pool.pause("keep")
            in_flight = pool.stats()["in_flight"]
            async with http.post(f"{server}/abort_requests", json={}) as response:
                assert response.status == 200
            await pool.resume()
        assert {tuple(ids(chunks)) for chunks in answers} == {tuple(undisturbed)}
        assert pool.failovers <= in_flight
        if pool.failovers == many:
            return
    pytest.fail("some answer had always ended before it was aborted; make LONG longer")


async def test_new_weights_take_over_in_mid_answer_and_every_token_scores_with_its_own(
    server: str, weights: list[Path], scores: Scores
) -> None:
    async with EnginePool({"vllm": VllmEngine(server, vocab_size=656)}, check=checked) as pool:
        for many in CROWDS:
            first = (await pool.info()).version
            async with under_way(pool, 1.0, many) as answers:
                await pool.load(first + 1, str(weights[(first + 1) % VERSIONS]))
                await some_of(answers[0])
                await pool.load(first + 2, str(weights[(first + 2) % VERSIONS]))
            assert (await pool.info()).version == first + 2
            after = await answer(pool, a_call(1))
            assert after[-1].versions == (VersionSpan(0, 1, first + 2, first + 2),)
            # Of a large crowd some wait for a place, and begin with newer weights.
            all_three = [c for c in answers if versions_of(c) == [first, first + 1, first + 2]]
            for chunks in [*answers[:2], *all_three[:2]]:
                check_spans(scores, chunks)
            if all_three:
                return
    pytest.fail("every answer had ended before both weights had come; make LONG longer")


def versions_of(chunks: list[Chunk]) -> list[int]:
    spans = spans_of(chunks)
    assert (spans[0].start, spans[-1].end) == (0, LONG)
    assert all(span.low == span.high for span in spans)
    return [span.low for span in spans]


def spans_of(chunks: list[Chunk]) -> tuple[VersionSpan, ...]:
    if chunks[-1].versions is not None:
        return chunks[-1].versions
    ends = list(accumulate(len(chunk.token_ids) for chunk in chunks))
    return tuple(
        VersionSpan(end - len(chunk.token_ids), end, chunk.low, chunk.high)
        for chunk, end in zip(chunks, ends, strict=True)
    )


def check_spans(scores: Scores, chunks: list[Chunk]) -> None:
    """Every token has its log-probability from the version it names, and not from another."""
    whole, drawn = [*a_call().prompt_ids, *ids(chunks)], logprobs(chunks)
    by_weights = [scores.of(whole, n)[200:] for n in range(VERSIONS)]
    for span in spans_of(chunks):
        own, other = by_weights[span.low % VERSIONS], by_weights[(span.low + 1) % VERSIONS]
        part = slice(span.start, span.end)
        assert worst(own[part], drawn[part]) < TOLERANCE
        assert span.end - span.start < ENOUGH or worst(other[part], drawn[part]) > 100 * TOLERANCE
