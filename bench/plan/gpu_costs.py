"""Costs of a loop on an H200, from results of earlier runs.

    python -m bench.plan.gpu_costs

Writes src/afield/planning/measured/h200.json. Every constant names the result that it comes from; what no run
has measured is 0 and listed as unmeasured.
"""

from __future__ import annotations

import sys
from statistics import median
from typing import Any

import msgspec

from afield.planning.architecture import Architecture, architecture_of
from afield.planning.costs import MEASURED, Constant, EngineCosts, LoopCosts, forward_flops
from afield.planning.memory import kv_token_bytes
from afield.planning.placement import VLLM_PREFILL
from bench.report import newest
from bench.sizing import Costs, Rollouts, read_costs

FILE = MEASURED / "h200.json"
HALF_BILLION: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151_936, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
"""Model of `bench/engine` (its own module needs torch)."""
THIRD = HALF_BILLION | {"vocab_size": 32_768, "tie_word_embeddings": False}
"""Model of `bench/gpu/loop.py`."""
SMOLLM_PARAMETERS = 134_515_008
VISIT = "bench/gpu/loop.py on an H200 with vLLM 0.26.0, November 2026, 0.38 B (result not kept)"


class LoopPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Rate of `bench/gpu/loop.py`: sessions at once, all of equal length."""

    sessions: int
    """Sessions at once."""
    turns: int
    """Turns of a session."""
    tokens_per_s: float
    """Sampled tokens per second."""
    stream: bool = False
    """Whether replies are streamed."""


VLLM_POINTS = (
    LoopPoint(sessions=64, turns=4, tokens_per_s=8905),
    LoopPoint(sessions=256, turns=1, tokens_per_s=13453),
)
"""Rates from which the costs of vLLM are derived."""
CHECK_POINTS = (
    LoopPoint(sessions=256, turns=4, tokens_per_s=12514),
    LoopPoint(sessions=256, turns=4, tokens_per_s=8728, stream=True),
)
"""Rates with which forecasts are compared; no cost is derived from them."""
REPLY, PROMPT, ADDED = 256, 180, 60
"""Tokens of the loop's replies, first prompts and later messages."""
GATEWAY_CORES = (0.10, 0.64)
"""Cores that the gateway took at the check points, without and with streaming."""


def context_of(turns: int) -> float:
    """Mean cached tokens of a sequence that decodes, over the turns of a session."""
    return PROMPT + REPLY / 2 + (turns - 1) / 2 * (REPLY + ADDED)


def measured(value: float, source: str) -> Constant:
    return Constant(value=float(f"{value:.4g}"), basis="measured", source=source)


def derived(value: float, source: str) -> Constant:
    return Constant(value=float(f"{value:.4g}"), basis="derived", source=source)


def assumed(value: float, source: str) -> Constant:
    return Constant(value=value, basis="assumed", source=source)


def embedded(saved: dict[str, Any], model: Architecture) -> EngineCosts:
    """Costs of the embedded engine from two recorded steps, a run's mean step, and its prefill."""
    name = f"bench/results/engine-{saved['commit'][:12]}.json, 0.53 B"
    load, result = saved["machine"]["load"], saved["afield"]
    (few, few_ms), (many, many_ms) = sorted(
        (int(shape.partition("x")[0]), ms) for shape, ms in result["ms_per_step_by_length"].items()
    )
    length = load["prompt"] + load["new"] + 64
    token = kv_token_bytes(model)
    reading = (many - few) * length * token / (many_ms - few_ms) * 1000
    mean_kv = load["requests"] * (load["prompt"] + load["new"] / 2)
    weights = (model.decoder + model.embedding) * 2
    step_s = result["ms_per_step"] / 1000 - (weights + mean_kv * token) / reading
    tokens = load["requests"] * load["prompt"]
    flops = tokens * forward_flops(model, load["prompt"] / 2) / result["prefill_s"]
    return EngineCosts(
        step_s=derived(step_s, f"{name}: mean step of {result['ms_per_step']} ms, minus its bytes"),
        sequence_s=assumed(0.0, "in step_s: the embedded engine's step is a CUDA graph"),
        bytes_per_s=derived(
            reading, f"{name}: steps of {few} and {many} sequences with {length} tokens each"
        ),
        prefill_s=assumed(0.0, "in prefill_flops_per_s"),
        prefill_flops_per_s=derived(flops, f"{name}: {tokens} tokens in {result['prefill_s']} s"),
        prefill_tokens=load["prefill_tokens"],
        own_gateway=True,
    )


def vllm(torch: EngineCosts, model: Architecture) -> EngineCosts:
    """Costs of vLLM behind the gateway, from two rates of the loop."""
    reading = torch.bytes_per_s.value
    few, many = VLLM_POINTS

    def host(point: LoopPoint) -> float:
        """Seconds of a step beside reading bytes."""
        kv = point.sessions * context_of(point.turns) * kv_token_bytes(model)
        return point.sessions / point.tokens_per_s - (kv + (model.decoder + model.embedding) * 2) / reading

    sequence_s = (host(many) - host(few)) / (many.sessions - few.sessions)
    where = (
        f"{VISIT}: {few.tokens_per_s:g} tokens/s at {few.sessions}, {many.tokens_per_s:g} at {many.sessions}"
    )
    return EngineCosts(
        step_s=derived(host(many) - many.sessions * sequence_s, where),
        sequence_s=derived(sequence_s, f"{where}; includes HTTP, sampling and log-probabilities"),
        bytes_per_s=derived(reading, f"as the embedded engine: {torch.bytes_per_s.source}"),
        prefill_s=assumed(0.0, "in prefill_flops_per_s"),
        prefill_flops_per_s=derived(
            torch.prefill_flops_per_s.value, f"as the embedded engine: {torch.prefill_flops_per_s.source}"
        ),
        prefill_tokens=VLLM_PREFILL,
        own_gateway=False,
    )


def gateway(costs: Costs, commit: str) -> dict[str, Constant]:
    """Costs of the gateway: of the GPU machine where it was seen there, else of the CPU benchmark."""
    whole, streamed = CHECK_POINTS
    call_s = GATEWAY_CORES[0] / (whole.tokens_per_s / REPLY)
    token_s = (GATEWAY_CORES[1] - call_s * streamed.tokens_per_s / REPLY) / streamed.tokens_per_s
    history_s = costs.kilobyte_us * Rollouts().bytes_per_token / 1000 * costs.loop_share / 1e6
    return {
        "gateway_call_s": derived(call_s, f"{VISIT}: {GATEWAY_CORES[0]:.2f} cores"),
        "gateway_token_s": derived(token_s, f"{VISIT}: {GATEWAY_CORES[1]:.2f} cores while streaming"),
        "gateway_history_s": derived(
            history_s,
            f"bench/results/gateway-cost-{commit}.json, 2 cores of a CPU machine; 4.5 bytes a token",
        ),
        "gateway_delay_s": assumed(0.0, "not measured"),
    }


def result(name: str) -> dict[str, Any]:
    found = newest(name)
    if found is None:
        raise SystemExit(f"bench/results has no {name}")
    return found


def h200() -> LoopCosts:
    """Costs from the newest results."""
    tree, steps = result("tree"), result("smollm")
    model = architecture_of(HALF_BILLION, "bench/engine")
    torch = embedded(result("engine"), model)
    cost, size = result("gateway-cost"), result("sizing")
    late = steps["steps"][2:]
    step = f"bench/results/smollm-{steps['commit'][:12]}.json, 0.135 B"
    forest = tree["forest"]
    published = median(s["publish_s"] for s in late)
    return LoopCosts(
        machine="NVIDIA H200",
        dtype="bfloat16",
        engines={"vllm": vllm(torch, architecture_of(THIRD, "bench/gpu/loop.py")), "torch": torch},
        train_s=derived(
            median(s["train_s"] for s in late),
            f"{step}: steps 3 to 8, with AdamW and export; taken as independent of the model's size",
        ),
        train_flops_per_s=measured(
            forest["tflops"] * 1e12,
            f"bench/results/tree-{tree['commit'][:12]}.json, 1.47 B, one GPU: forward and backward pass"
            " of a tree with checkpointing",
        ),
        publish_s=assumed(0.0, "in publish_bytes_per_s"),
        publish_bytes_per_s=derived(
            SMOLLM_PARAMETERS * 2 / published,
            f"{step}: {published} s of one size, taken as all transfer; too slow for large models, if"
            " part of it is fixed",
        ),
        **gateway(read_costs(cost, size["measured"]), cost.get("commit", "")[:12] or "9a60cbaededd"),
        launch_s=assumed(0.0, "not measured"),
        launch_work_s=assumed(0.0, "not measured"),
        finish_s=assumed(0.0, "not measured"),
        poll_s=derived(0.125, "half of the longest pause in orchestrator/state.py"),
        unmeasured=[
            "launch of agents",
            "communication of tensor parallelism and of a trainer on several GPUs: work is divided evenly",
            "AdamW of models above 0.135 B",
            "vLLM with models other than 0.38 B",
            "prefixes that rollouts of a group share in the KV cache: each rollout prefills its own",
        ],
    )


def main() -> int:
    MEASURED.mkdir(exist_ok=True)
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(h200()), indent=1) + b"\n")
    print(FILE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
