"""FSDP rank: process of the FSDP trainer, `python -m afield.trainers.fsdp.rank FD`.

Every rank holds a shard of each weight and of its optimizer state, and runs the whole model over its part of
the rows; gradients are summed. All ranks get all groups and draw the same minibatches, so that checks,
errors and updates are the same on each. Rank 0 writes. A rank exits when its connection closes.
"""

from __future__ import annotations

import logging
import math
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.modeling_layers import GradientCheckpointingLayer

from afield.batches.rows import Row
from afield.errors import AfieldError, Unavailable, UsageError, boundary
from afield.interfaces.weight_probe import WeightProbe
from afield.models.rounding import PublishedUpdate, Rounding
from afield.settings.trainer import TrainerDtype
from afield.trainers.batch import TrainingBatch
from afield.trainers.diagnostics import BatchDiagnostics, LogprobDifference
from afield.trainers.fsdp.trainer import RankConfig, RankReply
from afield.trainers.grpo import GRPO
from afield.trainers.logprobs import has_linear_head
from afield.trainers.micro_batches import MicroBatch, TokenScores, token_scores
from afield.trainers.model import PolicyModel, compute_weight_probe, pick_dtype
from afield.trainers.model_directory import replaced
from afield.trainers.optimizer import LossFunction, Optimizer, Scores, WeightFunction
from afield.trainers.packing import common
from afield.trainers.publication import TensorShard
from afield.trainers.sharded_checkpoint import begin_save_shards, save_shards
from afield.trainers.token_recorder import RowValues, TokenRecorder
from afield.types import Failure, FailureKind, Group, Reason

T = TypeVar("T")

# --- the model -----------------------------------------------------------------------------------


class ShardedModule(nn.Module):
    """Root FSDP module: computations run inside its forward, where weights are gathered."""

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
        module = fully_shard(part, mesh=mesh)
        assert isinstance(module, FSDPModule)
        # Losses are divided by the totals of all ranks, so gradients are added, not averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_reduce_scatter_unused_params(True, recurse=False)
    return root


class ShardedPolicy(PolicyModel):
    """A policy that each rank loads into CPU memory, then shards over the devices."""

    def __init__(
        self, path: str | Path, *, device: torch.device, dtype: TrainerDtype = "auto", **settings: Any
    ) -> None:
        super().__init__(path, device=torch.device("cpu"), dtype=pick_dtype(dtype, device), **settings)
        self.device = device
        self.checkpoint_group = dist.new_group(backend="gloo")
        self._roots: dict[int, ShardedModule] = {}
        for model in (self.model, self.reference_model):
            if model is not None:
                has_linear_head(model)  # runs the model, so it is called before sharding
                self._roots[id(model)] = shard(model, device)

    def _load_vision(self) -> tuple[None, str]:
        # A rank without images would not take part in gathering the vision tower.
        return None, "a sharded model takes none; train on one device (devices = 1), or with veRL"

    def token_scores(self, model: Any, batch: MicroBatch, *, entropy: bool = False) -> TokenScores:
        return self._roots[id(model)](lambda: token_scores(model, batch, entropy=entropy))

    def weight_probe(self) -> WeightProbe:
        with self.autocast():
            return self._roots[id(self.model)](lambda: compute_weight_probe(self.model))

    @contextmanager
    def published(self, rounding: Rounding) -> Iterator[PublishedUpdate]:
        # A forward pass leaves the root gathered, in copies that would be neither rounded nor restored.
        root = self._roots[id(self.model)]
        assert isinstance(root, FSDPModule)
        root.reshard()
        try:
            with super().published(rounding) as update:
                yield update
        finally:
            root.reshard()

    @contextmanager
    def rounded(self) -> Iterator[None]:
        root = self._roots[id(self.model)]
        assert isinstance(root, FSDPModule)
        root.reshard()
        try:
            with super().rounded():
                yield
        finally:
            root.reshard()

    @property
    def sharing_device(self) -> torch.device:
        """CPU memory, into which rank 0 gathers exported weights."""
        return torch.device("cpu")

    @property
    def writes(self) -> bool:
        return dist.get_rank() == 0

    def shard(self, tensor: Tensor) -> TensorShard:
        """This rank's shard: consecutive rows of the tensor."""
        if not isinstance(tensor, DTensor):
            return TensorShard(tensor, counted=dist.get_rank() == 0)
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return TensorShard(tensor.to_local(), first=offset[0] * math.prod(tensor.shape[1:]) if offset else 0)

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor

    def sum_over_ranks(self, update: PublishedUpdate) -> PublishedUpdate:
        total = PublishedUpdate()
        for part in all_gather(update):
            total = total.plus(PublishedUpdate(*part))
        return total

    def gather_for_export(self, tensor: Tensor) -> Tensor:
        """The whole tensor on rank 0; an empty one on other ranks."""
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor().detach()
        return tensor.cpu() if dist.get_rank() == 0 else tensor.new_empty(0, device="cpu")

    def scatter(self, tensor: Tensor, into: Tensor) -> Tensor:
        return place(tensor, into)


def place(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a tensor that every rank has."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


# --- the optimizer -------------------------------------------------------------------------------


def split_rows(rows: Sequence[Row], ranks: int) -> list[list[Row]]:
    """Rows in one part per rank, of about equal cost, with shared prefixes together. Parts may be empty."""
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
    """Diagnostics of one rank; errors are kept and raised by all ranks together."""

    def __init__(self, step: BatchDiagnostics) -> None:
        super().__init__(version=step.version, recorder=TokenRecorder() if step.recorder else None)
        self.problem = ""

    def compare_logprobs(self, batch: MicroBatch, logp: Tensor, entropy: Tensor | None = None) -> None:
        try:
            super().compare_logprobs(batch, logp, entropy)
        except UsageError as error:
            self.problem = self.problem or str(error)

    def collected(self) -> RankDiagnostics:
        def joined(lists: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
            return {name: torch.cat(values).cpu() for name, values in lists.items()}

        return RankDiagnostics(
            joined(self.tokens),
            joined(self.tiers),
            dict(self.counts),
            self.worst,
            self.problem,
            self.recorder.values if self.recorder else {},
        )


class RankDiagnostics(NamedTuple):
    """Diagnostics of one rank, to be gathered."""

    tokens: dict[str, Tensor]
    """Per-token values, by name."""
    tiers: dict[str, Tensor]
    """Log-probability differences of tokens, by rendering tier."""
    counts: dict[str, int]
    """Counts, by name."""
    worst: LogprobDifference
    """Largest log-probability difference."""
    problem: str
    """First error message; empty without an error."""
    recorded: RowValues
    """Values of the tokens for the training record; empty without one."""


def merge(parts: Sequence[RankDiagnostics], diagnostics: BatchDiagnostics) -> None:
    """Add the diagnostics of all ranks; raises the first error of any."""
    if problems := [part.problem for part in parts if part.problem]:
        raise UsageError(problems[0])
    for part in parts:
        for name, values in part.tokens.items():
            diagnostics.tokens.setdefault(name, []).append(values)
        for name, values in part.tiers.items():
            diagnostics.tiers.setdefault(name, []).append(values)
        diagnostics.counts.update(part.counts)
        if diagnostics.recorder is not None:
            diagnostics.recorder.merge(part.recorded)
        diagnostics.worst = max(diagnostics.worst, part.worst, key=lambda worst: worst.diff)


def all_gather(value: Any) -> list[Any]:
    """The value of each rank, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class ShardedOptimizer(Optimizer):
    """An optimizer whose rows are split over the ranks."""

    policy: ShardedPolicy
    """Sharded policy of this rank."""
    _behind = 0
    """Micro-batches that the busiest rank has more than this one."""

    def micro_batches(self, rows: Sequence[Row]) -> list[MicroBatch]:
        batches = super().micro_batches(rows)
        self._behind = max(all_gather(len(batches))) - len(batches)
        return batches

    def score(self, rows: Sequence[Row], diagnostics: BatchDiagnostics) -> Scores:
        local = LocalDiagnostics(diagnostics)
        with self.policy.rounded():  # until all ranks have run their batches
            scores = super().score(self._local_rows(rows), local)
            self._run_missing_batches(rows, backward=False)
        gathered = all_gather(({key: values.cpu() for key, values in scores.items()}, local.collected()))
        merge([part for _, part in gathered], diagnostics)
        return {key: values.to(self.policy.device) for part, _ in gathered for key, values in part.items()}

    def backward(
        self,
        rows: Sequence[Row],
        loss: LossFunction,
        weights: WeightFunction,
        diagnostics: BatchDiagnostics,
        *,
        proximal: Scores | None = None,
        reference: bool = False,
    ) -> float:
        local = LocalDiagnostics(diagnostics)
        with self.policy.rounded():
            total = super().backward(
                self._local_rows(rows), loss, weights, local, proximal=proximal, reference=reference
            )
            self._run_missing_batches(rows, backward=True, reference=reference)
        gathered = all_gather((total, local.collected()))
        merge([part for _, part in gathered], diagnostics)
        return sum(part for part, _ in gathered)

    def _local_rows(self, rows: Sequence[Row]) -> list[Row]:
        return split_rows(rows, dist.get_world_size())[dist.get_rank()]

    def _run_missing_batches(self, rows: Sequence[Row], *, backward: bool, reference: bool = False) -> None:
        """Run the shortest row with weight 0 while other ranks have micro-batches left: every rank takes part
        in every pass, since each holds a shard of all weights."""
        owning = [row for row in rows if row.owned]
        shortest = min(owning, key=lambda row: len(row.trajectory.token_ids), default=None)
        if shortest is None:
            return
        for _ in range(self._behind):
            (batch,) = Optimizer.micro_batches(self, [shortest])
            with torch.set_grad_enabled(backward):
                logp = self.logprobs(self.policy.model, batch)
            if reference:
                self.reference_logprobs(batch)
            if backward:
                (0.0 * logp.sum()).backward()

    def scores(self, model: Any, batch: MicroBatch, *, entropy: bool = False) -> TokenScores:
        self.policy.set_attention(model, batch.layout)
        with self.policy.autocast():
            return self.policy.token_scores(model, batch, entropy=entropy)

    def _clip(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.policy.trainable, self.grad_clip)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def load_state(self, state: dict[str, Any]) -> None:
        self.policy.load_state(state["model"])
        trainable = self.policy.trainable
        moments = {
            number: {
                name: place(value, trainable[number]) if value.shape == trainable[number].shape else value
                for name, value in values.items()
            }
            for number, values in state["optimizer"]["state"].items()
        }
        self.load_optimizer({**state["optimizer"], "state": moments})


# --- the rank process ----------------------------------------------------------------------------


def on_rank_0(call: Callable[[], T]) -> T:
    """The result of a call that rank 0 makes; its afield error is raised by every rank."""
    results: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            results = [(call(), None)]
        except AfieldError as error:
            results = [(None, error)]
    dist.broadcast_object_list(results)
    result, error = results[0]
    if error is not None:
        raise error
    return result


class ShardedGRPO(GRPO):
    """The GRPO trainer of one rank."""

    model_class = ShardedPolicy
    optimizer_class = ShardedOptimizer
    _unfinished: tuple[ExitStack, Callable[[], Any]] | None = None
    """Checkpoint that is being written, and the function that waits for this rank's shards."""

    def publish_as(self, directory: Path, version: int, dtype: str) -> dict[str, float]:
        self.finish_publication()  # raises on every rank, before any of them gathers
        return self.publish(directory, version=version, dtype=dtype)

    def _records(
        self, groups: Sequence[Group], batch: TrainingBatch, recorder: TokenRecorder | None, regularised: bool
    ) -> dict[str, bytes]:
        return super()._records(groups, batch, recorder, regularised) if dist.get_rank() == 0 else {}

    def finish_publication(self) -> None:
        on_rank_0(super().finish_publication)

    def save(self, directory: Path) -> None:
        with self._saving(directory) as fresh:
            save_shards(self.optimizer.shards(), fresh, self.policy.checkpoint_group)

    def begin_save(self, directory: Path) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Copy the shards and write them in a thread; `finish_save` completes the checkpoint."""
        saving = ExitStack()
        fresh = saving.enter_context(self._saving(directory))
        wait = begin_save_shards(self.optimizer.shards(), fresh, self.policy.checkpoint_group)
        self._unfinished = saving, wait

    def finish_save(self) -> None:
        """Wait until all ranks have written their shards, then give the checkpoint its name."""
        assert self._unfinished is not None
        (saving, wait), self._unfinished = self._unfinished, None
        with saving:
            wait()

    @contextmanager
    def _saving(self, directory: Path) -> Iterator[Path]:
        """A directory for the shards of all ranks, which rank 0 completes and renames when the block ends."""
        progress = self._progress()
        with ExitStack() as opened:

            def begin() -> Path:
                fresh = opened.enter_context(replaced(directory))
                self._write(progress, fresh)
                return fresh

            fresh = on_rank_0(begin)
            own_problem: list[Failure] = []
            with boundary(FailureKind.INFRASTRUCTURE, Reason.RAISED, own_problem.append):
                yield fresh
            problems = [text for text in all_gather(own_problem[0].message if own_problem else "") if text]
            if problems:
                raise Unavailable(f"{directory} cannot be written: {problems[0]}; is there room on the disk?")
            on_rank_0(opened.close)


def call_and_reply(call: Callable[[], Any]) -> RankReply:
    """Run a call; afield errors are `refused`, all others `broken`."""
    problems: list[Failure] = []
    with boundary(FailureKind.INFRASTRUCTURE, Reason.RAISED, problems.append):
        try:
            return RankReply("done", call())
        except AfieldError as error:
            return RankReply("refused", error=error)
    return RankReply("broken", message=problems[0].message)


def join_group(config: RankConfig) -> torch.device:
    """Initialise torch.distributed; returns the device of this rank."""
    device = torch.device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if config.rank:
        logging.getLogger("afield.trainers").setLevel(logging.ERROR)  # rank 0 logs for all
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{config.meeting}",
        rank=config.rank,
        world_size=config.ranks,
    )
    return device


def main(descriptor: int) -> None:
    """Serve calls from the trainer on a connection until it closes or the rank breaks."""
    with Connection(descriptor) as connection:
        config: RankConfig = pickle.loads(connection.recv_bytes())
        device = join_group(config)
        trainers: list[ShardedGRPO] = []

        def load() -> int | None:
            trainers.append(ShardedGRPO(config.model_path, device=str(device), **config.settings))
            return trainers[0].context

        reply = call_and_reply(load)
        connection.send_bytes(pickle.dumps(reply))
        while reply.kind != "broken" and trainers:
            try:
                method, arguments = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionError):
                break
            reply = call_and_reply(partial(getattr(trainers[0], method), *arguments))
            connection.send_bytes(pickle.dumps(reply))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
