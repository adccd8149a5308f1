"""Classes of `afield why` at the border between chance and a finding."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from afield.diagnosis.evidence import STAGES, RolloutFacts, RunEvidence
from afield.diagnosis.registry import CLASSES, diagnose
from afield.orchestrator.state import RunDirectory, RunInfo, RunKind
from support.random_groups import Maker

FACTS: dict[str, Any] = {
    **dict.fromkeys(RolloutFacts.__struct_fields__),
    "greedy": 0,
    "turns": 2,
    "tool_calls": 1,
    "sampled_tokens": 10,
    "refused_calls": 0,
    "excluded": {},
    "refused": {},
    "tags": {},
    "facts": {"tool_turns": 2, "continued_calls": 1, "main_turns": 2, "continuations": 1},
}
TRAINER = {"entropy": 0.2, "logprob_diff": 1e-6, "logprob_diff_control": 1e-4, "update_kept": 1.0}


def rollout(n: int, **fields: Any) -> RolloutFacts:
    facts = {**FACTS["facts"], "replies": n, **fields.pop("facts", {})}
    values = {"id": f"r{n}", "group_id": f"g{n // 8}", "task_id": f"t{n // 8}", "reward": float(n % 2)}
    return RolloutFacts(**{**FACTS, **values, **fields, "facts": facts})


def evidence(
    path: Path,
    rollouts: Iterable[RolloutFacts],
    steps: list[dict[str, Any]] | None = None,
    *,
    kind: RunKind = "train",
) -> Any:
    run = RunDirectory(path / "run")
    run.path.mkdir()
    run.write_info(RunInfo(kind=kind))
    for line in steps or []:
        run.append_metrics(line)
    run.index.refresh()
    run_evidence = RunEvidence(run)
    run_evidence.rollouts = list(rollouts)
    return run_evidence


def names(run: RunEvidence) -> list[str]:
    return [finding.name for finding in diagnose(run)]


def line(step: int, reward: float = 0.5, **trainer: float) -> dict[str, Any]:
    return {"step": step, "reward": reward, "staleness": 0, "trainer": {**TRAINER, **trainer}}


def test_classes_are_named_once_and_ordered_by_stage() -> None:
    assert len({one.name for one in CLASSES}) == len(CLASSES) >= 18
    order = [STAGES.index(one.stage) for one in CLASSES]
    assert order == sorted(order)


def test_a_sound_run_has_no_finding(tmp_path: Path) -> None:
    assert names(evidence(tmp_path, map(rollout, range(64)), [line(n) for n in range(1, 9)])) == []


@pytest.mark.parametrize(("failed", "found"), [(3, False), (4, False), (16, True)])
def test_failures_need_more_than_a_few_cases(tmp_path: Path, failed: int, found: bool) -> None:
    rollouts = [
        rollout(n, reward=None, failure_kind="infrastructure", failure_reason="died", failure_message="gone")
        if n < failed
        else rollout(n)
        for n in range(64)
    ]
    assert names(evidence(tmp_path, rollouts)) == (["infrastructure_failures"] if found else [])


def test_a_lower_stage_ranks_before_its_effects(tmp_path: Path) -> None:
    rollouts = [rollout(n, reward=0.0, facts={"engine_failed_end": 1}) for n in range(64)]
    found = names(evidence(tmp_path, rollouts))
    assert found == ["infrastructure_zeros", "all_equal_rewards"]


@pytest.mark.parametrize(
    ("rewards", "tasks", "found"),
    [
        ([0.0] * 64, 8, True),
        ([0.5] * 64, 8, True),
        ([0.0] * 63 + [1.0], 8, False),
        ([1.0] * 64, 8, False),  # all tasks may be solved
        ([0.0] * 15, 8, False),
        ([0.0] * 64, 3, False),
    ],
)
def test_a_constant_reward_of_an_evaluation_is_a_finding(
    tmp_path: Path, rewards: list[float], tasks: int, found: bool
) -> None:
    rollouts = [rollout(n, reward=reward, task_id=f"t{n % tasks}") for n, reward in enumerate(rewards)]
    run = evidence(tmp_path, rollouts, kind="eval")
    assert names(run) == (["constant_reward"] if found else [])


def test_a_constant_reward_that_the_infrastructure_explains_is_no_finding_of_its_own(tmp_path: Path) -> None:
    rollouts = [
        rollout(n, reward=0.0, task_id=f"t{n % 8}", facts={"engine_failed_end": 1}) for n in range(64)
    ]
    assert names(evidence(tmp_path, rollouts, kind="eval")) == ["infrastructure_zeros"]


def test_a_solved_task_is_no_finding(tmp_path: Path) -> None:
    rollouts = [rollout(n, reward=float(n > 20 or n % 2), facts={"replies": n // 8}) for n in range(160)]
    steps = [line(n, reward=0.5 + n / 20, entropy=0.2 / n**2) for n in range(1, 10)]
    assert names(evidence(tmp_path, rollouts, steps)) == []


def test_entropy_that_falls_without_reward_is_a_collapse(tmp_path: Path) -> None:
    steps = [line(n, reward=0.2, entropy=0.2 / n**3) for n in range(1, 10)]
    assert names(evidence(tmp_path, map(rollout, range(64)), steps)) == ["entropy_collapse"]


def test_a_mismatch_names_its_tier(tmp_path: Path) -> None:
    tiers = {"sampler_trainer_logprob_diff_mean.full": 1e-6, "sampler_trainer_logprob_diff_mean.append": 0.3}
    steps = [line(n, logprob_diff=0.1, **tiers) for n in range(1, 4)]
    (finding,) = diagnose(evidence(tmp_path, map(rollout, range(64)), steps))
    assert finding.name == "sampler_trainer_mismatch"
    assert "tier append" in finding.problem


def test_stale_tokens_are_no_mismatch(tmp_path: Path) -> None:
    tiers = {"sampler_trainer_logprob_diff_mean.append": 0.3}
    steps = [{**line(n, **tiers), "staleness": 1, "staleness_mean": 0.5} for n in range(1, 4)]
    assert names(evidence(tmp_path, map(rollout, range(64)), steps)) == []


@pytest.mark.parametrize(("weight", "found"), [(1.0, True), (0.3, False), (0.0, False)])
def test_reward_follows_length_only_if_length_explains_most_of_it(
    tmp_path: Path, weight: float, found: bool
) -> None:
    dice = random.Random(0)
    rollouts = []
    for n in range(96):
        tokens = dice.randrange(10, 200)
        reward = weight * tokens / 200 + (1 - weight) * dice.random()
        rollouts.append(rollout(n, reward=reward, sampled_tokens=tokens))
    assert names(evidence(tmp_path, rollouts)) == (["reward_follows_length"] if found else [])


def test_malformed_calls_of_a_learning_policy_are_no_alarm(tmp_path: Path) -> None:
    rare = [rollout(n, tags={"malformed-call": 4} if n == 5 else {}) for n in range(256)]
    assert names(evidence(tmp_path, rare)) == []


def test_a_single_case_counts_for_one_rollout(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.write_info(RunInfo(kind="client"))
    results = [Maker(3, kept=True).finished(f"r{n}", "g") for n in range(3)]
    run.append_rollouts(None, results)
    row = run.index.find("r0")
    single = RunEvidence(run, row)
    assert [one.id for one in single.rollouts] == ["r0"]
    (facts,) = single.rollouts
    single.rollouts = [rollout(0, tags={"malformed-call": 1})]
    assert "malformed_tool_calls" in names(single)
    assert json.loads(json.dumps(facts.facts)) == row.facts
