"""`afield export`: a run's groups as a file, through the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import ipc, parquet

from afield.batches.groups import to_groups
from afield.batches.jsonl import read_jsonl
from afield.batches.parquet import read_parquet
from afield.batches.rows import Batch
from afield.batches.tree import TreeBatch
from afield.cli.main import main
from afield.datasets import read_tasks
from afield.orchestrator.state import RunDirectory, RunState
from afield.types import Rollout, RolloutResult, Task
from support.processes import train_arguments, unlearned
from support.random_groups import branching

READERS = {"jsonl": read_jsonl, "parquet": read_parquet}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A real run of two steps."""
    folder = tmp_path_factory.mktemp("export")
    rows = [{"id": f"q{i}", "question": f"Question {i}?", "seconds": 0} for i in range(2)]
    sizes = ("--steps", 2, "--tasks-per-step", 2, "--rollouts", 2, "--runtime", "inline", *unlearned(folder))
    arguments = [str(arg) for arg in train_arguments(folder, "slow_agent.py", rows, *sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(arguments) == 0
    [run] = (folder / "runs").iterdir()
    return RunDirectory(run)


@pytest.mark.parametrize("format", READERS)
@pytest.mark.parametrize("form", ["linear", "per-turn", "tree"])
def test_the_file_contains_everything_the_run_was_trained_on(
    trained: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str, form: str
) -> None:
    out = tmp_path / f"batch.{format}"
    options = ["--format", format, "--form", form, "--out", str(out), "--json"]
    assert main(["export", str(trained.path), *options]) == 0
    printed = json.loads(capsys.readouterr().out)
    made = READERS[format](out)
    batch = made.to_rows() if isinstance(made, TreeBatch) else made
    assert isinstance(batch, Batch)
    recorded = [f for step in trained.steps() for f in trained.read_rollouts(step)]
    assert [r.rollout for r in batch.rollouts] == [f.rollout for f in recorded]
    assert sum(s.owned for s in batch.rows) == sum(t.owned for f in recorded for t in f.trajectories) > 0
    assert printed == {
        "out": str(out),
        "format": format,
        "form": form,
        "groups": 4,
        "dropped_groups": 0,
        "rollouts": 8,
        "rows": len(made.nodes if isinstance(made, TreeBatch) else made.rows),
        "sampled_tokens": sum(s.owned for s in batch.rows),
    }
    groups = to_groups(batch)
    assert [group.epoch for group in groups] == [0, 0, 1, 1]
    assert [f.trajectories for g in groups for f in g.finished] == [f.trajectories for f in recorded]
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_atif_files_of_a_run_export_to_the_same_rows(
    trained: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    direct, again, atif = tmp_path / "direct.jsonl", tmp_path / "again.jsonl", tmp_path / "atif"
    assert main(["export", str(trained.path), "--out", str(atif), "--format", "atif"]) == 0
    assert len(list(atif.iterdir())) == 8
    first = json.loads(min(atif.iterdir()).read_text())
    assert first["agent"]["name"].endswith("slow_agent.py:agent")
    assert [step["source"] for step in first["steps"]] == ["user", "agent"] * 2
    assert main(["export", str(trained.path), "--out", str(direct)]) == 0
    assert main(["export", str(atif), "--out", str(again)]) == 0
    assert read_jsonl(again) == read_jsonl(direct)


def test_hugging_face_dataset_of_a_run_has_the_rows_of_its_parquet_file(
    trained: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, out = tmp_path / "batch.parquet", tmp_path / "dataset"
    assert main(["export", str(trained.path), "--format", "parquet", "--out", str(table)]) == 0
    for _ in range(2):  # the second replaces the first
        assert main(["export", str(trained.path), "--format", "hf", "--out", str(out)]) == 0
    rows = load_dataset(out)
    assert rows == parquet.read_table(table).to_pylist()
    assert [task.input["rollout_id"] for task in read_tasks(out)] == [row["rollout_id"] for row in rows]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batch.parquet", "dataset"]
    assert main(["export", str(trained.path), "--format", "hf", "--out", str(tmp_path)]) == 2
    assert "is no Hugging Face dataset" in capsys.readouterr().err


def load_dataset(path: Path) -> list[dict[str, Any]]:
    """Rows of a saved dataset, from the files that `datasets.load_from_disk` reads."""
    assert json.loads((path / "dataset_info.json").read_text()) == {}
    state = json.loads((path / "state.json").read_text())
    [data] = state["_data_files"]
    assert len(state["_fingerprint"]) == 16
    with (path / data["filename"]).open("rb") as file:
        return ipc.open_stream(file).read_all().to_pylist()


def test_one_step_is_exported_alone(
    trained: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "batch.jsonl"
    assert main(["export", str(trained.path), "--out", str(out), "--step", "2"]) == 0
    assert "4 rollouts in 2 groups" in capsys.readouterr().out
    batch = read_jsonl(out)
    assert {r.rollout.id for r in batch.rollouts} == {f.rollout.id for f in trained.read_rollouts(2)}


def finished(id: str, group_id: str, reward: float | None) -> RolloutResult:
    made = branching(id, reward)
    rollout = Rollout(id=id, exp_id="exp", group_id=group_id, task=Task("task", {}))
    return RolloutResult(
        rollout=rollout, outcome=made.outcome, trajectories=made.trajectories, turns=made.turns
    )


@pytest.fixture
def hand_made(tmp_path: Path) -> RunDirectory:
    """A step with a baseline, a failure and a group that was dropped; and one that is not done."""
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.config.write_text("{}")
    kept, dropped = "exp-e3-task", "exp-e0-other"
    first = [finished("a", kept, 1.0), finished("b", kept, None), finished("greedy", kept, 0.5)]
    run.write_rollouts(1, [*first, finished("c", dropped, 1.0)])
    run.write_rollouts(2, [finished("d", "exp-e4-task", 1.0)])
    run.append_metrics({"step": 1, "dropped_groups": {dropped: "too few"}})
    with RunState(run.run_state) as state:
        for position, (group, members) in enumerate([(kept, ["a", "b"]), (dropped, ["c"])]):
            state.begin_group(group, position, 0)
            state.complete_group(group, members, "greedy" if group == kept else None, None)
    return run


def test_baselines_failures_and_dropped_groups_are_exported_separately(
    hand_made: RunDirectory, tmp_path: Path
) -> None:
    out = tmp_path / "batch.jsonl"
    assert main(["export", str(hand_made.path), "--out", str(out)]) == 0
    batch = read_jsonl(out)
    assert isinstance(batch, Batch)
    assert [(r.rollout.id, r.baseline, r.trains, r.epoch) for r in batch.rollouts] == [
        ("a", False, True, 3),
        ("b", False, False, 3),
        ("greedy", True, False, 3),
    ]
    assert {s.rollout_id for s in batch.rows} == {"a"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--out", "x"], "unknown run 'nowhere'"),
        (["RUN", "--out", "gone/x.jsonl"], "cannot write gone/x.jsonl"),
        (["RUN", "--out", "x", "--step", "7"], "has no step 7; it has: 1 to 2"),
        (["RUN", "--out", "x", "--step", "2"], "has trained on nothing in step 2"),
    ],
)
def test_invalid_input_is_refused(
    hand_made: RunDirectory, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(hand_made.path) if a == "RUN" else a for a in arguments]
    assert main(["export", *paths]) == 2
    assert message in capsys.readouterr().err


def test_sft_pairs_are_the_conversations_of_the_best_rollouts(
    trained: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "pairs.jsonl"
    assert main(["export", str(trained.path), "--format", "sft", "--out", str(out), "--json"]) == 0
    pairs = [json.loads(line) for line in out.read_text().splitlines()]
    assert json.loads(capsys.readouterr().out)["pairs"] == len(pairs) == 4
    recorded = [f for step in trained.steps() for f in trained.read_rollouts(step)]
    rewards: dict[str, float] = {}
    for result in recorded:
        group = result.rollout.group_id
        rewards[group] = max(rewards.get(group, 0.0), result.outcome.reward or 0.0)
    groups = {result.rollout.id: result.rollout.group_id for result in recorded}
    for pair in pairs:
        assert pair["reward"] == rewards[groups[pair["rollout_id"]]]
        assert [m["role"] for m in pair["prompt"]] == ["user"]
        assert [m["role"] for m in pair["completion"]] == ["assistant", "user", "assistant"]
        assert pair["completion"][1]["content"] == "Are you sure?"
    assert main(["export", str(trained.path), "--format", "sft", "--min-reward", "9", "--out", str(out)]) == 0
    assert out.read_text() == ""
