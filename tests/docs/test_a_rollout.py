"""docs/concepts/a-rollout.md names real functions, and a training run calls them in that order."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.gateways import POLICY
from support.paths import ROOT

SOURCE = ROOT / "src" / "afield"
PAGE = ROOT / "docs" / "concepts" / "a-rollout.md"
STEPS = re.findall(
    r"^\d+\. \[`([\w/]+\.py):([\w.]+)`\]\(\.\./\.\./src/afield/([\w/]+\.py)\)", PAGE.read_text(), re.M
)
MOST_FILES = 30


def label(path: str, function: str) -> str:
    return f"afield.{path.removesuffix('.py').replace('/', '.')}:{function}"


def functions_of(path: Path) -> set[str]:
    """Qualified names of the functions and methods of a module."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            inner = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            names |= {f"{node.name}.{method.name}" for method in inner}
    return names


def test_page_names_existing_functions_of_at_most_thirty_files() -> None:
    assert len(STEPS) >= 20
    assert len(STEPS) == len(re.findall(r"^\d+\. ", PAGE.read_text(), re.M)), "a step without a function"
    for path, function, target in STEPS:
        assert path == target
        assert function in functions_of(SOURCE / path), f"{path} has no {function}"
    assert len({path for path, *_ in STEPS}) <= MOST_FILES


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Calls of the page's functions in all processes of a run of one step, in the order of time."""
    folder = tmp_path_factory.mktemp("calls")
    names = sorted({label(path, function) for path, function, _ in STEPS})
    (folder / "functions.json").write_text(json.dumps(names))
    (folder / "tasks.jsonl").write_text('{"id": "lamp", "question": "How much is the lamp?"}\n')
    (folder / "my_agent.py").write_text(AGENT)
    recorder = str(Path(__file__).parent / "call_recorder")
    environment = os.environ | {
        "PYTHONPATH": recorder,
        "RECORD_CALLS": str(folder),
        "AFIELD_RUNS": str(folder / "runs"),
    }
    command = [sys.executable, "-m", "afield", "train", "my_agent.py:agent", "--tasks", "tasks.jsonl"]
    sizes = [
        "--model",
        str(POLICY),
        "--steps",
        "1",
        "--tasks-per-step",
        "1",
        "--rollouts",
        "2",
        "--max-tokens",
        "8",
    ]
    done = subprocess.run(
        [*command, *sizes], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 1) for file in folder.glob("*.txt") for line in file.read_text().splitlines()]
    return [name for _, name in sorted((int(when), name) for when, name in lines)]


AGENT = """
import random
import openai
import afield

@afield.agent
def agent(task, rollout):
    with openai.OpenAI(base_url=rollout.openai_base_url, api_key=rollout.api_key) as client:
        question = {"role": "user", "content": task["question"]}
        client.chat.completions.create(model=rollout.model_id, messages=[question])
    return random.random()
"""


def test_run_calls_the_steps_of_the_page_in_order(calls: list[str]) -> None:
    missing = [label(path, function) for path, function, _ in STEPS if label(path, function) not in calls]
    assert not missing, f"never called: {missing}"
    position = 0
    for path, function, _ in STEPS:
        assert label(path, function) in calls[position:], f"{function} is not called after the step before it"
        position = calls.index(label(path, function), position)
