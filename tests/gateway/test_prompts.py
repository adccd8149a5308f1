"""What every gateway must survive: each habit of real clients, and where it lands in the forest."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.gateway.turn_ids import response_id
from afield.interfaces import SessionSpec
from afield.types import Message
from support.dialect_clients import LAST, Ask, Heard, read, write
from support.dialect_session import Client, Place, answering, calls, said, user
from support.gateways import running
from support.invariants import SINGLE, Seen
from support.random_agents import TOOLSETS

pytestmark = pytest.mark.anyio
Row = dict[str, Any]


async def chat(client: Client, *messages: Row, headers: Any = None, **options: Any) -> Heard:
    """A Chat request as it is written here."""
    toolset = options.pop("toolset", 0)
    offered = {"tools": list(TOOLSETS[toolset])} if toolset else {}
    body = json.dumps({"model": "m", "messages": messages, **offered, **options}).encode()
    answer = await client.door("POST", "/v1/chat/completions", body, headers=headers)
    assert answer.status == 200, answer
    heard = read("chat", bool(options.get("stream")), answer.body)
    client.tools[heard.turn_id] = list(TOOLSETS[toolset])
    return heard


async def good(there: Place, client: Client) -> Seen:
    """The session as seen from outside, with every invariant kept."""
    seen = await there.look(client)
    for check in SINGLE.values():
        check(structs.replace(seen, tools={t["id"]: seen.tools.get(t["id"], []) for t in seen.turns}))
    return seen


def parents(seen: Seen) -> list[str | None]:
    return [turn["parent"] for turn in seen.turns]


def links(seen: Seen, turn_id: str) -> list[tuple[str, str]]:
    return [(link["type"], link["to"]) for link in seen.by_id[turn_id]["links"]]


def excluded(seen: Seen) -> dict[str, str]:
    return {e["turn"]: e["reason"] for e in seen.linear["excluded"]}


def u(text: Any) -> Row:
    return {"role": "user", "content": text}


def assistant(heard: Heard, **changed: Any) -> Row:
    made = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in heard.reply.tool_calls
    ]
    row: Row = {"role": "assistant", "content": heard.reply.content or None}
    return row | ({"tool_calls": made} if made else {}) | changed


def results(heard: Heard) -> list[Row]:
    return [
        {"role": "tool", "tool_call_id": call.id, "content": f"result {n}"}
        for n, call in enumerate(heard.reply.tool_calls)
    ]


# --- 1 to 6: histories that come back changed -----------------------------------------------------


async def test_system_messages_and_content_parts_are_accepted_anywhere(tmp_path: Path) -> None:
    async with answering(tmp_path, said("Yes.")) as there:
        client = await there.client()
        head = {"role": "developer", "content": "Be brief."}
        first = await chat(client, head, u("Hi"))
        parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
        middle = {"role": "system", "content": [{"type": "text", "text": "The date changed."}]}
        again = {"role": "system", "content": "Be brief."}
        await chat(client, again, u(parts), assistant(first), middle, u("And?"))
        assert parents(await good(there, client)) == [None, "t1"]


async def test_unknown_message_keys_are_ignored(tmp_path: Path) -> None:
    async with answering(tmp_path, said("Look." + calls("a"))) as there:
        client = await there.client()
        first = await chat(client, u("Hi"), toolset=1)
        row = assistant(first, annotations=[], audio=None, provider={"x": 1})
        row["tool_calls"][0] |= {"index": 0, "cache_control": {"type": "ephemeral"}}
        (result,) = results(first)
        await chat(
            client, u("Hi") | {"id": "m1"}, row, result | {"is_error": False}, toolset=1, metadata={"a": 1}
        )
        assert parents(await good(there, client)) == [None, "t1"]


SPELLINGS = {
    "compact": '{"item":"café","n":10000}',
    "escaped": '{"item": "caf\\u00e9", "n": 10000}',
    "in another order": '{"n": 10000, "item": "café"}',
    "with another number": '{"item": "café", "n": 1e4}',
}


@pytest.mark.parametrize("how", SPELLINGS)
async def test_arguments_are_compared_as_values(tmp_path: Path, how: str) -> None:
    call = '<tool_call>\n{"name": "get_price", "arguments": {"item": "café", "n": 10000}}\n</tool_call>'
    async with answering(tmp_path, said(call), said("Done.")) as there:
        client = await there.client()
        first = await chat(client, u("Hi"), toolset=1)
        row = assistant(first)
        row["tool_calls"][0]["function"]["arguments"] = SPELLINGS[how]
        await chat(client, u("Hi"), row, *results(first), toolset=1)
        assert parents(await good(there, client)) == [None, "t1"]


@pytest.mark.parametrize("content", [None, "", [], "absent"])
async def test_null_empty_and_absent_content_are_equal(tmp_path: Path, content: Any) -> None:
    async with answering(tmp_path, said(calls("a")), said("Done.")) as there:
        client = await there.client()
        first = await chat(client, u("Hi"), toolset=1)
        row = assistant(first, content=content)
        if content == "absent":
            del row["content"]
        await chat(client, u("Hi"), row, *results(first), toolset=1)
        assert parents(await good(there, client)) == [None, "t1"]


async def test_reasoning_only_turn_matches_without_reasoning(tmp_path: Path) -> None:
    """Leaving such a turn out as well would make another conversation of it, and no edit of this one."""
    async with answering(tmp_path, said("Yes."), said("No.")) as there:
        client = await there.client()
        silent = {"role": "assistant", "content": ""}
        await chat(client, u("Hi"), silent | {"reasoning_content": "Hm."}, u("And?"))
        edited = {"role": "assistant", "content": "Perhaps."}
        await chat(client, u("Hi"), silent, u("And?"), edited, u("Sure?"))
        seen = await good(there, client)
        assert links(seen, "t2") == [("edit", "t1")]
        roles = [message["role"] for message in seen.by_id["t2"]["messages"]]
        assert roles == ["user", "assistant", "user", "assistant", "user", "assistant"]


async def test_trimmed_text_matches(tmp_path: Path) -> None:
    async with answering(tmp_path, said("  An answer with room around it.\n\n")) as there:
        client = await there.client()
        first = await chat(client, u("Hi"))
        await chat(client, u("Hi"), assistant(first, content=first.reply.content.strip()), u("And?"))
        assert parents(await good(there, client)) == [None, "t1"]


@pytest.mark.parametrize("thought", [None, "Hm", "Hm, let me see.\n", "something else"])
async def test_reasoning_is_ignored_in_matching(tmp_path: Path, thought: str | None) -> None:
    async with answering(tmp_path, said("<think>\nHm, let me see.\n</think>\n\nYes.")) as there:
        client = await there.client()
        first = await chat(client, u("Hi"))
        assert first.reply.reasoning
        await chat(client, u("Hi"), assistant(first, reasoning_content=thought), u("And?"))
        assert parents(await good(there, client)) == [None, "t1"]


async def test_turn_matches_in_pieces_or_without_text(tmp_path: Path) -> None:
    async with answering(tmp_path, said("Let me look." + calls("a", "b"))) as there:
        client = await there.client()
        first = await chat(client, u("Hi"), toolset=1)
        row = assistant(first)
        one, two = ([call] for call in row["tool_calls"])
        split = [
            {"role": "assistant", "content": None, "tool_calls": one},
            {"role": "assistant", "content": None, "tool_calls": two},
        ]
        await chat(client, u("Hi"), *split, *results(first), toolset=1)
        await chat(client, u("Hi"), row | {"content": None}, *results(first), toolset=1)
        first_result, second_result = results(first)
        by_call = [split[0], first_result, split[1], second_result]
        await chat(client, u("Hi"), *by_call, toolset=1)
        await chat(client, u("Hi"), row, second_result, first_result, toolset=1)
        assert parents(await good(there, client)) == [None, "t1", "t1", "t1", "t1"]


async def test_calls_turned_into_prose_are_an_edit(tmp_path: Path) -> None:
    async with answering(tmp_path, said("Let me look." + calls("a")), said("Done.")) as there:
        client = await there.client()
        await chat(client, u("Hi"), toolset=1)
        prose = {"role": "assistant", "content": "I called get_price."}
        await chat(client, u("Hi"), prose, u("It says 4."), toolset=1)
        seen = await good(there, client)
        assert links(seen, "t2") == [("edit", "t1")]
        assert excluded(seen) == {}


# --- 7 and 8: the same again ----------------------------------------------------------------------


async def test_concurrent_equal_requests_are_siblings(tmp_path: Path) -> None:
    async with answering(tmp_path, said("Same.", delay_s=0.02)) as there:
        client = await there.client()
        await asyncio.gather(*(chat(client, u("Hi")) for _ in range(4)))
        seen = await good(there, client)
        assert parents(seen) == [None] * 4
        assert len(seen.linear["trajectories"]) == 4
        assert excluded(seen) == {}


async def test_repeated_request_after_an_answer_is_a_sibling(tmp_path: Path) -> None:
    async with answering(tmp_path, said("One."), said("Two.")) as there:
        client = await there.client()
        replies = [(await chat(client, u("Hi"))).reply.content for _ in range(2)]
        assert replies == ["One.", "Two."]
        assert excluded(await good(there, client)) == {}


async def test_idempotency_key_repeats_the_answer(tmp_path: Path) -> None:
    async with answering(tmp_path, said("One."), said("Two.")) as there:
        client = await there.client()
        key = {"idempotency-key": "k1"}
        heard = [
            await chat(client, u("Hi"), headers={"x-stainless-retry-count": str(n), **key}, stream=n == 2)
            for n in range(3)
        ]
        assert [h.reply.content for h in heard] == ["One."] * 3
        assert len((await good(there, client)).turns) == len(there.ledger.recorded) == 1


async def test_retry_waits_for_the_running_call(tmp_path: Path) -> None:
    async with answering(tmp_path, said("One slow answer.", delay_s=0.02), said("Two.")) as there:
        client = await there.client()
        key = {"idempotency-key": "k1"}
        first = asyncio.create_task(chat(client, u("Hi"), headers=key))
        while not there.gateway.sessions.get("r.1").calls:
            await asyncio.sleep(0.005)
        second = await chat(client, u("Hi"), headers={"x-stainless-retry-count": "1", **key})
        assert (await first).turn_id == second.turn_id == "t1"


async def test_retry_after_an_error_links_the_aborted_turn(tmp_path: Path) -> None:
    broken = ScriptedReply(token_ids=(40, 41), fail="unavailable")
    async with answering(tmp_path, broken, said("Better.")) as there:
        client = await there.client()
        assert (await client.send(user("Hi"), toolset=0)).status in (200, 503)
        await client.say(user("Hi"), toolset=0)
        seen = await good(there, client)
        assert links(seen, "t2") == [("retry", "t1")]
        assert seen.linear["excluded"] == [{"turn": "t1", "tokens": 2, "reason": "aborted"}]


async def test_dropped_stream_is_excluded(tmp_path: Path) -> None:
    async with answering(tmp_path, said("A long and winding answer.", delay_s=0.01), said("Again.")) as there:
        client = await there.client()
        assert not (await client.send(user("Hi"), toolset=0, leaves_at=4)).whole
        await client.say(user("Hi"), toolset=0)
        seen = await good(there, client)
        assert [turn["status"] for turn in seen.turns] == ["aborted", "committed"]
        assert seen.turns[0]["token_ids"]
        assert links(seen, "t2") == [("retry", "t1")]


async def test_undelivered_answer_is_repeated(tmp_path: Path) -> None:
    async with answering(tmp_path, said("Once."), said("Twice.")) as there:
        client = await there.client()
        assert not (await client.send(user("Hi"), toolset=0, leaves_at=LAST)).whole
        assert excluded(await there.look(client)) == {"t1": "undelivered"}
        assert (await client.say(user("Hi"), toolset=0)).reply.content == "Once."
        assert excluded(await good(there, client)) == {}
        assert len(there.ledger.recorded) == 1


async def test_higher_token_limit_supersedes_a_truncated_answer(tmp_path: Path) -> None:
    async with answering(tmp_path, said("A long answer in many words.")) as there:
        client = await there.client()
        await chat(client, u("Hi"), max_tokens=4)
        await chat(client, u("Hi"), max_tokens=100)
        seen = await good(there, client)
        assert excluded(seen) == {"t1": "superseded"}
        assert len(seen.linear["trajectories"]) == 1


async def test_used_truncated_answer_is_trained(tmp_path: Path) -> None:
    async with answering(tmp_path, said("A long answer in many words.")) as there:
        client = await there.client()
        cut = await chat(client, u("Hi"), max_tokens=4)
        await chat(client, u("Hi"), assistant(cut), u("Go on."))
        await chat(client, u("Hi"), max_tokens=100)
        assert excluded(await good(there, client)) == {"t3": "abandoned"}


# --- 9 to 13: other conversations -----------------------------------------------------------------


async def test_mixed_text_and_calls_are_an_edit(tmp_path: Path) -> None:
    async with answering(tmp_path, said("First I think"), said("Then." + calls("a")), said("Done.")) as there:
        client = await there.client()
        await chat(client, u("Hi"), toolset=1, max_tokens=3)
        second = await chat(client, u("Hi"), toolset=1, max_tokens=150)
        mixed = assistant(second, content="First I")
        await chat(client, u("Hi"), mixed, *results(second), toolset=1)
        seen = await good(there, client)
        assert links(seen, "t3") == [("edit", "t2")]
        assert excluded(seen) == {"t1": "superseded"}


@pytest.mark.parametrize("toolset", [0, 1])
async def test_compaction_links_the_summary(tmp_path: Path, toolset: int) -> None:
    summary = "We looked up the red mug and it costs four dollars."
    async with answering(tmp_path, said("Work." + calls("a")), said(summary), said("On it goes.")) as there:
        client = await there.client()
        first = await chat(client, u("Hi"), toolset=1)
        ask = [u("Hi"), assistant(first), *results(first), u("Summarise all this.")]
        await chat(client, *ask, toolset=toolset)
        await chat(client, u(f"So far: {summary}\nGo on."), toolset=1)
        seen = await good(there, client)
        assert links(seen, "t3") == [("compaction", "t2")]
        assert parents(seen)[2] is None


async def test_kept_turn_is_not_trained_twice(tmp_path: Path) -> None:
    async with answering(tmp_path, said("The mug costs four dollars, I think.")) as there:
        client = await there.client()
        first = await chat(client, u("Hi"))
        await chat(client, u("Earlier we talked."), assistant(first), u("And now?"))
        seen = await good(there, client)
        assert parents(seen) == [None, None]
        assert sum(sum(row["loss_mask"]) for row in seen.linear["trajectories"]) == sum(
            len(entry.token_ids) for entry in there.ledger.recorded
        )


async def test_sub_agent_links_its_caller(tmp_path: Path) -> None:
    async with answering(
        tmp_path, said("Ask a helper." + calls("a")), said("Found it."), said("Done.")
    ) as there:
        client = await there.client()
        first = await chat(client, {"role": "system", "content": "Main."}, u("Hi"), toolset=1)
        await chat(client, {"role": "system", "content": "Helper."}, u("Find it."))
        await chat(
            client,
            {"role": "system", "content": "Main."},
            u("Hi"),
            assistant(first),
            *results(first),
            toolset=1,
        )
        seen = await good(there, client)
        assert links(seen, "t2") == [("sub-agent", "t1")]
        assert parents(seen) == [None, None, "t1"]
        assert excluded(seen) == {}


async def test_previous_response_id_supplies_the_history(tmp_path: Path) -> None:
    async with answering(tmp_path, said("Look." + calls("a")), said("Four."), said("Bye.")) as there:
        client = await there.client(dialect="responses", stream=False)
        first = await client.say(user("Hi"))
        result = Message(role="tool", content="4", tool_call_id=first.reply.tool_calls[0].id)
        for n, message in ((1, result), (2, user("Thanks."))):
            ask = Ask(messages=(message,), tools=TOOLSETS[1], after=response_id("r.1", f"t{n}"))
            path, body = write("responses", ask)
            answer = await client.door("POST", path, body)
            assert answer.status == 200, answer
            client.tools[f"t{n + 1}"] = list(TOOLSETS[1])
        assert parents(await good(there, client)) == [None, "t1", "t2"]
        path, body = write("responses", Ask(messages=(user("Hi"),), after=response_id("r.1", "t99")))
        assert (await client.door("POST", path, body)).status == 400
        path, body = write("responses", Ask(messages=(user("Hi"),), after=response_id("another.1", "t1")))
        assert (await client.door("POST", path, body)).status == 400


async def test_rewritten_history_is_a_new_root(tmp_path: Path) -> None:
    async with answering(tmp_path, said("Yes.")) as there:
        client = await there.client()
        shot = [u("1+1?"), {"role": "assistant", "content": "2"}]
        first = await chat(client, *shot, u("2+2?"))
        await chat(client, u("Rewritten: 1+1 is 2. 2+2?"), assistant(first), u("3+3?"))
        seen = await good(there, client)
        assert parents(seen) == [None, None]
        await chat(client, *shot, u("2+2?"), assistant(first), u("3+3?"))
        seen = await good(there, client)
        assert parents(seen)[2] == "t1"


async def test_repeated_header_is_accepted(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda _: said("Yes."))
    async with running(engine, tmp_path) as up:
        ticket = await up.client.open(SessionSpec(id="r.1"))
        host = up.url.removeprefix("http://")
        reader, writer = await asyncio.open_connection(*host.split(":"))
        body = json.dumps({"model": "m", "messages": [u("Hi")]}).encode()
        head = [
            "POST /s/r.1/v1/chat/completions HTTP/1.1",
            f"Host: {host}",
            "User-Agent: one",
            "User-Agent: two",
            f"Authorization: Bearer {ticket.api_key}",
            f"Content-Length: {len(body)}",
        ]
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        assert b" 200 " in await reader.readline()
        writer.close()
        await writer.wait_closed()
