"""`from_groups`, `to_groups` and `to_tree`: ownership, round trips and refusals."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from afield import trajectories
from afield.batches.groups import from_groups, split, to_groups
from afield.batches.rows import Batch
from afield.batches.tree import TreeBatch, to_tree
from afield.errors import UsageError
from afield.turn_tree import TurnTree
from afield.types import (
    Constraint,
    FinishReason,
    Group,
    ImageSpan,
    RolloutResult,
    Trajectory,
    TurnRange,
    VersionSpan,
)
from support.random_groups import branching, group
from support.strategies import groups

FORMS = st.sampled_from(["linear", "per_turn"])
fifty_examples = settings(max_examples=50)  # each example is several groups of branching rollouts


def everyone(made: list[Group]) -> list[RolloutResult]:
    return [f for g in made for f in (*g.finished, *([g.baseline] if g.baseline else []))]


def trained(made: list[Group]) -> list[RolloutResult]:
    return [f for g in made for f in g.finished if f.outcome.reward_or_floor(0.0) is not None]


@fifty_examples
@given(groups(), FORMS)
def test_every_sampled_token_of_a_rollout_that_trains_is_owned_exactly_once(made: list[Group], form) -> None:
    batch = from_groups(made, form)
    owned: Counter[tuple[str, str, int]] = Counter()
    for row in batch.rows:
        for turn in row.turns:
            owned.update((row.rollout_id, turn.id, n) for n in range(turn.end - turn.start))
    assert set(owned.values()) <= {1}
    expected = {
        (f.rollout.id, turn.id, n)
        for f in trained(made)
        for row in f.trajectories
        for turn in row.turns
        for n in range(turn.end - turn.start)
    }
    assert set(owned) == expected
    for f in trained(made):
        excluded = {e.turn for e in f.excluded}
        for turn in f.turns:
            here = sum(1 for r, t, _ in owned if (r, t) == (f.rollout.id, turn.id))
            assert here == (0 if turn.id in excluded else len(turn.token_ids))


@fifty_examples
@given(groups(kept=True), st.data())
def test_a_row_is_what_the_engine_saw_and_sampled(made: list[Group], data: st.DataObject) -> None:
    batch = from_groups(made, data.draw(FORMS))
    of = {f.rollout.id: TurnTree(f.turns) for f in trained(made)}
    for row in batch.rows:
        for owned in row.turns:
            tree = of[row.rollout_id]
            turn = tree[owned.id]
            assert row.token_ids[: owned.end] == tree.ids(owned.id)
            assert row.trajectory.logprobs[owned.start : owned.end] == turn.logprobs
            spans = [s for s in row.trajectory.versions if owned.start <= s.start < owned.end]
            assert [(s.start - owned.start, s.end - owned.start, s.low, s.high) for s in spans] == [
                (s.start, s.end, s.low, s.high) for s in turn.versions
            ]


@fifty_examples
@given(groups(kept=True))
def test_rows_per_turn_are_those_that_the_forest_gives(made: list[Group]) -> None:
    batch = from_groups(made, "per_turn")
    for f in trained(made):
        withheld = {e.turn: e.reason for e in f.excluded}
        expected = trajectories.per_turn(TurnTree(f.turns), withheld).trajectories
        assert tuple(row.assembled for row in batch.rows_of(f.rollout.id)) == expected


@fifty_examples
@given(groups(), FORMS)
def test_no_rollout_is_lost_and_failed_ones_have_no_rows(made: list[Group], form) -> None:
    batch = from_groups(made, form, floor=-2.0)
    assert [r.rollout.id for r in batch.rollouts] == [f.rollout.id for f in everyone(made)]
    for record, f in zip(batch.rollouts, everyone(made), strict=True):
        assert record.score == f.outcome.reward_or_floor(-2.0)
        assert structs.replace(record.outcome, turn_rewards=f.outcome.turn_rewards) == f.outcome
        if not record.trains:
            assert batch.rows_of(record.rollout.id) == ()


@fifty_examples
@given(groups(), FORMS)
def test_groups_come_back_with_the_rows_they_had(made: list[Group], form) -> None:
    again = to_groups(from_groups(made, form))
    for before, after in zip(made, again, strict=True):
        assert (after.id, after.task_id, after.epoch, after.split) == (
            before.id,
            before.task_id,
            before.epoch,
            before.split,
        )
        assert (after.baseline is None) == (before.baseline is None)
    for before, after in zip(everyone(made), everyone(again), strict=True):
        assert (after.rollout, after.attempts, after.excluded) == (
            before.rollout,
            before.attempts,
            before.excluded,
        )
        assert structs.replace(after.outcome, turn_rewards=before.outcome.turn_rewards) == before.outcome
    for before, after in zip(trained(made), trained(again), strict=True):
        if before.turns or form == "linear":
            assert after.trajectories == before.trajectories
        else:
            assert len(after.trajectories) == sum(len(row.turns) for row in before.trajectories)


@fifty_examples
@given(groups(kept=True))
def test_a_batch_per_turn_holds_all_that_the_linear_one_does(made: list[Group]) -> None:
    assert from_groups(to_groups(from_groups(made, "per_turn")), "linear") == from_groups(made, "linear")


@fifty_examples
@given(groups(kept=True))
def test_turns_that_come_back_are_what_was_sampled(made: list[Group]) -> None:
    again = to_groups(from_groups(made))
    for before, after in zip(trained(made), trained(again), strict=True):
        forest, rebuilt = TurnTree(before.turns), TurnTree(after.turns)
        for turn in after.turns:
            known = forest[turn.id]
            assert rebuilt.ids(turn.id) == forest.ids(turn.id)
            assert (turn.logprobs, turn.versions, turn.finish_reason) == (
                known.logprobs,
                known.versions,
                known.finish_reason or FinishReason.STOP,
            )


def test_a_row_per_turn_has_the_images_before_the_end_of_its_turn() -> None:
    row = Trajectory(
        token_ids=(1, 9, 9, 2, 3, 9, 9, 4),
        loss_mask=(0, 0, 0, 1, 0, 0, 0, 1),
        logprobs=(0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, -2.0),
        versions=(VersionSpan(3, 4, 0, 0), VersionSpan(7, 8, 0, 0)),
        turns=(TurnRange("t0", 3, 4, 1.0), TurnRange("t1", 7, 8, 1.0)),
        weight=1.0,
        images=(ImageSpan("a", 1, 2), ImageSpan("b", 5, 2)),
    )
    assert [part.images for part in split([row])] == [row.images[:1], row.images]


# --- the tree ------------------------------------------------------------------------------------


@fifty_examples
@given(groups(), st.booleans())
def test_a_tree_gives_the_linear_rows_back_exactly(made: list[Group], share: bool) -> None:
    batch = from_groups(made)
    assert to_tree(batch, share=share).to_rows() == batch


@fifty_examples
@given(groups(kept=True), st.booleans())
def test_rows_per_turn_make_the_same_tree(made: list[Group], share: bool) -> None:
    assert to_tree(from_groups(made, "per_turn"), share=share) == to_tree(from_groups(made), share=share)


@fifty_examples
@given(groups(), st.booleans())
def test_a_tree_has_every_owned_token_in_one_node(made: list[Group], share: bool) -> None:
    batch = from_groups(made)
    tree = to_tree(batch, share=share)
    assert sum(len(node.token_ids) for node in tree.nodes) == sum(s.owned for s in batch.rows)
    assert tree.tokens <= sum(len(s.token_ids) for s in batch.rows)


def test_rollouts_of_a_group_share_their_prompts() -> None:
    batch = from_groups([group(branching("g-1", 1.0), branching("g-2", 0.0), branching("g-3", None))])
    shared, apart = to_tree(batch), to_tree(batch, share=False)
    assert (len(shared.nodes), len(apart.nodes)) == (7, 6)
    assert shared.nodes[0].context_ids == (1, 2, 3) and shared.nodes[0].rollout_id == ""
    assert [node.parent for node in shared.nodes] == [-1, 0, 1, 1, 0, 4, 4]
    assert apart.tokens - shared.tokens == 3
    assert [r.rollout.id for r in shared.rollouts] == ["g-1", "g-2", "g-3"]


def test_prompts_that_begin_alike_share_what_they_have_in_common() -> None:
    from afield.batches.tree import shared

    nodes, left = shared([(1, 2, 3), (1, 2), (1, 2, 3), (9,)], 10)
    assert nodes == [(-1, (1, 2)), (10, (3,))]
    assert left == [(11, ()), (10, ()), (11, ()), (-1, (9,))]


# --- what is refused -----------------------------------------------------------------------------


def columns(**change):
    batch = from_groups([group(branching("g-1", 1.0))])
    return structs.replace(batch.rows[0].columns(batch.rollouts[0]), **change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"logprobs": (-1.0,)},
            r"rollout g-1, turn t1: the row has 4 response ids, 4 mask entries and 1 log-prob",
        ),
        (
            {"logprobs": (-1.0, -1.0, -3.0, -1.0)},
            r"rollout g-1, turn t1: a token with mask 0 has the log-probability -3",
        ),
        ({"logprobs": (-1.0, -1.0, 0.0, float("nan"))}, r"rollout g-1, turn t2: .* not a finite number"),
        ({"response_mask": (1, 1, 1, 1)}, r"rollout g-1, turn t2: the mask is not 1 exactly where"),
        ({"response_mask": (1, 0, 0, 1)}, r"rollout g-1, turn t1: the mask is not 1 exactly where"),
        ({"versions": ()}, r"rollout g-1, turn t1: version spans"),
        ({"prompt_ids": ()}, r"rollout g-1, turn t1: the row has no prompt"),
        ({"prompt_ids": (-1,)}, r"rollout g-1, turn t1: token id -1"),
        ({"weight": 0.0}, r"rollout g-1, turn t1: weight 0"),
        ({"score": float("inf")}, r"rollout g-1, turn t1: score inf"),
        ({"turns": ()}, r"rollout g-1, turn \(none\): the response does not begin"),
    ],
)
def test_malformed_columns_are_refused_with_rollout_and_turn(change: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        columns(**change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rollout_id": "g-9"}, r"rollout g-9, turn t1: .* no record of it"),
        ({"score": 0.5}, r"rollout g-1, turn t1: group, score, rewards or failure of the row differ"),
        ({"attempts": 2}, r"rollout g-1, turn t1: the row has 2 attempts"),
        ({"row": 1}, r"rollout g-1, turn t1: row numbers \[1, 1\] must be 0, 1, 2"),
        ({"weight": 0.1}, r"rollout g-1, turn t1: the weights of its rows add up to 0.5"),
    ],
)
def test_columns_that_differ_from_their_record_are_refused(change: dict, says: str) -> None:
    batch = from_groups([group(branching("g-1", 1.0))])
    records = {record.rollout.id: record for record in batch.rollouts}
    with pytest.raises(ValueError, match=says):
        row = columns(**change)
        first = row.to_row(records.get(row.rollout_id))
        Batch(form="linear", rows=(first, batch.rows[1]), rollouts=batch.rollouts)


def test_a_turn_that_two_rows_own_is_refused() -> None:
    batch = from_groups([group(branching("g-1", 1.0))])
    lighter = structs.replace(batch.rows[0].trajectory, weight=0.4)
    twice = structs.replace(batch.rows[0], index=1, trajectory=lighter)
    with pytest.raises(ValueError, match=r"rollout g-1, turn t1: more than one row owns this turn"):
        Batch(form="linear", rows=(batch.rows[0], twice), rollouts=batch.rollouts)


def test_rows_that_are_not_what_was_sampled_are_refused() -> None:
    good = branching("g-1", 1.0)
    other = structs.replace(good.turns[2], token_ids=(13, 15))
    wrong = structs.replace(good, turns=(*good.turns[:2], other))
    with pytest.raises(UsageError, match=r"rollout g-1, turn t3: .* not those that were sampled"):
        from_groups([group(wrong)])


def test_a_row_of_a_turn_that_is_gone_is_refused() -> None:
    good = branching("g-1", 1.0)
    with pytest.raises(UsageError, match=r"rollout g-1, turn t3: a row has it, but the rollout does not"):
        from_groups([group(structs.replace(good, turns=good.turns[:2]))])


def test_a_rollout_that_failed_cannot_have_rows() -> None:
    batch = from_groups([group(branching("g-1", 1.0), branching("g-2", None))])
    stray = structs.replace(batch.rows[0], rollout_id="g-2")
    with pytest.raises(ValueError, match=r"rollout g-2, turn t1: .* its record is not trained"):
        Batch(form="linear", rows=(stray,), rollouts=batch.rollouts)


def test_nodes_that_do_not_hang_together_are_refused() -> None:
    tree = to_tree(from_groups([group(branching("g-1", 1.0))]), share=False)
    first, second, third = tree.nodes
    for nodes, says in [
        ((second, first, third), "has the parent 0, which is not above it"),
        (
            (first, structs.replace(second, parent=-1), third),
            r"turn t2: its node is below '', its parent is 't1'",
        ),
        ((first, second, second), "turn t2: it is in the tree more than once"),
        ((structs.replace(first, rollout_id="g-7"),), "no rollout of group g"),
    ]:
        with pytest.raises(ValueError, match=says):
            TreeBatch(nodes=nodes, rollouts=tree.rollouts)


def test_round_trip_keeps_the_constraint_of_a_turn() -> None:
    result = branching("r", 1.0)
    constraint = Constraint(grammar="{}", stop_ids=(2,))
    turns = (structs.replace(result.turns[0], constraint=constraint), *result.turns[1:])
    rows = trajectories.linear(TurnTree(turns)).trajectories
    constrained = structs.replace(result, turns=turns, trajectories=rows)
    (restored,) = to_groups(from_groups([group(constrained)]))[0].finished
    assert [turn.constraint for turn in restored.turns] == [turn.constraint for turn in turns]
    assert restored.trajectories == rows
