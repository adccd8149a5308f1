"""Looks over the shoulder of TRL's asynchronous GRPO trainer, and changes nothing it computes.

A line for everything it logs goes to a file, with how far its log-probabilities are from those of the
sampler for the tokens of that step: mean and largest absolute difference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor


def install(file: Path) -> None:
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    compute_loss, log = AsyncGRPOTrainer.compute_loss, AsyncGRPOTrainer.log
    seen: list[Tensor] = []

    def measured(self: Any, model: Any, inputs: dict[str, Tensor], *rest: Any, **named: Any) -> Any:
        made: list[Tensor] = []
        hook = model.register_forward_hook(lambda _, __, output: made.append(output.log_probs.detach()))
        try:
            loss = compute_loss(self, model, inputs, *rest, **named)
        finally:
            hook.remove()
        chosen = inputs["token_index"] >= 0
        scored = made[0].flatten()[inputs["token_index"][chosen]]
        seen.append((scored - inputs["old_log_probs"][chosen]).abs())
        return loss

    def logged(self: Any, logs: dict[str, float], *rest: Any, **named: Any) -> None:
        log(self, logs, *rest, **named)
        line: dict[str, Any] = dict(logs)
        if seen:
            line["logprob_diff_mean"] = sum(float(d.sum()) for d in seen) / sum(d.numel() for d in seen)
            line["logprob_diff_max"] = max(float(d.max()) for d in seen)
            seen.clear()
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")

    AsyncGRPOTrainer.compute_loss = measured
    AsyncGRPOTrainer.log = logged
