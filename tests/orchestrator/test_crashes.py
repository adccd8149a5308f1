"""kill -9 of an agent costs an attempt; kill -9 of the trainer costs nothing that was finished."""

from __future__ import annotations

import signal
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

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
    found = list((cwd / "runs").glob("*/run.json"))
    return RunDirectory(found[0].parent) if found else None


def turns_of(run: RunDirectory) -> int:
    """Model calls that have ended, as the gateway's store has them."""
    store = run.gateway / "gateway.sqlite"
    if not store.exists():
        return 0
    with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as reader:
        try:
            return reader.execute("SELECT count(*) FROM turns WHERE status = 'committed'").fetchone()[0]
        except sqlite3.OperationalError:
            return 0  # not made yet


def trained_rollouts(run: RunDirectory) -> Counter[str]:
    """From what each step wrote down, not from the ledger."""
    finished = [f for step in run.steps() for f in run.read_rollouts(step)]
    return Counter(f.rollout.id for f in finished if f.outcome.reward is not None)


def expected_rollouts(run: RunDirectory) -> set[str]:
    return {f"train-e0-{row['id']}-r{k}" for row in ROWS for k in range(4)}


def test_killing_an_agent_process_costs_one_attempt_of_what_it_ran(tmp_path: Path) -> None:
    rows = [{**row, "seconds": 2.0} for row in ROWS]
    sizes = ("--steps", 2, *SIZES, *unlearned(tmp_path))
    process = start(tmp_path, *train_arguments(tmp_path, "slow_agent.py", rows, *sizes))
    run = until(lambda: only_run(tmp_path), "a run directory")
    until(lambda: turns_of(run) >= 4, "rollouts in the middle of their two turns")
    found = children(process.pid, deep=False)
    workers = [pid for pid, line in found.items() if "afield.sdk.serve" in line]
    for worker in workers:
        kill(worker)
    code, out, err = finish(process)
    assert code == 0, err
    told = summary(out)
    assert told["failed"] == 0
    assert told["rollouts"] == 32
    assert 1 <= told["retried"] <= 16
    assert "infrastructure/died" in err
    counted = trained_rollouts(run)
    assert set(counted.values()) == {1}
    assert len(counted) == 32


def test_killing_the_trainer_and_resuming_trains_everything_exactly_once(tmp_path: Path) -> None:
    arguments = train_arguments(tmp_path, "slow_agent.py", ROWS, "--steps", 3, *SIZES)
    process = start(tmp_path, *arguments)
    run = until(lambda: only_run(tmp_path), "a run directory")
    until(lambda: run.last_state(), "a first step", 90)
    commits = run.path / "outcomes" / "train" / "commits"
    until(lambda: len(list(commits.glob("*.json"))) >= 20, "outcomes of the second step")
    family = children(process.pid)
    assert len(family) >= 3
    kill(process.pid)
    finish(process)
    until(lambda: not any(map(alive, family)), "gateway and agents end with their trainer")
    committed = {path.stem for path in commits.glob("*.json")}

    code, out, err = afield(tmp_path, "train", "--resume", run.id, "--json")
    assert code == 0, err
    assert summary(out)["steps"] == 3
    assert [line["step"] for line in run.read_metrics()] == [1, 2, 3]
    counted = trained_rollouts(run)
    assert set(counted) == expected_rollouts(run)
    assert set(counted.values()) == {1}
    with RunState(run.run_state) as ledger:
        assert set(ledger.trained_rollouts()) == expected_rollouts(run)
        assert Counter(ledger.trained_rollouts().values()) == {1: 16, 2: 16, 3: 16}
    used = {f.outcome.session_id for step in run.steps() for f in run.read_rollouts(step)}
    assert committed <= used  # nothing that was finished before the kill was sampled again


def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(tmp_path: Path) -> None:
    process = start(tmp_path, *train_arguments(tmp_path, "slow_agent.py", ROWS, "--steps", 3, *SIZES))
    run = until(lambda: only_run(tmp_path), "a run directory")
    until(lambda: run.last_state(), "a first step", 90)
    family = children(process.pid)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process, 60)
    assert code == 130
    assert f"--resume {run.id}" in err
    assert "Traceback" not in err
    assert not any(map(alive, family))
    code, _out, err = afield(tmp_path, "train", "--resume", "--json")
    assert code == 0, err
    assert set(trained_rollouts(run)) == expected_rollouts(run)


def test_a_gateway_that_dies_ends_the_run_with_one_line_and_costs_nothing(tmp_path: Path) -> None:
    sizes = ("--steps", 3, *SIZES, *unlearned(tmp_path))
    process = start(tmp_path, *train_arguments(tmp_path, "slow_agent.py", ROWS, *sizes))
    run = until(lambda: only_run(tmp_path), "a run directory")
    until(lambda: run.last_state(), "a first step", 90)
    (gateway,) = [p for p, line in children(process.pid, deep=False).items() if "afield gateway" in line]
    kill(gateway)
    code, _, err = finish(process, 60)
    assert code == 1
    assert "the gateway ended" in err and "Traceback" not in err
    code, _, err = afield(tmp_path, "train", "--resume", "--json")
    assert code == 0, err
    assert set(trained_rollouts(run)) == expected_rollouts(run)


def test_sigterm_stops_cleanly(tmp_path: Path) -> None:
    sizes = ("--steps", 3, *SIZES, *unlearned(tmp_path))
    process = start(tmp_path, *train_arguments(tmp_path, "slow_agent.py", ROWS, *sizes))
    run = until(lambda: only_run(tmp_path), "a run directory")
    until(lambda: turns_of(run), "a first turn")
    family = children(process.pid)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process, 60)
    assert code == 143
    assert "Traceback" not in err
    assert not any(map(alive, family))
