"""ATIF: there and back without loss; files of others; what cannot be trained is named."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from msgspec import structs

from afield.batches.atif import is_atif, read_atif, write_atif
from afield.batches.groups import from_groups
from afield.cli.main import main
from afield.errors import UsageError
from afield.types import Group, Message, ToolCall
from support.random_groups import branching, group
from support.strategies import groups


@settings(deadline=None, max_examples=40)
@given(made=groups())
def test_files_give_back_the_batch(made: list[Group]) -> None:
    batch = from_groups(made)
    with tempfile.TemporaryDirectory() as folder:
        assert write_atif(Path(folder), made) == len(batch.rollouts)
        again = read_atif(Path(folder))
    assert again.batch == batch
    assert again.left_out == ()
    before, after = (
        [p.hex() for row in b.rows for p in row.trajectory.logprobs] for b in (batch, again.batch)
    )
    assert after == before


def document(path: Path, name: str = "g-1") -> dict[str, Any]:
    return json.loads((path / f"{name}.json").read_text())


def test_every_turn_is_one_sampled_step_with_whole_prompts(tmp_path: Path) -> None:
    finished = branching("g-1", 1.0)
    write_atif(tmp_path, [group(finished)], agent="solve.py:agent", version="1", model="policy")
    written = document(tmp_path)
    assert written["agent"] == {"name": "solve.py:agent", "version": "1", "model_name": "policy"}
    paths = [written, *written["subagent_trajectories"]]
    assert len(paths) == len(finished.trajectories) > 1
    assert [step["step_id"] for step in written["steps"]] == list(range(1, len(written["steps"]) + 1))
    steps = [s for path in paths for s in path["steps"] if s["source"] == "agent"]
    sampled = [s for s in steps if not s.get("is_copied_context")]
    assert len(steps) > len(sampled) == len(finished.turns)
    by_id = {turn.id: turn for turn in finished.turns}
    for step in sampled:
        turn = by_id[step["extra"]["afield"]["turn"]["id"]]
        prompt = turn.delta_ids
        above = turn.parent
        while above is not None:
            prompt = by_id[above].delta_ids + by_id[above].token_ids + prompt
            above = by_id[above].parent
        metrics = step["metrics"]
        assert tuple(metrics["prompt_token_ids"]) == prompt
        assert tuple(metrics["completion_token_ids"]) == turn.token_ids
        assert tuple(metrics["logprobs"]) == turn.logprobs


def test_tool_results_join_the_step_that_called_the_tool(tmp_path: Path) -> None:
    finished = branching("g-1", 1.0)
    first, *others = finished.turns
    calls = (ToolCall("c1", "look", '{"at": 1}'), ToolCall("c2", "look", "not json"))
    conversation = (
        Message(role="system", content="Be brief."),
        Message(role="user", content="Look."),
        Message(role="assistant", content="Sure.", reasoning="Hm.", tool_calls=calls),
    )
    replies = tuple(
        structs.replace(
            turn,
            messages=(
                Message(role="tool", content="4", tool_call_id="c1"),
                Message(role="tool", content="5", tool_call_id="unknown"),
                Message(role="user", content="And?"),
                Message(role="assistant", content=f"Reply {turn.id}."),
            ),
        )
        for turn in others
    )
    turns = (structs.replace(first, messages=conversation), *replies)
    write_atif(tmp_path, [group(structs.replace(finished, turns=turns))])
    steps = document(tmp_path)["steps"]
    assert [s["source"] for s in steps[:5]] == ["system", "user", "agent", "user", "agent"]
    assert steps[2]["reasoning_content"] == "Hm."
    assert [call["arguments"] for call in steps[2]["tool_calls"]] == [{"at": 1}, {}]
    assert steps[2]["tool_calls"][1]["extra"] == {"afield": {"arguments": "not json"}}
    results = steps[2]["observation"]["results"]
    assert results == [{"content": "4", "source_call_id": "c1"}, {"content": "5"}]


def foreign(*metrics: dict[str, Any] | None) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"source": "user", "message": "Count."}]
    for numbers in metrics:
        step = {"source": "agent", "message": "..."}
        steps.append(step | ({"metrics": numbers} if numbers else {}))
    return {
        "schema_version": "ATIF-v1.6",
        "session_id": "s",
        "agent": {"name": "other", "version": "2"},
        "steps": [{"step_id": n, **step} for n, step in enumerate(steps, 1)],
    }


def tokens(prompt: list[int], sampled: list[int]) -> dict[str, Any]:
    return {
        "prompt_token_ids": prompt,
        "completion_token_ids": sampled,
        "logprobs": [-0.5 - n for n in range(len(sampled))],
    }


def trial(folder: Path, content: dict[str, Any], rewards: dict[str, float] | None = None) -> Path:
    file = folder / "agent" / "trajectory.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(content))
    if rewards is not None:
        result = {
            "task_name": "org/count",
            "trial_name": folder.name,
            "verifier_result": {"rewards": rewards},
        }
        (folder / "result.json").write_text(json.dumps(result))
    return file


def test_harbor_trials_become_rows_with_their_rewards(tmp_path: Path) -> None:
    linear = foreign(tokens([1, 2], [3]), tokens([1, 2, 3, 4], [5, 6]), tokens([9], [8]))
    trial(tmp_path / "count__a", linear, {"reward": 0.5})
    trial(tmp_path / "count__b", linear, {"speed": 2.0})
    read = read_atif(tmp_path)
    assert read.left_out == ()
    assert [r.score for r in read.batch.rollouts] == [0.5, 2.0]
    assert {r.rollout.group_id for r in read.batch.rollouts} == {"org-count"}
    first, second = read.batch.rows_of(read.batch.rollouts[0].rollout.id)
    assert first.token_ids == (1, 2, 3, 4, 5, 6)
    assert first.trajectory.loss_mask == (0, 0, 1, 0, 1, 1)
    assert first.trajectory.logprobs == (0.0, 0.0, -0.5, 0.0, -0.5, -1.5)
    assert second.token_ids == (9, 8)


def test_referenced_files_belong_to_the_trajectory(tmp_path: Path) -> None:
    whole = foreign(tokens([1], [2])) | {"continued_trajectory_ref": "trajectory.cont-1.json"}
    reference = {"trajectory_path": "trajectory.summarization-1-summary.json"}
    whole["steps"].append(
        {
            "step_id": 3,
            "source": "system",
            "message": "",
            "observation": {"results": [{"subagent_trajectory_ref": [reference]}]},
        }
    )
    file = trial(tmp_path / "count__a", whole, {"reward": 1.0})
    file.with_name("trajectory.cont-1.json").write_text(json.dumps(foreign(tokens([5], [6]))))
    file.with_name(reference["trajectory_path"]).write_text(json.dumps(foreign(tokens([3], [4]))))
    assert [row.token_ids for row in read_atif(tmp_path).batch.rows] == [(1, 2), (3, 4), (5, 6)]
    file.with_name("trajectory.cont-1.json").unlink()
    assert "cont-1.json, which it refers to, is missing" in read_atif(tmp_path).left_out[0]


def test_export_lists_atif_steps_that_cannot_be_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.json").write_text(json.dumps(foreign(None, {"prompt_tokens": 3})))
    out = str(tmp_path / "rows.jsonl")
    assert main(["export", str(tmp_path), "--out", out]) == 2
    message = capsys.readouterr().err
    assert "text.json: step 2: no token ids and log-probabilities" in message
    assert "text.json: no step has token ids" in message
    demonstration = tmp_path / "demonstration.json"
    demonstration.write_text(json.dumps(foreign(tokens([1], [2]), None)))
    assert main(["export", str(demonstration), "--out", out]) == 2
    assert "it has no reward" in capsys.readouterr().err
    assert main(["export", str(demonstration), "--out", out, "--reward", "1", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["rows"], summary["sampled_tokens"]) == (1, 1)
    assert summary["left_out"] == [f"{demonstration}: step 3: no token ids and log-probabilities"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"schema_version": "ATIF-v1.6", "steps": [', "cannot be read as ATIF"),
        ('{"schema_version": "ATIF-v1.6"}', "no list 'steps'"),
        (json.dumps(foreign(tokens([1], [2]) | {"logprobs": [-1.0, -2.0]})), "1 sampled ids, 2 log-prob"),
        (json.dumps(foreign(tokens([1], [-2]))), "token id -2 must be from 0"),
        (json.dumps(foreign(tokens([1], [2]) | {"logprobs": [0.5]})), "the log-probability 0.5 is above 0"),
    ],
)
def test_damaged_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "one.json").write_text(content)
    with pytest.raises(UsageError, match=r"one\.json.*" + message):
        read_atif(tmp_path / "one.json", reward=1.0)


def test_directory_without_trajectories_is_not_atif(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    assert not is_atif(tmp_path)
    assert not is_atif(tmp_path / "gone")
    with pytest.raises(UsageError, match="has no ATIF files"):
        read_atif(tmp_path)
