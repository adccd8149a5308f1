"""Timing and log-probabilities of the embedded engine's decoder.

Needs torch and transformers only.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from afield.engines.torch import decode_kernels
from afield.engines.torch.cuda_graphs import CudaGraphRunner, StepShape
from afield.engines.torch.decoder import DecodeCall, DecodeParams, Decoder, SampledTokens
from afield.engines.torch.kv_cache import KVCache
from bench.engine.workload import FAILURES, Load, peak_gib, prompts, timed, wait


class Answer:
    """Where one request's tokens go."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []

    def put(self, sampled: SampledTokens) -> None:
        self.token_ids += sampled.token_ids
        self.logprobs += sampled.logprobs

    def fail(self, reason: str) -> None:
        raise RuntimeError(reason)


def fit(model: Any, ways: str = "") -> decode_kernels.KernelFit:
    """As the embedded engine does when it starts, unless kernels are given."""
    model.set_attn_implementation("sdpa")
    kernels = {
        "triton": lambda: decode_kernels.triton_ways()[0],
        "flash": lambda: decode_kernels.FLASH,
        "plain": lambda: decode_kernels.PLAIN,
    }
    light = model.device.type == "cuda" if not ways else ways != "none"
    fitted = decode_kernels.fit(model, 12, light=light, ways=kernels[ways]() if ways in kernels else None)
    assert fitted.off <= decode_kernels.ROUNDING[model.dtype], fitted.off
    return fitted


def make_decoder(model: Any, load: Load, ways: decode_kernels.DecodeKernels | None) -> Decoder:
    context = load.prompt + load.new + 64
    slots = KVCache(model.config.num_hidden_layers, load.requests, context, model.dtype, model.device, ways)
    return Decoder(
        model,
        slots,
        version=0,
        max_context=context,
        prefill_tokens=load.prefill_tokens,
        weights=list(model.parameters()),
        steps=CudaGraphRunner(model, slots, load.requests),
    )


def serve(decoder: Decoder, requests: list[list[int]], new: int, stream: bool) -> list[Answer]:
    answers = [Answer() for _ in requests]
    for n, (prompt, answer) in enumerate(zip(requests, answers, strict=True)):
        decoder.add(DecodeCall(DecodeParams(prompt, max_tokens=new, seed=n, stream=stream), answer))
    while not decoder.idle:
        decoder.step()
    return answers


def afield(
    model: Any, load: Load, fitted: decode_kernels.KernelFit
) -> tuple[dict[str, Any], list[list[int]], list[Answer]]:
    device, vocabulary = model.device, model.config.vocab_size
    decoder = make_decoder(model, load, fitted.ways)
    steps = decoder.steps
    assert steps is not None
    first_s, _ = timed(device, lambda: serve(decoder, prompts(load, vocabulary, 1), load.new, stream=False))
    prefill_s, _ = timed(device, lambda: serve(decoder, prompts(load, vocabulary, 2), 1, stream=False))
    seconds: list[float] = []
    requests, answers = prompts(load, vocabulary, 3), list[Answer]()
    for n in range(load.repeats):
        requests = prompts(load, vocabulary, 3 + n)
        took, answers = timed(
            device, lambda requests=requests: serve(decoder, requests, load.new, stream=False)
        )
        seconds.append(took)
    streaming_s, _ = timed(
        device, lambda: serve(decoder, prompts(load, vocabulary, 9), load.new, stream=True)
    )
    assert all(len(answer.token_ids) == load.new for answer in answers)
    took = statistics.median(seconds)
    other = prompts(load, vocabulary, 8)
    again, _, once_more = (serve(decoder, p, load.new, stream=False) for p in (requests, other, requests))
    result = {
        "tok_s": round(load.requests * load.new / took),
        "runs_s": [round(s, 3) for s in seconds],
        "tok_s_streaming": round(load.requests * load.new / streaming_s),
        "first_run_s": round(first_s, 2),
        "prefill_s": round(prefill_s, 3),
        "ms_per_step": round(1000 * (took - prefill_s) / (load.new - 1), 3),
        "recorded": steps.recorded,
        "recording_s": round(steps.recording_s, 2),
        "refused": steps.refused,
        "shapes": {named(shape): times for shape, times in steps.launched.items()},
        "same_again": sum(a.token_ids == b.token_ids for a, b in zip(again, once_more, strict=True)),
        "peak_gib": peak_gib(device),
    }  # fmt: skip
    if device.type == "cuda":
        result["ms_per_step_by_length"] = device_ms(steps)
    return result, requests, answers


def named(shape: StepShape) -> str:
    return f"{shape.rows}x{shape.length}{' gathered' if shape.gathered else ''}"


def device_ms(steps: CudaGraphRunner) -> dict[str, float]:
    """What one recorded step takes on the device alone, replayed as it is."""
    took: dict[str, float] = {}
    for shape in [*steps.launched]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        steps.replay(shape)
        start.record()
        for _ in range(10):
            steps.replay(shape)
        end.record()
        end.synchronize()
        took[named(shape)] = round(start.elapsed_time(end) / 10, 3)
    return took


def attention_us(model: Any, load: Load) -> dict[str, Any]:
    """One layer's decode attention half-way through, in each of the ways there are."""
    config, lanes = model.config, load.requests
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    length = load.prompt + load.new
    # Several memories, so that none is found in the cache.
    memory = torch.randn(4, 2, lanes + 1, length + 64, kv_heads, size, dtype=model.dtype, device=model.device)
    q = torch.randn(lanes, heads, size, dtype=model.dtype, device=model.device)
    rows = torch.arange(lanes, dtype=torch.int32, device=model.device)
    positions = torch.full_like(rows, load.prompt + load.new // 2)
    ways: dict[str, Callable[..., Tensor]] = {
        "flash": decode_kernels.flash_attend,
        "plain": decode_kernels.attend,
    }
    failures: tuple[type[Exception], ...] = FAILURES
    try:
        from afield.engines.torch import triton_kernels
    except ImportError as error:
        print(f"no Triton: {error}", flush=True)
    else:
        failures += triton_kernels.REFUSALS
        for step, warps, stages in itertools.product((32, 64, 128), (2, 4), (2, 3)):
            way = partial(triton_kernels.attend, step=step, warps=warps, stages=stages)
            ways[f"triton {step} keys, {warps} warps, {stages} stages"] = way
    took: dict[str, Any] = {}
    for name, way in ways.items():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        try:
            for n in range(20):
                if n == 4:
                    start.record()
                way(q, *memory[n % 4], rows, positions, size**-0.5)
            end.record()
            end.synchronize()
            took[name] = round(1000 * start.elapsed_time(end) / 16, 1)
        except failures as error:
            took[name] = f"{type(error).__name__}: {error}"[:200]
    read = 2 * lanes * (load.prompt + load.new // 2) * kv_heads * size * memory.element_size()
    return {"us": took, "read_mb": round(read / 1e6)}


def profiled(model: Any, load: Load, ways: decode_kernels.DecodeKernels | None) -> list[str]:
    """Where the device's time goes in one decode step, by kernel."""
    decoder = make_decoder(model, load, ways)
    for n, prompt in enumerate(prompts(load, model.config.vocab_size, 1)):
        decoder.add(DecodeCall(DecodeParams(prompt, max_tokens=load.new, seed=n), Answer()))
    for _ in range(load.new // 2):
        decoder.step()
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as profile:
        for _ in range(4):
            decoder.step()
        wait(model.device)
    events = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    return [f"{e.self_device_time_total / 4:9.0f} us {e.count / 4:6.0f}x {e.key[:90]}" for e in events[:24]]


# --- exactness ------------------------------------------------------------------------------------


def plain_logprobs(model: Any, prompt: int, rows: list[list[int]]) -> Tensor:
    """Of every id after the prompt, by one forward pass of the model's own layers, as a trainer makes it."""
    model.set_attn_implementation("sdpa")
    scored: list[Tensor] = []
    for row in rows:
        ids = torch.tensor([row], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, prompt - 1 : -1].float()
        scored.append(torch.log_softmax(logits, dim=-1).gather(1, ids[0, prompt:, None])[:, 0])
    return torch.stack(scored)


def difference(a: Tensor, b: Tensor) -> dict[str, float]:
    off = (a.double() - b.double()).abs()
    return {"max": float(f"{off.max():.3g}"), "mean": float(f"{off.mean():.3g}")}


def exactness(model: Any, load: Load, requests: list[list[int]], answers: list[Answer]) -> dict[str, Any]:
    """In the model's own type, and in float32, where nothing but the order of sums may differ."""
    rows = [[*prompt, *answer.token_ids] for prompt, answer in zip(requests, answers, strict=True)][:32]
    engine = torch.tensor([answer.logprobs for answer in answers][:32], device=model.device)
    trainer = plain_logprobs(model, load.prompt, rows)
    result: dict[str, Any] = {
        str(model.dtype).removeprefix("torch."): difference(engine, trainer),
        "mean_logprob": round(float(engine.mean()), 3),
        **difference(engine, trainer),
    }
    exact = model.float()
    result["trainer_own_rounding"] = difference(trainer, plain_logprobs(exact, load.prompt, rows))
    few = load._replace(requests=min(8, load.requests), new=min(64, load.new))
    requests = prompts(few, model.config.vocab_size, 5)
    fitted = fit(exact)
    answers = serve(make_decoder(exact, few, fitted.ways), requests, few.new, stream=False)
    decode_kernels.undo(fitted.swapped)
    rows = [[*prompt, *answer.token_ids] for prompt, answer in zip(requests, answers, strict=True)]
    engine = torch.tensor([answer.logprobs for answer in answers], device=model.device)
    result["float32"] = difference(engine, plain_logprobs(exact, few.prompt, rows))
    return result
