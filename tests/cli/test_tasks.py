"""`afield tasks`: listing, validation, and files for trainers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.datasets.test_datasets import harbor_task

from afield.cli.main import main
from afield.datasets import read_tasks
from afield.integrations.verl.dataset import task_of


def printed(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> dict[str, Any]:
    assert main(["tasks", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    for name in ("b", "a"):
        harbor_task(tmp_path / "suite" / name)
    return tmp_path / "suite"


def test_tasks_are_listed_with_their_digests(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = printed(capsys, suite)["tasks"]
    assert [task["id"] for task in tasks] == ["a", "b"]
    assert tasks[0] == {
        "id": "a",
        "digest": tasks[0]["digest"],
        "agent_timeout_s": 120.0,
        "image": "ubuntu:24.04",
        "path": str(suite / "a"),
    }
    assert main(["tasks", str(suite)]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith(f"a  {tasks[0]['digest']}  120.0")


def test_broken_tasks_are_listed_and_nothing_is_written(
    suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harbor_task(suite / "c", "[agent]\ntimeout_sec = -1\n")
    out = tmp_path / "tasks.parquet"
    listing = printed(capsys, suite, "--out", out, code=2)
    assert [task["id"] for task in listing["tasks"]] == ["a", "b"]
    [problem] = listing["broken"]
    assert problem.startswith(f"{suite / 'c' / 'task.toml'}:2: agent.timeout_sec = -1")
    assert main(["tasks", str(suite)]) == 2
    assert problem in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_written_file_reads_as_the_same_tasks(
    suite: Path, tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / f"tasks.{ending}"
    assert printed(capsys, suite, "--out", out)["written"]
    assert read_tasks(out) == read_tasks(suite)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_file_is_written_again_only_if_a_task_changed(
    suite: Path, tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / f"tasks.{ending}"
    assert printed(capsys, suite, "--out", out)["written"]
    before = out.stat().st_mtime_ns
    assert not printed(capsys, suite, "--out", out)["written"]
    assert out.stat().st_mtime_ns == before
    (suite / "a" / "tests" / "data.txt").write_text("x")
    assert printed(capsys, suite, "--out", out)["written"]
    out.write_bytes(b"damaged")
    assert printed(capsys, suite, "--out", out)["written"]
    assert len(read_tasks(out)) == 2


def test_rows_for_verl_hold_the_tasks(
    suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "train.parquet"
    printed(capsys, suite, "--out", out, "--rows", "verl")
    rows = [task.input for task in read_tasks(out)]
    assert [row["prompt"] for row in rows] == [
        [{"role": "user", "content": "Write 4 to /app/answer.txt\n"}]
    ] * 2
    assert {row["data_source"] for row in rows} == {"suite"}
    assert [task_of(row) for row in rows] == read_tasks(suite)


def test_other_datasets_are_checked_and_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "tasks.jsonl", tmp_path / "tasks.parquet"
    file.write_text('{"id": "q", "n": 1}\n{"n": 2}\n')
    assert printed(capsys, file, "--out", out)["tasks"] == [{"id": "q"}, {"id": "line-2"}]
    assert [(task.id, task.input["n"]) for task in read_tasks(out)] == [("q", 1), ("line-2", 2)]


@pytest.mark.parametrize(
    ("out", "message"), [("tasks.csv", "must end in .parquet or .jsonl"), ("gone/x.jsonl", "cannot write")]
)
def test_file_that_cannot_be_written_is_named(
    suite: Path, tmp_path: Path, out: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tasks", str(suite), "--out", str(tmp_path / out)]) == 2
    assert message in capsys.readouterr().err
