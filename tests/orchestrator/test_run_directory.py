"""A run on disk survives being cut off anywhere."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afield.datasets import read_tasks
from afield.errors import UsageError
from afield.orchestrator.groups import Schedule
from afield.orchestrator.state import STEP_STATE_FILE, RunDirectory, RunInfo, RunKind, StepState, find_run
from afield.settings.train import TrainConfig, train_config
from afield.types import Task


def checkpoint(run: RunDirectory, step: int) -> StepState:
    state = StepState(step, step, (f"r{step}",), {"step": step, "reward": 0.5})
    run.checkpoint(step).mkdir(parents=True)
    (run.checkpoint(step) / STEP_STATE_FILE).write_bytes(msgspec.json.encode(state))
    return state


def test_metrics_are_whole_after_a_crash_anywhere(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    for step in (1, 2, 3):
        state = checkpoint(run, step)
        run.write_rollouts(step, [])
        if step < 3:  # killed before the third line was written
            run.append_metrics(state.metrics)
    run.write_rollouts(4, [])  # of a step that was never done
    with run.metrics.open("a") as out:
        out.write('{"step": 3, "rew')
    assert [line["step"] for line in run.read_metrics()] == [1, 2]
    run.rewind(run.last_state())
    assert [line["step"] for line in run.read_metrics()] == [1, 2, 3]
    assert run.steps() == [1, 2, 3]


def test_a_checkpoint_that_was_being_removed_does_not_stop_a_resume(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    for step in (1, 2, 3):
        checkpoint(run, step)
        run.weights(step).mkdir(parents=True)
    (run.checkpoint(1) / STEP_STATE_FILE).unlink()
    (run.checkpoint(4).with_name("step-0004.partial")).mkdir()
    state = run.last_state()
    assert state and state.step == 3
    run.prune(keep_checkpoints=1, keep_weights=2)
    assert not run.checkpoint(2).exists()
    assert [run.weights(v).exists() for v in (1, 2, 3)] == [False, True, True]


@given(
    st.lists(st.dictionaries(st.text(max_size=5).filter("_rollout".__ne__), st.text(max_size=9)), max_size=4)
)
def test_tasks_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, rows: list[dict]) -> None:
    run = RunDirectory(tmp_path_factory.mktemp("run"))
    tasks = [Task(f"t{n}\u2028", {**row, "odd": "\u2028\x85\x0c", "id": n}) for n, row in enumerate(rows)]
    run.write_tasks(tasks)
    assert run.read_tasks() == tasks


def test_a_task_file_may_hold_any_line_separator_inside_a_string(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes('{"id": 7, "q": "a\u2028b"}\r\n\r\n{"q": "no id"}\n'.encode())
    assert [(task.id, task.input["q"]) for task in read_tasks(path)] == [
        ("7", "a\u2028b"),
        ("line-3", "no id"),
    ]


def test_only_one_process_works_on_a_run(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    again = RunDirectory(run.path)
    with run.locked("collect"), again.locked("learn"), pytest.raises(UsageError, match="another process"):
        again.locked("learn", "collect").__enter__()


def test_runs_are_found_by_name_path_or_age(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run"):
        find_run(tmp_path, "latest")
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    assert find_run(tmp_path, "b").id == find_run(tmp_path, str(tmp_path / "b")).id == "b"
    with pytest.raises(UsageError, match="a, b"):
        find_run(tmp_path, "c")


def test_the_newest_run_of_a_program_is_found_whatever_its_name(tmp_path: Path) -> None:
    kinds: dict[str, RunKind] = {"shop": "train", "train-before": "eval", "other": "demo"}
    for name, kind in kinds.items():
        RunDirectory(tmp_path / name).path.mkdir()
        RunDirectory(tmp_path / name).write_info(RunInfo(kind=kind))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "info.json").write_text("{")
    assert find_run(tmp_path, "latest", "train").id == "shop"
    assert find_run(tmp_path, "latest", "demo").id == "other"
    with pytest.raises(UsageError, match=r"no run under .* is of `afield client`"):
        find_run(tmp_path, "latest", "client")


@given(st.integers(1, 30), st.integers(1, 7), st.integers(0, 5))
def test_every_epoch_attempts_every_task_once(n: int, per_step: int, seed: int) -> None:
    tasks = [Task(f"t{i}", {}) for i in range(n)]
    schedule = Schedule(tasks, "exp", seed)
    wishes = [schedule.group_spec(position) for position in range(2 * n * per_step)]
    for epoch in range(2 * n * per_step // n):
        mine = [wish.task.id for wish in wishes if wish.epoch == epoch]
        assert sorted(mine) == sorted(task.id for task in tasks)
    assert len({wish.id for wish in wishes}) == len(wishes)


def test_paths_in_a_file_count_from_the_file_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "afield.toml"
    file.write_text('[train]\nagent = "agents/mine.py:agent"\nmodel = "model"\nlr = 0.5\nsteps = 3\n')
    config = train_config(file, {"steps": 4, "lr": None})
    assert config.agent == f"{tmp_path / 'agents' / 'mine.py'}:agent"
    assert config.model == str(tmp_path / "model")
    assert (config.lr, config.steps) == (0.5, 4)
    file.write_text("train = 3\n")
    with pytest.raises(UsageError, match="must be a table"):
        train_config(file, {})


@pytest.mark.parametrize(
    "value",
    [
        {"temperature": -1.0},
        {"temperature": 0.0},
        {"temperature": float("nan")},
        {"kl": -1.0},
        {"seed": -1},
        {"exp_id": "a b"},
        {"max_calls": 0},
        {"max_tokens": 0},
        {"keep_weights": 0},
    ],
)
def test_values_no_run_could_use_are_refused_at_once(value: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(value))):
        TrainConfig(agent="a:b", model="m", **value)
