"""Sharded checkpoints of weights and optimizer state (torch.distributed.checkpoint).

Every rank writes and reads its own shards. A checkpoint may be read by another number of ranks, and by a
single process. Tensors are named `model.NAME` and `optimizer.NUMBER.NAME`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from afield.errors import DamagedFile, UsageError, boundary
from afield.types import Failure, FailureKind, Reason

SHARDS = "shards"
"""Directory of the shards in a checkpoint."""


def flat_state(model: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Trained tensors and optimizer state, by name in the checkpoint."""
    moments = {
        f"optimizer.{number}.{name}": value
        for number, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }
    return {**{f"model.{name}": tensor for name, tensor in model.items()}, **moments}


def save_shards(state: dict[str, Tensor], directory: Path, group: Any = None) -> None:
    """Write the shards of this rank; every rank of `group` calls it."""
    with _os_errors():
        save(state, storage_writer=_writer(directory), process_group=group, no_dist=group is None)


def begin_save_shards(state: dict[str, Tensor], directory: Path, group: Any) -> Callable[[], None]:
    """Copy the tensors and write them in a thread; the returned function waits for its end.

    `group` must be used for nothing else, since its collectives run beside those of training.
    """
    future = cast(Any, async_save(state, storage_writer=_writer(directory), process_group=group))

    def wait() -> None:
        with _os_errors():
            future.result()

    return wait


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raise OSError for torch's CheckpointException, which is no Exception."""
    try:
        yield
    except CheckpointException as error:
        causes = [f"rank {rank}: {cause[0]}" for rank, cause in error.failures.items()]
        raise OSError(causes[0] if causes else str(error)) from error


def _writer(directory: Path) -> FileSystemWriter:
    # `durable` runs flush the whole checkpoint before it gets its name.
    return FileSystemWriter(directory / SHARDS, sync_files=False)


def has_shards(directory: Path) -> bool:
    return (directory / SHARDS).is_dir()


def load_shards(
    directory: Path,
    model: Mapping[str, Tensor],
    parameters: list[torch.nn.Parameter],
    group: Any = None,
) -> dict[int, dict[str, Tensor]]:
    """Read the trained tensors into `model`, in place; returns the optimizer's state by parameter.

    Names and shapes are checked before anything changes.
    """
    sizes = _sizes(directory)
    _check(directory, {f"model.{name}": tensor for name, tensor in model.items()}, sizes)
    moments: dict[int, dict[str, Tensor]] = {}
    for name in sizes:
        if name.startswith("optimizer."):
            number, part = name.removeprefix("optimizer.").split(".", 1)
            parameter = parameters[int(number)]
            whole = tuple(sizes[name]) == tuple(parameter.shape)
            empty = torch.zeros_like(parameter) if whole else torch.zeros(tuple(sizes[name]))
            moments.setdefault(int(number), {})[part] = empty.detach()
    state: dict[str, Any] = {f"model.{name}": tensor for name, tensor in model.items()}
    state |= {f"optimizer.{n}.{part}": t for n, parts in moments.items() for part, t in parts.items()}
    problems: list[Failure] = []
    with (
        boundary(FailureKind.INFRASTRUCTURE, Reason.RAISED, problems.append),
        torch.no_grad(),
        warnings.catch_warnings(),
        _os_errors(),
    ):
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        reader = FileSystemReader(directory / SHARDS)
        load(state, storage_reader=reader, process_group=group, no_dist=group is None)
    if problems:
        raise DamagedFile(f"{directory / SHARDS} cannot be read: {problems[0].message}")
    return moments


def _sizes(directory: Path) -> dict[str, torch.Size]:
    problems: list[Failure] = []
    with boundary(FailureKind.INFRASTRUCTURE, Reason.RAISED, problems.append):
        entries = FileSystemReader(directory / SHARDS).read_metadata().state_dict_metadata
        return {name: e.size for name, e in entries.items() if isinstance(e, TensorStorageMetadata)}
    raise DamagedFile(f"{directory / SHARDS} cannot be read: {problems[0].message}")


def _check(directory: Path, own: Mapping[str, Tensor], sizes: Mapping[str, torch.Size]) -> None:
    saved = {name for name in sizes if name.startswith("model.")}
    if wrong := sorted(own.keys() ^ saved):
        raise UsageError(
            f"{directory}: the checkpoint and the model differ in the tensor"
            f" {wrong[0].removeprefix('model.')!r}; resume with the model and adapters it was saved with"
        )
    for name, tensor in own.items():
        if tuple(sizes[name]) != tuple(tensor.shape):
            raise UsageError(
                f"{directory}: the checkpoint has {list(sizes[name])} for {name.removeprefix('model.')!r},"
                f" the model {list(tensor.shape)}; resume with the model it was saved with"
            )
