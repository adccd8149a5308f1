"""Models that compute something else over a tree or in a batch are told before training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from afield.errors import UsageError
from afield.trainers.grpo import GRPO
from support.training_groups import group_of

SIZES = {
    "vocab_size": 400,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPARSE = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "first_k_dense_replace": 1,
}


def save(config: PreTrainedConfig, directory: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def trained(path: Path) -> GRPO:
    torch.set_num_threads(1)
    trainer = GRPO(path, lr=1e-3, device="cpu")
    trainer.step([group_of([1.0, 0.0])])
    return trainer


def test_a_weight_that_gets_no_gradient_over_a_tree_makes_rows_padded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = transformers.DogeConfig(**SIZES, num_key_value_heads=4, keep_window_size=64)
    trainer = trained(save(config, tmp_path))
    assert trainer.policy.layout == "padded"
    assert "gets no gradient there" in caplog.text
    with_gradient = {name for name, p in trainer.model.named_parameters() if p.grad is not None}
    assert with_gradient == {name for name, _ in trainer.model.named_parameters()}


def test_a_model_whose_decoder_is_its_output_layer_is_trained(tmp_path: Path) -> None:
    config = transformers.ModernBertDecoderConfig(**SIZES, cls_token_id=1, sep_token_id=2)
    assert trained(save(config, tmp_path)).steps == 1


@pytest.mark.parametrize("name", ["DeepseekV32", "GlmMoeDsa"])
def test_sparse_attention_that_sees_padding_is_refused_by_name(tmp_path: Path, name: str) -> None:
    config = getattr(transformers, f"{name}Config")(**SIZES, **SPARSE)
    with pytest.raises(UsageError, match=rf"{name}ForCausalLM computes other numbers in a batch.*index_topk"):
        trained(save(config, tmp_path))
