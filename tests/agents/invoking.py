"""Payloads as a collector builds them."""

from typing import Any

from afield import wire
from afield.types import Attempt, Outcome, Rollout, Task
from afield.wire import Invocation, OutcomeRecord

EXP = "exp"


def invocation(rollout_id: str = "r", n: int = 1, *, input_id: str = "t", **where: Any) -> Invocation:
    rollout = Rollout(id=rollout_id, exp_id=EXP, group_id="g", task=Task(input_id, {}))
    base = f"http://127.0.0.1:9/s/{rollout_id}.{n}"
    where = {"outcome_url": "http://127.0.0.1:9/outcome", "base_url": base, **where}
    return wire.invocation_for(
        rollout,
        Attempt(rollout_id, n),
        api_key="secret-key",
        model_id="policy",
        **where,
    )


def payload(row: dict[str, Any], invocation: Invocation) -> dict[str, Any]:
    return wire.build_payload(Task(invocation.input_id, row), invocation)


def record(invocation: Invocation, reward: float = 1.0, **rest: Any) -> OutcomeRecord:
    outcome = Outcome(rollout_id=invocation.rollout_id, attempt=invocation.attempt, reward=reward)
    return OutcomeRecord.of(invocation, outcome, **rest)
