"""Stop strings: a turn ends with the token that completes one, whatever the engine and the chunks."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.engines.sglang.wire import body as sglang_body
from afield.engines.torch.engine import TorchEngine
from afield.engines.vllm.wire import completions_body, generate_body
from afield.gateway.engine_pool import EnginePool
from afield.gateway.stop_strings import StopStrings
from afield.interfaces import Chunk, GenerateRequest
from afield.types import FinishReason, Sampling, VersionSpan
from support.dialect_clients import DIALECTS, read
from support.dialect_session import Client, Place, place
from support.gateways import POLICY
from support.invariants import STOP, TOKENIZER
from support.random_agents import TOOLSETS, spelled
from support.tokenizers import load_tokenizer

pytestmark = pytest.mark.anyio
STOPPED = "Thought: look.\nObservation:"


def ids_of(text: str, seed: int = 0) -> tuple[int, ...]:
    return tuple(spelled(text, random.Random(seed)))


def text_of(ids: Sequence[int]) -> str:
    return TOKENIZER.decode(list(ids), skip_special_tokens=False)


def request(dialect: str, text: str, stop: str, stream: bool, toolset: int = 0) -> tuple[str, bytes]:
    messages = [{"role": "user", "content": text}]
    if dialect == "completions":
        body = {"prompt": text, "stop": [stop], "max_tokens": 200, "stream": stream, "model": "m"}
        return "/v1/completions", json.dumps(body).encode()
    if dialect == "anthropic":
        body = {
            "messages": messages,
            "stop_sequences": [stop],
            "max_tokens": 200,
            "stream": stream,
            "model": "m",
        }
        return "/v1/messages", json.dumps(body).encode()
    if dialect == "gemini":
        contents = [{"role": "user", "parts": [{"text": text}]}]
        config = {"stopSequences": [stop], "maxOutputTokens": 200}
        verb = "streamGenerateContent?alt=sse" if stream else "generateContent"
        return f"/v1beta/models/m:{verb}", json.dumps(
            {"contents": contents, "generationConfig": config}
        ).encode()
    body: dict[str, Any] = {"messages": messages, "stop": [stop], "max_tokens": 200, "stream": stream}
    body |= {"tools": list(TOOLSETS[toolset])} if toolset else {}
    return "/v1/chat/completions", json.dumps(body | {"model": "m"}).encode()


async def ask(client: Client, dialect: str, stop: str, stream: bool = True, toolset: int = 0) -> str:
    """The text that a client gets."""
    path, body = request(dialect, "Hi", stop, stream, toolset)
    answer = await client.door("POST", path, body)
    assert (answer.status, answer.whole) == (200, True), answer
    if dialect != "completions":
        return read(dialect, stream, answer.body).reply.content
    lines = [line[6:] for line in answer.body.decode().split("\n") if line.startswith("data: {")]
    parts = [json.loads(line) for line in lines] if stream else [json.loads(answer.body)]
    return "".join(choice["text"] for part in parts for choice in part["choices"])


async def one_turn(there: Place) -> dict[str, Any]:
    turns = (await there.get("/sessions/r.1/turns?prompt_ids=1"))["turns"]
    return turns[-1]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("dialect", [*(d for d in DIALECTS if d != "responses"), "completions"])
@pytest.mark.parametrize("chunks", [(1,), (3,), (100,)])
async def test_a_turn_ends_with_the_token_that_completes_the_stop_string(
    tmp_path: Path, dialect: str, stream: bool, chunks: tuple[int, ...]
) -> None:
    ids = ids_of(STOPPED + " none. And much more that nobody asked for.")
    end = next(n for n in range(len(ids)) if "Observation:" in text_of(ids[:n]))
    engine = ScriptedEngine(lambda _: ScriptedReply(token_ids=(*ids, STOP), chunks=chunks), max_context=8192)
    async with place(tmp_path, engine) as there:
        client = await there.client()
        assert await ask(client, dialect, "Observation:", stream) == "Thought: look.\n"
        turn = await one_turn(there)
        state = await there.gateway.state("r.1")
    assert tuple(turn["token_ids"]) == ids[:end]
    assert turn["finish_reason"] == "stop"
    assert turn["logprobs"] == list(there.ledger.recorded[0].logprobs[:end])
    assert [turn["versions"][0][0], turn["versions"][-1][1]] == [0, end]
    assert state.tokens["sampled"] == end


async def test_a_stop_string_that_ends_inside_a_token_keeps_that_token_whole(tmp_path: Path) -> None:
    ids = (*TOKENIZER.encode("It is red", add_special_tokens=False).ids,)
    whole = next(n for n in ids if len(text_of([n])) > 2)
    inner = text_of([whole])[:2]
    engine = ScriptedEngine(lambda _: ScriptedReply(token_ids=(*ids, *ids, STOP)), max_context=8192)
    async with place(tmp_path, engine) as there:
        client = await there.client()
        await ask(client, "chat", inner)
        turn = await one_turn(there)
    assert turn["token_ids"][-1] == whole
    assert inner not in text_of(turn["token_ids"][:-1])


async def test_tokens_after_a_stop_string_are_not_in_the_next_prompt(tmp_path: Path) -> None:
    ids = ids_of(STOPPED + " none, and much more.")
    engine = ScriptedEngine(lambda _: ScriptedReply(token_ids=(*ids, STOP), chunks=(50,)), max_context=8192)
    async with place(tmp_path, engine) as there:
        client = await there.client()
        shown = await ask(client, "chat", "Observation:")
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": shown},
            {"role": "user", "content": "Found it."},
        ]
        body = json.dumps({"model": "m", "messages": messages, "max_tokens": 200}).encode()
        assert (await client.door("POST", "/v1/chat/completions", body)).status == 200
        turn = await one_turn(there)
    assert turn["parent"] == "t1"
    prompt = text_of(turn["prompt_ids"])
    assert "Observation:" in prompt and "much more" not in prompt


@pytest.mark.parametrize("stop", ["\n", " ", "ab", "<tool"])
def test_stop_string_result_is_independent_of_chunks(stop: str) -> None:
    tokens = load_tokenizer()
    text = "<think>\nab <tool \n</think>\n\nOne two\n\n<tool_call>\n{broken ab</tool_call> ab <toolx>\nend"
    ids = ids_of(text)

    def read_in(sizes: Sequence[int]) -> tuple[tuple[int, ...], str, str]:
        parser = tokens.parser(tools=[])
        stops = StopStrings((stop,), parser)
        kept: list[int] = []
        shown, at = "", 0
        for size in sizes:
            part = ids[at : at + size]
            n, events = stops.feed(part)
            kept += part[:n]
            shown += "".join(getattr(e, "text", "") for e in events if type(e).__name__ == "TextDelta")
            at += size
            if stops.hit:
                break
        stops.finish()
        return tuple(kept[: len(kept) - stops.beyond(kept)]), shown, stops.cut(parser.reply).content

    one_by_one = read_in([1] * len(ids))
    assert one_by_one[1] == one_by_one[2]
    assert read_in([len(ids)]) == read_in([3] * len(ids)) == one_by_one


async def test_stop_string_in_a_malformed_call_ends_the_turn(tmp_path: Path) -> None:
    text = 'So.\n<tool_call>\n{"name": "bash", "arguments": {oops HALT and more and more}}\n</tool_call>'
    ids = ids_of(text)
    end = next(n for n in range(len(ids)) if "HALT" in text_of(ids[:n]))
    engine = ScriptedEngine(lambda _: ScriptedReply(token_ids=(*ids, STOP), chunks=(4,)), max_context=8192)
    async with place(tmp_path, engine) as there:
        client = await there.client()
        shown = await ask(client, "chat", "HALT", toolset=1)
        turn = await one_turn(there)
    assert shown.endswith("{oops ")
    assert tuple(turn["token_ids"]) == ids[:end]


async def test_stop_string_in_reasoning_is_ignored(tmp_path: Path) -> None:
    ids = ids_of("<think>\nI could say HALT here.\n</think>\n\nDone HALT never")
    engine = Detokenising(ids)
    async with place(tmp_path, engine) as there:
        client = await there.client()
        assert (await ask(client, "chat", "HALT")).strip() == "Done"
        turn = await one_turn(there)
    end = next(n for n in range(len(ids)) if text_of(ids[:n]).count("HALT") == 2)
    assert tuple(turn["token_ids"]) == ids[:end]
    assert turn["logprobs"] == [-0.25 - n for n in range(end)]
    assert [turn["versions"][0][0], turn["versions"][-1][1]] == [0, end]
    # It ended at the first one, and was asked to go on behind it.
    assert [call.stop for call in engine.calls] == [("HALT",), ()]
    assert engine.calls[1].prompt_ids == (*engine.calls[0].prompt_ids, *ids[: engine.ends[0]])
    assert engine.calls[1].max_tokens == engine.calls[0].max_tokens - engine.ends[0]


class Detokenising(ScriptedEngine):
    """An engine that ends a call where a stop string is complete, and tells exact versions at the end."""

    def __init__(self, ids: tuple[int, ...]) -> None:
        super().__init__([], max_context=8192)
        self.ids = (*ids, STOP)
        self.calls: list[GenerateRequest] = []
        self.ends: list[int] = []

    async def generate(self, call: GenerateRequest) -> AsyncGenerator[Chunk]:
        done = len(call.prompt_ids) - len(self.calls[0].prompt_ids) if self.calls else 0
        self.calls.append(call)
        ids = self.ids[done:]
        end = next((n for n in range(len(ids)) if any(s in text_of(ids[:n]) for s in call.stop)), len(ids))
        self.ends.append(end)
        for n, token in enumerate(ids[:end]):
            last = n + 1 == end
            yield Chunk(
                token_ids=(token,),
                logprobs=(-0.25 - done - n,),
                low=0,
                high=1,
                finish=FinishReason.STOP if last else None,
                versions=(VersionSpan(0, end, 0, 0),) if last else None,
            )


async def test_torch_engine_stops_at_a_stop_string(tmp_path: Path) -> None:
    async with place(tmp_path, TorchEngine(POLICY)) as there:
        client = await there.client()
        tokens = there.gateway.tokenizer
        path, body = request("completions", "Hi", "\uffff", True)
        await client.door("POST", path, body)
        sampled = (await one_turn(there))["token_ids"]
        stop = next(t for token in sampled[3:] if (t := tokens.decode([token]).strip()) and "\ufffd" not in t)
        path, body = request("completions", "Hi", stop, True)
        await client.door("POST", path, body)
        turn = await one_turn(there)
    assert tokens.decode(turn["token_ids"]).count(stop) <= 1
    if turn["finish_reason"] == "stop" and turn["token_ids"][-1] != STOP:
        assert stop not in tokens.decode(turn["token_ids"][:-1])


CALL = GenerateRequest(
    id="c",
    session_id="s",
    prompt_ids=(1, 2),
    sampling=Sampling(),
    max_tokens=5,
    stop_ids=(9,),
    stop=("END", "\n\n"),
)


def test_vllm_and_sglang_get_the_stop_strings_and_keep_their_tokens() -> None:
    ids: Any = b"[1,2]"
    sampling = generate_body("m", CALL, 5, ids)["sampling_params"]
    assert (sampling["stop"], sampling["detokenize"]) == (("END", "\n\n"), True)
    assert sampling["include_stop_str_in_output"] is True
    assert completions_body("m", CALL, 5, ids)["stop"] == ("END", "\n\n")
    assert sglang_body(CALL, 5)["sampling_params"]["stop"] == ("END", "\n\n")
    assert sglang_body(CALL, 5)["sampling_params"]["no_stop_trim"] is True


def test_a_call_without_stop_strings_is_not_detokenised() -> None:
    plain = structs.replace(CALL, stop=())
    ids: Any = b"[1,2]"
    sampling = generate_body("m", plain, 5, ids)["sampling_params"]
    assert "stop" not in sampling and sampling["detokenize"] is False
    assert "stop" not in completions_body("m", plain, 5, ids)
    assert "stop" not in sglang_body(plain, 5)["sampling_params"]


async def test_a_call_moves_to_another_worker_with_its_stop_strings() -> None:
    broken = ScriptedEngine([ScriptedReply(token_ids=(5, 6), fail="unavailable")])
    whole = ScriptedEngine([ScriptedReply(token_ids=(7, 9))])
    async with EnginePool({"a": broken, "b": whole}, tries=2) as pool:
        chunks = [chunk async for chunk in pool.generate(structs.replace(CALL, stream=True))]
    assert [t for chunk in chunks for t in chunk.token_ids] == [5, 6, 7, 9]
