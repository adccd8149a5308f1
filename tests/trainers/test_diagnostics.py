"""What is refused before any weight changes, and what a step tells about what it trained on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec import structs

from afield.errors import UsageError
from afield.interfaces import StepReport
from afield.orchestrator import training_loop
from afield.runs.token_account import TokenAccount
from afield.trainers.frozen import Frozen
from afield.trainers.grpo import GRPO
from afield.trajectories import linear, per_turn
from afield.types import Exclusion, Group, RolloutResult, Trajectory, VersionSpan
from support.tiny_model import build_tiny_model
from support.training_groups import finished, forest, group, group_of


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("audit") / "model", hidden=32, max_positions=128)


def recorded(name: str, reward: float | None, seed: int, form=linear, **how) -> RolloutResult:
    """A rollout that comes with its turns, as collected ones do."""
    made = forest(seed, turns=3, **how)
    return structs.replace(finished(name, reward, form(made).trajectories), turns=tuple(made.turns))


def changed(row: Trajectory, **values) -> Trajectory:
    return structs.replace(row, **values)


def with_one(values: tuple, place: int, value) -> tuple:
    return (*values[:place], value, *values[place + 1 :])


def other_id(row: Trajectory) -> Trajectory:
    place = row.turns[1].start
    return changed(row, token_ids=with_one(row.token_ids, place, row.token_ids[place] ^ 1))


def other_logprob(row: Trajectory) -> Trajectory:
    place = row.turns[1].start
    return changed(row, logprobs=with_one(row.logprobs, place, row.logprobs[place] - 0.5))


def other_version(row: Trajectory) -> Trajectory:
    spans = [VersionSpan(s.start, s.end, 7, 7) if n == 1 else s for n, s in enumerate(row.versions)]
    return changed(row, versions=tuple(spans))


def other_temperature(row: Trajectory) -> Trajectory:
    ranges = [structs.replace(t, temperature=0.5) if n == 1 else t for n, t in enumerate(row.turns)]
    return changed(row, turns=tuple(ranges))


def other_context(row: Trajectory) -> Trajectory:
    place = row.turns[1].start - 1
    return changed(row, token_ids=with_one(row.token_ids, place, row.token_ids[place] ^ 1))


def moved(row: Trajectory) -> Trajectory:
    """Everything one token later than it was recorded."""
    return Trajectory(
        token_ids=(1, *row.token_ids),
        loss_mask=(0, *row.loss_mask),
        logprobs=(0.0, *row.logprobs),
        versions=tuple(VersionSpan(s.start + 1, s.end + 1, s.low, s.high) for s in row.versions),
        turns=tuple(structs.replace(t, start=t.start + 1, end=t.end + 1) for t in row.turns),
        weight=row.weight,
    )


def renamed(row: Trajectory) -> Trajectory:
    ranges = [structs.replace(t, id="stranger") if n == 1 else t for n, t in enumerate(row.turns)]
    return changed(row, turns=tuple(ranges))


def impossible(row: Trajectory) -> Trajectory:
    return changed(row, logprobs=with_one(row.logprobs, row.turns[1].start, 0.25))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (other_id, "turn t1: the ids in the row"),
        (other_logprob, "turn t1: the log-probabilities in the row"),
        (other_version, "turn t1: the versions in the row"),
        (other_temperature, "turn t1: the sampling parameters in the row"),
        (other_context, r"turn t1: tokens \d+ to \d+ of the row are not the prompt"),
        (moved, r"turn t0: recorded at tokens \d+ to \d+, but the row has it"),
        (renamed, "turn stranger: the row trains it, but it is not on the path"),
        (impossible, r"turn t1: the log-probability 0\.25 is above 0"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_rows_that_are_not_what_was_recorded_are_refused_by_rollout_and_turn(
    model_path, damage: Callable[[Trajectory], Trajectory], told: str
):
    good, bad = recorded("0", 1.0, 1), recorded("1", 0.0, 2)
    broken = structs.replace(bad, trajectories=(damage(bad.trajectories[0]),))
    for trainer in (GRPO(model_path, lr=1e-2, device="cpu"), Frozen(model_path)):
        trainer.step([group(good, bad)])
        with pytest.raises(UsageError, match=f"rollout g-1, {told}"):
            trainer.step([group(good, broken)])
        assert trainer.steps == 1


def test_a_turn_that_two_rows_train_is_refused(model_path):
    one = recorded("0", 1.0, 1, per_turn)
    rows = one.trajectories
    again = structs.replace(one, trajectories=(*rows, changed(rows[1], weight=0.01)))
    with pytest.raises(UsageError, match="rollout g-0, turn t1: two rows train it"):
        GRPO(model_path, lr=1e-2, device="cpu").step([group(again, recorded("1", 0.0, 2))])


def test_a_rollout_that_weighs_more_than_others_is_refused(model_path):
    one = recorded("0", 1.0, 1, per_turn)
    heavy = structs.replace(one, trajectories=tuple(changed(row, weight=0.9) for row in one.trajectories))
    with pytest.raises(UsageError, match=r"rollout g-0: the weights of its rows add up to 2\.7, more than 1"):
        GRPO(model_path, lr=1e-2, device="cpu").step([group(heavy, recorded("1", 0.0, 2))])


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_sampler_too_far_from_the_trainer_is_refused_by_its_worst_turn(model_path, minibatches):
    trainer = GRPO(
        model_path,
        lr=1e-2,
        minibatches=minibatches,
        max_tokens_per_pass=1,
        max_logprob_diff=50.0,
        device="cpu",
    )
    good = group_of([1.0, 0.0, 0.5])
    trainer.step([good])
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    middle = good.finished[1]
    row = middle.trajectories[0]
    place = row.turns[1].start
    far = changed(row, logprobs=with_one(row.logprobs, place, -200.0))
    parts = (good.finished[0], structs.replace(middle, trajectories=(far,)), good.finished[2])
    message = (
        rf"rollout g-1, turn t1: sampler and trainer differ by 19\d .* token {place}, .*max_logprob_diff = 50"
    )
    with pytest.raises(UsageError, match=message):
        trainer.step([group(*parts)])
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items())


def test_the_difference_is_reported_by_prompt_exactness(model_path):
    trained = group(
        recorded("0", 1.0, 1, tier="bridge"),
        recorded("1", 0.0, 2, tier="bridge"),
        recorded("2", 0.0, 3, tier="full"),
    )
    metrics = GRPO(model_path, lr=1e-3, device="cpu").step([trained]).metrics
    name = "sampler_trainer_logprob_diff"
    assert metrics[f"{name}_max"] == max(metrics[f"{name}_max.bridge"], metrics[f"{name}_max.full"])
    tokens = [sum(row.owned for row in f.trajectories) for f in trained.finished]
    both = (tokens[0] + tokens[1]) * metrics[f"{name}_mean.bridge"] + tokens[2] * metrics[f"{name}_mean.full"]
    assert both / sum(tokens) == pytest.approx(metrics[f"{name}_mean"], rel=1e-5)


def test_how_much_of_what_was_sampled_is_trained_and_why_the_rest_is_not(model_path):
    cut = structs.replace(
        recorded("0", 1.0, 1),
        excluded=(Exclusion("x", 7, "aborted"), Exclusion("y", 3, "side:opencode/title")),
    )
    kept, lost = recorded("1", 0.0, 2), recorded("2", None, 3)
    for trainer in (GRPO(model_path, lr=1e-3, device="cpu"), Frozen(model_path)):
        report = trainer.step([group(cut, kept, lost)])
        metrics = report.metrics
        trained = cut.trajectories[0].owned + kept.trajectories[0].owned
        gone = lost.trajectories[0].owned
        assert metrics["excluded_tokens.aborted"] == 7
        assert metrics["excluded_tokens.side_opencode_title"] == 3
        assert metrics["untrained_tokens.infrastructure_failure"] == gone
        assert metrics["excluded_share"] == pytest.approx(10 / (trained + gone + 10))
        assert report.account == TokenAccount(
            trained=trained,
            excluded={"aborted": 7, "side:opencode/title": 3},
            untrained={"infrastructure_failure": gone},
        )
        assert metrics["delivered_share"] == pytest.approx(trained / (trained + gone + 10))


def test_tokens_of_groups_without_an_advantage_are_distinguished_from_excluded_ones(model_path):
    same = group(recorded("0", 1.0, 1), recorded("1", 1.0, 2))
    owned = sum(row.owned for f in same.finished for row in f.trajectories)
    for trainer in (GRPO(model_path, lr=1e-3, device="cpu"), Frozen(model_path)):
        account = trainer.step([same]).account
        assert account == TokenAccount(untrained={"no_advantage": owned})
    pulled = GRPO(model_path, lr=1e-3, kl=0.1, device="cpu").step([same]).account
    assert pulled == TokenAccount(trained=owned)


def test_a_step_accounts_for_the_tokens_of_dropped_groups_too():
    trained, lost = recorded("0", 1.0, 1), recorded("2", None, 3)
    cut = structs.replace(recorded("4", 0.0, 2), excluded=(Exclusion("x", 5, "aborted"),))
    moved = structs.replace(cut, rollout=structs.replace(cut.rollout, group_id="h"))
    dropped = group(moved, name="h")
    batch = training_loop.StepBatch([group(trained, lost), dropped], {"h": "too few"}, version=0, wasted=0)
    line = training_loop.step_metrics(
        step=1, version=1, batch=batch, report=StepReport(rollouts=1, tokens=1), seconds=(0.0, 0.0)
    )
    owned = [f.trajectories[0].owned for f in (trained, lost, cut)]
    assert line.trained_tokens == owned[0]
    assert line.untrained_tokens == {"infrastructure_failure": owned[1], "dropped_group": owned[2]}
    assert line.excluded_tokens == {"aborted": 5}
    assert line.sampled_tokens == sum(owned) + 5
    assert line.excluded_share == pytest.approx(5 / line.sampled_tokens, abs=1e-6)


def test_how_stale_tokens_are_on_average_and_at_most():
    fresh, old = recorded("0", 1.0, 1, version=5), recorded("1", 0.0, 2, version=2)
    lost = recorded("2", None, 3, version=0)
    batch = training_loop.StepBatch([group(fresh, old, lost)], {}, version=5, wasted=0)
    report = StepReport(rollouts=2, tokens=9)
    line = training_loop.step_metrics(step=1, version=6, batch=batch, report=report, seconds=(0.0, 0.0))
    tokens = [f.trajectories[0].owned for f in (fresh, old)]
    assert line.staleness == 3
    assert line.staleness_mean == pytest.approx(3 * tokens[1] / sum(tokens))


def test_what_the_tree_saves_is_reported(model_path):
    def told(layout) -> dict[str, float]:
        trained: Group = group(recorded("0", 1.0, 1, per_turn), recorded("1", 0.0, 2, per_turn))
        return GRPO(model_path, lr=1e-3, layout=layout, device="cpu").step([trained]).metrics

    tree, padded = told("tree"), told("padded")
    assert tree["row_tokens"] == padded["row_tokens"]
    merged = [recorded(str(n), 1.0, n + 1).trajectories[0] for n in range(2)]
    assert tree["computed_tokens"] == sum(len(row.token_ids) for row in merged)
    assert padded["computed_tokens"] >= padded["row_tokens"] > tree["computed_tokens"]


def test_what_was_cut_off_of_importance_weights_is_reported(model_path):
    trained = group_of([1.0, 0.0])
    loose = GRPO(model_path, lr=1e-3, importance_cap=1e9, device="cpu").step([trained]).metrics
    tight = GRPO(model_path, lr=1e-3, importance_cap=1.0, device="cpu").step([trained]).metrics
    assert loose["importance_truncated_share"] == 0
    assert 0 < tight["importance_truncated_share"] <= 1
    assert tight["importance_mean"] <= 1 < loose["importance_mean"]
    assert 0 < loose["importance_effective_share"] < tight["importance_effective_share"] <= 1
