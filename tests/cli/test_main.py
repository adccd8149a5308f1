"""The entry point: help, unknown options, invalid input and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import RunCommand

from support.gateways import POLICY
from support.processes import AGENTS, write_tasks

AGENT = f"{AGENTS / 'slow_agent.py'}:agent"
ROWS = [{"id": f"q{i}", "question": f"Question {i}?"} for i in range(4)]
COMMANDS = ("demo", "train", "gateway", "show", "export", "ps", "logs", "kill", "cleanup")


@pytest.mark.parametrize("command", [*COMMANDS, "agentcore-local", "conformance", "inspect-template"])
def test_help_is_printed_for_every_command(command: str, run_command: RunCommand) -> None:
    code, out, _ = run_command(command, "--help")
    assert code == 0 and f"usage: afield {command}" in out


def test_the_commands_are_listed_without_arguments(run_command: RunCommand) -> None:
    code, _, err = run_command()
    assert code == 2 and "train your agent" in err and "list running sessions" in err


@pytest.mark.parametrize("option", ["--stepz=3", "--step=3"])
def test_an_unknown_option_is_refused_in_two_lines_with_the_nearest_one(
    option: str, run_command: RunCommand
) -> None:
    code, _, err = run_command("train", "agent.py:agent", option)
    error = f"afield train: unknown argument {option}; did you mean --steps?"
    assert code == 2 and err.splitlines() == [error, "see afield train --help"]


def test_an_unknown_command_or_choice_is_refused_with_the_nearest_one(run_command: RunCommand) -> None:
    code, _, err = run_command("evl")
    assert code == 2 and "unknown 'evl'; did you mean eval?" in err
    code, _, err = run_command("train", "agent.py:agent", "--role", "lern")
    assert code == 2 and "unknown 'lern'; did you mean learn?" in err


MODEL = ("--model", POLICY)
GOOD = ("--tasks", "good.jsonl", *MODEL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", AGENT, "--tasks", "nowhere.jsonl", *MODEL], "there is no dataset"),
        (["train", AGENT, "--tasks", "bad.jsonl", *MODEL], "bad.jsonl line 3"),
        (["train", AGENT, "--tasks", "empty.jsonl", *MODEL], "has no tasks"),
        (["train", AGENT, "--tasks", "twice.jsonl", *MODEL], "twice.jsonl line 2"),
        (["train", AGENT, "--tasks", "reserved.jsonl", *MODEL], "reserved.jsonl line 1"),
        (["train", AGENT, "--tasks", "good.jsonl", "--model", "no/such/model"], "no/such/model"),
        (["train", AGENT, "--tasks", "good.jsonl"], "model is missing"),
        (["train", AGENT, *MODEL], "no tasks"),
        (["train", *GOOD], "agent is missing"),
        (["train", "nowhere.py:agent", *GOOD], "there is no file"),
        (["train", f"{AGENTS / 'slow_agent.py'}:agnet", *GOOD], "agnet"),
        (
            ["train", AGENT, *GOOD, "--runtime", "proces"],
            "agentcore, container, inline, kubernetes, process, ray, sandbox, served",
        ),
        (["train", AGENT, *GOOD, "--transport", "sq"], "memory, files"),
        (["train", AGENT, *GOOD, "--trainer", "ppo"], "grpo"),
        (["train", AGENT, *GOOD, "--steps", "0"], "steps"),
        (["train", AGENT, *GOOD, "--rollouts", "1"], "quorum"),
        (["train", AGENT, *GOOD, "--config", "typo.toml"], "temperature"),
        (["train", AGENT, "--config", "gone.toml"], "gone.toml"),
        (["train", "--resume", "nothing"], "unknown run 'nothing'"),
        (["demo", "--agent", "crewai"], "openai, strands, langgraph"),
        (["show"], "there is no run"),
        (["gateway", "--model", "nowhere", "--port", "0"], "nowhere"),
        (["gateway", *MODEL, "--host", "0.0.0.0", "--port", "0"], "--admin-key"),
        (["gateway", *MODEL, "--engine", "vlm", "--port", "0"], "scripted, sglang, torch, vllm"),
    ],
)
def test_invalid_input_exits_with_2_and_names_the_value(
    tmp_path: Path, run_command: RunCommand, arguments: list[object], message: str
) -> None:
    good = [json.dumps(row) for row in ROWS]
    (tmp_path / "bad.jsonl").write_text("\n".join([*good[:2], '{"id": "x", ', *good[2:]]))
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "twice.jsonl").write_text("\n".join([good[0], good[0]]))
    (tmp_path / "reserved.jsonl").write_text(json.dumps({"_rollout": {}}))
    (tmp_path / "typo.toml").write_text("[train]\ntemprature = 0.5\n")
    write_tasks(tmp_path / "good.jsonl", ROWS)
    code, _, err = run_command(*arguments)
    assert code == 2, err
    assert message in err
    assert "Traceback" not in err
    assert not list((tmp_path / "runs").glob("*"))


def test_all_missing_libraries_are_named_with_all_their_extras(
    tmp_path: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tasks(tmp_path / "good.jsonl", ROWS)
    for library in ("aiohttp", "torch", "docker"):
        monkeypatch.setitem(sys.modules, library, None)
    for command in ("train", "eval"):
        code, _, err = run_command(command, AGENT, *GOOD, "--runtime", "container=image")
        missing = "not installed: aiohttp, torch, docker; pip install 'afield[container,train]'"
        assert (code, missing in err) == (2, True), err
    endpoint = ("--tasks", "good.jsonl", "--model", "m", "--endpoint", "http://127.0.0.1:1")
    assert "not installed: aiohttp; pip install 'afield[gateway]'" in run_command("eval", AGENT, *endpoint)[2]
    code, _, err = run_command("gateway", *MODEL, "--port", "0")
    assert code == 2 and "not installed: aiohttp, torch; pip install 'afield[train]'" in err


def test_inspecting_a_template_without_tokenizers_names_the_extra(tmp_path: Path) -> None:
    code = "import sys; sys.modules['tokenizers'] = None; from afield.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "inspect-template", str(POLICY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "afield: tokenizers is not installed: pip install 'afield[gateway]'\n"
