"""TOML and environment to plain values; the only reader of the environment.

Precedence: command line, then the file given with --config, then the defaults in `train`. Components
never see what is read here, only values.
"""

from __future__ import annotations

from afield.settings.environment import Environment, agent_environment, from_environment, lend
from afield.settings.gateway import ENGINE_START_S, GatewaySettings
from afield.settings.tasks import read_tasks
from afield.settings.train import ELSEWHERE, TrainConfig, build, train_config
from afield.settings.values import PATHS, assigned, converted, from_file, located, merged

__all__ = [
    "ELSEWHERE",
    "ENGINE_START_S",
    "PATHS",
    "Environment",
    "GatewaySettings",
    "TrainConfig",
    "agent_environment",
    "assigned",
    "build",
    "converted",
    "from_environment",
    "from_file",
    "lend",
    "located",
    "merged",
    "read_tasks",
    "train_config",
]
