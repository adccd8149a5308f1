"""Checks whether a model supports token trees and padded rows.

Some architectures ignore the attention implementation, or do more in it than a tree allows (windows, soft
caps, recurrent state). A few branching sequences are run as rows with the model's own attention and as a
tree with tree attention, and compared. A model that is not deterministic, such as one with dropout, is
refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from afield.errors import boundary
from afield.trainers.packing import pack
from afield.trainers.tree_attention import TokenTree, install_tree_attention
from afield.types import Failure, FailureKind, Reason

# Three sequences share a prefix, one of them is the prefix itself; the fourth shares nothing.
BRANCHES = ((0, 1, 2, 3), (0, 1, 2, 3, 4, 5, 6), (0, 1, 2, 3, 7, 8), (9, 10, 11, 12, 13))
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Relative error of all logits up to which they are equal."""


def tree_incompatibility(model: Any) -> str:
    """Install tree attention, or leave `model` unchanged and return the reason why it cannot be used."""
    own = model.config._attn_implementation
    vocabulary = model.config.get_text_config().vocab_size
    rows = [[(7 + 11 * i) % vocabulary for i in row] for row in BRANCHES]
    off = _distance(model, rows)
    if isinstance(off, float) and off <= TOLERANCE[model.dtype]:
        return ""
    model.set_attn_implementation(own)
    return off if isinstance(off, str) else f"its logits are off by {off:.1e} there"


def _distance(model: Any, rows: list[list[int]]) -> float | str:
    """Relative error of all logits, or the reason why a tree cannot be used."""
    problems: list[Failure] = []
    with boundary(FailureKind.INFRASTRUCTURE, Reason.LAUNCH, problems.append), torch.enable_grad():
        alone = [_row(model, row) for row in rows]
        expected = torch.cat([logits.detach() for logits in alone])
        packed = pack(rows)
        install_tree_attention(model)
        tree = TokenTree(packed, model.device)
        got = tree.logits(model, torch.arange(len(packed.ids), device=model.device)).float()
        if lost := sorted(_reached(model, *alone) - _reached(model, got)):
            return f"its weight {lost[0]} gets no gradient there"
        places = torch.tensor([place for path in packed.paths for place in path], device=model.device)
        return float((got.detach()[places] - expected).norm() / expected.norm())
    return problems[0].message


def _reached(model: Any, *outputs: Tensor) -> set[str]:
    """Names of the weights that the gradient of `outputs` reaches."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen: set[Any] = set()
    ahead: list[Any] = [output.grad_fn for output in outputs]
    reached: set[str] = set()
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None and id(leaf) in names:
            reached.add(names[id(leaf)])
        ahead += [following for following, _ in node.next_functions]
    return reached


@torch.no_grad()
def padding_incompatibility(model: Any) -> str:
    """Reason why padding changes the logits; empty if it does not."""
    config = model.config.get_text_config()
    if (top_k := getattr(config, "index_topk", None)) is not None:
        return f"its attention chooses {top_k} tokens of a row, padding among them (index_topk)"
    rows = [[(7 + 11 * i) % config.vocab_size for i in range(length)] for length in (24, 9, 15)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=model.device)
    padded = model(input_ids=ids, use_cache=False).logits.float()
    expected = torch.cat([_row(model, row) for row in rows])
    got = torch.cat([logits[: len(row)] for logits, row in zip(padded, rows, strict=True)])
    off = float((got - expected).norm() / expected.norm())
    return "" if off <= TOLERANCE[model.dtype] else f"its logits are off by {off:.1e} beside a longer row"


def _row(model: Any, ids: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0].float()


def max_row_length(config: Any, *, tree: bool) -> int | None:
    """Row length up to which numbers do not depend on the layout; None is no limit."""
    limits: list[int | None] = [getattr(config, "max_position_embeddings", None)]
    rope = getattr(config, "rope_parameters", None) or {}
    settings = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    # Beyond it, these scale all positions by the longest row of the batch.
    shifting = [part for part in settings if part.get("rope_type") in {"dynamic", "longrope"}]
    limits += [part.get("original_max_position_embeddings") for part in shifting]
    layers = getattr(config, "layer_types", None)
    if tree and (layers is None or "sliding_attention" in layers):
        limits.append(getattr(config, "sliding_window", None))
    if tree and "chunked_attention" in (layers or ()):
        limits.append(getattr(config, "attention_chunk_size", None))
    return min((limit for limit in limits if limit is not None), default=None)


@torch.no_grad()
def is_deterministic(model: Any) -> bool:
    """Whether two forward passes return the same logits."""
    ids = [(7 + 11 * i) % model.config.get_text_config().vocab_size for i in range(6)]
    return torch.equal(_row(model, ids), _row(model, ids))
