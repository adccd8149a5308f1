"""`afield compare`: the splits that are compared, and its output."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import RunCommand

from support.written_runs import write_run

GOOD, BAD = {"a": [1.0, 1.0], "b": [1.0]}, {"a": [0.0], "b": [1.0, 0.0]}


def test_an_evaluation_is_compared_with_runs_that_have_no_validation(
    tmp_path: Path, run_command: RunCommand
) -> None:
    write_run(tmp_path / "runs/evaluated", "eval", val=GOOD)
    write_run(tmp_path / "runs/collected", "client", train=BAD)
    write_run(tmp_path / "runs/trained", "train", train=BAD)
    for other in ("collected", "trained"):
        code, out, err = run_command("compare", "evaluated", other, "--json")
        assert code == 0, err
        result = json.loads(out)
        assert (result["splits"], result["common_tasks"], result["better"]) == (["val", "train"], 2, 2)
    code, _, err = run_command("compare", "evaluated", "trained", "--split", "val")
    assert code == 2 and "run trained has no rollout with a reward in split val" in err


def test_equal_splits_with_common_tasks_are_compared_first(tmp_path: Path, run_command: RunCommand) -> None:
    write_run(tmp_path / "runs/both", "train", train=GOOD, val={"v": [1.0]})
    write_run(tmp_path / "runs/validated", "train", train=BAD, val={"v": [0.0]})
    write_run(tmp_path / "runs/other-tasks", "train", train=BAD, val={"w": [0.0]})
    write_run(tmp_path / "runs/evaluated", "eval", val=BAD)
    write_run(tmp_path / "runs/strange", "client", train={"z": [1.0]})
    for other, splits in (
        ("validated", ["val", "val"]),
        ("other-tasks", ["train", "train"]),
        ("evaluated", ["train", "val"]),
    ):
        code, out, err = run_command("compare", "both", other, "--json")
        assert (code, json.loads(out)["splits"]) == (0, splits), err
    code, _, err = run_command("compare", "both", "strange")
    assert code == 2 and "no task in common" in err


def test_a_pipe_gets_the_table_alone(tmp_path: Path, run_command: RunCommand) -> None:
    write_run(tmp_path / "runs/one", "eval", val=GOOD)
    write_run(tmp_path / "runs/two", "eval", val=BAD)
    code, out, err = run_command("compare", "one", "two")
    assert code == 0
    assert [line.split("\t")[0] for line in out.splitlines()] == ["task", "b", "a"]
    assert "first   one: mean reward 1.000" in err and "difference +0.750" in err


def test_costs_are_shown_by_all_commands_that_list_runs(tmp_path: Path, run_command: RunCommand) -> None:
    write_run(tmp_path / "runs/one", "eval", val=GOOD, prices={"sampled_price": 1e6})
    write_run(tmp_path / "runs/two", "eval", val=BAD)
    assert "cost     6, 2 per rollout, 2 per success" in run_command("show", "one")[1]
    assert "\ncost " not in run_command("show", "two")[1]
    assert json.loads(run_command("show", "one", "--json")[1])["cost"]["per_success"] == 2.0
    lines = [json.loads(line) for line in run_command("runs", "--json")[1].splitlines()]
    assert {line["run"]: line["cost"] and line["cost"]["total"] for line in lines} == {
        "one": 6.0,
        "two": None,
    }
    costs = json.loads(run_command("compare", "one", "two", "--json")[1])["costs"]
    assert costs[0]["total"] == 6.0 and costs[1] is None
