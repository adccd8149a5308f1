"""What clients make of their history: one conversation stays one row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.turn_tree import arguments_value
from support.dialect_session import Client, Place, calls, place, said
from support.random_agents import TOOLSETS

pytestmark = pytest.mark.anyio
TOOLS = list(TOOLSETS[1])
NO_ARGUMENTS = '\n<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>'


def answering(*texts: str) -> ScriptedEngine:
    left = iter(texts)

    def answer(_: Any) -> ScriptedReply:
        return said(next(left))

    return ScriptedEngine(answer, max_context=8192)


async def post(client: Client, path: str, body: Any) -> Any:
    answer = await client.door("POST", path, json.dumps(body).encode())
    assert answer.status == 200, answer
    return json.loads(answer.body)


async def rows(there: Place) -> list[Any]:
    return (await there.get("/sessions/r.1/trajectories"))["trajectories"]


async def turns(there: Place) -> list[Any]:
    return (await there.get("/sessions/r.1/turns?prompt_ids=1"))["turns"]


async def test_reasoning_echoed_as_text_is_not_an_edit(tmp_path: Path) -> None:
    """As LiteLLM sends a Gemini conversation of a model whose thinking it does not know."""
    texts = ["<think>\nHm.\n</think>\n\nLook." + calls("a"), "<think>\nWell.\n</think>\n\nDone.", "End."]
    async with place(tmp_path, answering(*texts)) as there:
        client = await there.client()
        contents: list[Any] = [{"role": "user", "parts": [{"text": "Hi"}]}]
        tools = [{"functionDeclarations": [tool["function"] for tool in TOOLS]}]
        for n in range(3):
            body = {"contents": contents, "tools": tools}
            got = await post(client, "/v1beta/models/gemini-2.5-pro:generateContent", body)
            parts = got["candidates"][0]["content"]["parts"]
            called = [part["functionCall"] for part in parts if "functionCall" in part]
            turn = (await turns(there))[-1]["messages"][-1]
            text = turn.get("reasoning", "") + "\n" + turn.get("content", "")
            echoed: list[Any] = [{"text": text}]
            echoed += [{"function_call": {"name": c["name"], "args": c["args"]}} for c in called]
            contents.append({"role": "model", "parts": echoed})
            results = [
                {"function_response": {"name": c["name"], "response": {"content": "4"}}} for c in called
            ]
            contents.append({"role": "user", "parts": results or [{"text": f"More {n}?"}]})
        assert [turn["parent"] for turn in await turns(there)] == [None, "t1", "t2"]
        assert len(await rows(there)) == 1


@pytest.mark.parametrize("after", ["the calls", "the results"])
async def test_text_moved_behind_its_calls_is_rendered_once(tmp_path: Path, after: str) -> None:
    """As Codex 0.77 sends it: items without ids, the text of a turn behind its calls or their outputs."""
    async with place(tmp_path, answering("Let me look." + calls("a"), "Found it.", "End.")) as there:
        client = await there.client()
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
        items: list[Any] = [{"type": "message", "role": "user", "content": "Hi"}]
        got = await post(client, "/v1/responses", {"model": "m", "input": items, "tools": tools})
        call = next(item for item in got["output"] if item["type"] == "function_call")
        kept = {key: call[key] for key in ("type", "name", "arguments", "call_id")}
        text = {"type": "message", "role": "assistant", "content": "Let me look."}
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "4"}
        items += [kept, text, output] if after == "the calls" else [kept, output, text]
        await post(client, "/v1/responses", {"model": "m", "input": items, "tools": tools})
        second = {"type": "message", "role": "assistant", "content": "Found it."}
        items += [second, {"type": "message", "role": "user", "content": "And?"}]
        await post(client, "/v1/responses", {"model": "m", "input": items, "tools": tools})
        made = await turns(there)
        assert [turn["parent"] for turn in made] == [None, "t1", "t2"]
        prompt = there.gateway.tokenizer.decode(made[-1]["prompt_ids"])
        assert prompt.count("Let me look.") == 1
        assert len(await rows(there)) == 1


async def test_next_turn_with_equal_text_is_separate(tmp_path: Path) -> None:
    async with place(tmp_path, answering("Look." + calls("a"), "Look.", "End.")) as there:
        client = await there.client()
        messages: list[Any] = [{"role": "user", "content": "Hi"}]
        for _ in range(3):
            body = {"model": "m", "messages": messages, "tools": TOOLS}
            reply = (await post(client, "/v1/chat/completions", body))["choices"][0]["message"]
            made = reply.get("tool_calls") or ()
            # The text of a turn with calls is dropped, as some clients do.
            messages.append({**reply, "content": None} if made else reply)
            messages += [{"role": "tool", "tool_call_id": c["id"], "content": "4"} for c in made] or [
                {"role": "user", "content": "And?"}
            ]
        assert [turn["parent"] for turn in await turns(there)] == [None, "t1", "t2"]


@pytest.mark.parametrize("spelled", ["", "null", "{}", " { } "])
async def test_empty_arguments_match_in_any_spelling(tmp_path: Path, spelled: str) -> None:
    async with place(tmp_path, answering("Now." + NO_ARGUMENTS, "Done.")) as there:
        client = await there.client()
        messages: list[Any] = [{"role": "user", "content": "Hi"}]
        body = {"model": "m", "messages": messages, "tools": TOOLS}
        await post(client, "/v1/chat/completions", body)
        call = {"id": "another", "type": "function", "function": {"name": "bash", "arguments": spelled}}
        messages.append({"role": "assistant", "content": "Now.", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": "another", "content": "12:00"})
        await post(client, "/v1/chat/completions", body)
        made = await turns(there)
    assert (made[1]["parent"], made[1]["links"]) == ("t1", [])


def test_changed_arguments_do_not_match() -> None:
    assert len({arguments_value(text) for text in ("{}", '{"a":null}', "[]", '"null"', "0")}) == 5


@pytest.mark.parametrize("dialect", ["chat", "responses", "anthropic", "gemini"])
async def test_a_prefilled_answer_is_tagged(tmp_path: Path, dialect: str) -> None:
    said_so = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]
    bodies: dict[str, tuple[str, Any]] = {
        "chat": ("/v1/chat/completions", {"model": "m", "messages": said_so}),
        "responses": ("/v1/responses", {"model": "m", "input": said_so}),
        "anthropic": ("/v1/messages", {"model": "m", "messages": said_so, "max_tokens": 50}),
        "gemini": (
            "/v1beta/models/m:generateContent",
            {
                "contents": [
                    {"role": "user", "parts": [{"text": "Hi"}]},
                    {"role": "model", "parts": [{"text": "Well,"}]},
                ]
            },
        ),
    }
    async with place(tmp_path, answering("Yes.", "Yes.")) as there:
        client = await there.client()
        await post(client, *bodies[dialect])
        (turn,) = await turns(there)
    assert turn["tags"].count("unenforced:prefill") == 1
