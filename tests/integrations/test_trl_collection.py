"""Collection for TRL's trainers, beside a gateway that runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from afield.integrations.trl.collector_thread import CollectorThread
from afield.integrations.trl.rollouts import as_tasks, configured
from afield.integrations.trl.weights import WeightTransfer
from afield.orchestrator.groups import GroupSpec
from afield.orchestrator.state import RunDirectory
from afield.runs.index import RunIndex
from afield.runs.token_account import count_tokens
from afield.transports.spec import from_spec
from integrations.test_verl_clients import AGENT, VERIFIER
from support.client_gateway import threaded_gateway
from support.gateways import POLICY

ARGUMENTS = SimpleNamespace(num_generations=1, temperature=1.0, max_completion_length=16, seed=0)
"""Arguments of TRL's trainer that settings come from."""


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[Any]:
    """Creates collectors with agents in threads, outcomes through the gateway, and settings of the test."""
    outcomes = f"files://{tmp_path / 'outcomes'}"
    opened: list[CollectorThread] = []
    with threaded_gateway(tmp_path, outlet=from_spec(outcomes, tmp_path)) as gateway:

        def create(tasks: list[dict[str, Any]], **settings: Any) -> CollectorThread:
            usual = {"gateway": gateway.url, "runtime": "inline", "transport": outcomes, "quorum": 1}
            usual["poll_interval_s"] = 0.1
            config = configured(ARGUMENTS, str(POLICY), None, usual | settings)
            run = RunDirectory(tmp_path / "run")
            opened.append(CollectorThread(config, run, as_tasks(tasks), gateway.admin_key))
            return opened[-1]

        yield create
        for one in opened:
            one.close()


def test_a_verifier_gives_the_rewards(
    collector: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "verify.py").write_text(VERIFIER)
    monkeypatch.chdir(tmp_path)
    task = {"id": "t", "question": "six", "hidden": {"answer": "six"}}
    settings = {"verifier": "verify.py:grade", "verifier_runtime": "process"}
    thread = collector([task], agent="agent.py:agent", **settings)
    parts = thread.start()
    [group] = thread.call(parts.groups.collect([GroupSpec("g", as_tasks([task])[0], 0)]))
    assert [finished.outcome.reward for finished in group.finished] == [1.0]


def test_steps_trainer_and_versions_are_recorded(collector: Any, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("from support.client_gateway import yes_agent as agent\n")
    thread = collector([{"id": "t", "question": "six"}], agent=f"{tmp_path / 'agent.py'}:agent")
    weights = WeightTransfer(thread)
    weights.init_weight_transfer()
    weights.send_weights(iter(()))  # when training starts
    parts = thread.start()
    for step in (1, 2):
        spec = GroupSpec(f"g{step}", as_tasks([{"id": "t"}])[0], step)
        [group] = thread.call(parts.groups.collect([spec]))
        thread.run.append_rollouts(step, group.finished)
        thread.record(step, group, count_tokens(group.finished), "too few" if step == 2 else None)
        weights.send_weights(iter(()))
    lines = thread.run.read_metrics()
    assert [(line["step"], line["version"], line["reward"], line["trained"]) for line in lines] == [
        (1, 2, 1.0, 1),
        (2, 3, 1.0, 0),
    ]
    assert lines[0]["sampled_tokens"] > 0 and lines[0]["trainer"].keys() == weights.published.keys()
    assert lines[1]["dropped_groups"] == {"g2": "too few"}
    assert lines[1]["wasted_tokens"] == lines[1]["sampled_tokens"] > 0
    with RunIndex(thread.run.path) as index:
        index.refresh()
        marks = index.fetch("SELECT kind, value FROM events WHERE rollout IS NULL ORDER BY rowid")
    assert marks == [("published", 1), ("trained", 1), ("published", 2), ("trained", 2), ("published", 3)]
