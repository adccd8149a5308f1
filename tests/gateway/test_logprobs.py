"""Log-probabilities that clients ask for, with the official SDKs against a real gateway."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from google import genai
from google.genai import types
from msgspec import structs
from transformers import AutoModelForCausalLM

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.engines.torch.engine import TorchEngine
from afield.interfaces import SessionSpec
from afield.interfaces.engine import EngineInfo
from afield.types import Sampling, TurnStatus
from support.gateways import ADMIN, Running, running, vocabulary
from support.tiny_model import build_tiny_model

pytestmark = pytest.mark.anyio
VOCAB = vocabulary()
STOP = VOCAB.id_of("<|im_end|>")
HELLO: list[Any] = [{"role": "user", "content": "Look up the key seven."}]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "v0", max_positions=512)


@pytest.fixture(scope="module")
async def up(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """The embedded engine behind a gateway, for all tests here."""
    async with running(TorchEngine(model), tmp_path_factory.mktemp("store") / "s", model) as up:
        yield up


NAMES = itertools.count(1)


async def an_agent(up: Running, **spec: Any) -> tuple[openai.AsyncOpenAI, str]:
    name = f"s.{next(NAMES)}"
    return await up.agent(name, **spec), name


async def recorded(up: Running, session_id: str) -> list[Any]:
    return (await up.client.finalize(session_id)).turns


# --- chat -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_chat_returns_top_logprobs_streamed_or_not(up: Running, temperature: float) -> None:
    client, session = await an_agent(up, sampling=Sampling(temperature=temperature, max_tokens=12, seed=3))
    ask: Any = {"model": "m", "messages": HELLO, "logprobs": True, "top_logprobs": 4}
    answer = (await client.chat.completions.create(**ask)).choices[0].logprobs
    assert answer is not None and answer.content is not None
    streamed: list[Any] = []
    async for chunk in await client.chat.completions.create(stream=True, **ask):
        for choice in chunk.choices:
            streamed += choice.logprobs.content if choice.logprobs else []
    turns = await recorded(up, session)
    for turn, told in zip(turns, (answer.content, streamed), strict=True):
        assert [entry.logprob for entry in told] == list(turn.logprobs)
    for entry in (*answer.content, *streamed):
        assert len(entry.top_logprobs) == 4
        logprobs = [top.logprob for top in entry.top_logprobs]
        assert logprobs == sorted(logprobs, reverse=True)
        same = [top.logprob for top in entry.top_logprobs if top.bytes == entry.bytes]
        assert same in ([entry.logprob], [])
        if temperature == 0:
            assert entry.top_logprobs[0].token == entry.token


@pytest.mark.parametrize("stream", [False, True])
async def test_constrained_top_logprobs_are_of_allowed_tokens(up: Running, stream: bool) -> None:
    client, _ = await an_agent(up, sampling=Sampling(temperature=1.3, max_tokens=12))
    ask: Any = {"model": "m", "messages": HELLO, "logprobs": True, "top_logprobs": 20}
    ask["extra_body"] = {"guided_choice": ["yes", "no"]}
    told: list[Any] = []
    if stream:
        async for chunk in await client.chat.completions.create(stream=True, **ask):
            for choice in chunk.choices:
                told += choice.logprobs.content if choice.logprobs else []
    else:
        answer = (await client.chat.completions.create(**ask)).choices[0].logprobs
        told = answer.content if answer and answer.content else []
    first = told[0].top_logprobs
    assert sum(math.exp(top.logprob) for top in first) == pytest.approx(1.0, abs=1e-3)
    assert {top.token[0] for top in first} <= {"y", "n", "<"}  # the choices, or reasoning before them


async def test_logprob_bytes_are_those_of_the_token(tmp_path: Path) -> None:
    text = "aé😀"
    ids = VOCAB.encode(text)
    assert any("\ufffd" in VOCAB.decode([token]) for token in ids)  # or this would show nothing
    engine = ScriptedEngine([ScriptedReply(token_ids=(*ids, STOP or 0))])
    async with running(engine, tmp_path / "s") as up:
        client = await up.agent()
        answer = await client.chat.completions.create(
            model="m", messages=HELLO, logprobs=True, top_logprobs=2, extra_body={"return_token_ids": True}
        )
    content = answer.choices[0].logprobs
    assert content is not None and content.content is not None
    told = [bytes(entry.bytes or ()) for entry in content.content]
    assert b"".join(told[:-1]).decode() == text
    assert told[-1] == b"<|im_end|>"
    assert [bytes(entry.top_logprobs[0].bytes or ()) for entry in content.content] == told


async def test_chat_scores_prompts_as_vllm_does(up: Running, model: Path) -> None:
    client, _ = await an_agent(up, sampling=Sampling(temperature=0.5, max_tokens=2))
    ask: Any = {"model": "m", "messages": HELLO}
    more = {"prompt_logprobs": 2, "return_token_ids": True, "return_tokens_as_token_ids": True}
    answer = (await client.chat.completions.create(**ask, logprobs=True, extra_body=more)).model_dump()
    ids, told = answer["prompt_token_ids"], answer["prompt_logprobs"]
    assert told[0] is None and len(told) == len(ids)
    logprobs = direct(model, ids)
    for n, entry in enumerate(told[1:], 1):
        own = entry[str(ids[n])]
        assert own["logprob"] == pytest.approx(logprobs[n - 1, ids[n]].item(), abs=TOLERANCE)
        assert {str(i) for i in logprobs[n - 1].topk(2).indices.tolist()} <= set(entry)
    choice = answer["choices"][0]
    assert [e["token"] for e in choice["logprobs"]["content"]] == [
        f"token_id:{i}" for i in choice["token_ids"]
    ]


def direct(model: Path, ids: list[int]) -> Any:
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([ids])).logits[0]
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"top_logprobs": 3}, "top_logprobs=3 needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs=21 must be between 0 and 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs=-1"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs is not available in a stream"),
    ],
)
async def test_chat_refuses_invalid_logprob_parameters(up: Running, more: dict[str, Any], named: str) -> None:
    client, _ = await an_agent(up)
    with pytest.raises(openai.BadRequestError, match=named):
        await client.chat.completions.create(model="m", messages=HELLO, extra_body=more)


class Silent(ScriptedEngine):
    """Tells no log-probabilities but those of what it samples, as servers may."""

    async def info(self) -> EngineInfo:
        return structs.replace(await super().info(), max_top_logprobs=2, prompt_logprobs=False)


async def test_unsupported_logprobs_get_400(tmp_path: Path) -> None:
    engine = Silent(lambda _: ScriptedReply(token_ids=(*VOCAB.encode("Hi."), STOP or 0)))
    async with running(engine, tmp_path / "s") as up:
        client = await up.agent()
        asks: list[tuple[str, Any]] = [
            ("top_logprobs=3: the engine", {"logprobs": True, "top_logprobs": 3}),
            ("prompt_logprobs: the engine", {"prompt_logprobs": 0}),
        ]
        for named, more in asks:
            with pytest.raises(openai.BadRequestError, match=named):
                await client.chat.completions.create(model="m", messages=HELLO, extra_body=more)
        with pytest.raises(openai.BadRequestError, match="echo with logprobs: the engine"):
            await client.completions.create(model="m", prompt="Hi", echo=True, logprobs=1)
        with pytest.raises(openai.BadRequestError, match="logprobs=3: the engine"):
            await client.completions.create(model="m", prompt="Hi", logprobs=3)
        ok = await client.chat.completions.create(model="m", messages=HELLO, logprobs=True, top_logprobs=2)
        assert ok.choices[0].message.content == "Hi."
        turns = (await up.client.finalize("r.1")).turns
        assert len(turns) == 1
        client = await up.agent("r.2", unsupported="ignore")
        more: Any = {"logprobs": True, "top_logprobs": 3}
        answer = await client.chat.completions.create(
            model="m", messages=HELLO, **more, extra_body={"prompt_logprobs": 1}
        )
        assert answer.choices[0].logprobs and answer.choices[0].logprobs.content
        assert [len(entry.top_logprobs) for entry in answer.choices[0].logprobs.content] == [2] * 4
        (turn,) = (await up.client.finalize("r.2")).turns
        assert turn.tags == ("ignored:prompt_logprobs", "ignored:top_logprobs")


# --- completions ----------------------------------------------------------------------------------

PROMPT = 'What is the value of key "seven"? é'


async def test_completions_echo_and_score_the_prompt(up: Running, model: Path) -> None:
    client, session = await an_agent(up, sampling=Sampling(temperature=0.7, max_tokens=6))
    ask: Any = {"model": "m", "prompt": PROMPT, "echo": True, "logprobs": 3, "max_tokens": 6, "seed": 1}
    answer = await client.completions.create(**ask, extra_body={"return_token_ids": True})
    choice: Any = answer.choices[0]
    ids, told = choice.prompt_token_ids, choice.logprobs
    assert choice.text.startswith(PROMPT)
    assert len(told.tokens) == len(told.token_logprobs) == len(ids) + len(choice.token_ids)
    assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
    logprobs = direct(model, ids)
    scored = [logprobs[n - 1, ids[n]].item() for n in range(1, len(ids))]
    assert told.token_logprobs[1 : len(ids)] == pytest.approx(scored, abs=TOLERANCE)
    assert all(3 <= len(top) <= 4 for top in told.top_logprobs[1:])
    ends = [*told.text_offset[1:], len(choice.text)]
    for token, start, end in zip(told.tokens, told.text_offset, ends, strict=True):
        # A character that was not completed shows with the token after it.
        assert token.startswith(("bytes:", "<|")) or choice.text[start:end].lstrip("\ufffd") == token
    turn = (await recorded(up, session))[0]
    assert told.token_logprobs[len(ids) :] == list(turn.logprobs)


async def test_completions_stream_equals_the_response(up: Running) -> None:
    client, _ = await an_agent(up, sampling=Sampling(temperature=0.0, max_tokens=5))
    ask: Any = {"model": "m", "prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": 5}
    whole: Any = (await client.completions.create(**ask)).choices[0]
    text, folded = "", {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    async for chunk in await client.completions.create(stream=True, **ask):
        text += chunk.choices[0].text
        if chunk.choices[0].logprobs:
            for name, values in folded.items():
                values += getattr(chunk.choices[0].logprobs, name)
    assert text == whole.text
    assert folded == {name: getattr(whole.logprobs, name) for name in folded}


@pytest.mark.parametrize("stream", [False, True])
async def test_scored_prompt_records_no_turn(up: Running, model: Path, stream: bool) -> None:
    client, session = await an_agent(up, sampling=Sampling(max_tokens=5))
    ask: Any = {"model": "m", "prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0}
    ask["extra_body"] = {"return_token_ids": True}
    if stream:
        chunks = [chunk async for chunk in await client.completions.create(stream=True, **ask)]
        choice: Any = chunks[0].choices[0]
    else:
        answer = await client.completions.create(**ask)
        choice = answer.choices[0]
        assert answer.usage and answer.usage.completion_tokens == 0
    assert choice.text == PROMPT
    logprobs = direct(model, choice.prompt_token_ids)
    scored = [logprobs[n - 1, token].item() for n, token in enumerate(choice.prompt_token_ids) if n]
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(scored, abs=TOLERANCE)
    assert await recorded(up, session) == ()
    with pytest.raises(openai.BadRequestError, match="max_tokens=0"):
        other, _ = await an_agent(up)
        await other.completions.create(model="m", prompt=PROMPT, max_tokens=0)


# --- gemini ---------------------------------------------------------------------------------------


async def test_gemini_returns_top_candidates(up: Running) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=6)
    ticket = await up.client.open(SessionSpec(id=f"s.{next(NAMES)}", sampling=sampling))
    client = genai.Client(
        api_key=ticket.api_key, http_options=types.HttpOptions(base_url=ticket.base_url, timeout=60_000)
    )
    config = types.GenerateContentConfig(response_logprobs=True, logprobs=3)
    ask = partial(client.models.generate_content, model="m", contents="Look it up.", config=config)
    answer = await asyncio.to_thread(ask)
    assert answer.candidates
    candidate = answer.candidates[0]
    result = candidate.logprobs_result
    assert result and result.chosen_candidates and result.top_candidates
    (turn,) = await recorded(up, ticket.id)
    assert [chosen.log_probability for chosen in result.chosen_candidates] == list(turn.logprobs)
    assert [chosen.token_id for chosen in result.chosen_candidates] == list(turn.token_ids)
    assert candidate.avg_logprobs == pytest.approx(sum(turn.logprobs) / len(turn.logprobs))
    for chosen, top in zip(result.chosen_candidates, result.top_candidates, strict=True):
        assert top.candidates and len(top.candidates) == 3
        assert top.candidates[0] == chosen
    status, told = await up.ask(
        "POST",
        f"/s/{ticket.id}/v1beta/models/m:generateContent",
        {"contents": [{"parts": [{"text": "x"}]}], "generationConfig": {"logprobs": 2}},
        ADMIN,
    )
    assert status == 400 and "generationConfig.logprobs=2 needs responseLogprobs" in told["error"]["message"]


# --- answers that are given again -----------------------------------------------------------------


async def test_repeated_answer_has_its_logprobs(tmp_path: Path) -> None:
    def said(call: Any) -> ScriptedReply:
        return ScriptedReply(token_ids=(*VOCAB.encode("Hello there."), STOP or 0))

    ask: Any = {"model": "m", "messages": HELLO, "logprobs": True, "top_logprobs": 3}
    ask["extra_headers"] = {"Idempotency-Key": "k1"}
    answers = []
    for _ in range(2):  # the second time, after the gateway was started again
        async with running(ScriptedEngine(said), tmp_path / "s") as up:
            client = await up.agent()
            answers += [await client.chat.completions.create(**ask) for _ in range(2)]
    assert len({answer.id for answer in answers}) == 1
    assert all(answer.choices == answers[0].choices for answer in answers)
    async with running(ScriptedEngine(said), tmp_path / "s") as up:
        client = await up.agent()
        more = await client.chat.completions.create(**ask | {"top_logprobs": 5})
        assert more.id != answers[0].id  # what was not told then is sampled anew
        record = await up.client.finalize("r.1")
        assert [turn.status for turn in record.turns] == [TurnStatus.COMMITTED] * 2
