"""`afield plan`: what fits into GPUs, and how fast it runs."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from afield.errors import UsageError
from afield.orchestrator.groups import Mode
from afield.planning.architecture import Architecture, read_architecture
from afield.planning.costs import engine_costs, read_costs
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
from afield.planning.scaling import LoopPlan, LoopRequest, plan_loop
from afield.planning.simulation import AgentLoad, Spread
from afield.settings.train import STALENESS

DEFAULT_CONTEXT = 8192
LARGEST_MACHINE = 8
"""GPUs of most machines; the embedded trainer shards over the GPUs of one."""
COMPARED: tuple[Mode, ...] = ("sync", "async")
"""Modes that are simulated if none is given."""
SIMULATED = {
    "agents": ("--agents", int, 256, "N", "agents at once, which the engines and the gateway serve"),
    "tasks_per_step": ("--tasks-per-step", int, None, "N", "groups of a step (default: agents / rollouts)"),
    "rollouts": ("--rollouts", int, 16, "N", "rollouts of a group"),
    "turns": ("--turns", float, 20.0, "N", "mean model calls of a rollout"),
    "prompt_tokens": ("--prompt-tokens", float, 2000.0, "N", "mean tokens of the first prompt"),
    "reply_tokens": ("--reply-tokens", float, 300.0, "N", "mean tokens that a call samples"),
    "tool_tokens": ("--tool-tokens", float, 500.0, "N", "mean tokens that a tool result adds"),
    "tool_s": ("--tool-s", float, 4.7, "S", "mean seconds of an agent between two calls"),
    "tool_spread": ("--tool-spread", float, 1.3, "SIGMA", "sigma of the log-normal seconds of tools"),
    "token_spread": ("--token-spread", float, 0.5, "SIGMA", "sigma of log-normal turns and tokens"),
    "max_staleness": ("--max-staleness", int, None, "N", "max_staleness of mode async (default: 2)"),
    "trainer_gpus": ("--trainer-gpus", int, None, "N", "GPUs of the trainer (default: the fastest division)"),
    "gateway_processes": (
        "--gateway-processes", int, None, "N", "gateway processes (default: as many as the load needs)"
    ),
    "steps": ("--steps", int, 2, "N", "measured steps"),
    "seed": ("--seed", int, 0, "N", "seed of the simulation"),
}  # fmt: skip
"""Options of --simulate with a number: flag, type, default, placeholder, help."""
AT_LEAST = {"tool_s": 0.0, "tool_spread": 0.0, "token_spread": 0.0, "tool_tokens": 0.0, "seed": 0.0}
"""Least values of those options; 1 for the others."""


def add(commands: Any) -> None:
    command = commands.add_parser(
        "plan",
        help="say what fits into GPUs, and with which settings",
        usage="afield plan --model DIR --gpus COUNTxGIB [options]\n"
        "       afield plan --model DIR --gpus COUNTxGIB[,...] --simulate [options]",
        description="Estimate the memory of the embedded trainer and the engine on the GPUs of one machine,"
        " and print settings that fit. With --simulate, forecast seconds per step, bottleneck and gateway"
        " processes of a whole loop on any number of GPUs, from measured costs."
        " Reads config.json and the headers of safetensors files, no weights."
        " Exit code: 0 if a placement fits, 1 if none does, 2 for wrong input.",
    )
    command.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="model directory in Hugging Face format"
    )
    command.add_argument(
        "--gpus",
        required=True,
        metavar="COUNTxGIB",
        help="GPUs and GiB of each, such as 8x80; several with --simulate, such as 8x141,64x141",
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
    _add_simulation(command)
    command.set_defaults(run=run)


def _add_simulation(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("simulation")
    group.add_argument(
        "--simulate", action="store_true", help="simulate the loop instead of its memory alone"
    )
    group.add_argument(
        "--costs",
        default="h200",
        metavar="FILE",
        help="measured costs: a file of bench/plan/simulate.py, or h200 (default: h200)",
    )
    group.add_argument("--mode", choices=get_args(Mode), help="mode of the run (default: sync and async)")
    group.add_argument("--no-stream", action="store_true", help="agents do not stream replies")
    for name, (flag, kind, default, placeholder, text) in SIMULATED.items():
        text += f" (default: {default:g})" if default is not None else ""
        group.add_argument(flag, dest=name, type=kind, metavar=placeholder, help=text)


def run(args: argparse.Namespace) -> int:
    _check(args)
    model = read_architecture(args.model)
    workload = Workload(
        context=args.context or min(DEFAULT_CONTEXT, model.context),
        concurrency=args.concurrency,
        sampled_share=args.sampled_share,
        rank=args.lora,
        kl=args.kl,
        engine=args.engine,
    )
    if args.simulate:
        return _simulate(args, model, workload)
    plan = make_plan(model, parse_gpus(args.gpus), workload)
    if args.json:
        print(json.dumps({"parameters": model.parameters, **msgspec.to_builtins(plan)}))
    else:
        print("\n".join(lines(plan)))
    return 0 if plan.fits else 1


def _check(args: argparse.Namespace) -> None:
    for name in ("context", "concurrency"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UsageError(f"{name} = {value} must be at least 1")
    if not 0 < args.sampled_share <= 1:
        raise UsageError(f"sampled_share = {args.sampled_share:g} must be above 0 and at most 1")
    if args.lora < 0:
        raise UsageError(f"lora = {args.lora} must be 0 or a rank")
    for name, (flag, _, _, _, _) in SIMULATED.items():
        value = getattr(args, name)
        if value is None:
            continue
        if not args.simulate:
            raise UsageError(f"{flag} = {value:g} is an option of the simulation; add --simulate")
        least = AT_LEAST.get(name, 1.0)
        if not least <= value < math.inf:
            raise UsageError(f"{name} = {value:g} must be at least {least:g}")


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
        ("published weights", trainer.shared),
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


# --- simulation -----------------------------------------------------------------------------------


def _simulate(args: argparse.Namespace, model: Architecture, workload: Workload) -> int:
    costs = read_costs(args.costs)
    engine_costs(costs, workload.engine)
    clusters = [parse_gpus(text) for text in args.gpus.split(",")]
    request = LoopRequest(
        model,
        costs,
        _load(args),
        workload,
        steps=args.steps or 2,
        seed=args.seed or 0,
        trainer_gpus=args.trainer_gpus,
        gateway_processes=args.gateway_processes,
    )
    longest = _mean_context(request.load)
    if args.context is None:
        request = request._replace(workload=msgspec.structs.replace(workload, context=int(longest)))
    if request.workload.context > model.context:
        raise UsageError(
            f"context = {request.workload.context} is more than the model's {model.context} tokens; a rollout"
            f" has {longest:.0f} on average. Lower --turns, --reply-tokens or --tool-tokens"
        )
    plans = [
        plan_loop(request, gpus, mode, _staleness(args, mode))
        for gpus in clusters
        for mode in ([args.mode] if args.mode else COMPARED)
    ]
    if args.json:
        constants = {name: msgspec.to_builtins(value) for name, value in costs.constants(workload.engine)}
        print(
            json.dumps(
                {
                    "parameters": model.parameters,
                    "machine": costs.machine,
                    "costs": constants,
                    "unmeasured": costs.unmeasured,
                    "plans": msgspec.to_builtins(plans),
                }
            )
        )
    else:
        print("\n".join(simulation_lines(request, plans)))
    return 0


def _load(args: argparse.Namespace) -> AgentLoad:
    values = {
        name: getattr(args, name) if getattr(args, name) is not None else default
        for name, (_, _, default, _, _) in SIMULATED.items()
    }
    for name in ("tool_spread", "token_spread"):
        if values[name] > 5:
            raise UsageError(f"{name} = {values[name]:g} must be at most 5")
    spread = values["token_spread"]
    return AgentLoad(
        agents=values["agents"],
        tasks_per_step=values["tasks_per_step"] or max(1, round(values["agents"] / values["rollouts"])),
        rollouts=values["rollouts"],
        turns=Spread(values["turns"], spread),
        prompt=Spread(values["prompt_tokens"], spread),
        reply=Spread(values["reply_tokens"], spread),
        added=Spread(values["tool_tokens"], spread),
        tool_s=Spread(values["tool_s"], values["tool_spread"]),
        stream=not args.no_stream,
    )


def _mean_context(load: AgentLoad) -> float:
    return load.prompt.mean + load.turns.mean * (load.reply.mean + load.added.mean)


def _staleness(args: argparse.Namespace, mode: Mode) -> int:
    if mode == "async" and args.max_staleness is not None:
        return args.max_staleness
    if args.mode and args.max_staleness is not None:
        raise UsageError(
            f"max_staleness = {args.max_staleness} needs --mode async; mode {mode} has a staleness of"
            f" {STALENESS[mode]}"
        )
    return STALENESS[mode]


def simulation_lines(request: LoopRequest, plans: Sequence[LoopPlan]) -> Iterator[str]:
    """Forecasts for people."""
    load, costs, engine = request.load, request.costs, request.workload.engine
    yield (
        f"{request.model.name}: {request.model.parameters / 1e9:.2f} B parameters, {engine}, costs of"
        f" {costs.machine}"
    )
    yield (
        f"{load.agents:,} agents; a step is {load.tasks_per_step:,} groups of {load.rollouts} rollouts of"
        f" {load.turns.mean:g} turns, {load.reply.mean:g} tokens per reply,"
        f" {load.tool_s.mean:g} s of tools per turn"
    )
    yield ""
    head = ("gpus", "mode", "trainer + engines", "s/step", "tokens/s", "engines busy", "trainer busy")
    rows = [(*head, "gateways", "bottleneck"), *map(_row, plans)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield ""
    for plan in plans:
        yield f"{plan.cluster.gpus}, {plan.mode}: {_spent(plan)}"
        uneven = plan.forecast.produced_per_s / plan.forecast.sampled_per_s
        if not 0.8 < uneven < 1.25:
            yield (
                f"{plan.cluster.gpus}, {plan.mode}: not a steady state, engines sample {uneven:.2f} times"
                " what is trained; raise --steps"
            )
    for before, after in itertools.pairwise(plans):
        if before.cluster.gpus == after.cluster.gpus:
            gain = after.forecast.sampled_per_s / before.forecast.sampled_per_s
            yield (
                f"{after.cluster.gpus}: mode {after.mode} samples {gain:.2f} times the tokens/s of mode"
                f" {before.mode}"
            )
    yield ""
    yield "constants:"
    for name, constant in costs.constants(engine):
        yield f"  {name} = {constant.value:.4g} ({constant.basis}: {constant.source})"
    for part in costs.unmeasured:
        yield f"  left out: {part}"


def _row(plan: LoopPlan) -> tuple[str, ...]:
    forecast = plan.forecast
    tensor = plan.cluster.tensor_parallel
    busy = 1 - (forecast.engines["idle"] + forecast.engines["weights"]) / forecast.step_s
    share = forecast.shares[forecast.bottleneck]
    return (
        str(plan.cluster.gpus),
        plan.mode + (f" {plan.staleness}" if plan.mode == "async" else ""),
        f"{plan.cluster}" + (f" (TP {tensor})" if tensor > 1 else ""),
        f"{forecast.step_s:,.1f}",
        f"{forecast.sampled_per_s:,.0f}",
        f"{busy:.0%}",
        f"{forecast.trainer['training'] / forecast.step_s:.0%}",
        str(plan.gateway_processes),
        f"{forecast.bottleneck} ({share:.0%})",
    )


def _spent(plan: LoopPlan) -> str:
    """Seconds of a step by trainer, and of an agent by state."""
    trainer, agents = plan.forecast.trainer, plan.forecast.agents
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in trainer.items())
    states = ", ".join(f"{name} {max(0.0, seconds):.1f} s" for name, seconds in agents.items())
    reused = f"{plan.forecast.reused:.0%} of prompt tokens from the KV cache"
    return f"a step of the trainer: {parts}; of an agent: {states}; {reused}"


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
