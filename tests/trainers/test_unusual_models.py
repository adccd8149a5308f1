"""Models whose attention is cut into chunks, and models that call all of themselves their decoder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.trainers.test_model import CPU, apart, build, gradient

from afield.errors import UsageError
from afield.settings.trainer import LoraOptions
from afield.trainers.logprobs import has_linear_head
from afield.trainers.model import PolicyModel

CHUNKED = {
    "head_dim": 8,
    "num_local_experts": 2,
    "intermediate_size_mlp": 64,
    "attention_chunk_size": 16,
    "layer_types": ["chunked_attention", "full_attention"],
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_rows_longer_than_the_chunks_of_attention_are_padded(tmp_path: Path) -> None:
    path = build(tmp_path / "model", "Llama4TextConfig", CHUNKED)
    tree, padded = PolicyModel(path, device=CPU), PolicyModel(path, device=CPU, layout="padded")
    assert (tree.layout, tree.tree_context, tree.context) == ("tree", 16, 128)
    assert apart(gradient(tree), gradient(padded)) < 1e-5


def test_a_model_that_is_its_own_decoder_is_asked_for_its_logits(tmp_path: Path) -> None:
    path = build(tmp_path / "model", "Llama4TextConfig", CHUNKED | {"attention_chunk_size": 64})
    tree, padded = PolicyModel(path, device=CPU), PolicyModel(path, device=CPU, layout="padded")
    assert not has_linear_head(tree.model)
    assert apart(gradient(tree), gradient(padded)) < 1e-5


@pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning")
def test_adapters_that_no_engine_could_get_are_refused_before_training(tmp_path: Path) -> None:
    experts = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    path = build(tmp_path / "model", "Qwen3MoeConfig", experts)
    with pytest.raises(UsageError, match=r"experts' cannot be merged: .* such as q_proj"):
        PolicyModel(path, device=CPU, lora=LoraOptions(rank=2))
    policy = PolicyModel(path, device=CPU, lora=LoraOptions(rank=2, targets=("q_proj", "o_proj")))
    with torch.no_grad():
        for parameter in policy.trainable:
            parameter.add_(0.1)
    policy.export(tmp_path / "whole")
    ids = torch.tensor([[5, 6, 7, 8]])
    again = PolicyModel(tmp_path / "whole", device=CPU)
    with torch.no_grad():
        assert apart(again.model(ids).logits, policy.model(ids).logits) < 1e-5
