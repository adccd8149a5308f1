"""Decode kernels: faster layers for decode steps, checked against plain torch before use.

1. `fit` gives the model the KV cache's attention. On CUDA it also replaces layers that it knows by ones with
   fewer kernels, and chooses the `DecodeKernels` of fixed steps: Triton's, else flash attention's.
2. Each kernel is compared on the device with plain torch, then the whole model with a plain forward pass. A
   failed comparison leaves the model's own layers in place and a note.
3. The whole model is compared on text that it samples itself: the error of the log-probabilities of sampled
   tokens against float32, in units of the control, which is the error of the model's own forward pass.
"""

from __future__ import annotations

import copy
import itertools
import subprocess
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm, scaled_dot_product_attention, silu
from transformers import PreTrainedModel

from afield.engines.torch.cuda_graphs import forward
from afield.engines.torch.kv_cache import KVCache, use_slots
from afield.engines.torch.sampler import BLOCK, Sums, plain_sums
from afield.precision import in_float32

# Layers whose arithmetic is what is written here.
ATTENTIONS = ("LlamaAttention", "Qwen2Attention", "Qwen3Attention")
GATED = ("LlamaMLP", "Qwen2MLP", "Qwen3MLP")
# Of numbers around 1, each rounded a few times.
ROUNDING = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Times the control by which log-probabilities may be off: what slots and kernels round otherwise is as far
# from float32 as the model's own arithmetic; what reads a wrong key is further by an order of magnitude.
LIMIT = 4.0
LEAST = 1e-3  # off by less than this is never refused: float32 has no control
SERVED = (torch.float32, torch.bfloat16, torch.float16)
Norms = tuple[Tensor, Tensor, float] | None


class DecodeKernels(NamedTuple):
    """How a fixed step is computed. Queries, keys and values of its lanes are `[lanes, heads, size]`."""

    name: str
    prepare: Callable[..., Tensor]
    attend: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]
    gate: Callable[[Tensor, Tensor], Tensor]
    sums: Sums


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norms: Norms,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    positions: Tensor,
) -> Tensor:
    """Norm each head, turn it by its position, store keys and values; the queries come back."""
    if norms is not None:
        q_weight, k_weight, eps = norms
        q, k = _norm(q, q_weight, eps), _norm(k, k_weight, eps)
    place = (rows.long(), positions.long())
    keys.index_put_(place, _turn(k, cos, sin))
    values.index_put_(place, v)
    return _turn(q, cos, sin)


def attend(q: Tensor, keys: Tensor, values: Tensor, rows: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Of each lane's queries over the keys of its row up to its position."""
    key, value = (memory[rows.long()].transpose(1, 2) for memory in (keys, values))
    seen = torch.arange(keys.shape[1], device=q.device) <= positions[:, None]
    return scaled_dot_product_attention(
        q[:, :, None], key, value, attn_mask=seen[:, None, None], scale=scale, enable_gqa=True
    )[:, :, 0]


def flash_attend(
    q: Tensor, keys: Tensor, values: Tensor, rows: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """The same by flash attention: a sequence begins at its row and has as many keys as are used."""
    lanes, length = len(q), keys.shape[1]
    queries = torch.arange(lanes + 1, dtype=torch.int32, device=q.device)
    starts = pad(rows * length, (0, 1))
    return torch.ops.aten._flash_attention_forward(
        q, keys.flatten(0, 1), values.flatten(0, 1), queries, starts, 1, length, 0.0, False, False,
        scale=scale, seqused_k=positions + 1,
    )[0]  # fmt: skip


def gate(gated: Tensor, up: Tensor) -> Tensor:
    return silu(gated) * up


PLAIN = DecodeKernels("plain torch", prepare, attend, gate, plain_sums)
FLASH = PLAIN._replace(name="flash attention", attend=flash_attend)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-b, a), dim=-1) * sin[:, None]


# --- choosing -------------------------------------------------------------------------------------


def triton_ways() -> tuple[DecodeKernels, tuple[type[Exception], ...]]:
    """They need Triton; and what they raise where they do not work."""
    from afield.engines.torch import triton_kernels

    ways = DecodeKernels(
        "Triton's kernels",
        triton_kernels.prepare,
        triton_kernels.attend,
        triton_kernels.gate,
        triton_kernels.sums,
    )
    return ways, triton_kernels.REFUSALS


def choose(model: PreTrainedModel) -> tuple[DecodeKernels | None, tuple[str, ...]]:
    """The first ways that give what plain torch gives, and why those before did not."""
    notes: list[str] = []
    for name, load in (("Triton's kernels", triton_ways), (FLASH.name, lambda: (FLASH, ()))):
        # No Triton, no compiler for it, a device or sizes that it does not know.
        errors: tuple[type[Exception], ...] = (
            ImportError, RuntimeError, NotImplementedError, TypeError, ValueError, OSError,
            subprocess.SubprocessError,
        )  # fmt: skip
        try:
            ways, more = load()
            errors += more
            off = compare(ways, model)
        except errors as error:
            reason = f"{type(error).__name__}: {str(error)[:300]}"
        else:
            if off <= 1:
                return ways, tuple(notes)
            reason = f"off by {off:.2g} times what rounding explains"
        notes.append(f"decode steps do without {name}, which is slower: {reason}")
    return None, tuple(notes)


def compare(ways: DecodeKernels, model: PreTrainedModel) -> float:
    """How far these ways are from plain torch, in units of what rounding explains."""
    lanes, length = 7, 200
    device, dtype = model.device, model.dtype
    generator = torch.Generator(device).manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    heads, kv_heads, size = _sizes(model)
    q, k, v = noise(lanes, heads, size), noise(lanes, kv_heads, size), noise(lanes, kv_heads, size)
    angle = torch.randn(lanes, size // 2, generator=generator, device=device).repeat(1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    norms = (1 + 0.1 * noise(size), 1 + 0.1 * noise(size), 1e-6)
    rows = torch.tensor([4, 0, 8, 2, 3, 7, 1], dtype=torch.int32, device=device)
    positions = torch.tensor([0, 199, 63, 64, 130, 5, 127], dtype=torch.int32, device=device)
    memory = noise(2, 9, length, kv_heads, size)
    results: list[list[Tensor]] = []
    for way in (PLAIN, ways):
        keys, values = memory.clone()
        queries = way.prepare(q, k, v, norms, cos, sin, keys, values, rows, positions)
        bare = way.prepare(q, k, v, None, cos, sin, keys.clone(), values.clone(), rows, positions)
        out = way.attend(queries, keys, values, rows, positions, size**-0.5)
        tops, totals = way.sums(q.flatten(1), torch.linspace(0.5, 2, lanes, device=device), BLOCK)
        results.append([queries, bare, keys, values, out, way.gate(k, v), tops, totals.log()])
    pairs = zip(*results, strict=True)
    off = torch.stack([((a.float() - b.float()).abs() / (1 + b.float().abs())).max() for b, a in pairs])
    # Not max() of Python, which would lose a NaN.
    return float(off.max()) / ROUNDING[dtype]


def _sizes(model: PreTrainedModel) -> tuple[int, int, int]:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    return heads, config.num_key_value_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


# --- layers ---------------------------------------------------------------------------------------


def _attention(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention layer's forward: its own, but for fixed steps."""
    slots = past_key_values
    if not isinstance(slots, KVCache) or slots.lanes is None or slots.ways is None:
        return type(self).forward(
            self,
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
    lanes, width, _ = hidden_states.shape
    shape = (lanes, -1, self.head_dim)
    q, k, v = (layer(hidden_states).view(shape) for layer in (self.q_proj, self.k_proj, self.v_proj))
    keys, values = slots.memory(self.layer_idx, k.shape[1], self.head_dim)
    norms = None
    if hasattr(self, "q_norm"):
        norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.variance_epsilon)
    cos, sin = (angles.reshape(lanes, self.head_dim) for angles in position_embeddings)
    q = slots.ways.prepare(q, k, v, norms, cos, sin, keys, values, *slots.lanes)
    out = slots.ways.attend(q, keys, values, *slots.lanes, self.scaling)
    return self.o_proj(out.reshape(lanes, width, -1)), None


def _gated(layer: Any, way: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    return layer.down_proj(way(layer.gate_proj(x), layer.up_proj(x)))


def _normed(layer: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, layer.weight.shape, layer.weight, layer.variance_epsilon)


def swap_norms(model: nn.Module) -> list[nn.Module]:
    """Norms in one kernel instead of six, where that gives what the layer gives."""
    swapped: list[nn.Module] = []
    for layer in model.modules():
        weight, eps = getattr(layer, "weight", None), getattr(layer, "variance_epsilon", None)
        if not type(layer).__name__.endswith("RMSNorm") or weight is None or eps is None or weight.ndim != 1:
            continue
        sample = torch.linspace(-3, 3, 5 * len(weight), device=weight.device).view(5, -1).to(weight.dtype)
        own, one = layer(sample).float(), _normed(layer, sample).float()
        if torch.allclose(own, one, rtol=ROUNDING[weight.dtype] / 4, atol=1e-6):
            layer.forward = partial(_normed, layer)
            swapped.append(layer)
    return swapped


def swap_layers(model: nn.Module, ways: DecodeKernels) -> list[nn.Module]:
    """Attention that knows fixed steps, and gates in one kernel."""
    swapped: list[nn.Module] = []
    for layer in model.modules():
        if type(layer).__name__ in ATTENTIONS:
            layer.forward = MethodType(_attention, layer)
        elif type(layer).__name__ in GATED and _is_silu(layer):
            layer.forward = partial(_gated, layer, ways.gate)
        else:
            continue
        swapped.append(layer)
    return swapped


def _is_silu(layer: Any) -> bool:
    x = torch.linspace(-4, 4, 17)
    return torch.equal(layer.act_fn(x), silu(x))


def undo(swapped: Iterable[nn.Module]) -> None:
    """The layers' own forward again."""
    for layer in swapped:
        vars(layer).pop("forward", None)


# --- fitting --------------------------------------------------------------------------------------


class KernelFit(NamedTuple):
    """How far log-probabilities through slots are from float32's, and what was made lighter.

    `control` is how far those of the model's own forward pass are.
    """

    off: float
    control: float = 0.0
    ways: DecodeKernels | None = None
    notes: tuple[str, ...] = ()
    swapped: tuple[nn.Module, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether it is as exact as the model itself. False for what is not a number."""
        return self.off <= allowed(self.control)


def allowed(control: float) -> float:
    return max(LIMIT * control, LEAST)


def fit(model: PreTrainedModel, length: int, *, light: bool, ways: DecodeKernels | None = None) -> KernelFit:
    """Give the model the slots' attention, and if `light`, fewer kernels: these ways, or the ones that work.

    Tried on `length` ids.
    """
    text = write(model, length)
    use_slots(model)
    plain = KernelFit(probe(model, text, None), text.control)
    if not light or not plain.exact:
        return plain
    notes: tuple[str, ...] = ()
    swapped = swap_norms(model)
    names = [type(layer).__name__ for layer in model.modules()]
    if sum(name in ATTENTIONS for name in names) != model.config.get_text_config().num_hidden_layers:
        ways, notes = None, (f"decode steps are slower: no kernels for {type(model).__name__}'s attention",)
    elif ways is None:
        ways, notes = choose(model)
    if ways is not None:
        swapped += swap_layers(model, ways)
    lighter = KernelFit(probe(model, text, ways), text.control, ways, notes, tuple(swapped))
    if lighter.exact:
        return lighter
    undo(swapped)
    note = f"the model's own layers decode, which is slower: the lighter ones are off by {lighter.off:.2g}"
    return plain._replace(notes=(*notes, note))


# --- the text that a model is tried on -------------------------------------------------------------


class CalibrationText(NamedTuple):
    """Ids that a model wrote, float32's log-probabilities of what comes after each, and the control."""

    ids: Tensor
    scores: Tensor
    control: float


def write(model: PreTrainedModel, length: int) -> CalibrationText:
    """`length` ids drawn from the model itself, always the same ones."""
    config = model.config.get_text_config()
    first = config.bos_token_id if isinstance(config.bos_token_id, int) else 0
    ids = torch.tensor([first % config.vocab_size], device=model.device)
    generator = torch.Generator().manual_seed(0)
    for _ in range(length - 1):
        weights = _scores(model, ids)[-1].exp().cpu()
        if not bool(weights.isfinite().all()):
            weights = torch.ones_like(weights)  # any text shows that such a model is broken
        ids = torch.cat([ids, torch.multinomial(weights, 1, generator=generator).to(ids.device)])
    own = _scores(model, ids)
    if model.dtype == torch.float32:
        return CalibrationText(ids, own, 0.0)
    exact = _scores_in_float32(model, ids)
    return CalibrationText(ids, exact, float(apart(own, exact).max()))


def apart(scores: Tensor, exact: Tensor) -> Tensor:
    """At each position, by how much the log-probability of a token drawn there is off, in expectation."""
    return (exact.exp() * (scores - exact).abs()).sum(-1)


def _scores(model: Any, ids: Tensor) -> Tensor:
    return torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0].float(), dim=-1)


def _scores_in_float32(model: PreTrainedModel, ids: Tensor) -> Tensor:
    try:
        with in_float32(model):
            return _scores(model, ids)
    except RuntimeError:  # a layer that computes with another one's weights
        return _scores(copy.deepcopy(model).float(), ids)


def probe(model: PreTrainedModel, text: CalibrationText, ways: DecodeKernels | None) -> float:
    """How far log-probabilities through slots, id by id after the first half, are from float32's."""
    ids, length = text.ids, len(text.ids)
    layers = model.config.get_text_config().num_hidden_layers
    slots = KVCache(layers, 1, length, model.dtype, model.device, ways)
    slots.take(ids.tolist())
    off = torch.zeros((), device=model.device)
    row = torch.zeros(1, dtype=torch.int64, device=model.device)
    counts = [length // 2] + [1] * (length - length // 2)
    for end, count in zip(itertools.accumulate(counts), counts, strict=True):
        if ways is None or count > 1:
            step = slots.arrange([0], [count])
        else:
            step = slots.fixed(ids[end - 1 : end], row + end - 1, row, slots.length, gathered=False)
        logits = forward(model, slots, step)
        slots.advance([0], [count])
        # torch.maximum keeps a NaN; Python's max would lose it.
        scores = torch.log_softmax(logits[0].float(), dim=-1)
        off = torch.maximum(off, apart(scores, text.scores[end - 1]))
    return float(off)
