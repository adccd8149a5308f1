"""What a policy answers to the fixed questions by which an engine is asked whether it has its weights."""

from __future__ import annotations

from typing import Any

import torch

from afield.interfaces.weight_probe import WeightProbe

LENGTHS = (2, 4, 8, 12, 16)


@torch.no_grad()
def compute_weight_probe(model: Any) -> WeightProbe:
    """`model` is called as it is: adapters on, no dropout. One pass over a few ids."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids = [(7 * place + 3) % vocabulary for place in range(LENGTHS[-1])]
    logits = model(input_ids=torch.tensor([ids], device=model.device)).logits[0].float()
    likeliest = logits.log_softmax(-1).max(-1).values
    return WeightProbe(
        prompt_ids=tuple(ids),
        lengths=LENGTHS,
        logprobs=tuple(float(likeliest[length - 1]) for length in LENGTHS),
    )
