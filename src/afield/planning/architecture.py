"""Sizes of a model from config.json and safetensors headers.

Neither torch nor weights are loaded. Architectures whose layers are not known are refused by name.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from afield.errors import UsageError

MAX_HEADER = 100_000_000
"""Largest safetensors header, in bytes, as the format defines it."""
TOLERANCE = 0.001
"""Relative difference of parameter counts that is accepted between config.json and the tensors."""


class Family(NamedTuple):
    """Layers of an architecture that its config.json does not spell out."""

    qk_norm: bool = False
    """Whether each head's queries and keys are normalised."""
    qkv_bias: bool | None = None
    """Whether queries, keys and values have a bias; None reads `attention_bias`, which adds one to the
    output, too."""
    mlp_bias: bool = False
    """Whether `mlp_bias` is read."""
    experts: tuple[str, ...] = ()
    """Keys of the number of experts, of which one is there; empty for a dense model."""
    expert_size: str = ""
    """Key of the intermediate size of an expert."""
    head_dim: int | None = None
    """Size of a head if config.json has none; None divides the hidden size by the heads."""
    tied: bool = False
    """Whether embeddings are tied if config.json does not say so."""


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(mlp_bias=True),
    "MistralForCausalLM": Family(qkv_bias=False),
    "MixtralForCausalLM": Family(
        qkv_bias=False, experts=("num_local_experts",), expert_size="intermediate_size"
    ),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qk_norm=True, head_dim=128),
    "Qwen3MoeForCausalLM": Family(
        qk_norm=True, experts=("num_experts", "num_local_experts"), expert_size="moe_intermediate_size"
    ),
    "SmolLM3ForCausalLM": Family(mlp_bias=True, tied=True),
}
"""Known architectures, as `architectures` of config.json names them."""


class Architecture(Struct, frozen=True, kw_only=True):
    """Sizes of a causal language model."""

    name: str
    """Class of the model, such as `Qwen3ForCausalLM`."""
    layers: int
    """Decoder layers."""
    hidden: int
    """Hidden size."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Size of a head."""
    intermediate: int
    """Intermediate size of the dense layers."""
    vocabulary: int
    """Rows of the embedding."""
    tied: bool
    """Whether input and output embeddings are one tensor."""
    context: int
    """Longest sequence, in tokens."""
    qk_norm: bool = False
    """Whether each head's queries and keys are normalised."""
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias."""
    output_bias: bool = False
    """Whether the attention's output has a bias."""
    mlp_bias: bool = False
    """Whether the feed-forward layers have biases."""
    experts: int = 0
    """Experts of a layer; 0 for a dense model."""
    experts_per_token: int = 0
    """Experts that compute a token."""
    expert_size: int = 0
    """Intermediate size of an expert."""
    dense_layers: int = 0
    """Layers without experts in a model with experts."""

    @property
    def query(self) -> int:
        """Width of the queries, in elements per token."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of the keys, and of the values, in elements per token."""
        return self.kv_heads * self.head_dim

    @property
    def embedding(self) -> int:
        """Parameters of the input embedding, and of an output layer that is not tied."""
        return self.vocabulary * self.hidden

    @property
    def attention(self) -> int:
        """Parameters of a layer's attention, with both norms of the layer."""
        products = 2 * self.hidden * (self.query + self.key)
        biases = (self.query + 2 * self.key) * self.qkv_bias + self.hidden * self.output_bias
        return products + biases + 2 * self.head_dim * self.qk_norm + 2 * self.hidden

    @property
    def feed_forward(self) -> int:
        """Parameters of a dense layer's feed-forward part."""
        biases = (2 * self.intermediate + self.hidden) * self.mlp_bias
        return 3 * self.hidden * self.intermediate + biases

    @property
    def expert_part(self) -> int:
        """Parameters of the experts of a layer and of their router."""
        return self.experts * (3 * self.hidden * self.expert_size + self.hidden)

    @property
    def sparse_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def layer(self) -> int:
        """Parameters of the largest layer."""
        return self.attention + (self.expert_part if self.experts else self.feed_forward)

    @property
    def decoder(self) -> int:
        """Parameters of all layers."""
        sparse, dense = self.sparse_layers, self.layers - self.sparse_layers
        return self.layers * self.attention + dense * self.feed_forward + sparse * self.expert_part

    @property
    def ends(self) -> int:
        """Parameters outside of the layers: embeddings and the last norm."""
        return self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """All parameters; tied ones count once."""
        return self.decoder + self.ends

    def adapters(self, rank: int) -> int:
        """Parameters of LoRA adapters on all linear layers."""
        attention = 2 * (self.hidden + self.query) + 2 * (self.hidden + self.key)
        return self.layers * rank * (attention + 3 * (self.hidden + self.intermediate))


def read_architecture(model: Path) -> Architecture:
    """Sizes of the model in a directory. Raises UsageError for an unknown architecture, a missing key, or
    tensors that differ from the configuration."""
    path = model / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UsageError(f"{model} is not a model directory: it has no config.json") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} holds {type(config).__name__} instead of an object")
    architecture = architecture_of(config, str(path))
    counted = count_parameters(model)
    # Files may hold tied embeddings twice.
    twice = architecture.parameters + architecture.embedding * architecture.tied
    if counted and all(abs(counted - n) > TOLERANCE * n for n in (architecture.parameters, twice)):
        raise UsageError(
            f"{model}: its tensors have {counted:,} elements, but config.json describes"
            f" {architecture.parameters:,} parameters of {architecture.name}; plan for a directory whose"
            " files belong together"
        )
    return architecture


def architecture_of(config: Mapping[str, Any], path: str) -> Architecture:
    """Sizes from a parsed config.json; `path` names it in errors."""
    names = config.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else ""
    family = FAMILIES.get(name)
    if family is None:
        what = f"architecture {name!r}" if name else "no architecture"
        raise UsageError(f"{path}: {what} cannot be planned for; known ones are {', '.join(FAMILIES)}")
    if config.get("quantization_config"):
        raise UsageError(
            f"{path}: its weights are quantised, which the trainer does not load; plan for the original model"
        )

    def size(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{path}: {key} = {value!r} must be a positive number")
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    layers, intermediate = size("num_hidden_layers"), size("intermediate_size")
    biased = bool(config.get("attention_bias", False))
    kv_heads = size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise UsageError(f"{path}: num_attention_heads = {heads} is no multiple of {kv_heads} key heads")
    key = next((key for key in family.experts if key in config), "".join(family.experts[:1]))
    experts = size(key) if key else 0
    return Architecture(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size("head_dim", family.head_dim or hidden // heads),
        intermediate=intermediate,
        vocabulary=size("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        context=size("max_position_embeddings"),
        qk_norm=family.qk_norm,
        qkv_bias=biased if family.qkv_bias is None else family.qkv_bias,
        output_bias=biased and family.qkv_bias is None,
        mlp_bias=family.mlp_bias and bool(config.get("mlp_bias", False)),
        experts=experts,
        experts_per_token=size("num_experts_per_tok") if experts else 0,
        expert_size=size(family.expert_size) if experts else 0,
        dense_layers=_dense_layers(config, layers) if experts else 0,
    )


def _dense_layers(config: Mapping[str, Any], layers: int) -> int:
    """Layers without experts, as Qwen3-MoE chooses them."""
    step, only = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
    return sum(layer in only or (layer + 1) % step != 0 for layer in range(layers))


def count_parameters(model: Path) -> int:
    """Elements of all tensors, from the headers of the safetensors files; 0 without files."""
    return sum(_elements(path) for path in sorted(model.glob("*.safetensors")))


def _elements(path: Path) -> int:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise UsageError(f"{path} is no safetensors file: {error}; download it again") from error
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            elements = 1
            for length in tensor["shape"]:
                elements *= length
            total += elements
    return total
