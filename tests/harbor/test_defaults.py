"""Settings that follow from Harbor tasks: verifier, runtime and time limits."""

from __future__ import annotations

from afield import factory
from afield.datasets import read_tasks
from afield.settings.train import TrainConfig
from support.paths import TESTS

TASKS = str(TESTS / "harbor" / "tasks")


def test_harbor_tasks_imply_sandbox_and_verifier_unless_another_is_named():
    harbor = {"verifier": "afield.harbor.verifier:verify", "verifier_runtime": "process"}
    assert factory.agent_defaults({"tasks": TASKS}) == {"runtime": "sandbox", **harbor}
    named = {"tasks": TASKS, "verifier": "mine.py:grade"}
    assert factory.agent_defaults(named) == {"runtime": "sandbox"}
    assert factory.agent_defaults({"tasks": "rows.jsonl"}) == {}


def test_agents_that_check_tasks_make_one_attempt_at_each_without_training():
    defaults = factory.agent_defaults({"tasks": TASKS, "agent": "oracle"})
    assert defaults["agent_args"] == {"tasks": TASKS}
    assert (defaults["runtime"], defaults["epochs"], defaults["rollouts"]) == ("process", 1, 1)
    assert defaults["freeze_weights"] is True
    assert "epochs" not in factory.agent_defaults({"tasks": TASKS, "agent": "nop", "steps": 2})


def test_time_limit_of_an_attempt_covers_agent_and_verifier():
    config, tasks = TrainConfig(model="DIR", attempt_timeout_s=1.0), read_tasks(TESTS / "harbor" / "tasks")
    assert factory.attempt_timeout(config, tasks) == 60 + 60 + 120


def test_harbor_trials_and_servers_get_no_default_verifier() -> None:
    for agent in ("harbor-trial", "harbor-server"):
        assert factory.agent_defaults({"tasks": TASKS, "agent": agent}) == {"agent_args": {"tasks": TASKS}}
        assert factory.agent_defaults({"tasks": "rows.jsonl", "agent": agent}) == {}
