"""Weight transfer for TRL (`WeightTransferProtocol`): publishes weights to the gateway.

Weights are written as a model directory, renamed into place, and published under the next version; embedded
engine, vLLM and SGLang load them from there. Calls in flight continue, and the gateway records
the version that sampled each token. Tensors that the trainer does not send because they are
frozen come from the model's own directory.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afield import factory
from afield.errors import UsageError
from afield.integrations.trl.collector_thread import CollectorThread
from afield.models.rounding import Rounding, make_rounding, write_rounding
from afield.trainers.model_directory import copy_but_weights, replaced
from afield.trainers.publication import Rounder
from afield.types import Policy

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)
KEPT_VERSIONS = 2


class WeightTransfer:
    """Publishes weights; version n of TRL is the gateway's first version plus n."""

    def __init__(
        self,
        collector: CollectorThread,
        *,
        keep: int | None = KEPT_VERSIONS,
        report: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """`report` takes metrics as TRL's `metrics_queue` does."""
        self._collector = collector
        self._report = report
        self._keep = keep
        self._model = Path(collector.config.model)
        self.sent = 0
        self.published: dict[str, float] = {}
        """Metrics of the last publication; see `afield.interfaces.trainer.Publisher`."""

    def init_weight_transfer(self) -> None:
        """Start the collection, with a gateway unless one is configured."""
        self._collector.start()

    def pause(self) -> None:
        """No-op: agents sample with the old weights until the new ones are loaded."""

    def resume(self) -> None:
        """No-op; see `pause`."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Publish the weights; every later token is sampled by them."""
        collector = self._collector.start()
        if self.sent:
            self._collector.steps.trained(self.sent)
        version = collector.base + self.sent + 1
        directory = self._collector.run.weights(version)
        config = self._collector.config
        dtype = factory.published_dtype(config.engine_dtype, collector.served_dtype, Path(config.model))
        rounding = make_rounding(dtype, config.seed, version)
        self.published = write(self._model, directory, iterator, rounding)
        log.info("version %d is published: %s", version, self.published)
        if self._report is not None:
            self._report({f"rollout/{name}": (value, 1) for name, value in self.published.items()})
        began = time.monotonic()
        self._collector.call(collector.gateway.publish(Policy(self._model.name, version), str(directory)))
        self.sent += 1
        seconds = time.monotonic() - began
        self._collector.steps.published(version, seconds=seconds, metrics=self.published)
        self._collector.run.prune(keep_checkpoints=1, keep_weights=self._keep)

    def destroy(self) -> None:
        """End gateway and agents."""
        self._collector.close()


def write(
    model: Path,
    directory: Path,
    tensors: Iterator[tuple[str, Tensor]],
    rounding: Rounding | None = None,
) -> dict[str, float]:
    """Write a copy of `model` with these tensors, rounded for the engine; returns rounding metrics."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # One at a time: a sharded parameter is whole only until the next one is requested.
    rounding = rounding or Rounding()
    rounder = Rounder(model, rounding)
    state = {n: rounder(n, tensor.detach()).to("cpu", copy=True).contiguous() for n, tensor in tensors}
    with replaced(directory) as fresh:
        copy_but_weights(model, fresh)
        state = complete_state(model, state, tied=untie_embeddings(fresh / "config.json"))
        try:
            save_file(state, fresh / "model.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        write_rounding(fresh, rounding)
    return rounder.metrics()


def untie_embeddings(path: Path) -> bool:
    """Untie embeddings in a model's config, since engines that reload weights may update only one of the two.

    Returns whether they were tied.
    """
    config = json.loads(path.read_text())
    tied = config.get("tie_word_embeddings") is True
    if tied:
        path.write_text(json.dumps({**config, "tie_word_embeddings": False}, indent=2) + "\n")
    return tied


def complete_state(model: Path, state: dict[str, Tensor], *, tied: bool) -> dict[str, Tensor]:
    """Add frozen tensors of the model directory, and the second of tied embeddings."""
    from safetensors import safe_open

    names: set[str] = set()
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                names.add(name)
                if name not in state:
                    state[name] = tensors.get_tensor(name)
    if not names:
        raise UsageError(f"{model} has no *.safetensors; save the model there with safetensors")
    if stray := sorted(name for name in state if name not in names and name != "lm_head.weight"):
        raise UsageError(
            f"the trainer sends {stray[0]!r}, which is not in {model}; train the model that is served"
        )
    if tied:
        shared = [name for name in state if name.endswith("embed_tokens.weight")]
        if len(shared) != 1:
            raise UsageError(
                f"{model} has tie_word_embeddings = true, but {len(shared)} tensors embed_tokens.weight;"
                " exactly one is supported"
            )
        state["lm_head.weight"] = state[shared[0]].clone()
    return state
