"""GRPO and its kin, from groups to new weights; reads top to bottom.

Each rollout has one advantage and weighs 1, however many rows, turns or tokens it consists of. The loss
compares the policy with what it was when the step began; a truncated importance weight corrects for the
policy that sampled; optionally a KL penalty holds it near the start. Log-probabilities are those of the
sampled distribution, so every turn is rescored at its temperature. A batch that does not line up is
refused, naming rollout and turn, before any weight changes.
"""

from __future__ import annotations

import json
import logging
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from afield.advantages import AdvantageEstimator, compute_advantages, rewards_of
from afield.batches.rewards import turn_returns, unused_turn_rewards, weigh_rewards
from afield.errors import DamagedFile, Unavailable, UsageError
from afield.interfaces.trainer import StepReport
from afield.rounding import PublishedUpdate, Rounding, make_rounding, torch_dtype
from afield.settings.sessions import Thinking
from afield.settings.trainer import LoraOptions
from afield.trainers.batch import Row, TrainingBatch, check_rows, to_batch
from afield.trainers.diagnostics import BatchDiagnostics, check_against_turns, delivery
from afield.trainers.losses import (
    DEFAULT_CLIP,
    DUAL_CLIP,
    USUAL_AGGREGATE,
    Aggregate,
    Estimator,
    Importance,
    LossName,
    Objective,
    check_choice,
    compute_loss,
    token_weights,
)
from afield.trainers.micro_batches import LayoutName
from afield.trainers.model import Dtype, PolicyModel, pick_device
from afield.trainers.model_directory import copy_but_weights, replaced
from afield.trainers.optimizer import Optimizer, Scores
from afield.trainers.publication import KEPT
from afield.types import Group

log = logging.getLogger("afield.trainers")

MAX_SKIPPED = 3
"""Updates in a row without a finite gradient that end a run."""
STATE = "trainer.pt"
FAR = 3.0  # times the control by which sampler and trainer may be apart before it is told
LEAST = 1e-4  # what float32, batched one way or another, explains
MODEL = "model"  # in a checkpoint: all of the model's directory but its weights
POLICY = "policy.json"
SAME = ("tokenizer.json", "tokenizer.model", "chat_template.jinja")
RoundingName = Literal["stochastic", "nearest"]


class GRPO:
    """Trains a Hugging Face causal language model from its directory.

    A step makes `epochs * minibatches` updates; with more than one, the policy is scored once before
    the first. A step in which nothing has a gradient leaves weights and optimiser as they are.
    `length` is what aggregate "constant" divides by; `rewards` are weights of named ones; credit "turns"
    gives each turn what came after it, discounted; `thinking` is how reasoning was rendered while sampling,
    kept with checkpoints.
    """

    model_class = PolicyModel
    optimizer_class = Optimizer

    def __init__(
        self,
        model_path: str | Path,
        *,
        lr: float,
        loss: LossName = "ppo",
        clip: tuple[float, ...] = (),
        dual_clip: float = DUAL_CLIP,
        aggregate: Aggregate | Literal["auto"] = "auto",
        length: int | None = None,
        minibatches: int = 1,
        epochs: int = 1,
        kl: float = 0.0,
        kl_estimator: Estimator = "k3",
        importance: Importance = "token",
        importance_cap: float = 2.0,
        entropy: float = 0.0,
        grad_clip: float = 1.0,
        weight_decay: float = 0.0,
        eps: float = 1e-8,
        floor: float = 0.0,
        scale: bool = True,
        advantage: AdvantageEstimator = "grpo",
        rewards: Mapping[str, float] | None = None,
        credit: Literal["outcome", "turns"] = "outcome",
        discount: float = 1.0,
        seed: int = 0,
        device: str | None = None,
        layout: LayoutName = "tree",
        max_tokens_per_pass: int = 16384,
        dtype: Dtype = "float32",
        checkpointing: bool = False,
        lora: LoraOptions | None = None,
        max_logprob_diff: float | None = None,
        thinking: Thinking = "preserve",
        rounding: RoundingName = "stochastic",
    ) -> None:
        check_choice(loss, LossName, "loss")
        for name, value in (("minibatches", minibatches), ("epochs", epochs)):
            if value < 1:
                raise UsageError(f"{name} = {value} must be at least 1")
        self.model_path = Path(model_path)
        self.device = pick_device(device)
        self.lora = lora if lora and lora.rank else None
        self.policy = self.model_class(
            self.model_path,
            device=self.device,
            dtype=dtype,
            lora=lora,
            checkpointing=checkpointing,
            reference=kl > 0,
            layout=layout,
        )
        self.optimizer = self.optimizer_class(
            self.policy,
            lr=lr,
            eps=eps,
            weight_decay=weight_decay,
            grad_clip=grad_clip,
            max_tokens_per_pass=max_tokens_per_pass,
        )
        bounds = (clip[0], clip[1]) if clip else DEFAULT_CLIP[loss]
        self.objective = Objective(
            loss, bounds, dual_clip, importance, importance_cap, kl, kl_estimator, entropy
        )
        self.aggregate: Aggregate = USUAL_AGGREGATE[loss] if aggregate == "auto" else aggregate
        check_choice(self.aggregate, Aggregate, "aggregate")
        check_choice(importance, Importance, "importance")
        check_choice(kl_estimator, Estimator, "KL estimator")
        check_choice(rounding, RoundingName, "rounding")
        self.rounding: RoundingName = rounding
        self.length = length
        if self.aggregate == "constant" and length is None:
            raise UsageError("aggregate 'constant' needs a length to divide by, such as the longest reply")
        self.random = torch.Generator().manual_seed(seed)
        self.seed = seed
        self.steps = 0
        self.skipped = 0  # updates in a row whose gradient was not finite
        self.version: int | None = None  # of the weights that were published last
        self.engine_dtype: str | None = None  # for which they were
        self.control_logprob_diff: float | None = None
        self._warned = False
        self.minibatches = minibatches
        self.epochs = epochs
        self.floor = floor
        # Dr. GRPO is what it is for not dividing.
        divided = advantage != "grpo" or (scale and loss != "dr_grpo")
        self.estimator: AdvantageEstimator = advantage if divided else "dr_grpo"
        self.rewards = dict(rewards or {})
        self.credit: Literal["outcome", "turns"] = credit
        self.discount = discount
        self.max_logprob_diff = max_logprob_diff
        self.thinking: Thinking = thinking

    @property
    def model(self) -> Any:
        return self.policy.model

    @property
    def publishes_adapter(self) -> bool:
        return self.lora is not None and self.lora.publish == "adapter"

    @property
    def context(self) -> int | None:
        return self.policy.context

    def step(self, groups: Sequence[Group]) -> StepReport:
        try:
            return self._step(groups)
        except torch.OutOfMemoryError as error:
            told = str(error).partition(". ")[0]
            size = self.optimizer.max_tokens_per_pass
            raise Unavailable(
                f"the trainer has too little memory ({told}); go on with max_tokens_per_pass below {size},"
                " checkpointing, or more devices"
            ) from error

    def _step(self, groups: Sequence[Group]) -> StepReport:
        batch = self.batch(groups)
        # A row without an advantage has no gradient unless a bonus or penalty gives it one; its rollout
        # still counts.
        pulled = self.objective.kl or self.objective.entropy
        rows = [row for row in batch.rows if row.trajectory.owned and (pulled or any(row.advantages))]
        audit = BatchDiagnostics(self.max_logprob_diff, self.version)
        if self.control_logprob_diff is None and self.engine_dtype:
            self.control_logprob_diff = self._control(rows or batch.rows)
        proximal = self.optimizer.score(rows, audit) if self.minibatches * self.epochs > 1 else None
        if not rows:  # nothing to learn, and to see whether sampler and trainer agree all the same
            self.optimizer.score([row for row in batch.rows if row.trajectory.owned], audit)
        audit.check_bound()
        for rollouts in self._minibatches(batch.rollout_ids):
            self._update(batch, rows, rollouts, proximal, audit)
        account = delivery(groups, batch, pulled=bool(pulled))
        metrics = {
            **self._compared(audit.summary()),
            "tokens": float(batch.tokens),
            **account.metrics(),
            **self._weighed_reward(groups),
            **self._unused_rewards(groups),
        }
        self.steps += 1
        return StepReport(
            rollouts=len(batch.rollout_ids),
            tokens=batch.tokens,
            too_long=len(batch.too_long),
            metrics=metrics,
            account=account,
        )

    def _control(self, rows: Sequence[Row]) -> float | None:
        """What the engine's own arithmetic makes of the sampler, on the tokens of this step."""
        if not (rows := [row for row in rows if row.trajectory.owned]):
            return None
        found = self.optimizer.control_logprob_diff(rows, torch_dtype(self.engine_dtype or "float32"))
        return None if found is None else max(found, LEAST)

    def _compared(self, metrics: dict[str, float]) -> dict[str, float]:
        """Sampler and trainer in units of the control; told when they are too far apart to be explained."""
        if self.control_logprob_diff is None or "logprob_diff" not in metrics:
            return metrics
        times = metrics["logprob_diff"] / self.control_logprob_diff
        if times > FAR and not self._warned:
            self._warned = True
            log.warning(
                "sampler and trainer are %.2g apart in the mean about the log-probabilities of the same"
                " tokens, %.1f times what the engine's %s explains (%.2g): do both have the same weights? Set"
                " the engine's dtype to float32 to make them equal",
                metrics["logprob_diff"],
                times,
                self.engine_dtype,
                self.control_logprob_diff,
            )
        return {
            **metrics,
            "logprob_diff_control": self.control_logprob_diff,
            "logprob_diff_times_control": times,
        }

    def batch(self, groups: Sequence[Group]) -> TrainingBatch:
        """The rows to train on, all of them checked."""
        check_against_turns(groups)
        if self.rewards:
            groups = weigh_rewards(groups, self.rewards)
        returns = None
        if self.credit == "turns":
            returns = turn_returns(groups, outcome="last", discount=self.discount, floor=self.floor)
        earned = compute_advantages(groups, self.estimator, floor=self.floor, returns=returns)
        batch = to_batch(groups, earned, self.context)
        policy = self.policy
        check_rows(batch.rows, vocabulary=policy.vocabulary, context=self.context, no_images=policy.no_images)
        return batch

    def _weighed_reward(self, groups: Sequence[Group]) -> dict[str, float]:
        """What is learned from, where that is not the reward that agents gave."""
        if not self.rewards:
            return {}
        parts = [rewards_of(group, self.floor) for group in weigh_rewards(groups, self.rewards)]
        values = [value for part in parts for value in part.values()]
        return {"weighed_reward": sum(values) / len(values)} if values else {}

    def _unused_rewards(self, groups: Sequence[Group]) -> dict[str, float]:
        unused = unused_turn_rewards(groups, credit=self.credit, weights=self.rewards)
        return {"unused_turn_rewards": float(unused)} if unused else {}

    def _minibatches(self, rollout_ids: Sequence[str]) -> Iterator[frozenset[str]]:
        """Every rollout once per epoch, in random parts of like size."""
        for _ in range(self.epochs):
            order = torch.randperm(len(rollout_ids), generator=self.random).tolist()
            for part in range(min(self.minibatches, len(order))):
                yield frozenset(rollout_ids[int(i)] for i in order[part :: self.minibatches])

    def _update(
        self,
        batch: TrainingBatch,
        rows: list[Row],
        rollouts: frozenset[str],
        proximal: Scores | None,
        audit: BatchDiagnostics,
    ) -> None:
        """One optimiser step from the rows of these rollouts."""
        mine = [row for row in rows if row.rollout_id in rollouts]
        if not mine:
            return
        tokens = sum(row.trajectory.owned for row in batch.rows if row.rollout_id in rollouts)
        self.optimizer.zero_grad()
        total = self.optimizer.backward(
            mine,
            partial(compute_loss, objective=self.objective),
            partial(
                token_weights,
                aggregate=self.aggregate,
                rollouts=len(rollouts),
                tokens=tokens,
                length=self.length or 1,
            ),
            audit,
            proximal=proximal,
            reference=self.objective.kl > 0,
        )
        audit.check_bound()
        norm = self.optimizer.clip_gradient()
        if math.isfinite(norm):
            self.optimizer.step()
            self.skipped = 0
            audit.update(loss=total, grad_norm=norm)
        else:
            self._skip(norm, rollouts)
            audit.counts["skipped_updates"] += 1

    def _skip(self, norm: float, rollouts: frozenset[str]) -> None:
        """Leave the weights as they are; one batch that cannot be trained on does not end a run."""
        self.skipped += 1
        some = ", ".join(sorted(rollouts)[:3])
        if self.skipped >= MAX_SKIPPED:
            raise UsageError(
                f"the gradient's norm was {norm} in {self.skipped} updates in a row, last for rollouts"
                f" {some}; lower the learning rate, or go on from an older checkpoint"
            )
        log.warning("update skipped: the gradient's norm is %s for rollouts %s, ...", norm, some)

    def export(self, directory: Path) -> None:
        """Write what engines load: the model with its weights as they are now, or its adapters alone.
        Repeating replaces it."""
        self._export(directory, Rounding())

    def publish(self, directory: Path, *, version: int, dtype: str) -> dict[str, float]:
        """Write the weights of `version` for engines that compute in `dtype`; metrics of what arrived.

        They are rounded stochastically, by the run's seed and the version: repeating gives the same bits.
        """
        rounding = make_rounding(dtype, self.seed, version, nearest=self.rounding == "nearest")
        told = self._export(directory, rounding)
        self.version, self.engine_dtype = version, dtype
        metrics = told.metrics() if rounding.lossy else {"update_kept": 1.0, "rounding_noise_norm": 0.0}
        if metrics.get("update_kept", 1.0) < KEPT:
            log.warning(
                "version %d: only %.0f %% of the update reached the published weights in %s; set"
                " learn.rounding to stochastic, or the engine's dtype to float32",
                version,
                100 * metrics["update_kept"],
                dtype,
            )
        return metrics

    def _export(self, directory: Path, rounding: Rounding) -> PublishedUpdate:
        if self.publishes_adapter:
            return self.policy.export_adapter(directory, rounding)
        return self.policy.export(directory, rounding)

    def save(self, directory: Path) -> None:
        """All it takes to go on, and what the tokens were made with: tokenizer, template, thinking policy."""
        state = {
            **self.optimizer.state(),
            "steps": self.steps,
            "random": self.random.get_state(),
            "published": [self.version, self.engine_dtype, self.control_logprob_diff],
        }
        with replaced(directory) as fresh:
            torch.save(state, fresh / STATE)
            copy_but_weights(self.model_path, fresh / MODEL)
            (fresh / POLICY).write_text(json.dumps({"thinking": self.thinking, "steps": self.steps}) + "\n")

    def restore(self, directory: Path) -> None:
        """Go on as if there had been no break: the next step gives the same weights bit for bit."""
        directory = Path(directory)
        if not (directory / STATE).is_file():
            raise DamagedFile(f"{directory} holds no {STATE}; restore from a directory that save() wrote")
        self._check_same(directory)
        try:
            state = torch.load(directory / STATE, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).partition("\n")[0]
            raise DamagedFile(f"{directory / STATE} cannot be read: {reason}") from error
        self.optimizer.load_state(state)
        self.random.set_state(state["random"])
        self.steps = state["steps"]
        # Checkpoints of earlier releases do not say.
        self.version, self.engine_dtype, self.control_logprob_diff = state.get(
            "published", (None, None, None)
        )

    def _check_same(self, directory: Path) -> None:
        """Tokens have to mean the same before and after."""
        for name in SAME:
            saved, ours = directory / MODEL / name, self.model_path / name
            if saved.is_file() and (not ours.is_file() or saved.read_bytes() != ours.read_bytes()):
                raise UsageError(
                    f"{directory} was saved with another {name} than {self.model_path} has;"
                    f" go on with the model it began with (all but the weights is in {directory / MODEL})"
                )
        if (directory / POLICY).is_file():
            thinking = json.loads((directory / POLICY).read_text())["thinking"]
            if thinking != self.thinking:
                raise UsageError(
                    f"{directory} was trained with thinking {thinking!r}, not {self.thinking!r}; keep it"
                )
