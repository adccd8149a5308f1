"""Results of agents built with `agentcore-rl-toolkit`, which put one object and nothing else.

The object is what the agent's function returned, with `status_code`, `stop_reason` and an echo of the
payload. Of a list of rewards the last one counts, as the toolkit itself reads it; several named ones
need a `reward` beside them. The session's key, which the echo holds, is not kept.
"""

from __future__ import annotations

import json
from typing import Any

from afield import wire
from afield.errors import RolloutFailure, TaskFailure
from afield.interfaces.transport import PendingAttempt
from afield.sdk.classify import storable
from afield.sdk.result import Rewards, read_result
from afield.types import Attempt, Failure, Outcome
from afield.wire import OutcomeRecord

OWN = frozenset({"status_code", "traceback", "input_id", "s3_bucket", "result_key", "payload"})
OK = 200


def read(data: bytes, waiting: PendingAttempt) -> OutcomeRecord | None:
    """None when the object is not of the toolkit's making."""
    try:
        result = json.loads(data)
    except ValueError:
        return None
    if not isinstance(result, dict) or "status_code" not in result or "outcome" in result:
        return None
    payload = result.get("payload")
    echo = {k: v for k, v in payload.items() if k != wire.ROLLOUT_FIELD} if isinstance(payload, dict) else {}
    outcome, extra = _outcome(result, waiting.attempt)
    return OutcomeRecord(
        exp_id=waiting.rollout.exp_id,
        input_id=waiting.rollout.task.id,
        group_id=waiting.rollout.group_id,
        session_id=waiting.attempt.session_id,
        outcome=outcome,
        payload=echo,
        extra=extra,
    )


def _outcome(result: dict[str, Any], attempt: Attempt) -> tuple[Outcome, dict[str, Any]]:
    try:
        if result["status_code"] != OK:
            raise TaskFailure(f"the agent answered {result['status_code']}: {result.get('stop_reason', '')}")
        returned = {key: value for key, value in result.items() if key not in OWN}
        read = read_result(returned, _last if isinstance(result.get("rewards"), list) else None)
    except RolloutFailure as error:
        failure = error.failure
        told = str(result.get("traceback") or failure.traceback)
        failure = storable(Failure(failure.kind, failure.reason, failure.message, told))
        return wire.failed(attempt.rollout_id, attempt.n, failure), {}
    outcome = Outcome(
        rollout_id=attempt.rollout_id,
        attempt=attempt.n,
        reward=read.reward,
        rewards=read.rewards,
        turn_rewards=read.turn_rewards,
        named_turn_rewards=read.named_turn_rewards,
        metrics=read.metrics,
        stop_reason=read.stop_reason,
    )
    return outcome, read.extra


def _last(rewards: Rewards) -> float:
    return list(rewards.values())[-1]
