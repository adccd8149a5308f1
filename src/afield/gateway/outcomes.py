"""Outcomes of attempts: parsing, rewards, and the record for the transport (pure).

Two shapes are accepted: a short body, and the whole record that the SDK delivers. A key without the
reward scope only reports the end of the work; the record is then due with the verdict. The record depends
on the session's row alone, so that every process builds the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct, structs

from afield import wire
from afield.errors import WireError
from afield.gateway.api_error import ApiError, bad_request, conflict
from afield.gateway.http import MAX_BODY, json_body
from afield.gateway.store import FailedVerdict, SessionRow
from afield.interfaces import SessionSpec
from afield.turn_tree import call_number, listed, turn_named
from afield.types import Failure, FailureKind, Outcome, Reason
from afield.wire import OutcomeRecord

NEEDED = ("input_id", "rollout_id", "attempt")


class GatewayLimits(Struct, frozen=True, kw_only=True):
    """Limits for requests, sessions and submissions."""

    request_bytes: int = MAX_BODY
    """Bytes of one decompressed request (default: 64 MiB)."""
    session_bytes: int = 4 * MAX_BODY
    """Decompressed bytes of all running requests of a session (default: 256 MiB)."""
    submission_bytes: int = 16 * 1024 * 1024
    """Bytes of one outcome or reward (default: 16 MiB)."""
    rewards: int = 10_000
    """Rewards per session (default: 10,000)."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 1:
                raise ValueError(f"limit {name} = {getattr(self, name)} must be at least 1")


DEFAULT_LIMITS = GatewayLimits()


class OutcomeBody(Struct):
    """Short form of an outcome or a verdict."""

    reward: Any = None
    """Reward of the attempt; None for none."""
    rewards: dict[str, float] = {}
    """Rewards by name."""
    turn_rewards: dict[str, float] = {}
    """Rewards by turn."""
    named_turn_rewards: dict[str, dict[str, float]] = {}
    """Rewards by name, then by turn."""
    metrics: dict[str, float] = {}
    """Metrics by name."""
    status: str = ""
    """Older name of `stop_reason`."""
    stop_reason: str = ""
    """Reason why the agent stopped."""
    artifacts: dict[str, Any] = {}
    """JSON values for the verifier and the record."""


class _Shape(Struct):
    """Probe of a body: the whole record has the field `outcome`."""

    outcome: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """Outcome of the whole record; unset in the short form."""


class OutcomeReport(Struct, frozen=True, kw_only=True):
    """A parsed outcome of either shape."""

    canonical: bytes
    """Canonical encoding, by which repetitions are recognised."""
    reward: Any
    """Reward of the attempt; None for none."""
    rewards: dict[str, float]
    """Rewards by name."""
    turn_rewards: dict[str, float]
    """Rewards by turn."""
    named_turn_rewards: dict[str, dict[str, float]]
    """Rewards by name, then by turn."""
    metrics: dict[str, float]
    """Metrics by name."""
    stop_reason: str
    """Reason why the agent stopped."""
    failure: Failure | None = None
    """Failure of the attempt; None for success."""
    record: OutcomeRecord | None = None
    """Whole record, if that was sent; None for the short form."""
    artifacts: dict[str, Any] = {}
    """JSON values for the verifier and the record."""

    @property
    def entries(self) -> list[dict[str, Any]]:
        by_name = [{"reward": value, "name": name} for name, value in self.rewards.items()]
        by_turn = [{"reward": value, "turn": turn} for turn, value in self.turn_rewards.items()]
        by_name_and_turn = [
            {"reward": value, "name": name, "turn": turn}
            for name, turns in self.named_turn_rewards.items()
            for turn, value in turns.items()
        ]
        return (
            by_name
            + by_turn
            + by_name_and_turn
            + ([{"reward": self.reward}] if self.reward is not None else [])
        )

    @property
    def any_reward(self) -> Any:
        """Returns a reward of any kind; None if there is none."""
        several = self.rewards or self.turn_rewards or self.named_turn_rewards
        return self.reward if self.reward is not None else several or None


def read(body: bytes, row: SessionRow, *, verdict: bool) -> OutcomeReport:
    """Parses an outcome. Raises 400 if it is malformed or addresses another attempt.

    A verdict names the rollout only: verifiers are counted separately from attempts.
    """
    if json_body(body, _Shape).outcome is msgspec.UNSET:
        outcome_body = json_body(body, OutcomeBody)
        try:
            return _short(outcome_body, wire.encode(outcome_body))
        except WireError as error:
            raise bad_request(f"the outcome {error}") from error
    try:
        record = wire.decode(body, OutcomeRecord, "the outcome")
        statement = _whole(record, wire.encode(record))
    except WireError as error:
        hint = 'send the fields of afield.wire.OutcomeRecord, or a body such as {"reward": 1.0}'
        raise bad_request(str(error), hint) from error
    _check_addressee(record, row, verdict)
    return statement


def _read_again(stored: bytes | None) -> OutcomeReport | None:
    if stored is None:
        return None
    if json_body(stored, _Shape).outcome is msgspec.UNSET:
        return _short(json_body(stored, OutcomeBody), stored)
    return _whole(wire.decode(stored, OutcomeRecord, "a stored outcome"), stored)


def _short(body: OutcomeBody, canonical: bytes) -> OutcomeReport:
    return OutcomeReport(
        canonical=canonical,
        reward=body.reward,
        rewards=body.rewards,
        turn_rewards=body.turn_rewards,
        named_turn_rewards=body.named_turn_rewards,
        metrics=body.metrics,
        stop_reason=body.stop_reason or body.status,
        artifacts=body.artifacts,
    )


def _whole(record: OutcomeRecord, canonical: bytes) -> OutcomeReport:
    outcome = record.outcome
    return OutcomeReport(
        canonical=canonical,
        reward=outcome.reward,
        rewards=outcome.rewards,
        turn_rewards=outcome.turn_rewards,
        named_turn_rewards=outcome.named_turn_rewards,
        metrics=outcome.metrics,
        stop_reason=outcome.stop_reason,
        failure=outcome.failure,
        record=record,
    )


def _check_addressee(record: OutcomeRecord, row: SessionRow, verdict: bool) -> None:
    spec, outcome = row.spec, record.outcome
    ids = {
        "exp_id": (record.exp_id, spec.exp_id),
        "input_id": (record.input_id, spec.input_id),
        "group_id": (record.group_id, spec.group_id),
        "outcome.rollout_id": (outcome.rollout_id, spec.rollout_id),
    }
    if not verdict:
        ids |= {
            "session_id": (record.session_id, row.id),
            "outcome.attempt": (outcome.attempt, spec.attempt),
        }
    for name, (actual, expected) in ids.items():
        if expected is not None and actual != expected:
            message = f"{name} is {actual!r}, but session {row.id} has {expected!r}"
            raise bad_request(message, "deliver each outcome with the key of its own session")


# --- rewards ---


class TurnNames(Struct, frozen=True, kw_only=True):
    """Turns that a reward may name."""

    ids: dict[str, None]
    """All turn ids in order."""
    answered: tuple[str, ...]
    """Ids of committed turns in order."""
    running: int = 0
    """Number of running calls."""

    def named(self, name: str) -> str | None:
        return turn_named(name, self.ids, self.answered)

    def check(self, session_id: str, name: str) -> None:
        """Raises 400 unless the session has the turn. The number of a running call is accepted."""
        number = call_number(name)
        still_running = number is not None and number < len(self.answered) + self.running
        if not still_running and self.named(name) is None:
            has = f"it has: {listed(list(self.ids))}"
            numbered = f"; calls are numbered from 0 to {len(self.answered) - 1}" if self.answered else ""
            raise bad_request(
                f"session {session_id} has no turn {name!r}; {has}{numbered}",
                "name a turn by its id, by the id of the response to it, or by its number",
            )


def with_rewards(
    row: SessionRow,
    entries: Sequence[dict[str, Any]],
    turns: TurnNames,
    limits: GatewayLimits = DEFAULT_LIMITS,
) -> tuple[dict[str, Any], ...]:
    """Adds rewards to those of the row. Idempotent; raises 409 for another value."""

    def about(reward: dict[str, Any]) -> tuple[str | None, str | None]:
        turn = reward.get("turn")
        return reward.get("name"), turn and (turns.named(turn) or turn)

    existing = {about(old): old["reward"] for old in row.rewards}
    new_rewards: list[dict[str, Any]] = []
    for entry in entries:
        value = entry["reward"]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise bad_request(f"reward {value!r} is not a finite number")
        subject = {key: entry[key] for key in ("name", "turn") if entry.get(key) is not None}
        new = {"reward": float(value), **subject}
        if about(new) not in existing:
            new_rewards.append(new)
            _check_new(row, new, len(row.rewards) + len(new_rewards), turns, limits)
        elif existing[about(new)] != new["reward"]:
            raise conflict(f"session {row.id} already has reward {existing[about(new)]}, not {new['reward']}")
        existing[about(new)] = new["reward"]
    return (*row.rewards, *new_rewards)


def _check_new(
    row: SessionRow, new: dict[str, Any], count: int, turns: TurnNames, limits: GatewayLimits
) -> None:
    if row.phase == "finalized":
        raise conflict(f"session {row.id} is finalized", "rewards come before finalize")
    if count > limits.rewards:
        message = f"session {row.id} has {limits.rewards} rewards, and takes no more"
        hint = "give fewer, or start the gateway with --max-rewards, or a run with --set max_rewards=N"
        raise ApiError(429, "too_many_rewards", message, hint)
    if "turn" in new:
        turns.check(row.id, new["turn"])


def submission(row: SessionRow) -> wire.Submission | None:
    """Returns the agent's submission for its verifier; None if there is none yet."""
    statement = _read_again(row.outcome)
    if statement is None or _failure(row, statement, None):
        return None
    artifacts = statement.record.extra if statement.record else statement.artifacts
    return wire.Submission(metrics=statement.metrics, stop_reason=statement.stop_reason, artifacts=artifacts)


def failed_verdict(row: SessionRow, statement: OutcomeReport) -> FailedVerdict | None:
    """Returns a failed verdict that another one may replace; None if the verdict counts.

    A failure of the policy counts.
    """
    digest = hashlib.blake2b(statement.canonical, digest_size=16).hexdigest()
    if recorded := next((failed for failed in row.failed_verdicts if failed.digest == digest), None):
        return recorded
    failure = statement.failure
    if failure is None and statement.reward is None and main_reward(row) is None:
        failure = UNREWARDED
    last = len(row.failed_verdicts) + 1 >= row.spec.verdicts
    if failure is None or failure.kind is FailureKind.POLICY or last:
        return None
    return FailedVerdict(digest, failure)


def graded(row: SessionRow) -> bool:
    return row.verdict is not None or main_reward(row) is not None


# --- records ---


def check_address(spec: SessionSpec, session_id: str) -> None:
    """Raises 400 unless a session of an experiment has all ids of its outcome."""
    if spec.exp_id is None:
        return
    missing = [name for name in NEEDED if getattr(spec, name) is None]
    if missing:
        raise bad_request(
            f"a session with exp_id needs {', '.join(missing)}", "its outcome is filed under it"
        )
    expected = f"{spec.rollout_id}.{spec.attempt}"
    if session_id != expected:
        raise bad_request(f"session id {session_id!r} should be {expected!r}: rollout_id and attempt say so")


def addressed(row: SessionRow) -> bool:
    spec = row.spec
    needed = (spec.exp_id, *(getattr(spec, name) for name in NEEDED))
    return None not in needed and row.id == f"{spec.rollout_id}.{spec.attempt}"


def judged(spec: SessionSpec) -> bool:
    """Returns whether a verifier gives the rewards, and not the agent's key."""
    return spec.reward_from == "verifier" or "reward" not in spec.scope


def due(row: SessionRow) -> bool:
    """Returns whether the record is complete."""
    if not addressed(row):
        return False
    rewarded = main_reward(row) is not None
    if row.verdict is not None:
        return True
    if row.outcome is None:
        return row.phase == "completed" and (rewarded or row.spec.reward_from == "caller")
    return rewarded or not judged(row.spec) or _failure(row, _read_again(row.outcome), None) is not None


def late(
    row: SessionRow, statement: OutcomeReport, turns: TurnNames, limits: GatewayLimits
) -> SessionRow | None:
    """Returns the row with an outcome that came after finalize; None if it did not or is not complete."""
    if row.phase != "finalized" or row.outcome is not None:
        return None
    rewards = with_rewards(structs.replace(row, phase="completed"), statement.entries, turns, limits)
    completed_row = structs.replace(row, outcome=statement.canonical, rewards=rewards)
    return completed_row if due(completed_row) else None


def record_of(row: SessionRow) -> OutcomeRecord:
    """Builds the record of a row that is `due`."""
    spec = row.spec
    agent, verifier = _read_again(row.outcome), _read_again(row.verdict)
    statements = [statement for statement in (agent, verifier) if statement is not None]
    metrics = dict(row.metrics)
    for statement in statements:
        metrics |= statement.metrics
    assert spec.exp_id is not None and spec.input_id is not None
    assert spec.rollout_id is not None and spec.attempt is not None
    reward, failure = main_reward(row), _failure(row, agent, verifier)
    pending = reward is None and failure is None and spec.reward_from == "caller"
    if reward is None and failure is None and not pending:
        failure = UNREWARDED
    outcome = Outcome(
        rollout_id=spec.rollout_id,
        attempt=spec.attempt,
        # A failure of the policy may have a reward; other failures have none.
        reward=None if failure and failure.kind is not FailureKind.POLICY else reward,
        reward_pending=pending,
        rewards={e["name"]: e["reward"] for e in row.rewards if "name" in e and "turn" not in e},
        turn_rewards={e["turn"]: e["reward"] for e in row.rewards if "turn" in e and "name" not in e},
        named_turn_rewards=_of_both(row),
        metrics=metrics,
        failure=failure,
        stop_reason=next((s.stop_reason for s in statements if s.stop_reason), ""),
    )
    record = next((s.record for s in statements if s.record is not None), None)
    if record is not None:
        return structs.replace(record, session_id=row.id, outcome=outcome)
    return OutcomeRecord(
        exp_id=spec.exp_id,
        input_id=spec.input_id,
        group_id=spec.group_id or spec.rollout_id,
        session_id=row.id,
        outcome=outcome,
        extra={name: value for s in statements for name, value in s.artifacts.items()},
        started=row.created,
        ended=row.outcome_at,
    )


def _of_both(row: SessionRow) -> dict[str, dict[str, float]]:
    """Returns rewards by name, then by turn."""
    by_name: dict[str, dict[str, float]] = {}
    for entry in row.rewards:
        if "name" in entry and "turn" in entry:
            by_name.setdefault(entry["name"], {})[entry["turn"]] = entry["reward"]
    return by_name


def main_reward(row: SessionRow) -> float | None:
    """Returns the reward of the whole attempt."""
    return next((e["reward"] for e in row.rewards if "name" not in e and "turn" not in e), None)


def _failure(row: SessionRow, agent: OutcomeReport | None, verifier: OutcomeReport | None) -> Failure | None:
    if verifier and verifier.failure:
        return verifier.failure
    failure = agent.failure if agent else None
    if failure and judged(row.spec) and (failure.kind, failure.reason) == NO_REWARD:
        return None  # the verifier gives the reward
    return failure


NO_REWARD = (FailureKind.VERIFIER, Reason.REWARD)
UNREWARDED = Failure(*NO_REWARD, "the session ended without a reward")
