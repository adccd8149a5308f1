"""Sampled tokens per second of the embedded engine and of `transformers`, on one GPU.

    python -m bench.engine.throughput [--small] [--json]

A randomly initialised bfloat16 model answers many prompts at once, through the embedded engine's decoder,
through `generate` with its faster cache, and through `generate_batch`. Each is warmed up before timing, and
no request ends early. Then the decoder's log-probabilities are compared with those of a forward pass. Each
measurement is printed when it is done. `--small` runs without a GPU. Needs torch and transformers only.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import transformers

from afield.engines.torch import decode_kernels
from bench.engine.afield_decoder import Answer, afield, attention_us, exactness, fit, profiled
from bench.engine.transformers_generate import generate, generate_batch
from bench.engine.workload import FAILURES, HALF_BILLION, LARGE, SMALL, TINY, Load, build, timed

PARTS = ("afield", "generate", "generate_batch")


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
    def fitting() -> tuple[dict[str, Any], decode_kernels.KernelFit]:
        took, fitted = timed(model.device, lambda: fit(model, ways))
        name = fitted.ways.name if fitted.ways else None
        row = {"ways": name, "swapped": len(fitted.swapped), "off": round(fitted.off, 4)}
        return {**row, "notes": fitted.notes, "s": round(took, 1)}, fitted

    fit_result = report.add("fit", fitting)
    if fit_result is None:
        return None
    fitted: decode_kernels.KernelFit = fit_result[1]
    done = report.add("afield", lambda: afield(model, load, fitted))
    if profile and done and model.device.type == "cuda":
        print("\n".join(report.add("kernels", lambda: profiled(model, load, fitted.ways)) or ()), flush=True)
        report.add("attention", lambda: attention_us(model, load))
    decode_kernels.undo(fitted.swapped)
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
