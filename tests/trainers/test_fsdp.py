"""The sharded trainer in one process: a single rank, without the processes of tests/real/test_sharded.py."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from afield.trainers.fsdp.rank import ShardedGRPO, ShardedOptimizer, ShardedPolicy
from support.tiny_model import build_tiny_model


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_a_rank_shards_the_model_and_its_optimizer(tmp_path: Path) -> None:
    trainer = ShardedGRPO(build_tiny_model(tmp_path / "model"), lr=1e-3, device="cpu")
    assert type(trainer.policy) is ShardedPolicy
    assert type(trainer.optimizer) is ShardedOptimizer
    assert all(isinstance(parameter, DTensor) for parameter in trainer.policy.trainable)
