"""Where agents of the AgentCore toolkit leave their results when they run on AgentCore, and that they count.

The toolkit names its object by the session that AgentCore tells it, which is not our id.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from msgspec import structs

from afield import wire
from afield.interfaces.transport import PendingAttempt
from afield.transports.stores.memory import MemoryNotifier
from afield.transports.stores.s3 import S3CollectorStore
from afield.transports.transport import StoreTransport
from afield.types import Attempt, FailureKind, Rollout, Task
from afield.wire import OutcomeRecord
from support.small_s3 import SmallS3, small_s3

pytestmark = pytest.mark.anyio
RESULT = b'{"status_code": 200, "rewards": [0.0, 0.75]}'


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallS3]:
    for key, value in {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret"}.items():
        monkeypatch.setenv(key, value)
    with small_s3() as server:
        yield server


def on(s3: SmallS3, single_reads: int = 64) -> StoreTransport:
    return StoreTransport(
        S3CollectorStore("bucket", endpoint=s3.url, region="us-east-1"),
        MemoryNotifier(),
        single_reads=single_reads,
    )


def waiting(n: int = 1, task: str = "a b/ü") -> PendingAttempt:
    return PendingAttempt(Rollout(id="r", exp_id="exp", group_id="g", task=Task(task, {})), Attempt("r", n))


def name(n: int) -> str:
    return wire.runtime_session_id(f"r.{n}")


async def test_a_result_under_agentcores_name_of_the_session_is_found_and_adopted(s3: SmallS3) -> None:
    s3.objects[f"exp/a b/ü/{name(1)}.json"] = RESULT
    async with on(s3) as transport:
        assert await transport.sweep([waiting(1), waiting(2)]) == [Attempt("r", 1)]
        assert await transport.decision(waiting(1)) is None
        assert not [key for key in s3.objects if "/commits/" in key]
        found = await transport.commit_result(waiting(1))
        assert isinstance(found, OutcomeRecord)
        assert (found.session_id, found.outcome.reward) == ("r.1", 0.75)
        assert await transport.decision(waiting(1)) == found
        assert await transport.commit_result(waiting(2)) is None
    assert {"exp/commits/r.1.json", "exp/adopted/r.1.json"} <= s3.objects.keys()


async def test_many_are_found_in_a_listing_too(s3: SmallS3) -> None:
    for n in (2, 4):
        s3.objects[f"exp/plain/{name(n)}.json"] = RESULT
    async with on(s3, single_reads=1) as transport:
        found = await transport.sweep([waiting(n, "plain") for n in range(1, 6)])
    assert found == [Attempt("r", 2), Attempt("r", 4)]


async def test_a_result_that_comes_after_the_fence_is_late(s3: SmallS3) -> None:
    async with on(s3) as transport:
        for n in (1, 2):
            await transport.fence(waiting(n), "deadline")
        s3.objects[f"exp/a b/ü/{name(2)}.json"] = RESULT
        assert await transport.late("exp") == [Attempt("r", 2)]


@pytest.mark.parametrize("task", ["../x", "a//b", ".", "commits/x", "t" * 1100])
async def test_no_key_is_asked_for_that_a_store_would_refuse(s3: SmallS3, task: str) -> None:
    async with on(s3) as transport:
        s3.asked.clear()
        assert await transport.decision(waiting(task=task)) is None
        assert await transport.commit_result(waiting(task=task)) is None
    folders = {key.rpartition("/")[0] for operation, key in s3.asked if operation == "GetObject"}
    assert folders == {"exp/commits", wire.data_key("exp", task, "r.1").rpartition("/")[0]}


async def test_a_result_without_a_reward_waits_for_the_callers(s3: SmallS3) -> None:
    result = {"status_code": 200, "stop_reason": "end_turn", "answer": "12", "payload": {"q": 1}}
    for n in (1, 2):
        s3.objects[f"exp/plain/{name(n)}.json"] = json.dumps(result).encode()
    async with on(s3) as transport:
        late = structs.replace(waiting(1, "plain"), reward_from="caller")
        found = await transport.commit_result(late)
        assert isinstance(found, OutcomeRecord)
        assert found.outcome.reward_pending and found.outcome.failure is None
        assert found.extra == {"answer": "12"}
        strict = await transport.commit_result(waiting(2, "plain"))
        assert isinstance(strict, OutcomeRecord)
        assert strict.outcome.failure and strict.outcome.failure.kind is FailureKind.VERIFIER
