"""afield inside stock TRL: a rollout worker and a weight transfer for its asynchronous GRPO."""

from afield.integrations.trl.rollouts import Rollouts

__all__ = ["Rollouts"]
