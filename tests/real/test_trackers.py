"""W&B offline, MLflow with SQLite and trackio with its local store: a run, its resumption, read back."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from afield.errors import Unavailable
from afield.settings.environment import Environment
from afield.utils.installations import python_environment
from support.paths import ROOT
from support.processes import train_arguments, unlearned, write_tasks

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]  # with installation
ROWS = [{"id": f"q{i}", "question": f"Question {i}?", "seconds": 0} for i in range(2)]
READ_WANDB = """
import json, struct, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2

BLOCK, HEADER = 32768, 7  # a LevelDB log behind seven bytes: blocks of records, which may be split

def records(data):
    place, parts = HEADER, b""
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + HEADER])
        if kind == 0:
            return
        parts += data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""

runs = []
for path in sys.argv[1:]:
    found = {"config": {}, "history": []}
    for data in records(Path(path).read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            run = record.run
            found |= {"id": run.run_id, "name": run.display_name, "project": run.project}
            found["config"] |= {u.key: json.loads(u.value_json) for u in run.config.update}
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            found["history"].append({i.key or i.nested_key[0]: json.loads(i.value_json) for i in items})
    runs.append(found)
print(json.dumps(runs))
"""
READ_MLFLOW = """
import json, sys
from mlflow.tracking import MlflowClient

client = MlflowClient(tracking_uri=sys.argv[1])
experiment = client.get_experiment_by_name("cookbook")
def history(run, name):
    return [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]

print(json.dumps([{
    "name": run.info.run_name, "status": run.info.status, "params": run.data.params,
    "reward": history(run, "reward"), "validation": history(run, "validation/reward"),
} for run in client.search_runs([experiment.experiment_id])]))
"""
READ_TRACKIO = """
import json
from trackio.sqlite_storage import SQLiteStorage

runs = SQLiteStorage.get_runs("cookbook")
logs = {run: SQLiteStorage.get_logs("cookbook", run) for run in runs}
configs = {run: SQLiteStorage.get_run_config("cookbook", run) for run in runs}
print(json.dumps({"logs": logs, "configs": configs}, default=str))
"""


def environment(name: str) -> Path:
    """An interpreter with afield from this tree and one tracker."""
    wanted = ("-e", f"{ROOT}[gateway,{name}]", "matplotlib")
    try:
        return python_environment(Environment.read().envs, name, wanted)
    except Unavailable as error:
        pytest.fail(str(error)) if os.environ.get("CI") else pytest.skip(str(error))


def variables(tmp_path: Path, **more: str) -> dict[str, str]:
    # The user's own keys and servers are not for tests.
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "MLFLOW", "TRACKIO", "HF_"))}
    return {**kept, "HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", **more}


def trained(python: Path, tmp_path: Path, tracker: str, env: dict[str, str]) -> list[dict[str, Any]]:
    """Train two steps, resume to a third, and return the lines of metrics.jsonl."""
    (tmp_path / "home").mkdir()
    val = write_tasks(tmp_path / "val.jsonl", ROWS)
    options = ("--tasks-per-step", 2, "--rollouts", 2, "--val-tasks", val, "--run", "r", "--steps", 2)
    track = ("--track", tracker, "--track-project", "cookbook")
    first = train_arguments(tmp_path, "slow_agent.py", ROWS, *unlearned(tmp_path), *options, *track)
    for arguments in (first, ["train", "--resume", "r", "--steps", 3, "--json"]):
        command = [str(python), "-m", "afield", *map(str, arguments)]
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["tracker_failures"] == {}, done.stderr
    lines = (tmp_path / "runs" / "r" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def read_back(python: Path, program: str, env: dict[str, str], *arguments: object) -> Any:
    command = [str(python), "-c", program, *map(str, arguments)]
    out = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout.splitlines()[-1])


def test_wandb_gets_settings_steps_and_validations_and_keeps_its_run(tmp_path: Path) -> None:
    python = environment("wandb")
    env = variables(tmp_path, WANDB_MODE="offline")
    lines = trained(python, tmp_path, "wandb", env)
    files = sorted((tmp_path / "runs" / "r" / "wandb").glob("offline-run-*/*.wandb"))
    runs = read_back(python, READ_WANDB, env, *files)
    assert len(runs) == 2 and len({run["id"] for run in runs}) == 1
    assert {(run["name"], run["project"]) for run in runs} == {("r", "cookbook")}
    assert runs[0]["config"]["tasks_per_step"] == 2
    history = [row for run in runs for row in run["history"]]
    rewards = {row["step"]: row["reward"] for row in history if "reward" in row}
    assert rewards == pytest.approx({line["step"]: line["reward"] for line in lines}) and len(rewards) == 3
    assert [row["step"] for row in history if "validation/reward" in row] == [0]


def test_wandb_without_a_key_is_counted_and_does_not_end_the_run(tmp_path: Path) -> None:
    python = environment("wandb")
    (tmp_path / "home").mkdir()
    arguments = train_arguments(tmp_path, "slow_agent.py", ROWS, *unlearned(tmp_path), "--steps", 1)
    command = [str(python), "-m", "afield", *map(str, arguments), "--track", "wandb", "--rollouts", "2"]
    env = variables(tmp_path)
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tracker_failures"] == {"wandb": 2}
    assert "wandb login" in done.stderr


def test_mlflow_gets_settings_steps_and_validations_and_keeps_its_run(tmp_path: Path) -> None:
    python = environment("mlflow")
    env = variables(tmp_path)
    lines = trained(python, tmp_path, "mlflow", env)
    [run] = read_back(python, READ_MLFLOW, env, f"sqlite:///{tmp_path / 'runs' / 'mlflow.sqlite'}")
    assert (run["name"], run["status"], run["params"]["tasks_per_step"]) == ("r", "FINISHED", "2")
    assert dict(run["reward"]) == pytest.approx({line["step"]: line["reward"] for line in lines})
    assert [step for step, _ in run["reward"]] == [1, 2, 3]
    assert [step for step, _ in run["validation"]] == [0]


def test_trackio_gets_settings_steps_and_validations_and_keeps_its_run(tmp_path: Path) -> None:
    python = environment("trackio")
    env = variables(tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    lines = trained(python, tmp_path, "trackio", env)
    stored = read_back(python, READ_TRACKIO, env)
    assert list(stored["logs"]) == ["r"] and stored["configs"]["r"]["tasks_per_step"] == 2
    rewards = {row["step"]: row["reward"] for row in stored["logs"]["r"] if row.get("reward") is not None}
    assert rewards == pytest.approx({line["step"]: line["reward"] for line in lines}) and len(rewards) == 3
    assert [r["step"] for r in stored["logs"]["r"] if r.get("validation/reward") is not None] == [0]
