"""Options of the embedded trainer: loss, importance weights, LoRA, memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import field

from afield.settings.fields import Bound, Count, CountOrZero, NotNegative, Positive, SettingsGroup

AdvantageEstimator = Literal[
    "grpo", "remax", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
]
Aggregate = Literal["rollout", "token", "constant"]
Credit = Literal["outcome", "turns"]
Importance = Literal["token", "sequence", "masked", "off"]
KLEstimator = Literal["k1", "k2", "k3"]
LayoutName = Literal["tree", "padded"]
LRScheduleName = Literal["constant", "linear", "cosine"]
LossName = Literal["ppo", "cispo", "gspo", "dr_grpo"]
MaskTruncated = Literal["off", "turn", "rollout"]
RoundingName = Literal["stochastic", "nearest"]
FloatDtype = Literal["float32", "bfloat16", "float16"]
TrainerDtype = Literal["auto", FloatDtype]
EngineDtype = Literal["auto", FloatDtype]
WeightTransferName = Literal["auto", "memory", "disk"]


class LoraOptions(SettingsGroup, frozen=True, kw_only=True):
    """Low-rank adapters instead of training every weight."""

    title: ClassVar[str] = "LoRA"

    rank: CountOrZero = 0
    """Rank of the adapters; 0 trains every weight."""
    alpha: Positive = 32.0
    """Scale of the adapters, which is alpha / rank."""
    targets: tuple[str, ...] = ("all-linear",)
    """Names of linear layers, or `all-linear`."""
    publish: Literal["merged", "adapter"] = "adapter"
    """Weights that engines get. `adapter` sends the adapters alone, `merged` the whole model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.targets:
            raise ValueError("targets is empty; name linear layers, or leave it out for all of them")
        if not self.rank and (self.alpha, self.targets, self.publish) != (32.0, ("all-linear",), "adapter"):
            raise ValueError(
                "rank = 0 trains every weight without adapters;"
                " set a rank, such as 16, to use alpha, targets or publish"
            )


class TrainerOptions(SettingsGroup, frozen=True, kw_only=True):
    """How the embedded trainer learns; docs/how-to/embedded-trainer.md explains the terms."""

    title: ClassVar[str] = "Embedded trainer"

    loss: LossName = "ppo"
    """Policy loss."""
    clip: tuple[float, ...] = ()
    """Clip range of the ratio as [low, high] around 1; if empty, the usual range of the loss."""
    dual_clip: float = 3.0
    """Upper clip of the ratio for tokens with a negative advantage; `inf` switches it off. Used by the losses
    ppo and dr_grpo."""
    aggregate: Literal["auto", Aggregate] = "auto"
    """Mean of the loss over a batch. `rollout` weighs rollouts equally, `token` weighs tokens equally,
    `constant` divides each rollout by `length`, `auto` uses the mean that is usual for the loss."""
    length: Count | None = None
    """Tokens that aggregate `constant` divides a rollout by; default: max_tokens times max_calls."""
    importance: Importance = "token"
    """Importance weights for tokens that an older policy sampled."""
    importance_cap: Annotated[float, Bound(at_least=1)] = 2.0
    """Upper bound of importance weights."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of the KL penalty."""
    entropy: NotNegative = 0.0
    """Weight of the entropy bonus."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Weights of named rewards, whose sum replaces the reward."""
    credit: Credit = "outcome"
    """Credit assignment. `outcome` gives every turn the rollout's reward, `turns` each turn the rewards that
    came after it."""
    discount: Annotated[float, Bound(at_least=0, at_most=1)] = 1.0
    """Discount of later rewards per turn, with credit `turns`."""
    epochs: Count = 1
    """Passes over each batch."""
    weight_decay: NotNegative = 0.0
    """AdamW's weight decay."""
    mask_truncated: MaskTruncated = "off"
    """Replies that `max_tokens` or the context cut off. `turn` leaves them out of the loss, `rollout` all
    replies of their rollout; rewards stay in the baseline."""
    overlong_buffer: CountOrZero = 0
    """Length of the range below max_tokens in which a rollout's longest reply is penalised, as in DAPO; 0 is
    off."""
    overlong_penalty: NotNegative = 1.0
    """Penalty of a reply of max_tokens, subtracted from the reward; replies inside overlong_buffer get a
    share of it."""
    layout: LayoutName = "tree"
    """Layout of a batch: `tree` computes shared prefixes once, `padded` computes each row for itself."""
    max_tokens_per_pass: Count = 16384
    """Tokens of one forward pass. Lower it if memory runs out."""
    dtype: TrainerDtype = "auto"
    """Dtype of the forward and backward passes; trained weights are always float32. `auto` is bfloat16 on a
    GPU and float32 on a CPU. With float16, the loss is scaled so that small gradients do not become 0."""
    checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    lora: LoraOptions = LoraOptions()
    """Low-rank adapters."""
    max_logprob_diff: Positive | None = None
    """Largest difference of one token's log-probability between sampler and trainer; a batch above it is
    refused. None only reports it."""
    rounding: RoundingName = "stochastic"
    """Rounding of published weights to the engine's dtype. `nearest` loses updates below its spacing."""
    device: str = ""
    """Torch device; if empty, cuda where it is available, else cpu."""
    devices: Count = 1
    """Number of GPUs that the model is sharded over."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_reward_weights(self.rewards)
        if not self.dual_clip > 1:
            raise ValueError(f"dual_clip = {self.dual_clip} must be above 1; inf switches it off")
        if self.clip and (len(self.clip) != 2 or not all(0 <= part < math.inf for part in self.clip)):
            raise ValueError(f"clip = {list(self.clip)} must be two numbers: the distances below and above 1")


def check_reward_weights(weights: Mapping[str, float]) -> None:
    for name, weight in weights.items():
        if not math.isfinite(weight):
            raise ValueError(f"rewards.{name} = {weight} must be a finite number")
