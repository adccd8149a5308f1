"""afield inside stock TRL: rollouts for its asynchronous GRPO, and, limited, for its synchronous one."""

from afield.integrations.trl.rollouts import Rollouts
from afield.integrations.trl.sync import SyncRollouts

__all__ = ["Rollouts", "SyncRollouts"]
