"""What the gateway keeps when clients leave, calls overlap, engines break and sessions end in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from afield import trajectories
from afield.chat import TextDelta
from afield.engines.scripted import Script, ScriptedEngine, ScriptedReply
from afield.errors import Unavailable
from afield.gateway.api_error import ApiError
from afield.gateway.calls import Calls
from afield.gateway.metrics import Metrics
from afield.gateway.model_request import CallDelta, CallFinished, Item, ModelRequest
from afield.gateway.sessions import Session, SessionManager
from afield.gateway.store import GatewayStore, TurnRow
from afield.interfaces import SessionSpec
from afield.types import Budget, FinishReason, Message, TurnStatus
from support.gateways import Running, running, vocabulary
from support.tokenizers import load_tokenizer

pytestmark = pytest.mark.anyio
VOCAB = vocabulary()
TOKENS = load_tokenizer()
STOP = TOKENS.stop_ids[0]


def said(text: str, **rest: Any) -> ScriptedReply:
    return ScriptedReply(token_ids=(*VOCAB.encode(text), STOP), **rest)


def ask(*words: str, **rest: Any) -> ModelRequest:
    """A conversation that begins with a user and alternates."""
    roles = ("user", "assistant")
    messages = tuple(Message(role=roles[i % 2], content=word) for i, word in enumerate(words))  # pyright: ignore[reportArgumentType]
    return ModelRequest(dialect="test", messages=messages, **rest)


class SlowStore(GatewayStore):
    """Each write can be held until it is let through."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.held: str | None = None
        self.reached = asyncio.Event()
        self.go = asyncio.Event()

    async def put_turn(self, session_id: str, row: TurnRow) -> None:
        await self._hold(str(row.turn.status))
        await super().put_turn(session_id, row)

    async def put_session(self, row: Any) -> None:
        await self._hold(row.phase)
        await super().put_session(row)

    async def _hold(self, what: str) -> None:
        if what == self.held:
            self.reached.set()
            await self.go.wait()


class Custody:
    def __init__(
        self, store: SlowStore, sessions: SessionManager, calls: Calls, engine: ScriptedEngine
    ) -> None:
        self.store = store
        self.sessions = sessions
        self.calls = calls
        self.engine = engine

    async def open(self, **spec: Any) -> Session:
        return (await self.sessions.open(SessionSpec(id="r.1", **spec)))[0]

    async def run(self, session: Session, request: ModelRequest) -> list[Item]:
        return [item async for item in self.calls.run(session, request)]

    async def reply(self, session: Session, request: ModelRequest) -> Message:
        done = (await self.run(session, request))[-1]
        assert isinstance(done, CallFinished)
        return done.reply


@asynccontextmanager
async def custody(tmp_path: Path, script: Script) -> AsyncIterator[Custody]:
    engine = ScriptedEngine(script)
    ticks = iter(range(10**9))
    async with SlowStore(tmp_path / "gateway.sqlite") as store:
        sessions = SessionManager(store, lambda: float(next(ticks)))
        calls = Calls(
            store=store,
            sessions=sessions,
            engine=engine,
            info=await engine.info(),
            tokenizer=TOKENS,
            metrics=Metrics(),
            clock=lambda: float(next(ticks)),
        )
        yield Custody(store, sessions, calls, engine)


async def cancelled_at(c: Custody, what: str, work: Any) -> None:
    """Start work, and cancel it while the store is writing `what`."""
    c.store.held = what
    task = asyncio.create_task(work)
    await asyncio.wait_for(c.store.reached.wait(), 60)
    task.cancel()
    await asyncio.sleep(0)
    c.store.go.set()
    with suppress(asyncio.CancelledError):
        await task
    c.store.held = None


async def test_disconnect_during_commit_leaves_one_committed_turn(tmp_path: Path) -> None:
    async with custody(tmp_path, [said("One."), said("Two.")]) as c:
        session = await c.open()
        await cancelled_at(c, "committed", c.run(session, ask("Hi")))
        assert [t.status for t in session.tree.turns] == [TurnStatus.COMMITTED]
        assert [row.turn for row in c.store.turns("r.1")] == session.tree.turns
        await c.sessions.exclude_turn(session, "t1")
        assert not trajectories.linear(session.tree, {"t1": "undelivered"}).trajectories
        again = await c.reply(session, ask("Hi"))
        assert again.content == "One."
        assert session.undelivered == []
    assert len(c.engine.recorded) == 1


async def test_disconnect_during_intent_leaves_an_aborted_turn(tmp_path: Path) -> None:
    async with custody(tmp_path, [said("One.")]) as c:
        session = await c.open()
        await cancelled_at(c, "dangling", c.run(session, ask("Hi")))
        assert [row.turn.status for row in c.store.turns("r.1")] == [TurnStatus.ABORTED]
        assert session.state().dangling == 0


async def test_no_call_starts_during_finalize(tmp_path: Path) -> None:
    async with custody(tmp_path, lambda _: said("One.")) as c:
        session = await c.open()
        c.store.held = "finalized"
        closing = asyncio.create_task(c.sessions.finalize(session))
        await asyncio.wait_for(c.store.reached.wait(), 60)
        with pytest.raises(ApiError, match="being closed"):
            await c.run(session, ask("Hi"))
        c.store.go.set()
        await closing
        assert len(c.store.turns("r.1")) == 0


async def test_parallel_calls_share_the_budget(tmp_path: Path) -> None:
    async with custody(tmp_path, lambda call: said(f"A long answer to {call.id}, word by word.")) as c:
        session = await c.open(budget=Budget(tokens=20))
        many = (c.run(session, ask("Hi", max_tokens=8)) for _ in range(50))
        results = await asyncio.gather(*many, return_exceptions=True)
        assert session.sampled_tokens == sum(len(entry.token_ids) for entry in c.engine.recorded) == 20
        cut = [r[-1].turn for r in results if isinstance(r, list) and isinstance(r[-1], CallFinished)]
        assert [len(turn.token_ids) for turn in cut] == [8, 8, 4]
        assert all(turn.finish_reason is FinishReason.LENGTH for turn in cut)
        with pytest.raises(ApiError, match="budget of 20 tokens"):
            await c.run(session, ask("Hi"))


async def test_call_waits_for_reserved_tokens(tmp_path: Path) -> None:
    async with custody(tmp_path, lambda _: said("Yes.")) as c:
        session = await c.open(budget=Budget(tokens=500))
        results = await asyncio.gather(*(c.run(session, ask("Hi", max_tokens=400)) for _ in range(6)))
        turns = [items[-1].turn for items in results if isinstance(items[-1], CallFinished)]
        assert len(turns) == 6
        assert all(turn.finish_reason is FinishReason.STOP for turn in turns)


async def test_failed_call_returns_its_tokens(tmp_path: Path) -> None:
    broken, hanging = (
        ScriptedReply(token_ids=(5,), fail="unavailable"),
        ScriptedReply(token_ids=(5,), fail="hang"),
    )
    async with custody(tmp_path, [broken, hanging, said("Yes.")]) as c:
        session = await c.open(budget=Budget(tokens=100))
        with pytest.raises(ApiError, match="fails"):
            await c.run(session, ask("Hi"))
        left = asyncio.create_task(c.run(session, ask("Hi")))
        while session.sampled_tokens < 2:
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(c.reply(session, ask("Hi")))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        left.cancel()
        assert (await waiting).content == "Yes."


async def test_call_budget_holds_for_long_conversations(tmp_path: Path) -> None:
    async with custody(tmp_path, lambda _: said("Yes.")) as c:
        session = await c.open(budget=Budget(calls=2))
        many = [c.run(session, ask("word " * 200 + str(n) + "x" * 20_000)) for n in range(6)]
        c.engine._max_context = 100_000  # pyright: ignore[reportPrivateUsage]
        results = await asyncio.gather(*many, return_exceptions=True)
    refused = [r for r in results if isinstance(r, ApiError)]
    assert len(refused) >= 4


async def test_engine_failure_does_not_count_against_the_budget(tmp_path: Path) -> None:
    broken = ScriptedReply(token_ids=(5,), fail="unavailable")
    async with custody(tmp_path, [broken, broken, said("At last.")]) as c:
        session = await c.open(budget=Budget(calls=1))
        for _ in range(2):
            with pytest.raises(ApiError, match="fails"):
                await c.run(session, ask("Hi"))
        assert (await c.reply(session, ask("Hi"))).content == "At last."
        with pytest.raises(ApiError, match="budget of 1 calls"):
            await c.run(session, ask("Hi"))
        # The same after a restart, from what is stored.
        assert Session(session.row, c.store.turns("r.1")).charged == 1


async def test_undelivered_answer_is_repeated_without_budget(tmp_path: Path) -> None:
    async with custody(tmp_path, [said("Only this.")]) as c:
        session = await c.open(budget=Budget(calls=1))
        await c.run(session, ask("Hi"))
        await c.sessions.exclude_turn(session, "t1")
        assert (await c.reply(session, ask("Hi"))).content == "Only this."


async def test_undelivered_answer_is_not_given_to_another_request(tmp_path: Path) -> None:
    async with custody(tmp_path, lambda call: said("alpha STOP beta")) as c:
        session = await c.open()
        await c.run(session, ask("Hi", stop=("STOP",)))
        await c.sessions.exclude_turn(session, "t1")
        items = await c.run(session, ask("Hi", stop=("STOP",)))
        shown = "".join(
            e.text for i in items if isinstance(i, CallDelta) for e in i.events if isinstance(e, TextDelta)
        )
        assert shown.strip() == "alpha"
        await c.sessions.exclude_turn(session, "t1")
        assert (await c.reply(session, ask("Hi"))).content == "alpha STOP beta"
        await c.sessions.exclude_turn(session, "t2")
        assert len((await c.reply(session, ask("Hi", max_tokens=2))).content) < len("alpha STOP")
    assert len(c.engine.recorded) == 3


async def test_conversation_continues_from_the_delivered_twin(tmp_path: Path) -> None:
    async with custody(tmp_path, lambda _: said("Same.")) as c:
        session = await c.open()
        await c.run(session, ask("Hi"))
        await c.run(session, ask("Hi"))
        await c.sessions.exclude_turn(session, "t2")
        await c.run(session, ask("Hi", "Same.", "And?"))
        assert session.tree["t3"].parent == "t1"


async def test_running_call_keeps_its_session_active(tmp_path: Path) -> None:
    async with custody(tmp_path, lambda _: said("One two three four.")) as c:
        session = await c.open()
        seen = [session.last_activity async for _ in c.calls.run(session, ask("Hi", stream=True))]
        assert seen == sorted(seen)
        assert len(set(seen)) >= len(session.tree["t1"].token_ids)


async def test_answer_stays_undelivered_if_the_retry_disconnects(tmp_path: Path) -> None:
    async with custody(tmp_path, [said("Once.")]) as c:
        session = await c.open()
        await c.run(session, ask("Hi"))
        await c.sessions.exclude_turn(session, "t1")
        await cancelled_at(c, "open", c.run(session, ask("Hi")))
        assert session.undelivered == ["t1"]
        assert (await c.reply(session, ask("Hi"))).content == "Once."


async def test_closed_sessions_are_reloaded_from_the_store(tmp_path: Path) -> None:
    async with custody(tmp_path, lambda _: said("Yes.")) as c:
        for n in (1, 2, 3):
            session, _ = await c.sessions.open(SessionSpec(id=f"r.{n}"))
            await c.run(session, ask("Hi"))
            if n == 1:
                await c.sessions.complete(session, {})
            elif n == 2:
                await c.sessions.abort(session, "enough")
        del session
        assert len(c.sessions) == 1
        assert [c.sessions.get(f"r.{n}").state().phase for n in (1, 2, 3)] == ["completed", "aborted", "open"]
        assert c.sessions.get("r.1").state().turns == 1


async def test_closed_store_raises_unavailable(tmp_path: Path) -> None:
    async with custody(tmp_path, []) as c:
        session = await c.open()
    with pytest.raises(Unavailable, match="closed"):
        await asyncio.wait_for(c.sessions.abort(session, "late"), 60)


# --- through HTTP --------------------------------------------------------------------------------


@pytest.fixture
async def up(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Running]:
    async with running(ScriptedEngine(lambda _: said("Yes.")), tmp_path) as gateway:
        yield gateway


async def test_concurrent_rewards_are_all_recorded(up: Running) -> None:
    await up.client.open(SessionSpec(id="r.1"))
    posts = (up.ask("POST", "/sessions/r.1/reward", {"reward": n, "name": f"n{n}"}) for n in range(8))
    assert [status for status, _ in await asyncio.gather(*posts)] == [200] * 8
    posts = (up.ask("POST", "/sessions/r.1/reward", {"reward": n, "name": "one"}) for n in range(3))
    assert sorted(status for status, _ in await asyncio.gather(*posts)) == [200, 409, 409]
    ends = ("/sessions/r.1/complete", "/sessions/r.1/reward")
    await asyncio.gather(*(up.ask("POST", path, {"reward": 1.0}) for path in ends))
    state = await up.client.state("r.1")
    assert state.phase == "completed"
    assert len(state.rewards) == 10


async def test_call_of_an_aborted_session_gets_an_error(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda _: ScriptedReply(token_ids=(5, 6), fail="hang"))
    async with running(engine, tmp_path) as up:
        ticket = await up.client.open(SessionSpec(id="r.1"))
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
        calling = asyncio.create_task(up.ask("POST", "/s/r.1/v1/chat/completions", body, ticket.api_key))
        for _ in range(3000):
            if (await up.client.state("r.1")).calls:
                break
            await asyncio.sleep(0.02)
        await up.client.abort("r.1", "enough")
        status, answer = await asyncio.wait_for(calling, 60)
    assert (status, answer["error"]["code"]) == (409, "conflict")


async def test_huge_numbers_get_400(up: Running) -> None:
    await up.client.open(SessionSpec(id="r.1"))
    huge = b"1" + b"0" * 400
    assert (await up.ask("POST", "/sessions/r.1/reward", b'{"reward": 1%s}' % (b"0" * 30)))[0] == 200
    assert (await up.ask("POST", "/sessions/r.1/reward", b'{"name": "x", "reward": %s}' % huge))[0] == 400
    assert (await up.ask("POST", "/sessions", b'{"id": "r.2", "metadata": {"n": %s}}' % huge))[0] == 400


async def test_deep_nesting_gets_400(up: Running) -> None:
    ticket = await up.client.open(SessionSpec(id="r.1"))
    message = b'{"role": "user", "content": "Hi"}'
    deep = b"[" * 100_000 + b"]" * 100_000
    call = b'{"id": "x", "type": "function", "function": {"name": "f", "arguments": "%s"}}' % deep
    history = b'%s, {"role": "assistant", "tool_calls": [%s]}, %s' % (message, call, message)
    for body in (b'{"messages": [%s], "x": %s}' % (message, deep), b'{"messages": [%s]}' % history):
        status, answer = await up.ask("POST", "/s/r.1/v1/chat/completions", body, ticket.api_key)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert (await up.ask("POST", "/sessions/r.1/reward", b'{"reward": %s}' % deep))[0] == 400


async def test_dangling_calls_are_listed_after_a_crash(tmp_path: Path) -> None:
    async with custody(tmp_path, [ScriptedReply(token_ids=(5,), fail="hang")]) as c:
        session = await c.open()
        task = asyncio.create_task(c.run(session, ask("Hi")))
        while not c.store.turns("r.1"):
            await asyncio.sleep(0.01)
        dead = c.store.turns("r.1")
        c.engine.break_down()
        await asyncio.gather(task, return_exceptions=True)
        await c.store.put_turn("r.1", dead[0])  # as it was when the process died
    async with running(ScriptedEngine([]), tmp_path) as up:
        assert (await up.client.state("r.1")).dangling == 1
        record = await up.client.finalize("r.1")
    assert [(e.turn, e.reason) for e in record.excluded] == [("t1", "dangling")]


# --- finalize while a call runs -------------------------------------------------------------------


async def test_finalize_waits_for_a_commit_in_progress(tmp_path: Path) -> None:
    async with custody(tmp_path, [said("One.")]) as c:
        session = await c.open()
        c.store.held = "committed"
        call = asyncio.create_task(c.reply(session, ask("Hi")))
        await asyncio.wait_for(c.store.reached.wait(), 60)
        finalizing = asyncio.create_task(c.sessions.finalize(session))
        await asyncio.sleep(0.01)
        assert not finalizing.done()
        c.store.go.set()
        await finalizing
        assert [turn.status for turn in session.tree.turns] == [TurnStatus.COMMITTED]
        assert (await call).content == "One."


async def test_call_that_ends_after_finalize_is_not_recorded(tmp_path: Path) -> None:
    async with custody(tmp_path, [said("One."), said("Too late.")]) as c:
        session = await c.open()
        await c.reply(session, ask("Hi"))
        await c.engine.pause()
        late = asyncio.create_task(c.reply(session, ask("Hi", "One.", "And?")))
        while not session.running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # until its intent is stored
        await c.sessions.finalize(session)
        before = [(row.turn.id, row.turn.status) for row in c.store.turns("r.1")]
        assert before == [("t1", TurnStatus.COMMITTED), ("t2", TurnStatus.DANGLING)]
        await c.engine.resume()
        with pytest.raises(ApiError, match="finalized while this call ran"):
            await late
        assert [(row.turn.id, row.turn.status) for row in c.store.turns("r.1")] == before
        assert [turn.id for turn in session.tree.turns] == ["t1"]
        await c.sessions.exclude_turn(session, "t1")
        assert session.row.excluded == {}


async def test_call_abandoned_after_finalize_is_not_recorded(tmp_path: Path) -> None:
    async with custody(tmp_path, [ScriptedReply(token_ids=(5, 6), fail="hang")]) as c:
        session = await c.open()
        late = asyncio.create_task(c.reply(session, ask("Hi")))
        while session.sampled_tokens < 2:
            await asyncio.sleep(0.01)
        await c.sessions.finalize(session)
        late.cancel()
        with suppress(asyncio.CancelledError):
            await late
        assert [row.turn.status for row in c.store.turns("r.1")] == [TurnStatus.DANGLING]
        assert len(session.tree) == 0
