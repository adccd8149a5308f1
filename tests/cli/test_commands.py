"""The commands as a user meets them: help, wrong input, exit codes, pipes."""

from __future__ import annotations

import json
import signal
import socket
import sqlite3
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest

from afield.cli.main import main
from afield.errors import UsageError
from afield.sdk.listen import listen
from support.gateways import POLICY
from support.processes import AGENTS, afield, finish, start, summary, train_arguments, unlearned, write_tasks

ROWS = [{"id": f"q{i}", "question": f"Question {i}?", "seconds": 0} for i in range(4)]
AGENT = f"{AGENTS / 'slow_agent.py'}:agent"


@pytest.mark.parametrize("command", ["demo", "train", "gateway", "show"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert "usage: afield" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", AGENT, "--tasks", "nowhere.jsonl", "--model", POLICY], "there is no task file"),
        (["train", AGENT, "--tasks", "bad.jsonl", "--model", POLICY], "bad.jsonl line 3"),
        (["train", AGENT, "--tasks", "empty.jsonl", "--model", POLICY], "has no tasks"),
        (["train", AGENT, "--tasks", "twice.jsonl", "--model", POLICY], "twice.jsonl line 2"),
        (["train", AGENT, "--tasks", "reserved.jsonl", "--model", POLICY], "reserved.jsonl line 1"),
        (["train", AGENT, "--tasks", "good.jsonl", "--model", "no/such/model"], "no/such/model"),
        (["train", AGENT, "--tasks", "good.jsonl"], "model is missing"),
        (["train", AGENT, "--model", POLICY], "no tasks"),
        (["train", "--tasks", "good.jsonl", "--model", POLICY], "agent is missing"),
        (["train", "nowhere.py:agent", "--tasks", "good.jsonl", "--model", POLICY], "there is no file"),
        (["train", f"{AGENTS / 'slow_agent.py'}:agnet", "--tasks", "good.jsonl", "--model", POLICY], "agnet"),
        (
            ["train", AGENT, "--tasks", "good.jsonl", "--model", POLICY, "--runtime", "proces"],
            "agentcore, container, inline, kubernetes, process, ray, sandbox, served",
        ),
        (["train", AGENT, "--tasks", "good.jsonl", "--model", POLICY, "--transport", "sq"], "files, memory"),
        (["train", AGENT, "--tasks", "good.jsonl", "--model", POLICY, "--trainer", "ppo"], "grpo"),
        (["train", AGENT, "--tasks", "good.jsonl", "--model", POLICY, "--steps", "0"], "steps"),
        (["train", AGENT, "--tasks", "good.jsonl", "--model", POLICY, "--rollouts", "1"], "quorum"),
        (
            ["train", AGENT, "--tasks", "good.jsonl", "--model", POLICY, "--config", "typo.toml"],
            "temperature",
        ),
        (["train", AGENT, "--config", "gone.toml"], "gone.toml"),
        (["train", "--resume", "nothing"], "unknown run 'nothing'"),
        (["demo", "--agent", "crewai"], "openai, strands, langgraph"),
        (["show"], "there is no run"),
        (["gateway", "--model", "nowhere", "--port", "0"], "nowhere"),
        (["gateway", "--model", POLICY, "--host", "0.0.0.0", "--port", "0"], "--admin-key"),
        (["gateway", "--model", POLICY, "--engine", "vlm", "--port", "0"], "scripted, sglang, torch, vllm"),
    ],
)
def test_bad_input_is_named_with_its_remedy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[object],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    good = [json.dumps(row) for row in ROWS]
    (tmp_path / "bad.jsonl").write_text("\n".join([*good[:2], '{"id": "x", ', *good[2:]]))
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "twice.jsonl").write_text("\n".join([good[0], good[0]]))
    (tmp_path / "reserved.jsonl").write_text(json.dumps({"_rollout": {}}))
    (tmp_path / "typo.toml").write_text("[train]\ntemprature = 0.5\n")
    write_tasks(tmp_path / "good.jsonl", ROWS)
    code = main([str(argument) for argument in arguments])
    err = capsys.readouterr().err
    assert code == 2, err
    assert says in err
    assert "Traceback" not in err
    assert not list((tmp_path / "runs").glob("*"))


def test_a_port_in_use_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = afield(tmp_path, "gateway", "--model", POLICY, "--port", port)
    assert code == 2
    assert f"port {port}" in err and "--port" in err


def test_train_show_and_pipes_work_for_a_users_own_agent(tmp_path: Path) -> None:
    sizes = ("--steps", 2, "--tasks-per-step", 2, "--rollouts", 2)
    code, out, err = afield(tmp_path, *train_arguments(tmp_path, "slow_agent.py", ROWS, *sizes))
    assert code == 0, err
    assert len(out.strip().splitlines()) == 1
    told = summary(out)
    run = Path(told["run"])
    assert told["steps"] == 2 and told["rollouts"] == 8 and told["turns_per_rollout"] == 2.0
    for name in ("rewards.png", "metrics.jsonl", "summary.json", "run.json", "rollouts/step-0002.jsonl"):
        assert (run / name).stat().st_size > 0
    assert json.loads((run / "summary.json").read_text()) == told

    code, out, err = afield(tmp_path, "show")
    assert code == 0 and run.name in out
    rollout = out.strip().rpartition(" ")[2]
    code, out, err = afield(tmp_path, "show", run.name, rollout, "--tokens")
    assert code == 0, err
    assert "[user] Are you sure?" in out and "append" in out
    code, out, err = afield(tmp_path, "show", run.name, rollout, "--json")
    assert json.loads(out)["rollout"]["id"] == rollout
    code, out, err = afield(tmp_path, "show", run.name, "--json")
    assert len(json.loads(out)["metrics"]) == 2
    code, out, err = afield(tmp_path, "show", run.name, "nobody")
    assert code == 2 and "nobody" in err

    code, out, err = afield(tmp_path, "train", "--resume", run.name, "--steps", 3, "--json")
    assert code == 0 and summary(out)["steps"] == 3, err
    code, out, err = afield(tmp_path, "show", run.name)
    assert "3 of 3" in out

    code, out, err = afield(tmp_path, "train", "--resume", run.name, "--lr", 0.5)
    assert code == 2 and "lr" in err

    shown = start(tmp_path, "show", run.name, rollout, "--tokens")
    assert shown.stdout and shown.stderr
    shown.stdout.close()
    assert "Traceback" not in shown.stderr.read()
    shown.stderr.close()
    shown.wait(20)


def test_a_gateway_that_is_told_to_stop_keeps_the_partials_of_its_calls(tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps({"token_ids": [5, 6, 7], "fail": "hang"}) + "\n")
    options = (
        "--model",
        POLICY,
        "--engine",
        f"scripted={script}",
        "--port",
        0,
        "--store",
        tmp_path / "store",
    )
    process = start(tmp_path, "gateway", "--json", *options)
    assert process.stdout
    told = json.loads(process.stdout.readline())

    def post(path: str, body: object, key: str) -> urllib.request.Request:
        headers = {"authorization": f"Bearer {key}"}
        return urllib.request.Request(told["url"] + path, json.dumps(body).encode(), headers)

    with urllib.request.urlopen(post("/sessions", {"id": "r.1"}, told["admin_key"]), timeout=30) as answer:
        key = json.loads(answer.read())["api_key"]
    chat = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
    with urllib.request.urlopen(post("/s/r.1/v1/chat/completions", chat, key), timeout=30) as stream:
        stream.readline()
        process.send_signal(signal.SIGTERM)
        code, _, err = finish(process, 60)
    assert code == 143, err
    assert "Traceback" not in err
    with closing(sqlite3.connect(tmp_path / "store" / "gateway.sqlite")) as store:
        assert store.execute("SELECT status FROM turns").fetchall() == [("aborted",)]


def test_answers_are_not_held_back_by_the_network_stack() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP  # asyncio's condition for TCP_NODELAY
    with pytest.raises(UsageError, match="99999"):
        listen("127.0.0.1", 99999)


def test_two_runs_that_share_a_store_do_not_see_each_others_outcomes(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    for name in ("one", "two"):
        more = ("--transport", f"files://{shared}", "--run", name, "--steps", 1, *unlearned(tmp_path))
        code, out, err = afield(tmp_path, *train_arguments(tmp_path, "slow_agent.py", ROWS, *more))
        assert code == 0, err
        assert (summary(out)["late"], summary(out)["failed"]) == (0, 0)
    commits = {name: len(list((shared / name / "commits").iterdir())) for name in ("one", "two")}
    assert commits["one"] == commits["two"] > 0
