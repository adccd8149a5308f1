"""Settings of a run that fit into a machine's GPUs.

1. Trainer placements are tried from one GPU upwards, each first without and then with checkpointing, and with
   ever smaller passes. Engines get the other GPUs, or share those of the trainer if it takes all.
2. The engine's tensor parallelism is the smallest that holds the weights and the KV cache of its calls.
3. If nothing fits, the nearest plans that do are named: adapters, more GPUs, larger GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from msgspec import Struct, structs

from afield.errors import UsageError
from afield.planning.architecture import Architecture
from afield.planning.memory import (
    GIB,
    EngineMemory,
    EngineShape,
    TrainerMemory,
    TrainerShape,
    engine_memory,
    host_bytes,
    trainer_memory,
)

FRAGMENTATION = 0.06
"""Share of a GPU that fragmentation of the allocator may take."""
DEVICE_CONTEXT = 1 * GIB
"""CUDA context, kernels and NCCL buffers of a process, in bytes."""
CACHE_SHARE = 0.6
"""Share of the memory free beside the weights that the embedded engine's cache takes (`engines/torch`)."""
VLLM_MEMORY = 0.9
"""Share of a GPU that vLLM takes where it has the GPU for itself (`vllm_memory`)."""
VLLM_OVERHEAD = 2 * GIB
"""CUDA graphs and workspace of a vLLM server beyond weights, KV cache and prefill, in bytes."""
CACHE_FILL = 0.5
"""Share of its longest length that a call has on average, as calls end and begin at different times. vLLM
must hold all its calls at that length, and one at the longest; above it, calls wait."""
VLLM_PREFILL = 8192
"""Tokens of a prefill step of vLLM."""
PASSES = (65536, 32768, 16384, 8192, 4096, 2048)
"""Values of `learn.max_tokens_per_pass` that are tried, from the fastest."""
MOST_GPUS = 1024
SIZES = (16, 24, 32, 40, 48, 80, 96, 141, 180, 192, 288)
"""Memory of GPUs that are sold, in GiB, to name the nearest one that fits."""
ADAPTER_RANK = 16
MOST_SLOTS = 512
"""Most calls at once of the embedded engine."""
EngineKind = Literal["torch", "vllm"]


class Gpus(Struct, frozen=True, kw_only=True):
    """GPUs of one machine."""

    count: int
    """Number of GPUs."""
    gib: float
    """Memory of each, in GiB."""

    @property
    def usable(self) -> int:
        """Bytes that a process may plan with."""
        return int(self.gib * GIB * (1 - FRAGMENTATION)) - DEVICE_CONTEXT

    def __str__(self) -> str:
        return f"{self.count}x{self.gib:g}"


def parse_gpus(text: str) -> Gpus:
    """Gpus from COUNTxGIB, such as 8x80."""
    match = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", text.strip().lower())
    if match is None:
        raise UsageError(f"gpus = {text!r}; give COUNTxGIB, such as 8x80 for eight GPUs of 80 GiB")
    gpus = Gpus(count=int(match[1]), gib=float(match[2]))
    if not 1 <= gpus.count <= MOST_GPUS or not 4 <= gpus.gib <= 1024:
        raise UsageError(f"gpus = {text!r}; give 1 to {MOST_GPUS} GPUs of 4 to 1024 GiB")
    return gpus


class Workload(Struct, frozen=True, kw_only=True):
    """Properties of a run on which memory depends."""

    context: int = 8192
    """Longest rollout, in tokens (`max_context`)."""
    concurrency: int = 256
    """Rollouts at once (`concurrency`)."""
    sampled_share: float = 0.5
    """Share of a pass that was sampled and has logits."""
    rank: int = 0
    """`learn.lora.rank`; 0 trains all weights."""
    kl: bool = False
    """Whether `kl` is above 0."""
    engine: EngineKind = "vllm"
    """`engine`."""


class PlacementPlan(Struct, frozen=True, kw_only=True):
    """A placement of trainer and engines, with the memory of each GPU."""

    trainer_gpus: int
    """GPUs of the trainer."""
    engine_gpus: int
    """GPUs of the engines."""
    colocated: bool
    """Whether trainer and engines share their GPUs."""
    trainer: TrainerMemory
    """Memory of each GPU of the trainer."""
    trainer_shape: TrainerShape
    """Settings of the trainer."""
    engine: EngineMemory
    """Memory of each GPU of an engine, with all its calls at their longest."""
    engine_shape: EngineShape
    """Settings of each engine."""
    replicas: int
    """Engines."""
    host: int
    """Memory of the machine while the trainer loads, in bytes."""
    settings: dict[str, Any]
    """Settings of `afield train`, by key of the [train] table."""
    free: int
    """Bytes that stay free on the fullest GPU."""


class RejectedPlacement(Struct, frozen=True, kw_only=True):
    """A placement that does not fit, and why."""

    trainer_gpus: int
    """GPUs of the trainer."""
    engine_gpus: int
    """GPUs of the engines."""
    colocated: bool
    """Whether trainer and engines share their GPUs."""
    reason: str
    """Bytes that are needed and bytes that are there, in words."""


class MemoryPlan(Struct, frozen=True, kw_only=True):
    """Placements that fit, placements that do not, and changes that make one fit."""

    model: Architecture
    """Sizes of the model."""
    gpus: Gpus
    """GPUs that were planned for."""
    workload: Workload
    """Properties of the run."""
    fits: list[PlacementPlan]
    """Placements that fit; the first is recommended."""
    refused: list[RejectedPlacement]
    """Placements that do not fit."""
    nearest: list[str]
    """If nothing fits: changes with which something does."""


def gib(count: float) -> str:
    """Bytes in GiB, for people."""
    return f"{count / GIB:.1f} GiB"


def make_plan(model: Architecture, gpus: Gpus, workload: Workload) -> MemoryPlan:
    """Placements of a run on one machine. Raises UsageError for a workload that the model cannot do."""
    if workload.context > model.context:
        raise UsageError(
            f"context = {workload.context} is longer than the model's {model.context} tokens; lower it"
        )
    if workload.rank and model.experts:
        raise UsageError(
            f"adapters on all linear layers cannot be planned for the experts of {model.name}; leave out lora"
        )
    fits, refused = _placements(model, gpus, workload)
    nearest = [] if fits else list(_nearest(model, gpus, workload))
    return MemoryPlan(model=model, gpus=gpus, workload=workload, fits=fits, refused=refused, nearest=nearest)


def _placements(
    model: Architecture, gpus: Gpus, workload: Workload
) -> tuple[list[PlacementPlan], list[RejectedPlacement]]:
    fits: list[PlacementPlan] = []
    refused: list[RejectedPlacement] = []
    for trainers in powers_of_two(gpus.count):
        for colocated in (False, True):
            engines = trainers if colocated else gpus.count - trainers
            # Sharing is for a trainer that needs every GPU.
            if engines < 1 or (colocated and trainers < gpus.count):
                continue
            result = place(model, gpus, workload, trainers, engines, colocated=colocated)
            if isinstance(result, PlacementPlan):
                fits.append(result)
            else:
                refused.append(result)
    return fits, refused


def place(
    model: Architecture, gpus: Gpus, workload: Workload, trainers: int, engines: int, *, colocated: bool
) -> PlacementPlan | RejectedPlacement:
    """The fastest settings of one placement that fit."""

    def refusal(reason: str) -> RejectedPlacement:
        return RejectedPlacement(
            trainer_gpus=trainers, engine_gpus=engines, colocated=colocated, reason=reason
        )

    smallest: tuple[int, TrainerMemory] | None = None
    for shape in trainer_shapes(model, gpus, workload, trainers):
        memory = trainer_memory(model, shape)
        if smallest is None or memory.peak < smallest[0]:
            smallest = memory.peak, memory
        room = engine_room(gpus, workload, memory.peak if colocated else None)
        if memory.peak > gpus.usable:
            continue
        served = _serve(model, workload, engines, room)
        if served is None:
            continue
        engine_shape, engine, replicas = served
        # A server that vLLM starts takes a share of the GPU, filled with KV cache.
        taken = needed_by(engine, workload)
        free = min(gpus.usable - memory.peak, room - taken)
        return PlacementPlan(
            trainer_gpus=trainers,
            engine_gpus=engines,
            colocated=colocated,
            trainer=memory,
            trainer_shape=shape,
            engine=engine,
            engine_shape=engine_shape,
            replicas=replicas,
            host=host_bytes(model, shape),
            settings=_settings(gpus, workload, shape, engine_shape, replicas, colocated, room),
            free=free,
        )
    assert smallest is not None  # trainer_shapes yields the smallest pass for any workload
    peak, memory = smallest
    if peak > gpus.usable:
        return refusal(
            f"the trainer needs {gib(peak)} per GPU ({memory.phase}), {gib(gpus.usable)} are usable"
        )
    one = engine_memory(model, _engine_shape(model, workload, engines, 1))
    room = engine_room(gpus, workload, peak if colocated else None)
    return refusal(
        f"the engine needs {gib(needed_by(one, workload))} per GPU over {engines} GPUs, of which"
        f" {gib(one.weights)} are weights, for {workload.concurrency} calls of up to {workload.context}"
        f" tokens; {gib(max(room, 0))} are usable"
    )


def trainer_shapes(
    model: Architecture, gpus: Gpus, workload: Workload, devices: int
) -> Iterator[TrainerShape]:
    """Settings of the trainer, from the fastest to the most frugal."""
    for checkpointing in (False, True):
        for tokens in PASSES:
            # One row is never divided, so a pass is at least as long.
            if tokens < min(workload.context, PASSES[0]) and tokens != PASSES[-1]:
                continue
            if not checkpointing and tokens < min(16384, max(workload.context, PASSES[-1])):
                continue  # recomputing layers is cheaper than passes that do not fill the GPU
            longest = max(tokens, workload.context)
            for shared in (True, False) if can_share(workload, devices) else (False,):
                yield TrainerShape(
                    tokens=longest,
                    sampled=int(longest * workload.sampled_share),
                    passes=2,
                    checkpointing=checkpointing,
                    rank=workload.rank,
                    reference=workload.kl,
                    devices=devices,
                    shared_weights=shared,
                    rounded=True,
                    device_bytes=int(gpus.gib * GIB),
                )


def can_share(workload: Workload, devices: int) -> bool:
    """Whether a trainer on so many GPUs can share published weights in GPU memory."""
    return devices == 1 and not workload.rank


def engine_room(gpus: Gpus, workload: Workload, trainer: int | None) -> int:
    """Bytes of a GPU for an engine; `trainer` is the peak of a trainer that shares it."""
    if trainer is not None:
        return gpus.usable - trainer - DEVICE_CONTEXT
    return min(gpus.usable, int(VLLM_MEMORY * gpus.gib * GIB)) if workload.engine == "vllm" else gpus.usable


def _serve(
    model: Architecture, workload: Workload, engines: int, room: int
) -> tuple[EngineShape, EngineMemory, int] | None:
    """The smallest tensor parallelism with which every engine holds its calls at their longest."""
    splits = (
        [1] if workload.engine == "torch" else [n for n in powers_of_two(engines) if model.heads % n == 0]
    )
    for split in splits:
        replicas = 1 if workload.engine == "torch" else engines // split
        shape = _engine_shape(model, workload, split, replicas)
        memory = engine_memory(model, shape)
        if needed_by(memory, workload) <= room:
            return shape, memory, replicas
    return None


def needed_by(engine: EngineMemory, workload: Workload) -> int:
    """Bytes with which an engine rarely makes calls wait. The embedded one has room for the longest call in
    every slot; vLLM divides its cache by need."""
    one = engine.token * workload.context
    if workload.engine == "torch":
        return max(engine.peak, engine.weights + int(engine.cache / CACHE_SHARE))
    return engine.weights + engine.workspace + max(int(engine.cache * CACHE_FILL), one) + VLLM_OVERHEAD


def _engine_shape(model: Architecture, workload: Workload, split: int, replicas: int) -> EngineShape:
    calls = -(-workload.concurrency // replicas)
    if workload.engine == "torch":
        return EngineShape(calls=min(calls, MOST_SLOTS), context=workload.context)
    while split > 1 and model.heads % split:
        split //= 2
    return EngineShape(calls=calls, context=workload.context, tensor_parallel=split, prefill=VLLM_PREFILL)


def _settings(
    gpus: Gpus,
    workload: Workload,
    shape: TrainerShape,
    engine: EngineShape,
    replicas: int,
    colocated: bool,
    room: int,
) -> dict[str, Any]:
    learn: dict[str, Any] = {
        "dtype": shape.dtype,
        "checkpointing": shape.checkpointing,
        "max_tokens_per_pass": min(shape.tokens, max(p for p in PASSES if p <= shape.tokens)),
        "devices": shape.devices,
    }
    if workload.rank:
        learn["lora"] = {"rank": workload.rank}
    first = 0 if colocated else shape.devices
    values: dict[str, Any] = {
        "engine": workload.engine,
        "engine_dtype": engine.dtype,
        "concurrency": workload.concurrency,
        "max_context": workload.context,
    }
    if can_share(workload, shape.devices) and not shape.shared_weights:
        values["weight_transfer"] = "disk"  # there is no room for a buffer of the weights
    if workload.engine == "torch":
        values |= {"engine_devices": [first], "engine_slots": engine.calls}
    else:
        count = replicas * engine.tensor_parallel
        share = room / (gpus.gib * GIB) if colocated else VLLM_MEMORY
        values |= {
            "engine_devices": list(range(first, first + count)),
            "vllm_tensor_parallel": engine.tensor_parallel,
            "vllm_replicas": replicas,
            "vllm_memory": int(min(share, VLLM_MEMORY) * 100) / 100,
            "vllm_max_seqs": engine.calls,
        }
    return values | {"learn": learn}


def _nearest(model: Architecture, gpus: Gpus, workload: Workload) -> Iterator[str]:
    """Changes with which something fits, each with its numbers."""
    if not workload.rank and not model.experts:
        smaller = structs.replace(workload, rank=ADAPTER_RANK)
        if fits := _placements(model, gpus, smaller)[0]:
            peak = gib(fits[0].trainer.peak)
            yield f"adapters on the same GPUs: --lora {ADAPTER_RANK} takes {peak} per GPU in the trainer"
    for calls in (128, 64, 32, 16, 8):
        smaller = structs.replace(workload, concurrency=calls)
        if calls < workload.concurrency and _placements(model, gpus, smaller)[0]:
            yield f"fewer rollouts at once: --concurrency {calls}"
            break
    count = gpus.count
    while (count := count * 2) <= 64:
        more = structs.replace(gpus, count=count)
        if fits := _placements(model, more, workload)[0]:
            best = fits[0]
            yield (
                f"more GPUs in one machine: --gpus {more}, of which the trainer takes {best.trainer_gpus}"
                f" with {gib(best.trainer.peak)} each"
            )
            break
    for size in SIZES:
        larger = structs.replace(gpus, gib=float(size))
        if size > gpus.gib and (fits := _placements(model, larger, workload)[0]):
            yield f"larger GPUs: --gpus {larger}; the trainer takes {gib(fits[0].trainer.peak)} of each"
            break


def powers_of_two(most: int) -> list[int]:
    """Powers of two up to `most`, and `most`."""
    powers = [1 << n for n in range(most.bit_length()) if 1 << n <= most]
    return powers if most in powers else [*powers, most]


def toml(settings: Mapping[str, Any]) -> str:
    """Settings as a [train] table of a configuration file."""
    tables = {key: value for key, value in settings.items() if isinstance(value, Mapping)}
    lines = ["[train]", *(f"{key} = {_value(v)}" for key, v in settings.items() if key not in tables)]
    for name, table in tables.items():
        lines += ["", f"[train.{name}]", *(f"{key} = {_value(value)}" for key, value in table.items())]
    return "\n".join(lines)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(part)}" for key, part in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
