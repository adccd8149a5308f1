"""Decode kernels: faster layers for decode steps, verified against plain torch.

1. `fit` sets the KV cache's attention. On CUDA it also replaces supported layers by versions with fewer
   kernel launches (one multiplication for queries, keys and values, one for the two halves of the MLP), and
   chooses the `DecodeKernels` of fixed steps: Triton's, else flash attention's.
2. Each kernel is compared on the device with plain torch, then the whole model with a plain forward pass. A
   failed comparison keeps the model's own layers and adds a note to `EngineInfo`.
3. The whole model is compared on text that it samples itself: the error of log-probabilities against
   float32 must stay within `LIMIT` times the control, the error of the model's own forward pass.
"""

from __future__ import annotations

import copy
import itertools
import subprocess
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, rms_norm, scaled_dot_product_attention, silu
from transformers import PreTrainedModel

from afield.engines.torch.cuda_graphs import forward
from afield.engines.torch.kv_cache import KVCache, Spans, use_slots
from afield.engines.torch.sampler import BLOCK, Sums, plain_sums
from afield.models.precision import in_float32

# Layer classes that `_attention` and `_gated` reproduce.
ATTENTIONS = ("LlamaAttention", "Qwen2Attention", "Qwen3Attention")
GATED = ("LlamaMLP", "Qwen2MLP", "Qwen3MLP")
# Tolerated error of numbers around 1 after a few roundings.
ROUNDING = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Allowed error of log-probabilities, as a multiple of the control. Different rounding stays near 1; reading a
# wrong key is off by an order of magnitude.
LIMIT = 4.0
LEAST = 1e-3  # error that is always allowed; the control is 0 in float32
SERVED = (torch.float32, torch.bfloat16, torch.float16)
Norms = tuple[Tensor, Tensor, float] | None


class DecodeKernels(NamedTuple):
    """Kernels of a fixed step. Queries, keys and values of its lanes are `[lanes, heads, size]`."""

    name: str
    """Name for notes."""
    prepare: Callable[..., Tensor]
    """Normalises and rotates queries and keys, stores keys and values; returns the queries."""
    attend: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]
    """Attention over the KV cache."""
    gate: Callable[[Tensor, Tensor], Tensor]
    """SiLU gate of the MLP."""
    sums: Sums
    """Softmax sums per block of tokens, for sampling."""
    attend_spans: Callable[[Tensor, Tensor, Tensor, Spans, float], Tensor] | None
    """Attention of a flat step's queries over the KV cache; None computes prompts with padding."""


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
    """Apply head norms and rotary embeddings, store keys and values; returns the queries."""
    if norms is not None:
        q_weight, k_weight, eps = norms
        q, k = _norm(q, q_weight, eps), _norm(k, k_weight, eps)
    place = (rows.long(), positions.long())
    keys.index_put_(place, _turn(k, cos, sin))
    values.index_put_(place, v)
    return _turn(q, cos, sin)


def attend(q: Tensor, keys: Tensor, values: Tensor, rows: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Attention of each lane's queries over the keys of its cache row up to its position."""
    key, value = (memory[rows.long()].transpose(1, 2) for memory in (keys, values))
    seen = torch.arange(keys.shape[1], device=q.device) <= positions[:, None]
    return scaled_dot_product_attention(
        q[:, :, None], key, value, attn_mask=seen[:, None, None], scale=scale, enable_gqa=True
    )[:, :, 0]


def attend_spans(q: Tensor, keys: Tensor, values: Tensor, spans: Spans, scale: float) -> Tensor:
    """Attention of each new id over the keys of its cache row up to its own position."""
    starts, outs = spans.starts.tolist(), list[Tensor]()
    places = zip(starts, starts[1:], spans.rows.tolist(), spans.lengths.tolist(), strict=False)
    for start, end, row, length in places:
        key, value = (memory[row, :length].transpose(0, 1) for memory in (keys, values))
        seen = torch.ones(end - start, length, dtype=torch.bool, device=q.device).tril(length - end + start)
        query = q[start:end].transpose(0, 1)
        out = scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale, enable_gqa=True)
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


def flash_attend(
    q: Tensor, keys: Tensor, values: Tensor, rows: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """`attend` by variable-length flash attention: one sequence per cache row, up to the keys in use."""
    lanes, length = len(q), keys.shape[1]
    queries = torch.arange(lanes + 1, dtype=torch.int32, device=q.device)
    starts = pad(rows * length, (0, 1))
    return torch.ops.aten._flash_attention_forward(
        q, keys.flatten(0, 1), values.flatten(0, 1), queries, starts, 1, length, 0.0, False, False,
        scale=scale, seqused_k=positions + 1,
    )[0]  # fmt: skip


def flash_attend_spans(q: Tensor, keys: Tensor, values: Tensor, spans: Spans, scale: float) -> Tensor:
    """`attend_spans` by variable-length flash attention, which reads the keys where they are."""
    starts = pad(spans.rows * keys.shape[1], (0, 1))
    return torch.ops.aten._flash_attention_forward(
        q, keys.flatten(0, 1), values.flatten(0, 1), spans.starts, starts, spans.longest, spans.longest_row,
        0.0, True, False, scale=scale, seqused_k=spans.lengths,
    )[0]  # fmt: skip


def gate(gated: Tensor, up: Tensor) -> Tensor:
    """SiLU gate of the MLP."""
    return silu(gated) * up


PLAIN = DecodeKernels("plain torch", prepare, attend, gate, plain_sums, attend_spans)
FLASH = PLAIN._replace(name="flash attention", attend=flash_attend, attend_spans=flash_attend_spans)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-b, a), dim=-1) * sin[:, None]


# --- choosing -------------------------------------------------------------------------------------


def triton_ways() -> tuple[DecodeKernels, tuple[type[Exception], ...]]:
    """Triton kernels, and the exception types they raise on unsupported devices; needs Triton."""
    from afield.engines.torch import triton_kernels

    ways = DecodeKernels(
        "Triton's kernels",
        triton_kernels.prepare,
        triton_kernels.attend,
        triton_kernels.gate,
        triton_kernels.sums,
        flash_attend_spans,
    )
    return ways, triton_kernels.REFUSALS


def choose(model: PreTrainedModel) -> tuple[DecodeKernels | None, tuple[str, ...]]:
    """First kernels that agree with plain torch, and a note for each rejected candidate."""
    notes: list[str] = []
    for name, load in (("Triton's kernels", triton_ways), (FLASH.name, lambda: (FLASH, ()))):
        # Triton or its compiler is missing, or the device or the sizes are unsupported.
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
                ways, more_notes = with_spans(ways, model, errors)
                return ways, (*notes, *more_notes)
            reason = f"off by {off:.2g} times what rounding explains"
        notes.append(f"decode steps do without {name}, which is slower: {reason}")
    return None, tuple(notes)


def with_spans(
    ways: DecodeKernels, model: PreTrainedModel, errors: tuple[type[Exception], ...]
) -> tuple[DecodeKernels, tuple[str, ...]]:
    """The kernels, without those of flat steps and with a note if these do not agree with plain torch."""
    try:
        off = compare_spans(ways, model)
    except errors as error:
        reason = f"{type(error).__name__}: {str(error)[:300]}"
    else:
        if off <= 1:
            return ways, ()
        reason = f"off by {off:.2g} times what rounding explains"
    return ways._replace(attend_spans=None), (f"prompts are padded, which is slower: {reason}",)


def compare_spans(ways: DecodeKernels, model: PreTrainedModel) -> float:
    """Largest error of `attend_spans` against plain torch, in units of `ROUNDING`."""
    assert ways.attend_spans is not None
    device, dtype = model.device, model.dtype
    generator = torch.Generator(device).manual_seed(0)
    heads, kv_heads, size = _sizes(model)
    counts, lengths = [1, 130, 7, 64, 2], [33, 130, 200, 199, 2]
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device)
    rows = torch.tensor([4, 0, 8, 2, 3], dtype=torch.int32, device=device)
    used = torch.tensor(lengths, dtype=torch.int32, device=device)
    spans = Spans(starts, rows, used, max(counts), max(lengths))
    q = torch.randn(sum(counts), heads, size, generator=generator, device=device).to(dtype)
    keys, values = torch.randn(2, 9, 200, kv_heads, size, generator=generator, device=device).to(dtype)
    wanted = attend_spans(q, keys, values, spans, size**-0.5).float()
    off = (ways.attend_spans(q, keys, values, spans, size**-0.5).float() - wanted).abs() / (1 + wanted.abs())
    return float(off.max()) / ROUNDING[dtype]


def compare(ways: DecodeKernels, model: PreTrainedModel) -> float:
    """Largest error of the kernels against plain torch, in units of `ROUNDING`."""
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
    # Not Python's max(), which loses a NaN.
    return float(off.max()) / ROUNDING[dtype]


def _sizes(model: PreTrainedModel) -> tuple[int, int, int]:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    return heads, config.num_key_value_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


# --- layers ---------------------------------------------------------------------------------------


class JoinedLinears:
    """Linear layers of the same input as one multiplication.

    The layers' own weights become views into the joined one, so that weight updates reach both.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._sizes = [layer.out_features for layer in layers]
        with torch.no_grad():
            self._weight = torch.cat([layer.weight.detach() for layer in layers])
            for layer, part in zip(layers, self._weight.split(self._sizes), strict=True):
                layer.weight = nn.Parameter(part, requires_grad=False)
            biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
            self._bias = torch.cat(biases) if biases else None
            if self._bias is not None:
                for layer, part in zip(layers, self._bias.split(self._sizes), strict=True):
                    layer.bias = nn.Parameter(part, requires_grad=False)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        return linear(x, self._weight, self._bias).split(self._sizes, dim=-1)


def join(layers: Sequence[Any]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Outputs of linear layers for one input: joined if the layers allow it, else one by one."""
    plain = all(type(layer) is nn.Linear for layer in layers)
    if plain and len({layer.bias is None for layer in layers}) == 1:
        return JoinedLinears(layers)
    return lambda x: tuple(layer(x) for layer in layers)


def _attention(
    self: Any,
    project: Callable[[Tensor], tuple[Tensor, ...]],
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Forward of an attention layer: decode kernels for fixed and flat steps, else the layer's own."""
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
    rows, width, _ = hidden_states.shape
    q, k, v = (part.reshape(rows * width, -1, self.head_dim) for part in project(hidden_states))
    keys, values = slots.memory(self.layer_idx, k.shape[1], self.head_dim)
    norms = None
    if hasattr(self, "q_norm"):
        norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.variance_epsilon)
    cos, sin = (angles.reshape(rows * width, self.head_dim) for angles in position_embeddings)
    q = slots.ways.prepare(q, k, v, norms, cos, sin, keys, values, *slots.lanes)
    if slots.spans is None:
        out = slots.ways.attend(q, keys, values, *slots.lanes, self.scaling)
    else:
        assert slots.ways.attend_spans is not None
        out = slots.ways.attend_spans(q, keys, values, slots.spans, self.scaling)
    return self.o_proj(out.reshape(rows, width, -1)), None


def _gated(
    layer: Any,
    project: Callable[[Tensor], tuple[Tensor, ...]],
    way: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
) -> Tensor:
    return layer.down_proj(way(*project(x)))


def _normed(layer: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, layer.weight.shape, layer.weight, layer.variance_epsilon)


def swap_norms(model: nn.Module) -> list[nn.Module]:
    """Replace RMS norms by torch's fused one, where it agrees with the layer; returns the layers."""
    swapped: list[nn.Module] = []
    for layer in model.modules():
        weight, eps = getattr(layer, "weight", None), getattr(layer, "variance_epsilon", None)
        if not type(layer).__name__.endswith("RMSNorm") or weight is None or eps is None or weight.ndim != 1:
            continue
        sample = torch.linspace(-3, 3, 5 * len(weight), device=weight.device).view(5, -1).to(weight.dtype)
        expected, actual = layer(sample).float(), _normed(layer, sample).float()
        if torch.allclose(expected, actual, rtol=ROUNDING[weight.dtype] / 4, atol=1e-6):
            layer.forward = partial(_normed, layer)
            swapped.append(layer)
    return swapped


def swap_layers(model: nn.Module, ways: DecodeKernels) -> list[nn.Module]:
    """Replace attention and gated MLP layers by ones that use `ways`; returns the layers."""
    swapped: list[nn.Module] = []
    for layer in model.modules():
        if type(layer).__name__ in ATTENTIONS:
            project = join([layer.q_proj, layer.k_proj, layer.v_proj])
            layer.forward = partial(_attention, layer, project)
        elif type(layer).__name__ in GATED and _is_silu(layer):
            layer.forward = partial(_gated, layer, join([layer.gate_proj, layer.up_proj]), ways.gate)
        else:
            continue
        swapped.append(layer)
    return swapped


def _is_silu(layer: Any) -> bool:
    x = torch.linspace(-4, 4, 17)
    return torch.equal(layer.act_fn(x), silu(x))


def undo(swapped: Iterable[nn.Module]) -> None:
    """Restore the layers' own forward."""
    for layer in swapped:
        vars(layer).pop("forward", None)


# --- fitting --------------------------------------------------------------------------------------


class KernelFit(NamedTuple):
    """Accuracy of the model through the KV cache, and the layers that were replaced."""

    off: float
    """Error of log-probabilities through the KV cache against float32, in nats."""
    control: float = 0.0
    """Error of the model's own forward pass against float32, in nats; 0 for a float32 model."""
    ways: DecodeKernels | None = None
    """Kernels of fixed steps; None for the model's own attention."""
    notes: tuple[str, ...] = ()
    """Reasons why faster kernels are not used."""
    swapped: tuple[nn.Module, ...] = ()
    """Layers whose forward was replaced."""

    @property
    def exact(self) -> bool:
        """Whether the error is within `allowed`; False for NaN."""
        return self.off <= allowed(self.control)


def allowed(control: float) -> float:
    """Largest accepted error of log-probabilities, in nats."""
    return max(LIMIT * control, LEAST)


def fit(model: PreTrainedModel, length: int, *, light: bool, ways: DecodeKernels | None = None) -> KernelFit:
    """Set the KV cache's attention and, if `light`, faster layers; keeps only those that stay exact.

    Args:
        model: model to change in place.
        length: tokens of the text on which accuracy is measured.
        light: whether to replace layers by faster ones.
        ways: decode kernels to use; None chooses the first that work.
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


# --- calibration ----------------------------------------------------------------------------------


class CalibrationText(NamedTuple):
    """Text that the model sampled, with reference log-probabilities."""

    ids: Tensor
    """Token ids, `[length]`."""
    scores: Tensor
    """Float32 log-probabilities of the token after each id, `[length, vocabulary]`."""
    control: float
    """Largest error of the model's own forward pass against float32, in nats."""


def write(model: PreTrainedModel, length: int) -> CalibrationText:
    """Sample `length` ids from the model with a fixed seed."""
    config = model.config.get_text_config()
    first = config.bos_token_id if isinstance(config.bos_token_id, int) else 0
    ids = torch.tensor([first % config.vocab_size], device=model.device)
    generator = torch.Generator().manual_seed(0)
    for _ in range(length - 1):
        weights = _scores(model, ids)[-1].exp().cpu()
        if not bool(weights.isfinite().all()):
            weights = torch.ones_like(weights)  # broken weights: `probe` reports them on any text
        ids = torch.cat([ids, torch.multinomial(weights, 1, generator=generator).to(ids.device)])
    own = _scores(model, ids)
    if model.dtype == torch.float32:
        return CalibrationText(ids, own, 0.0)
    exact = _scores_in_float32(model, ids)
    return CalibrationText(ids, exact, float(apart(own, exact).max()))


def apart(scores: Tensor, exact: Tensor) -> Tensor:
    """Expected absolute error of the log-probability of a sampled token, at each position."""
    return (exact.exp() * (scores - exact).abs()).sum(-1)


def _scores(model: Any, ids: Tensor) -> Tensor:
    return torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0].float(), dim=-1)


def _scores_in_float32(model: PreTrainedModel, ids: Tensor) -> Tensor:
    try:
        with in_float32(model):
            return _scores(model, ids)
    except RuntimeError:  # a layer uses another layer's weights
        return _scores(copy.deepcopy(model).float(), ids)


def probe(model: PreTrainedModel, text: CalibrationText, ways: DecodeKernels | None) -> float:
    """Largest error of log-probabilities through the KV cache against float32.

    The first half of the text is one prefill; the rest is decoded id by id.
    """
    ids, length = text.ids, len(text.ids)
    layers = model.config.get_text_config().num_hidden_layers
    slots = KVCache(layers, 1, length, model.dtype, model.device, ways)
    slots.take(ids.tolist())
    off = torch.zeros((), device=model.device)
    row = torch.zeros(1, dtype=torch.int64, device=model.device)
    counts = [length // 2] + [1] * (length - length // 2)
    for end, count in zip(itertools.accumulate(counts), counts, strict=True):
        if ways is None or count > 1:
            step = slots.flat([0], [count]) if slots.flattens else slots.arrange([0], [count])
        else:
            step = slots.fixed(ids[end - 1 : end], row + end - 1, row, slots.length, gathered=False)
        logits = forward(model, slots, step)
        slots.advance([0], [count])
        # torch.maximum keeps a NaN, unlike Python's max().
        scores = torch.log_softmax(logits[0].float(), dim=-1)
        off = torch.maximum(off, apart(scores, text.scores[end - 1]))
    return float(off)
