"""Training on trees against training on rows: speed, memory and gradients on one GPU.

    python -m bench.training.tree_attention [--exact] [--json]

A randomly initialised model makes one forward and backward pass over the same rollouts in four forms: a row
per turn, padded merged rows, packed merged rows (varlen), and the tree. Arithmetic is the trainer's: float32
weights and gradients, bfloat16 products (`--arithmetic bfloat16`: bfloat16 weights too), gradient
checkpointing, logits only at sampled tokens, and passes as large as a common token limit allows. Rows
checkpoint whole layers; the tree keeps attention outputs, which count in its peak memory. Gradients are
compared with each other, and with `--exact` with those of merged rows in float32. Needs torch and
transformers only.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Qwen3Config, Qwen3ForCausalLM

from afield.trainers.logprobs import chunked_logprobs, gather_hidden
from afield.trainers.micro_batches import Padded
from afield.trainers.packing import pack, split
from afield.trainers.tree_attention import TokenTree, install_tree_attention
from bench.report import commit, save
from bench.training.rollout_shapes import Row, per_turn, shared_prompt, sub_agents

ENOUGH = 16384  # tokens that keep the device busy
MODELS = {
    "large": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 23,
              "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936},
    "wide": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 27,
             "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151_936},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512},
}  # fmt: skip


# --- forms ---------------------------------------------------------------------------------------


class Part(NamedTuple):
    """One pass: how the model is run, how many tokens that is, and what of it is scored."""

    hidden: Callable[[Any], Tensor]
    tokens: int
    source: Tensor
    target: Tensor
    advantage: Tensor


def part(
    hidden: Callable[[Any], Tensor], tokens: int, rows: Sequence[Row], where: Callable[[int, int], int],
    device: torch.device,
) -> Part:  # fmt: skip
    owned = [(n, p) for n, row in enumerate(rows) for start, end in row.owned for p in range(start, end)]
    return Part(
        hidden,
        tokens,
        torch.tensor([where(n, p - 1) for n, p in owned], device=device),
        torch.tensor([rows[n].ids[p] for n, p in owned], device=device),
        torch.tensor([rows[n].advantage for n, _ in owned], device=device),
    )


def padded(rows: Sequence[Row], bound: int, device: torch.device) -> list[Part]:
    parts: list[Part] = []
    for batch in batches(rows, bound, lambda rows: len(rows) * max(len(r.ids) for r in rows)):
        width = max(len(row.ids) for row in batch)
        filled = torch.tensor([[*r.ids, *[0] * (width - len(r.ids))] for r in batch], device=device)
        parts.append(
            part(Padded(filled).hidden, filled.numel(), batch, lambda n, p, w=width: n * w + p, device)
        )
    return parts


def varlen(rows: Sequence[Row], bound: int, device: torch.device) -> list[Part]:
    parts: list[Part] = []
    for batch in batches(rows, bound, lambda rows: sum(len(r.ids) for r in rows)):
        line = Line([row.ids for row in batch], device)
        starts = line.starts
        parts.append(part(line.hidden, line.ids.numel(), batch, lambda n, p, s=starts: s[n] + p, device))
    return parts


def forest(rows: Sequence[Row], bound: int, device: torch.device, kernel: Any = None) -> list[Part]:
    parts: list[Part] = []
    for numbers in split([row.ids for row in rows], bound):
        batch = [rows[number] for number in numbers]
        packed = pack([row.ids for row in batch])
        tree = TokenTree(packed, device, kernel)
        paths = packed.paths
        parts.append(part(tree.hidden, len(packed.ids), batch, lambda n, p, t=paths: t[n][p], device))
    return parts


def batches(rows: Sequence[Row], bound: int, cost: Callable[[list[Row]], int]) -> list[list[Row]]:
    """Rows of like length together, as many as the bound allows."""
    passes: list[list[Row]] = [[]]
    for row in sorted(rows, key=lambda row: len(row.ids)):
        full = passes[-1] and cost([*passes[-1], row]) > bound
        # A pass that is large enough is not made larger by padding it.
        padding = passes[-1] and len(passes[-1][0].ids) < 0.98 * len(row.ids)
        if full or (padding and cost(passes[-1]) > ENOUGH):
            passes.append([])
        passes[-1].append(row)
    return passes


class Line:
    """Rows one after another, without padding, for a kernel that takes rows of different lengths."""

    def __init__(self, rows: Sequence[tuple[int, ...]], device: torch.device) -> None:
        lengths = [len(row) for row in rows]
        self.starts = [sum(lengths[:n]) for n in range(len(rows) + 1)]
        self.ids = torch.tensor([i for row in rows for i in row], device=device)[None]
        self.positions = torch.cat([torch.arange(n) for n in lengths]).to(device)[None]
        self.offsets = torch.tensor(self.starts, dtype=torch.int32, device=device)
        self.longest = max(lengths)

    def hidden(self, model: Any) -> Tensor:
        return model.get_decoder()(
            input_ids=self.ids, position_ids=self.positions, line=self, use_cache=False
        ).last_hidden_state[0]


def line_attention(
    _module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any = None, *, line: Line, **_: Any
) -> tuple[Tensor, None]:
    q, k, v = (t[0].transpose(0, 1).to(torch.bfloat16).contiguous() for t in (query, key, value))
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, line.offsets, line.offsets, line.longest, line.longest, 0.0, True, False,
        scale=q.shape[-1] ** -0.5,
    )[0]  # fmt: skip
    return out[None], None


# --- measuring -----------------------------------------------------------------------------------


def made_model(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(**MODELS[name], max_position_embeddings=16384, tie_word_embeddings=True)
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(config, dtype=dtype)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


class Bench(NamedTuple):
    """A model on a device, and whether its products are in bfloat16 while its weights are not."""

    model: Any
    device: torch.device
    mixed: bool

    def backward(self, parts: Sequence[Part], kind: str) -> None:
        """Of the mean over all sampled tokens, however many passes they take."""
        self.model.set_attn_implementation(kind)
        head = self.model.get_output_embeddings()
        total = sum(len(one.target) for one in parts)
        for one in parts:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed):
                hidden = gather_hidden(one.hidden(self.model), one.source)
                heat = torch.ones_like(one.advantage)
                logp = chunked_logprobs(hidden, head.weight, None, one.target, heat)
            (-(logp * one.advantage).sum() / total).backward()

    def gradient(self, parts: Sequence[Part], kind: str) -> list[Tensor]:
        """What a trainer accumulates, each pass's gradient added up in float32; kept off the device, whose
        memory is measured."""
        self.clear()
        sums = {p: torch.zeros_like(p, dtype=torch.float32) for p in self.model.parameters()}

        def add(parameter: Any) -> None:
            sums[parameter] += parameter.grad
            parameter.grad = None

        hooks = [p.register_post_accumulate_grad_hook(add) for p in sums]
        self.backward(parts, kind)
        for hook in hooks:
            hook.remove()
        return [tensor.cpu() for tensor in sums.values()]

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def measured(self, parts: Sequence[Part], kind: str, times: int) -> Measured:
        seconds: list[float] = []
        for turn in range(times + 1):
            self.clear()
            with Stopwatch(self.device) as watched:
                self.backward(parts, kind)
            if turn:  # the first one compiles
                seconds.append(watched.seconds)
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        return Measured(statistics.median(seconds), peak, self.gradient(parts, kind))


class Measured(NamedTuple):
    seconds: float
    peak: int
    gradient: list[Tensor]


class Stopwatch:
    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.seconds = 0.0

    def __enter__(self) -> Stopwatch:
        self._start, self._end = (
            (torch.cuda.Event(enable_timing=True) for _ in range(2)) if self._cuda else (0, 0)
        )
        if self._cuda:
            torch.cuda.synchronize()
            self._start.record()
        return self

    def __exit__(self, *_: object) -> None:
        if self._cuda:
            self._end.record()
            torch.cuda.synchronize()
            self.seconds = self._start.elapsed_time(self._end) / 1000
        else:
            self.seconds = 1.0


def ceiling(device: torch.device) -> float:
    """FLOP/s of a large bfloat16 product of random numbers."""
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    with Stopwatch(device) as watched:
        for _ in range(20):
            a @ b
    return 20 * 2 * size**3 / watched.seconds


def needed_flops(model: Any, parts: Sequence[Part], rows: Sequence[Row]) -> float:
    """Of a forward and backward pass over the forest, nothing computed twice."""
    config = model.config
    body = sum(p.numel() for p in model.get_decoder().layers.parameters())
    tokens, sampled = sum(p.tokens for p in parts), sum(len(p.target) for p in parts)
    packed = pack([row.ids for row in rows])
    pairs = sum(depth + 1 for depth in packed.depth)
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    head = 2 * config.vocab_size * config.hidden_size * sampled
    return 3 * (2 * body * tokens + attention + head)


def compare(bench: Bench, rows: list[Row], options: argparse.Namespace, top: float) -> dict[str, Any]:
    bound, times, kernel, device = options.bound, options.times, options.kernel, bench.device
    forms: dict[str, tuple[list[Part], str]] = {
        "tree": (forest(rows, bound, device, kernel), "afield_tree"),
        "merged": (padded(rows, bound, device), "sdpa"),
        "varlen": (varlen(rows, bound, device), "bench_line" if device.type == "cuda" else ""),
        "per_turn": (padded(per_turn(rows), bound, device), "sdpa"),
    }
    seen: dict[str, Measured] = {}
    unique = len(pack([row.ids for row in rows]).ids)
    for name, (parts, kind) in forms.items():
        if not kind:
            continue
        seen[name] = one = bench.measured(parts, kind, times if name != "per_turn" else 1)
        real = sum(p.tokens for p in parts)
        print(f"  {name:9} {one.seconds:8.3f} s {one.peak / 2**30:7.2f} GiB {real:8} tokens"
              f" {len(parts):3} passes", flush=True)  # fmt: skip
    peaks = {name: round(one.peak / 2**30, 2) for name, one in seen.items()}
    seconds = {name: round(one.seconds, 4) for name, one in seen.items()}
    exact = exact_gradient(bench, *forms["merged"]) if options.exact else None
    truth = {n: cosine_of(exact, one.gradient, device) for n, one in seen.items()} if exact else {}
    tree = seen.pop("tree")
    token_ratio = {
        n: sum(len(r.ids) for r in (per_turn(rows) if n == "per_turn" else rows)) / unique for n in seen
    }
    flops = needed_flops(bench.model, forms["tree"][0], rows)
    rows_alone = cosine_of(seen["merged"].gradient, seen.get("varlen", seen["per_turn"]).gradient, device)
    cosine = {n: cosine_of(tree.gradient, one.gradient, device) for n, one in seen.items()}
    return {
        "speedup": {name: round(one.seconds / tree.seconds, 3) for name, one in seen.items()},
        "token_ratio": {name: round(ratio, 3) for name, ratio in token_ratio.items()},
        "of_ratio": {n: round(one.seconds / tree.seconds / token_ratio[n], 3) for n, one in seen.items()},
        "peak_ratio": round(tree.peak / max(seen["merged"].peak, 1), 3),
        "grad_cosine": round(min(cosine.values()), 6),
        "grad_cosines": {name: round(value, 6) for name, value in cosine.items()},
        "rows_cosine": round(rows_alone, 6),
        "float32_cosines": {name: round(value, 6) for name, value in truth.items()},
        "mfu": round(flops / tree.seconds / top, 3),
        "tflops": round(flops / tree.seconds / 1e12, 1),
        "seconds": seconds,
        "peak_gib": peaks,
        "unique_tokens": unique,
    }  # fmt: skip


def exact_gradient(bench: Bench, parts: Sequence[Part], kind: str) -> list[Tensor]:
    """The same in float32 throughout."""
    kept = next(bench.model.parameters()).dtype
    gradient = bench._replace(model=bench.model.float(), mixed=False).gradient(parts, kind)
    bench.model.to(kept)
    return gradient


def cosine_of(a: Sequence[Tensor], b: Sequence[Tensor], device: torch.device) -> float:
    """In float64, piece by piece: sums over a billion numbers need it."""
    dot = aa = bb = 0.0
    for x, y in zip(a, b, strict=True):
        for left, right in zip(x.flatten().split(1 << 26), y.flatten().split(1 << 26), strict=True):
            u, v = left.to(device).double(), right.to(device).double()
            dot, aa, bb = dot + float(u @ v), aa + float(u @ u), bb + float(v @ v)
    return dot / (aa * bb) ** 0.5


def main() -> None:
    reading = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    reading.add_argument("--json", action="store_true", help="end with one line of JSON")
    reading.add_argument("--model", choices=list(MODELS), default="large")
    reading.add_argument("--bound", type=int, default=65536, help="tokens of one pass, at most")
    reading.add_argument("--times", type=int, default=5)
    reading.add_argument(
        "--kernel", choices=["prefix", "flex"], help="of the tree's attention; else the cheaper"
    )
    reading.add_argument(
        "--arithmetic", choices=["mixed", "bfloat16"], default="mixed", help="what weights are kept in"
    )
    reading.add_argument("--exact", action="store_true", help="compare with gradients in float32, too")
    reading.add_argument("--compile", action="store_true", help="compile every layer, in all forms")
    reading.add_argument("--save", action="store_true", help="write bench/results/tree-COMMIT.json")
    options = reading.parse_args()
    started_at = commit() if options.save else ""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scale = 1 if options.model != "tiny" else 16
    AttentionInterface.register("bench_line", line_attention)
    AttentionMaskInterface.register("bench_line", lambda *_, **__: None)
    whole = device.type == "cpu" or options.arithmetic == "mixed"
    model = made_model(options.model, device, torch.float32 if whole else torch.bfloat16)
    bench = Bench(model, device, mixed=device.type == "cuda" and whole)
    install_tree_attention(model)
    if options.compile:
        for layer in model.get_decoder().layers:
            layer.mlp.compile()
    top = ceiling(device)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size / 1e9:.2f} B parameters on {device}, matmul ceiling {top / 1e12:.0f} TFLOP/s", flush=True)
    results: list[dict[str, Any]] = []
    for name, shape in (("shared prompt", shared_prompt), ("sub-agents", sub_agents)):
        print(name, flush=True)
        rows = shape(model.config.vocab_size, scale)
        results.append(compare(bench, rows, options, top))
    line = {**results[0], "forest": results[1], "parameters": size, "ceiling_tflops": round(top / 1e12, 1)}
    line["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    if options.save:
        save("tree", line, started_at)
    print(json.dumps(line) if options.json else json.dumps(line, indent=2))


if __name__ == "__main__":
    main()
