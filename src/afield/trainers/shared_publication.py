"""Publication of weights in shared memory, with files in the background.

1. `begin` waits for the files of the previous version, removes its description and makes the buffer ready.
2. `put` copies each tensor, `describe` makes the buffer readable, `write_behind` writes files in a thread.
3. `finish` waits for the files. Their errors are raised there, and by the next `begin`.

The files are written from the buffer, so both have the same bits.
"""

from __future__ import annotations

import logging
import os
import secrets
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from afield.errors import UsageError
from afield.interfaces.shared_weights import (
    TOKEN_BYTES,
    SharedTensor,
    SharedWeights,
    has_weight_file,
    read_shared_weights,
    remove_shared_weights,
    this_host,
    write_shared_weights,
)
from afield.interfaces.weight_probe import WeightProbe, write_weight_probe
from afield.models.shared_weights import SharedBuffer, SharedMemoryError, buffer_size, lay_out, view
from afield.trainers.model_directory import WEIGHT_FILE, write_weights, writing
from afield.utils.process_tree import start_time

log = logging.getLogger(__name__)


class BackgroundWriter:
    """Runs one task at a time in a thread; `wait` raises its error."""

    def __init__(self) -> None:
        self._task: Future[None] | None = None

    def start(self, task: Callable[[], None]) -> None:
        """Start a task after the previous one."""
        self.wait()
        thread = ThreadPoolExecutor(1, "afield-publication")
        self._task = thread.submit(task)
        thread.shutdown(wait=False)

    def wait(self) -> None:
        """Wait for the end of the task, if there is one."""
        task, self._task = self._task, None
        if task is not None:
            task.result()


class SharedPublication:
    """Shares the newest version of a trainer's weights in the memory of `device`.

    Without `required`, a lack of shared memory is logged, and `begin` returns False from then on.
    """

    def __init__(self, device: torch.device, *, required: bool = False) -> None:
        self._device, self._required = device, required
        self._buffer: SharedBuffer | None = None
        self._tensors: dict[str, SharedTensor] = {}
        self._written: set[int] = set()
        self._writer = BackgroundWriter()
        self._described: list[Path] = []
        self._impossible = False
        weakref.finalize(self, _withdraw, self._described)

    def begin(self, tensors: Mapping[str, tuple[Tensor, torch.dtype]]) -> bool:
        """Prepare the buffer for these tensors and their dtypes; False if they cannot be shared."""
        if self._impossible:
            return False
        self.finish()
        _withdraw(self._described)
        placed = lay_out(tensors)
        try:
            self._prepare(buffer_size(placed))
        except SharedMemoryError as error:
            if self._required:
                raise UsageError(
                    f"weight_transfer = memory: {error}; free memory, or set weight_transfer = disk"
                ) from error
            log.warning("weights are published on disk: %s", error)
            self._impossible = True
            return False
        self._tensors = {tensor.name: tensor for tensor in placed}
        self._written.clear()
        return True

    def _prepare(self, size: int) -> None:
        if not this_host():
            raise SharedMemoryError("this system has no /proc")
        if self._buffer is None or self._buffer.size != size:
            self._buffer = None  # frees its memory first
            self._buffer = SharedBuffer(size, self._device)
        self._buffer.invalidate()

    def put(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor into the buffer; the names of a tied one are copied once."""
        assert self._buffer is not None
        place = self._tensors[name]
        if place.first in self._written and place.size:
            return
        self._written.add(place.first)
        view(self._buffer.bytes, place).copy_(tensor.detach())

    def describe(self, directory: Path, version: int, probe: WeightProbe) -> None:
        """Write the description of a complete buffer into the directory of the version."""
        buffer, tensors = self._buffer, tuple(self._tensors.values())
        assert buffer is not None
        token = secrets.token_bytes(TOKEN_BYTES)
        buffer.seal(token)
        shared = SharedWeights(
            version=version,
            host=this_host(),
            pid=os.getpid(),
            started=start_time(os.getpid()),
            token=token,
            size=buffer.size,
            tensors=tensors,
            descriptor=buffer.descriptor,
            cuda=buffer.cuda,
            vllm_handles=buffer.vllm_handles(tensors),
            probe=probe,
        )
        write_shared_weights(directory, shared)

    def write_behind(self, directory: Path, probe: WeightProbe) -> None:
        """Write weight file and probe of a described version in a thread."""
        buffer, tensors = self._buffer, tuple(self._tensors.values())
        assert buffer is not None
        self._described.append(directory)
        self._writer.start(lambda: _write(directory, buffer, tensors, probe))

    def holds(self, directory: Path) -> bool:
        """Whether the version in this directory is the one in the buffer."""
        return directory in self._described

    def finish(self) -> None:
        """Wait until the files of the newest version are complete; raises Unavailable if they cannot be
        written."""
        self._writer.wait()


def _write(
    directory: Path, buffer: SharedBuffer, tensors: tuple[SharedTensor, ...], probe: WeightProbe
) -> None:
    partial = directory / f".{WEIGHT_FILE}.partial"
    # A stream of its own: copies run beside the next training step.
    stream = torch.cuda.stream(torch.cuda.Stream(buffer.device)) if buffer.device.type == "cuda" else None
    with writing(directory):
        with stream or nullcontext():
            state = {tensor.name: view(buffer.bytes, tensor).cpu() for tensor in tensors}
        write_weights(partial, state)
        partial.replace(directory / WEIGHT_FILE)
        write_weight_probe(directory, probe)


def _withdraw(described: list[Path]) -> None:
    """Remove this process's descriptions of versions that are on disk."""
    for directory in described:
        shared = read_shared_weights(directory)
        if shared is not None and shared.pid == os.getpid() and has_weight_file(directory):
            remove_shared_weights(directory)
    described.clear()
