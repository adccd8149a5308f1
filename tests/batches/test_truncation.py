"""Truncated replies are masked as if they had been excluded; long ones are penalised as DAPO does."""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from afield.advantages import compute_advantages
from afield.batches.truncation import mask_truncated, penalise_overlong, without_turns
from afield.runs.exclusions import ExclusionReason
from afield.trajectories import linear
from afield.turn_tree import TurnTree
from afield.types import FinishReason, Group, RolloutResult
from support.training_groups import finished, forest, group


def cut(tree: TurnTree, *ids: str) -> TurnTree:
    """The same conversation, with these replies cut off."""
    made = TurnTree()
    for turn in tree.turns:
        reason = FinishReason.LENGTH if turn.id in ids else FinishReason.STOP
        made.add(structs.replace(turn, finish_reason=reason))
    return made


def branched(seed: int) -> TurnTree:
    """Three turns, and a fourth that branches from the first."""
    tree = forest(seed, turns=3)
    extra = structs.replace(forest(seed + 50, turns=1).turns[0], id="t3", parent="t0", digest="d3")
    tree.add(extra)
    return tree


def of(name: str, reward: float, tree: TurnTree) -> RolloutResult:
    rows = linear(tree).trajectories
    return structs.replace(finished(name, reward, rows), turns=tuple(tree.turns))


def owned(rows) -> dict[str, tuple]:
    """What is trained, however it is spread over rows: context, tokens and weight of each turn."""
    return {
        turn.id: (
            row.token_ids[: turn.end],
            row.logprobs[turn.start : turn.end],
            row.weight / row.owned,
            [s for s in row.versions if turn.start <= s.start < turn.end],
        )
        for row in rows
        for turn in row.turns
    }


@pytest.mark.parametrize("seed", range(20))
def test_masked_turns_leave_what_assembly_without_them_gives(seed: int) -> None:
    rng = random.Random(seed)
    tree = branched(seed)
    masked = {turn.id for turn in tree.turns if rng.random() < 0.4}
    rows = without_turns(linear(tree).trajectories, masked)
    expected = linear(tree, dict.fromkeys(masked, str(ExclusionReason.TRUNCATED))).trajectories
    assert owned(rows) == owned(expected)
    assert sum(row.weight for row in rows) == pytest.approx(1.0 if rows else 0.0)


def masked_group(mode) -> tuple[Group, Group]:
    plain = group(
        *(of(str(n), float(n), cut(forest(n, turns=3), *(["t2"] if n == 1 else []))) for n in range(3))
    )
    return plain, mask_truncated([plain], mode)[0]


def test_mode_turn_masks_the_reply_and_mode_rollout_its_whole_rollout() -> None:
    plain, turn = masked_group("turn")
    _, rollout = masked_group("rollout")
    assert [f.trajectories for f in turn.finished[::2]] == [f.trajectories for f in plain.finished[::2]]
    assert [t.id for row in turn.finished[1].trajectories for t in row.turns] == ["t0", "t1"]
    assert [e.turn for e in turn.finished[1].excluded] == ["t2"]
    assert rollout.finished[1].trajectories == ()
    assert [e.turn for e in rollout.finished[1].excluded] == ["t0", "t1", "t2"]
    # The reward stays in the baseline.
    assert compute_advantages([turn]) == compute_advantages([rollout]) == compute_advantages([plain])
    assert masked_group("off")[1] == plain


def dapo(length: int, limit: int, buffer: int, penalty: float) -> float:
    """Soft overlong punishment, equation 13 of the DAPO paper, scaled by a factor."""
    if length <= limit - buffer:
        return 0.0
    if length <= limit:
        return penalty * ((limit - buffer) - length) / buffer
    return -penalty


@pytest.mark.parametrize("length", [1, 6, 7, 8, 9, 10, 11])
def test_the_penalty_is_dapos_for_the_longest_reply(length: int) -> None:
    turn = forest(1, turns=1).turns[0]
    ids = tuple(range(length))
    spans = (structs.replace(turn.versions[0], end=length),)
    tree = TurnTree([structs.replace(turn, token_ids=ids, logprobs=(-1.0,) * length, versions=spans)])
    plain = group(of("0", 0.5, tree), finished("1", None, ()))
    (shaped,) = penalise_overlong([plain], limit=10, buffer=4, penalty=0.8)
    assert shaped.finished[0].outcome.reward == pytest.approx(0.5 + dapo(length, 10, 4, 0.8))
    assert shaped.finished[1] == plain.finished[1]
    # A reply that is masked is as long as before.
    cut_off = group(of("0", 0.5, cut(tree, "t0")))
    (again,) = penalise_overlong(mask_truncated([cut_off], "turn"), limit=10, buffer=4, penalty=0.8)
    assert again.finished[0].outcome.reward == shaped.finished[0].outcome.reward
