"""Planned memory against every measured peak, on GPUs and on this machine's CPU.

    python -m bench.plan.compare [--json] [--save]

1. Peaks of earlier runs on a GPU are read from bench/results: `tree` (forward and backward passes of a 1.47 B
   model in eight layouts) and `engine` (the embedded engine of a 0.53 B model).
2. Steps of small models run on the CPU, each in a process of its own: the bytes of all tensors at their peak,
   and for some the peak of resident memory.
3. `--save` writes bench/results/memory-COMMIT.json and the table of docs/how-to/plan.md. The last line with
   `--json` is JSON; the exit code is 1 if a prediction differs by more than 15 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from afield.planning.architecture import architecture_of
from afield.planning.memory import GIB, EngineShape, TrainerShape, engine_memory, trainer_memory
from bench import ROOT
from bench.plan.cpu_step import CpuPoint
from bench.report import commit, newest, save, table

TOLERANCE = 0.15
"""Largest accepted difference of a prediction from its measurement."""
PAGE = ROOT / "docs" / "how-to" / "plan.md"
BEGIN, END = "<!-- points -->\n", "<!-- end of points -->"
H200_BYTES = 150_109_880_320
"""Memory of an H200 as CUDA reports it."""
STEP_TIMEOUT_S = 300.0
SMALL = {
    "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 4, "vocab_size": 4096, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3 = SMALL | {"head_dim": 64}
EXPERTS = QWEN3 | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
UNTIED = SMALL | {"tie_word_embeddings": False, "num_hidden_layers": 8}
LARGER = QWEN3 | {"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 6, "vocab_size": 8192}
CPU_POINTS: dict[str, CpuPoint] = {
    "float32": CpuPoint(sizes=QWEN3, rows=8),
    "float32, two passes": CpuPoint(sizes=QWEN3, rows=8, tokens=1024),
    "float32, checkpointing": CpuPoint(sizes=QWEN3, rows=8, checkpointing=True),
    "float32, LoRA": CpuPoint(sizes=QWEN3, rows=8, rank=8),
    "float32, untied, tree": CpuPoint(kind="Llama", sizes=UNTIED, rows=8, layout="tree"),
    "float32, KL, checkpointing": CpuPoint(
        kind="Qwen2", sizes=SMALL, rows=8, reference=True, checkpointing=True
    ),
    "float32, experts": CpuPoint(kind="Qwen3Moe", sizes=EXPERTS, rows=8),
    "float32, experts, checkpointing": CpuPoint(kind="Qwen3Moe", sizes=EXPERTS, rows=8, checkpointing=True),
    "bfloat16": CpuPoint(sizes=QWEN3, rows=8, dtype="bfloat16"),
    "bfloat16, two passes, checkpointing": CpuPoint(
        sizes=QWEN3, rows=8, tokens=1024, dtype="bfloat16", checkpointing=True
    ),
    "bfloat16, checkpointing": CpuPoint(sizes=QWEN3, rows=8, dtype="bfloat16", checkpointing=True),
    "bfloat16, LoRA": CpuPoint(sizes=QWEN3, rows=8, dtype="bfloat16", rank=8),
    "bfloat16, LoRA, checkpointing": CpuPoint(
        sizes=QWEN3, rows=8, dtype="bfloat16", rank=8, checkpointing=True
    ),
    "bfloat16, untied, tree": CpuPoint(kind="Llama", sizes=UNTIED, rows=8, layout="tree", dtype="bfloat16"),
    "float32, resident memory": CpuPoint(sizes=LARGER, rows=8, resident=True),
    "float32, checkpointing, resident memory": CpuPoint(
        sizes=LARGER, rows=8, resident=True, checkpointing=True
    ),
    "float32, LoRA, resident memory": CpuPoint(sizes=LARGER, rows=8, resident=True, rank=8),
}  # fmt: skip


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A measured peak, and what it was measured with."""

    where: str
    """Device, and the result that holds the measurement."""
    name: str
    """What was measured."""
    config: dict[str, Any]
    """config.json of the model."""
    passes: list[TrainerShape] = []
    """Passes of the trainer; empty for an engine."""
    engine: EngineShape | None = None
    """Shape of the engine; None for a trainer."""
    measured: int
    """Peak in bytes."""


def predicted(point: Point) -> int:
    """Planned peak in bytes."""
    model = architecture_of(point.config, point.name)
    if point.engine is not None:
        return engine_memory(model, point.engine).peak
    return max(trainer_memory(model, shape).step for shape in point.passes)


# --- GPU ----------------------------------------------------------------------------------------------


def tree_points() -> Iterator[Point]:
    """Forward and backward passes of `bench/training/tree_attention.py`, without an optimizer."""
    from afield.trainers.packing import pack, split
    from bench.training.rollout_shapes import Row, per_turn, shared_prompt, sub_agents
    from bench.training.tree_attention import MODELS, batches

    saved = newest("tree")
    if saved is None:
        return
    bound = 65536

    def owned(rows: list[Row]) -> int:
        return sum(end - start for row in rows for start, end in row.owned)

    def wide(rows: list[Row]) -> int:
        return len(rows) * max(len(row.ids) for row in rows)

    def long(rows: list[Row]) -> int:
        return sum(len(row.ids) for row in rows)

    for shape, make, result in (
        ("shared prompt", shared_prompt, saved),
        ("sub-agents", sub_agents, saved["forest"]),
    ):
        rows = make(1000, 1)
        turns = per_turn(rows)
        forest = [[rows[number] for number in part] for part in split([row.ids for row in rows], bound)]
        forms = {
            "tree": [(len(pack([row.ids for row in part]).ids), owned(part)) for part in forest],
            "merged": [(wide(part), owned(part)) for part in batches(rows, bound, wide)],
            "varlen": [(long(part), owned(part)) for part in batches(rows, bound, long)],
            "per_turn": [(wide(part), owned(part)) for part in batches(turns, bound, wide)],
        }
        for form, parts in forms.items():
            yield Point(
                where=f"{saved['device']}, tree",
                name=f"1.47 B, {shape}, {form}",
                config={
                    **MODELS["large"], "architectures": ["Qwen3ForCausalLM"],
                    "max_position_embeddings": 16384, "tie_word_embeddings": True,
                },
                passes=[
                    TrainerShape(
                        tokens=tokens, sampled=sampled, passes=1 + (number > 0), checkpointing=True,
                        tree=form == "tree", optimizer=False, device_bytes=H200_BYTES,
                    )
                    for number, (tokens, sampled) in enumerate(parts)
                ],
                measured=round(result["peak_gib"][form] * GIB),
            )  # fmt: skip


def engine_points() -> Iterator[Point]:
    """The embedded engine of `bench/engine`: all slots in use, at the context that it was made for."""
    from bench.engine.workload import HALF_BILLION

    saved = newest("engine")
    if saved is None or saved["machine"]["device"] == "cpu":
        return
    load = saved["machine"]["load"]
    yield Point(
        where=f"{saved['machine']['device']}, engine",
        name="0.53 B, embedded engine, 256 calls",
        config={
            **HALF_BILLION, "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        },
        engine=EngineShape(
            calls=load["requests"], context=load["prompt"] + load["new"] + 64, prefill=load["prefill_tokens"]
        ),
        measured=round(saved["afield"]["peak_gib"] * GIB),
    )  # fmt: skip


# --- CPU ----------------------------------------------------------------------------------------------


def cpu_point(name: str, point: CpuPoint) -> Point:
    """Run the step and read its peak."""
    # Each tensor is mapped alone, so that resident memory falls when it is freed.
    malloc = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "bench.plan.cpu_step", msgspec.json.encode(point).decode()],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(malloc if point.resident else {})},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=STEP_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{name}: the step ended with {done.returncode}:\n{done.stderr[-2000:]}")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    rows = max(1, min(point.rows, point.tokens // point.length))
    return Point(
        where="CPU, resident memory" if point.resident else "CPU, bytes of tensors",
        name=f"{point.kind}, {name}",
        config={**point.sizes, "architectures": [f"{point.kind}ForCausalLM"]},
        passes=[
            TrainerShape(
                tokens=rows * point.length,
                sampled=rows * point.sampled,
                passes=-(-point.rows // rows),
                dtype=point.dtype,
                checkpointing=point.checkpointing,
                rank=point.rank,
                reference=point.reference,
                tree=point.layout == "tree",
                device="cpu",
            )
        ],
        measured=result["resident" if point.resident else "live"],
    )


# --- the program --------------------------------------------------------------------------------------


def row(point: Point) -> tuple[str, ...]:
    planned = predicted(point)
    unit, name = (GIB, "GiB") if point.measured >= GIB else (1 << 20, "MiB")
    return (
        point.where,
        point.name,
        f"{point.measured / unit:.2f} {name}",
        f"{planned / unit:.2f} {name}",
        f"{planned / point.measured - 1:+.1%}",
    )


def section(points: list[Point]) -> str:
    """Table of the page."""
    head = ("measured on", "step", "measured", "planned", "difference")
    return table(head, [row(point) for point in points])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--save", action="store_true", help="write the result and the table of the page")
    args = parser.parse_args()
    started_at = commit()
    points = [*tree_points(), *engine_points()]
    for name, chosen in CPU_POINTS.items():
        points.append(cpu_point(name, chosen))
        print(*row(points[-1]), sep="  ", file=sys.stderr, flush=True)
    worst = max(abs(predicted(point) / point.measured - 1) for point in points)
    result = {"points": msgspec.to_builtins(points), "worst": round(worst, 4), "ok": worst <= TOLERANCE}
    if args.save:
        save("memory", result, started_at)
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{section(points)}\n\n{END}{rest.partition(END)[2]}")
    print(section(points))
    if args.json:
        print(json.dumps({"points": len(points), "worst": result["worst"], "ok": result["ok"]}))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
