"""On a CUDA device: what is trained there is what would be trained on a CPU."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from afield.engines.torch import decode_kernels
from afield.engines.torch.engine import TorchEngine
from afield.models.rounding import Rounding, rounded
from afield.settings.trainer import LoraOptions
from afield.trainers.grpo import GRPO
from afield.trainers.logprobs import chunked_logprobs, gather_hidden
from afield.trainers.micro_batches import Padded
from afield.trainers.packing import pack
from afield.trainers.prefix_attention import Heads, kernel_available
from afield.trainers.tree_attention import Kernel, TokenTree, install_tree_attention
from support.tiny_model import build_tiny_model
from support.training_groups import group_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    # torch warns of its own calls: of a deprecated one, and of cuBLAS first used in autograd's thread.
    pytest.mark.filterwarnings("default"),
]
VOCABULARY, PROMPT = 256, 400


def cosine(one: list[Tensor], other: list[Tensor]) -> float:
    a, b = (torch.cat([t.detach().flatten().cpu().double() for t in side]) for side in (one, other))
    return float(a @ b / a.norm() / b.norm())


def gradients(model: Any, layout: Padded | TokenTree, source: list[int], target: list[int]) -> list[Tensor]:
    device = model.device
    model.zero_grad()
    worth = torch.tensor([(-1.0) ** n for n in range(len(target))], device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        hidden = gather_hidden(layout.hidden(model), torch.tensor(source, device=device))
        weight = model.get_output_embeddings().weight
        logp = chunked_logprobs(
            hidden, weight, None, torch.tensor(target, device=device), torch.ones_like(worth)
        )
    (logp * worth).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("kernel", [None, "prefix", "flex"])
@pytest.mark.parametrize("size", [16, 64, 80, 128, 256])
def test_heads_of_any_size_are_trained_over_trees(size: int, kernel: Kernel | None) -> None:
    """A kernel that is chosen has to be there; one that is asked for, only where it is usable."""
    torch.manual_seed(size)
    config = Qwen3Config(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=size, vocab_size=VOCABULARY,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    wild = random.Random(size)
    prompt = [wild.randrange(VOCABULARY) for _ in range(PROMPT)]
    rows = [prompt + [wild.randrange(VOCABULARY) for _ in range(100)] for _ in range(4)]
    sampled = [(n, p) for n, row in enumerate(rows) for p in range(PROMPT, len(row))]
    target = [rows[n][p] for n, p in sampled]
    width = len(rows[0])
    wanted = gradients(model, Padded(torch.tensor(rows)), [n * width + p - 1 for n, p in sampled], target)
    model = model.to("cuda")
    install_tree_attention(model)
    packed = pack(rows)
    tree = TokenTree(packed, model.device, kernel)
    if kernel == "prefix" and not kernel_available(model.device, torch.bfloat16, Heads(4, 2, size)):
        pytest.skip("the kernel for rectangles is not there for heads of this size")
    found = gradients(model, tree, [packed.paths[n][p - 1] for n, p in sampled], target)
    assert cosine(found, wanted) > 0.999


@pytest.mark.parametrize(
    ("settings", "least"),
    [
        ({"dtype": "float32"}, 0.99999),
        ({"dtype": "float32", "layout": "padded"}, 0.99999),
        ({"dtype": "float16"}, 0.99),
        ({"dtype": "bfloat16"}, 0.99),
        ({"dtype": "bfloat16", "checkpointing": True}, 0.99),
        ({"dtype": "bfloat16", "lora": LoraOptions(rank=4)}, 0.98),
    ],
    ids=["float32", "padded", "float16", "bfloat16", "checkpointing", "lora"],
)
def test_a_step_on_the_device_is_a_step_on_a_cpu(tmp_path: Path, settings: Any, least: float) -> None:
    path = build_tiny_model(tmp_path / "model", hidden=64, max_positions=128)
    alike = {"lora": settings["lora"]} if "lora" in settings else {}

    def stepped(device: str, **chosen: Any) -> GRPO:
        trainer = GRPO(path, lr=1e-3, grad_clip=1e9, device=device, **chosen)
        report = trainer.step([group_of([1.0, 0.0, 0.5])])
        assert report.metrics["grad_norm"] > 0
        return trainer

    ours, wanted = (
        [p.grad for p in trainer.policy.trainable if p.grad is not None]
        for trainer in (stepped("cuda", **settings), stepped("cpu", **alike))
    )
    assert cosine(ours, wanted) > least


# --- published weights, and the engine's check at start --------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_rounded_to_the_bits_of_a_cpu(dtype: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(1000, 4099, generator=generator) * 10.0 ** torch.randint(
        -9, 5, (1000, 4099), generator=generator
    )
    tensor[0, :4] = torch.tensor([float("inf"), -float("inf"), 3.4e38, 1e-45])
    start = tensor.clone()
    start[::3] += 1e-3
    how = Rounding(dtype=dtype, seed=5, version=11)
    ours = rounded(tensor, "model.layers.0.mlp.up_proj.weight", how, start=start)
    theirs = rounded(tensor.cuda(), "model.layers.0.mlp.up_proj.weight", how, start=start.cuda())
    assert torch.equal(ours.view(torch.int16), theirs.cpu().view(torch.int16))
    again = rounded(
        tensor[500:].cuda(),
        "model.layers.0.mlp.up_proj.weight",
        how,
        start=start[500:].cuda(),
        first=500 * 4099,
    )
    assert torch.equal(again, theirs[500:])


def test_an_engine_in_bfloat16_accepts_a_sure_model_and_refuses_a_broken_one(tmp_path: Path) -> None:
    path = build_tiny_model(tmp_path / "model", hidden=128)

    async def start() -> str:
        async with TorchEngine(path) as engine:
            return (await engine.info()).dtype

    assert asyncio.run(start()) == "bfloat16"
    model: Any = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.bfloat16).cuda().eval()
    with torch.inference_mode():
        model.get_output_embeddings().weight.mul_(40)  # improbable tokens are off by whole units
        fitted = decode_kernels.fit(model, 12, light=True)
        assert fitted.exact, fitted
        decode_kernels.undo(fitted.swapped)
        model.model.layers[0].self_attn.q_proj.weight[0, 0] = float("nan")
        assert not decode_kernels.fit(model, 12, light=False).exact
