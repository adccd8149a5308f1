"""Types, errors, wire and advantages."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afield import errors, wire
from afield.advantages import compute_advantages, rewards_of
from afield.types import (
    Attempt,
    Failure,
    FailureKind,
    Outcome,
    Reason,
    Rollout,
    Sampling,
    Task,
    Trajectory,
    TurnRange,
    VersionSpan,
)
from support.strategies import group, outcome

INFRA = FailureKind.INFRASTRUCTURE
POLICY = FailureKind.POLICY


# --- types ---------------------------------------------------------------------------------------


@given(st.from_regex(r"[A-Za-z0-9._-]{1,100}", fullmatch=True), st.integers(1, 999))
def test_a_session_id_gives_its_attempt_back(rollout_id: str, n: int) -> None:
    attempt = Attempt(rollout_id, n)
    assert Attempt.from_session_id(attempt.session_id) == attempt


@pytest.mark.parametrize("bad", ["", "a/b", "a b", "x" * 129, "é", "..", "a\n"])
def test_ids_that_could_leave_their_directory_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="characters"):
        Rollout(id=bad, exp_id="e", group_id="g", task=Task("t", {}))


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_cannot_be_an_outcome(reward: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        Outcome(rollout_id="r", attempt=1, reward=reward)


def test_an_outcome_has_a_reward_or_a_failure_and_infrastructure_never_a_reward() -> None:
    with pytest.raises(ValueError, match="neither"):
        Outcome(rollout_id="r", attempt=1)
    with pytest.raises(ValueError, match="never carries a reward"):
        outcome("r", 0.0, INFRA)
    assert outcome("r", 0.5, POLICY).reward_or_floor(0.0) == 0.5
    assert outcome("r", None, POLICY).reward_or_floor(-1.0) == -1.0
    assert outcome("r", None, INFRA).reward_or_floor(0.0) is None


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1},
        {"temperature": 1e-39},
        {"temperature": 1e-300},
        {"temperature": 1e9},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"top_k": -1},
        {"top_k": 10**19},
        {"max_tokens": 0},
        {"max_tokens": 10**19},
        {"seed": 10**30},
    ],
)
def test_sampling_values_out_of_range_are_refused(values: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        Sampling(**values)


def test_a_trajectory_must_line_up() -> None:
    good = {
        "token_ids": (1, 2, 3),
        "loss_mask": (0, 1, 1),
        "logprobs": (0.0, -1.0, -2.0),
        "versions": (VersionSpan(1, 3, 0, 0),),
        "turns": (TurnRange("t1", 1, 3, 1.0),),
        "weight": 1.0,
    }
    Trajectory(**good)
    for change in (
        {"logprobs": (0.0, -1.0)},
        {"logprobs": (-1.0, -1.0, -2.0)},
        {"versions": (VersionSpan(1, 2, 0, 0),)},
        {"loss_mask": (1, 1, 1)},
        {"weight": 0.0},
    ):
        with pytest.raises(ValueError):
            Trajectory(**{**good, **change})


def test_a_task_may_not_bring_its_own_rollout_field() -> None:
    with pytest.raises(ValueError, match="_rollout"):
        Task("t", {"_rollout": {}})


# --- errors --------------------------------------------------------------------------------------


def test_boundary_classifies_foreign_errors_and_keeps_afield_errors() -> None:
    seen: list[Failure] = []
    with errors.boundary(FailureKind.TASK, Reason.RAISED, seen.append):
        raise KeyError("x")
    with errors.boundary(FailureKind.TASK, Reason.RAISED, seen.append):
        raise errors.InfrastructureFailure("the disk is full", Reason.UPLOAD)
    assert [f.kind for f in seen] == [FailureKind.TASK, INFRA]
    assert seen[0].message == "KeyError: 'x'"
    assert "test_core.py" in seen[0].traceback
    assert seen[1].reason is Reason.UPLOAD


def test_boundary_does_not_catch_keyboard_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt), errors.boundary(INFRA, Reason.RAISED, lambda _: None):
        raise KeyboardInterrupt


# --- wire ----------------------------------------------------------------------------------------

INVOCATION = {
    "exp_id": "exp",
    "input_id": "a/b",
    "rollout_id": "r",
    "attempt": 2,
    "group_id": "g",
    "session_id": "r.2",
    "base_url": "http://localhost:1/s/r.2",
    "api_key": "k",
    "model_id": "m",
    "outcome_url": "file:///tmp/x",
}


def test_a_payload_round_trips_and_leaves_the_task_alone() -> None:
    task = Task("t", {"question": {"deep": [1]}})
    invocation = wire.convert(INVOCATION, wire.Invocation, "test")
    payload = wire.build_payload(task, invocation)
    payload["question"]["deep"].append(2)
    assert task.input == {"question": {"deep": [1]}}
    assert wire.read_payload(payload) == invocation
    assert invocation.data_key == "exp/a%2Fb/r.2.json"
    assert invocation.commit_key == "exp/commits/r.2.json"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"exp_id": None}, "exp_id"),
        ({"attempt": "two"}, "attempt"),
        ({"session_id": "r.3"}, "session_id"),
        ({"base_url": "ftp://x"}, "base_url"),
        ({"outcome_url": None}, "outcome_url"),
        ({"outcome_url": "x"}, "outcome_url"),
        ({"api_key": ""}, "api_key"),
        ({"rollout_id": "../x"}, "rollout_id"),
    ],
)
def test_a_malformed_rollout_part_is_refused_by_name(change: dict, named: str) -> None:
    part = {key: value for key, value in {**INVOCATION, **change}.items() if value is not None}
    with pytest.raises(errors.WireError, match=named):
        wire.read_payload({"_rollout": part})


@pytest.mark.parametrize("payload", [None, [], "x", {}, {"_rollout": None}, {"_rollout": 3}])
def test_a_payload_without_a_rollout_part_is_refused(payload: object) -> None:
    with pytest.raises(errors.WireError):
        wire.read_payload(payload)


def test_unknown_fields_of_a_newer_collector_are_tolerated() -> None:
    assert wire.read_payload({"_rollout": {**INVOCATION, "new": 1}}).rollout_id == "r"


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_only_finite_numbers_are_written(value: float) -> None:
    if math.isfinite(value):
        assert msgspec.json.decode(wire.encode({"x": value})) == {"x": value}
    else:
        with pytest.raises(errors.WireError, match="JSON"):
            wire.encode({"x": [value]})


def test_a_record_of_another_format_version_is_refused() -> None:
    record = wire.CommitRecord(session_id="r.1", fenced="late")
    newer = wire.encode(record).replace(b'"v":1', b'"v":2')
    with pytest.raises(errors.WireError, match="version 2"):
        wire.decode(newer, wire.CommitRecord, "commit")
    assert wire.decode(wire.encode(record), wire.CommitRecord, "commit") == record


def test_a_commit_is_data_or_a_fence_never_both() -> None:
    with pytest.raises(ValueError, match="never both"):
        wire.CommitRecord(session_id="r.1", data_key="x", fenced="y")


# --- advantages ----------------------------------------------------------------------------------

rewards = st.lists(st.floats(-100, 100).map(lambda x: round(x, 3)), min_size=2, max_size=16)


@given(rewards, st.booleans())
def test_advantages_of_a_group_sum_to_zero(values: list[float], scale: bool) -> None:
    got = compute_advantages([group(*((v, None) for v in values))], "grpo" if scale else "dr_grpo")
    assert len(got) == len(values)
    assert math.fsum(got.values()) == pytest.approx(0.0, abs=1e-6)


@given(rewards, st.lists(st.sampled_from([INFRA, FailureKind.TASK, FailureKind.VERIFIER]), max_size=4))
def test_failures_stay_out_of_the_baseline(values: list[float], kinds: list[FailureKind]) -> None:
    alone = compute_advantages([group(*((v, None) for v in values))])
    mixed = compute_advantages([group(*((v, None) for v in values), *((None, kind) for kind in kinds))])
    assert mixed == alone


@given(rewards, st.floats(-10, 10).map(lambda x: round(x, 3)), st.sampled_from([0.5, 2.0, 7.0]))
def test_scaled_advantages_ignore_shift_and_scale(values: list[float], shift: float, by: float) -> None:
    if max(values) - min(values) < 0.1:
        return
    plain = compute_advantages([group(*((v, None) for v in values))], eps=0.0)
    moved = compute_advantages([group(*((v * by + shift, None) for v in values))], eps=0.0)
    for rollout_id, value in plain.items():
        assert moved[rollout_id] == pytest.approx(value, rel=1e-6, abs=1e-6)


@given(st.floats(-5, 5), st.integers(1, 8))
def test_equal_rewards_have_zero_advantage(value: float, n: int) -> None:
    assert set(compute_advantages([group(*[(value, None)] * n)]).values()) <= {0.0}


def test_a_policy_failure_without_a_reward_gets_the_floor() -> None:
    got = rewards_of(group((1.0, None), (None, POLICY)), floor=-0.5)
    assert got == {"g-r0": 1.0, "g-r1": -0.5}


def test_a_group_is_usable_from_its_quorum_on() -> None:
    weak = group((1.0, None), (None, INFRA))
    assert weak.unusable_because(1) is None
    assert "1 of 2" in (weak.unusable_because(2) or "")
