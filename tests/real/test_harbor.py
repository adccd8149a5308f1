"""Harbor tasks through whole runs, without Docker: oracle, no-op, a shell agent, a hostile agent."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.agents import harbor_agents

from support.gateways import POLICY
from support.paths import TESTS
from support.processes import command
from support.sandboxes import needs_bubblewrap

pytestmark = [pytest.mark.real, needs_bubblewrap, pytest.mark.timeout(600)]
TASKS = TESTS / "harbor" / "tasks"
AGENTS = TESTS / "agents" / "harbor_agents.py"
ONE_STEP = ["--freeze-weights", "--steps", 1, "--json", "--run", "r", "--quorum", 1]


DONE = {"match": "", "text": "DONE"}
GRADE = """import json
report = json.load(open("/app/findings.json"))
rewards = {"reward": len(report["findings"]), "files": report["files"]}
json.dump(rewards, open("/logs/verifier/reward.json", "w"))
"""


def train(
    folder: Path, agent: str, tasks: Path, *options: object, script: Sequence[Any] = (DONE,)
) -> list[dict[str, Any]]:
    """Rollouts of one step of `afield train` with a scripted engine."""
    (folder / "script.jsonl").write_text("\n".join(map(json.dumps, script)))
    engine = f"scripted={folder / 'script.jsonl'}"
    words = [
        "train",
        "--agent",
        agent,
        "--tasks",
        tasks,
        "--model",
        POLICY,
        "--engine",
        engine,
        *ONE_STEP,
        *options,
    ]
    env = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        command(*words, *ONE_STEP, *options), cwd=folder, env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = (folder / "runs" / "r" / "rollouts" / "step-0001.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def rewards(rollouts: list[dict[str, Any]]) -> dict[str, float | None]:
    return {one["rollout"]["task"]["id"]: one["outcome"]["reward"] for one in rollouts}


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_ten_tasks_reward_their_solution_and_nothing_else(tmp_path, agent, reward):
    rollouts = train(tmp_path, agent, TASKS, "--tasks-per-step", 10, "--concurrency", 4)
    assert rewards(rollouts) == {path.name: reward for path in TASKS.iterdir()}
    by_id = {one["rollout"]["task"]["id"]: one["outcome"] for one in rollouts}
    assert by_id["several-rewards"]["metrics"] == {"reward": reward, "sorted": reward, "unique": reward}


def test_agent_in_a_sandbox_works_on_the_environment_and_its_tests_give_the_reward(tmp_path):
    script = [
        {"match": "exit code", "text": "DONE"},
        {"match": "words.txt", "text": "sort -u -o words.txt words.txt"},
        {"match": "total.txt", "text": "add 2800 70 > total.txt; rm -rf /opt/ledger"},
        {"match": "Point the link", "text": "ln -sfn releases/1.9 current"},
    ]
    tasks = tmp_path / "tasks"
    for name in ("several-rewards", "build-step", "symbolic-link"):
        shutil.copytree(TASKS / name, tasks / name, symlinks=True)
    size = ["--tasks-per-step", 3, "--rollouts", 2]
    rollouts = train(tmp_path, f"{AGENTS}:shell", tasks, *size, script=script)
    found = [(one["rollout"]["task"]["id"], one["outcome"]["reward"], len(one["turns"])) for one in rollouts]
    expected = [("build-step", 1.0), ("several-rewards", 1.0), ("symbolic-link", 0.0)]
    assert sorted(found) == [(name, reward, 2) for name, reward in expected for _ in range(2)]


def test_hostile_agent_finds_neither_tests_nor_solution(tmp_path):
    canary = f"canary-{secrets.token_hex(8)}"
    task = tmp_path / "agent" / "tasks" / "secret"
    shutil.copytree(TASKS / "python-bug", task)
    (task / "environment" / "Dockerfile").write_text("FROM x\nCOPY stats.py /app/\nRUN true\nWORKDIR /app\n")
    test = f"#!/bin/bash\n# {canary}\ncat findings.json\npython3 /tests/grade.py\n"
    (task / "tests" / "test.sh").write_text(test)
    (task / "tests" / "grade.py").write_text(GRADE)
    for name in ("tests/expected.txt", "solution/solve.sh", f"solution/{canary}.txt"):
        (task / name).write_text(f"{canary}\n")
    with (task / "task.toml").open("a") as config:
        config.write(f'\n[verifier.env]\nSECRET = "{canary}"\n\n[solution.env]\nSECRET = "{canary}"\n')
    # The worst place for an agent's file: next to the tasks, with the run directory beside it.
    shutil.copy(AGENTS, tmp_path / "agent" / "agent.py")
    places = [tmp_path, task, task / "tests", task / "solution", tmp_path / "agent" / "cache", Path.home()]
    look = json.dumps([str(place) for place in places])
    folder = tmp_path / "agent"
    more = ["--tasks-per-step", 1, "--rollouts", 2, "--set", f"agent_args.look={look}"]
    rollouts = train(folder, "agent.py:hostile", folder / "tasks", *more)
    for one in rollouts:
        assert one["outcome"]["failure"] is None, one["outcome"]
        assert one["outcome"]["reward"] == 0.0, one["outcome"]
        assert one["outcome"]["metrics"]["files"] > 1000
    # The same search finds them where nothing is hidden.
    found, _ = harbor_agents.search([str(task)])
    for name in ("tests/test.sh", "tests/expected.txt", "solution/solve.sh", "task.toml"):
        assert str(task / name) in found
