"""In bfloat16 a forest is no further from float32 than the rows it stands for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen3Config, Qwen3ForCausalLM

from afield.trainers import logprobs
from afield.trainers.logprobs import chunked_logprobs, gather_hidden
from afield.trainers.micro_batches import Padded
from afield.trainers.packing import PackedTokens, pack
from afield.trainers.prefix_attention import PrefixAttention, plan_attention
from afield.trainers.tree_attention import Kernel, TokenTree, _per_sequence, install_tree_attention

CPU = torch.device("cpu")
LOW = torch.bfloat16
VOCABULARY = 256
PROMPT = 128  # tokens of the prompt that all sequences share
ROUNDING = 2.0**-8  # of one bfloat16 number, at most
SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "max_position_embeddings": 1024,
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def off(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


# --- a whole model -------------------------------------------------------------------------------


def made(dtype: torch.dtype, seed: int) -> Any:
    """The same weights in either, those that bfloat16 can hold."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True))
    return model.to(LOW).to(dtype).eval()


def sequences(seed: int) -> list[list[int]]:
    """Conversations after one prompt, some of which go on from others."""
    wild = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [wild.randrange(VOCABULARY) for _ in range(count)]

    prompt = tokens(PROMPT)
    rows = [prompt + tokens(wild.randrange(30, 100)) for _ in range(7)]
    return [*rows, rows[0][: PROMPT + 25] + tokens(30)]


def gradient(model: Any, layout: Any, source: list[int], target: list[int], worth: Tensor) -> list[Tensor]:
    model.zero_grad()
    hidden = gather_hidden(layout.hidden(model), torch.tensor(source))
    weight = model.get_output_embeddings().weight
    logp = chunked_logprobs(hidden, weight, None, torch.tensor(target), torch.ones(len(target)))
    (-(logp * worth).mean()).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def squared(model: Any, rows: list[list[int]], kernel: Kernel | None, truth: list[Tensor]) -> float:
    found = over(model, rows, kernel)
    error = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, truth, strict=True))
    return error / sum(float(b.double().square().sum()) for b in truth)


def over(model: Any, rows: list[list[int]], kernel: Kernel | None) -> list[Tensor]:
    """Of what follows the prompt, every row with an advantage of its own; padded rows without a kernel."""
    sampled = [(n, p) for n, row in enumerate(rows) for p in range(PROMPT, len(row))]
    target = [rows[n][p] for n, p in sampled]
    worth = torch.tensor([(-1.0) ** n * (1 + n / 8) for n, _ in sampled])
    if kernel is None:
        model.set_attn_implementation("sdpa")
        width = max(map(len, rows))
        layout = Padded(torch.tensor([[*row, *[0] * (width - len(row))] for row in rows]))
        return gradient(model, layout, [n * width + p - 1 for n, p in sampled], target, worth)
    install_tree_attention(model)
    packed = pack(rows)
    return gradient(
        model, TokenTree(packed, CPU, kernel), [packed.paths[n][p - 1] for n, p in sampled], target, worth
    )


def test_gradients_of_the_forest_are_no_further_from_float32_than_those_of_rows(
    record_property: Any,
) -> None:
    errors: dict[str, float] = {"rows": 0.0, "prefix": 0.0, "per_sequence": 0.0}
    seeds = 4
    for seed in range(seeds):
        rows = sequences(seed)
        truth = over(made(torch.float32, seed), rows, None)
        low = made(LOW, seed)
        errors["rows"] += squared(low, rows, None, truth) / seeds
        errors["prefix"] += squared(low, rows, "prefix", truth) / seeds
        errors["per_sequence"] += squared(low, rows, "per_sequence", truth) / seeds
    found = {name: value**0.5 for name, value in errors.items()}
    record_property("relative_error", found)
    # Four forests tell two errors of like size apart to a few percent.
    assert max(found["prefix"], found["per_sequence"]) <= 1.05 * found["rows"], found
    assert 0.001 < found["rows"] < 0.03, found


@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
def test_with_weights_in_float32_products_in_bfloat16_give_the_gradients_of_rows(again: bool) -> None:
    """As the trainer does it: what norms of float32 weights give is float32, what kernels take is not."""
    model, rows = made(torch.float32, 5), sequences(5)
    if again:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    truth = over(model, rows, None)
    with torch.autocast("cpu", dtype=LOW):
        padded = squared(model, rows, None, truth)
        forests = [squared(model, rows, kernel, truth) for kernel in ("prefix", "per_sequence")]
    assert 1e-6 < padded < 1e-3, padded
    assert max(forests) <= 1.2 * padded, (padded, forests)


# --- its parts -----------------------------------------------------------------------------------


def bushy(branches: int) -> PackedTokens:
    """A beginning that very many sequences share, so that its gradient is a sum of as many."""
    wild = random.Random(branches)
    prompt = [wild.randrange(VOCABULARY) for _ in range(64)]
    return pack([[*prompt, n, *(wild.randrange(VOCABULARY) for _ in range(7))] for n in range(branches)])


@pytest.mark.parametrize("kernel", ["prefix", "per_sequence"])
@pytest.mark.parametrize("least", [1, 1000])
def test_what_many_sequences_add_to_what_they_share_is_rounded_once(kernel: str, least: int) -> None:
    packed = bushy(200)
    generator = torch.Generator().manual_seed(1)
    given = [
        torch.randn(1, heads, len(packed.ids), 16, generator=generator).to(LOW).requires_grad_()
        for heads in (4, 2, 2)
    ]
    token, end = torch.arange(len(packed.ids)), torch.tensor(packed.end)
    seen = (token[None] <= token[:, None]) & (token[:, None] < end[None])
    exact = [tensor.detach().float().requires_grad_() for tensor in given]
    wanted = scaled_dot_product_attention(*exact, seen, scale=0.25, enable_gqa=True).transpose(1, 2)
    # All pull alike, so that what is lost in adding up does not cancel.
    push = torch.rand(wanted.shape, generator=generator).to(LOW)
    truth = torch.autograd.grad(wanted, exact, push.float())
    if kernel == "prefix":
        out = PrefixAttention.apply(*given, plan_attention(packed.segments, CPU, least), 0.25)
    else:
        out = _per_sequence(TokenTree(packed, CPU, "per_sequence"), 0.25, *given).transpose(1, 2)
    found = torch.autograd.grad(out, given, push)
    shared = [off(a[:, :, :64], b[:, :, :64]) for a, b in zip(found, truth, strict=True)]
    assert max(shared) < 1.5 * ROUNDING, shared


def test_tokens_sampled_after_one_prompt_add_to_its_gradient_with_one_rounding() -> None:
    hidden = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).to(LOW).requires_grad_()
    source = torch.tensor([0, *[1] * 500])
    push = torch.rand(len(source), 8, generator=torch.Generator().manual_seed(1)).to(LOW)
    chosen = gather_hidden(hidden, source)
    assert torch.equal(chosen, hidden.index_select(0, source))
    (found,) = torch.autograd.grad(chosen, hidden, push)
    truth = torch.zeros(3, 8).index_add_(0, source, push.float())
    assert torch.equal(found, truth.to(LOW))


def test_the_head_gives_float32_weights_a_gradient_that_was_not_rounded_to_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 4 * 32 * 100)  # three chunks of the tokens below
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(300, 16, generator=generator)
    weight = torch.randn(32, 16, generator=generator).requires_grad_()
    bias = torch.randn(32, generator=generator).requires_grad_()
    target = torch.randint(32, (300,), generator=generator)
    with torch.autocast("cpu", dtype=LOW):
        logp = chunked_logprobs(hidden, weight, bias, target, torch.ones(300))
    found = torch.autograd.grad(logp.sum(), (weight, bias))
    exact = chunked_logprobs(hidden, weight, bias, target, torch.ones(300))
    truth = torch.autograd.grad(exact.sum(), (weight, bias))
    for one, other in zip(found, truth, strict=True):
        assert one.dtype == torch.float32
        assert off(one, other) < 4 * ROUNDING
        assert not torch.equal(one, one.to(LOW).float())
