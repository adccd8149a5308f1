"""TRL's `WeightTransferProtocol`: the trainer's weights to whatever samples behind the gateway.

They are written as a model directory beside its place, renamed into it, and published under the next
version; embedded engine, vLLM and SGLang load it from there. Agents go on meanwhile: the gateway keeps
every call, and stamps each token with the version that sampled it, so there is nothing to pause. What the
trainer does not send because it never changes (frozen parts) comes from the model's own directory.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afield.errors import UsageError
from afield.integrations.trl.collector_thread import CollectorThread
from afield.rounding import Rounding, make_rounding, write_rounding
from afield.trainers.model_directory import copy_but_weights, replaced
from afield.trainers.publication import Rounder
from afield.types import Policy

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("afield.trl")
KEPT = 2


class WeightTransfer:
    """Counts what it has sent as the trainer does: version n of TRL is the gateway's first one plus n."""

    def __init__(
        self,
        crew: CollectorThread,
        *,
        keep: int | None = KEPT,
        report: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """`report` takes metrics as TRL's `metrics_queue` does."""
        self._crew = crew
        self._report = report
        self._keep = keep
        self._model = Path(crew.config.model)
        self.sent = 0
        self.published: dict[str, float] = {}
        """Metrics of the last publication; see `afield.interfaces.trainer.Publisher`."""

    def init_weight_transfer(self) -> None:
        """Starts the gateway, unless one was named, and all that agents need."""
        self._crew.start()

    def pause(self) -> None:
        """Nothing: agents sample with the weights they have until the new ones are in place."""

    def resume(self) -> None:
        """Nothing; see `pause`."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Every later token is sampled by these weights. Raises what kept them from getting there."""
        made = self._crew.start()
        version = made.base + self.sent + 1
        directory = self._crew.run.weights(version)
        rounding = make_rounding(made.engine_dtype, self._crew.config.seed, version)
        self.published = write(self._model, directory, iterator, rounding)
        log.info("version %d is published: %s", version, self.published)
        if self._report is not None:
            self._report({f"rollout/{name}": (value, 1) for name, value in self.published.items()})
        self._crew.call(made.gateway.publish(Policy(self._model.name, version), str(directory)))
        self.sent += 1
        self._crew.run.prune(keep_checkpoints=1, keep_weights=self._keep)

    def destroy(self) -> None:
        """Ends gateway and agents."""
        self._crew.close()


def write(
    model: Path,
    directory: Path,
    tensors: Iterator[tuple[str, Tensor]],
    rounding: Rounding | None = None,
) -> dict[str, float]:
    """A model directory as `model` is one, with these tensors, rounded for the engine; what arrived."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # One at a time: a sharded parameter is whole only until the next one is asked for.
    rounding = rounding or Rounding()
    rounder = Rounder(model, rounding)
    state = {n: rounder(n, tensor.detach()).to("cpu", copy=True).contiguous() for n, tensor in tensors}
    with replaced(directory) as fresh:
        copy_but_weights(model, fresh)
        config = json.loads((fresh / "config.json").read_text())
        state = whole(model, state, tied=untied(fresh / "config.json", config))
        try:
            save_file(state, fresh / "model.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        write_rounding(fresh, rounding)
    return rounder.metrics()


def untied(path: Path, config: Mapping[str, object]) -> bool:
    """Whether input and output embeddings are one; from now on the directory has both, since engines that
    reload weights in place may update only one of them."""
    tied = config.get("tie_word_embeddings") is True
    if tied:
        path.write_text(json.dumps({**config, "tie_word_embeddings": False}, indent=2) + "\n")
    return tied


def whole(model: Path, state: dict[str, Tensor], *, tied: bool) -> dict[str, Tensor]:
    """What was sent, what never changes, and the second of two that are tied."""
    from safetensors import safe_open

    known: set[str] = set()
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                known.add(name)
                if name not in state:
                    state[name] = tensors.get_tensor(name)
    if not known:
        raise UsageError(f"{model} has no *.safetensors; save the model there with safetensors")
    if stray := sorted(name for name in state if name not in known and name != "lm_head.weight"):
        raise UsageError(
            f"the trainer sends {stray[0]!r}, which is not in {model}; train the model that is served"
        )
    if tied:
        shared = [name for name in state if name.endswith("embed_tokens.weight")]
        if len(shared) != 1:
            raise UsageError(f"{model} ties its embeddings, but has {len(shared)} of them")
        state["lm_head.weight"] = state[shared[0]].clone()
    return state
