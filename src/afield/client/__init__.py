"""Rollout client: futures, batches and groups for scripts, notebooks and async code."""

from afield.client.arguments import OpenArguments
from afield.client.batch import BatchItem
from afield.client.futures import RolloutFuture, RolloutTimeout
from afield.client.rollouts import RolloutClient

__all__ = ["BatchItem", "OpenArguments", "RolloutClient", "RolloutFuture", "RolloutTimeout"]
