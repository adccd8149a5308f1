"""`afield demo` learns, and the README shows what it prints. Real: it trains for a minute of CPU time."""

from __future__ import annotations

import re

import pytest

from afield.orchestrator.state import RunDirectory, find_run
from support.paths import ROOT
from support.processes import afield

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, RunDirectory]:
    cwd = tmp_path_factory.mktemp("demo")
    code, out, err = afield(cwd, "demo", "--seed", 3, "--steps", 12, timeout=500)
    assert code == 0, err
    return out, find_run(cwd / "runs", "latest")


def test_a_real_agent_learns(demo: tuple[str, RunDirectory]) -> None:
    lines = demo[1].read_metrics()
    rewards = [line["reward"] for line in lines]
    assert sum(rewards[:2]) / 2 <= 0.35
    assert sum(rewards[-3:]) / 3 >= 0.80
    assert all(line["turns_per_rollout"] >= 2 and line["tool_calls_per_rollout"] > 0.9 for line in lines)
    assert sum(line["failed"] for line in lines) == 0


def test_the_readme_shows_what_is_printed(demo: tuple[str, RunDirectory]) -> None:
    block = re.findall(r"```console\n\$ make demo\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]
    printed = iter(shape(demo[0]))
    for line in shape(block):
        if line != "...":
            assert line in printed, f"the demo does not print: {line}"


def shape(text: str) -> list[str]:
    """Lines without what differs from run to run: numbers, run ids, and where things lie."""
    text = re.sub(r"demo-\d+-\d+-[0-9a-f]{4}", "RUN", text)
    text = re.sub(r"\S*(demo/agents/|afield (?=show|train))", "", text)
    text = re.sub(r"\d+(\.\d+)?", "#", text)
    return [re.sub(r" +", " ", line).strip() for line in text.strip().splitlines()]
