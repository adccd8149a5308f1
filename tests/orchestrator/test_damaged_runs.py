"""Run files that are damaged, removed or cut off: one clear line, and what can be saved is."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from afield.errors import DamagedFile
from afield.orchestrator.state import RolloutStore, RunDirectory, RunState
from afield.trainers.frozen import Frozen
from afield.types import Attempt, Outcome, Rollout, RolloutResult, Task
from afield.utils.durable_files import rename_whole
from support.gateways import POLICY
from support.processes import afield, train_arguments, unlearned

TASKS = [{"id": f"t{n}", "reward": n % 2} for n in range(2)]


def train(cwd: Path, *more: object) -> tuple[int, str, str]:
    rows = [{**task, "marks": str(cwd / "marks")} for task in TASKS]
    arguments = train_arguments(cwd, "leaving_marks.py", rows, "--run", "run", "--tasks-per-step", 2)
    return afield(cwd, *arguments, "--rollouts", 2, *more, *unlearned(cwd))


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which a run of three steps was trained."""
    cwd = tmp_path_factory.mktemp("trained")
    code, _, err = train(cwd, "--steps", 3)
    assert code == 0, err
    return cwd


def copy_of(trained_run: Path, cwd: Path) -> RunDirectory:
    shutil.copytree(trained_run, cwd, dirs_exist_ok=True)
    return RunDirectory(cwd / "runs" / "run")


def trained(run: RunDirectory) -> Counter[str]:
    return Counter(f.rollout.id for step in run.steps() for f in run.read_rollouts(step))


def test_a_run_continues_from_the_checkpoint_before_a_damaged_one(tmp_path: Path, trained_run: Path) -> None:
    run = copy_of(trained_run, tmp_path)
    before = trained(run)
    (run.checkpoint(3) / "trainer.json").write_bytes(b"\0\0\0")
    code, _, err = afield(tmp_path, "train", "--resume", "run", "--steps", 4, "--json")
    assert code == 0, err
    assert "checkpoint of step 3 is damaged" in err and "the run goes on from step 2" in err
    assert run.checkpoint(3).with_name("step-0003.damaged").is_dir()
    after = trained(run)
    assert len(before) == 12 and len(after) == 16 and set(after.values()) == {1}
    assert before.keys() < after.keys()  # what step 3 had is trained again, not sampled again
    assert [line["step"] for line in run.read_metrics()] == [1, 2, 3, 4]


def test_a_state_that_cannot_be_read_is_set_aside_too(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    for step in (1, 2):
        run.checkpoint(step).mkdir(parents=True)
        state = {"step": step, "version": step, "trained_rollouts": [], "metrics": {}}
        (run.checkpoint(step) / "state.json").write_text(json.dumps(state))
    (run.checkpoint(2) / "state.json").write_text('{"step": 2, "ver')
    state = run.last_state()
    assert state is not None and state.step == 1
    (run.checkpoint(1) / "state.json").write_text("")
    with pytest.raises(DamagedFile, match="there is no older one; restore it from a copy"):
        run.last_state()


def test_a_damaged_file_is_named_in_one_line(tmp_path: Path, trained_run: Path) -> None:
    run = copy_of(trained_run, tmp_path)
    tasks = run.tasks.read_bytes()
    run.tasks.write_bytes(tasks[: len(tasks) // 2] + b"\xff")
    code, _, err = afield(tmp_path, "train", "--resume", "run", "--steps", 4)
    assert code == 2 and err.startswith(f"afield: {run.tasks} is damaged in line ") and err.count("\n") == 1
    run.tasks.write_bytes(tasks)
    run.run_state.write_bytes(b"SQLite format 3\0" + os.urandom(8192))
    for extra in ("-wal", "-shm"):
        run.run_state.with_name(run.run_state.name + extra).unlink(missing_ok=True)
    code, _, err = afield(tmp_path, "train", "--resume", "run", "--steps", 4)
    assert code == 2 and str(run.run_state) in err and "Traceback" not in err
    run.rollouts(1).write_bytes(b'{"rollout": ')
    code, _, err = afield(tmp_path, "export", "run", "--out", tmp_path / "rows.jsonl")
    assert code == 2 and "Traceback" not in err


def test_run_state_damaged_while_open_raises_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "run_state.sqlite"
    with RunState(path) as run_state:
        for n in range(2000):
            run_state.begin_attempt(Attempt(f"r{n}", 1))
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (size - 4096))
    with RunState(path) as run_state, pytest.raises(DamagedFile, match=r"it is damaged: .*restore a copy"):
        for n in range(2000):
            run_state.mark_launched(Attempt(f"r{n}", 1))


def test_a_trainer_names_a_checkpoint_that_it_cannot_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from afield.trainers.grpo import GRPO

    trainer = GRPO(POLICY, lr=1e-4)
    trainer.save(tmp_path / "whole")
    [state] = [path for path in (tmp_path / "whole").iterdir() if path.suffix == ".pt"]
    assert torch.load(state, weights_only=True)
    whole = state.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"\0" * len(whole)):
        state.write_bytes(damaged)
        with pytest.raises(DamagedFile, match="cannot be read"):
            trainer.restore(tmp_path / "whole")
    frozen = Frozen(POLICY)
    frozen.save(tmp_path / "frozen")
    (tmp_path / "frozen" / "trainer.json").write_text("{}")
    with pytest.raises(DamagedFile, match="cannot be read"):
        frozen.restore(tmp_path / "frozen")


@pytest.mark.parametrize("after", ["step-0001", ".."], ids=["in the last step", "in the first"])
def test_a_run_whose_directory_was_removed_ends_with_an_error(tmp_path: Path, after: str) -> None:
    agent = tmp_path / "removing.py"
    agent.write_text(
        "import pathlib, shutil\nimport afield\n\n\n@afield.agent\ndef agent(task, rollout):\n"
        "    if (pathlib.Path(task['remove']) / 'checkpoints' / task['after']).exists():\n"
        "        shutil.rmtree(task['remove'], ignore_errors=True)\n    return 1.0\n"
    )
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"remove": str(tmp_path / "runs" / "run"), "after": after}) + "\n")
    arguments = ["train", f"{agent}:agent", "--tasks", tasks, "--model", POLICY, "--run", "run", "--steps", 2]
    arguments += ["--tasks-per-step", 1, "--rollouts", 1, "--set", "quorum=1", *unlearned(tmp_path)]
    code, out, err = afield(tmp_path, *arguments)
    assert code == 2
    assert "was removed or replaced while the run was going on" in err
    assert "mean reward" not in out + err


# --- power cuts ----------------------------------------------------------------------------------


class Calls:
    """The calls that put files and names on disk, in order, as the interpreter sees them."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def __enter__(self) -> list[str]:
        sys.setprofile(self._see)
        return self.order

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)

    def _see(self, _: FrameType, event: str, what: Any) -> None:
        if event == "c_call" and what in (os.fsync, os.replace, os.rename):
            self.order.append("fsync" if what is os.fsync else "rename")


def finished() -> RolloutResult:
    rollout = Rollout(id="r", exp_id="e", group_id="g", task=Task("t", {}))
    outcome = Outcome(rollout_id="r", attempt=1, reward=1.0)
    return RolloutResult(rollout=rollout, outcome=outcome)


@pytest.mark.parametrize(
    ("durable", "wanted"), [(True, ["fsync", "rename", "fsync"]), (False, ["rename"])], ids=["durable", "not"]
)
def test_what_is_durable_is_on_the_disk_before_and_after_it_gets_its_name(
    tmp_path: Path, durable: bool, wanted: list[str]
) -> None:
    with Calls() as stored:
        RolloutStore(tmp_path / "rollout_store", durable=durable).put(finished())
    assert stored == wanted
    run = RunDirectory(tmp_path, durable=durable)
    with Calls() as written:
        run.write_tasks([Task("t", {})])
    assert written == wanted
    partial = tmp_path / "step.partial"
    (partial / "inner").mkdir(parents=True)
    (partial / "inner" / "weights").write_bytes(b"w")
    with Calls() as renamed:
        rename_whole(partial, tmp_path / "step", durable=durable)
    files_and_folders = 3 * ["fsync"] if durable else []
    assert renamed == [*files_and_folders, *wanted[-2:]] if durable else renamed == wanted
    with RunState(tmp_path / "run_state.sqlite", durable=durable) as run_state:
        assert run_state._db.fetch_one("PRAGMA synchronous")[0] == (2 if durable else 1)
    shutil.rmtree(tmp_path / "step")
