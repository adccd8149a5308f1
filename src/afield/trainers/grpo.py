"""GRPO trainer: groups to advantages, loss, gradient step and new weights.

One `step`:
1. checks trajectories against the recorded turns and weighs rewards (`batch`);
2. estimates advantages (`afield.advantages.ESTIMATORS`), one per rollout or per turn;
3. scores the rows once if there are several updates, for the proximal policy;
4. per minibatch: loss (`losses.LOSSES`), backward, gradient clip, AdamW step (`_update`).

Each rollout has weight 1, for any number of rows, turns and tokens. Every turn is rescored at its sampling
temperature. Invalid data is refused with rollout and turn before any weight changes.
"""

from __future__ import annotations

import json
import logging
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from afield.advantages import compute_advantages, rewards_of
from afield.batches.rewards import turn_returns, unused_turn_rewards, weigh_rewards
from afield.batches.rows import Row
from afield.batches.truncation import mask_truncated as mask_truncated_replies
from afield.batches.truncation import penalise_overlong
from afield.batches.verification import check_against_turns
from afield.errors import DamagedFile, Unavailable, UsageError
from afield.interfaces.trainer import StepReport
from afield.models.rounding import PublishedUpdate, Rounding, make_rounding, torch_dtype
from afield.settings.sessions import Thinking
from afield.settings.trainer import (
    AdvantageEstimator,
    Aggregate,
    Credit,
    Importance,
    KLEstimator,
    LayoutName,
    LoraOptions,
    LossName,
    LRScheduleName,
    MaskTruncated,
    RoundingName,
    TrainerDtype,
    WeightTransferName,
)
from afield.trainers.batch import TrainingBatch, check_rows, to_batch, token_account
from afield.trainers.diagnostics import BatchDiagnostics
from afield.trainers.losses import (
    DUAL_CLIP,
    LOSSES,
    Objective,
    check_choice,
    compute_loss,
    token_weights,
)
from afield.trainers.lr_schedule import LRSchedule
from afield.trainers.model import PolicyModel, pick_device
from afield.trainers.model_directory import copy_but_weights, replaced
from afield.trainers.optimizer import Optimizer, Scores, WeightFunction
from afield.trainers.publication import MIN_UPDATE_KEPT
from afield.trainers.sharded_checkpoint import has_shards
from afield.trainers.shared_publication import SharedPublication
from afield.trainers.token_recorder import TokenRecorder
from afield.types import Group

log = logging.getLogger(__name__)

MAX_SKIPPED = 3
"""Consecutive updates without a finite gradient that end a run."""
MAX_TIMES_CONTROL = 3.0
"""Sampler-trainer difference, as a multiple of the control, above which a warning is logged."""
MIN_CONTROL = 1e-4
"""Difference in log-probabilities that float32 alone explains, batched one way or another."""
STATE_FILE = "trainer.pt"
"""File of a checkpoint with random state, weights and optimizer; shards hold the last two in other files."""
MODEL_DIR = "model"
"""Directory of a checkpoint with the model's files except its weights."""
POLICY_FILE = "policy.json"
"""File of a checkpoint with the thinking policy and the number of steps."""
UNCHANGED_FILES = ("tokenizer.json", "tokenizer.model", "chat_template.jinja")
"""Files of a model that a run must not change between checkpoint and resume."""


def copy_to_cpu(value: Any) -> Any:
    """A copy of a nested state, with tensors in CPU memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {name: copy_to_cpu(part) for name, part in value.items()}
    return [copy_to_cpu(part) for part in value] if isinstance(value, list) else value


class GRPO:
    """Trains a Hugging Face causal language model from its directory.

    A step makes `epochs * minibatches` updates; with more than one, the policy is scored once before the
    first. A step without any gradient leaves weights and optimizer state unchanged.

    `afield.settings.trainer.TrainerOptions` documents most parameters. The others are:

    - `lr`: peak learning rate of AdamW.
    - `lr_schedule`, `warmup_steps`, `min_lr_ratio`, `total_steps`: see `LRSchedule`.
    - `minibatches`: updates per pass over a batch.
    - `kl`: coefficient of the KL penalty; above 0 it needs the reference model.
    - `grad_clip`: largest norm of the gradient.
    - `eps`: AdamW's epsilon.
    - `floor`: reward of a policy failure without one.
    - `advantage`, `scale`: advantage estimator, and whether "grpo" divides by the standard deviation.
    - `reply_limit`: largest number of tokens of a reply, for `overlong_buffer`.
    - `seed`: seed of minibatches and of stochastic rounding.
    - `thinking`: how reasoning was rendered while sampling; saved with checkpoints.
    - `weight_transfer`: publish weights in shared memory (`memory`), by files alone (`disk`), or in memory
      if it can be shared (`auto`).
    - `record_training`: return the values of every token, for `rollouts/step-N.tokens`.
    """

    model_class = PolicyModel
    optimizer_class = Optimizer

    def __init__(
        self,
        model_path: str | Path,
        *,
        lr: float,
        lr_schedule: LRScheduleName = "constant",
        warmup_steps: int = 0,
        min_lr_ratio: float = 0.0,
        total_steps: int | None = None,
        loss: LossName = "ppo",
        clip: tuple[float, ...] = (),
        dual_clip: float = DUAL_CLIP,
        aggregate: Aggregate | Literal["auto"] = "auto",
        length: int | None = None,
        minibatches: int = 1,
        epochs: int = 1,
        kl: float = 0.0,
        kl_estimator: KLEstimator = "k3",
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
        credit: Credit = "outcome",
        discount: float = 1.0,
        mask_truncated: MaskTruncated = "off",
        overlong_buffer: int = 0,
        overlong_penalty: float = 1.0,
        reply_limit: int | None = None,
        seed: int = 0,
        device: str | None = None,
        layout: LayoutName = "tree",
        max_tokens_per_pass: int = 16384,
        dtype: TrainerDtype = "auto",
        checkpointing: bool = False,
        lora: LoraOptions | None = None,
        max_logprob_diff: float | None = None,
        thinking: Thinking = "preserve",
        rounding: RoundingName = "stochastic",
        weight_transfer: WeightTransferName = "disk",
        record_training: bool = False,
    ) -> None:
        check_choice(loss, LossName, "loss")
        check_choice(importance, Importance, "importance")
        check_choice(kl_estimator, KLEstimator, "KL estimator")
        check_choice(rounding, RoundingName, "rounding")
        check_choice(lr_schedule, LRScheduleName, "lr_schedule")
        check_choice(mask_truncated, MaskTruncated, "mask_truncated")
        check_choice(weight_transfer, WeightTransferName, "weight_transfer")
        self.aggregate: Aggregate = LOSSES[loss].aggregate if aggregate == "auto" else aggregate
        check_choice(self.aggregate, Aggregate, "aggregate")
        if self.aggregate == "constant" and length is None:
            raise UsageError("aggregate 'constant' needs a length to divide by, such as the longest reply")
        if overlong_buffer and reply_limit is None:
            raise UsageError("overlong_buffer needs reply_limit, the largest number of tokens of a reply")
        for name, value in (("minibatches", minibatches), ("epochs", epochs)):
            if value < 1:
                raise UsageError(f"{name} = {value} must be at least 1")
        self.lr_schedule = LRSchedule(lr_schedule, warmup_steps, total_steps, min_lr_ratio)
        self.lr_schedule.check()
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
        self.objective = Objective(
            loss=loss,
            clip=(clip[0], clip[1]) if clip else LOSSES[loss].clip,
            dual_clip=dual_clip,
            importance=importance,
            importance_cap=importance_cap,
            kl=kl,
            kl_estimator=kl_estimator,
            entropy=entropy,
        )
        # Dr. GRPO does not divide advantages by the standard deviation.
        unscaled = advantage == "grpo" and (not scale or loss == "dr_grpo")
        self.estimator: AdvantageEstimator = "dr_grpo" if unscaled else advantage
        self.rewards = dict(rewards or {})
        self.credit: Credit = credit
        self.discount = discount
        self.lr = lr
        self.mask_truncated: MaskTruncated = mask_truncated
        self.overlong_buffer = overlong_buffer
        self.overlong_penalty = overlong_penalty
        self.reply_limit = reply_limit
        self.floor = floor
        self.length = length
        self.minibatches = minibatches
        self.epochs = epochs
        self.random = torch.Generator().manual_seed(seed)
        self.seed = seed
        self.rounding: RoundingName = rounding
        self.thinking: Thinking = thinking
        self.max_logprob_diff = max_logprob_diff
        self.record_training = record_training
        self.sharing: SharedPublication | None = None
        """Shared memory for published weights; None publishes them on disk alone."""
        if weight_transfer != "disk" and not self.publishes_adapter:
            required = weight_transfer == "memory"
            self.sharing = SharedPublication(self.policy.sharing_device, required=required)
        self.steps = 0
        self.skipped = 0
        """Consecutive updates without a finite gradient."""
        self.version: int | None = None
        """Version of the weights that were published last; None before."""
        self.engine_dtype: str | None = None
        """Dtype in which they were published; None before."""
        self.control_logprob_diff: float | None = None
        """Sampler-trainer difference that the engine's dtype explains, measured in each step: it changes with
        the policy, and becomes small as replies become certain."""
        self._warned = False
        """Whether a large sampler-trainer difference was logged."""
        self._compute_as_published(0)

    @property
    def model(self) -> Any:
        return self.policy.model

    @property
    def publishes_adapter(self) -> bool:
        return self.lora is not None and self.lora.publish == "adapter"

    @property
    def context(self) -> int | None:
        return self.policy.context

    # --- a step -----------------------------------------------------------------------------------

    def step(self, groups: Sequence[Group]) -> StepReport:
        """Train on the groups of a step; raises Unavailable if the device is out of memory."""
        try:
            return self._step(groups)
        except torch.OutOfMemoryError as error:
            reason = str(error).partition(". ")[0]
            size = self.optimizer.max_tokens_per_pass
            raise Unavailable(
                f"the trainer has too little memory ({reason}); resume with max_tokens_per_pass below {size},"
                " checkpointing, or more devices"
            ) from error

    def _step(self, groups: Sequence[Group]) -> StepReport:
        groups = mask_truncated_replies(groups, self.mask_truncated)
        batch = self.batch(groups)
        # A row whose advantages are zero has a gradient only from a KL or entropy term.
        regularised = bool(self.objective.kl or self.objective.entropy)
        trainable = [row for row in batch.rows if row.owned]
        rows = [row for row in trainable if regularised or any(row.advantages)]
        recorder = TokenRecorder() if self.record_training else None
        diagnostics = BatchDiagnostics(self.max_logprob_diff, self.version, recorder)
        if self.engine_dtype:
            self.control_logprob_diff = self._measure_control(rows or trainable)
        proximal = self.optimizer.score(rows, diagnostics) if self.minibatches * self.epochs > 1 else None
        if not rows:  # nothing to train; sampler and trainer are still compared
            self.optimizer.score(trainable, diagnostics)
        diagnostics.check_bound()
        for rollouts in self._minibatches(batch.rollout_ids):
            self._update(batch, rows, rollouts, proximal, diagnostics)
        account = token_account(groups, batch, regularised=regularised)
        lr = self.lr * self.lr_schedule.factor(self.steps)
        self.steps += 1
        return StepReport(
            rollouts=len(batch.rollout_ids),
            tokens=batch.tokens,
            too_long=len(batch.too_long),
            metrics={
                **self._compare_with_control(diagnostics.summary()),
                "tokens": float(batch.tokens),
                "lr": lr,
                **account.metrics(),
                **self._weighed_reward(groups),
                **self._unused_rewards(groups),
            },
            account=account,
            advantages=batch.advantages,
            records=self._records(groups, batch, recorder, regularised),
        )

    def _records(
        self, groups: Sequence[Group], batch: TrainingBatch, recorder: TokenRecorder | None, regularised: bool
    ) -> dict[str, bytes]:
        if recorder is None:
            return {}
        return recorder.records(groups, batch, self.objective, regularised=regularised)

    def batch(self, groups: Sequence[Group]) -> TrainingBatch:
        """Checked rows with their advantages."""
        check_against_turns(groups)
        if self.rewards:
            groups = weigh_rewards(groups, self.rewards)
        if self.overlong_buffer and self.reply_limit is not None:
            groups = penalise_overlong(
                groups, limit=self.reply_limit, buffer=self.overlong_buffer, penalty=self.overlong_penalty
            )
        returns = None
        if self.credit == "turns":
            returns = turn_returns(groups, outcome="last", discount=self.discount, floor=self.floor)
        advantages = compute_advantages(groups, self.estimator, floor=self.floor, returns=returns)
        batch = to_batch(groups, advantages, self.context)
        policy = self.policy
        check_rows(batch.rows, vocabulary=policy.vocabulary, context=self.context, no_images=policy.no_images)
        return batch

    def _minibatches(self, rollout_ids: Sequence[str]) -> Iterator[frozenset[str]]:
        """Yield the rollouts of each update: all once per epoch, in random parts of about the same size."""
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
        diagnostics: BatchDiagnostics,
    ) -> None:
        """Make one optimizer step from the rows of these rollouts; skip it if the gradient is not finite."""
        rows = [row for row in rows if row.rollout_id in rollouts]
        if not rows:
            return
        tokens = sum(row.owned for row in batch.rows if row.rollout_id in rollouts)
        weights = partial(
            token_weights,
            aggregate=self.aggregate,
            rollouts=len(rollouts),
            tokens=tokens,
            length=self.length or 1,
        )
        loss, grad_norm = self._gradient(rows, weights, proximal, diagnostics)
        diagnostics.check_bound()
        finite = math.isfinite(grad_norm)
        while not finite and self.optimizer.lower_loss_scale():
            # The numbers of these rows have been collected.
            loss, grad_norm = self._gradient(rows, weights, proximal, BatchDiagnostics())
            finite = math.isfinite(grad_norm)
        if finite:
            self.optimizer.step(self.lr * self.lr_schedule.factor(self.steps))
            self.skipped = 0
            diagnostics.update(loss=loss, grad_norm=grad_norm)
        else:
            self._skip_update(grad_norm, rollouts)
            diagnostics.counts["skipped_updates"] += 1
        if diagnostics.recorder is not None:
            diagnostics.recorder.updated(rollouts, skipped=not finite)

    def _gradient(
        self,
        rows: list[Row],
        weights: WeightFunction,
        proximal: Scores | None,
        diagnostics: BatchDiagnostics,
    ) -> tuple[float, float]:
        """Compute and clip the gradient; returns the loss and the gradient's norm before clipping."""
        self.optimizer.zero_grad()
        loss = self.optimizer.backward(
            rows,
            partial(compute_loss, objective=self.objective),
            weights,
            diagnostics,
            proximal=proximal,
            reference=self.objective.kl > 0,
        )
        return loss, self.optimizer.clip_gradient()

    def _skip_update(self, grad_norm: float, rollouts: frozenset[str]) -> None:
        """Leave the weights unchanged; the third such update in a row is an error."""
        self.skipped += 1
        first_ids = ", ".join(sorted(rollouts)[:3])
        if self.skipped >= MAX_SKIPPED:
            raise UsageError(
                f"the gradient's norm was {grad_norm} in {self.skipped} updates in a row, last for rollouts"
                f" {first_ids}; lower the learning rate, or go on from an older checkpoint"
            )
        log.warning("update skipped: the gradient's norm is %s for rollouts %s, ...", grad_norm, first_ids)

    # --- metrics ----------------------------------------------------------------------------------

    def _measure_control(self, rows: Sequence[Row]) -> float | None:
        """Sampler-trainer difference that the engine's own arithmetic causes, on the tokens of this step."""
        if not (rows := [row for row in rows if row.owned]):
            return self.control_logprob_diff
        diff = self.optimizer.control_logprob_diff(rows, torch_dtype(self.engine_dtype or "float32"))
        return None if diff is None else max(diff, MIN_CONTROL)

    def _compare_with_control(self, metrics: dict[str, float]) -> dict[str, float]:
        """Add the sampler-trainer difference in units of the control; warn if it is too large."""
        if self.control_logprob_diff is None or "logprob_diff" not in metrics:
            return metrics
        ratio = metrics["logprob_diff"] / self.control_logprob_diff
        if ratio > MAX_TIMES_CONTROL and not self._warned:
            self._warned = True
            log.warning(
                "sampler and trainer are %.2g apart in the mean about the log-probabilities of the same"
                " tokens, %.1f times what the engine's %s explains (%.2g): do both have the same weights? Set"
                " the engine's dtype to float32 to make them equal",
                metrics["logprob_diff"],
                ratio,
                self.engine_dtype,
                self.control_logprob_diff,
            )
        return {
            **metrics,
            "logprob_diff_control": self.control_logprob_diff,
            "logprob_diff_times_control": ratio,
        }

    def _weighed_reward(self, groups: Sequence[Group]) -> dict[str, float]:
        """Mean weighted reward, where it is not the reward that agents returned."""
        if not self.rewards:
            return {}
        by_group = [rewards_of(group, self.floor) for group in weigh_rewards(groups, self.rewards)]
        values = [value for rewards in by_group for value in rewards.values()]
        return {"weighed_reward": sum(values) / len(values)} if values else {}

    def _unused_rewards(self, groups: Sequence[Group]) -> dict[str, float]:
        unused = unused_turn_rewards(groups, credit=self.credit, weights=self.rewards)
        return {"unused_turn_rewards": float(unused)} if unused else {}

    # --- weights and checkpoints ------------------------------------------------------------------

    def export(self, directory: Path) -> None:
        """Write the current weights as engines load them: the whole model, or its adapters alone.

        Replaces the directory.
        """
        self._export(directory, Rounding())

    def publish(self, directory: Path, *, version: int, dtype: str) -> dict[str, float]:
        """Write the weights of `version` for engines that compute in `dtype`; returns metrics of rounding and
        transfer.

        In shared memory, the directory is complete after `finish_publication`. Stochastic rounding is seeded
        by the run's seed and the version: a repetition writes the same bits.
        """
        rounding = make_rounding(dtype, self.seed, version, nearest=self.rounding == "nearest")
        self._compute_as_published(version)
        published = self._export(directory, rounding, self.sharing)
        self.version, self.engine_dtype = version, dtype
        metrics = published.metrics() if rounding.lossy else {"update_kept": 1.0, "rounding_noise_norm": 0.0}
        metrics["shared_weights"] = float(self.sharing is not None and self.sharing.holds(directory))
        if metrics.get("update_kept", 1.0) < MIN_UPDATE_KEPT:
            log.warning(
                "version %d: only %.0f %% of the update reached the published weights in %s; set"
                " learn.rounding to stochastic, or the engine's dtype to float32",
                version,
                100 * metrics["update_kept"],
                dtype,
            )
        return metrics

    def _compute_as_published(self, version: int) -> None:
        """Have training passes in 16 bits compute with the weights of this version."""
        rounding = make_rounding(self.policy.dtype, self.seed, version)
        stochastic = rounding.lossy and self.rounding == "stochastic"
        self.policy.arithmetic = rounding if stochastic else None
        self.policy.changed()

    def finish_publication(self) -> None:
        """Wait until the files of the newest published version are complete."""
        if self.sharing is not None:
            self.sharing.finish()

    def _export(
        self, directory: Path, rounding: Rounding, sharing: SharedPublication | None = None
    ) -> PublishedUpdate:
        if self.publishes_adapter:
            return self.policy.export_adapter(directory, rounding)
        return self.policy.export(directory, rounding, sharing)

    def save(self, directory: Path) -> None:
        """Write a checkpoint: weights, optimizer state, random state, tokenizer, template and thinking."""
        with replaced(directory) as fresh:
            self._write({**self.optimizer.state(), **self._progress()}, fresh)

    def begin_save(self, directory: Path) -> Callable[[], None]:
        """Copy the state and write a checkpoint in a thread, while training goes on.

        The returned function waits for its end.
        """
        state = copy_to_cpu({**self.optimizer.state(), **self._progress()})

        def write() -> None:
            with replaced(directory) as fresh:
                self._write(state, fresh)

        thread = ThreadPoolExecutor(1, "afield-checkpoint")
        future = thread.submit(write)
        thread.shutdown(wait=False)
        return future.result

    def _progress(self) -> dict[str, Any]:
        """State of the trainer besides weights and optimizer."""
        return {
            "steps": self.steps,
            "random": self.random.get_state(),
            "published": [self.version, self.engine_dtype, self.control_logprob_diff],
            "seed": self.seed,
            "loss_scale": [scale.factor, scale.updates] if (scale := self.optimizer.loss_scale) else None,
        }

    def _write(self, state: dict[str, Any], fresh: Path) -> None:
        torch.save(state, fresh / STATE_FILE)
        copy_but_weights(self.model_path, fresh / MODEL_DIR)
        (fresh / POLICY_FILE).write_text(
            json.dumps({"thinking": self.thinking, "steps": state["steps"]}) + "\n"
        )

    def restore(self, directory: Path) -> None:
        """Load a checkpoint; training continues bit for bit as without the interruption."""
        directory = Path(directory)
        if not (directory / STATE_FILE).is_file():
            raise DamagedFile(
                f"{directory} holds no {STATE_FILE}; restore from a directory that save() wrote"
            )
        self._check_unchanged(directory)
        try:
            state = torch.load(directory / STATE_FILE, map_location="cpu", weights_only=True, mmap=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).partition("\n")[0]
            raise DamagedFile(f"{directory / STATE_FILE} cannot be read: {reason}") from error
        if has_shards(directory):
            self.optimizer.load_shards(directory)
        else:
            self.optimizer.load_state(state)
        self.random.set_state(state["random"])
        self.steps = state["steps"]
        # Checkpoints of earlier releases have no "published" and no "seed".
        self.version, self.engine_dtype, self.control_logprob_diff = state.get("published", (None,) * 3)
        self.seed = state.get("seed", self.seed)
        self._compute_as_published(self.version or 0)
        if (scale := self.optimizer.loss_scale) and (saved := state.get("loss_scale")):
            scale.factor, scale.updates = saved

    def _check_unchanged(self, directory: Path) -> None:
        """Refuse a checkpoint of another tokenizer, template or thinking policy."""
        for name in UNCHANGED_FILES:
            saved, current = directory / MODEL_DIR / name, self.model_path / name
            if saved.is_file() and (not current.is_file() or saved.read_bytes() != current.read_bytes()):
                original = directory / MODEL_DIR
                raise UsageError(
                    f"{directory} was saved with another {name} than {self.model_path} has;"
                    f" resume with the model it began with (all but the weights is in {original})"
                )
        if (directory / POLICY_FILE).is_file():
            thinking = json.loads((directory / POLICY_FILE).read_text())["thinking"]
            if thinking != self.thinking:
                raise UsageError(
                    f"{directory} was trained with thinking {thinking!r}, not {self.thinking!r}; keep it"
                )
