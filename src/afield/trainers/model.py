"""Policy model in training: a Hugging Face causal language model.

All weights train, or LoRA adapters do while the rest stays frozen. Trained weights are float32; the
arithmetic is in `dtype` (`autocast`). The reference policy of a KL penalty is the model without
its adapters, or a second copy. Dropout is off, since log-probabilities have to match the sampler's; a model
that is not deterministic is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from afield.errors import UsageError
from afield.interfaces.weight_probe import WeightProbe, write_weight_probe
from afield.models.masks import ConstraintMasks
from afield.models.precision import in_float32
from afield.models.rounding import PublishedUpdate, Rounding, torch_dtype, write_rounding
from afield.models.vision import Vision
from afield.settings.trainer import FloatDtype, LayoutName, LoraOptions, TrainerDtype
from afield.trainers import lora as adapters
from afield.trainers.micro_batches import ImageReader, Padded
from afield.trainers.model_directory import (
    WEIGHT_FILE,
    copy_but_weights,
    load_model,
    replaced,
    untie,
    write_weights,
)
from afield.trainers.publication import (
    Checkpoint,
    KeptTensor,
    TensorShard,
    as_adapters,
    as_kept,
    as_merged,
    as_published,
    names_of,
    undivided,
)
from afield.trainers.shared_publication import SharedPublication
from afield.trainers.tree_attention import ATTENTION, TokenTree
from afield.trainers.tree_compat import (
    is_deterministic,
    max_row_length,
    padding_incompatibility,
    tree_incompatibility,
)

log = logging.getLogger(__name__)

PROBE_LENGTHS = (2, 4, 8, 12, 16)
"""Prompt lengths of the weight probe."""


class PolicyModel:
    """A loaded model, its trainable parameters, and its export for engines.

    A LoRA rank of 0 trains all weights. `layout` falls back to padded for models that cannot run over a tree.
    Rows may have `context` tokens, and `tree_context` over a tree: longer rows exceed a window of the model's
    attention and are padded.
    """

    reference_model: Any = None
    """Second copy of the model as the reference policy; None with LoRA or without a KL penalty."""
    checkpoint_group: Any = None
    """Process group of sharded checkpoints; None in a single process."""
    _computing: torch.dtype | None = None
    """Dtype of `computing`; None outside of it."""
    arithmetic: Rounding | None = None
    """Rounding of the weights that `rounded` computes with; None computes with the masters."""
    _kept: list[KeptTensor] | None = None
    """Weights rounded by `arithmetic`; None after the masters have changed."""
    _is_rounded = False
    """Whether the weights are rounded now."""

    def __init__(
        self,
        path: str | Path,
        *,
        device: torch.device,
        dtype: TrainerDtype = "auto",
        lora: LoraOptions | None = None,
        checkpointing: bool = False,
        reference: bool = False,
        layout: LayoutName = "tree",
    ) -> None:
        self.path = Path(path)
        self.device = device
        self.dtype: FloatDtype = pick_dtype(dtype, device)
        self.lora = lora if lora and lora.rank else None
        self.layout: LayoutName = layout
        self.model = self._load()
        self._checkpoint = None if self.lora else Checkpoint(self.path, self.model)
        if reference and not self.lora:
            self.reference_model = self._load().requires_grad_(False)
        if self.lora:
            adapters.attach(self.model, self.lora, self.path)
        if checkpointing:
            enable_checkpointing(self.model)
        config = self.model.config.get_text_config()
        self.vocabulary: int = config.vocab_size
        self.images, self.no_images = self._load_vision()
        self.masks = ConstraintMasks(self.path, self.vocabulary)
        self.context = max_row_length(config, tree=False)
        self.tree_context = max_row_length(config, tree=True)
        if self.layout == "tree" and self.tree_context != self.context:
            log.warning(
                "%s: its attention has a window, so rows of more than %s tokens are padded",
                self.path,
                self.tree_context,
            )

    def _load(self) -> Any:
        # Frozen weights need no more precision than the arithmetic.
        model = load_model(self.path, "cpu", self.dtype if self.lora else "float32")
        self._attention: str = model.config._attn_implementation
        if why := padding_incompatibility(model):
            raise UsageError(
                f"{self.path}: {type(model).__name__} computes other numbers in a batch than alone: {why};"
                " the embedded trainer does not support it"
            )
        if self.layout == "tree" and (unfit := tree_incompatibility(model)):
            log.warning(
                "%s: %s cannot be run over a tree (%s); rows are padded instead",
                self.path,
                type(model).__name__,
                unfit,
            )
            self.layout = "padded"
        return model.to(self.device)

    def _load_vision(self) -> tuple[ImageReader | None, str]:
        """Image reader of the model, or the reason why it takes no images."""
        try:
            vision = Vision.load(self.path)
        except UsageError as error:
            return None, str(error)
        if vision is None:
            return None, f"{self.path} has no vision part; train the model that saw them"
        if self.layout == "tree":
            log.info("%s: rows with images are padded, the others run over a tree", self.path)
        return ImageReader(vision), ""

    def set_attention(self, model: Any, layout: Padded | TokenTree) -> None:
        """Select the model's own attention for padded rows, tree attention for trees."""
        implementation = ATTENTION if isinstance(layout, TokenTree) else self._attention
        if model.config._attn_implementation != implementation:
            model.set_attn_implementation(implementation)

    @property
    def trainable(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @contextmanager
    def reference(self) -> Iterator[Any]:
        """Yield the reference policy: the model without adapters, or the second copy."""
        if self.lora:
            with adapters.adapters_disabled(self.model):
                yield self.model
        elif self.reference_model is not None:
            yield self.reference_model
        else:
            raise UsageError("this policy has no reference model; create it with reference=True")

    def autocast(self) -> AbstractContextManager[Any]:
        dtype = self._computing or torch_dtype(self.dtype)
        if dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)

    @contextmanager
    def computing(self, dtype: torch.dtype) -> Iterator[None]:
        """Compute as a model that was loaded in `dtype`: products and the residual stream are in `dtype`."""
        before, self._computing = self._computing, dtype
        embeddings = self.model.get_input_embeddings()
        hook = embeddings.register_forward_hook(lambda _module, _inputs, output: output.to(dtype))
        try:
            with in_float32(self.model) if dtype == torch.float32 else nullcontext():
                yield
        finally:
            hook.remove()
            self._computing = before

    def gather_for_export(self, tensor: Tensor) -> Tensor:
        """The whole tensor; a sharded policy gathers it on rank 0."""
        return tensor

    def scatter(self, tensor: Tensor, into: Tensor) -> Tensor:
        """The shard of a whole tensor that belongs `into` a tensor of the model."""
        del into
        return tensor

    def state(self) -> dict[str, Tensor]:
        """Trained tensors by name."""
        return {name: self.gather_for_export(tensor) for name, tensor in self.trained().items()}

    def trained(self) -> dict[str, Tensor]:
        """Trained tensors of this process by name, whole or sharded."""
        return adapters.adapter_state(self.model) if self.lora else self.model.state_dict()

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        own = self.trained()
        if wrong := sorted(own.keys() ^ state.keys()):
            raise UsageError(
                f"the checkpoint and the model differ in the tensor {wrong[0]!r};"
                " resume with the model and adapters it was saved with"
            )
        for name, tensor in state.items():
            if own[name].shape != tensor.shape:
                raise UsageError(
                    f"the checkpoint has {list(tensor.shape)} for {name!r}, the model"
                    f" {list(own[name].shape)}; resume with the model it was saved with"
                )
        for name, tensor in state.items():
            own[name].copy_(self.scatter(tensor, own[name]))
        self.changed()

    def weights(self) -> dict[str, Tensor]:
        """Tensors of the whole model, adapters merged."""
        if self.lora:
            return adapters.merged_state(self.model, self.gather_for_export)
        return {name: self.gather_for_export(tensor) for name, tensor in self.model.state_dict().items()}

    def export(
        self,
        directory: Path,
        rounding: Rounding = Rounding(),  # noqa: B008
        sharing: SharedPublication | None = None,
    ) -> PublishedUpdate:
        """Write the model directory as an engine loads it, with a weight probe. Replaces the directory.

        Weights are float32, or rounded by `rounding`. With `sharing` they are in shared memory when this
        returns, if that is possible, and on disk later.
        """
        with self.published(rounding) if rounding.lossy else nullcontext(PublishedUpdate()) as update:
            tensors = self._exported(rounding)
            shares = sharing is not None and self.writes and sharing.begin(tensors)
            weights: dict[str, Tensor] = {}
            for name, (tensor, dtype) in tensors.items():
                if sharing is not None and shares:
                    sharing.put(name, self.gather_for_export(tensor.to(dtype)))
                else:  # a copy, because published weights are in place of the masters for this block only
                    weights[name] = self.gather_for_export(tensor.to(dtype, copy=rounding.lossy))
            probe = self.weight_probe()
        if not self.writes:
            return self.sum_over_ranks(update)
        with replaced(directory) as fresh:
            copy_but_weights(self.path, fresh)
            untie(self.model, fresh)
            write_rounding(fresh, rounding)
            if sharing is not None and shares:
                sharing.describe(fresh, rounding.version, probe)
            else:
                write_weights(fresh / WEIGHT_FILE, weights)
                write_weight_probe(fresh, probe)
        if sharing is not None and shares:
            sharing.write_behind(directory, probe)
        return self.sum_over_ranks(update)

    def export_adapter(self, directory: Path, rounding: Rounding = Rounding()) -> PublishedUpdate:  # noqa: B008
        """Write the adapters alone, in peft's format. Replaces the directory."""
        if not self.lora:
            raise UsageError("there are no adapters to export; set a LoRA rank, or export the whole model")
        kept = self._keep(rounding)
        with as_adapters(self.model, rounding, self.gather, self.shard, kept=kept) as update:
            dtype = torch_dtype(rounding.dtype)
            tensors = {name: tensor.to(dtype) for name, tensor in self.state().items()}
            probe = self.weight_probe()
        if self.writes:
            with replaced(directory) as fresh:
                adapters.write_adapter(self.model, fresh, tensors)
                write_rounding(fresh, rounding)
                write_weight_probe(fresh, probe)
        return update

    @contextmanager
    def published(self, rounding: Rounding) -> Iterator[PublishedUpdate]:
        """The model computes with the published weights of this version."""
        if self._checkpoint is None:
            with as_merged(self.model, rounding, self.gather, self.shard) as update:
                yield update
        else:
            kept = self._keep(rounding)
            with as_published(self.model, rounding, self._checkpoint, self.shard, kept=kept) as update:
                yield update

    def _keep(self, rounding: Rounding) -> list[KeptTensor] | None:
        """A list for the rounded weights, if training passes compute with them."""
        if rounding != self.arithmetic:
            return None
        self._kept = []
        return self._kept

    @contextmanager
    def rounded(self) -> Iterator[None]:
        """Compute with weights that are rounded by `arithmetic`, in training passes too.

        Casting the masters to 16 bits in each product would drop the updates that the published weights
        carry: trainer and sampler would have different policies.
        """
        if self.arithmetic is None or self._is_rounded:
            yield
            return
        if self._kept is None:
            self._round(self.arithmetic)
        self._is_rounded = True
        try:
            with as_kept(self._kept or ()):
                yield
        finally:
            self._is_rounded = False

    def _round(self, rounding: Rounding) -> None:
        """Fill `_kept`."""
        if self.lora is None:
            with self.published(rounding):
                return
        kept = self._keep(rounding)
        with as_adapters(self.model, rounding, self.gather, self.shard, kept=kept):
            return

    def changed(self) -> None:
        """Forget the rounded weights, because the masters have changed."""
        self._kept = None

    def _exported(self, rounding: Rounding) -> dict[str, tuple[Tensor, torch.dtype]]:
        """Tensors to export, whole or sharded, and their dtype in the export. Buffers keep theirs.

        An export that rounds calls it inside `published`.
        """
        if not rounding.lossy:
            whole = self.weights() if self.lora else self.model.state_dict()
            return {name: (tensor, tensor.dtype) for name, tensor in whole.items()}
        dtype, tensors = torch_dtype(rounding.dtype), self.model.state_dict()
        weights = names_of(self.model).keys()
        if self.lora:
            tensors = adapters.base_state(self.model)
            weights = {name.replace(".base_layer.", ".") for name in weights}
        return {n: (t, dtype if n in weights else t.dtype) for n, t in tensors.items()}

    @property
    def sharing_device(self) -> torch.device:
        """Device in whose memory published weights are shared."""
        return self.device

    @property
    def writes(self) -> bool:
        """Whether this process writes exports."""
        return True

    def shard(self, tensor: Tensor) -> TensorShard:
        """This process's shard of a tensor."""
        return undivided(tensor)

    def gather(self, tensor: Tensor) -> Tensor:
        """The whole tensor, in every process and on its device."""
        return tensor

    def sum_over_ranks(self, update: PublishedUpdate) -> PublishedUpdate:
        """The sum over all processes."""
        return update

    def weight_probe(self) -> WeightProbe:
        """Log-probabilities that engines with these weights must give."""
        with self.autocast():
            return compute_weight_probe(self.model)


def enable_checkpointing(model: Any) -> None:
    """Gradient checkpointing: keep each layer's input and recompute the layer in the backward pass."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise UsageError(
            f"{type(model).__name__} does not support activation checkpointing; set checkpointing = false"
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # transformers checkpoints layers in training mode only; their submodules stay in eval, without dropout.
    for layer in layers:
        layer.training = True
    if not is_deterministic(model):
        raise UsageError(
            f"{type(model).__name__} has dropout under activation checkpointing; set checkpointing = false"
        )


def pick_device(name: str | None) -> torch.device:
    """The named device, or a GPU if there is one."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"device {name!r} cannot be used: {reason}; leave it out, or say cpu or cuda"
        ) from error
    if device.type == "meta":
        raise UsageError("device 'meta' computes nothing; leave it out, or say cpu or cuda")
    return device


def pick_dtype(name: TrainerDtype, device: torch.device) -> FloatDtype:
    """The named dtype; `auto` is bfloat16 on a GPU that computes in it, else float32."""
    if name != "auto":
        return name
    return "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported(False) else "float32"


@torch.no_grad()
def compute_weight_probe(model: Any) -> WeightProbe:
    """Log-probabilities of the highest tokens for a few fixed prompts, in one pass: engines that load the
    published weights must reproduce them."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids = [(7 * place + 3) % vocabulary for place in range(PROBE_LENGTHS[-1])]
    logits = model(input_ids=torch.tensor([ids], device=model.device)).logits[0].float()
    highest = logits.log_softmax(-1).max(-1).values
    return WeightProbe(
        prompt_ids=tuple(ids),
        lengths=PROBE_LENGTHS,
        logprobs=tuple(float(highest[length - 1]) for length in PROBE_LENGTHS),
    )
