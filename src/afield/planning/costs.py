"""Costs of a training loop with their sources, and times.

1. `LoopCosts` holds constants of a machine. Each says where it was measured, or that it was derived or
   assumed. They name no model: bytes and operations per second are constants, a model's bytes and operations
   come from its `Architecture`.
2. `engine_times`, `train_token_s` and `publish_s` are the times of a model on that machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from afield.errors import UsageError
from afield.planning.architecture import Architecture
from afield.planning.memory import kv_token_bytes
from afield.planning.simulation import EngineTimes, GatewayTimes

MEASURED = Path(__file__).parent / "measured"
"""Costs of machines that were measured, one file each."""
Basis = Literal["measured", "derived", "assumed"]


class Constant(Struct, frozen=True, kw_only=True):
    """A number with its source."""

    value: float
    """Value, in the unit of its field."""
    basis: Basis
    """Whether it was measured, derived from measurements of something else, or assumed."""
    source: str
    """Measurement and its place, or how the value follows."""


class EngineCosts(Struct, frozen=True, kw_only=True):
    """Costs of one kind of engine on one device."""

    step_s: Constant
    """Seconds of a decode step beside reading weights and cache."""
    sequence_s: Constant
    """Seconds of a decode step per sequence, beside reading its cache."""
    bytes_per_s: Constant
    """Bytes of weights and KV cache that a decode step reads per second."""
    prefill_s: Constant
    """Seconds of a prefill pass without tokens."""
    prefill_flops_per_s: Constant
    """Operations of a prefill pass per second."""
    prefill_tokens: int
    """Tokens of a prefill pass."""
    own_gateway: bool
    """Whether each replica has a gateway process of its own, as the embedded engine does."""


class LoopCosts(Struct, frozen=True, kw_only=True):
    """Costs of a loop on one kind of machine; times are in seconds."""

    machine: str
    """Machine that was measured."""
    dtype: Literal["float32", "bfloat16"]
    """Dtype of weights and KV cache in the engines."""
    engines: dict[str, EngineCosts]
    """Costs of each kind of engine, by the name of `engine`."""
    train_s: Constant
    """Seconds of a training step beside the model's operations."""
    train_flops_per_s: Constant
    """Operations of forward and backward pass per second and device."""
    publish_s: Constant
    """Seconds of a publication beside its bytes."""
    publish_bytes_per_s: Constant
    """Bytes of published weights per second."""
    gateway_call_s: Constant
    """Seconds of a gateway's event loop per call."""
    gateway_history_s: Constant
    """Seconds of a gateway's event loop per token of the prompt."""
    gateway_token_s: Constant
    """Seconds of a gateway's event loop per streamed token."""
    gateway_delay_s: Constant
    """Seconds of a call beside event loop and engine."""
    launch_s: Constant
    """Seconds from the start of a rollout to its first call, without waiting."""
    launch_work_s: Constant
    """Seconds of a launch in which no other rollout is launched."""
    finish_s: Constant
    """Seconds from the last reply of a rollout to its recorded result."""
    poll_s: Constant
    """Seconds until group scheduler or training loop sees a change."""
    unmeasured: list[str] = []
    """Parts of a loop that these constants leave out."""

    def constants(self, engine: str) -> Iterator[tuple[str, Constant]]:
        """All constants that a loop with this engine uses, by name."""
        for name in EngineCosts.__struct_fields__:
            if isinstance(value := getattr(self.engines[engine], name), Constant):
                yield f"engine {name}", value
        for name in self.__struct_fields__:
            if isinstance(value := getattr(self, name), Constant):
                yield name, value


def read_costs(name: str) -> LoopCosts:
    """Costs from a file, or of a measured machine by its name. Raises UsageError."""
    known = {path.stem: path for path in sorted(MEASURED.glob("*.json"))}
    path = known.get(name, Path(name))
    try:
        costs = msgspec.json.decode(path.read_bytes(), type=LoopCosts)
    except FileNotFoundError as error:
        raise UsageError(
            f"costs = {name!r} is neither a file nor one of {', '.join(known)}; write a file with"
            " `python bench/plan/simulate.py --measure --costs FILE`"
        ) from error
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(
            f"costs = {name!r} cannot be read: {error}; write it with"
            " `python bench/plan/simulate.py --measure --costs FILE`"
        ) from error
    for engine in costs.engines:
        for key, constant in costs.constants(engine):
            positive = key.endswith("_per_s")
            if not 0 <= constant.value < float("inf") or (positive and not constant.value):
                raise UsageError(
                    f"costs = {name!r}: {key} = {constant.value:g} must be"
                    f" {'positive' if positive else '0 or positive'}; measure it again"
                )
    return costs


def engine_costs(costs: LoopCosts, engine: str) -> EngineCosts:
    """Costs of a kind of engine. Raises UsageError if it was not measured."""
    if engine not in costs.engines:
        raise UsageError(
            f"engine = {engine!r} was not measured on {costs.machine}; give --engine"
            f" {' or '.join(costs.engines)}, or other --costs"
        )
    return costs.engines[engine]


# --- operations and bytes of a model --------------------------------------------------------------


def layer_parameters(model: Architecture) -> int:
    """Parameters of all layers that compute one token."""
    dense = model.layers - model.sparse_layers
    router = model.experts * model.hidden
    chosen = model.experts_per_token * 3 * model.hidden * model.expert_size + router
    return model.layers * model.attention + dense * model.feed_forward + model.sparse_layers * chosen


def forward_flops(model: Architecture, context: float) -> float:
    """Operations of the layers for one token that attends to `context` tokens."""
    return 2 * layer_parameters(model) + 4 * model.layers * model.query * context


def train_flops(model: Architecture, context: float, sampled_share: float) -> float:
    """Operations of forward and backward pass for one token; only sampled tokens have logits."""
    return 3 * (forward_flops(model, context) + 2 * model.embedding * sampled_share)


def weight_bytes(costs: LoopCosts, model: Architecture) -> int:
    """Bytes that a decode step reads: all layers, with all experts, and the output layer."""
    return (model.decoder + model.embedding) * (2 if costs.dtype == "bfloat16" else 4)


# --- times of a model -----------------------------------------------------------------------------


def engine_times(
    costs: LoopCosts,
    model: Architecture,
    engine: str,
    *,
    replicas: int,
    tensor_parallel: int = 1,
    max_sequences: int = 1024,
    kv_tokens: int = 1 << 60,
    context: float = 0.0,
) -> EngineTimes:
    """Times of a model's replicas. `context` is the mean number of tokens that a prefilled token attends to;
    tensor parallelism divides bytes and operations, and its communication costs nothing."""
    of = engine_costs(costs, engine)
    reading = of.bytes_per_s.value
    return EngineTimes(
        replicas=replicas,
        step_s=of.step_s.value + weight_bytes(costs, model) / tensor_parallel / reading,
        sequence_s=of.sequence_s.value,
        kv_token_s=kv_token_bytes(model, costs.dtype, tensor_parallel) / reading,
        prefill_s=of.prefill_s.value,
        prefill_token_s=forward_flops(model, context) / tensor_parallel / of.prefill_flops_per_s.value,
        prefill_tokens=of.prefill_tokens,
        max_sequences=max_sequences,
        kv_tokens=kv_tokens,
        own_gateway=of.own_gateway,
    )


def gateway_times(costs: LoopCosts, processes: int) -> GatewayTimes:
    """Times of gateway processes."""
    return GatewayTimes(
        processes=processes,
        call_s=costs.gateway_call_s.value,
        token_s=costs.gateway_token_s.value,
        history_s=costs.gateway_history_s.value,
        delay_s=costs.gateway_delay_s.value,
    )


def train_token_s(
    costs: LoopCosts, model: Architecture, gpus: int, *, context: float, sampled_share: float
) -> float:
    """Seconds of a training step per token; the GPUs of a trainer divide it evenly."""
    return train_flops(model, context, sampled_share) / costs.train_flops_per_s.value / gpus


def publish_s(costs: LoopCosts, model: Architecture, rank: int = 0) -> float:
    """Seconds of a publication: all weights, or LoRA adapters of a rank."""
    parameters = model.adapters(rank) if rank else model.parameters
    size = 2 if costs.dtype == "bfloat16" else 4
    return costs.publish_s.value + parameters * size / costs.publish_bytes_per_s.value
