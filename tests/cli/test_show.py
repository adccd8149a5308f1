"""`afield show`, `runs`, `tail`, `compare` and `export` on runs of clients, and `eval` at an endpoint."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.cli.conftest import RunCommand

import afield
from afield.batches.jsonl import read_jsonl
from afield.cli.main import main
from afield.orchestrator.state import RunDirectory
from afield.types import Budget
from support.client_gateway import ThreadedGateway, threaded_gateway, yes_agent
from support.gateways import ADMIN
from support.processes import AGENTS, write_tasks

ROWS = [{"id": name, "question": f"Wo ist der {name}? \u2192 \u6c34"} for name in ("lamp", "chair")]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ThreadedGateway]:
    with threaded_gateway(tmp_path) as gateway:
        yield gateway


def collected(gateway: ThreadedGateway, name: str, agent: Any = yes_agent, **values: Any) -> None:
    with afield.RolloutClient.open(
        gateway=gateway.url,
        admin_key=ADMIN,
        agent=agent,
        exp_id=name,
        directory=gateway.root / "runs" / name,
        **values,
    ) as client:
        for _ in client.run_groups(ROWS, rollouts=2):
            pass


def refused_agent(task: dict[str, Any], rollout: afield.Context) -> float:
    """Agent whose every call exceeds its context; it gives up and is rewarded nothing."""
    with openai.OpenAI(base_url=rollout.openai_base_url, api_key=rollout.api_key, max_retries=0) as model:
        for _ in range(3):
            with pytest.raises(openai.BadRequestError):
                model.chat.completions.create(
                    model=rollout.model_id, messages=[{"role": "user", "content": task["question"]}]
                )
    return 0.0


def test_rollouts_of_a_client_are_shown_followed_compared_and_exported(
    gateway: ThreadedGateway, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected(gateway, "one")
    collected(gateway, "two", refused_agent, budget=Budget(context=4))
    code, out, err = run_command("runs", "--json")
    assert code == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["run"], line["kind"], line["rollouts"]) for line in lines] == [
        ("one", "client", 4),
        ("two", "client", 4),
    ]
    code, out, err = run_command("show", "one")
    assert code == 0, err
    assert "train    rollouts 4  tasks 2" in out and "failures none" in out
    code, out, _ = run_command("tail", "one", "-n", 3, "--json")
    assert code == 0 and len(out.splitlines()) == 3
    code, out, _ = run_command("export", "one", "--out", "one.jsonl", "--json")
    assert code == 0 and json.loads(out)["groups"] == 2
    assert len(read_jsonl(gateway.root / "one.jsonl").rollouts) == 4

    # Refused calls are part of the rollout.
    code, out, _ = run_command("show", "two")
    assert "refused  context_length_exceeded 12: This model's maximum context length is 4 tokens" in out
    code, out, _ = run_command("show", "two", "two-lamp-r0")
    assert "refused  3 calls with 400 context_length_exceeded" in out
    code, out, _ = run_command("show", "two", "--sort", "refused", "--json")
    assert [json.loads(line)["refused"] for line in out.splitlines()] == [{"context_length_exceeded": 3}] * 4

    code, out, err = run_command("compare", "one", "two", "--json")
    assert code == 0, err
    assert (json.loads(out)["difference"], json.loads(out)["better"]) == (1.0, 2)
    for wrong in (("--sort", "colour"), ("--reward", "high")):
        code, _, err = run_command("show", "one", *wrong)
        assert code == 2 and wrong[1] in err

    # A terminal without the characters of agents shows others.
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    assert main(["show", "one", "one-lamp-r0"]) == 0


def half_failing_agent(task: dict[str, Any], rollout: afield.Context) -> float:
    if rollout.rollout_id.endswith("-lamp-r0"):
        raise ValueError("no lamp")
    return yes_agent(task, rollout)


def test_the_rollout_to_look_at_is_a_failed_one_if_there_is_one(
    gateway: ThreadedGateway, run_command: RunCommand
) -> None:
    collected(gateway, "well")
    collected(gateway, "half", half_failing_agent, retries={})
    for name, suggested in (("well", r"well-\w+-r\d"), ("half", "half-lamp-r0")):
        code, out, err = run_command("show", name)
        assert code == 0, err
        assert re.search(rf"^turns of a rollout: .*afield show {name} {suggested}$", out, re.M), out
    assert "task/" in run_command("show", "half", "half-lamp-r0")[1]


def test_agents_are_evaluated_at_any_endpoint(
    gateway: ThreadedGateway, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = gateway.open("endpoint.1")
    monkeypatch.setenv("AFIELD_ENDPOINT_KEY", ticket.api_key)
    rows = [{"id": f"q{n}", "question": "?", "skill": float(n)} for n in range(2)]
    tasks = write_tasks(gateway.root / "tasks.jsonl", rows)
    agent = f"{AGENTS / 'skilled_agent.py'}:agent"
    words = ["eval", agent, "--tasks", tasks, "--runtime", "inline", "--model", "org/some-model", "--json"]
    code, out, err = run_command(*words, "--endpoint", ticket.openai_base_url, "-k", 2, "--run", "e")
    assert code == 0, err
    result = json.loads(out)
    assert (result["reward"]["mean"], result["model"], result["attempts"]) == (0.5, "org/some-model", 4)
    assert [task["reward"] for task in result["by_task"]] == [0.0, 1.0]
    assert "made no model call" not in err
    monkeypatch.setenv("AFIELD_ENDPOINT_KEY", "wrong")
    code, _, err = run_command(*words, "--endpoint", ticket.openai_base_url)
    assert code == 2 and "set AFIELD_ENDPOINT_KEY" in err


def test_agents_are_evaluated_at_a_running_gateway(
    gateway: ThreadedGateway, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"id": f"q{n}", "question": "?", "skill": float(n)} for n in range(2)]
    tasks = write_tasks(gateway.root / "tasks.jsonl", rows)
    agent = f"{AGENTS / 'skilled_agent.py'}:agent"
    words = ["eval", agent, "--tasks", tasks, "--runtime", "inline", "--gateway", gateway.url, "--json"]
    monkeypatch.delenv("AFIELD_ADMIN_KEY", raising=False)
    code, _, err = run_command(*words)
    assert code == 2 and "needs an admin key: set AFIELD_ADMIN_KEY" in err
    monkeypatch.setenv("AFIELD_ADMIN_KEY", ADMIN)
    code, out, err = run_command(*words, "-k", 2, "--run", "e")
    assert code == 0, err
    result = json.loads(out)
    assert (result["reward"]["mean"], result["attempts"], result["left_out"]) == (0.5, 4, {})
    assert [task["reward"] for task in result["by_task"]] == [0.0, 1.0]
    assert result["sampled_tokens"] > 0
    with RunDirectory(gateway.root / "runs" / "e").index as index:
        assert [row.turns for row in index.rollouts()] == [1] * 4
    code, out, err = run_command("eval", "--run", "e", "-k", 3, "--json")
    assert (code, json.loads(out)["attempts"]) == (0, 6), err


def test_a_run_that_cannot_be_read_does_not_hide_the_others(
    gateway: ThreadedGateway, run_command: RunCommand
) -> None:
    collected(gateway, "sound")
    for name, info in (("cut", '{"kind": "tr'), ("other", "[1]")):
        (gateway.root / "runs" / name).mkdir()
        (gateway.root / "runs" / name / "info.json").write_text(info)
    code, out, err = run_command("runs", "--json")
    found = {line["run"]: line["status"] for line in map(json.loads, out.splitlines())}
    assert (code, set(found)) == (0, {"sound", "cut", "other"})
    assert found["cut"] == found["other"] == "unreadable"
    assert "run cut cannot be read" in err and "info.json" in err


def test_unknown_runs_get_near_names_or_the_newest(tmp_path: Path, run_command: RunCommand) -> None:
    for number in range(30):
        run = tmp_path / "runs" / f"training-{number:02d}"
        run.mkdir(parents=True)
        (run / "info.json").write_text("{}")
        os.utime(run / "info.json", (number, number))
    code, _, err = run_command("show", "trainin-07")
    assert code == 2 and "did you mean training-07" in err and err.count("training-") <= 10
    code, _, err = run_command("show", "zzz")
    assert "training-29, training-28" in err and "..." in err and err.count("training-") == 10


def test_conditions_and_limits_of_lists_are_numbers_as_people_write_them(
    gateway: ThreadedGateway, run_command: RunCommand
) -> None:
    collected(gateway, "one")
    for condition, rows in ((">.5", 4), ("1e0", 4), ("<1e-3", 0), ("=+1.", 4)):
        code, out, err = run_command("show", "one", "--reward", condition)
        assert (code, len(out.splitlines()) - 1) == (0, rows), (condition, err)
    code, out, _ = run_command("show", "one", "--limit", 0)
    assert code == 0 and len(out.splitlines()) == 1 and out.startswith("step\t")
    code, _, err = run_command("show", "one", "--limit", -1)
    assert code == 2 and "--limit -1" in err
    code, _, err = run_command("show", "one", "--reward", "")
    assert code == 2 and "must be a number" in err


def escaping_agent(task: dict[str, Any], rollout: afield.Context) -> float:
    """Agent whose messages and error hold control characters."""
    with openai.OpenAI(base_url=rollout.openai_base_url, api_key=rollout.api_key, max_retries=0) as model:
        hostile = "first\nsecond\t\x1b]0;title\x07\x1b[2J\u202eend"
        model.chat.completions.create(model=rollout.model_id, messages=[{"role": "user", "content": hostile}])
    raise RuntimeError("broken \x1b[31mred\x9b2J")


def test_texts_of_agents_cannot_control_the_terminal(
    gateway: ThreadedGateway, run_command: RunCommand
) -> None:
    collected(gateway, "one", escaping_agent, retries={})
    with RunDirectory(gateway.root / "runs" / "one").index as index:
        (row, *_) = index.rollouts()
    code, out, err = run_command("show", "one", row.id)
    assert code == 0, err
    assert "[user] first\nsecond\t" in out and "broken" in out
    assert not set("\x1b\x07\x9b\u202e") & set(out)
    code, out, err = run_command("why", "one")
    assert code in (0, 1) and not set("\x1b\x07\x9b\u202e") & set(out), err
