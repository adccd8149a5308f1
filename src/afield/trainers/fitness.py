"""Whether a model computes over a forest what it computes over rows, found out by trying.

Some architectures ignore the attention that is put into them, or do more in it than a forest allows
(windows, soft caps, states that run along the row). A few tokens that branch show it: they are run as rows
with the model's own attention, and as a forest with ours. One that computes something else each time it is
asked, such as one with dropout that cannot be switched off, is no policy at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from afield.errors import boundary
from afield.trainers.packing import pack
from afield.trainers.tree import Tree, watch
from afield.types import Failure, FailureKind, Reason

# A stem that three sequences share, one of them to its end, and one that shares nothing.
BRANCHES = ((0, 1, 2, 3), (0, 1, 2, 3, 4, 5, 6), (0, 1, 2, 3, 7, 8), (9, 10, 11, 12, 13))
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # relative error of all logits


def fit_for_trees(model: Any) -> str:
    """Put our attention into `model`; or leave it as it is, and say why that cannot be."""
    own = model.config._attn_implementation
    vocabulary = model.config.get_text_config().vocab_size
    rows = [[(7 + 11 * i) % vocabulary for i in row] for row in BRANCHES]
    off = _distance(model, rows)
    if isinstance(off, float) and off <= CLOSE[model.dtype]:
        return ""
    model.set_attn_implementation(own)
    return off if isinstance(off, str) else f"its logits are off by {off:.1e} there"


@torch.no_grad()
def _distance(model: Any, rows: list[list[int]]) -> float | str:
    problems: list[Failure] = []
    with boundary(FailureKind.INFRASTRUCTURE, Reason.LAUNCH, problems.append):
        expected = torch.cat([_row(model, row) for row in rows])
        packed = pack(rows)
        watch(model)
        tree = Tree(packed, model.device)
        got = tree.logits(model, torch.arange(len(packed.ids), device=model.device)).float()
        places = torch.tensor([place for path in packed.paths for place in path], device=model.device)
        return float((got[places] - expected).norm() / expected.norm())
    return problems[0].message


def _row(model: Any, ids: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0].float()


def longest_row(config: Any, *, tree: bool) -> int | None:
    """Up to which length a row's tokens get the same numbers however it is run; None is no limit."""
    limits: list[int | None] = [getattr(config, "max_position_embeddings", None)]
    rope = getattr(config, "rope_parameters", None) or {}
    settings = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    # Beyond it, these stretch all positions by the longest row they are run beside.
    shifting = [part for part in settings if part.get("rope_type") in {"dynamic", "longrope"}]
    limits += [part.get("original_max_position_embeddings") for part in shifting]
    layers = getattr(config, "layer_types", None)
    if tree and (layers is None or "sliding_attention" in layers):
        limits.append(getattr(config, "sliding_window", None))
    if tree and "chunked_attention" in (layers or ()):
        limits.append(getattr(config, "attention_chunk_size", None))
    return min((limit for limit in limits if limit is not None), default=None)


@torch.no_grad()
def settled(model: Any) -> bool:
    """Whether it computes the same again."""
    ids = [(7 + 11 * i) % model.config.get_text_config().vocab_size for i in range(6)]
    return torch.equal(_row(model, ids), _row(model, ids))
