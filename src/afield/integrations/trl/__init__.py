"""TRL integration: rollouts for AsyncGRPOTrainer and, with limits, for GRPOTrainer."""

from afield.integrations.trl.rollouts import Rollouts
from afield.integrations.trl.sync import SyncRollouts

__all__ = ["Rollouts", "SyncRollouts"]
