"""One process of a sharded trainer: `python -m afield.trainers.fsdp.rank FD`, started by `sharded`.

Every rank holds a part of each weight (FSDP) and of its optimiser's state, and runs the whole model over its
share of the rows; gradients are summed. All ranks see all groups and draw the same minibatches, so they
check, refuse and update alike. Rank 0 writes. The end of the wire is the end of the process.
"""

from __future__ import annotations

import logging
import math
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.modeling_layers import GradientCheckpointingLayer

from afield.errors import AfieldError, UsageError, boundary
from afield.interfaces.weight_probe import WeightProbe
from afield.rounding import PublishedUpdate
from afield.trainers.batch import Row
from afield.trainers.diagnostics import BatchDiagnostics, LogprobDifference
from afield.trainers.fsdp.trainer import RankConfig, RankReply
from afield.trainers.grpo import GRPO
from afield.trainers.logprobs import has_linear_head
from afield.trainers.micro_batches import MicroBatch, token_logprobs
from afield.trainers.model import PolicyModel
from afield.trainers.optimizer import LossFunction, Optimizer, Scores, WeightFunction
from afield.trainers.packing import common
from afield.trainers.publication import TensorShard
from afield.trainers.weight_probe import compute_weight_probe
from afield.types import Failure, FailureKind, Reason

# --- the model -----------------------------------------------------------------------------------


class ShardedModule(nn.Module):
    """All that is computed with a model happens inside one call of this, where its weights are whole."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()


def shard(model: nn.Module, device: torch.device) -> ShardedModule:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    root = ShardedModule(model)
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    for part in (*layers, root):
        made = fully_shard(part, mesh=mesh)
        assert isinstance(made, FSDPModule)
        # Losses are divided by what all ranks have together, so gradients are added, not averaged.
        made.set_gradient_divide_factor(1.0)
        made.set_force_sum_reduction_for_comms(True)
        made.set_reduce_scatter_unused_params(True, recurse=False)
    return root


class ShardedPolicy(PolicyModel):
    """Loaded in the machine's memory by each rank, then shared out over the devices."""

    def __init__(self, path: str | Path, *, device: torch.device, **how: Any) -> None:
        super().__init__(path, device=torch.device("cpu"), **how)
        self.device = device
        self._roots: dict[int, ShardedModule] = {}
        for model in (self.model, self.reference_model):
            if model is not None:
                has_linear_head(model)  # this asks the model, which has to be whole for it
                self._roots[id(model)] = shard(model, device)

    def _load_vision(self) -> tuple[None, str]:
        # A rank without images would not take part in gathering the vision tower's weights.
        return None, "a sharded model takes none; train on one device (devices = 1), or with veRL"

    def log_probabilities(self, model: Any, batch: MicroBatch) -> Tensor:
        return self._roots[id(model)](lambda: token_logprobs(model, batch))

    def witness(self) -> WeightProbe:
        with self.autocast():
            return self._roots[id(self.model)](lambda: compute_weight_probe(self.model))

    @property
    def writes(self) -> bool:
        return dist.get_rank() == 0

    def shard(self, tensor: Tensor) -> TensorShard:
        """Rows of the tensor, which are shared out in order."""
        if not isinstance(tensor, DTensor):
            return TensorShard(tensor, counted=dist.get_rank() == 0)
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return TensorShard(tensor.to_local(), first=offset[0] * math.prod(tensor.shape[1:]) if offset else 0)

    def gathered(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor

    def summed(self, told: PublishedUpdate) -> PublishedUpdate:
        total = PublishedUpdate()
        for part in all_gather(told):
            total = total.plus(PublishedUpdate(*part))
        return total

    def whole(self, tensor: Tensor) -> Tensor:
        """On rank 0; elsewhere what is gathered is let go."""
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor().detach()
        return tensor.cpu() if dist.get_rank() == 0 else tensor.new_empty(0, device="cpu")

    def place(self, tensor: Tensor, into: Tensor) -> Tensor:
        return place(tensor, into)


def place(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank has."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


# --- the updates ---------------------------------------------------------------------------------


def split_rows(rows: Sequence[Row], ranks: int) -> list[list[Row]]:
    """Rows in as many parts of like cost, those with much in common together. Parts may be empty."""
    ordered = sorted(rows, key=lambda row: row.trajectory.token_ids)
    costs: list[int] = []
    previous: tuple[int, ...] = ()
    for row in ordered:
        ids = row.trajectory.token_ids
        costs.append(max(len(ids) - common(previous, ids), 1))
        previous = ids
    parts: list[list[Row]] = [[] for _ in range(ranks)]
    done, total = 0.0, sum(costs)
    for row, cost in zip(ordered, costs, strict=True):
        parts[int((done + cost / 2) * ranks / total)].append(row)
        done += cost
    return parts


class LocalDiagnostics(BatchDiagnostics):
    """One rank's. What it refuses is kept until all ranks know, so that they refuse it together."""

    def __init__(self, version: int | None = None) -> None:
        super().__init__(version=version)
        self.problem = ""

    def compare(self, batch: MicroBatch, logp: Tensor) -> None:
        try:
            super().compare_logprobs(batch, logp)
        except UsageError as error:
            self.problem = self.problem or str(error)

    def seen(self) -> RankDiagnostics:
        def joined(lists: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
            return {name: torch.cat(values).cpu() for name, values in lists.items()}

        return RankDiagnostics(
            joined(self.tokens), joined(self.tiers), dict(self.counts), self.worst, self.problem
        )


class RankDiagnostics(NamedTuple):
    tokens: dict[str, Tensor]
    tiers: dict[str, Tensor]
    counts: dict[str, int]
    worst: LogprobDifference
    problem: str


def merge(parts: Sequence[RankDiagnostics], audit: BatchDiagnostics) -> None:
    if problems := [part.problem for part in parts if part.problem]:
        raise UsageError(problems[0])
    for part in parts:
        for name, values in part.tokens.items():
            audit.tokens.setdefault(name, []).append(values)
        for name, values in part.tiers.items():
            audit.tiers.setdefault(name, []).append(values)
        audit.counts.update(part.counts)
        audit.worst = max(audit.worst, part.worst, key=lambda apart: apart.by)


def all_gather(value: Any) -> list[Any]:
    """Each rank's, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class ShardedOptimizer(Optimizer):
    policy: ShardedPolicy
    _behind = 0  # passes that another rank makes and this one does not

    def passes(self, rows: Sequence[Row]) -> list[MicroBatch]:
        made = super().micro_batches(rows)
        self._behind = max(all_gather(len(made))) - len(made)
        return made

    def score(self, rows: Sequence[Row], audit: BatchDiagnostics) -> Scores:
        local = LocalDiagnostics(audit.version)
        scores = super().score(self._mine(rows), local)
        self._keep_up(rows, backward=False)
        told = all_gather(({number: values.cpu() for number, values in scores.items()}, local.seen()))
        merge([seen for _, seen in told], audit)
        return {n: values.to(self.policy.device) for part, _ in told for n, values in part.items()}

    def backward(
        self,
        rows: Sequence[Row],
        loss: LossFunction,
        weigh: WeightFunction,
        audit: BatchDiagnostics,
        *,
        proximal: Scores | None = None,
        reference: bool = False,
    ) -> float:
        local = LocalDiagnostics(audit.version)
        total = super().backward(self._mine(rows), loss, weigh, local, proximal=proximal, reference=reference)
        self._keep_up(rows, backward=True, reference=reference)
        told = all_gather((total, local.seen()))
        merge([seen for _, seen in told], audit)
        return sum(part for part, _ in told)

    def _mine(self, rows: Sequence[Row]) -> list[Row]:
        return split_rows(rows, dist.get_world_size())[dist.get_rank()]

    def _keep_up(self, rows: Sequence[Row], *, backward: bool, reference: bool = False) -> None:
        """Every rank has to take part in every pass, since each holds a part of all weights: with nothing
        left to do, it runs the shortest row and counts it 0."""
        owning = [row for row in rows if row.trajectory.owned]
        shortest = min(owning, key=lambda row: len(row.trajectory.token_ids), default=None)
        if shortest is None:
            return
        for _ in range(self._behind):
            (batch,) = Optimizer.micro_batches(self, [shortest])
            with torch.set_grad_enabled(backward):
                logp = self._logp(self.policy.model, batch)
            if reference:
                self.reference_logprobs(batch)
            if backward:
                (0.0 * logp.sum()).backward()

    def _logp(self, model: Any, batch: MicroBatch) -> Tensor:
        self.policy.set_attention(model, batch.layout)
        with self.policy.autocast():
            return self.policy.log_probabilities(model, batch)

    def clip(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.policy.trainable, self.grad_clip)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def state(self) -> dict[str, Any]:
        whole = self.policy.whole
        optimizer = self.optimizer.state_dict()
        moments = {
            number: {name: whole(value) for name, value in of.items()}
            for number, of in optimizer["state"].items()
        }
        return {"model": self.policy.state(), "optimizer": {**optimizer, "state": moments}}

    def load_state(self, state: dict[str, Any]) -> None:
        self.policy.load_state(state["model"])
        trainable = self.policy.trainable
        moments = {
            number: {
                name: place(value, trainable[number]) if value.shape == trainable[number].shape else value
                for name, value in of.items()
            }
            for number, of in state["optimizer"]["state"].items()
        }
        self.load_optimizer({**state["optimizer"], "state": moments})


# --- the trainer, and its wire -------------------------------------------------------------------


class ShardedGRPO(GRPO):
    policy_kind = ShardedPolicy
    updates_kind = ShardedOptimizer

    def publish_as(self, directory: Path, version: int, dtype: str) -> dict[str, float]:
        return self.publish(directory, version=version, dtype=dtype)

    def save(self, directory: Path) -> None:
        if dist.get_rank() == 0:
            super().save(directory)
        else:
            self.optimizer.state()


def answer(call: Callable[[], Any]) -> RankReply:
    problems: list[Failure] = []
    with boundary(FailureKind.INFRASTRUCTURE, Reason.RAISED, problems.append):
        try:
            return RankReply("done", call())
        except AfieldError as error:
            return RankReply("refused", error=error)
    return RankReply("broken", last_words=problems[0].message)


def join(begin: RankConfig) -> torch.device:
    device = torch.device(begin.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if begin.rank:
        logging.getLogger("afield.trainers").setLevel(logging.ERROR)  # rank 0 says it for all
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{begin.meeting}",
        rank=begin.rank,
        world_size=begin.ranks,
    )
    return device


def main(descriptor: int) -> None:
    with Connection(descriptor) as wire:
        begin: RankConfig = pickle.loads(wire.recv_bytes())
        device = join(begin)
        made: list[ShardedGRPO] = []

        def make() -> int | None:
            made.append(ShardedGRPO(begin.model_path, device=str(device), **begin.settings))
            return made[0].context

        told = answer(make)
        wire.send_bytes(pickle.dumps(told))
        while told.kind != "broken" and made:
            try:
                verb, arguments = pickle.loads(wire.recv_bytes())
            except (EOFError, ConnectionError):
                break
            told = answer(partial(getattr(made[0], verb), *arguments))
            wire.send_bytes(pickle.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
