"""What is wrong is said before anything slow begins; and how a run ends that trained nothing."""

from __future__ import annotations

import io
import json
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from afield.cli.main import main
from afield.gateway.client import HttpGateway
from afield.interfaces import SessionSpec
from afield.orchestrator.state import RunDirectory
from afield.settings.train import train_config
from afield.training_run import gateway_child
from support.gateways import POLICY
from support.processes import AGENTS, afield, command, finish, start, summary, unlearned, write_tasks

AGENT = "def agent(task):\n    return 1.0\n"


def told(cwd: Path, capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The complaint about a run that must not begin."""
    tasks = write_tasks(cwd / "tasks.jsonl", [{"id": "a"}])
    code = main([str(word) for word in ("train", *words, "--tasks", tasks)])
    assert code == 2 and not list((cwd / "runs").glob("*"))
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (AGENT.replace("agent", "agnet"), "agent.py has no 'agent', the agent; did you mean 'agnet'?"),
        ("def one(task): ...\n\n\ndef two(task): ...\n", "it has: one, two"),
        ("import os\n", "it has: nothing to run"),
        ("x = 1\ndef agent(task:\n", "agent.py, line 2 cannot be read as Python"),
        (b"# \xff\n", "agent.py cannot be read as Python"),
    ],
)
def test_an_agent_that_is_not_in_its_file_is_told_by_reading_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    source: str | bytes,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_bytes(source if isinstance(source, bytes) else source.encode())
    assert says in told(tmp_path, capsys, "agent.py:agent", "--model", POLICY)
    Path("good.py").write_text(AGENT)
    judged = ("good.py:agent", "--verifier", "agent.py:agent", "--model", POLICY)
    assert says.replace("the agent;", "the verifier;") in told(tmp_path, capsys, *judged)


@pytest.mark.parametrize(
    "source",
    [
        "from helpers import agent\n",
        "from helpers import *\n",
        "agent = print\n",
        "if True:\n    class agent: ...\n",
        "globals()['agent'] = print\n",
        "def __getattr__(name): ...\n",
    ],
)
def test_a_name_that_may_be_there_is_left_to_whoever_imports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text(source)
    bare = tmp_path / "bare"
    shutil.copytree(POLICY, bare)
    (bare / "model.safetensors").unlink()
    assert "bare has no weights" in told(tmp_path, capsys, "agent.py:agent", "--model", bare)


def test_a_model_that_is_not_whole_is_named_with_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text(AGENT)
    model = tmp_path / "model"
    shutil.copytree(POLICY, model)
    asked = ("agent.py:agent", "--model", model)
    weights, index = model / "model.safetensors", model / "model.safetensors.index.json"
    whole = weights.read_bytes()
    for damaged in (whole[:-1], whole[:100], b"", b"version https://git-lfs.github.com/spec/v1\n"):
        weights.write_bytes(damaged)
        assert "model.safetensors is cut off" in told(tmp_path, capsys, *asked)
    weights.rename(model / "part-1.safetensors")
    (model / "part-1.safetensors").write_bytes(whole)
    index.write_text(json.dumps({"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}))
    assert "lacks part-2.safetensors" in told(tmp_path, capsys, *asked)
    index.write_text("[")
    assert "index.json cannot be read" in told(tmp_path, capsys, *asked)
    assert main(["gateway", "--model", str(model), "--port", "0"]) == 2
    assert "index.json cannot be read" in capsys.readouterr().err
    (model / "config.json").unlink()
    assert "it has no config.json" in told(tmp_path, capsys, *asked)


def test_an_agent_that_cannot_be_imported_ends_a_run_that_has_loaded_no_weights(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(f"import no_such_library\n{AGENT}")
    tasks = write_tasks(tmp_path / "tasks.jsonl", [{"id": "a"}])
    words = command("train", "agent.py:agent", "--tasks", tasks, "--model", POLICY)
    words[1:1] = ["-X", "importtime"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and "No module named 'no_such_library'" in ended.stderr
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "afield.training_run" in imported and "torch" not in imported
    assert not list((tmp_path / "runs").glob("*"))


def test_a_gateway_that_still_loads_ends_at_once(tmp_path: Path) -> None:
    words = command("gateway", "--model", POLICY, "--port", 0)
    words[1:1] = ["-X", "importtime"]
    loading = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert loading.stderr
    while "torch" not in (line := loading.stderr.readline()):
        assert line, "it ended before it loaded"
    loading.terminate()
    assert finish(loading, 60)[0] == -signal.SIGTERM


# --- what to do with a gateway ---------------------------------------------------------------------


@pytest.mark.parametrize("key", ["made up", "given"])
def test_a_gateway_says_what_to_do_next_and_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    if key == "given":
        monkeypatch.setenv("AFIELD_ADMIN_KEY", "a word of my own")
    _, script, _ = unlearned(tmp_path)
    serving = start(tmp_path, "gateway", "--model", POLICY, "--port", 0, "--engine", script)
    assert serving.stderr
    try:
        while "curl" not in (line := serving.stderr.readline()):
            assert line, "it ended without a word"
        assert ("$AFIELD_ADMIN_KEY" in line) == (key == "given") and "my own" not in line
        said = subprocess.run(["sh", "-c", line.strip()], capture_output=True, text=True, timeout=60)
    finally:
        serving.terminate()
        finish(serving, 60)
    session = json.loads(said.stdout)
    assert session["base_url"].startswith("http://127.0.0.1:") and session["api_key"]
    assert shlex.split(line)[:4] == ["curl", "-s", "-X", "POST"]


def test_a_program_that_starts_a_gateway_gets_one_line_of_json(tmp_path: Path) -> None:
    _, script, _ = unlearned(tmp_path)
    serving = start(tmp_path, "gateway", "--model", POLICY, "--port", 0, "--engine", script, "--json")
    assert serving.stdout
    line = serving.stdout.readline()
    serving.terminate()
    _, out, err = finish(serving, 60)
    assert json.loads(line)["url"] and not out and "curl" not in err


@pytest.mark.anyio
async def test_the_gateway_of_a_run_takes_as_much_as_the_run_says(tmp_path: Path) -> None:
    script = str(unlearned(tmp_path)[1])
    given: dict[str, Any] = {"agent": "a.py:agent", "model": str(POLICY), "engine": script}
    config = train_config(None, given | {"max_submission_mb": 1, "max_rewards": 2, "path_keys": True})
    async with gateway_child(config, RunDirectory(tmp_path / "run")) as child:
        told = await child.ready()
        async with HttpGateway(told["local_url"], told["admin_key"]) as gateway:
            ticket = await gateway.open(SessionSpec(id="r.1"))
        bodies = [{"reward": 1.0, "name": name} for name in "abc"]
        bodies.append({"reward": 1.0, "name": "a", "metadata": {"large": "x" * 2_000_000}})
        said: list[str] = []
        assert ticket.base_url == f"{told['url']}/k/{ticket.api_key}"
        async with aiohttp.ClientSession() as http:
            for body in map(json.dumps, bodies):
                data = io.BytesIO(body.encode())
                async with http.post(f"{ticket.base_url}/reward", data=data) as answer:
                    said.append(await answer.text())
    assert "error" not in said[0] + said[1]
    assert "too_many_rewards" in said[2]
    assert str(1024 * 1024) in said[3]


# --- a run that trained nothing --------------------------------------------------------------------


def ended(cwd: Path, how: str, *more: object) -> tuple[int, str, str]:
    tasks = write_tasks(cwd / "tasks.jsonl", [{"id": f"t{n}", "how": how} for n in range(2)])
    words = ("--tasks", tasks, "--model", POLICY, "--tasks-per-step", 1, "--rollouts", 2, "--json")
    return afield(cwd, "train", f"{AGENTS / 'failing_agents.py'}:agent", *words, *unlearned(cwd), *more)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_that_trained_nothing_has_failed_however_short_it_was(tmp_path: Path, steps: int) -> None:
    code, out, err = ended(tmp_path, "raises", "--steps", steps)
    assert code == 1 and summary(out)["steps"] == steps
    run = Path(summary(out)["run"]).name
    assert f"nothing was trained: of {2 * steps} rollouts {2 * steps} have no reward" in err
    assert f"show {run}" in err
    assert afield(tmp_path, "train", "--resume", run, "--json")[0] == 1


def test_rewards_that_do_not_differ_are_no_failure(tmp_path: Path) -> None:
    code, out, err = ended(tmp_path, "posts_garbage", "--steps", 1)
    assert code == 0 and summary(out)["trained"] == 2, err
    assert "nothing was trained" not in err
