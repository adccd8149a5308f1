"""The sharded trainer in one process: a single rank, without the processes of tests/real/test_sharded.py."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from afield.interfaces.shared_weights import read_shared_weights
from afield.models.shared_weights import opened
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


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_sharded_model_is_shared_from_cpu_memory(tmp_path: Path, dtype: str) -> None:
    model = build_tiny_model(tmp_path / "model", tied=True)
    trainer = ShardedGRPO(model, lr=1e-3, device="cpu", weight_transfer="memory")
    with torch.no_grad():
        for parameter in trainer.policy.trainable:
            parameter.mul_(1.001)
    metrics = trainer.publish_as(tmp_path / "v1", 1, dtype)
    assert metrics["shared_weights"] == 1.0
    shared = read_shared_weights(tmp_path / "v1")
    assert shared is not None and shared.descriptor is not None
    with opened(shared, torch.device("cpu")) as tensors:
        in_memory = {name: tensor.clone() for name, tensor in tensors.items()}
    trainer.finish_publication()
    trainer.sharing = None
    for path in (tmp_path / "v1", tmp_path / "disk", tmp_path / "again"):
        if not path.exists():
            assert trainer.publish_as(path, 1, dtype)["shared_weights"] == 0.0
        written = load_file(path / "model.safetensors")
        assert written.keys() == in_memory.keys()
        assert all(torch.equal(written[name], in_memory[name]) for name in written)
    masters = {name: tensor.full_tensor() for name, tensor in trainer.policy.model.state_dict().items()}
    trainer.policy.export(tmp_path / "masters")
    written = load_file(tmp_path / "masters" / "model.safetensors")
    assert all(torch.equal(written[name], masters[name]) for name in written)
