"""The examples run offline as their READMEs say."""

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
OFFLINE = ("--freeze-weights", "--steps", 1, "--json")


def commands(example: Path) -> list[str]:
    found = re.findall(r"```console\n(.*?)```", (example / "README.md").read_text(), re.S)
    lines = "\n".join(found).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def train(example: Path, tmp_path: Path, *more: object) -> tuple[dict[str, Any], Path]:
    """Summary and directory of a run of `afield train --config train.toml`."""
    arguments = ("train", "--config", example / "train.toml", "--run", "example", *more)
    code, out, err = afield(tmp_path, *arguments)
    assert code == 0, err
    return summary(out), tmp_path / "runs" / "example"


def records(run: Path) -> list[dict[str, Any]]:
    """Outcomes as the agents wrote them."""
    found = [json.loads(path.read_text()) for path in (run / "outcomes").rglob("*.json")]
    return [record for record in found if "outcome" in record]


# --- runs ---------------------------------------------------------------------------------


def test_the_strands_agent_calls_its_tool_and_returns_its_conversation(tmp_path: Path) -> None:
    example = EXAMPLES / "strands-math"
    script = f"scripted={example / 'script.jsonl'}"
    printed, run = train(example, tmp_path, "--engine", script, *OFFLINE)
    assert (printed["rollouts"], printed["failed"]) == (16, 0)
    assert 0 < printed["first"] < 1 and 0 < printed["tool_calls_per_rollout"] < 1
    for record in records(run):
        conversation = record["extra"]["conversation"]
        assert [m["role"] for m in conversation] in (
            ["user", "assistant"],
            ["user", "assistant", "user", "assistant"],
        )
        assert conversation[0]["content"] == [{"text": record["payload"]["question"]}]
        right = f" {record['payload']['answer']}." in conversation[-1]["content"][0]["text"]
        assert record["outcome"]["reward"] == float(right)


def test_the_langgraph_agent_calls_its_tool(tmp_path: Path) -> None:
    """The demo's policy learns it in `real/test_example_learning.py`."""
    example, script = EXAMPLES / "langgraph-tools", tmp_path / "script.jsonl"
    rows = [json.loads(line) for line in (example / "tasks.jsonl").read_text().splitlines()[:4]]
    script.write_text("".join(json.dumps(reply) + "\n" for row in rows for reply in shop_replies(row)))
    small = ("--tasks-per-step", 4, "--rollouts", 4, "--engine", f"scripted={script}")
    printed, run = train(example, tmp_path, *small, *OFFLINE)
    assert (printed["rollouts"], printed["failed"]) == (16, 0)
    assert printed["tool_calls_per_rollout"] == 1
    assert {record["outcome"]["reward"] for record in records(run)} == {0.0, 1.0}


def shop_replies(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Replies to a shop task: an answer if the tool's result is the right one, and the tool call."""
    price = re.fullmatch(r"How much is the (.+)\?", row["question"])
    stock = re.fullmatch(r"How many (.+)s are left\?", row["question"])
    name, item = ("get_price", price[1]) if price else ("get_stock", stock[1] if stock else "")
    call = json.dumps({"name": name, "arguments": {"item": item}})
    result = f"<tool_response>\n{row['answer']}\n</tool_response>"
    return [
        {"match": result, "one_of": [f"It is {row['answer']}.", "I do not know."]},
        {"match": row["question"], "text": f"<tool_call>\n{call}\n</tool_call>"},
    ]


def test_the_verifier_grades_the_patch_of_the_coding_agent(tmp_path: Path) -> None:
    example = EXAMPLES / "coding"
    script = f"scripted={example / 'script.jsonl'}"
    runtime = "sandbox" if shutil.which("bwrap") else "process"
    options = ("--runtime", runtime, "--set", f"verifier_runtime={runtime}")
    printed, run = train(example, tmp_path, "--engine", script, *options, *OFFLINE)
    assert (printed["rollouts"], printed["failed"]) == (12, 0)
    assert printed["first"] < 1
    outcomes = records(run)
    assert {record["outcome"]["reward"] for record in outcomes} >= {0.5, 1.0}
    assert all(record["outcome"]["metrics"] == {"applies": 1.0} for record in outcomes)


def test_the_production_app_runs_without_afield(tmp_path: Path) -> None:
    """`app.py` of the example, at a gateway with a scripted engine."""
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
            assert time.monotonic() < end, f"no server at {url}"
        except urllib.error.URLError as error:
            assert isinstance(error.reason, ConnectionError) and time.monotonic() < end, error
        time.sleep(0.2)


# --- files --------------------------------------------------------------------------------


def test_the_diff_in_the_readme_equals_the_files() -> None:
    example = EXAMPLES / "strands-math"
    (diff,) = re.findall(r"```diff\n(.*?)```", (example / "README.md").read_text(), re.S)
    before, after = ((example / name).read_text().splitlines() for name in ("app.py", "rl_app.py"))
    for line in diff.splitlines():
        assert line[1:] in (after if line[0] == "+" else before), line
        assert line[1:] not in (before if line[0] == "+" else after), line
    marked = [line for line in after if "# <-" in line]
    assert marked == [line[1:] for line in diff.splitlines() if line[0] == "+"]


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*/README.md")), ids=lambda path: path.parent.name)
def test_links_and_commands_of_a_readme_are_valid(example: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", example.read_text()):
        assert (example.parent / target.partition("#")[0]).exists(), target
    for command in commands(example.parent):
        for part in command.split(" && "):
            words = shlex.split(part)
            if words[0] == "afield":
                parser().parse_args(words[1:])
            elif words[0] == "python" and words[1] not in ("-c", "-m"):
                assert (example.parent / words[1]).is_file(), part


@pytest.mark.parametrize("script", ["train_async", "train_sync"])
def test_a_missing_trl_is_one_line_that_names_the_install(script: str, tmp_path: Path) -> None:
    (tmp_path / "trl.py").write_text("raise ModuleNotFoundError(\"No module named 'trl'\")\n")
    (tmp_path / "torch.py").touch()  # the real one takes seconds to load
    command = [sys.executable, EXAMPLES / "trl" / f"{script}.py"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    (install,) = [line for line in commands(EXAMPLES / "trl") if line.startswith("pip install")]
    assert (done.returncode, done.stderr) == (1, f"No module named 'trl': {install}\n")


def test_the_program_on_the_page_of_trl_uses_no_undefined_name() -> None:
    program = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "how-to" / "trl.md").read_text(), re.S)[0]
    check = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "-"]
    done = subprocess.run(check, input=program, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_missing_verl_is_one_line_that_names_the_install(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # without installed packages
    python.chmod(0o755)
    env = {**os.environ, "PYTHON": str(python)}
    done = subprocess.run(
        [EXAMPLES / "verl" / "run.sh"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    (install,) = [line for line in commands(EXAMPLES / "verl") if line.startswith("pip install")]
    assert shlex.split(install)[2:] == shlex.split(done.stderr.partition("pip install ")[2])


@pytest.mark.parametrize("example", AGENTS, ids=lambda path: path.name)
def test_an_example_names_its_model_tasks_and_modules(example: Path) -> None:
    config = train_config(example / "train.toml", {})
    assert Path(config.model) / "config.json" == example / "../../src/afield/demo/policy/config.json"
    assert Path(config.tasks).is_file()
    project = tomllib.loads((example / "pyproject.toml").read_text())
    modules = sorted(path.stem for path in example.glob("*.py"))
    assert project["tool"]["setuptools"]["py-modules"] == modules
    assert any(need.startswith("afield") for need in project["project"]["dependencies"])


# Programs beside an agent: a generator of tasks, and supervised training.
PROGRAMS = {EXAMPLES / "smollm" / name for name in ("tasks.py", "warm_start.py")}


@pytest.mark.parametrize("path", sorted({*EXAMPLES.rglob("*.py")} - PROGRAMS), ids=lambda path: path.stem)
def test_an_example_file_has_at_most_sixty_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60


@pytest.mark.parametrize("example", AGENTS, ids=lambda path: path.name)
def test_a_dockerfile_has_the_lines_that_agentcore_needs(example: Path) -> None:
    """`real/test_dockerfiles.py` builds the images."""
    text = (example / "Dockerfile").read_text()
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    values = dict(lines)
    assert values["FROM"] == "python:3.12-slim" and values["EXPOSE"] == "8080"
    # A number, since Kubernetes cannot tell whether a name is root.
    assert values["USER"] == "10001:10001" and "useradd --uid 10001 --create-home agent" in text
    order = [word for word, _ in lines]
    assert order[-1] == "CMD" and order.index("USER") > max(n for n, w in enumerate(order) if w == "RUN")
    command = json.loads(values["CMD"])
    target = command[1] if len(command) == 2 else command[3].partition(":")[0]
    assert command[0] == "python" and (example / target).is_file()
    for platform in ("linux/arm64", "linux/amd64"):
        assert platform in text
    extras = re.findall(r'"/opt/afield(?:\[([\w,]+)\])?"', text)[0]
    needs = tomllib.loads((example / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"afield[{extras}]" in needs if extras else "afield" in needs
    for copied in re.findall(r"--from=afield (.*) /opt", text)[0].split():
        assert (ROOT / copied).exists()
