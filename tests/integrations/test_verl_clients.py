"""Clients of veRL processes: settings of the `afield` block that reach rollouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from afield.integrations.verl import clients, settings
from afield.integrations.verl.clients import GatewayConnection
from afield.transports.spec import from_spec
from afield.types import Rollout, Task
from integrations.test_verl_rows import config
from support.client_gateway import threaded_gateway

AGENT = """
from support.client_gateway import yes_agent

def agent(task, rollout):
    assert "hidden" not in task
    yes_agent(task, rollout)
    return {"answer": task["question"]}
"""
VERIFIER = """
def grade(payload):
    return float(payload["submission"]["answer"] == payload["hidden"]["answer"])
"""


def test_a_verifier_of_the_block_grades_in_its_own_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "verify.py").write_text(VERIFIER)
    monkeypatch.chdir(tmp_path)
    outcomes = f"files://{tmp_path / 'outcomes'}"
    run = settings.read(
        config(
            agent="agent.py:agent",
            runtime="inline",
            verifier="verify.py:grade",
            verifier_runtime="process",
            transport=outcomes,
            folder=str(tmp_path / "run"),
            retries_verifier=0,
            retries_infrastructure=0,
        )
    )
    assert run.settings.verifier == f"{tmp_path / 'verify.py'}:grade"
    outlet = from_spec(outcomes, tmp_path / "unused")
    with threaded_gateway(tmp_path, outlet=outlet) as gateway:
        client = clients.client(run, GatewayConnection(gateway.url, gateway.admin_key))
        assert client.config.separate_verifier and client.config.deliver == "gateway"
        task = Task("t", {"question": "six", "hidden": {"answer": "six"}})
        with client.start():
            done = client.begin(Rollout(id="r", exp_id=client.config.exp_id, group_id="g", task=task))
            assert done.finished().outcome.reward == 1.0
    assert (tmp_path / "run" / "verifiers").is_dir()
