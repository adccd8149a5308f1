"""`afield plan`: what fits into GPUs, and with which settings."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec

from afield.errors import UsageError
from afield.planning.architecture import read_architecture
from afield.planning.placement import (
    EngineKind,
    MemoryPlan,
    PlacementPlan,
    Workload,
    gib,
    make_plan,
    parse_gpus,
    toml,
)

DEFAULT_CONTEXT = 8192
LARGEST_MACHINE = 8
"""GPUs of most machines; the embedded trainer shards over the GPUs of one."""


def add(commands: Any) -> None:
    command = commands.add_parser(
        "plan",
        help="say what fits into GPUs, and with which settings",
        usage="afield plan --model DIR --gpus COUNTxGIB [options]",
        description="Estimate the memory of the embedded trainer and the engine on the GPUs of one machine,"
        " and print settings that fit. Reads config.json and the headers of safetensors files, no weights."
        " Exit code: 0 if a placement fits, 1 if none does, 2 for wrong input.",
    )
    command.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="model directory in Hugging Face format"
    )
    command.add_argument(
        "--gpus", required=True, metavar="COUNTxGIB", help="GPUs and GiB of each, such as 8x80"
    )
    command.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="longest rollout in tokens (default: 8192, at most the model's)",
    )
    command.add_argument(
        "--concurrency", type=int, default=256, metavar="N", help="rollouts at once (default: 256)"
    )
    command.add_argument(
        "--sampled-share",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="share of a rollout's tokens that the model sampled (default: 0.5)",
    )
    command.add_argument(
        "--lora", type=int, default=0, metavar="RANK", help="rank of LoRA adapters; 0 trains all weights"
    )
    command.add_argument("--kl", action="store_true", help="plan for a KL penalty to the starting policy")
    command.add_argument(
        "--engine",
        choices=get_args(EngineKind),
        default="vllm",
        help="engine: managed vLLM, or the embedded one (torch) on a single GPU (default: vllm)",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    for name in ("context", "concurrency"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UsageError(f"{name} = {value} must be at least 1")
    if not 0 < args.sampled_share <= 1:
        raise UsageError(f"sampled_share = {args.sampled_share:g} must be above 0 and at most 1")
    if args.lora < 0:
        raise UsageError(f"lora = {args.lora} must be 0 or a rank")
    model = read_architecture(args.model)
    plan = make_plan(
        model,
        parse_gpus(args.gpus),
        Workload(
            context=args.context or min(DEFAULT_CONTEXT, model.context),
            concurrency=args.concurrency,
            sampled_share=args.sampled_share,
            rank=args.lora,
            kl=args.kl,
            engine=args.engine,
        ),
    )
    if args.json:
        print(json.dumps({"parameters": model.parameters, **msgspec.to_builtins(plan)}))
    else:
        print("\n".join(lines(plan)))
    return 0 if plan.fits else 1


def lines(plan: MemoryPlan) -> Iterator[str]:
    """The plan for people."""
    model = plan.model
    kind = f"{model.experts} experts, {model.experts_per_token} at a time, " if model.experts else ""
    yield (
        f"{model.name}: {model.parameters / 1e9:.2f} B parameters, {kind}{model.layers} layers,"
        f" {'tied' if model.tied else 'untied'} embeddings"
    )
    yield (
        f"{plan.gpus}: {gib(plan.gpus.usable)} of each GPU are planned with; the rest is for the CUDA"
        " context and fragmentation"
    )
    for placement in plan.fits:
        yield f"fits      {_placed(placement)}: {_summary(placement)}"
    for refused in plan.refused:
        yield f"too large {_placed(refused)}: {refused.reason}"
    if not plan.fits:
        yield ""
        if not plan.nearest:
            yield "nothing near fits either; take a smaller model, or train with veRL on several machines"
        for near in plan.nearest:
            yield f"fits with {near}"
        return
    best = plan.fits[0]
    trainer, engine = best.trainer, best.engine
    yield ""
    yield f"trainer, per GPU: {gib(trainer.peak)} at its peak ({trainer.phase})"
    parts = (
        ("weights", trainer.weights),
        ("reference", trainer.reference),
        ("gradients", trainer.gradients),
        ("AdamW", trainer.optimizer),
        ("activations", trainer.activations),
        ("output layer", trainer.logits),
        ("gathered", trainer.gathered),
    )
    yield "  " + ", ".join(f"{name} {gib(size)}" for name, size in parts if size)
    yield "  peaks: " + ", ".join(f"{name} {gib(size)}" for name, size in trainer.phases.items())
    yield (
        f"engine, per GPU: weights {gib(engine.weights)}, KV cache {gib(engine.cache)} if all"
        f" {best.engine_shape.calls} calls have {best.engine_shape.context} tokens ({engine.token:,} bytes a"
        f" token), workspace {gib(engine.workspace)}"
    )
    yield f"machine: {gib(best.host)} of memory while the trainer loads"
    if plan.gpus.count > LARGEST_MACHINE:
        yield "note: trainer and engines are planned for one machine; for several, see the page on veRL"
    yield ""
    yield toml(best.settings)


def _placed(placement: Any) -> str:
    where = "shared with the engine" if placement.colocated else f"engine on {placement.engine_gpus}"
    return f"trainer on {placement.trainer_gpus}, {where}"


def _summary(placement: PlacementPlan) -> str:
    shape = placement.trainer_shape
    return (
        f"trainer {gib(placement.trainer.peak)} per GPU, passes of {shape.tokens} tokens,"
        f" {'with' if shape.checkpointing else 'no'} checkpointing; engine {placement.replicas} x"
        f" {placement.engine_shape.tensor_parallel} GPUs; {gib(placement.free)} free"
    )
