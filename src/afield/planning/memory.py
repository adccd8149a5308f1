"""Memory of a trainer's step and an engine, in bytes.

Peaks are those of allocated memory: what a framework's allocator counts, without the device's context and
fragmentation. `docs/how-to/plan.md` lists predictions beside measurements.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from msgspec import Struct

from afield.planning.architecture import Architecture

GIB = 1 << 30
CHUNK_BYTES = 1 << 30
"""Float32 logits of one chunk, in bytes (`trainers/logprobs.py`)."""
KEPT_SHARE = 32
"""Share (1/32) of the memory below which logits are kept (`trainers/logprobs.py`)."""
CPU_MEMORY = 1 << 33
"""Memory of a CPU of which logits may take a share."""
MASTER = 4
"""Bytes of a trained weight, of its gradient and of each moment: the trainer holds float32."""
ASIDE = 0.75
"""Share of the memory up to which masters stay on the device during a pass (`trainers/publication.py`)."""
PREFILL_TOKENS = 16384
"""Tokens of a prefill step of the embedded engine on a GPU."""
Device = Literal["cuda", "cpu"]
Dtype = Literal["float32", "bfloat16"]


class TrainerShape(Struct, frozen=True, kw_only=True):
    """Settings and batch of a trainer that decide its memory."""

    tokens: int
    """Tokens of the largest pass; `learn.max_tokens_per_pass` bounds it."""
    sampled: int
    """Sampled tokens of that pass, which have logits."""
    passes: int = 1
    """Passes of an update; from the second on, gradients exist beside activations."""
    dtype: Dtype = "bfloat16"
    """Dtype of the products, `learn.dtype`."""
    checkpointing: bool = False
    """`learn.checkpointing`."""
    rank: int = 0
    """`learn.lora.rank`; 0 trains all weights."""
    reference: bool = False
    """Whether a second copy of the weights computes the KL penalty: `kl` above 0 without LoRA."""
    devices: int = 1
    """`learn.devices`."""
    device: Device = "cuda"
    """Kind of device."""
    tree: bool = True
    """Whether the pass is a tree (`learn.layout`)."""
    shared_weights: bool = False
    """Whether published weights are shared in GPU memory (`weight_transfer`), by one device without LoRA."""
    rounded: bool = False
    """Whether passes in 16 bits compute with rounded weights: `learn.rounding`, after a publication."""
    optimizer: bool = True
    """Whether the moments of AdamW exist: from the second update on."""
    device_bytes: int = 80 * GIB
    """Memory of a device, which decides whether logits are kept."""


class TrainerMemory(Struct, frozen=True, kw_only=True):
    """Bytes of one device of the trainer."""

    weights: int
    """Trained and frozen weights, without a reference."""
    reference: int
    """Second copy of the weights for a KL penalty."""
    gradients: int
    """Gradients of the trained weights."""
    optimizer: int
    """Both moments of AdamW."""
    activations: int
    """Tensors that the forward pass keeps for the backward pass, of one pass."""
    logits: int
    """Logits and temporary tensors of the output layer."""
    shared: int
    """Buffer of published weights, which engines copy."""
    gathered: int
    """Whole weights and gradients that a sharded model gathers for a time."""
    phases: dict[str, int]
    """Peak of each phase of a step."""

    @property
    def step(self) -> int:
        """Peak of a training step."""
        return max(bytes_ for phase, bytes_ in self.phases.items() if phase != "publish")

    @property
    def peak(self) -> int:
        """Peak of step and publication."""
        return max(self.phases.values())

    @property
    def phase(self) -> str:
        """Phase in which the peak is reached."""
        return max(self.phases, key=lambda phase: self.phases[phase])


class _Layer(NamedTuple):
    """Bytes of a decoder layer per token."""

    saved: int
    """Kept between forward and backward pass."""
    temporary: int
    """Gradients in the backward pass, at their peak."""


def layer_bytes(model: Architecture, shape: TrainerShape) -> _Layer:
    """Bytes per token of a layer, as transformers computes it with separate kernels for each operation.

    A norm in float32 keeps its input and the normalised values, each linear layer a copy of its input if the
    products are in bfloat16, the feed-forward part four tensors of its intermediate size.
    """
    h, q, k, f = model.hidden, model.query, model.key, model.intermediate
    size, lora = 2 if shape.dtype == "bfloat16" else 4, bool(shape.rank)
    mixed, wide = size == 2, 4
    attention = 2 * (q + k) * size
    heads = (q + k) * model.qk_norm
    if not mixed:
        norms = (2 if lora else 4) * h * wide + heads * (1 if lora else 2) * wide
        inputs = 2 * h * wide
    else:
        norms = (2 if lora else 4) * h * wide + heads * (wide if lora else wide + 2)
        inputs = 5 * h * size + (q * size if lora else 0)
    if model.experts:
        chosen = model.experts_per_token
        inputs -= h * size if mixed else 0  # a router instead of two products
        feed_forward = chosen * (2 * h + 4 * model.expert_size) * wide
        temporary = chosen * (h + model.expert_size) * wide
    else:
        feed_forward = 4 * f * size
        temporary = f * size
    if lora and mixed:
        temporary *= 4  # adapters compute from copies of their inputs
    residual = h * (wide if not (lora and mixed) else 2)
    adapters = shape.rank * 7 * size
    return _Layer(
        saved=norms + inputs + attention + feed_forward + adapters,
        temporary=temporary + residual + h * wide,
    )


def trainer_memory(model: Architecture, shape: TrainerShape) -> TrainerMemory:
    """Bytes of a training step on each device."""
    size = 2 if shape.dtype == "bfloat16" else 4
    mixed, lora, cuda = size == 2, bool(shape.rank), shape.device == "cuda"
    n, h, vocabulary = shape.devices, model.hidden, model.vocabulary
    trained = model.adapters(shape.rank) if lora else model.parameters
    weights = model.parameters * (size if lora else MASTER) + trained * MASTER * lora
    gradients, moments = trained * MASTER, 2 * trained * MASTER * shape.optimizer
    reference = model.parameters * 4 if shape.reference and not lora else 0
    head = 0 if lora else model.embedding * MASTER

    # Activations of a pass.
    layer = layer_bytes(model, shape)
    residual = h * (2 if lora and mixed else 4)
    kept_attention = model.query * size if shape.tree and cuda else 0
    of_layer = residual + kept_attention if shape.checkpointing else layer.saved
    casts = 0
    if mixed and not lora:  # autocast keeps a copy of each linear layer; experts are none
        casts = 2 * (model.decoder - model.sparse_layers * model.expert_part)
    stream = model.layers * of_layer * shape.tokens
    last = h * 4 * (1 if lora else 2) * shape.tokens
    activations = stream + last + shape.sampled * h * (size + MASTER * mixed)
    cast_layer = casts // model.layers

    # Output layer.
    total = shape.device_bytes if cuda else CPU_MEMORY
    chunk = min(shape.sampled, max(1, CHUNK_BYTES // (4 * vocabulary))) * vocabulary
    of_logits = shape.sampled * vocabulary * size
    kept = of_logits if of_logits < total // KEPT_SHARE else 0
    copied = model.embedding * 2 * (mixed and not lora)
    reduce = 0 if cuda else chunk * 8  # eager kernels of a CPU: scaled logits and their exponentials
    forward_head = kept + copied + reduce + (0 if kept else chunk * size)
    push = 2 * chunk * size if cuda else chunk * 13
    summed = 0 if lora else model.embedding * (4 + size)
    backward_head = kept + copied + push + summed

    # A sharded model gathers the ends for the whole pass, and a layer or two at a time.
    gathered = gathered_gradients = 0
    if n > 1:
        width = size if lora else MASTER
        gathered = model.ends * width + 2 * model.layer * width
        gathered_gradients = 0 if lora else model.ends * MASTER + 2 * model.layer * MASTER
    base = (weights + moments + reference) // n + gathered
    before = gradients // n if shape.passes > 1 else 0
    work = shape.tokens * (layer.temporary + (layer.saved if shape.checkpointing else 0)) + cast_layer
    own = 0 if lora else model.layer * MASTER
    held = casts if not shape.checkpointing else 0
    largest = max(model.embedding, model.expert_part // 2) * MASTER
    phases = {
        "forward": base + before + activations + casts + forward_head,
        "output layer": base + before + activations + held + backward_head,
        "last layer": base
        + max(before, head // n)
        + (head if shape.passes > 1 and n == 1 else 0)
        + stream
        + held
        + kept
        + work
        + own
        + gathered_gradients,
        "first layer": base + gradients // n + kept + work + gathered_gradients + head // n * model.tied,
    }
    rounded = shape.rounded and mixed and not lora
    if rounded:  # the weights of a pass, and the masters that they replace, which go to the host if need be
        for phase, peak in phases.items():
            peak += model.parameters * size // n
            phases[phase] = peak + min(model.parameters * MASTER // n, max(0, int(ASIDE * total) - peak))
    if shape.optimizer:
        temporary = (trained * MASTER // n) if cuda else 0 if lora else largest
        phases["optimizer"] = (weights + moments + reference + gradients) // n + temporary
        if cuda:
            copies = 0 if lora or n > 1 or shape.shared_weights else 2 * model.parameters
            copies += model.parameters * size // n if rounded else 0
            spare = min(2 * GIB, weights)
            phases["publish"] = (weights + moments + reference + gradients) // n + copies + spare
    shared = 2 * model.parameters if shape.shared_weights else 0
    phases = {phase: size + shared for phase, size in phases.items()}
    return TrainerMemory(
        weights=weights // n,
        reference=reference // n,
        gradients=gradients // n,
        optimizer=moments // n,
        activations=activations,
        logits=max(forward_head, backward_head),
        shared=shared,
        gathered=gathered + gathered_gradients,
        phases=phases,
    )


def host_bytes(model: Architecture, shape: TrainerShape) -> int:
    """Memory of the machine while the trainer loads: each rank reads the whole model."""
    return shape.devices * model.parameters * (2 if shape.rank and shape.dtype == "bfloat16" else 4)


class EngineShape(Struct, frozen=True, kw_only=True):
    """Settings and load of an engine that decide its memory."""

    calls: int
    """Calls at once on this engine."""
    context: int
    """Longest call, prompt and reply, in tokens."""
    dtype: Dtype = "bfloat16"
    """Dtype of weights and KV cache."""
    tensor_parallel: int = 1
    """GPUs that the model is split over (`vllm_tensor_parallel`)."""
    prefill: int = PREFILL_TOKENS
    """Tokens of a prefill step."""


class EngineMemory(Struct, frozen=True, kw_only=True):
    """Bytes of one device of an engine."""

    weights: int
    """Weights of the device's part of the model."""
    token: int
    """KV cache of one token."""
    cache: int
    """KV cache that holds all calls at their longest."""
    workspace: int
    """Activations of a prefill step, logits of a decode step, and CUDA graphs."""

    @property
    def peak(self) -> int:
        """Peak of allocated memory when all calls are at their longest."""
        return self.weights + self.cache + self.workspace


def kv_token_bytes(model: Architecture, dtype: Dtype = "bfloat16", tensor_parallel: int = 1) -> int:
    """Bytes of the KV cache for one token on each device; heads that are fewer than devices are copied."""
    heads = max(1, -(-model.kv_heads // tensor_parallel))
    return 2 * model.layers * heads * model.head_dim * (2 if dtype == "bfloat16" else 4)


def engine_memory(model: Architecture, shape: EngineShape) -> EngineMemory:
    """Bytes of an engine on each of its devices, with a full cache."""
    size, parts = 2 if shape.dtype == "bfloat16" else 4, shape.tensor_parallel
    token = kv_token_bytes(model, shape.dtype, parts)
    length = -(-shape.context // 32) * 32
    width = model.experts_per_token * model.expert_size if model.experts else model.intermediate
    prefill = shape.prefill * (3 * width // parts + 4 * model.hidden) * size
    logits = shape.calls * model.vocabulary * (size + 4)
    return EngineMemory(
        weights=model.parameters * size // parts,
        token=token,
        cache=(shape.calls + 1) * length * token,
        workspace=max(prefill, logits),
    )
