"""Rows beside each other, as everybody runs them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Padded(NamedTuple):
    """Rows beside each other. Padding comes last, where no causal model looks, so no mask is needed."""

    ids: Tensor  # [rows, width]

    def hidden(self, model: Any) -> Tensor:
        return model.get_decoder()(input_ids=self.ids, use_cache=False).last_hidden_state.flatten(0, 1)

    def logits(self, model: Any, tokens: Tensor) -> Tensor:
        width = self.ids.shape[1]
        needed, column = torch.unique(tokens % width, return_inverse=True)
        output = model(input_ids=self.ids, use_cache=False, logits_to_keep=needed)
        return output.logits[tokens // width, column]
