"""Forest to trajectories: every sampled token trained exactly once, or excluded with a reason."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afield import trajectories
from afield.turn_tree import TurnTree
from afield.types import TurnStatus
from support.strategies import forests


def owned_tokens(assembled: trajectories.Assembled) -> Counter[tuple[str, int]]:
    """(turn, offset within the turn) of every token in the loss."""
    counted: Counter[tuple[str, int]] = Counter()
    for row in assembled.trajectories:
        for turn in row.turns:
            counted.update((turn.id, i) for i in range(turn.end - turn.start))
    return counted


@given(forests(), st.sampled_from([trajectories.linear, trajectories.per_turn]))
def test_every_sampled_token_is_trained_exactly_once_or_excluded(forest: TurnTree, form) -> None:
    assembled = form(forest)
    trained = owned_tokens(assembled)
    assert all(count == 1 for count in trained.values())
    excluded = {e.turn: e for e in assembled.excluded}
    for turn in forest.turns:
        here = sum(1 for turn_id, _ in trained if turn_id == turn.id)
        if turn.status is TurnStatus.COMMITTED:
            assert here == len(turn.token_ids)
            assert turn.id not in excluded
        else:
            assert here == 0
            assert excluded[turn.id].tokens == len(turn.token_ids)
            assert excluded[turn.id].reason == "aborted"


@given(forests())
def test_a_row_is_what_the_engine_saw_and_sampled(forest: TurnTree) -> None:
    for row in trajectories.linear(forest).trajectories:
        for owned in row.turns:
            turn = forest[owned.id]
            ids = list(forest.ids(owned.id))
            assert list(row.token_ids[: owned.end]) == ids
            assert row.token_ids[owned.start : owned.end] == turn.token_ids
            assert row.logprobs[owned.start : owned.end] == turn.logprobs


@given(forests())
def test_masked_tokens_carry_no_logprob_and_owned_ones_do(forest: TurnTree) -> None:
    for row in trajectories.linear(forest).trajectories:
        for mask, logprob in zip(row.loss_mask, row.logprobs, strict=True):
            assert (mask == 1) == (logprob != 0.0)


@given(forests())
def test_versions_of_a_row_are_those_of_its_turns(forest: TurnTree) -> None:
    for row in trajectories.linear(forest).trajectories:
        at = {i: (span.low, span.high) for span in row.versions for i in range(span.start, span.end)}
        for owned in row.turns:
            for span in forest[owned.id].versions:
                for i in range(span.start, span.end):
                    assert at[owned.start + i] == (span.low, span.high)


@given(forests(), st.sampled_from([trajectories.linear, trajectories.per_turn]))
def test_the_weights_of_a_rollout_add_up_to_one(forest: TurnTree, form) -> None:
    rows = form(forest).trajectories
    if rows:
        assert sum(row.weight for row in rows) == pytest.approx(1.0)


@given(forests())
def test_the_tree_holds_the_same_tokens_as_the_rows(forest: TurnTree) -> None:
    nodes = {node["id"]: node for node in trajectories.tree(forest)}
    for turn in forest.turns:
        path: list[int] = []
        for step in forest.path(turn.id):
            path += nodes[step.id]["token_ids"]
        assert tuple(path) == forest.ids(turn.id)
    owned = sum(sum(node["loss_mask"]) for node in nodes.values())
    assert owned == sum(sum(row.loss_mask) for row in trajectories.linear(forest).trajectories)


@given(forests(), st.data())
def test_withheld_turns_are_excluded_with_their_reason(forest: TurnTree, data: st.DataObject) -> None:
    committed = [t.id for t in forest.turns if t.status is TurnStatus.COMMITTED]
    withheld = data.draw(st.lists(st.sampled_from(committed or ["none"]), unique=True))
    assembled = trajectories.linear(forest, dict.fromkeys(withheld, "undelivered"))
    assert not {turn for turn, _ in owned_tokens(assembled)} & set(withheld)
    reasons = {e.turn: e.reason for e in assembled.excluded}
    assert all(reasons[turn] == "undelivered" for turn in withheld if turn in committed)
