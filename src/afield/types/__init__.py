"""The data nouns of afield: `policy`, `turns` and `rollouts`, in the order in which to read them.

Everything that moves between parts is one of these: frozen, checked when it is built, free of I/O.
A value that exists is valid; code that receives one never checks it again. Reading and writing them
as bytes is `wire`'s business, and what is done with them belongs to the parts behind `seams`.
"""

from __future__ import annotations

from afield.types.policy import Budget, Policy, Sampling
from afield.types.rollouts import (
    ID_PATTERN,
    Attempt,
    Failure,
    FailureKind,
    Finished,
    Group,
    Outcome,
    Reason,
    Rollout,
    Split,
    Task,
    check_id,
    too_few_rewards,
)
from afield.types.turns import (
    Exclusion,
    FinishReason,
    ImageRef,
    Link,
    Message,
    Role,
    ToolCall,
    Trajectory,
    Turn,
    TurnRange,
    TurnStatus,
    VersionSpan,
    check_cover,
)

__all__ = [
    "ID_PATTERN",
    "Attempt",
    "Budget",
    "Exclusion",
    "Failure",
    "FailureKind",
    "FinishReason",
    "Finished",
    "Group",
    "ImageRef",
    "Link",
    "Message",
    "Outcome",
    "Policy",
    "Reason",
    "Role",
    "Rollout",
    "Sampling",
    "Split",
    "Task",
    "ToolCall",
    "Trajectory",
    "Turn",
    "TurnRange",
    "TurnStatus",
    "VersionSpan",
    "check_cover",
    "check_id",
    "too_few_rewards",
]
