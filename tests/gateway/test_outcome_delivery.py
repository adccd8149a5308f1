"""Outcomes that agents post to their gateway: kept there first, then brought to where they count."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec import structs

from afield import wire
from afield.engines.scripted import ScriptedEngine
from afield.errors import Unavailable, UsageError
from afield.interfaces import Fence, PendingAttempt, SessionSpec
from afield.sdk.deliver import deliver
from afield.transports.stores.files import FilesTransport
from afield.transports.stores.memory import MemoryTransport
from afield.types import Attempt, Failure, FailureKind, Outcome, Reason, Rollout, Task
from afield.wire import Invocation, OutcomeRecord
from agents.invoking import invocation, record
from support.dialect_session import said
from support.gateways import POLICY, Running, running
from support.paths import TESTS

pytestmark = pytest.mark.anyio
SPEC = SessionSpec(id="r.1", rollout_id="r", attempt=1, group_id="g", exp_id="exp", input_id="t")
WAITING = PendingAttempt(Rollout(id="r", exp_id="exp", group_id="g", task=Task("t", {})), Attempt("r", 1))


class Moody(MemoryTransport):
    """A store that cannot be reached while it is `down`."""

    down = False
    tried = 0

    async def deliver(self, invocation: Invocation, record: OutcomeRecord) -> bool:
        self.tried += 1
        if self.down:
            raise Unavailable("the bucket does not answer; wait for it")
        return await super().deliver(invocation, record)


def engine() -> ScriptedEngine:
    return ScriptedEngine(lambda _: said("Yes."))


async def opened(up: Running, **changes: Any) -> Invocation:
    """A session, as its agent is told of it."""
    ticket = await up.client.open(structs.replace(SPEC, **changes))
    made = invocation(outcome_url=f"{ticket.base_url}/outcome")
    return structs.replace(made, base_url=ticket.base_url, api_key=ticket.api_key)


async def told(up: Running, at: Invocation, **body: Any) -> tuple[int, Any]:
    return await up.ask("POST", "/s/r.1/outcome", body, at.api_key)


async def standing(outlet: MemoryTransport) -> OutcomeRecord:
    found = await outlet.decision(WAITING)
    assert isinstance(found, OutcomeRecord)
    return found


async def test_sdk_record_reaches_the_store(tmp_path: Path) -> None:
    async with MemoryTransport() as outlet, running(engine(), tmp_path, outlet=outlet) as up:
        at = await opened(up)
        sent = record(
            at, 0.5, payload={"question": "?", "big": 2**70}, extra={"note": "é"}, started=1.0, ended=2.0
        )
        for _ in range(2):
            assert await asyncio.to_thread(deliver, at, sent)
        assert await standing(outlet) == sent
        assert await outlet.hints("exp", 1.0) == [Attempt("r", 1)]
        state = await up.client.state("r.1")
        assert (state.phase, state.rewards) == ("completed", [{"reward": 0.5}])
        assert not await asyncio.to_thread(deliver, at, record(at, 0.7))
        assert await standing(outlet) == sent


async def test_short_outcome_becomes_a_record(tmp_path: Path) -> None:
    async with MemoryTransport() as outlet, running(engine(), tmp_path, outlet=outlet) as up:
        at = await opened(up)
        body = {"reward": 1, "rewards": {"format": 0.5}, "metrics": {"steps": 3.0}, "artifacts": {"a": [1]}}
        assert (await told(up, at, **body, stop_reason="end"))[0] == 200
        found = await standing(outlet)
        assert (found.exp_id, found.input_id, found.group_id, found.session_id) == ("exp", "t", "g", "r.1")
        assert found.outcome == Outcome(
            rollout_id="r",
            attempt=1,
            reward=1.0,
            rewards={"format": 0.5},
            metrics={"steps": 3.0},
            stop_reason="end",
        )
        assert found.extra == {"a": [1]}
        assert found.ended >= found.started > 0


@pytest.mark.parametrize("path", ["outcome", "complete"])
async def test_an_outcome_without_a_reward_succeeds_only_if_the_caller_gives_it(
    tmp_path: Path, path: str
) -> None:
    async with MemoryTransport() as outlet, running(engine(), tmp_path, outlet=outlet) as up:
        at = await opened(up, reward_from="caller")
        body = {"metrics": {"steps": 3.0}} if path == "outcome" else {}
        assert (await up.ask("POST", f"/s/r.1/{path}", body, at.api_key))[0] == 200
        found = await standing(outlet)
        metrics = body.get("metrics", {})
        assert found.outcome == Outcome(rollout_id="r", attempt=1, reward_pending=True, metrics=metrics)


async def test_an_outcome_without_a_reward_is_a_failure_by_default(tmp_path: Path) -> None:
    async with MemoryTransport() as outlet, running(engine(), tmp_path, outlet=outlet) as up:
        at = await opened(up)
        assert (await told(up, at))[0] == 200
        failure = (await standing(outlet)).outcome.failure
        assert failure and (failure.kind, failure.reason) == (FailureKind.VERIFIER, Reason.REWARD)


async def test_complete_with_a_reward_delivers_an_outcome(tmp_path: Path) -> None:
    async with MemoryTransport() as outlet, running(engine(), tmp_path, outlet=outlet) as up:
        at = await opened(up)
        assert (await up.ask("POST", "/s/r.1/complete", {"reward": 0.25}, at.api_key))[0] == 200
        assert (await standing(outlet)).outcome.reward == 0.25


async def test_outcome_of_a_fenced_attempt_gets_409(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with MemoryTransport() as outlet, running(engine(), tmp_path, outlet=outlet) as up:
        at = await opened(up)
        await outlet.fence(WAITING, "took too long")
        await up.client.abort("r.1", "took too long")
        with caplog.at_level(logging.WARNING, logger="afield.gateway"):
            assert not await asyncio.to_thread(deliver, at, record(at))
        assert any("r.1" in r.getMessage() and "took too long" in r.getMessage() for r in caplog.records)
        status, answer = await up.ask(
            "POST", "/s/r.1/outcome", json.loads(wire.encode(record(at))), at.api_key
        )
        assert (status, answer["error"]["type"]) == (409, "outcome_refused")
        assert "took too long" in answer["error"]["message"]
        assert await outlet.late("exp") == [Attempt("r", 1)]
        assert isinstance(await outlet.decision(WAITING), Fence)
        assert (await up.client.state("r.1")).phase == "aborted"


async def test_outcome_after_finalize_is_late(tmp_path: Path) -> None:
    async with MemoryTransport() as outlet, running(engine(), tmp_path, outlet=outlet) as up:
        at = await opened(up)
        await outlet.fence(WAITING, "enough")
        await up.client.finalize("r.1")
        assert not await asyncio.to_thread(deliver, at, record(at))
        assert await outlet.late("exp") == [Attempt("r", 1)]


@pytest.mark.parametrize("field", ["exp_id", "input_id", "group_id", "session_id", "outcome.rollout_id"])
async def test_outcome_of_another_attempt_gets_400(tmp_path: Path, field: str) -> None:
    async with MemoryTransport() as outlet, running(engine(), tmp_path, outlet=outlet) as up:
        at = await opened(up)
        body = json.loads(wire.encode(record(at)))
        holder = body["outcome"] if "." in field else body
        holder[field.rpartition(".")[2]] = "other"
        status, answer = await up.ask("POST", "/s/r.1/outcome", body, at.api_key)
        assert status == 400
        assert field in answer["error"]["message"]
        assert await outlet.decision(WAITING) is None
        assert (await up.client.state("r.1")).phase == "open"


@pytest.mark.parametrize("kind", list(FailureKind))
async def test_failures_keep_their_type(tmp_path: Path, kind: FailureKind) -> None:
    async with MemoryTransport() as outlet, running(engine(), tmp_path, outlet=outlet) as up:
        at = await opened(up)
        failure = Failure(kind, Reason.RAISED, "it broke", "Traceback ...")
        sent = OutcomeRecord.of(at, wire.failed("r", 1, failure))
        assert await asyncio.to_thread(deliver, at, sent)
        assert await standing(outlet) == sent


async def test_outcome_without_reward_is_a_failure(tmp_path: Path) -> None:
    async with MemoryTransport() as outlet, running(engine(), tmp_path, outlet=outlet) as up:
        at = await opened(up)
        assert (await told(up, at, status="done"))[0] == 200
        failure = (await standing(outlet)).outcome.failure
        assert failure
        assert (failure.kind, failure.reason) == (FailureKind.VERIFIER, Reason.REWARD)


@pytest.mark.parametrize("whole", [False, True])
async def test_outcome_is_delivered_after_the_verdict(tmp_path: Path, whole: bool) -> None:
    async with MemoryTransport() as outlet, running(engine(), tmp_path, outlet=outlet) as up:
        at = await opened(up, reward_from="verifier")
        verifier = (await up.client.open(structs.replace(SPEC, reward_from="verifier"))).verifier_key
        assert verifier
        assert (await told(up, at, reward=1.0))[0] == 403
        if whole:  # what the SDK makes of an agent that gives no reward
            failure = Failure(FailureKind.VERIFIER, Reason.REWARD, "neither 'reward' nor 'rewards'")
            sent = OutcomeRecord.of(at, wire.failed("r", 1, failure), payload={"question": "?"})
            assert await asyncio.to_thread(deliver, at, sent)
        else:
            assert (await told(up, at, metrics={"steps": 2.0}))[0] == 200
        assert await outlet.decision(WAITING) is None
        assert (await up.client.state("r.1")).phase == "completed"
        assert (await up.ask("POST", "/s/r.1/reward", {"reward": 0.5}, verifier))[0] == 200
        found = await standing(outlet)
        assert (found.outcome.reward, found.outcome.failure) == (0.5, None)
        assert found.payload == ({"question": "?"} if whole else {})


async def test_verdict_decides_the_outcome(tmp_path: Path) -> None:
    async with MemoryTransport() as outlet, running(engine(), tmp_path, outlet=outlet) as up:
        at = await opened(up, reward_from="verifier")
        verifier = (await up.client.open(structs.replace(SPEC, reward_from="verifier"))).verifier_key or ""
        assert (await told(up, at, metrics={"steps": 2.0}))[0] == 200
        graded = {"reward": 0.75, "metrics": {"checks": 9.0}}
        assert (await up.ask("POST", "/s/r.1/outcome", graded, verifier))[0] == 200
        outcome = (await standing(outlet)).outcome
        assert (outcome.reward, outcome.metrics) == (0.75, {"steps": 2.0, "checks": 9.0})


async def test_delivery_retries_until_the_store_is_up(tmp_path: Path) -> None:
    outlet = Moody()
    async with outlet, running(engine(), tmp_path, outlet=outlet) as up:
        at = await opened(up)
        outlet.down = True
        headers = {"authorization": f"Bearer {at.api_key}"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{at.base_url}/outcome", json={"reward": 1.0}, headers=headers) as answer,
        ):
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            error = (await answer.json())["error"]
        assert error["type"] == "store_unavailable"
        assert "bucket" in error["message"]
        assert (await up.client.state("r.1")).phase == "completed"
        outlet.down = False
        async with asyncio.timeout(60):  # nobody asks again
            while await outlet.decision(WAITING) is None:
                await asyncio.sleep(0.05)
        assert (await told(up, at, reward=1.0))[0] == 200


async def test_due_outcomes_are_delivered_after_a_restart(tmp_path: Path) -> None:
    outlet = Moody()
    async with outlet:
        outlet.down = True
        async with running(engine(), tmp_path, outlet=outlet) as up:
            assert (await told(up, await opened(up), reward=1.0))[0] == 503
        outlet.down = False
        async with running(engine(), tmp_path):
            pass  # a gateway that passes nothing on forgets nothing
        async with running(engine(), tmp_path, outlet=outlet), asyncio.timeout(60):
            while await outlet.decision(WAITING) is None:
                await asyncio.sleep(0.02)
        tried = outlet.tried
        async with running(engine(), tmp_path, outlet=outlet):
            await asyncio.sleep(0.1)
        assert outlet.tried == tried


DYING = """
import asyncio, os, signal, sys
from pathlib import Path
sys.path[:0] = {path!r}
from afield.transports.stores.files import FilesTransport
from support.gateways import running
from tests.gateway.test_outcome_delivery import engine, opened, told

class Dying(FilesTransport):
    async def deliver(self, invocation, record):
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with Dying(Path({outcomes!r})) as outlet, running(engine(), Path({store!r}), outlet=outlet) as up:
        await told(up, await opened(up), reward=0.5)

asyncio.run(main())
"""


async def test_outcome_survives_a_kill_before_delivery(tmp_path: Path) -> None:
    outcomes, store = tmp_path / "outcomes", tmp_path / "store"
    code = DYING.format(path=[str(TESTS)], outcomes=str(outcomes), store=str(store))
    died = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], timeout=60)
    assert died.returncode == -signal.SIGKILL
    async with FilesTransport(outcomes) as outlet:
        assert await outlet.decision(WAITING) is None
        async with running(engine(), store, outlet=outlet), asyncio.timeout(60):
            while await outlet.decision(WAITING) is None:
                await asyncio.sleep(0.02)
        found = await outlet.decision(WAITING)
        assert isinstance(found, OutcomeRecord)
        assert found.outcome.reward == 0.5


async def test_session_without_experiment_is_not_delivered(tmp_path: Path) -> None:
    outlet = Moody()
    async with outlet, running(engine(), tmp_path, outlet=outlet) as up:
        at = await opened(up, exp_id=None)
        assert (await told(up, at, reward=1.0))[0] == 200
        assert outlet.tried == 0


async def test_session_of_an_experiment_needs_all_ids(tmp_path: Path) -> None:
    async with MemoryTransport() as outlet, running(engine(), tmp_path, outlet=outlet) as up:
        with pytest.raises(UsageError, match="input_id"):
            await opened(up, input_id=None)
        with pytest.raises(UsageError, match=r"should be 'r\.1'"):
            await opened(up, id="x.1")


async def test_record_gets_400_without_outcome_store(tmp_path: Path) -> None:
    async with running(engine(), tmp_path) as up:
        at = await opened(up)
        with pytest.raises(Unavailable, match="--outcomes"):
            await asyncio.to_thread(deliver, at, record(at))


async def test_gateway_command_delivers_outcomes(tmp_path: Path) -> None:
    arguments = [
        "gateway",
        "--model",
        str(POLICY),
        "--engine",
        f"scripted={tmp_path / 'script'}",
        "--port",
        "0",
    ]
    arguments += ["--store", str(tmp_path / "store"), "--json", "--exit-with-parent"]
    arguments += ["--outcomes", (tmp_path / "outcomes").as_uri().replace("file:", "files:")]
    (tmp_path / "script").write_text(json.dumps({"text": "Yes."}))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "afield",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "AFIELD_ADMIN_KEY": "k"},
    )
    assert process.stdout is not None
    try:
        url = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))["url"]
        async with aiohttp.ClientSession(headers={"authorization": "Bearer k"}) as http:
            async with http.post(f"{url}/sessions", data=wire.encode(SPEC)) as answer:
                assert answer.status == 201
            async with http.post(f"{url}/s/r.1/outcome", json={"reward": 0.5}) as answer:
                assert answer.status == 200
        async with FilesTransport(tmp_path / "outcomes") as outlet:
            assert isinstance(await outlet.decision(WAITING), OutcomeRecord)
    finally:
        process.terminate()
        await process.wait()
