"""Random forests and groups for property tests."""

from hypothesis import strategies as st

from afield.turn_tree import TurnTree
from afield.types import (
    Failure,
    FailureKind,
    FinishReason,
    Group,
    Outcome,
    Reason,
    Rollout,
    RolloutResult,
    Sampling,
    Split,
    Task,
    Turn,
    TurnStatus,
    VersionSpan,
)
from support.random_groups import Maker

ids = st.lists(st.integers(0, 500), min_size=1, max_size=5).map(tuple)


@st.composite
def spans(draw: st.DrawFn, length: int) -> tuple[VersionSpan, ...]:
    made = []
    start = 0
    while start < length:
        end = draw(st.integers(start + 1, length))
        low = draw(st.integers(0, 9))
        made.append(VersionSpan(start, end, low, low + draw(st.integers(0, 2))))
        start = end
    return tuple(made)


@st.composite
def forests(draw: st.DrawFn, max_turns: int = 12) -> TurnTree:
    """Several roots, branches, empty and aborted turns."""
    forest = TurnTree()
    for n in range(draw(st.integers(1, max_turns))):
        committed = [t for t in forest.turns if t.status is TurnStatus.COMMITTED]
        parent = draw(st.sampled_from([None, *committed]))
        aborted = draw(st.booleans()) and draw(st.booleans())
        sampled = draw(st.lists(st.integers(0, 500), min_size=0 if aborted else 1, max_size=5).map(tuple))
        logprobs = tuple(draw(st.floats(-20, -0.001)) for _ in sampled)
        forest.add(
            Turn(
                id=f"t{n}",
                root=parent.root if parent else f"root{draw(st.integers(0, 2))}",
                parent=parent.id if parent else None,
                delta_ids=draw(ids),
                token_ids=sampled,
                logprobs=logprobs,
                versions=draw(spans(len(sampled))),
                finish_reason=FinishReason.ABORTED if aborted else FinishReason.STOP,
                status=TurnStatus.ABORTED if aborted else TurnStatus.COMMITTED,
                sampling=Sampling(),
                digest=f"d{n}",
            )
        )
    return forest


def outcome(rollout_id: str, reward: float | None, kind: FailureKind | None = None) -> Outcome:
    failure = Failure(kind, Reason.RAISED, "it broke") if kind else None
    return Outcome(rollout_id=rollout_id, attempt=1, reward=reward, failure=failure)


def group(*outcomes: tuple[float | None, FailureKind | None]) -> Group:
    finished = []
    for k, (reward, kind) in enumerate(outcomes):
        rollout = Rollout(id=f"g-r{k}", exp_id="exp", group_id="g", task=Task("t", {}))
        finished.append(RolloutResult(rollout=rollout, outcome=outcome(rollout.id, reward, kind)))
    return Group(id="g", task_id="t", epoch=0, split=Split.TRAIN, finished=tuple(finished))


def groups(kept: bool | None = None) -> st.SearchStrategy[list[Group]]:
    """With branches, failures and baselines; `kept` says whether rollouts have their turns, None is some."""
    return st.integers(0, 2**32).map(lambda seed: Maker(seed, kept).groups())
