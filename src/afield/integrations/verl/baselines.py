"""ReMax baselines for veRL: reward of a greedy rollout per group.

veRL's v1 trainer passes no `reward_baselines` to its `remax` estimator. Manager and trainer run in one
process: the manager stores each group's baseline here, and the estimator that `register` adds to veRL's
registry looks it up by the group's uid and calls veRL's function with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from afield.errors import UsageError

REMAX = "remax"
MAX_GROUPS = 1 << 20
"""Groups whose baselines are kept; the oldest are dropped."""


class Baselines:
    """Rewards of greedy rollouts by group uid."""

    def __init__(self) -> None:
        self._by_uid: OrderedDict[str, float] = OrderedDict()

    def put(self, uid: str, reward: float) -> None:
        self._by_uid[uid] = reward
        while len(self._by_uid) > MAX_GROUPS:
            self._by_uid.popitem(last=False)

    def of(self, uids: Iterable[Any]) -> list[float]:
        """The baseline of each row. Raises UsageError for a group without one."""
        names = [str(uid) for uid in uids]
        if missing := next((uid for uid in names if uid not in self._by_uid), None):
            raise UsageError(
                f"group {missing!r} has no greedy baseline, which remax needs; its rows were not collected by"
                " this manager"
            )
        return [self._by_uid[uid] for uid in names]


def register(baselines: Baselines) -> None:
    """Make veRL's `remax` estimator use these baselines."""
    import torch
    from verl.trainer.ppo import core_algos  # pyright: ignore[reportMissingImports]

    stock = core_algos.compute_remax_outcome_advantage

    def remax(token_level_rewards: Any, response_mask: Any, index: Any, **rest: Any) -> Any:
        values = torch.tensor(baselines.of(index), dtype=token_level_rewards.dtype)
        rest["reward_baselines"] = values.to(token_level_rewards.device)
        return stock(token_level_rewards=token_level_rewards, response_mask=response_mask, **rest)

    core_algos.ADV_ESTIMATOR_REGISTRY[REMAX] = remax
