"""GRPO, from groups to new weights, in one file that reads top to bottom.

Each rollout has one advantage and weighs 1, however many rows, turns or tokens it consists of. The loss
is PPO's clip on the ratio to the policy as it was when the step began, times a truncated importance
weight from the policy that sampled to that one, token by token; optionally a KL penalty to the start.
Log-probabilities are those of the sampled distribution, so every turn is rescored at its temperature.
A batch that does not line up is refused, naming rollout and turn, before any weight changes: truncated
or greedy sampling, ids outside the vocabulary, rows beyond the context, numbers that are not finite.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from afield import advantage
from afield.errors import UsageError
from afield.seams.trainer import StepReport
from afield.trainers.directories import copy_but_weights, load_model, replaced, write_weights
from afield.types import Group, Trajectory

SMALL = 5_000_000

# --- groups to rows ------------------------------------------------------------------------------


class Row(NamedTuple):
    """One sequence to train on, with what its rollout earned; `number` is its place in the batch."""

    number: int
    rollout_id: str
    trajectory: Trajectory
    advantage: float


class Batch(NamedTuple):
    """The rollouts that carry an advantage. One without rows still counts in the denominators."""

    rollout_ids: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def tokens(self) -> int:
        return sum(row.trajectory.owned for row in self.rows)

    def staleness(self, version: int) -> float:
        """How many updates ago the tokens were sampled, on average, when the policy is at `version`."""
        spans = [span for row in self.rows for span in row.trajectory.versions]
        return sum((version - s.low) * (s.end - s.start) for s in spans) / max(self.tokens, 1)


def to_batch(
    groups: Iterable[Group], *, floor: float, scale: bool, measure: Literal["grpo", "remax"] = "grpo"
) -> Batch:
    ids: list[str] = []
    rows: list[Row] = []
    for group in groups:
        if measure == "remax":
            advantages = advantage.remax(group, floor=floor)
        else:
            advantages = advantage.grpo(group, floor=floor, scale=scale)
        ids.extend(advantages)
        for finished in group.finished:
            earned = advantages.get(finished.rollout.id)
            if earned is not None:
                for trajectory in finished.trajectories:
                    rows.append(Row(len(rows), finished.rollout.id, trajectory, earned))
    if repeated := [i for i, times in Counter(ids).items() if times > 1]:
        raise UsageError(f"rollouts {repeated} are in the batch more than once; train on each once")
    return Batch(tuple(ids), tuple(rows))


def check_rows(rows: Iterable[Row], *, vocabulary: int, context: int | None) -> None:
    """Refuse what cannot be rescored exactly."""
    for row in rows:
        ids, turns = row.trajectory.token_ids, row.trajectory.turns
        where = f"rollout {row.rollout_id}, turn {turns[0].id if turns else '(none)'}"
        if context is not None and len(ids) > context:
            raise UsageError(
                f"{where}: {len(ids)} tokens exceed the model's context of {context}; lower the budget"
            )
        if stray := [i for i in ids if not 0 <= i < vocabulary]:
            raise UsageError(
                f"{where}: token id {stray[0]} is outside the vocabulary of {vocabulary};"
                " train the model that the engine serves"
            )
        for turn in turns:
            where = f"rollout {row.rollout_id}, turn {turn.id}"
            if turn.truncated or turn.temperature <= 0:
                raise UsageError(
                    f"{where}: sampled with temperature {turn.temperature:g}"
                    f"{' and top_p or top_k' if turn.truncated else ''}, a distribution the trainer cannot"
                    " reproduce; sample with temperature above 0, top_p=1 and top_k=0"
                )
            if turn.start == 0 or not all(row.trajectory.loss_mask[turn.start : turn.end]):
                raise UsageError(
                    f"{where}: tokens {turn.start} to {turn.end} are not sampled ones after a prompt"
                )
            if bad := [p for p in row.trajectory.logprobs[turn.start : turn.end] if not math.isfinite(p)]:
                raise UsageError(f"{where}: recorded log-probability {bad[0]} is not a finite number")


# --- rows to tensors -----------------------------------------------------------------------------


class Pass(NamedTuple):
    """A padded micro-batch. All but the first two hold one entry per sampled token, row after row."""

    rows: list[Row]
    ids: Tensor  # [rows, width]
    row: Tensor
    position: Tensor
    temperature: Tensor
    sampler: Tensor  # log-probability when it was sampled
    advantage: Tensor
    weight: Tensor  # a rollout's sum to 1


def to_passes(rows: Sequence[Row], max_tokens: int, device: torch.device) -> list[Pass]:
    """Micro-batches of at most `max_tokens` tokens, padding included; rows of like length share one."""
    passes: list[Pass] = []
    pending: list[Row] = []
    for row in sorted(rows, key=lambda r: len(r.trajectory.token_ids)):
        if pending and (len(pending) + 1) * len(row.trajectory.token_ids) > max_tokens:
            passes.append(_to_pass(pending, device))
            pending = []
        pending.append(row)
    return [*passes, _to_pass(pending, device)] if pending else passes


def _to_pass(rows: list[Row], device: torch.device) -> Pass:
    width = max(len(row.trajectory.token_ids) for row in rows)
    tokens: list[tuple[int, int, float, float, float, float]] = []
    for line, (_, _, trajectory, earned) in enumerate(rows):
        weight = trajectory.weight / trajectory.owned
        for turn in trajectory.turns:
            places = range(turn.start, turn.end)
            tokens += [(line, p, turn.temperature, trajectory.logprobs[p], earned, weight) for p in places]
    row, position, temperature, sampler, advantages, weight = zip(*tokens, strict=True)
    return Pass(
        rows=rows,
        # Padding comes last, where no causal model looks at it, so no attention mask is needed.
        ids=torch.tensor(
            [[*r.trajectory.token_ids, *[0] * (width - len(r.trajectory.token_ids))] for r in rows],
            device=device,
        ),
        row=torch.tensor(row, device=device),
        position=torch.tensor(position, device=device),
        temperature=torch.tensor(temperature, device=device),
        sampler=torch.tensor(sampler, device=device),
        advantage=torch.tensor(advantages, device=device),
        weight=torch.tensor(weight, device=device),
    )


def log_probabilities(model: Any, batch: Pass) -> Tensor:
    """Of every sampled token, under the distribution `model` would have sampled it from."""
    needed, column = torch.unique(batch.position - 1, return_inverse=True)
    logits = model(input_ids=batch.ids, logits_to_keep=needed, use_cache=False).logits
    scaled = logits[batch.row, column].float() / batch.temperature[:, None]
    chosen = batch.ids[batch.row, batch.position]
    return torch.log_softmax(scaled, dim=-1).gather(1, chosen[:, None]).squeeze(1)


# --- the loss ------------------------------------------------------------------------------------


class Loss(NamedTuple):
    total: Tensor  # summed over tokens, each weighed so that a rollout counts 1
    ratio: Tensor
    clipped: Tensor
    penalty: Tensor | None  # KL, where it is on


def grpo_loss(
    batch: Pass,
    logp: Tensor,
    proximal: Tensor,
    reference: Tensor | None,
    *,
    clip: tuple[float, float],
    importance_cap: float,
    kl: float,
) -> Loss:
    ratio = torch.exp(logp - proximal)
    importance = torch.exp(proximal - batch.sampler).clamp(max=importance_cap)
    free = ratio * batch.advantage
    held = ratio.clamp(1 - clip[0], 1 + clip[1]) * batch.advantage
    loss = -torch.minimum(free, held) * importance
    penalty = None
    if reference is not None:
        # k3: never negative, unbiased, and 0 where the policies agree
        penalty = torch.expm1(reference - logp) - (reference - logp)
        loss = loss + kl * penalty
    return Loss((loss * batch.weight).sum(), ratio.detach(), held < free, penalty)


class Measures:
    """What a step saw, token by token and update by update."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[Tensor]] = {}
        self.updates: dict[str, list[float]] = {}

    def compare(self, batch: Pass, logp: Tensor) -> None:
        """Policy against sampler, before any update; refuses what is not a number."""
        logp = logp.detach()
        if (wrong := torch.nonzero(~torch.isfinite(logp)).flatten()).numel():
            row, place = batch.rows[int(batch.row[wrong[0]])], int(batch.position[wrong[0]])
            turn = next(turn.id for turn in row.trajectory.turns if turn.start <= place < turn.end)
            raise UsageError(
                f"rollout {row.rollout_id}, turn {turn}: the policy gives token {place} a log-probability of"
                f" {float(logp[wrong[0]])}; its weights are broken or it is not the model that sampled"
            )
        self._see(diff=(logp - batch.sampler).abs(), entropy=-logp)

    def add(self, loss: Loss) -> None:
        self._see(ratio=loss.ratio, clipped=loss.clipped.float())
        if loss.penalty is not None:
            self._see(kl=loss.penalty)

    def update(self, **values: float) -> None:
        for name, value in values.items():
            self.updates.setdefault(name, []).append(value)

    def _see(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.tokens.setdefault(name, []).append(value.detach())

    def summary(self) -> dict[str, float]:
        if not self.updates:
            return {}
        seen = {name: torch.cat(values) for name, values in self.tokens.items()}
        return {
            **{name: sum(values) / len(values) for name, values in self.updates.items()},
            "ratio_mean": float(seen["ratio"].mean()),
            "ratio_min": float(seen["ratio"].min()),
            "ratio_max": float(seen["ratio"].max()),
            "clip_share": float(seen["clipped"].mean()),
            **({"kl": float(seen["kl"].mean())} if "kl" in seen else {}),
            "entropy": float(seen["entropy"].mean()),
            "sampler_trainer_logprob_diff_mean": float(seen["diff"].mean()),
            "sampler_trainer_logprob_diff_max": float(seen["diff"].max()),
        }


# --- the trainer ---------------------------------------------------------------------------------


class GRPO:
    """Trains a Hugging Face causal language model from its directory, in float32.

    A step makes `epochs * minibatches` updates; with more than one, the policy is scored once before
    the first. A step in which nothing has a gradient leaves weights and optimiser as they are.
    Policy versions are taken to count this trainer's steps, for `staleness` only. `eps` is AdamW's; near
    the size of a small model's gradients it keeps weights that hardly matter from being moved by noise.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        lr: float,
        clip: tuple[float, float] = (0.2, 0.28),
        minibatches: int = 1,
        epochs: int = 1,
        kl: float = 0.0,
        importance_cap: float = 2.0,
        grad_clip: float = 1.0,
        weight_decay: float = 0.0,
        eps: float = 1e-8,
        floor: float = 0.0,
        scale: bool = True,
        advantage: Literal["grpo", "remax"] = "grpo",
        seed: int = 0,
        device: str | None = None,
        max_tokens_per_pass: int = 16384,
    ) -> None:
        self.model_path = Path(model_path)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model = load_model(self.model_path, self.device)
        self.reference = load_model(self.model_path, self.device) if kl else None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, eps=eps, weight_decay=weight_decay)
        self.random = torch.Generator().manual_seed(seed)
        self.steps = 0
        self.clip = clip
        self.minibatches = minibatches
        self.epochs = epochs
        self.kl = kl
        self.importance_cap = importance_cap
        self.grad_clip = grad_clip
        self.floor = floor
        self.scale = scale
        self.measure: Literal["grpo", "remax"] = advantage
        self.max_tokens_per_pass = max_tokens_per_pass

    def step(self, groups: Sequence[Group]) -> StepReport:
        if self.device.type == "cpu" and self.model.num_parameters() < SMALL:
            torch.set_num_threads(1)  # a small model's work is less than what sharing it out costs
        batch = to_batch(groups, floor=self.floor, scale=self.scale, measure=self.measure)
        config = self.model.config
        context = getattr(config, "max_position_embeddings", None)
        check_rows(batch.rows, vocabulary=config.vocab_size, context=context)
        # A row without an advantage has no gradient unless KL gives it one; its rollout still counts.
        rows = [row for row in batch.rows if row.trajectory.owned and (row.advantage or self.kl)]
        measured = Measures()
        proximal = self._score(rows, measured) if self.minibatches * self.epochs > 1 else None
        for rollouts in self._minibatches(batch.rollout_ids):
            if mine := [row for row in rows if row.rollout_id in rollouts]:
                self._update(mine, len(rollouts), proximal, measured)
        metrics = {
            **measured.summary(),
            "tokens": float(batch.tokens),
            "staleness": batch.staleness(self.steps),
        }
        self.steps += 1
        return StepReport(rollouts=len(batch.rollout_ids), tokens=batch.tokens, metrics=metrics)

    @torch.no_grad()
    def _score(self, rows: list[Row], measured: Measures) -> dict[int, Tensor]:
        """Log-probabilities of each row's sampled tokens under the policy as it is now."""
        scores: dict[int, Tensor] = {}
        for batch in to_passes(rows, self.max_tokens_per_pass, self.device):
            logp = log_probabilities(self.model, batch)
            measured.compare(batch, logp)
            lengths = [row.trajectory.owned for row in batch.rows]
            scores.update(zip((row.number for row in batch.rows), logp.split(lengths), strict=True))
        return scores

    def _minibatches(self, rollout_ids: Sequence[str]) -> Iterator[frozenset[str]]:
        """Every rollout once per epoch, in random parts of like size."""
        for _ in range(self.epochs):
            order = torch.randperm(len(rollout_ids), generator=self.random).tolist()
            for part in range(min(self.minibatches, len(order))):
                yield frozenset(rollout_ids[int(i)] for i in order[part :: self.minibatches])

    def _update(
        self, rows: list[Row], rollouts: int, proximal: dict[int, Tensor] | None, measured: Measures
    ) -> None:
        """One optimiser step on the mean over `rollouts`, accumulated over as many passes as it takes."""
        self.optimizer.zero_grad()
        total = 0.0
        for batch in to_passes(rows, self.max_tokens_per_pass, self.device):
            logp = log_probabilities(self.model, batch)
            if proximal is None:
                measured.compare(batch, logp)
                before = logp.detach()
            else:
                before = torch.cat([proximal[row.number] for row in batch.rows])
            loss = grpo_loss(
                batch,
                logp,
                before,
                self._reference(batch),
                clip=self.clip,
                importance_cap=self.importance_cap,
                kl=self.kl,
            )
            (loss.total / rollouts).backward()
            measured.add(loss)
            total += float(loss.total.detach()) / rollouts
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip))
        if not math.isfinite(norm):
            raise UsageError(f"the gradient's norm is {norm} at step {self.steps}; lower the learning rate")
        self.optimizer.step()
        measured.update(loss=total, grad_norm=norm)

    @torch.no_grad()
    def _reference(self, batch: Pass) -> Tensor | None:
        return None if self.reference is None else log_probabilities(self.reference, batch)

    def export(self, directory: Path) -> None:
        """Write the model's directory with the weights as they are now. Repeating replaces it."""
        with replaced(directory) as fresh:
            copy_but_weights(self.model_path, fresh)
            write_weights(self.model, fresh)

    def save(self, directory: Path) -> None:
        with replaced(directory) as fresh:
            state = {
                "steps": self.steps,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "random": self.random.get_state(),
            }
            torch.save(state, fresh / "trainer.pt")

    def restore(self, directory: Path) -> None:
        """Go on as if there had been no break: the next step gives the same weights bit for bit."""
        path = Path(directory) / "trainer.pt"
        if not path.is_file():
            raise UsageError(f"{directory} holds no trainer.pt; restore from a directory that save() wrote")
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.random.set_state(state["random"])
        self.steps = state["steps"]
