"""What went wrong when two things happened at once, or one of them failed, in and around a model call."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from aiohttp import web
from tests.gateway.test_images import ASKED, TEMPLATE, seeing
from tests.gateway.test_interrupted_calls import ask, custody

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.errors import Conflict, Unavailable
from afield.gateway.app import GatewayApp
from afield.gateway.echoed_turns import recognise_replies
from afield.gateway.engine_pool import EnginePool
from afield.gateway.request_cache import ConversationCache
from afield.gateway.shards import PASSED, Shard, socket_path
from afield.interfaces import Chunk, Engine, EngineInfo, GenerateRequest
from afield.turn_tree import TurnTree, chain
from afield.types import (
    FinishReason,
    Message,
    Sampling,
    ToolCall,
    Turn,
    TurnStatus,
    VersionSpan,
)
from support.gateways import ADMIN, Running, running, vocabulary
from templates.models import write_template

pytestmark = pytest.mark.anyio
VOCAB = vocabulary()
STOP = VOCAB.control["<|im_end|>"]


def said(text: str, **rest: Any) -> ScriptedReply:
    return ScriptedReply(token_ids=(*VOCAB.encode(text), STOP), **rest)


class Lingering(ScriptedEngine):
    """It takes a moment to let a call go."""

    linger_s = 0.05

    async def generate(self, call: GenerateRequest) -> AsyncGenerator[Chunk]:
        chunks = super().generate(call)
        try:
            async for chunk in chunks:
                yield chunk
        finally:
            await asyncio.sleep(self.linger_s)
            await chunks.aclose()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(90):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def unwritable(store: Path, table: str) -> AsyncIterator[None]:
    """No row of this table can be written meanwhile."""
    with closing(sqlite3.connect(store / "gateway.sqlite", isolation_level=None)) as other:
        other.execute(
            f"CREATE TRIGGER full BEFORE INSERT ON {table} BEGIN SELECT RAISE(ABORT, 'disk full'); END"
        )
        try:
            yield
        finally:
            other.execute("DROP TRIGGER full")


class Stalled:
    """A client that reads nothing of its answer, and leaves when it is told to."""

    def __init__(self, up: Running, body: Any, *headers: tuple[bytes, bytes]) -> None:
        self._up, self._headers = up, headers
        self._body = msgspec.json.encode(body)
        self.reached, self.gone = asyncio.Event(), asyncio.Event()

    async def ask(self) -> None:
        path = "/s/r.1/v1/chat/completions"
        headers = [(b"authorization", f"Bearer {ADMIN}".encode()), *self._headers]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        await GatewayApp(self._up.gateway)(scope, self._receive, self._send)

    async def _receive(self) -> Any:
        if self._body:
            body, self._body = self._body, b""
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.reached.set()
            await asyncio.Event().wait()


def hello(role: str = "user", text: str = "Hi") -> Any:
    return [{"role": role, "content": text}]


async def stream(client: openai.AsyncOpenAI, **rest: Any) -> str:
    text = ""
    async for chunk in await client.chat.completions.create(model="m", messages=hello(), stream=True, **rest):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    return text


# --- the end of a call ---------------------------------------------------------------------------


async def test_delivered_answer_is_trained_while_the_engine_lingers(tmp_path: Path) -> None:
    engine = Lingering([said("one STOP two three four five six")])
    async with running(engine, tmp_path) as up:
        client = await up.agent()
        assert (await stream(client, stop=["STOP"])).strip() == "one"
        session = up.gateway.sessions.get("r.1")
        await until(lambda: not session.in_flight)
        assert session.undelivered == []
        assert up.gateway.metrics.in_flight == 0
        assert session.keyed_calls == {}


async def test_call_cancelled_twice_records_its_turn(tmp_path: Path) -> None:
    async with running(Lingering([said("one two three four")]), tmp_path) as up:
        await up.agent()
        session = up.gateway.sessions.get("r.1")
        client = Stalled(up, {"model": "m", "messages": hello(), "stream": True})
        call = asyncio.create_task(client.ask())
        await client.reached.wait()
        client.gone.set()
        await until(lambda: any(task.cancelling() for task in session.in_flight))
        await asyncio.sleep(0.01)
        await up.gateway.abort("r.1", "enough")
        await call
        (turn,) = (row.turn for row in session.rows.values())
        assert turn.status is TurnStatus.ABORTED
        assert turn.token_ids
        assert up.gateway.metrics.in_flight == 0


async def test_failed_write_releases_waiters(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda _: said("one"))
    async with running(engine, tmp_path) as up:
        client = await up.agent()
        async with unwritable(tmp_path, "turns"):
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(model="m", messages=hello())
        assert up.gateway.metrics.in_flight == 0
        again = {"x-stainless-retry-count": "1"}
        completion = client.chat.completions.create(model="m", messages=hello(), extra_headers=again)
        assert (await asyncio.wait_for(completion, 60)).choices[0].message.content == "one"


class Miscounting(ScriptedEngine):
    """It tells versions of fewer tokens than it gave."""

    async def generate(self, call: GenerateRequest) -> AsyncGenerator[Chunk]:
        yield Chunk(token_ids=(5, 6), logprobs=(-1.0, -1.0), low=0, high=0)
        told = (VersionSpan(0, 1, 0, 0),)
        yield Chunk(
            token_ids=(STOP,), logprobs=(-1.0,), low=0, high=0, finish=FinishReason.STOP, versions=told
        )


async def test_uncovered_version_spans_get_503(tmp_path: Path) -> None:
    async with running(Miscounting([]), tmp_path) as up:
        client = await up.agent()
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="m", messages=hello())
        assert "version" in str(caught.value)
        record = await up.client.finalize("r.1")
        assert [(t.status, len(t.token_ids)) for t in record.turns] == [(TurnStatus.ABORTED, 2)]
        assert up.gateway.metrics.in_flight == 0


# --- asked again ---------------------------------------------------------------------------------


async def test_claimed_answer_is_not_taken_by_a_second_retry(
    tmp_path: Path,
) -> None:
    async with custody(tmp_path, [said("Once."), said("Twice.")]) as c:
        session = await c.open()
        await c.run(session, ask("Hi"))
        await c.sessions.exclude_turn(session, "t1")
        c.store.held = "open"
        first = asyncio.create_task(c.reply(session, ask("Hi")))
        await asyncio.wait_for(c.store.reached.wait(), 60)
        second = asyncio.create_task(c.reply(session, ask("Hi")))
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.sleep(0.01)
        c.store.held = None
        c.store.go.set()
        assert (await first).content == "Once."
        await asyncio.gather(second, return_exceptions=True)
        assert session.undelivered == []


async def test_delivered_answer_stays_trained_if_a_repeat_disconnects(
    tmp_path: Path,
) -> None:
    words = "word " * 400
    async with running(ScriptedEngine(lambda _: said(words)), tmp_path) as up:
        client = await up.agent()
        assert len(await stream(client, extra_headers={"idempotency-key": "one"})) > 1000
        session = up.gateway.sessions.get("r.1")
        await until(lambda: not session.in_flight)
        body = {"model": "m", "messages": hello(), "stream": True}
        other = Stalled(up, body, (b"idempotency-key", b"one"))
        call = asyncio.create_task(other.ask())
        await other.reached.wait()
        other.gone.set()
        await call
        assert session.undelivered == []


async def test_continued_turn_counts_as_delivered(tmp_path: Path) -> None:
    async with custody(tmp_path, [said("One."), said("Two.")]) as c:
        session = await c.open()
        await c.run(session, ask("Hi"))
        await c.sessions.exclude_turn(session, "t1")
        await c.run(session, ask("Hi", "One.", "And?"))
        assert session.tree["t2"].parent == "t1"
        assert session.undelivered == []


async def test_retry_with_an_image_repeats_the_answer(tmp_path: Path) -> None:
    model = write_template(tmp_path / "model", TEMPLATE, ["<|picture|>"], ["<|im_end|>"])
    engine = seeing(model)
    async with running(engine, tmp_path / "store", model) as up:
        client = await up.agent()
        for count in ("0", "1"):
            named = {"x-stainless-retry-count": count, "idempotency-key": "one"}
            await client.chat.completions.create(model="m", messages=ASKED, extra_headers=named)
    assert len(engine.recorded) == 1


# --- which turn ----------------------------------------------------------------------------------


async def test_raw_prompt_with_end_token_has_it_once(tmp_path: Path) -> None:
    engine = ScriptedEngine([said("one"), said("two")])
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    more = prompt + "one<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    async with running(engine, tmp_path) as up:
        client = await up.agent()
        await client.completions.create(model="m", prompt=prompt)
        await client.completions.create(model="m", prompt=more)
        record = await up.client.finalize("r.1")
    assert record.turns[1].parent == "t1"
    assert list(engine.recorded[1].prompt_ids) == list(VOCAB.encode(more))


async def test_raw_prompt_repeats_no_truncated_text(tmp_path: Path) -> None:
    engine = ScriptedEngine([said("4\nUser: more and more"), said("two")])
    async with running(engine, tmp_path) as up:
        client = await up.agent()
        first = await client.completions.create(model="m", prompt="User: 2+2\n", stop=["\nUser:"])
        assert first.choices[0].text == "4"
        again = "User: 2+2\n4\nUser: 3+3\n"
        await client.completions.create(model="m", prompt=again)
    assert VOCAB.decode(engine.recorded[1].prompt_ids) == again


def turn(n: int, reply: Message, *asked: Message, root: str = "r") -> Turn:
    return Turn(
        id=f"t{n}",
        root=root,
        delta_ids=(n,),
        token_ids=(1,),
        logprobs=(-1.0,),
        versions=(VersionSpan(0, 1, 0, 0),),
        finish_reason=FinishReason.STOP,
        status=TurnStatus.COMMITTED,
        sampling=Sampling(),
        messages=(*asked, reply),
        request_digest=chain(root, asked)[-1],
        digest=chain(root, (*asked, reply))[-1],
    )


QUESTION = Message(role="user", content="Hi")


def test_ambiguous_call_id_names_no_turn() -> None:
    def calling(content: str) -> Message:
        return Message(
            role="assistant", content=content, tool_calls=(ToolCall("functions.look:0", "look", "{}"),)
        )

    forest = TurnTree([turn(1, calling(""), QUESTION), turn(2, calling("Once more."), QUESTION)])
    echoed = (QUESTION, calling(""), Message(role="tool", tool_call_id="functions.look:0", content="x"))
    assert recognise_replies(forest, echoed) == echoed


def test_cached_conversation_matches_turns_in_pieces() -> None:
    calls = (ToolCall("call_t1_0", "look", '{"a":1}'), ToolCall("call_t1_1", "look", '{"a":2}'))
    forest = TurnTree([turn(1, Message(role="assistant", tool_calls=calls), QUESTION)])
    pieces = [
        message
        for call in calls
        for message in (
            Message(role="assistant", tool_calls=(call,)),
            Message(role="tool", tool_call_id=call.id, content="x"),
        )
    ]
    recall = ConversationCache()
    recall.read(forest, "r", (QUESTION, *pieces[:2]))
    assert recall.read(forest, "r", (QUESTION, *pieces)) == ConversationCache().read(
        forest, "r", (QUESTION, *pieces)
    )


async def test_echoed_reasoning_selects_between_equal_turns(
    tmp_path: Path,
) -> None:
    thoughts = iter(("alpha", "beta"))
    async with custody(tmp_path, lambda _: said(f"<think>\n{next(thoughts)}\n</think>\n\nYes.")) as c:
        session = await c.open()
        first = await c.reply(session, ask("Hi"))
        await c.reply(session, ask("Hi"))
        assert (first.reasoning, first.content) == ("alpha", "Yes.")
        request = ask("Hi", "Yes.", "And?")
        echoed = (request.messages[0], first, request.messages[2])
        thoughts = iter(("gamma",))
        await c.run(session, msgspec.structs.replace(request, messages=echoed))
        assert session.tree["t3"].parent == "t1"


# --- sessions ------------------------------------------------------------------------------------


async def test_expiry_continues_after_a_store_failure(tmp_path: Path) -> None:
    async with running(ScriptedEngine([]), tmp_path, expiry_interval_s=0.02) as up:
        await up.agent(ttl_s=0.05)
        async with unwritable(tmp_path, "sessions"):
            await asyncio.sleep(0.3)
        session = up.gateway.sessions.get("r.1")
        await until(lambda: session.phase == "aborted")


async def test_unreadable_row_is_named(tmp_path: Path) -> None:
    async with running(ScriptedEngine([]), tmp_path) as up:
        await up.agent()
    with closing(sqlite3.connect(tmp_path / "gateway.sqlite", isolation_level=None)) as other:
        other.execute("UPDATE sessions SET body=x'00' WHERE id='r.1'")
    async with running(ScriptedEngine([]), tmp_path) as up:
        status, answer = await up.ask("GET", "/sessions/r.1")
        assert status == 503
        assert "r.1" in answer["error"]["message"]


# --- workers and weights -------------------------------------------------------------------------


class Halting(ScriptedEngine):
    """Loading takes a while; the first `failures` orders to go on fail."""

    failures = 0
    load_s = 0.0

    async def load(self, version: int, path: str) -> None:
        await asyncio.sleep(self.load_s)
        await super().load(version, path)

    async def resume(self) -> None:
        if self.failures:
            self.failures -= 1
            raise Unavailable("not now")
        await super().resume()


def a_call() -> GenerateRequest:
    return GenerateRequest(
        id="c", session_id="s", prompt_ids=(1, 2), sampling=Sampling(), max_tokens=4, stop_ids=(STOP,)
    )


async def test_concurrent_publishes_serve_the_newest() -> None:
    late = Halting(lambda _: said("x"))
    late.load_s = 0.05
    made = EnginePool(
        {"one": ScriptedEngine(lambda _: said("x"))}, connect=lambda *_: late, unavailable_timeout_s=2
    )
    async with made as pool:
        await pool.load(5, "a")
        joining = asyncio.create_task(pool.add("scripted", "late"))
        await asyncio.sleep(0.01)  # the new worker is given the present weights; others wait for that
        found = await asyncio.gather(pool.load(8, "c"), pool.load(7, "b"), return_exceptions=True)
        await joining
        assert found[0] is None
        assert isinstance(found[1], Conflict)
        assert (await pool.info()).version == 8
        assert [chunk.high async for chunk in pool.generate(a_call())] == [8]


async def test_failed_resume_is_retried() -> None:
    engine = Halting(lambda _: said("x"))
    async with asyncio.timeout(90), EnginePool({"one": engine}, unavailable_timeout_s=60) as pool:
        await pool.pause("keep")
        engine.failures = 2
        await pool.resume()
        assert [chunk.finish async for chunk in pool.generate(a_call())] == [FinishReason.STOP]


async def test_failed_check_is_retried() -> None:
    looks = iter([True, False, False, True])

    async def check(engine: Engine) -> EngineInfo:
        if not next(looks):
            raise ValueError("400: not now")
        return await engine.info()

    engine = ScriptedEngine([ScriptedReply(fail="unavailable"), said("x")])
    async with (
        asyncio.timeout(90),
        EnginePool({"one": engine}, check=check, unavailable_timeout_s=60) as pool,
    ):
        assert [chunk.finish async for chunk in pool.generate(a_call())] == [FinishReason.STOP]


@asynccontextmanager
async def peers(folder: Path, handler: Any, *indices: int) -> AsyncIterator[None]:
    made: list[web.AppRunner] = []
    for index in indices:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", handler)
        made.append(web.AppRunner(app, access_log=None))
        await made[-1].setup()
        await web.UnixSite(made[-1], str(socket_path(folder, index))).start()
    try:
        yield
    finally:
        for one in made:
            await one.cleanup()


async def test_shards_load_weights_in_sequence(tmp_path: Path) -> None:
    """They share the engines: one must not set going what another is still loading."""
    at_once: list[int] = [0]

    async def handler(_: web.Request) -> web.Response:
        at_once.append(at_once[-1] + 1)
        await asyncio.sleep(0.02)
        at_once.append(at_once[-1] - 1)
        return web.json_response({})

    scope = {"method": "POST", "path": "/policy", "headers": [], "state": {PASSED: True}}
    async with peers(tmp_path, handler, 1, 2, 3), Shard(0, 4, tmp_path) as shard:
        await shard.tell_others(scope, b'{"version": 1}')
    assert at_once.count(1) >= 3
    assert max(at_once) == 1
