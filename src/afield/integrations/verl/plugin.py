"""veRL plugin: `VERL_USE_EXTERNAL_MODULES=afield.integrations.verl.plugin`.

It registers `actor_rollout_ref.rollout.name=afield`, a rollout backend (a gateway with its engine), and
`actor_rollout_ref.rollout.checkpoint_engine.backend=afield`, which publishes weights to it. Loading has
no effect on veRL's own backends.
"""

from __future__ import annotations

from typing import Any

from verl.workers.rollout import base  # pyright: ignore[reportMissingImports]
from verl.workers.rollout.replica import RolloutReplicaRegistry  # pyright: ignore[reportMissingImports]

NAME = "afield"


def _replica() -> Any:
    from afield.integrations.verl.replica import Replica

    return Replica


RolloutReplicaRegistry.register(NAME, _replica)
# veRL has no function for this one.
base._ROLLOUT_REGISTRY[NAME, "async"] = "afield.integrations.verl.weights.ServerAdapter"  # pyright: ignore[reportPrivateUsage]
