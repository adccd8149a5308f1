"""Tinker-style training loop: sample, forward_backward, optim_step, save_weights.

`Tuner` is the embedded trainer and an engine in one object, synchronous and in this process; open one with
`afield.factory.tuner.open_tuner`. `sample` draws from the current weights; its replies become rows for
`forward_backward` without being tokenized again. Gradients add up until `optim_step`. Invalid rows are
refused with rollout and turn before any gradient is added.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
from msgspec import Struct, field, structs
from torch import Tensor

from afield.advantages import compute_advantages
from afield.batches.rows import Row
from afield.batches.verification import check_against_turns
from afield.errors import UsageError
from afield.interfaces.engine import Engine
from afield.models.rounding import make_rounding
from afield.settings.trainer import (
    AdvantageEstimator,
    Aggregate,
    Importance,
    KLEstimator,
    LayoutName,
    LoraOptions,
    TrainerDtype,
)
from afield.trainers.batch import check_rows, to_batch
from afield.trainers.diagnostics import BatchDiagnostics
from afield.trainers.losses import (
    LOSSES,
    LossInputs,
    LossOutputs,
    Objective,
    check_choice,
    compute_loss,
    token_weights,
)
from afield.trainers.model import PolicyModel, pick_device
from afield.trainers.model_directory import replaced
from afield.trainers.optimizer import LossFunction, Optimizer
from afield.trainers.sampler import EngineSampler, Prompt, SampledReply
from afield.types import Group, Sampling, Trajectory, TurnRange, VersionSpan

__all__ = [
    "LossInputs",
    "LossReport",
    "Objective",
    "Row",
    "SampledReply",
    "Sampling",
    "Tuner",
    "rows_from_groups",
    "supervised_row",
]

STATE = "tuner.pt"
TokenLossFunction = Callable[[LossInputs], Tensor]
"""A custom loss: the loss of each token."""
LossChoice = Literal["ppo", "cispo", "gspo", "cross_entropy"]


class LossReport(Struct, frozen=True):
    """Loss and metrics of one `forward_backward`."""

    loss: float
    """Loss over the rows."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Diagnostics of the call; see `afield.trainers.diagnostics`."""


class Tuner:
    """A policy, its optimizer, and an engine that loads weights from a directory.

    with open_tuner(model, lr=1e-5) as tuner: ...
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        engine: Engine,
        lr: float,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_clip: float = 1.0,
        device: str | None = None,
        dtype: TrainerDtype = "auto",
        layout: LayoutName = "tree",
        max_tokens_per_pass: int = 16384,
        checkpointing: bool = False,
        lora: LoraOptions | None = None,
        reference: bool = False,
        max_logprob_diff: float | None = None,
        seed: int = 0,
    ) -> None:
        self.path = Path(model_path)
        self.version = 0
        self.max_logprob_diff = max_logprob_diff
        self.policy = PolicyModel(
            self.path,
            device=pick_device(device),
            dtype=dtype,
            lora=lora,
            checkpointing=checkpointing,
            reference=reference,
            layout=layout,
        )
        self.optimizer = Optimizer(
            self.policy,
            lr=lr,
            eps=eps,
            weight_decay=weight_decay,
            grad_clip=grad_clip,
            max_tokens_per_pass=max_tokens_per_pass,
        )
        self.sampler = EngineSampler(self.path, engine)
        self.published: dict[str, float] = {}
        """Metrics of the last weights that the engine got; see `afield.interfaces.trainer.Publisher`."""
        self._seed = seed
        self._changed = False  # whether the weights differ from the engine's

    def start(self) -> Self:
        """Start the engine."""
        self.version = self.sampler.start()
        return self

    def close(self) -> None:
        """Close the engine; idempotent."""
        self.sampler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- sampling ---------------------------------------------------------------------------------

    def sample(
        self,
        prompt: Prompt,
        n: int = 1,
        sampling: Sampling = Sampling(),  # noqa: B008
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        after: SampledReply | None = None,
    ) -> list[SampledReply]:
        """Sample `n` replies to a prompt: ids, messages, or the text of a user message.

        With `after`, the prompt continues that reply's conversation, whose ids stay as they were sampled.
        """
        if n < 1:
            raise UsageError(f"n = {n} must be at least 1")
        return self.sample_all([(prompt, after)] * n, sampling, tools=tools)

    def sample_all(
        self,
        prompts: Sequence[tuple[Prompt, SampledReply | None]],
        sampling: Sampling = Sampling(),  # noqa: B008
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[SampledReply]:
        """Sample a reply per prompt, concurrently; a prompt with a reply continues its conversation."""
        if self._changed:
            with tempfile.TemporaryDirectory(prefix="afield-tuner-") as scratch:
                rounding = make_rounding(self.sampler.dtype or "float32", self._seed, self.version)
                self.published = self.policy.export(Path(scratch) / "weights", rounding).metrics()
                self.sampler.load(self.version, Path(scratch) / "weights")
            self._changed = False
        return self.sampler.sample(prompts, sampling, tools)

    # --- learning ---------------------------------------------------------------------------------

    def logprobs(self, rows: Sequence[Row]) -> list[tuple[float, ...]]:
        """Log-probability of every trained token under the current weights, for `proximal`."""
        checked = self._checked(rows)
        scores = self.optimizer.score(checked, BatchDiagnostics())
        return [tuple(scores[row.key].tolist()) if row.key in scores else () for row in checked]

    def forward_backward(
        self,
        rows: Sequence[Row],
        loss: LossChoice | Objective | TokenLossFunction = "ppo",
        *,
        aggregate: Aggregate = "rollout",
        length: int | None = None,
        num_rollouts: int | None = None,
        proximal: Sequence[Sequence[float]] | None = None,
    ) -> LossReport:
        """Add the gradient of the loss over `rows`: the mean over their rollouts, or over
        `num_rollouts` where several calls make one update.

        A loss is a name, an `Objective`, or a function of `LossInputs` that returns the loss of each token.
        `proximal` are log-probabilities to clip against, taken before the first of several updates on the
        same rows; by default those of the current policy.
        """
        supervised = loss == "cross_entropy"
        checked = self._checked(rows, supervised=supervised)
        owning = [row for row in checked if row.owned]
        if not owning:
            raise UsageError("there is nothing to learn from: no sequence has a token that was sampled")
        _check_aggregate(aggregate, length, num_rollouts)
        _check_loss(loss, aggregate)
        scores = None
        if proximal is not None:
            device = self.policy.device
            pairs = zip(checked, proximal, strict=False)
            scores = {row.key: torch.tensor(values, device=device) for row, values in pairs}
            _check_proximal(owning, scores)
        diagnostics = BatchDiagnostics(None if supervised else self.max_logprob_diff)
        if self.max_logprob_diff is not None and not supervised and scores is None:
            self.optimizer.score(owning, diagnostics)
            diagnostics.check_bound()
        function, reference = self._loss_function(loss)
        rollouts = num_rollouts or len({row.rollout_id for row in owning})
        tokens = sum(row.owned for row in owning)
        weights = partial(
            token_weights, aggregate=aggregate, rollouts=rollouts, tokens=tokens, length=length or 1
        )
        total = self.optimizer.backward(
            owning, function, weights, diagnostics, proximal=scores, reference=reference
        )
        diagnostics.update(loss=total)
        counts = {"tokens": float(tokens), "rollouts": float(rollouts)}
        return LossReport(total, counts if supervised else {**diagnostics.summary(), **counts})

    def optim_step(self, lr: float | None = None) -> float:
        """Step along the accumulated gradient and clear it; returns the gradient's norm. The next `sample`
        draws from the new weights. `lr` holds for this step only; the default is the tuner's."""
        if not any(parameter.grad is not None for parameter in self.policy.trainable):
            raise UsageError("there is no gradient; call forward_backward first")
        if lr is not None and not 0 <= lr < math.inf:
            raise UsageError(f"lr = {lr} must be 0 or positive")
        try:
            norm = self.optimizer.clip_and_step(lr)
        finally:  # also drops a gradient that is not finite
            self.optimizer.zero_grad()
        self.version += 1
        self._changed = True
        return norm

    def _checked(self, rows: Sequence[Row], *, supervised: bool = False) -> list[Row]:
        checked = numbered_rows(rows, supervised=supervised)
        policy = self.policy
        check_rows(checked, vocabulary=policy.vocabulary, context=policy.context, no_images=policy.no_images)
        return checked

    def _loss_function(self, loss: LossChoice | Objective | TokenLossFunction) -> tuple[LossFunction, bool]:
        """The loss, and whether it needs the reference policy."""
        if isinstance(loss, Objective):
            return partial(compute_loss, objective=loss), loss.kl > 0
        if callable(loss):
            return partial(_custom_loss, function=loss), False
        if loss == "cross_entropy":
            return partial(_custom_loss, function=lambda inputs: -inputs.logp * inputs.advantage), False
        return partial(compute_loss, objective=Objective(loss)), False

    # --- weights and state ------------------------------------------------------------------------

    def save_weights(self, directory: str | Path) -> None:
        """Write a model directory as engines load it. Replaces the directory."""
        self.policy.export(Path(directory))

    def save_state(self, directory: str | Path) -> None:
        """Write weights, optimizer state, and the state that seeds the next replies."""
        with replaced(Path(directory)) as fresh:
            state = {**self.optimizer.state(), "version": self.version, "calls": self.sampler.calls}
            torch.save(state, fresh / STATE)

    def load_state(self, directory: str | Path) -> None:
        """Load the state of `save_state`; the learning rate stays that of this tuner."""
        path = Path(directory) / STATE
        if not path.is_file():
            raise UsageError(f"{directory} holds no {STATE}; give a directory that save_state() wrote")
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.optimizer.load_state(state)
        self.optimizer.zero_grad()
        # Versions only grow, and the engine may have served later ones.
        self.version = max(state["version"], self.sampler.version + 1)
        self.sampler.calls, self._changed = state["calls"], True


# --- rows ----------------------------------------------------------------------------------------


def rows_from_groups(
    groups: Sequence[Group], advantage: AdvantageEstimator = "grpo", *, floor: float = 0.0
) -> list[Row]:
    """Rows of collected rollouts with their advantages, checked against their recorded turns."""
    check_against_turns(groups)
    return list(to_batch(groups, compute_advantages(groups, advantage, floor=floor)).rows)


def supervised_row(
    name: str, prompt_ids: Sequence[int], token_ids: Sequence[int], weight: float = 1.0
) -> Row:
    """A row for the loss "cross_entropy", of tokens that no policy sampled."""
    start, end = len(prompt_ids), len(prompt_ids) + len(token_ids)
    if start == end:
        raise UsageError(f"rollout {name}: there are no tokens to imitate")
    trajectory = Trajectory(
        token_ids=(*prompt_ids, *token_ids),
        loss_mask=(0,) * start + (1,) * (end - start),
        logprobs=(0.0,) * end,
        versions=(VersionSpan(start, end, 0, 0),),
        turns=(TurnRange(name, start, end, 1.0),),
        weight=1.0,
    )
    return Row(rollout_id=name, trajectory=trajectory, advantages=(float(weight),))


def numbered_rows(rows: Iterable[Row], *, supervised: bool = False) -> list[Row]:
    """Rows with their index in their rollout. `supervised` ignores how they were sampled."""
    rows = list(rows)
    weights: dict[str, float] = {}
    for row in rows:
        weights[row.rollout_id] = weights.get(row.rollout_id, 0.0) + row.trajectory.weight
    if heavy := [name for name, weight in weights.items() if weight > 1 + 1e-6]:
        raise UsageError(
            f"rollout {heavy[0]}: its sequences weigh {weights[heavy[0]]:g} together; give each reply once,"
            " and sequences of different rollouts different ids"
        )
    counts: Counter[str] = Counter()
    numbered: list[Row] = []
    for row in rows:
        trajectory = row.trajectory
        if supervised:
            plain = [structs.replace(turn, temperature=1.0, truncated=False) for turn in trajectory.turns]
            trajectory = structs.replace(trajectory, turns=tuple(plain))
        if (digests := [image.digest for image in row.images]) != [i.digest for i in trajectory.images]:
            raise UsageError(
                f"rollout {row.rollout_id}: {len(digests)} images for the {len(trajectory.images)} that its"
                " sequence has; give them in their order"
            )
        numbered.append(structs.replace(row, index=counts[row.rollout_id], trajectory=trajectory))
        counts[row.rollout_id] += 1
    return numbered


# --- checks --------------------------------------------------------------------------------------


def _check_loss(loss: LossChoice | Objective | TokenLossFunction, aggregate: Aggregate) -> None:
    if not isinstance(loss, str | Objective):
        return
    name = loss if isinstance(loss, str) else loss.loss
    names = (*LOSSES, "cross_entropy") if isinstance(loss, str) else tuple(LOSSES)
    if name not in names:
        raise UsageError(f"unknown loss {name!r}; choose one of: {', '.join(names)}, or give a function")
    if name == "dr_grpo" and aggregate != "constant":
        raise UsageError("loss 'dr_grpo' divides by a constant; give aggregate='constant' and a length")
    if isinstance(loss, Objective):
        check_choice(loss.importance, Importance, "importance")
        check_choice(loss.kl_estimator, KLEstimator, "KL estimator")


def _check_aggregate(aggregate: Aggregate, length: int | None, num_rollouts: int | None) -> None:
    check_choice(aggregate, Aggregate, "aggregate")
    if aggregate == "constant" and length is None:
        raise UsageError("aggregate 'constant' needs a length to divide by, such as the longest reply")
    for name, value in (("length", length), ("num_rollouts", num_rollouts)):
        if value is not None and value < 1:
            raise UsageError(f"{name} = {value} must be at least 1")
    if num_rollouts is not None and aggregate == "token":
        raise UsageError("aggregate 'token' divides by tokens, not by num_rollouts; leave one of them out")


def _custom_loss(inputs: LossInputs, function: TokenLossFunction) -> LossOutputs:
    losses = function(inputs)
    if not isinstance(losses, Tensor) or not losses.requires_grad:
        raise UsageError("a loss function returned no gradient; compute each token's loss from its logp")
    if losses.shape != inputs.logp.shape:
        raise UsageError(
            f"a loss function returned {tuple(losses.shape)} losses for {len(inputs.logp)} tokens;"
            " return one loss per token"
        )
    ratio = torch.exp(inputs.logp - inputs.proximal).detach()
    none = torch.zeros_like(ratio, dtype=torch.bool)
    return LossOutputs((losses * inputs.weight).sum(), ratio, none, torch.ones_like(ratio), none, None)


def _check_proximal(rows: Sequence[Row], scores: Mapping[tuple[str, int], Tensor]) -> None:
    for row in rows:
        count = len(scores[row.key]) if row.key in scores else 0
        if count != row.owned:
            raise UsageError(
                f"rollout {row.rollout_id}: {count} proximal log-probabilities for {row.owned}"
                " trained tokens; take them from logprobs() of the same data"
            )
        if not bool(torch.isfinite(scores[row.key]).all()):
            raise UsageError(f"rollout {row.rollout_id}: a proximal log-probability is not a finite number")
