"""Experiment trackers: TensorBoard's files read back, resumed runs, failures, and secrets."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.cli.conftest import RunCommand, run_command  # noqa: F401 - a fixture

from afield.jobs.tracking import (
    MetricsRecord,
    TrackerState,
    TrackerThread,
    public_settings,
    read_states,
    step_values,
)
from afield.settings.train import train_config
from afield.trackers.base import RunStatus, TrackedRun
from support.gateways import POLICY
from support.processes import AGENTS, train_arguments, unlearned, write_tasks

ROWS = [{"id": f"q{i}", "question": f"Question {i}?", "seconds": 0} for i in range(2)]
SMALL = ("--tasks-per-step", 2, "--rollouts", 2)


def scalars(directory: Path) -> EventAccumulator:
    events = EventAccumulator(str(directory))
    events.Reload()
    return events


def test_a_resumed_run_continues_its_tensorboard_files(
    tmp_path: Path,
    run_command: RunCommand,  # noqa: F811
) -> None:
    val = write_tasks(tmp_path / "val.jsonl", ROWS)
    options = (*unlearned(tmp_path), *SMALL, "--val-tasks", val, "--run", "r", "--track", "tensorboard")
    arguments = train_arguments(tmp_path, "slow_agent.py", ROWS, *options)
    code, out, err = run_command(*arguments, "--steps", 2)
    assert code == 0, err
    assert json.loads(out)["tracker_failures"] == {}
    run = tmp_path / "runs" / "r"
    first = read_states(run)["tensorboard"]
    assert (first.step, first.failed, first.id) == (2, 0, str(run / "tensorboard"))
    assert run_command("train", "--resume", "r", "--steps", 3, "--json")[0] == 0

    events = scalars(run / "tensorboard")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = {event.step: event.value for event in events.Scalars("reward")}
    assert rewards == pytest.approx({line["step"]: line["reward"] for line in lines}) and len(rewards) == 3
    assert [event.value for event in events.Scalars("rollouts")] == [4.0, 4.0, 4.0]
    assert {event.step for event in events.Scalars("validation/reward")} == {0}
    [settings] = events.Tensors("settings/text_summary")
    assert '"tasks_per_step": 2' in settings.tensor_proto.string_val[0].decode()
    assert read_states(run)["tensorboard"].step == 3


def test_steps_that_were_not_sent_are_sent_when_the_run_is_resumed(
    tmp_path: Path,
    run_command: RunCommand,  # noqa: F811
) -> None:
    arguments = train_arguments(tmp_path, "slow_agent.py", ROWS, *unlearned(tmp_path), *SMALL, "--run", "r")
    assert run_command(*arguments, "--steps", 2)[0] == 0
    code, _, err = run_command("train", "--resume", "r", "--steps", 3, "--track", "tensorboard", "--json")
    assert code == 0, err
    rewards = scalars(tmp_path / "runs" / "r" / "tensorboard").Scalars("reward")
    assert [event.step for event in rewards] == [1, 2, 3]


def test_a_tracker_that_fails_does_not_end_the_run_and_is_counted(
    tmp_path: Path,
    run_command: RunCommand,  # noqa: F811
) -> None:
    (tmp_path / "file").write_text("in the way")
    options = ("--track", "tensorboard", "--track-uri", f"tensorboard={tmp_path / 'file' / 'logs'}")
    arguments = train_arguments(tmp_path, "slow_agent.py", ROWS, *unlearned(tmp_path), *SMALL)
    code, out, err = run_command(*arguments, "--steps", 2, "--run", "r", *options)
    assert code == 0, err
    assert json.loads(out)["tracker_failures"] == {"tensorboard": 3}  # opening it, and two steps
    assert "tracker tensorboard failed 3 times and got 0 records; last error: NotADirectoryError" in err


def test_an_evaluation_sends_its_summary(
    tmp_path: Path,
    run_command: RunCommand,  # noqa: F811
) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", ROWS)
    engine = unlearned(tmp_path)[:2]
    agent = f"{AGENTS / 'slow_agent.py'}:agent"
    options = ("--model", POLICY, *engine, "-k", 2, "--track", "tensorboard", "--run", "e", "--json")
    code, out, err = run_command("eval", agent, "--tasks", tasks, *options)
    assert code == 0, err
    events = scalars(tmp_path / "runs" / "e" / "tensorboard")
    [reward] = events.Scalars("eval/reward")
    assert reward.value == pytest.approx(json.loads(out)["reward"]["mean"])
    assert [event.value for event in events.Scalars("eval/attempts")] == [4.0]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_missing_package_is_refused_with_its_extra(
    name: str,
    tmp_path: Path,
    run_command: RunCommand,  # noqa: F811
) -> None:
    arguments = train_arguments(tmp_path, "slow_agent.py", ROWS, *unlearned(tmp_path), "--track", name)
    code, _, err = run_command(*arguments)
    assert code == 2 and f"not installed: {name}; pip install 'afield[{name}]'" in err
    assert not list((tmp_path / "runs").glob("*"))


# --- one tracker ---------------------------------------------------------------------------------


class Flaky:
    """Tracker that refuses every second record, and waits for `release` when it is closed."""

    def __init__(self) -> None:
        self.logged: list[tuple[Mapping[str, float], int]] = []
        self.calls = 0
        self.release = threading.Event()
        self.status: RunStatus | None = None

    def start(self, run: TrackedRun, id: str) -> str:
        return id or "new"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.calls += 1
        if self.calls % 2 == 0:
            raise ConnectionError("the server\nsays no")
        self.logged.append((metrics, step))

    def finish(self, status: RunStatus) -> None:
        self.status = status
        self.release.wait(60)


def thread_for(tracker: Flaky, state: TrackerState, directory: Path) -> TrackerThread:
    run = TrackedRun(
        name="r", project="p", kind="train", directory=directory, uri="", config={}, step=state.step
    )
    return TrackerThread("flaky", lambda: tracker, run, state, lambda: None)


def test_refused_records_are_counted_and_later_ones_sent(tmp_path: Path) -> None:
    tracker, state = Flaky(), TrackerState()
    tracker.release.set()
    thread = thread_for(tracker, state, tmp_path)
    for step in (1, 2, 3, 4):
        thread.put(MetricsRecord({"reward": 0.5}, step))
    thread.close("failed", 60)
    assert [step for _, step in tracker.logged] == [1, 3] and tracker.status == "failed"
    assert (state.id, state.step, state.sent, state.failed) == ("new", 3, 2, 2)
    assert state.error == "ConnectionError: the server"


def test_a_tracker_that_never_closes_is_left(tmp_path: Path) -> None:
    tracker, state = Flaky(), TrackerState(id="old")
    thread = thread_for(tracker, state, tmp_path)
    thread.close("finished", 0.05)
    assert state.id == "old" and "not sent within 0.05 s" in state.error
    tracker.release.set()


# --- values --------------------------------------------------------------------------------------


def test_tables_are_flat_and_texts_are_counted_or_left_out() -> None:
    line = {
        "step": 3,
        "reward": None,
        "refusal": "text",
        "agent": {"score": 0.5, "worst": float("nan")},
        "dropped_groups": {"g1": "too stale"},
        "versions": [1, 2],
    }
    assert step_values(line) == {"step": 3.0, "agent/score": 0.5, "dropped_groups": 1.0}


def test_secrets_are_not_sent() -> None:
    flags = {
        "model": str(POLICY),
        "transport": "s3://user:hush@bucket/path?token=hush",
        "agent_args": {"api_key": "hush", "depth": 3},
        "sandbox": {"env": {"TOKEN": "hush"}},
        "max_tokens": 77,
    }
    settings = public_settings(train_config(None, flags))
    assert "hush" not in json.dumps(settings)
    assert settings["agent_args.depth"] == 3 and settings["max_tokens"] == 77
    assert settings["transport"] == "s3://bucket/path"
