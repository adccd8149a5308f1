"""Memory of the trainer's second update on a CPU, in a process of its own.

    python -m bench.plan.cpu_step POINT [DIR]

POINT is the JSON of a `CpuPoint`. The last line is JSON with `live`, the peak of the bytes of all tensors,
or `resident`, the peak of resident memory above that before the model was loaded. With DIR it only writes the
model there.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

from afield.batches.rows import Row
from afield.settings.trainer import LayoutName, LoraOptions, TrainerDtype
from afield.trainers.diagnostics import BatchDiagnostics
from afield.trainers.losses import Objective, compute_loss, token_weights
from afield.trainers.model import PolicyModel
from afield.trainers.optimizer import Optimizer
from afield.types import Trajectory, TurnRange, VersionSpan
from bench.plan.live_bytes import LiveBytes


class CpuPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A model and a batch of equal rows without common prefixes."""

    kind: str = "Qwen3"
    """Prefix of the configuration class in transformers."""
    sizes: dict[str, Any]
    """Arguments of the configuration."""
    rows: int = 4
    """Rows of the batch."""
    length: int = 256
    """Tokens of a row."""
    sampled: int = 64
    """Sampled tokens of a row."""
    tokens: int = 1 << 20
    """`learn.max_tokens_per_pass`."""
    dtype: TrainerDtype = "float32"
    """`learn.dtype`."""
    checkpointing: bool = False
    """`learn.checkpointing`."""
    layout: LayoutName = "padded"
    """`learn.layout`."""
    rank: int = 0
    """`learn.lora.rank`."""
    reference: bool = False
    """Whether there is a KL penalty."""
    resident: bool = False
    """Whether resident memory is measured instead of the bytes of tensors."""


def write_model(point: CpuPoint, directory: Path) -> None:
    config = getattr(transformers, f"{point.kind}Config")(**point.sizes)
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)


def made_rows(point: CpuPoint) -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(point.sizes["vocab_size"], (point.rows, point.length), generator=generator).tolist()
    start = point.length - point.sampled
    mask = tuple(int(place >= start) for place in range(point.length))
    return [
        Row(
            rollout_id=f"r{number}",
            trajectory=Trajectory(
                token_ids=tuple(row),
                loss_mask=mask,
                logprobs=tuple(-1.0 * owned for owned in mask),
                versions=(VersionSpan(start, point.length, 0, 0),),
                turns=(TurnRange("t", start, point.length, 1.0),),
                weight=1.0,
            ),
            advantages=((-1.0) ** number,),
        )
        for number, row in enumerate(ids)
    ]


def resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}")


def forget_peak() -> None:
    """Reset VmHWM of this process."""
    Path("/proc/self/clear_refs").write_text("5")


def update(optimizer: Optimizer, rows: list[Row], *, reference: bool) -> None:
    objective = Objective("ppo", (0.2, 0.2), 3.0, "token", 2.0, 0.1 if reference else 0.0, "k3", 0.0)
    optimizer.zero_grad()
    optimizer.backward(
        rows,
        lambda inputs: compute_loss(inputs, objective=objective),
        lambda weight: token_weights(
            weight, aggregate="rollout", rollouts=len(rows), tokens=len(weight), length=1
        ),
        BatchDiagnostics(),
        reference=reference,
    )
    optimizer.clip_and_step()


def policy_of(point: CpuPoint, directory: Path) -> PolicyModel:
    return PolicyModel(
        directory,
        device=torch.device("cpu"),
        dtype=point.dtype,
        lora=LoraOptions(rank=point.rank) if point.rank else None,
        checkpointing=point.checkpointing,
        reference=point.reference,
        layout=point.layout,
    )


def live(point: CpuPoint, directory: Path) -> int:
    policy, rows = policy_of(point, directory), made_rows(point)
    optimizer = Optimizer(policy, lr=1e-5, max_tokens_per_pass=point.tokens)
    update(optimizer, rows, reference=point.reference)
    optimizer.zero_grad()
    gc.collect()
    with LiveBytes() as counted:
        counted.adopt(policy.model.parameters())
        if policy.reference_model is not None:
            counted.adopt(policy.reference_model.parameters())
        for state in optimizer.optimizer.state.values():
            counted.adopt(part for part in state.values() if isinstance(part, torch.Tensor))
        counted.restart()
        update(optimizer, rows, reference=point.reference)
        return counted.peak


def resident(point: CpuPoint, directory: Path) -> int:
    rows = made_rows(point)
    small = directory / "small"
    warm = msgspec.structs.replace(
        point, sizes=point.sizes | {"num_hidden_layers": 1, "vocab_size": 512}, rows=1, resident=False
    )
    # What torch and its kernels load once is not memory of this model.
    write_model(warm, small)
    policy = policy_of(warm, small)
    optimizer = Optimizer(policy, lr=1e-5)
    update(optimizer, made_rows(warm), reference=point.reference)
    del policy, optimizer
    gc.collect()
    before = resident_bytes("VmRSS")
    policy = policy_of(point, directory)
    optimizer = Optimizer(policy, lr=1e-5, max_tokens_per_pass=point.tokens)
    update(optimizer, rows, reference=point.reference)
    gc.collect()
    forget_peak()
    update(optimizer, rows, reference=point.reference)
    return resident_bytes("VmHWM") - before


def main() -> None:
    point = msgspec.json.decode(sys.argv[1], type=CpuPoint)
    if len(sys.argv) > 2:
        write_model(point, Path(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        if point.resident:
            # Another process writes the model, so that its memory does not count.
            writing = [sys.executable, "-m", "bench.plan.cpu_step", sys.argv[1], scratch]
            subprocess.run(writing, check=True)
        else:
            write_model(point, directory)
        peak = resident(point, directory) if point.resident else live(point, directory)
    print(json.dumps({"resident" if point.resident else "live": peak}))


if __name__ == "__main__":
    main()
