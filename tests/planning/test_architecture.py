"""Sizes of models from config.json, against the models of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from afield.errors import UsageError
from afield.planning.architecture import FAMILIES, architecture_of, count_parameters, read_architecture

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "pad_token_id": None,
}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "LlamaForCausalLM": [{"attention_bias": True, "mlp_bias": True}, {"head_dim": 32}],
    "Qwen3ForCausalLM": [{"head_dim": 32, "attention_bias": True}],
    "Qwen3MoeForCausalLM": [
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [1]},
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 2},
    ],
    "MixtralForCausalLM": [{"num_local_experts": 4, "num_experts_per_tok": 2}],
}
CASES = [
    (name, extra | {"tie_word_embeddings": tied})
    for name in FAMILIES
    for extra in VARIANTS.get(name, [{}])
    for tied in (False, True)
]


@pytest.mark.parametrize(("name", "extra"), CASES, ids=lambda value: str(value))
def test_parameters_are_those_of_transformers(name: str, extra: dict[str, Any], tmp_path: Path) -> None:
    config = getattr(transformers, name.replace("ForCausalLM", "Config"))(**SIZES | extra)
    config.architectures = [name]
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    config.save_pretrained(tmp_path)
    found = read_architecture(tmp_path)
    assert found.parameters == model.num_parameters()
    assert found.tied == extra["tie_word_embeddings"]
    largest = max(
        sum(parameter.numel() for parameter in layer.parameters()) for layer in model.get_decoder().layers
    )
    assert found.layer == largest


def test_embeddings_of_an_older_configuration_are_tied_as_its_class_says(tmp_path: Path) -> None:
    for name in FAMILIES:
        kind = getattr(transformers, name.replace("ForCausalLM", "Config"))
        config = {**SIZES, "architectures": [name], "num_experts": 8, "num_local_experts": 8}
        config |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
        assert architecture_of(config, name).tied == bool(kind().tie_word_embeddings), name


def write(directory: Path, **changes: Any) -> Path:
    config = {**SIZES, "architectures": ["LlamaForCausalLM"], **changes}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture 'MambaForCausalLM' cannot be planned for"),
        ({"architectures": None}, "no architecture cannot be planned for; known ones are Llama"),
        ({"quantization_config": {"bits": 4}}, "its weights are quantised"),
        ({"hidden_size": None}, "hidden_size = None must be a positive number"),
        ({"num_hidden_layers": "12"}, "num_hidden_layers = '12' must be a positive number"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 is no multiple of 3 key heads"),
    ],
)
def test_unknown_or_broken_configurations_are_refused_by_name(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        read_architecture(write(tmp_path, **changes))


def test_directory_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it has no config"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(UsageError, match="cannot be read as JSON"):
        read_architecture(tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_tensors_are_counted_from_their_headers(tmp_path: Path, tied: bool) -> None:
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert count_parameters(tmp_path) == model.num_parameters() == read_architecture(tmp_path).parameters


def test_tensors_of_another_model_are_refused(tmp_path: Path) -> None:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    write(tmp_path, num_hidden_layers=5)
    with pytest.raises(UsageError, match=r"its tensors have .* elements, but config.json describes"):
        read_architecture(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(UsageError, match="is no safetensors file"):
        read_architecture(tmp_path)
