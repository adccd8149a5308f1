"""For people who write their own loop: sample, forward_backward, optim_step, save_weights.

`Tuner` is the embedded trainer and the embedded engine in one object, synchronous and in this process.
`sample` always draws from the weights as they are; what it returns feeds `forward_backward` without a
token being read or written again, and the trainer's log-probabilities are the sampler's. Gradients add up
until `optim_step`. Data that does not line up is refused, by rollout and turn, before anything adds up.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from msgspec import Struct, field
from torch import Tensor

from afield.errors import UsageError
from afield.interfaces.engine import Engine
from afield.rounding import make_rounding
from afield.settings.trainer import LoraOptions
from afield.trainers.batch import Row, check_rows
from afield.trainers.datum import Datum, SampledReply, rows_from_groups, supervised_row, to_rows
from afield.trainers.diagnostics import BatchDiagnostics
from afield.trainers.losses import (
    DEFAULT_CLIP,
    Aggregate,
    Estimator,
    Importance,
    LossInputs,
    LossOutputs,
    Objective,
    check_choice,
    compute_loss,
    token_weights,
)
from afield.trainers.micro_batches import LayoutName
from afield.trainers.model import Dtype, PolicyModel, pick_device
from afield.trainers.model_directory import replaced
from afield.trainers.optimizer import LossFunction, Optimizer
from afield.trainers.sampler import EngineSampler, Prompt
from afield.types import Sampling

__all__ = [
    "Datum",
    "LossInputs",
    "LossReport",
    "Objective",
    "SampledReply",
    "Sampling",
    "Tuner",
    "rows_from_groups",
    "supervised_row",
]

STATE = "tuner.pt"
LossFunctionOfTokens = Callable[[LossInputs], Tensor]  # of each token
LossChoice = Literal["ppo", "cispo", "gspo", "cross_entropy"]


class LossReport(Struct, frozen=True):
    """What a call of `forward_backward` saw."""

    loss: float
    metrics: dict[str, float] = field(default_factory=dict)


class Tuner:
    """`with Tuner.open(model, lr=1e-5) as tuner:`. `engine` is any that loads weights from a directory."""

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
        dtype: Dtype = "float32",
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
        self._changed = False  # since the engine was given the weights

    @classmethod
    def open(
        cls,
        model_path: str | Path,
        *,
        lr: float,
        slots: int = 64,
        seed: int = 0,
        engine_dtype: str = "auto",
        **how: Any,
    ) -> Self:
        """With the embedded engine, `slots` calls at once; `how` as the constructor takes it. Engine and
        trainer agree to 1e-4 where `engine_dtype` is float32, as it is on a CPU."""
        # Engines are named in a layer above this one; people look for the door here.
        named = import_module("afield.factory")
        engine = named.engine(
            "torch", Path(model_path), slots=slots, seed=seed, record=None, dtype=engine_dtype
        )
        return cls(model_path, engine=engine, lr=lr, seed=seed, **how).start()

    def start(self) -> Self:
        self.version = self.sampler.start()
        return self

    def close(self) -> None:
        """Repeating is harmless."""
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
        """`n` replies to a prompt: ids, messages, or a text from a user. With `after`, the prompt is what
        follows that reply in its conversation, whose ids stay as they were sampled.
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
        """One reply to each prompt, all at the same time; each goes on from its reply where it has one."""
        if self._changed:
            with tempfile.TemporaryDirectory(prefix="afield-tuner-") as scratch:
                rounding = make_rounding(self.sampler.dtype or "float32", self._seed, self.version)
                self.published = self.policy.export(Path(scratch) / "weights", rounding).metrics()
                self.sampler.load(self.version, Path(scratch) / "weights")
            self._changed = False
        return self.sampler.sample(prompts, sampling, tools)

    # --- learning ---------------------------------------------------------------------------------

    def logprobs(self, data: Sequence[Datum]) -> list[tuple[float, ...]]:
        """Of every trained token, under the weights as they are; to be given back as `proximal`."""
        scores = self.optimizer.score(self._rows(data), BatchDiagnostics())
        return [tuple(scores[number].tolist()) if number in scores else () for number in range(len(data))]

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss: LossChoice | Objective | LossFunctionOfTokens = "ppo",
        *,
        aggregate: Aggregate = "rollout",
        length: int | None = None,
        of: int | None = None,
        proximal: Sequence[Sequence[float]] | None = None,
    ) -> LossReport:
        """Add the gradient of the loss over `data`: the mean over its rollouts, or over `of` where several
        calls make one update.

        A loss is a word, a word with its settings (`Objective`), or a function of `LossInputs` to the cost of
        each. `proximal` are the log-probabilities to clip against, taken before the first of several
        updates on the same data; without them the policy as it is takes their place.
        """
        imitate = loss == "cross_entropy"
        rows = [row for row in self._rows(data, imitate=imitate) if row.trajectory.owned]
        if not rows:
            raise UsageError("there is nothing to learn from: no sequence has a token that was sampled")
        _check_sums(aggregate, length, of)
        _check_loss(loss, aggregate)
        scores = None
        if proximal is not None:
            scores = {n: torch.tensor(row, device=self.policy.device) for n, row in enumerate(proximal)}
            _check_proximal(rows, scores)
        audit = BatchDiagnostics(None if imitate else self.max_logprob_diff)
        if self.max_logprob_diff is not None and not imitate and scores is None:
            self.optimizer.score(rows, audit)
            audit.check_bound()
        function, reference = self._loss(loss)
        rollouts = of or len({row.rollout_id for row in rows})
        owned = sum(row.trajectory.owned for row in rows)
        weigh = partial(
            token_weights, aggregate=aggregate, rollouts=rollouts, tokens=owned, length=length or 1
        )
        total = self.optimizer.backward(rows, function, weigh, audit, proximal=scores, reference=reference)
        audit.update(loss=total)
        told = {"tokens": float(owned), "rollouts": float(rollouts)}
        return LossReport(total, told if imitate else {**audit.summary(), **told})

    def optim_step(self, lr: float | None = None) -> float:
        """Move the weights by what has added up, and begin anew; the gradient's norm. The next `sample`
        draws from the new weights. `lr` is for this step alone; without it, the tuner's counts."""
        if not any(parameter.grad is not None for parameter in self.policy.trainable):
            raise UsageError("there is no gradient; call forward_backward first")
        if lr is not None and not 0 <= lr < math.inf:
            raise UsageError(f"lr = {lr} must be 0 or positive")
        try:
            norm = self.optimizer.clip_and_step(lr)
        finally:  # a gradient that is not finite stays with nobody
            self.optimizer.zero_grad()
        self.version += 1
        self._changed = True
        return norm

    def _rows(self, data: Sequence[Datum], *, imitate: bool = False) -> list[Row]:
        rows = to_rows(data, imitate=imitate)
        policy = self.policy
        check_rows(rows, vocabulary=policy.vocabulary, context=policy.context, no_images=policy.no_images)
        return rows

    def _loss(self, loss: LossChoice | Objective | LossFunctionOfTokens) -> tuple[LossFunction, bool]:
        if isinstance(loss, Objective):
            return partial(compute_loss, objective=loss), loss.kl > 0
        if callable(loss):
            return partial(_costed, cost=loss), False
        if loss == "cross_entropy":
            return partial(_costed, cost=lambda seen: -seen.logp * seen.advantage), False
        return partial(compute_loss, objective=Objective(loss, DEFAULT_CLIP[loss])), False

    # --- keeping ----------------------------------------------------------------------------------

    def save_weights(self, directory: str | Path) -> None:
        """The model's directory as engines load it. Repeating replaces it."""
        self.policy.export(Path(directory))

    def save_state(self, directory: str | Path) -> None:
        """All it takes to go on: weights, optimiser, and which random numbers come next."""
        with replaced(Path(directory)) as fresh:
            state = {**self.optimizer.state(), "version": self.version, "calls": self.sampler.calls}
            torch.save(state, fresh / STATE)

    def load_state(self, directory: str | Path) -> None:
        """Goes on from there, with the learning rate of this tuner."""
        path = Path(directory) / STATE
        if not path.is_file():
            raise UsageError(f"{directory} holds no {STATE}; give a directory that save_state() wrote")
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.optimizer.load_state(state)
        self.optimizer.zero_grad()
        # Versions only grow: the engine may have served later ones.
        self.version = max(state["version"], self.sampler.version + 1)
        self.sampler.calls, self._changed = state["calls"], True


def _check_loss(loss: LossChoice | Objective | LossFunctionOfTokens, aggregate: Aggregate) -> None:
    if not isinstance(loss, str | Objective):
        return
    word = loss if isinstance(loss, str) else loss.loss
    words = (*DEFAULT_CLIP, "cross_entropy") if isinstance(loss, str) else tuple(DEFAULT_CLIP)
    if word not in words:
        raise UsageError(f"unknown loss {word!r}; choose one of: {', '.join(words)}, or give a function")
    if word == "dr_grpo" and aggregate != "constant":
        raise UsageError("loss 'dr_grpo' divides by a constant; give aggregate='constant' and a length")
    if isinstance(loss, Objective):
        check_choice(loss.importance, Importance, "importance")
        check_choice(loss.kl_estimator, Estimator, "KL estimator")


def _check_sums(aggregate: Aggregate, length: int | None, of: int | None) -> None:
    if aggregate not in get_args(Aggregate):
        words = ", ".join(get_args(Aggregate))
        raise UsageError(f"unknown aggregate {aggregate!r}; choose one of: {words}")
    if aggregate == "constant" and length is None:
        raise UsageError("aggregate 'constant' needs a length to divide by, such as the longest reply")
    for name, value in (("length", length), ("of", of)):
        if value is not None and value < 1:
            raise UsageError(f"{name} = {value} must be at least 1")
    if of is not None and aggregate == "token":
        raise UsageError("of counts rollouts, and aggregate 'token' divides by tokens; leave one of them out")


def _costed(seen: LossInputs, cost: LossFunctionOfTokens) -> LossOutputs:
    costs = cost(seen)
    if not isinstance(costs, Tensor) or not costs.requires_grad:
        raise UsageError("a loss gave what has no gradient; make the cost of each token from its logp")
    if costs.shape != seen.logp.shape:
        raise UsageError(f"a loss gave {tuple(costs.shape)} costs for {len(seen.logp)} tokens; one for each")
    ratio = torch.exp(seen.logp - seen.proximal).detach()
    none = torch.zeros_like(ratio, dtype=torch.bool)
    return LossOutputs((costs * seen.weight).sum(), ratio, none, torch.ones_like(ratio), none, None)


def _check_proximal(rows: Sequence[Row], scores: Mapping[int, Tensor]) -> None:
    for row in rows:
        given = len(scores[row.number]) if row.number in scores else 0
        if given != row.trajectory.owned:
            raise UsageError(
                f"rollout {row.rollout_id}: {given} proximal log-probabilities for {row.trajectory.owned}"
                " trained tokens; take them from logprobs() of the same data"
            )
        if not bool(torch.isfinite(scores[row.number]).all()):
            raise UsageError(f"rollout {row.rollout_id}: a proximal log-probability is not a finite number")
