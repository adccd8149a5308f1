"""Keys that open a session for each value of a header, and keys in paths, for clients that change neither."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from tests.gateway.test_shards import gateway as sharded_gateway
from tests.gateway.test_shards import hello, kill_one

from afield.cli.log_format import without_keys
from afield.engines.scripted import ScriptedEngine
from afield.errors import Conflict, Unavailable, UsageError
from afield.gateway.client import HttpGateway
from afield.gateway.header_keys import HeaderKeySpec
from afield.gateway.session_keys import header_session_id
from afield.gateway.shards import owner, route
from afield.interfaces import SessionSpec
from afield.types import Budget, Sampling, check_id
from support.dialect_clients import knock
from support.dialect_session import Place, place, said
from support.fake_vllm import FakeVllm, serving
from support.gateways import ADMIN, running

pytestmark = pytest.mark.anyio
HI: Any = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "m", "messages": HI}).encode()
SPEC = SessionSpec(sampling=Sampling(max_tokens=20), budget=Budget(calls=9), metadata={"run": "x"})


def engine() -> ScriptedEngine:
    return ScriptedEngine(lambda _: said("Yes."), max_context=8192)


async def say(client: openai.AsyncOpenAI, name: str, *messages: str) -> str:
    asked: Any = [{"role": "user", "content": text} for text in messages] or HI
    headers = {"X-Session-ID": name}
    reply = await client.chat.completions.create(model="m", messages=asked, extra_headers=headers)
    return reply.choices[0].message.content or ""


async def post(there: Place, key: str, name: str | None = None, path: str = CHAT, body: bytes = BODY) -> int:
    headers = {} if name is None else {"x-session-id": name}
    return (await knock(there.app, "POST", path, body, key, headers=headers)).status


async def key_of(there: Place, **spec: Any) -> str:
    body = msgspec.json.encode(HeaderKeySpec(**{"id": "eval", "session": SPEC, **spec}))
    answer = await knock(there.app, "POST", "/keys", body, ADMIN)
    assert answer.status in (200, 201), answer
    return json.loads(answer.body)["api_key"]


async def test_header_values_open_one_session_each(
    tmp_path: Path,
) -> None:
    async with running(engine(), tmp_path / "g") as up:
        ticket = await up.client.create_key(HeaderKeySpec(id="eval", session=SPEC))
        assert ticket == await up.client.create_key(HeaderKeySpec(id="eval", session=SPEC))
        with pytest.raises(Conflict):
            await up.client.create_key(HeaderKeySpec(id="eval", max_open=1))
        async with openai.AsyncOpenAI(base_url=ticket.openai_base_url, api_key=ticket.api_key) as client:
            names = [f"rollout-{n:02}" for n in range(20)]
            assert [model.id async for model in client.models.list()]
            # First requests of a session at the same time open it once.
            assert set(await asyncio.gather(*(say(client, name) for name in names * 2))) == {"Yes."}
            for name in names:
                assert await say(client, name, "Hi", "Once more.") == "Yes."
        listed = await up.client.sessions(key_id="eval", phase="open")
        assert [(s.id, s.calls) for s in listed] == [(f"eval.{name}", 3) for name in names]
        record = await up.client.finalize("eval.rollout-07")
        assert len(record.turns) == 3 and record.trajectories
        assert len(await up.client.sessions(key_id="eval", phase="open")) == 19
        row = up.gateway.sessions.get("eval.rollout-07").row
        assert row.spec.metadata == {"run": "x", "header": {"x-session-id": "rollout-07"}}
        assert (row.spec.budget.calls, row.spec.sampling.max_tokens) == (9, 20)


async def test_header_keys_survive_a_restart(
    tmp_path: Path,
) -> None:
    async with running(engine(), tmp_path / "g") as up:
        ticket = await up.client.create_key(HeaderKeySpec(id="eval", header="X-Run", session=SPEC))
        status, _ = await up.ask("POST", CHAT, json.loads(BODY), headers=by(ticket.api_key, "a"))
        assert status == 200
    async with running(engine(), tmp_path / "g") as up:
        another = {"model": "m", "messages": [{"role": "user", "content": "Another."}]}
        status, _ = await up.ask("POST", CHAT, another, headers=by(ticket.api_key, "a"))
        assert (status, (await up.client.state("eval.a")).calls) == (200, 2)
        status, keys = await up.ask("GET", "/keys")
        assert [(key["id"], key["header"]) for key in keys["keys"]] == [("eval", "x-run")]
        assert ticket.api_key not in json.dumps(keys)


def by(key: str, name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", "x-run": name}


async def test_header_key_is_limited_to_its_sessions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with place(tmp_path, engine()) as there:
        await there.gateway.open(SessionSpec(id="other.1"))
        await there.gateway.open(SessionSpec(id="eval.mine"))
        key = await key_of(there, session=SessionSpec(scope=("infer",)))
        with caplog.at_level(logging.INFO, logger="afield.gateway"):
            assert await post(there, key) == 400  # no header, no session
            assert await post(there, key, "") == 400
            assert await post(there, key, "x" * 600) == 400
            assert await post(there, key, "mine") == 409  # somebody else's
            assert await post(there, key, "a", "/s/eval.b/v1/chat/completions") == 400
            for path in ("/s/other.1", "/s/eval.mine", "/s/no-such"):
                assert await post(there, key, None, path + CHAT) == 401
            assert await post(there, key, "a") == 200
            assert await post(there, key, "a", "/s/eval.a/reward", b'{"reward": 1}') == 403
            assert (await knock(there.app, "GET", "/s/eval.a/turns", key=key)).status == 403
            for method, path in [
                ("GET", "/sessions"),
                ("POST", "/sessions"),
                ("POST", "/keys"),
                ("GET", "/keys"),
            ]:
                assert (await knock(there.app, method, path, b"{}", key)).status == 401
            parts = key.split("~")
            forged = [
                "~".join([*parts[:3], "0" * 40]),
                "~".join([parts[0], "x-other", *parts[2:]]),
                key + "0",
                "afh-",
            ]
            assert [await post(there, wrong, "a") for wrong in forged] == [401] * 4
            assert await post(there, key, None, "/s/eval.a/complete", b"{}") == 200  # its own, by the path
            assert await post(there, key, "a") == 409
        assert all(key not in record.getMessage() for record in caplog.records)
        assert without_keys(f"asked with {key}") == "asked with afh-eval~..."


async def test_header_key_scope_decides_rewards(tmp_path: Path) -> None:
    async with place(tmp_path, engine()) as there:
        key, judged = (
            await key_of(there),
            await key_of(there, id="judged", session=SessionSpec(reward_from="verifier")),
        )
        assert await post(there, key, "a") == await post(there, judged, "a") == 200
        assert await post(there, key, None, "/s/eval.a/outcome", b'{"reward": 0.5}') == 200
        assert await post(there, judged, None, "/s/judged.a/outcome", b'{"reward": 0.5}') == 403
        assert (await there.get("/sessions/eval.a"))["rewards"] == [{"reward": 0.5}]


async def test_open_sessions_are_limited_and_idle_ones_are_completed(tmp_path: Path) -> None:
    skipped = 0.0
    async with place(tmp_path, engine(), clock=lambda: time.time() + skipped) as there:
        key = await key_of(there, max_open=3, idle_s=60.0)
        answers = await asyncio.gather(*(post(there, key, f"r{n}") for n in range(8)))
        assert sorted(answers) == [200] * 3 + [429] * 5
        opened = [f"eval.r{n}" for n, status in enumerate(answers) if status == 200]
        assert await there.gateway.header_keys.close_idle() == 0
        skipped = 50.0
        assert await post(there, key, opened[0].removeprefix("eval.")) == 200
        skipped = 100.0
        assert await there.gateway.header_keys.close_idle() == 2
        assert (await there.get(f"/sessions/{opened[1]}"))["phase"] == "completed"
        assert await post(there, key, "another") == 200
        answer = await knock(there.app, "DELETE", "/keys/eval", key=ADMIN)
        assert answer.status == 200
        assert await post(there, key, "another") == 401
        listed = (await there.get("/sessions?key=eval"))["sessions"]
        assert {session["phase"] for session in listed} == {"completed"}
        assert await key_of(there, max_open=3, idle_s=60.0) != key


@pytest.mark.parametrize(
    "wrong",
    [
        *({"id": "a.b"}, {"id": ""}, {"header": "x session"}, {"header": "Authorization"}, {"max_open": 0}),
        *({"idle_s": 0}, {"session": {"id": "one"}}, {"session": {"nonsense": 1}}, {"nonsense": 1}),
    ],
)
async def test_invalid_header_key_spec_gets_400(wrong: dict[str, Any], tmp_path: Path) -> None:
    async with place(tmp_path, engine()) as there:
        answer = await knock(there.app, "POST", "/keys", json.dumps(wrong).encode(), ADMIN)
        assert answer.status == 400, answer


def test_header_values_map_to_distinct_ids() -> None:
    values = [
        "a",
        "a/b",
        "a b",
        "a_b",
        "../x",
        "ä",
        "a\x00",
        "é" * 500,
        "é" * 499,
        "x" * 64,
        "x" * 65,
        ".",
        "A",
    ]
    ids = [header_session_id("k" * 48, value) for value in values]
    assert len(set(ids)) == len(values)
    for session_id in ids:
        check_id(session_id, "session id")
    assert header_session_id("k", "rollout-7") == "k.rollout-7"
    assert header_session_id("k", "task/7").startswith("k.task_7-")


async def test_header_sessions_belong_to_one_process(tmp_path: Path) -> None:
    names = [f"n{n}" for n in range(8)]
    assert {owner(f"eval.{name}", 2) for name in names} == {0, 1}
    async with (
        serving(FakeVllm(ScriptedEngine(hello))) as vllm,
        sharded_gateway(tmp_path, vllm, "--path-keys") as (url, pid),
        HttpGateway(url, ADMIN) as admin,
    ):
        ticket = await admin.create_key(HeaderKeySpec(id="eval"))
        base = ticket.openai_base_url
        assert base.startswith(f"{url}/k/afh-eval~")
        async with openai.AsyncOpenAI(base_url=base, api_key="EMPTY", max_retries=0) as one:
            for name in names * 3:
                await say(one, name)
            await kill_one(pid)
            await asyncio.gather(*(until_known(admin, f"eval.{name}") for name in names))
            for name in names:
                await say(one.with_options(max_retries=5), name, "Another.")
        assert [(s.id, s.calls) for s in await admin.sessions(key_id="eval")] == [
            (f"eval.{n}", 4) for n in names
        ]
        await admin.delete_key("eval")
        assert {s.phase for s in await admin.sessions(key_id="eval")} == {"completed"}
        head = "POST /k/{}/v1/messages HTTP/1.1\r\nX-Session-Id: n3\r\nX-Api-Key: EMPTY\r\n\r\n"
        assert route(head.format(ticket.api_key).encode(), 7) == owner("eval.n3", 7)


async def until_known(admin: HttpGateway, session_id: str) -> None:
    async with asyncio.timeout(60):
        while True:
            with suppress(Unavailable):
                assert (await admin.state(session_id)).calls == 3
                return
            await asyncio.sleep(0.2)


# --- keys in paths --------------------------------------------------------------------------------


async def test_path_key_authenticates_clients_without_a_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(engine(), tmp_path / "g", path_keys=True) as up:
        ticket = await up.client.open(SessionSpec(id="r.1"))
        assert ticket.openai_base_url == f"{up.url}/k/{ticket.api_key}/v1"
        with caplog.at_level(logging.DEBUG):
            async with openai.AsyncOpenAI(
                base_url=ticket.openai_base_url, api_key="EMPTY", max_retries=0
            ) as client:
                reply = await client.chat.completions.create(model="m", messages=HI)
                assert reply.choices[0].message.content == "Yes."
                response = await client.responses.create(model="m", input="Hi")
                assert response.output_text == "Yes."
                with pytest.raises(openai.BadRequestError):
                    await client.chat.completions.create(model="m", messages=[])
            wrong = ticket.api_key[:-1] + ("0" if ticket.api_key[-1] != "0" else "1")
            for path, status in (
                (f"/k/{wrong}{CHAT}", 401),
                (f"/k/{ADMIN}{CHAT}", 401),
                (f"/k/{ADMIN}/sessions", 401),
            ):
                assert (await up.ask("POST", path, json.loads(BODY), key="EMPTY"))[0] == status
            status, state = await up.ask("POST", f"/k/{ticket.api_key}/outcome", {"reward": 1.0}, key="EMPTY")
            assert (status, state["phase"], state["calls"]) == (200, "completed", 2)
        logged = [record.getMessage() for record in caplog.records if record.name.startswith("afield")]
        assert any("/s/r.1/v1/chat/completions: 400" in line for line in logged), logged
        assert not any(ticket.api_key in line or ADMIN in line or wrong in line for line in logged)


async def test_path_keys_are_refused_by_default(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(engine(), tmp_path / "g") as up:
        ticket = await up.client.open(SessionSpec(id="r.1"))
        assert ticket.base_url == f"{up.url}/s/r.1"
        with caplog.at_level(logging.DEBUG, logger="afield"):
            status, answer = await up.ask(
                "POST", f"/k/{ticket.api_key}{CHAT}", json.loads(BODY), key=ticket.api_key
            )
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert "--path-keys" in answer["error"]["message"]
        assert ticket.api_key not in caplog.text


async def test_creating_header_keys_needs_the_admin_key(tmp_path: Path) -> None:
    async with running(engine(), tmp_path / "g") as up, HttpGateway(up.url, "wrong") as other:
        with pytest.raises(UsageError, match="admin key"):
            await other.create_key(HeaderKeySpec())
