"""Failure kinds of Harbor trials, by the type of their exception."""

from __future__ import annotations

from afield.errors import (
    InfrastructureFailure,
    PolicyFailure,
    RolloutFailure,
    TaskFailure,
    VerifierFailure,
)
from afield.types import Reason

Kind = tuple[type[RolloutFailure], Reason]
CODES: dict[str, Kind] = {
    "budget_exhausted": (PolicyFailure, Reason.BUDGET),
    "context_length_exceeded": (PolicyFailure, Reason.CONTEXT),
}
"""Error codes of the gateway, which clients repeat in their messages."""
TYPES: dict[str, Kind] = {
    "AgentTimeoutError": (PolicyFailure, Reason.TIMEOUT),
    "ContextLengthExceededError": (PolicyFailure, Reason.CONTEXT),
    "ContextWindowExceededError": (PolicyFailure, Reason.CONTEXT),
    "OutputLengthExceededError": (PolicyFailure, Reason.BUDGET),
    "PolicyFailure": (PolicyFailure, Reason.RAISED),
    "AddTestsDirError": (VerifierFailure, Reason.UPLOAD),
    "DownloadVerifierDirError": (VerifierFailure, Reason.UPLOAD),
    "RewardFileEmptyError": (VerifierFailure, Reason.REWARD),
    "RewardFileNotFoundError": (VerifierFailure, Reason.REWARD),
    "VerifierOutputParseError": (VerifierFailure, Reason.REWARD),
    "VerifierTimeoutError": (VerifierFailure, Reason.TIMEOUT),
    "VerifierFailure": (VerifierFailure, Reason.RAISED),
    "SandboxBuildFailedError": (TaskFailure, Reason.LAUNCH),
    "AgentSetupTimeoutError": (InfrastructureFailure, Reason.LAUNCH),
    "EnvironmentStartTimeoutError": (InfrastructureFailure, Reason.LAUNCH),
    "HealthcheckError": (InfrastructureFailure, Reason.LAUNCH),
    "APIConnectionError": (InfrastructureFailure, Reason.ENGINE),
    "APIError": (InfrastructureFailure, Reason.ENGINE),
    "InternalServerError": (InfrastructureFailure, Reason.ENGINE),
    "RateLimitError": (InfrastructureFailure, Reason.ENGINE),
    "ServiceUnavailableError": (InfrastructureFailure, Reason.ENGINE),
    "Timeout": (InfrastructureFailure, Reason.ENGINE),
    "InfrastructureFailure": (InfrastructureFailure, Reason.RAISED),
    "CancelledError": (InfrastructureFailure, Reason.CANCELLED),
}
"""Exceptions of Harbor, LiteLLM and afield. Others are failures of the task."""


def trial_failure(exception_type: str, message: str) -> RolloutFailure:
    """Failure of a trial that ended with an exception."""
    kind = next((kind for code, kind in CODES.items() if code in message), None)
    failure, reason = kind or TYPES.get(exception_type, (TaskFailure, Reason.RAISED))
    return failure(f"Harbor trial: {exception_type}: {message}", reason)
