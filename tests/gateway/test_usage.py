"""What answers say about their size: every sampled token, and which of them were thought."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from afield.chat.parsers.harmony import HarmonyReader
from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.interfaces import SessionSpec
from support.gateways import Running, running, vocabulary
from support.invariants import STOP

pytestmark = pytest.mark.anyio
VOCAB = vocabulary()
OPENING, CLOSING = "<think>", "</think>"
TEXT = f"{OPENING}\nHm, drei Äpfel? </thin, no.\n{CLOSING}\n\nSeven."
HI = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "chat": ("v1/chat/completions", "v1/chat/completions", {"messages": HI}),
    "responses": ("v1/responses", "v1/responses", {"input": "Hi"}),
    "anthropic": ("v1/messages", "v1/messages", {"messages": HI, "max_tokens": 200}),
    "gemini": (
        "v1beta/models/m:generateContent",
        "v1beta/models/m:streamGenerateContent?alt=sse",
        {"contents": [{"parts": [{"text": "Hi"}]}]},
    ),
}


def thought(ids: tuple[int, ...]) -> int:
    """The tokens that begin after the opening and before the closing has ended, counted in bytes."""
    text = TEXT.encode()
    first, last = len(OPENING), text.index(CLOSING.encode()) + len(CLOSING)
    at, count = 0, 0
    for token in ids:
        count += first <= at < last
        at += len(VOCAB.piece(token))
    return count


async def usage(up: Running, dialect: str, stream: bool, key: str) -> dict[str, Any]:
    whole, streamed, body = ASKED[dialect]
    body = {"model": "m", **body}
    if stream and dialect != "gemini":
        body |= {"stream": True} | ({"stream_options": {"include_usage": True}} if dialect == "chat" else {})
    url = f"{up.url}/s/r.1/{streamed if stream else whole}"
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) as http,
        http.post(url, json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
        text = await answer.text()
    lines = [line[5:] for line in text.splitlines() if line.startswith("data:")] if stream else [text]
    events = [json.loads(line) for line in lines if line.strip() != "[DONE]"]
    events = [event.get("response", event) for event in events]
    name = "usageMetadata" if dialect == "gemini" else "usage"
    return [event[name] for event in events if event.get(name)][-1]


def counts(dialect: str, told: dict[str, Any]) -> tuple[int, int]:
    """All that was sampled, and what of it was thought."""
    if dialect == "chat":
        return told["completion_tokens"], told["completion_tokens_details"]["reasoning_tokens"]
    if dialect == "responses":
        return told["output_tokens"], told["output_tokens_details"]["reasoning_tokens"]
    if dialect == "anthropic":
        return told["output_tokens"], told["output_tokens_details"]["thinking_tokens"]
    reasoned = told.get("thoughtsTokenCount", 0)
    assert told["totalTokenCount"] == told["promptTokenCount"] + told["candidatesTokenCount"] + reasoned
    return told["candidatesTokenCount"] + reasoned, reasoned


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ASKED)
async def test_reasoning_tokens_are_counted(tmp_path: Path, dialect: str, stream: bool) -> None:
    usual = (*VOCAB.encode(TEXT), STOP)
    odd = (*(token for letter in TEXT for token in VOCAB.encode(letter)), STOP)  # its markers too
    none = (*VOCAB.encode("Seven."), STOP)
    cut = usual[: thought(usual) - 2]  # in the middle of a thought
    script = [ScriptedReply(token_ids=ids, chunks=(1, 3)) for ids in (usual, odd, none, cut)]
    async with running(ScriptedEngine(script), tmp_path) as up:
        key = (await up.client.open(SessionSpec(id="r.1"))).api_key
        told = [counts(dialect, await usage(up, dialect, stream, key)) for _ in script]
    assert thought(usual) != thought(odd)
    assert told[0] == (len(usual), thought(usual))
    assert told[1] == (len(odd), thought(odd))
    assert told[2] == (len(none), 0)
    assert told[3] == (len(cut), thought(cut))


def test_reasoning_tokens_of_all_channels_are_counted() -> None:
    reader = HarmonyReader(tools=True)
    begin = "<|start|>assistant<|channel|>"
    call = f"{begin}commentary to=functions.look <|constrain|>json<|message|>{{}}<|call|>"
    reply = (
        "<|channel|>analysis<|message|>Hm.<|end|>"
        f"{call}{begin}analysis<|message|>So!<|end|>{begin}final<|message|>Yes."
    )
    thinking = 0
    for letter in reply:
        thinking += reader.thinking
        reader.feed(letter)
    assert thinking == len("Hm.<|end|>") + len("So!<|end|>")
    assert reader.reply.reasoning == "Hm.So!"
