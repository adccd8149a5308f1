"""Runs whose processes are killed: retried attempts, resumed runs, clean ends."""

from __future__ import annotations

import signal
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from afield.orchestrator.state import RunDirectory, RunState
from support.processes import (
    afield,
    alive,
    children,
    finish,
    kill,
    start,
    summary,
    train_arguments,
    unlearned,
    until,
)

ROWS = [{"id": f"q{i}", "question": f"Question {i}?", "seconds": 0.4} for i in range(12)]
SIZES = ("--tasks-per-step", 4, "--rollouts", 4, "--concurrency", 8)


def only_run(cwd: Path) -> RunDirectory | None:
    runs = list((cwd / "runs").glob("*/run.json"))
    return RunDirectory(runs[0].parent) if runs else None


def turns_of(run: RunDirectory) -> int:
    """Number of model calls that the gateway has committed."""
    store = run.gateway / "gateway.sqlite"
    if not store.exists():
        return 0
    with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as reader:
        try:
            return reader.execute("SELECT count(*) FROM turns WHERE status = 'committed'").fetchone()[0]
        except sqlite3.OperationalError:
            return 0  # not created yet


def trained_rollouts(run: RunDirectory) -> Counter[str]:
    """Counted in the rollout files of the steps, not in the run state."""
    finished = [f for step in run.steps() for f in run.read_rollouts(step)]
    return Counter(f.rollout.id for f in finished if f.outcome.reward is not None)


def expected_rollouts(run: RunDirectory) -> set[str]:
    return {f"train-e0-{row['id']}-r{k}" for row in ROWS for k in range(4)}


def start_run(cwd: Path, rows: list[dict[str, Any]], steps: int) -> tuple[Popen[str], RunDirectory]:
    """A run with scripted replies and frozen weights, so that no process loads torch."""
    arguments = train_arguments(cwd, "slow_agent.py", rows, "--steps", steps, *SIZES, *unlearned(cwd))
    process = start(cwd, *arguments)
    return process, until(lambda: only_run(cwd), "a run directory")


def test_killing_agent_processes_costs_one_attempt_of_each_rollout_they_ran(tmp_path: Path) -> None:
    process, run = start_run(tmp_path, [{**row, "seconds": 2.0} for row in ROWS], steps=1)
    until(lambda: turns_of(run) >= 4, "rollouts between their two turns")
    for pid, command in children(process.pid, deep=False).items():
        if "afield.sdk.serve" in command:
            kill(pid)
    code, out, err = finish(process)
    assert code == 0, err
    report = summary(out)
    assert (report["failed"], report["rollouts"]) == (0, 16)
    # At most 8 run at once; one that begins again in a process before that is killed too dies twice.
    assert 1 <= report["retried"] <= 16
    assert "infrastructure/died" in err
    counted = trained_rollouts(run)
    assert set(counted.values()) == {1}
    assert len(counted) == 16


def test_a_killed_run_that_is_resumed_trains_every_rollout_exactly_once(tmp_path: Path) -> None:
    process, run = start_run(tmp_path, ROWS, steps=3)
    until(lambda: run.last_state(), "a first step", 90)
    commits = run.path / "outcomes" / "train" / "commits"
    until(lambda: len(list(commits.glob("*.json"))) >= 20, "outcomes of the second step")
    family = children(process.pid)
    assert len(family) >= 3
    kill(process.pid)
    finish(process)
    until(lambda: not any(map(alive, family)), "the end of the gateway and the agents")
    committed = {path.stem for path in commits.glob("*.json")}

    code, out, err = afield(tmp_path, "train", "--resume", run.id, "--json")
    assert code == 0, err
    assert summary(out)["steps"] == 3
    assert [line["step"] for line in run.read_metrics()] == [1, 2, 3]
    counted = trained_rollouts(run)
    assert set(counted) == expected_rollouts(run)
    assert set(counted.values()) == {1}
    with RunState(run.run_state) as run_state:
        assert set(run_state.trained_rollouts()) == expected_rollouts(run)
        assert Counter(run_state.trained_rollouts().values()) == {1: 16, 2: 16, 3: 16}
    used = {f.outcome.session_id for step in run.steps() for f in run.read_rollouts(step)}
    assert committed <= used  # nothing that had finished before the kill was sampled again


def test_a_run_whose_gateway_dies_ends_with_one_line_and_can_be_resumed(tmp_path: Path) -> None:
    process, run = start_run(tmp_path, ROWS, steps=3)
    until(lambda: run.last_state(), "a first step", 90)
    (gateway,) = [p for p, line in children(process.pid, deep=False).items() if "afield gateway" in line]
    kill(gateway)
    code, _, err = finish(process, 60)
    assert code == 1
    assert "the gateway ended" in err and "Traceback" not in err
    code, _, err = afield(tmp_path, "train", "--resume", "--json")
    assert code == 0, err
    assert set(trained_rollouts(run)) == expected_rollouts(run)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_processes_and_the_last_line_names_the_resume_command(
    tmp_path: Path, number: signal.Signals, exit_code: int
) -> None:
    process, run = start_run(tmp_path, ROWS, steps=3)
    until(lambda: turns_of(run), "a first turn")
    family = children(process.pid)
    process.send_signal(number)
    code, _, err = finish(process, 60)
    assert code == exit_code
    assert f"--resume {run.id}" in err
    assert "Traceback" not in err
    assert not any(map(alive, family))
