"""LoRA adapters (peft) inside a model whose other weights stay frozen.

Adapters are injected into linear layers, so that the model is called as before. They are float32 for any
dtype of the model. Merging creates new tensors: adapters in training are never merged and restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from afield.errors import Unavailable, UsageError
from afield.settings.trainer import LoraOptions

NAME = "default"
ALL = ("all-linear",)


def attach(model: Any, options: LoraOptions, path: Path) -> None:
    """Inject adapters into `model` and freeze the rest; outputs stay the same until they are trained.

    Initial values depend on the model and the options only.
    """
    try:
        import peft
    except ImportError as error:
        raise Unavailable("LoRA needs peft; install afield[lora]") from error
    for name, layer in model.named_modules():
        if name.endswith(options.targets) and isinstance(layer, torch.nn.Embedding):
            raise UsageError(f"layer {name!r} is not a linear one; leave it out of the LoRA targets")
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,  # pyright: ignore[reportArgumentType]
        target_modules="all-linear" if options.targets == ALL else list(options.targets),
        lora_dropout=0.0,
        bias="none",
        task_type=peft.TaskType.CAUSAL_LM,
        base_model_name_or_path=str(path),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            peft.inject_adapter_in_model(config, model, adapter_name=NAME)
        except ValueError as error:
            raise UsageError(f"adapters for {list(options.targets)} cannot be made: {error}") from error
    for name, layer in _layers(model):
        if not hasattr(layer.get_base_layer(), "weight"):  # experts whose weights are one tensor
            raise UsageError(
                f"adapters in {name!r} cannot be merged: its weights are no linear layer; name those that are"
                " in the LoRA targets, such as q_proj, k_proj, v_proj, o_proj"
            )
        layer.lora_A[NAME].float()
        layer.lora_B[NAME].float()
    model.eval()


def _layers(model: Any) -> list[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, LoraLayer)]


@contextmanager
def adapters_disabled(model: Any) -> Iterator[None]:
    layers = [layer for _, layer in _layers(model)]
    for layer in layers:
        layer._disable_adapters = True  # enable_adapters() would also change what requires a gradient
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapter_state(model: Any) -> dict[str, Tensor]:
    """The adapters' tensors, by their names in peft's files."""
    state: dict[str, Tensor] = {}
    for name, layer in _layers(model):
        state[f"base_model.model.{name}.lora_A.weight"] = layer.lora_A[NAME].weight.detach()
        state[f"base_model.model.{name}.lora_B.weight"] = layer.lora_B[NAME].weight.detach()
    return state


def base_state(model: Any) -> dict[str, Tensor]:
    """The model's tensors without its adapters, by their names in its checkpoint."""
    inside = {f"{name}.": layer for name, layer in _layers(model)}
    state = {n: t for n, t in model.state_dict().items() if not n.startswith(tuple(inside))}
    for name, layer in inside.items():
        state |= {f"{name}{part}": t for part, t in layer.get_base_layer().state_dict().items()}
    return state


class AdaptedWeight(NamedTuple):
    """A weight and its adapter."""

    name: str
    """Name in the checkpoint."""
    weight: Tensor
    """Frozen weight of the base layer."""
    down: Tensor
    """Adapter matrix A."""
    up: Tensor
    """Adapter matrix B."""
    scale: float
    """Factor of the product B @ A."""
    transposed: bool
    """Whether the weight is stored as [in, out]."""

    def delta(self, whole: Callable[[Tensor], Tensor]) -> Tensor:
        """scale * B @ A in float32; `whole` gathers a sharded tensor."""
        change = self.scale * (whole(self.up).float() @ whole(self.down).float())
        return change.T.contiguous() if self.transposed else change


def adapted_weights(model: Any) -> list[AdaptedWeight]:
    return [
        AdaptedWeight(
            f"{name}.weight",
            layer.get_base_layer().weight.detach(),
            layer.lora_A[NAME].weight.detach(),
            layer.lora_B[NAME].weight.detach(),
            layer.scaling[NAME],
            layer.fan_in_fan_out,
        )
        for name, layer in _layers(model)
    ]


@torch.no_grad()
def merged_state(model: Any, whole: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The whole model's tensors with adapters merged, in float32."""
    state = {name: whole(tensor) for name, tensor in base_state(model).items()}
    for adapted in adapted_weights(model):
        down, up = whole(adapted.down), whole(adapted.up)
        base = state[adapted.name]
        if base.numel():
            gathered = adapted._replace(down=down, up=up)
            state[adapted.name] = base.float() + gathered.delta(lambda tensor: tensor)
    return state


def write_adapter(model: Any, directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write adapter_config.json and the tensors of `adapter_state` to adapter_model.safetensors."""
    import peft
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    config: peft.LoraConfig = model.peft_config[NAME]
    short = {name.rpartition(".")[2] for name, _ in _layers(model)}
    written = peft.LoraConfig(**{**config.to_dict(), "target_modules": sorted(short), "inference_mode": True})
    written.save_pretrained(str(directory))
    try:
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in tensors.items()},
            directory / "adapter_model.safetensors",
            metadata={"format": "pt"},
        )
    except SafetensorError as error:
        raise OSError(str(error)) from error
