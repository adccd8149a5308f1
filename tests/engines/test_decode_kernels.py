"""Lighter layers: the same numbers as the model's own, proven before they are used, or not used at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from afield.engines.torch.decode_kernels import (
    PLAIN,
    DecodeKernels,
    allowed,
    attend,
    attend_spans,
    choose,
    compare,
    compare_spans,
    fit,
    prepare,
    probe,
    swap_norms,
    undo,
    with_spans,
    write,
)
from afield.engines.torch.kv_cache import ATTENTION, Spans, slot_attention, use_slots
from afield.engines.torch.sampler import pick, plain_sums
from afield.engines.torch.weights import parameters
from afield.models.precision import in_float32
from support.tiny_model import build_tiny_model

FAMILIES = ["qwen3", "qwen2", "llama"]


@pytest.fixture(scope="module", autouse=True)
def on_one_thread_without_gradients() -> Iterator[None]:
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "v0")


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        # Norms that do something.
        if "norm" in name:
            parameter.copy_(1 + 0.5 * torch.randn(parameter.shape, generator=generator))
    return model


def scores(model: Any) -> Tensor:
    return model(input_ids=torch.arange(40)[None]).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_known_family_decodes_alike_in_lanes(tmp_path: Path, family: str) -> None:
    model = load(build_tiny_model(tmp_path / "model", family=family))
    fitted = fit(model, 24, light=True, ways=PLAIN)
    assert fitted.ways is PLAIN
    assert fitted.off < 1e-4
    assert not fitted.notes
    kinds = {type(layer).__name__.lower().removeprefix(family) for layer in fitted.swapped}
    assert kinds == {"attention", "mlp", "rmsnorm"}


@pytest.mark.parametrize("family", FAMILIES)
def test_joined_layers_follow_updates_of_the_model_s_weights(tmp_path: Path, family: str) -> None:
    model = load(build_tiny_model(tmp_path / "model", family=family))
    fitted = fit(model, 24, light=True, ways=PLAIN)
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters(model):
        noise = torch.randn(parameter.tensor.shape, generator=generator)
        parameter.tensor.add_(0.05 * noise)
    model.set_attn_implementation("sdpa")
    text = write(model, 24)
    assert probe(model, text, PLAIN) < 1e-4
    assert fitted.off < 1e-4


def test_spans_that_see_a_key_too_many_are_found_out(directory: Path) -> None:
    def too_many(q: Tensor, keys: Tensor, values: Tensor, spans: Spans, scale: float) -> Tensor:
        return attend_spans(
            q, keys, values, spans._replace(lengths=(spans.lengths + 1).clamp(max=200)), scale
        )

    model = load(directory)
    assert compare_spans(PLAIN, model) == 0
    assert compare_spans(PLAIN._replace(attend_spans=too_many), model) > 1
    kept, notes = with_spans(PLAIN._replace(attend_spans=too_many), model, (RuntimeError,))
    assert kept.attend_spans is None
    assert "prompts are padded" in notes[0]


def test_undone_layers_are_the_model_s_own(directory: Path) -> None:
    model = load(directory)
    before = scores(model)
    fitted = fit(model, 12, light=True, ways=PLAIN)
    undo(fitted.swapped)
    model.set_attn_implementation("sdpa")
    assert torch.equal(scores(model), before)
    assert not any("forward" in vars(layer) for layer in model.modules())


def test_swapped_norms_are_as_exact_as_the_model_s_own(directory: Path) -> None:
    exact = scores(load(directory))
    for dtype in (torch.float32, torch.bfloat16):
        model = load(directory, dtype)
        own = (scores(model) - exact).abs().mean()
        # Two a layer, two more for its heads, and the last.
        assert len(swap_norms(model)) == 4 * model.config.num_hidden_layers + 1
        assert (scores(model) - exact).abs().mean() < 1.2 * own + 1e-5


def test_a_norm_of_another_kind_is_left_alone() -> None:
    norm = GemmaRMSNorm(16)
    norm.variance_epsilon = norm.eps  # pyright: ignore[reportAttributeAccessIssue]
    assert swap_norms(nn.Sequential(norm)) == []


def one_key_too_many(
    q: Tensor, keys: Tensor, values: Tensor, rows: Tensor, positions: Tensor, scale: float
) -> Tensor:
    return attend(q, keys, values, rows, positions + 1, scale)


def turned_the_other_way(q: Tensor, k: Tensor, v: Tensor, norms: Any, cos: Tensor, sin: Tensor, *rest: Any):
    return prepare(q, k, v, norms, cos, -sin, *rest)


def no_numbers(gated: Tensor, up: Tensor) -> Tensor:
    return gated * float("nan")


WRONG = [
    PLAIN._replace(attend=one_key_too_many),
    PLAIN._replace(prepare=turned_the_other_way),
    PLAIN._replace(gate=no_numbers),
    PLAIN._replace(sums=lambda logits, temperature, block: plain_sums(logits, temperature**2, block)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ways_that_compute_something_else_are_found_out(directory: Path, dtype: torch.dtype) -> None:
    model = load(directory, dtype)
    assert compare(PLAIN, model) == 0
    for wrong in WRONG:
        assert not compare(wrong, model) <= 1


@pytest.mark.parametrize("wrong", WRONG[:3], ids=["attend", "prepare", "gate"])
def test_layers_that_fail_the_whole_model_are_taken_out_again(directory: Path, wrong: DecodeKernels) -> None:
    model = load(directory)
    fitted = fit(model, 24, light=True, ways=wrong)
    assert fitted.ways is None
    assert fitted.off < 1e-4
    assert "the model's own layers decode" in fitted.notes[0]
    assert not any("forward" in vars(layer) for layer in model.modules())


def test_where_no_kernels_work_the_notes_say_why(directory: Path) -> None:
    ways, notes = choose(load(directory))
    assert ways is None
    assert [note.partition(",")[0] for note in notes] == [
        "decode steps do without Triton's kernels",
        "decode steps do without flash attention",
    ]


def test_a_row_of_no_numbers_is_not_picked_from_as_if_it_had_some() -> None:
    logits = torch.randn(3, 300)
    logits[1, 200] = torch.nan
    ones = torch.ones(3, dtype=torch.float64)
    _, logprobs = pick(logits, ones, 0.5 * ones)
    assert torch.isfinite(logprobs).tolist() == [True, False, True]


# --- the check at start ----------------------------------------------------------------------------


def peaked(directory: Path, dtype: torch.dtype) -> Any:
    """As sure of its tokens as a trained model: improbable ones are off by whole units in 16 bits."""
    model = load(directory, dtype)
    model.get_output_embeddings().weight.mul_(40)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_16_bits_is_as_exact_through_slots_as_by_itself(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    for make in (load, peaked):
        model = make(build_tiny_model(tmp_path / make.__name__, hidden=128), dtype)
        fitted = fit(model, 12, light=True, ways=PLAIN)
        assert fitted.exact
        assert fitted.ways is PLAIN
        assert fitted.control > 0
        assert fitted.off < 4 * fitted.control


def test_improbable_tokens_are_no_reason_to_refuse_a_model(tmp_path: Path) -> None:
    """Over the whole vocabulary bfloat16 is off by more than any tolerance that would find a wrong key."""
    model = peaked(build_tiny_model(tmp_path / "model", hidden=128), torch.bfloat16)
    ids = write(model, 12).ids
    own = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
    with in_float32(model):
        exact = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
    assert float((own - exact).abs().max()) > 0.5
    assert fit(model, 12, light=False).exact


@pytest.mark.parametrize("wrong", WRONG[1:3], ids=["prepare", "gate"])
def test_wrong_kernels_are_found_out_in_bfloat16(directory: Path, wrong: DecodeKernels) -> None:
    for make in (load, peaked):
        fitted = fit(make(directory, torch.bfloat16), 24, light=True, ways=wrong)
        assert fitted.ways is None
        assert fitted.exact
        assert "the model's own layers decode" in fitted.notes[0]


def test_weights_that_are_no_numbers_are_refused(directory: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = load(directory, dtype)
        model.get_output_embeddings().weight[3, 3] = float("nan")
        assert not fit(model, 12, light=False).exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_forgets_a_key_is_refused(directory: Path, dtype: torch.dtype) -> None:
    """As slots would that wrote a key to another place."""
    model = load(directory, dtype)
    text = write(model, 12)
    use_slots(model)
    assert probe(model, text, None) <= allowed(text.control)
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, forgets_a_key)
    try:
        assert probe(model, text, None) > allowed(text.control)
    finally:
        use_slots(model)


def forgets_a_key(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **how: Any):
    mask = mask.clone()
    mask[..., 1] = float("-inf")
    return slot_attention(module, query, key, value, mask, *args, **how)
