"""Keys of a gateway and of a run are in no place where other processes or users read them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from support.gateways import POLICY
from support.processes import command, write_tasks
from support.sandboxes import all_command_lines

KEY = "-".join(("afa", "told", "to", "nobody", "else"))


@pytest.mark.parametrize("given", ["argument", "environment", "file"])
def test_admin_key_is_not_visible_in_proc(given: str, tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps({"match": "x", "text": "y"}) + "\n")
    words = ["gateway", "--model", POLICY, "--engine", f"scripted={script}", "--store", tmp_path / "store"]
    words += ["--port", 0, "--json"]
    env = dict(os.environ)
    if given == "argument":
        words += ["--admin-key", KEY]
    elif given == "environment":
        env["AFIELD_ADMIN_KEY"] = KEY
    else:
        (tmp_path / "key").write_text(f"{KEY}\n")
        (tmp_path / "key").chmod(0o600)
        words += ["--admin-key-file", tmp_path / "key"]
    with subprocess.Popen(command(*words), env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert json.loads(process.stdout.readline())["admin_key"] == KEY
        assert not [line for line in all_command_lines() if KEY.encode() in line]
        assert KEY.encode() not in Path(f"/proc/{process.pid}/environ").read_bytes()
        process.terminate()


AGENT = """
import os

import afield


@afield.agent
def agent(task, rollout):
    mark = task["mark"].encode()
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("environ", "cmdline"):
            try:
                with open(f"/proc/{pid}/{name}", "rb") as file:
                    if mark in file.read():
                        found.append(f"{pid}/{name}")
            except OSError:
                pass
    return {"found": found}
"""
GRADE = """
import afield


@afield.agent
def grade(payload):
    return {"reward": float(not payload["submission"]["found"])}
"""


def test_verifier_in_processes_gives_a_warning_and_agents_cannot_read_the_admin_key(
    tmp_path: Path,
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="project-"))
    (folder / "agent.py").write_text(AGENT)
    (folder / "verify.py").write_text(GRADE)
    tasks = write_tasks(folder / "tasks.jsonl", [{"id": "t", "mark": KEY}])
    script = folder / "script.jsonl"
    script.write_text(json.dumps({"match": "x", "text": "y"}) + "\n")
    words = ["train", "agent.py:agent", "--verifier", "verify.py:grade", "--tasks", tasks, "--model", POLICY]
    words += ["--engine", f"scripted={script}", "--freeze-weights", "--steps", 1, "--tasks-per-step", 1]
    words += ["--rollouts", 2, "--runtime", "process", "--verifier-runtime", "process", "--run", "r"]
    env = dict(os.environ) | {"AFIELD_ADMIN_KEY": KEY}
    done = subprocess.run(
        command(*words), cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "can read the verifier" in done.stderr and "--runtime sandbox" in done.stderr
    lines = (folder / "runs/r/rollouts/step-0001.jsonl").read_text().splitlines()
    assert [json.loads(line)["outcome"]["reward"] for line in lines] == [1.0, 1.0], lines
    shutil.rmtree(folder)
