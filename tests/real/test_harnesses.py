"""Every harness at its pinned version: trains on Harbor tasks in sandboxes, and ends at the turn limit.

A client that cannot be installed here skips with the reason; where `CI` is set it fails.
"""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from afield import RolloutClient, harnesses
from afield.errors import Unavailable
from afield.settings.environment import Environment
from bench.harnesses.training import AFIELD, instruction, train, write_inputs
from support.ports import free_ports
from support.processes import until

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.fixture(params=harnesses.TARGETS)
def name(request: pytest.FixtureRequest) -> str:
    harness = harnesses.find(request.param)
    assert harness is not None
    try:
        harness.install(Environment.read().envs)
    except Unavailable as error:
        pytest.fail(str(error)) if os.environ.get("CI") else pytest.skip(str(error))
    return request.param


def test_rollouts_are_graded_and_their_tokens_equal_the_engine_calls(name: str, tmp_path: Path) -> None:
    result = train(name, tmp_path, tasks=1, rollouts=2)
    assert (result["failures"], result["problems"]) == ([], [])
    assert result["solved"] + result["missed"] == result["rollouts"] == 2
    assert result["calls"] >= 4


@pytest.mark.long
def test_turn_limit_is_a_policy_failure(name: str, tmp_path: Path) -> None:
    result = train(name, tmp_path, "--max-calls", "1", "--quorum", "1", tasks=1, rollouts=1)
    [failure] = result["failures"]
    assert failure.startswith("policy/budget: ")


VERIFIER = """\
def verify(task):
    written = task["submission"]["files"].get("answer.txt", "")
    return 1.0 if written.strip() == task["hidden"]["sum"] else 0.0
"""


def test_rollout_client_runs_a_harness_whose_work_a_verifier_grades(tmp_path: Path) -> None:
    model, scripted = write_inputs("pi", tmp_path, range(11, 12))
    (tmp_path / "verifier.py").write_text(VERIFIER)
    [port], key = free_ports(1), "k" * 32
    variables = {"AFIELD_ADMIN_KEY": key, "AFIELD_OUTCOMES": f"files://{tmp_path}/run/outcomes"}
    command = [*AFIELD, "gateway", "--model", str(model), "--engine", f"scripted={scripted}"]
    command += ["--port", str(port), "--store", str(tmp_path / "store")]
    row = {"id": "sum", "instruction": instruction(11), "hidden": {"sum": "47"}}
    with subprocess.Popen(command, env={**os.environ, **variables}) as gateway:
        try:
            until(lambda: serves(port), "the gateway serves", 60)
            with RolloutClient.open(
                gateway=f"http://127.0.0.1:{port}",
                admin_key=key,
                agent="pi",
                verifier=f"{tmp_path / 'verifier.py'}:verify",
                directory=tmp_path / "run",
            ) as client:
                finished = [item.finished for item in client.run_batch([row], rollouts=2)]
        finally:
            gateway.terminate()
    assert len(finished) == 2
    for result in finished:
        right = "echo 47" in result.turns[0].messages[-1].tool_calls[0].arguments
        assert (result.outcome.reward, result.outcome.failure) == (float(right), None)


def serves(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
