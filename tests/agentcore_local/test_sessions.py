"""How sessions of the local AgentCore server end, what is refused, and bad luck on purpose."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import botocore.exceptions
import pytest
import urllib3.exceptions

from afield.agentcore_local.faults import FaultInjector, InjectedFault, parse
from afield.agentcore_local.images import AgentImage
from afield.agentcore_local.quotas import Quotas
from afield.agentcore_local.sessions import Timings
from afield.errors import UsageError
from support.agentcore_server import agentcore_server, session_id, wait_gone

pytestmark = pytest.mark.anyio
QUICK = {"idleRuntimeSessionTimeout": 60, "maxLifetime": 28800}
FAST = Timings(speed=300)  # an idle timeout of 0.2 s


# --- reaping -------------------------------------------------------------------------------------


async def test_an_idle_session_is_reaped_and_the_next_invoke_starts_a_fresh_one() -> None:
    async with agentcore_server(pace=FAST) as caller:
        await caller.ready(lifecycleConfiguration=QUICK)
        session = session_id()
        pid = (await caller.invoke({}, session))["pid"]
        await caller.wait_sessions(0)
        await wait_gone(pid)
        assert (await caller.view("stats"))["ends"] == {"idle": 1}
        assert (await caller.invoke({}, session))["count"] == 1


async def test_a_busy_program_outlives_the_idle_timeout_until_its_task_is_done() -> None:
    async with agentcore_server(pace=FAST) as caller:
        await caller.ready(lifecycleConfiguration=QUICK)
        began = time.monotonic()
        await caller.invoke({"do": "background", "seconds": 1})
        await caller.wait_sessions(0)
        assert time.monotonic() - began >= 1.2
        assert (await caller.view("stats"))["ends"] == {"idle": 1}


BUSY = """
import uvicorn

async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    body = b'{"status": "HealthyBusy"}'
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"25")]})
    await send({"type": "http.response.body", "body": body})

uvicorn.run(app, host="127.0.0.1", port=8080, log_level="warning")
"""


async def test_busy_without_a_time_of_last_update_is_reaped_all_the_same(tmp_path: Path) -> None:
    program = tmp_path / "busy.py"
    program.write_text(BUSY)
    async with agentcore_server(images={"math": AgentImage(script=str(program))}, pace=FAST) as caller:
        await caller.ready(lifecycleConfiguration=QUICK)
        await caller.invoke({})
        await caller.wait_sessions(0)
        assert (await caller.view("stats"))["ends"] == {"idle": 1}


async def test_an_answer_that_takes_longer_than_the_idle_timeout_arrives() -> None:
    async with agentcore_server(pace=FAST) as caller:
        await caller.ready(lifecycleConfiguration=QUICK)
        assert (await caller.invoke({"do": "sleep", "seconds": 0.8}))["count"] == 1


async def test_a_session_ends_at_its_lifetime_whatever_it_does() -> None:
    async with agentcore_server(pace=Timings(speed=60)) as caller:
        await caller.ready(
            lifecycleConfiguration={"idleRuntimeSessionTimeout": 60, "maxLifetime": 60},
        )
        with pytest.raises(caller.data.exceptions.RuntimeClientError):
            await caller.invoke({"do": "sleep", "seconds": 600})
        assert (await caller.view("stats"))["ends"] == {"lifetime": 1}


async def test_a_missing_answer_times_out_and_the_session_continues() -> None:
    async with agentcore_server(pace=Timings(answer_s=0.3)) as caller:
        await caller.ready()
        with pytest.raises(caller.data.exceptions.RuntimeClientError, match="did not answer in time"):
            await caller.invoke({"do": "sleep", "seconds": 3})
        assert len(await caller.sessions()) == 1


# --- programs that fail --------------------------------------------------------------------------


async def test_a_program_that_dies_is_424_and_the_next_invoke_starts_a_fresh_one(tmp_path: Path) -> None:
    async with agentcore_server(logs=tmp_path) as caller:
        await caller.ready()
        session = session_id()
        await caller.invoke({}, session)
        with pytest.raises(caller.data.exceptions.RuntimeClientError, match=session):
            await caller.invoke({"do": "die"}, session)
        assert (await caller.invoke({}, session))["count"] == 1
        assert (await caller.view("stats"))["ends"] == {"died": 1}
    logs = sorted(tmp_path.glob(f"{session}-*.log"))  # noqa: ASYNC240
    assert len(logs) == 2
    assert "going down" in logs[0].read_text()


async def test_what_the_agent_raises_is_424_and_the_session_lives_on() -> None:
    async with agentcore_server() as caller:
        await caller.ready()
        session = session_id()
        with pytest.raises(
            caller.data.exceptions.RuntimeClientError, match=r"Received error \(500\)"
        ) as caught:
            await caller.invoke({"do": "raise"}, session)
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 424
        with pytest.raises(caller.data.exceptions.RuntimeClientError, match=r"Received error \(418\)"):
            await caller.invoke({"do": "refuse", "status": 418}, session)
        assert (await caller.invoke({}, session))["count"] == 3


async def test_a_program_that_cannot_start_is_424_with_what_it_printed(tmp_path: Path) -> None:
    program = tmp_path / "broken.py"
    program.write_text("import sys\nsys.exit('no model file')\n")
    async with agentcore_server(images={"math": AgentImage(script=str(program))}) as caller:
        await caller.ready()
        with pytest.raises(caller.data.exceptions.RuntimeClientError, match="no model file"):
            await caller.invoke({})
        assert await caller.sessions() == []


async def test_a_program_that_never_serves_is_424_after_the_time_it_has(tmp_path: Path) -> None:
    program = tmp_path / "asleep.py"
    program.write_text("import time\ntime.sleep(600)\n")
    async with agentcore_server(
        images={"math": AgentImage(script=str(program))}, pace=Timings(init_s=1.0)
    ) as caller:
        await caller.ready()
        with pytest.raises(caller.data.exceptions.RuntimeClientError, match="initialization time exceeded"):
            await caller.invoke({})
        assert await caller.sessions() == []


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 32, 257])
async def test_session_ids_have_33_to_256_characters(length: int) -> None:
    async with agentcore_server() as caller:
        await caller.ready()
        with pytest.raises(caller.data.exceptions.ValidationException, match="33 to 256") as caught:
            await caller.invoke({}, "x" * length)
        assert caught.value.response["fieldList"][0]["name"] == "runtimeSessionId"


async def test_session_ids_of_any_characters_get_a_log_of_their_own(tmp_path: Path) -> None:
    async with agentcore_server(logs=tmp_path) as caller:
        await caller.ready()
        session = "../" * 20 + "x"
        assert (await caller.invoke({}, session))["session"] == session
        [log] = [Path(one["log"]) for one in await caller.sessions()]
        assert log.parent == tmp_path


async def test_an_agent_that_does_not_exist_is_404() -> None:
    async with agentcore_server() as caller:
        caller.arn = "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/nobody-0123456789"
        with pytest.raises(caller.data.exceptions.ResourceNotFoundException, match="nobody"):
            await caller.invoke({})
        with pytest.raises(caller.data.exceptions.ResourceNotFoundException, match="nobody"):
            await caller.stop(session_id())


async def test_operation_that_is_not_modelled_raises_not_found() -> None:
    async with agentcore_server() as caller:
        with pytest.raises(caller.control.exceptions.ResourceNotFoundException, match="does not model"):
            await caller.call(caller.control.list_gateways)


async def test_more_sessions_than_the_quota_are_402_until_one_ends() -> None:
    async with agentcore_server(quotas=Quotas(sessions=2)) as caller:
        await caller.ready()
        first = session_id()
        await caller.invoke({}, first)
        await caller.invoke({})
        with pytest.raises(caller.data.exceptions.ServiceQuotaExceededException, match="maxVms") as caught:
            await caller.invoke({})
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 402
        assert (await caller.invoke({}, first))["count"] == 2
        await caller.stop(first)
        await caller.invoke({})


async def outcomes(work: list[Any]) -> Counter[str]:
    """How each of these calls, all at once, went."""
    done: Counter[str] = Counter()

    async def one(call: Any) -> None:
        try:
            await call()
            done["200"] += 1
        except botocore.exceptions.ClientError as error:
            done[str(error.response["ResponseMetadata"]["HTTPStatusCode"])] += 1

    async with anyio.create_task_group() as group:
        for call in work:
            group.start_soon(one, call)
    return done


async def test_starts_beyond_their_rate_are_429_and_invokes_of_running_sessions_are_not() -> None:
    async with agentcore_server(quotas=Quotas(start_rate=0.01, burst_s=200)) as caller:
        await caller.ready()
        session = session_id()
        await caller.invoke({}, session)
        assert await outcomes([caller.invoke] * 4) == {"200": 1, "429": 3}
        assert await outcomes([lambda: caller.invoke({}, session)] * 4) == {"200": 4}
        stats = await caller.view("stats")
        assert (stats["throttled"], stats["starts"]) == (3, 2)
        assert stats["answers"]["InvokeAgentRuntime"] == {"200": 6, "429": 3}


async def test_stops_are_counted_separately_from_starts() -> None:
    async with agentcore_server(quotas=Quotas(start_rate=0.01, burst_s=200, stop_rate=0.01)) as caller:
        await caller.ready()
        first, second = session_id(), session_id()
        await caller.invoke({}, first)
        await caller.invoke({}, second)
        assert await outcomes([lambda: caller.stop(first)]) == {"200": 1}
        assert await outcomes([lambda: caller.stop(second)]) == {"200": 1}
        with pytest.raises(caller.data.exceptions.ThrottlingException, match="stops"):
            await caller.stop(session_id())


async def test_invokes_of_one_agent_have_a_rate() -> None:
    async with agentcore_server(quotas=Quotas(invoke_rate=0.01, burst_s=200)) as caller:
        await caller.ready()
        session = session_id()
        assert await outcomes([lambda: caller.invoke({}, session)] * 5) == {"200": 2, "429": 3}


# --- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "error", "status"),
    [
        ("throttle", "ThrottlingException", 429),
        ("error", "InternalServerException", 500),
        ("agent", "RuntimeClientError", 424),
        ("quota", "ServiceQuotaExceededException", 402),
        ("conflict", "RetryableConflictException", 409),
    ],
)
async def test_a_fault_is_answered_as_the_service_would(kind: str, error: str, status: int) -> None:
    async with agentcore_server(faults={kind: InjectedFault(1.0)}) as caller:
        await caller.ready()
        with pytest.raises(getattr(caller.data.exceptions, error), match=f"--fault {kind}") as caught:
            await caller.invoke({})
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == status
        assert await caller.sessions() == []
        assert (await caller.view("stats"))["faults"] == {kind: 1}


async def test_a_cut_connection_leaves_a_session_that_took_the_payload() -> None:
    async with agentcore_server(faults={"cut": InjectedFault(1.0)}) as caller:
        await caller.ready()
        session = session_id()
        with pytest.raises(botocore.exceptions.ConnectionClosedError):
            await caller.invoke({}, session)
        [one] = await caller.sessions()
        assert (one["runtimeSessionId"], one["invokes"]) == (session, 1)


async def test_a_hanging_answer_comes_late() -> None:
    async with agentcore_server(faults={"hang": InjectedFault(1.0, 0.5)}) as caller:
        await caller.ready()
        began = time.monotonic()
        await caller.invoke({})
        assert time.monotonic() - began >= 0.5


async def test_session_killed_by_an_injected_fault_is_started_again() -> None:
    async with agentcore_server(faults={"die": InjectedFault(1.0, 0.3)}) as caller:
        await caller.ready()
        session = session_id()
        with pytest.raises(caller.data.exceptions.RuntimeClientError):
            await caller.invoke({"do": "sleep", "seconds": 600}, session)
        assert (await caller.view("stats"))["ends"] == {"fault": 1}
        assert (await caller.invoke({}, session))["count"] == 1


async def test_a_stop_that_lies_leaves_the_session_running() -> None:
    async with agentcore_server(faults={"lie": InjectedFault(1.0)}) as caller:
        await caller.ready()
        session = session_id()
        await caller.invoke({}, session)
        assert (await caller.stop(session))["statusCode"] == 200
        assert len(await caller.sessions()) == 1


async def test_client_that_disconnects_from_a_stream_ends_it() -> None:
    def leave(data: Any, arn: str) -> None:
        payload = json.dumps({"do": "stream", "n": 100_000}).encode()
        answer = data.invoke_agent_runtime(agentRuntimeArn=arn, payload=payload)
        next(answer["response"].iter_lines())
        answer["response"].close()

    async with agentcore_server(pace=FAST) as caller:
        await caller.ready(lifecycleConfiguration=QUICK)
        await asyncio.to_thread(leave, caller.data, caller.arn)
        await caller.wait_sessions(0)  # it is idle only when the stream has ended
        assert (await caller.view("stats"))["ends"] == {"idle": 1}


async def test_a_program_that_dies_in_the_middle_of_a_stream_breaks_it() -> None:
    async with agentcore_server() as caller:
        await caller.ready()
        session = session_id()
        with pytest.raises((botocore.exceptions.ResponseStreamingError, urllib3.exceptions.ProtocolError)):
            await caller.raw({"do": "stream", "n": 3, "last": "die"}, session)
        await caller.wait_sessions(0)
        assert (await caller.invoke({}, session))["count"] == 1


async def test_a_stream_that_takes_too_long_is_broken_off_and_the_session_stays() -> None:
    async with agentcore_server(pace=Timings(stream_s=0.5)) as caller:
        await caller.ready()
        with pytest.raises((botocore.exceptions.ResponseStreamingError, urllib3.exceptions.ProtocolError)):
            await caller.raw({"do": "stream", "n": 1000})
        assert len(await caller.sessions()) == 1


def test_luck_is_the_same_for_the_same_seed_in_any_order() -> None:
    faults = parse(["throttle=0.3", "die=0.5:2"])
    keys = [f"session-{i}" for i in range(200)]
    one, two, other = (FaultInjector(faults, seed) for seed in (7, 7, 8))
    struck = {key for key in keys if one.draw("throttle", key)}
    assert struck == {key for key in reversed(keys) if two.draw("throttle", key)}
    assert struck != {key for key in keys if other.draw("throttle", key)}
    assert 30 < len(struck) < 90


@pytest.mark.parametrize(
    "spec", ["typo=0.1", "throttle", "throttle=2", "throttle=x", "throttle=0.1:5", "die=1:-1"]
)
def test_faults_that_make_no_sense_are_refused(spec: str) -> None:
    with pytest.raises(UsageError, match="--fault"):
        parse([spec])
