"""Model weights of the torch engine: loading, updates, LoRA merging.

A model directory is what transformers saves: config.json, model.safetensors (or shards with an index) and
tokenizer.json. A directory with a missing tensor, or one of another shape, raises UsageError with the
tensor's name. An adapter (peft's adapter_config.json and adapter_model.safetensors) is merged into the base
weights.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from afield.engines.lora import TENSORS, AdapterConfig, is_adapter, read_config
from afield.errors import UsageError
from afield.interfaces.shared_weights import read_shared_weights, wait_for_file
from afield.models.model_lock import ALONE
from afield.models.rounding import DTYPES, PublishedUpdate, Rounding, measure_update, read_rounding, rounded
from afield.models.shared_weights import SharedMemoryError, opened
from afield.models.vision import has_vision, tensor_name

log = logging.getLogger(__name__)
KEPT = 0.9  # share of an adapter that must survive rounding; below it, a warning is logged
EXPECTED = "expected a directory with config.json, model.safetensors and tokenizer.json"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FACTOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<factor>[AB])(\.[^.]+)?\.weight")
SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
# These rescale all positions by the longest row in the batch.
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


class ModelParameter(msgspec.Struct, frozen=True):
    """Tensor of the model; tied tensors are one parameter with several names."""

    names: tuple[str, ...]
    """Names in the state dict."""
    tensor: Tensor
    """Tensor being served; weight updates copy into it."""


class _ShardIndex(msgspec.Struct):
    weight_map: dict[str, str]


def read_model(path: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load a model directory for inference; raises UsageError if it is incomplete or unsupported."""
    for name in ("config.json", ONE_FILE):
        if not (path / name).is_file() and not (name == ONE_FILE and (path / INDEX).is_file()):
            raise UsageError(f"model path {str(path)!r} has no {name}; {EXPECTED}")
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        with ALONE:
            # The type stubs lack the second return value, the loading report.
            kind = AutoModelForImageTextToText if has_vision(path) else AutoModelForCausalLM
            loaded: Any = kind.from_pretrained(
                path, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"model path {str(path)!r} cannot be read: {error}; {EXPECTED}") from error
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()
    model, report = loaded
    if wrong := sorted(report["missing_keys"]):
        raise UsageError(
            f"model path {str(path)!r} lacks the tensor {wrong[0]!r}; save the whole model there"
        )
    if unfit := _unfit(config.get_text_config()):
        raise UsageError(
            f"model path {str(path)!r} has {unfit}, which the embedded engine cannot serve exactly"
        )
    return model.to(device).eval().requires_grad_(False)


def _unfit(config: PreTrainedConfig) -> str | None:
    """First feature of a configuration that cannot be served exactly; None if there is none."""
    layers = set(getattr(config, "layer_types", None) or ())
    if strange := sorted(layers - SUPPORTED_LAYERS):
        return f"{strange[0]!r} layers"
    # rope_parameters holds one setting for all layers, or one per layer type.
    rope = getattr(config, "rope_parameters", None) or {}
    settings = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    shifting = [s["rope_type"] for s in settings if s.get("rope_type") in BATCH_DEPENDENT_ROPE]
    if shifting:
        return f"{shifting[0]!r} positions"
    if getattr(config, "max_position_embeddings", None) is None:
        return "no max_position_embeddings"
    return None


def longest_context(config: PreTrainedConfig) -> int:
    """Longest supported context in tokens: position embeddings, and the window of sliding layers."""
    limits: list[int] = [config.max_position_embeddings]
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        limits.append(config.sliding_window)
    return min(limits)


def parameters(model: PreTrainedModel) -> list[ModelParameter]:
    """Parameters of the model, with tied tensors merged."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in model.state_dict().items():
        names.setdefault(tensor.data_ptr(), []).append(name)
        tensors[tensor.data_ptr()] = tensor
    return [ModelParameter(tuple(names[key]), tensor) for key, tensor in tensors.items()]


def read_weights(
    path: Path,
    wanted: list[ModelParameter],
    base: Path,
    rounding: Rounding = Rounding(),  # noqa: B008
) -> list[Tensor]:
    """Read weights in the order of `wanted`, with its dtypes and devices; raises UsageError on mismatch.

    An adapter directory is merged in float32 into the tensors of `base`, then rounded as the directory
    specifies, else as `rounding` does. Weights that a trainer shares in memory are copied from there, or read
    from their file as soon as it is complete. Tensors are copies: the directories may change afterwards.
    """
    if not is_adapter(path):
        if (shared := _read_shared(path, wanted)) is not None:
            return shared
        wait_for_file(path)
        tensors_by_name = _read_all(path)
        return [_copied(_pick(path, parameter, tensors_by_name), parameter) for parameter in wanted]
    wait_for_file(base)
    tensors_by_name = _read_all(base)
    if has_vision(base):
        tensors_by_name = {tensor_name(name): tensor for name, tensor in tensors_by_name.items()}
    changes = _changes(path, tensors_by_name)
    rounding = read_rounding(path) or rounding
    update = PublishedUpdate()
    tensors: list[Tensor] = []
    for parameter in wanted:
        weight = _copied(_pick(path, parameter, tensors_by_name), parameter)
        name = next((name for name in parameter.names if name in changes), "")
        if name:
            start = tensors_by_name[name].to(weight.device, torch.float32)
            master = start + changes[name].on(weight.device)
            weight = rounded(master, name, _for(weight, rounding), start=start)
            update = update.plus(measure_update(master, weight, start))
        tensors.append(weight)
    if update.kept is not None and update.kept < KEPT:
        log.warning(
            "adapter %s: only %.0f %% of it is left after it was merged into the served weights; serve them"
            " in float32",
            path,
            100 * update.kept,
        )
    return tensors


def _read_shared(path: Path, wanted: list[ModelParameter]) -> list[Tensor] | None:
    """Copies of weights in the memory of their trainer; None if there are none."""
    if (shared := read_shared_weights(path)) is None:
        return None
    try:
        with opened(shared, wanted[0].tensor.device) as tensors:
            return [_copied(_pick(path, parameter, tensors), parameter) for parameter in wanted]
    except SharedMemoryError as error:
        log.warning("weights %s: read from their file: %s", path, error)
        return None


def _copied(tensor: Tensor, parameter: ModelParameter) -> Tensor:
    return tensor.to(parameter.tensor.device, parameter.tensor.dtype, copy=True)


def _for(weight: Tensor, rounding: Rounding) -> Rounding:
    """`rounding` with the dtype of the served weight."""
    name = next(name for name, dtype in DTYPES.items() if dtype == weight.dtype)
    return msgspec.structs.replace(rounding, dtype=name)


class _Change(NamedTuple):
    """Low-rank update of one weight."""

    down: Tensor
    """Factor A, `[rank, in]`."""
    up: Tensor
    """Factor B, `[out, rank]`."""
    scale: float
    """LoRA scale, alpha divided by the rank (its root with rsLoRA)."""

    def on(self, device: torch.device) -> Tensor:
        """Update as a full matrix on `device`."""
        return self.scale * (self.up.to(device) @ self.down.to(device))


def _pick(path: Path, parameter: ModelParameter, tensors: Mapping[str, Tensor]) -> Tensor:
    present = [name for name in parameter.names if name in tensors]
    if not present:
        raise UsageError(
            f"weights {str(path)!r} lack the tensor {parameter.names[0]!r}; save the whole model there"
        )
    for name in present:
        if tensors[name].shape != parameter.tensor.shape:
            have, want = list(tensors[name].shape), list(parameter.tensor.shape)
            raise UsageError(
                f"weights {str(path)!r}: tensor {name!r} has shape {have}, the model being served {want};"
                " both must come from the same config.json"
            )
    for name in present[1:]:
        if tensors[name].data_ptr() == tensors[present[0]].data_ptr():
            continue
        if not torch.equal(tensors[name], tensors[present[0]]):
            raise UsageError(
                f"weights {str(path)!r}: {present[0]!r} and {name!r} differ, but the model being served ties"
                " them; start it from an untied model (tie_word_embeddings false)"
            )
    return tensors[present[0]]


def _read_all(path: Path) -> dict[str, Tensor]:
    if (path / ONE_FILE).is_file():
        files = [path / ONE_FILE]
    elif (path / INDEX).is_file():
        try:
            index = msgspec.json.decode((path / INDEX).read_bytes(), type=_ShardIndex)
        except msgspec.MsgspecError as error:
            raise UsageError(f"weights {str(path)!r}: {INDEX} is not an index: {error}") from error
        files = [path / name for name in sorted(set(index.weight_map.values()))]
    else:
        raise UsageError(f"weights {str(path)!r} have no {ONE_FILE}; {EXPECTED}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(_read_file(file))
    return tensors


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UsageError(f"weights {str(file.parent)!r}: {file.name} cannot be read: {error}") from error


def _changes(path: Path, base: Mapping[str, Tensor]) -> dict[str, _Change]:
    config = read_config(path)
    if config.unfit:
        raise UsageError(
            f"adapter {str(path)!r} has {config.unfit}, which cannot be merged; export whole weights"
        )
    factors: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _read_file(path / TENSORS).items():
        if (match := FACTOR.fullmatch(name)) is None:
            raise UsageError(
                f"adapter {str(path)!r} has the tensor {name!r}, which is not a lora_A or lora_B"
            )
        factors.setdefault(match["layer"], {})[match["factor"]] = tensor.float()
    changes: dict[str, _Change] = {}
    for layer, pair in factors.items():
        weight = base.get(f"{layer}.weight")
        if weight is None or pair.keys() != {"A", "B"}:
            has = "no such weight" if weight is None else f"only factor {', '.join(pair)}"
            raise UsageError(
                f"adapter {str(path)!r} changes {layer!r}, but there is {has}; was it made for this model?"
            )
        shape = [len(pair["B"]), *pair["A"].shape[1:]]
        if shape != list(weight.shape) or len(pair["A"]) != pair["B"].shape[-1]:
            raise UsageError(
                f"adapter {str(path)!r} changes {layer!r} by {shape}, but that is"
                f" {list(weight.shape)}; it was made for another model"
            )
        scale = _scale(config, layer, len(pair["A"]))
        changes[f"{layer}.weight"] = _Change(pair["A"], pair["B"], scale)
    return changes


def _scale(config: AdapterConfig, layer: str, rank: int) -> float:
    own = (a for key, a in config.alpha_pattern.items() if re.fullmatch(rf"(.*\.)?({key})", layer))
    alpha = next(own, config.lora_alpha)
    return alpha / (rank**0.5 if config.use_rslora else rank)
