"""The embedded engine against `transformers`, on one GPU: sampled tokens a second, and how exact.

    python bench/engine.py --json

A random-initialised model in bfloat16 answers so many prompts at once, through the decoder that the
embedded engine runs (prefill, recorded steps, drawing, handing over), through `generate`, with its
growing or its static cache, whichever is faster, and through `generate_batch`. Every one is warmed up
before it is timed, and nothing ends early. Then the log-probabilities that came with the decoder's
tokens are compared with those of a plain forward pass, as a trainer makes it. Each part is printed as
soon as it is measured. `--small` is for a machine without a GPU. Needs torch and transformers only.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from afield.engines import fused
from afield.engines.decoder import Ask, Decoder, Request, Sampled
from afield.engines.graphs import Shape, Steps
from afield.engines.slots import Slots

HALF_BILLION: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
}  # fmt: skip
TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
}  # fmt: skip
PARTS = ("afield", "generate", "generate_batch")
# What a part of this program may die of without taking the others with it.
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, ImportError, KeyError, AssertionError)


class Load(NamedTuple):
    requests: int
    prompt: int
    new: int
    prefill_tokens: int
    batch_new: int  # of generate_batch, which takes longest
    trial: int  # tokens that decide between the caches of generate
    repeats: int


LARGE = Load(256, 128, 256, 16384, 64, 16, 3)
SMALL = Load(8, 16, 24, 64, 8, 4, 2)


def build(sizes: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    config = Qwen3Config(
        **sizes, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model: Any = Qwen3ForCausalLM(config)
    model.set_attn_implementation("sdpa")
    torch.set_default_dtype(before)
    with torch.no_grad():
        # As peaked as a trained model's: a flat distribution would hide a wrong log-probability.
        model.get_input_embeddings().weight.mul_(4)
    return model.eval().requires_grad_(False)


def prompts(load: Load, vocabulary: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (load.requests, load.prompt), generator=generator).tolist()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, work: Callable[[], Any]) -> tuple[float, Any]:
    wait(device)
    began = time.perf_counter()
    result = work()
    wait(device)
    return time.perf_counter() - began, result


def peak_gib(device: torch.device) -> float:
    return round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if device.type == "cuda" else 0.0


# --- afield ---------------------------------------------------------------------------------------


class Answer:
    """Where one request's tokens go."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []

    def put(self, sampled: Sampled) -> None:
        self.token_ids += sampled.token_ids
        self.logprobs += sampled.logprobs

    def fail(self, reason: str) -> None:
        raise RuntimeError(reason)


def fit(model: Any, ways: str = "") -> fused.Fit:
    """As the embedded engine does when it starts, unless told in which ways."""
    model.set_attn_implementation("sdpa")
    known = {
        "triton": lambda: fused.triton_ways()[0],
        "flash": lambda: fused.FLASH,
        "plain": lambda: fused.PLAIN,
    }
    light = model.device.type == "cuda" if not ways else ways != "none"
    fitted = fused.fit(model, 12, light=light, ways=known[ways]() if ways in known else None)
    assert fitted.off <= fused.TOLERANCE[model.dtype], fitted.off
    return fitted


def make_decoder(model: Any, load: Load, ways: fused.Ways | None) -> Decoder:
    context = load.prompt + load.new + 64
    slots = Slots(model.config.num_hidden_layers, load.requests, context, model.dtype, model.device, ways)
    return Decoder(
        model,
        slots,
        version=0,
        max_context=context,
        prefill_tokens=load.prefill_tokens,
        weights=list(model.parameters()),
        steps=Steps(model, slots, load.requests),
    )


def serve(decoder: Decoder, asked: list[list[int]], new: int, stream: bool) -> list[Answer]:
    answers = [Answer() for _ in asked]
    for n, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
        decoder.add(Request(Ask(prompt, max_tokens=new, seed=n, stream=stream), answer))
    while not decoder.idle:
        decoder.step()
    return answers


def afield(model: Any, load: Load, fitted: fused.Fit) -> tuple[dict[str, Any], list[list[int]], list[Answer]]:
    device, vocabulary = model.device, model.config.vocab_size
    decoder = make_decoder(model, load, fitted.ways)
    steps = decoder.steps
    assert steps is not None
    first_s, _ = timed(device, lambda: serve(decoder, prompts(load, vocabulary, 1), load.new, stream=False))
    prefill_s, _ = timed(device, lambda: serve(decoder, prompts(load, vocabulary, 2), 1, stream=False))
    seconds: list[float] = []
    asked, answers = prompts(load, vocabulary, 3), list[Answer]()
    for n in range(load.repeats):
        asked = prompts(load, vocabulary, 3 + n)
        took, answers = timed(device, lambda asked=asked: serve(decoder, asked, load.new, stream=False))
        seconds.append(took)
    streaming_s, _ = timed(
        device, lambda: serve(decoder, prompts(load, vocabulary, 9), load.new, stream=True)
    )
    assert all(len(answer.token_ids) == load.new for answer in answers)
    took = statistics.median(seconds)
    other = prompts(load, vocabulary, 8)
    again, _, once_more = (serve(decoder, p, load.new, stream=False) for p in (asked, other, asked))
    told = {
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
        told["ms_per_step_by_length"] = device_ms(steps)
    return told, asked, answers


def named(shape: Shape) -> str:
    return f"{shape.rows}x{shape.length}{' gathered' if shape.gathered else ''}"


def device_ms(steps: Steps) -> dict[str, float]:
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
    ways: dict[str, Callable[..., Tensor]] = {"flash": fused.flash_attend, "plain": fused.attend}
    failures: tuple[type[Exception], ...] = FAILURES
    try:
        from afield.engines import kernels
    except ImportError as error:
        print(f"no Triton: {error}", flush=True)
    else:
        failures += kernels.REFUSALS
        for step, warps, stages in itertools.product((32, 64, 128), (2, 4), (2, 3)):
            way = partial(kernels.attend, step=step, warps=warps, stages=stages)
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


def profiled(model: Any, load: Load, ways: fused.Ways | None) -> list[str]:
    """Where the device's time goes in one decode step, by kernel."""
    decoder = make_decoder(model, load, ways)
    for n, prompt in enumerate(prompts(load, model.config.vocab_size, 1)):
        decoder.add(Request(Ask(prompt, max_tokens=load.new, seed=n), Answer()))
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


def exactness(model: Any, load: Load, asked: list[list[int]], answers: list[Answer]) -> dict[str, Any]:
    """In the model's own type, and in float32, where nothing but the order of sums may differ."""
    rows = [[*prompt, *answer.token_ids] for prompt, answer in zip(asked, answers, strict=True)][:32]
    engine = torch.tensor([answer.logprobs for answer in answers][:32], device=model.device)
    trainer = plain_logprobs(model, load.prompt, rows)
    told: dict[str, Any] = {
        str(model.dtype).removeprefix("torch."): difference(engine, trainer),
        "mean_logprob": round(float(engine.mean()), 3),
        **difference(engine, trainer),
    }
    exact = model.float()
    told["trainer_own_rounding"] = difference(trainer, plain_logprobs(exact, load.prompt, rows))
    few = load._replace(requests=min(8, load.requests), new=min(64, load.new))
    asked = prompts(few, model.config.vocab_size, 5)
    fitted = fit(exact)
    answers = serve(make_decoder(exact, few, fitted.ways), asked, few.new, stream=False)
    fused.undo(fitted.swapped)
    rows = [[*prompt, *answer.token_ids] for prompt, answer in zip(asked, answers, strict=True)]
    engine = torch.tensor([answer.logprobs for answer in answers], device=model.device)
    told["float32"] = difference(engine, plain_logprobs(exact, few.prompt, rows))
    return told


# --- transformers ---------------------------------------------------------------------------------


def sampling(new: int, **rest: Any) -> GenerationConfig:
    """The whole distribution at temperature 1, as rollouts are sampled; no token ends an answer."""
    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new, eos_token_id=None,
        pad_token_id=0, **rest,
    )  # fmt: skip


def generate(model: Any, load: Load, compiled: bool) -> dict[str, Any]:
    ids = torch.tensor(prompts(load, model.config.vocab_size, 3), device=model.device)
    ways: dict[str, dict[str, Any]] = {
        "dynamic": {},
        "static": {"cache_implementation": "static", "disable_compile": True},
    }
    if compiled:
        ways["static, compiled"] = {"cache_implementation": "static"}

    def run(way: str, new: int) -> float:
        config = sampling(new, **ways[way])
        mask = torch.ones_like(ids)
        took, out = timed(
            model.device, lambda: model.generate(ids, attention_mask=mask, generation_config=config)
        )
        assert out.shape == (load.requests, load.prompt + new), out.shape
        return took

    trials: dict[str, float] = {}
    for way in ways:
        run(way, load.trial)
        trials[way] = load.requests * load.trial / run(way, load.trial)
    best = max(trials, key=lambda way: trials[way])
    seconds = [run(best, load.new) for _ in "ab"]
    took = min(seconds)
    return {
        "tok_s": round(load.requests * load.new / took),
        "cache": best,
        "runs_s": [round(s, 2) for s in seconds],
        "tok_s_first_tokens": {way: round(rate) for way, rate in trials.items()},
        "ms_per_step": round(1000 * took / load.new, 1),
    }


def generate_batch(model: Any, load: Load) -> dict[str, Any]:
    """Continuous batching. Its manager stays between the runs, so that only the first one sets it up."""
    asked = prompts(load, model.config.vocab_size, 3)
    blocks = -(-(load.prompt + load.batch_new) // 32) * load.requests + 64
    options = ContinuousBatchingConfig(
        block_size=32,
        num_blocks=blocks,
        max_batch_tokens=max(load.requests, min(4096, load.requests * load.prompt)),
        max_requests_per_batch=load.requests,
    )
    config = sampling(load.batch_new)

    def run() -> dict[str, Any]:
        return model.generate_batch(
            asked, generation_config=config, continuous_batching_config=options, persistent_manager=True
        )

    first_s, _ = timed(model.device, run)
    took, out = timed(model.device, run)
    tokens = sum(len(result.generated_tokens) for result in out.values())
    assert tokens == load.requests * load.batch_new, tokens
    return {
        "tok_s": round(tokens / took),
        "new": load.batch_new,
        "s": round(took, 2),
        "first_run_s": round(first_s, 2),
    }


# --- all of it ------------------------------------------------------------------------------------


class Report:
    """Parts by name, each printed when it is there; one that failed says why and leaves the others."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}
        self.failed: list[str] = []

    def add(self, name: str, work: Callable[[], Any]) -> Any:
        began = time.monotonic()
        try:
            value = work()
        except FAILURES as error:
            traceback.print_exc()
            self.failed.append(name)
            self.parts[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
            value = None
        else:
            self.parts[name] = value[0] if isinstance(value, tuple) else value
        part = {name: self.parts[name], "took_s": round(time.monotonic() - began, 1)}
        print(json.dumps(part), flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return value


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON (always so)")
    parser.add_argument("--small", action="store_true", help="a tiny model, for a machine without a GPU")
    parser.add_argument("--profile", action="store_true", help="also where a decode step's time goes")
    parser.add_argument("--compiled", action="store_true", help="also let `generate` compile (minutes)")
    parser.add_argument(
        "--ways", default="", choices=["triton", "flash", "plain", "none"], help="instead of what works"
    )
    parser.add_argument("--skip", default="", help=f"of {', '.join(PARTS)}, with commas")
    chosen = parser.parse_args()
    skip = chosen.skip.split(",") if chosen.skip else []
    if unknown := set(skip) - set(PARTS):
        parser.error(f"cannot skip {', '.join(unknown)}; choose from: {', '.join(PARTS)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not chosen.small:
        parser.error("there is no GPU here; --small tries the program on a CPU")
    load, sizes = (SMALL, TINY) if chosen.small else (LARGE, HALF_BILLION)
    transformers.utils.logging.set_verbosity_error()
    report = Report()
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    with torch.inference_mode():
        model = build(sizes, device, torch.bfloat16)
        report.add("machine", lambda: machine(model, load, device))
        done = None if "afield" in skip else ours(report, model, load, chosen.profile, chosen.ways)
    # The decoder turned this off; the others get the library as it comes.
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    model.set_attn_implementation("sdpa")
    if "generate" not in skip:
        report.add("generate", lambda: generate(model, load, chosen.compiled))
    if "generate_batch" not in skip:
        report.add("generate_batch", lambda: generate_batch(model, load))
    if done:
        with torch.inference_mode():
            report.add("logprob_diff", lambda: exactness(model, load, done[1], done[2]))
    print(json.dumps(summary(report)), flush=True)
    return 1 if report.failed else 0


def ours(
    report: Report, model: Any, load: Load, profile: bool, ways: str
) -> tuple[dict[str, Any], list[list[int]], list[Answer]] | None:
    def fitting() -> tuple[dict[str, Any], fused.Fit]:
        took, fitted = timed(model.device, lambda: fit(model, ways))
        name = fitted.ways.name if fitted.ways else None
        told = {"ways": name, "swapped": len(fitted.swapped), "off": round(fitted.off, 4)}
        return {**told, "notes": fitted.notes, "s": round(took, 1)}, fitted

    found = report.add("fit", fitting)
    if found is None:
        return None
    fitted: fused.Fit = found[1]
    done = report.add("afield", lambda: afield(model, load, fitted))
    if profile and done and model.device.type == "cuda":
        print("\n".join(report.add("kernels", lambda: profiled(model, load, fitted.ways)) or ()), flush=True)
        report.add("attention", lambda: attention_us(model, load))
    fused.undo(fitted.swapped)
    return done


def machine(model: Any, load: Load, device: torch.device) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "load": load._asdict(),
    }


def summary(report: Report) -> dict[str, Any]:
    parts = report.parts
    rates = {name: parts.get(name, {}).get("tok_s") for name in PARTS}
    ours, theirs = rates["afield"], [r for n, r in rates.items() if n != "afield" and r]
    return {
        "tok_s": rates,
        "logprob_diff": parts.get("logprob_diff"),
        "speedup": round(ours / max(theirs), 2) if ours and theirs else None,
        "failed": report.failed,
        **{name: part for name, part in parts.items() if name not in ("logprob_diff", "kernels")},
    }


if __name__ == "__main__":
    sys.exit(main())
