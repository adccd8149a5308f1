"""An agent written with the published `agentcore-rl-toolkit`, unmodified, trained through S3.

It is served by the wheel's own code in an environment of its own, puts one object, and knows nothing of
commits or queues. S3 is moto's server, the model a real gateway in front of a scripted engine. Like the
toolkit's own examples it sends a placeholder as its key: the gateway's base URLs carry the session's.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from afield.errors import Unavailable
from afield.runtimes.remote import RemoteRuntime
from afield.sdk.stores import aws_client
from afield.transports.stores.memory import MemoryNotifier
from afield.transports.stores.s3 import S3CollectorStore
from afield.transports.transport import StoreTransport
from afield.types import FailureKind
from afield.utils.installations import python_environment
from support import servers
from support.client_gateway import threaded_gateway
from support.ports import free_ports

pytestmark = pytest.mark.real
TOOLKIT = "agentcore-rl-toolkit[server]==0.2.0"
PROGRAM = """
import json, os, urllib.request
from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()


@app.rollout_entrypoint
def agent(payload, context):
    rollout = payload["_rollout"]
    body = {"model": rollout["model_id"], "messages": [{"role": "user", "content": payload["question"]}]}
    request = urllib.request.Request(
        rollout["base_url"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer EMPTY"},
    )
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)["choices"][0]["message"]["content"]
    if payload["question"] == "raise":
        raise RuntimeError("the agent broke")
    if payload["question"] == "silent":
        return {"answer": answer}
    return {"rewards": [0.0, float(answer == "Yes.")], "answer": answer}


app.run(port=int(os.environ["AGENT_PORT"]), host="127.0.0.1")
"""


@pytest.fixture
def bucket(server: Callable[[str], servers.Server], monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in {**servers.KEYS, "AWS_ENDPOINT_URL": server("moto").url}.items():
        monkeypatch.setenv(name, value)
    name = f"b-{uuid.uuid4().hex[:12]}"
    aws_client("s3").create_bucket(Bucket=name)
    return name


@pytest.fixture
def agent_url(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    try:
        python = python_environment(servers.CACHE, "toolkit", [TOOLKIT], python=sys.executable)
    except Unavailable as error:
        pytest.fail(str(error)) if os.environ.get("CI") else pytest.skip(str(error))
    (tmp_path / "program.py").write_text(PROGRAM)
    [port] = free_ports(1)
    monkeypatch.setenv("AGENT_PORT", str(port))
    served = servers.Server("http", port, [str(python), str(tmp_path / "program.py")], tmp_path / "agent")
    try:
        served.start()
        yield served.url
    finally:
        served.stop()


def test_the_toolkits_own_wheel_works_with_the_client_through_s3(
    bucket: str, agent_url: str, tmp_path: Path
) -> None:
    transport = StoreTransport(S3CollectorStore(bucket), MemoryNotifier())
    runtime = RemoteRuntime([agent_url], poll_s=0.2)
    with (
        threaded_gateway(tmp_path, path_keys=True) as there,
        there.client(runtime=runtime, transport=transport, poll_interval_s=0.5, exp_id="toolkit") as client,
    ):
        good = client.submit({"question": "Is it so?"}, input_id="a b/ü")
        broken = client.submit({"question": "raise"}, input_id="broken")
        silent = client.submit({"question": "silent"}, input_id="silent")
        finished = good.result(180)
        failures = [future.finished(180).outcome.failure for future in (broken, silent)]
    assert finished.outcome.reward == 1.0 and finished.outcome.rewards == {"0": 0.0, "1": 1.0}
    assert len(finished.turns) == 1 and finished.trajectories
    assert [failure.kind for failure in failures if failure] == [FailureKind.TASK, FailureKind.VERIFIER]
    assert failures[0] and "the agent broke" in failures[0].traceback
    s3 = aws_client("s3")
    keys = {one["Key"] for one in s3.list_objects_v2(Bucket=bucket)["Contents"]}
    session = f"{good.rollout.id}.1.json"
    assert keys >= {f"toolkit/a b/ü/{session}", f"toolkit/commits/{session}", f"toolkit/adopted/{session}"}
    kept = s3.get_object(Bucket=bucket, Key=f"toolkit/adopted/{session}")["Body"].read()
    theirs = s3.get_object(Bucket=bucket, Key=f"toolkit/a b/ü/{session}")["Body"].read()
    key = json.loads(theirs)["payload"]["_rollout"]["api_key"]
    assert key.encode() not in kept and json.loads(kept)["payload"] == {"question": "Is it so?"}
