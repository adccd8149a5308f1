"""What is trained is what was sampled: a real run, verified by the engine's run_state and by rescoring."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from afield.engines.recording import RecordedCall, read_recording
from afield.orchestrator.state import RunDirectory
from afield.types import RolloutResult, Trajectory
from support.processes import afield, summary

STEPS = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A short real run of the Strands agent, which streams; tests/gateway covers responses in one piece."""
    cwd = tmp_path_factory.mktemp("strands")
    sizes = ("--steps", STEPS, "--tasks-per-step", 4, "--rollouts", 4, "--keep-weights", 99)
    code, out, err = afield(cwd, "demo", "--agent", "strands", *sizes, "--record-engine-calls", "--json")
    assert code == 0, err
    return RunDirectory(Path(summary(out)["run"]))


def finished_of(run: RunDirectory) -> list[RolloutResult]:
    return [finished for step in run.steps() for finished in run.read_rollouts(step)]


def test_every_engine_call_is_in_exactly_one_trajectory_token_by_token(run: RunDirectory) -> None:
    served: dict[tuple[str, str], RecordedCall] = {}
    for entry in read_recording(run.path / "engine-calls.jsonl"):
        session_id, _, turn_id = entry.call_id.rpartition("/")
        assert (session_id, turn_id) not in served
        served[session_id, turn_id] = entry
    owned = 0
    for finished in finished_of(run):
        assert finished.outcome.failure is None
        assert not finished.excluded
        for row in finished.trajectories:
            for turn in row.turns:
                entry = served.pop((finished.outcome.session_id, turn.id))
                assert row.token_ids[: turn.start] == entry.prompt_ids
                assert row.token_ids[turn.start : turn.end] == entry.token_ids
                assert row.logprobs[turn.start : turn.end] == entry.logprobs
                owned += len(entry.token_ids)
    assert not served
    assert owned > 500


def test_rescoring_with_the_weights_that_sampled_gives_the_recorded_logprobs(run: RunDirectory) -> None:
    worst, checked, versions = 0.0, 0, set()
    torch.set_num_threads(1)
    for version in range(STEPS):
        model = AutoModelForCausalLM.from_pretrained(run.weights(version), dtype=torch.float32).eval()
        for finished in finished_of(run):
            for row in finished.trajectories:
                scored = rescore(model, row)
                for span in row.versions:
                    assert span.low == span.high
                    if span.low == version:
                        versions.add(version)
                        for i in range(span.start, span.end):
                            worst = max(worst, abs(scored[i] - row.logprobs[i]))
                            checked += 1
    assert versions == set(range(STEPS))
    assert checked == sum(row.owned for finished in finished_of(run) for row in finished.trajectories)
    assert worst < 1e-4


def rescore(model: torch.nn.Module, row: Trajectory) -> list[float]:
    """Log-probability of every token given all before it."""
    ids = torch.tensor([row.token_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].log_softmax(-1)
    return [0.0, *logits.gather(1, ids[0, 1:, None])[:, 0].tolist()]


def test_the_trainer_saw_what_the_sampler_saw(run: RunDirectory) -> None:
    name = "sampler_trainer_logprob_diff_max"  # absent from a step in which no group had a signal
    seen = [line["trainer"][name] for line in run.read_metrics() if name in line["trainer"]]
    assert seen
    assert max(seen) < 1e-4


def test_each_rollout_has_two_model_calls_and_a_tool_result_in_one_row(run: RunDirectory) -> None:
    for finished in finished_of(run):
        assert len(finished.turns) >= 2
        assert [turn.tier for turn in finished.turns] == ["full"] + ["append"] * (len(finished.turns) - 1)
        assert len(finished.trajectories) == 1
    assert any(m.role == "tool" for f in finished_of(run) for t in f.turns for m in t.messages)
