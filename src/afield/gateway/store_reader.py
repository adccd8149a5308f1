"""Gateway store reader: closed sessions of a store as rollouts.

A gateway without a run keeps its sessions only here. Reading does not disturb a gateway that runs.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Container, Iterator
from contextlib import closing
from pathlib import Path

import msgspec

from afield import trajectories
from afield.errors import UsageError
from afield.gateway import outcomes
from afield.gateway.sessions import Session
from afield.gateway.store import SessionRow, TurnRow
from afield.types import (
    Failure,
    FailureKind,
    Outcome,
    Reason,
    Rollout,
    RolloutResult,
    RolloutTimes,
    Task,
)
from afield.utils import sqlite


def closed_sessions(path: Path, skip: Container[str] = ()) -> Iterator[RolloutResult]:
    """Sessions of the store that take no more calls, oldest first, without those in `known`."""
    try:
        with closing(sqlite.connect_read_only(path)) as connection:
            sessions = connection.execute(
                "SELECT id, body FROM sessions WHERE phase != 'open' ORDER BY created, id"
            ).fetchall()
            for session_id, body in sessions:
                if session_id not in skip:
                    turns = connection.execute(
                        "SELECT body FROM turns WHERE session_id=? ORDER BY seq, n", (session_id,)
                    ).fetchall()
                    yield result_of(
                        msgspec.msgpack.decode(body, type=SessionRow),
                        [msgspec.msgpack.decode(turn, type=TurnRow) for (turn,) in turns],
                    )
    except (sqlite3.Error, msgspec.MsgspecError) as error:
        raise UsageError(f"cannot read the sessions of {path}: {error}") from error


def result_of(row: SessionRow, turns: list[TurnRow]) -> RolloutResult:
    """A session as a rollout of one attempt; its id is that of the session."""
    session = Session(row, turns)
    assembled = trajectories.linear(session.tree, session.excluded_turns())
    spec = row.spec
    first = turns[0].turn.messages if turns else ()
    question = next((message.content for message in first if message.role == "user"), "")
    ended = max([row.created, row.outcome_at, *(t.turn.ended or t.turn.started for t in turns)])
    return RolloutResult(
        rollout=Rollout(
            id=row.id,
            exp_id=spec.exp_id or "gateway",
            group_id=spec.group_id or row.id,
            task=Task(spec.input_id or row.id, {"question": question}),
            split=spec.split,
            sampling=spec.sampling,
        ),
        outcome=outcome_of(row),
        trajectories=assembled.trajectories,
        excluded=assembled.excluded,
        turns=tuple(turn.turn for turn in turns),
        refused=session.refused,
        times=RolloutTimes(
            submitted=row.created,
            started=row.created,
            attempted=row.created,
            launched=row.created,
            outcome=ended,
            ended=ended,
        ),
    )


def outcome_of(row: SessionRow) -> Outcome:
    """Reward of a session; one that was aborted, or has no reward, is a failure."""
    reward = outcomes.main_reward(row)
    failure = None
    pending = reward is None and row.spec.reward_from == "caller" and not row.reason
    if reward is None and not pending:
        failure = outcomes.UNREWARDED
        if row.reason:
            failure = Failure(FailureKind.INFRASTRUCTURE, Reason.CANCELLED, row.reason)
    return Outcome(
        rollout_id=row.id,
        attempt=1,
        reward=reward,
        reward_pending=pending,
        rewards={e["name"]: e["reward"] for e in row.rewards if "name" in e and "turn" not in e},
        metrics=row.metrics,
        failure=failure,
    )
