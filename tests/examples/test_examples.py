"""The examples do what their READMEs say: each is run as a user would run it, offline."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from afield.cli.main import parser
from afield.settings.train import train_config
from support.gateways import POLICY
from support.paths import ROOT
from support.ports import free_ports
from support.processes import afield, summary

EXAMPLES = ROOT / "examples"
AGENTS = [EXAMPLES / name for name in ("strands-math", "langgraph-tools", "coding")]
CONFINED = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
OFFLINE = ("--freeze-weights", "--steps", 1, "--json")


def commands(example: Path) -> list[str]:
    found = re.findall(r"```console\n(.*?)```", (example / "README.md").read_text(), re.S)
    lines = "\n".join(found).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def train(example: Path, tmp_path: Path, *more: object) -> tuple[dict[str, Any], Path]:
    """What `afield train --config train.toml` comes to, and the run's folder."""
    given = ("train", "--config", example / "train.toml", "--run", "example", *more)
    code, out, err = afield(tmp_path, *given)
    assert code == 0, err
    return summary(out), tmp_path / "runs" / "example"


def records(run: Path) -> list[dict[str, Any]]:
    """The outcomes as the agents left them."""
    found = [json.loads(path.read_text()) for path in (run / "outcomes").rglob("*.json")]
    return [record for record in found if "outcome" in record]


# --- what they do ---------------------------------------------------------------------------------


def test_the_strands_agent_calculates_and_leaves_its_conversation(tmp_path: Path) -> None:
    example = EXAMPLES / "strands-math"
    script = f"scripted={example / 'script.jsonl'}"
    told, run = train(example, tmp_path, "--engine", script, *OFFLINE)
    assert (told["rollouts"], told["failed"]) == (16, 0)
    assert 0 < told["first"] < 1 and 0 < told["tool_calls_per_rollout"] < 1
    for record in records(run):
        said = record["extra"]["conversation"]
        assert [m["role"] for m in said] in (
            ["user", "assistant"],
            ["user", "assistant", "user", "assistant"],
        )
        assert said[0]["content"] == [{"text": record["payload"]["question"]}]
        right = f" {record['payload']['answer']}." in said[-1]["content"][0]["text"]
        assert record["outcome"]["reward"] == float(right)


def test_the_langgraph_agent_looks_up_and_learns(tmp_path: Path) -> None:
    small = ("--tasks-per-step", 4, "--rollouts", 8, "--steps", 1, "--json")
    told, run = train(EXAMPLES / "langgraph-tools", tmp_path, *small)
    assert (told["rollouts"], told["failed"]) == (32, 0)
    assert told["tool_calls_per_rollout"] > 0.9 and 0 < told["first"] < 1
    before, after = (POLICY / "model.safetensors", run / "weights" / "v1" / "model.safetensors")
    assert before.read_bytes() != after.read_bytes()
    served = ask_the_served_policy(run / "weights" / "v1", tmp_path)
    assert re.search(r"\d", served), served


def ask_the_served_policy(weights: Path, folder: Path) -> str:
    program = (sys.executable, EXAMPLES / "serve" / "serve.py", weights, "How much is the teal lamp?")
    command = [*map(str, program), str(free_ports(1)[0])]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("where", ["process", pytest.param("sandbox", marks=CONFINED)])
def test_the_coding_agent_is_graded_by_its_tests(where: str, tmp_path: Path) -> None:
    example = EXAMPLES / "coding"
    script = f"scripted={example / 'script.jsonl'}"
    places = ("--runtime", where, "--set", f"verifier_runtime={where}")
    told, run = train(example, tmp_path, "--engine", script, *places, *OFFLINE)
    assert (told["rollouts"], told["failed"]) == (12, 0)
    assert told["first"] < 1
    kept = records(run)
    assert {record["outcome"]["reward"] for record in kept} >= {0.5, 1.0}
    assert all(record["outcome"]["metrics"] == {"applies": 1.0} for record in kept)


def test_production_takes_the_same_agent_to_any_model(tmp_path: Path) -> None:
    """`app.py`, without afield, at a gateway whose model is scripted."""
    example, port = EXAMPLES / "strands-math", str(free_ports(1)[0])
    engine = f"scripted={example / 'script.jsonl'}"
    gateway = ("gateway", "--model", POLICY, "--engine", engine, "--port", 0, "--json")
    with served([sys.executable, "-m", "afield", *map(str, gateway)], tmp_path) as serving:
        assert serving.stdout is not None
        up = json.loads(serving.stdout.readline())
        session = post(f"{up['url']}/sessions", {}, up["admin_key"])
        model = {"OPENAI_BASE_URL": f"{session['base_url']}/v1", "OPENAI_API_KEY": session["api_key"]}
        app = [sys.executable, "-c", f"from app import app; app.run(port={port})"]
        with served(app, example, os.environ | model):
            row = json.loads((example / "tasks.jsonl").read_text().splitlines()[0])
            answer = post_when_up(f"http://127.0.0.1:{port}/invocations", {"question": row["question"]})
    assert answer["answer"].strip() in {"The answer is 89.", "The answer is 84.", "There are 84 bottles."}


def served(command: list[str], folder: Path, env: Any = None) -> Stopping:
    pipe = subprocess.PIPE
    return Stopping(subprocess.Popen(command, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True))


class Stopping:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __enter__(self) -> subprocess.Popen[str]:
        return self._process

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.communicate(timeout=30)


def post(url: str, body: dict[str, Any], key: str = "") -> dict[str, Any]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def post_when_up(url: str, body: dict[str, Any]) -> dict[str, Any]:
    end = time.monotonic() + 60
    while True:
        try:
            return post(url, body)
        except ConnectionError:
            assert time.monotonic() < end, f"nobody listens at {url}"
        except urllib.error.URLError as error:
            assert isinstance(error.reason, ConnectionError) and time.monotonic() < end, error
        time.sleep(0.2)


# --- what they say --------------------------------------------------------------------------------


def test_the_changed_lines_in_the_readme_are_those_of_the_files() -> None:
    example = EXAMPLES / "strands-math"
    (told,) = re.findall(r"```diff\n(.*?)```", (example / "README.md").read_text(), re.S)
    before, after = ((example / name).read_text().splitlines() for name in ("app.py", "rl_app.py"))
    for line in told.splitlines():
        assert line[1:] in (after if line[0] == "+" else before), line
        assert line[1:] not in (before if line[0] == "+" else after), line
    marked = [line for line in after if "# <-" in line]
    assert marked == [line[1:] for line in told.splitlines() if line[0] == "+"]


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*/README.md")), ids=lambda path: path.parent.name)
def test_links_and_commands_of_readmes_are_good(example: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", example.read_text()):
        assert (example.parent / target.partition("#")[0]).exists(), target
    for command in commands(example.parent):
        for one in command.split(" && "):
            words = shlex.split(one)
            if words[0] == "afield":
                parser().parse_args(words[1:])
            elif words[0] == "python" and words[1] not in ("-c", "-m"):
                assert (example.parent / words[1]).is_file(), one


@pytest.mark.parametrize("example", AGENTS, ids=lambda path: path.name)
def test_an_example_is_whole_and_small(example: Path) -> None:
    config = train_config(example / "train.toml", {})
    assert Path(config.model) / "config.json" == example / "../../src/afield/demo/policy/config.json"
    assert Path(config.tasks).is_file()
    project = tomllib.loads((example / "pyproject.toml").read_text())
    modules = sorted(path.stem for path in example.glob("*.py"))
    assert project["tool"]["setuptools"]["py-modules"] == modules
    assert any(need.startswith("afield") for need in project["project"]["dependencies"])


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.stem)
def test_an_example_teaches_one_thing_in_sixty_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60


@pytest.mark.parametrize("example", AGENTS, ids=lambda path: path.name)
def test_a_dockerfile_makes_an_agentcore_image(example: Path) -> None:
    """Built in `real/test_dockerfiles.py`; here, the lines that AgentCore and operators look for."""
    text = (example / "Dockerfile").read_text()
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    said = dict(lines)
    assert said["FROM"] == "python:3.12-slim" and said["EXPOSE"] == "8080"
    assert said["USER"] == "agent" and "useradd --create-home agent" in text
    order = [word for word, _ in lines]
    assert order[-1] == "CMD" and order.index("USER") > max(n for n, w in enumerate(order) if w == "RUN")
    command = json.loads(said["CMD"])
    target = command[1] if len(command) == 2 else command[3].partition(":")[0]
    assert command[0] == "python" and (example / target).is_file()
    for platform in ("linux/arm64", "linux/amd64"):
        assert platform in text
    extras = re.findall(r'"/opt/afield(?:\[([\w,]+)\])?"', text)[0]
    needs = tomllib.loads((example / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"afield[{extras}]" in needs if extras else "afield" in needs
    for copied in re.findall(r"--from=afield (.*) /opt", text)[0].split():
        assert (ROOT / copied).exists()
