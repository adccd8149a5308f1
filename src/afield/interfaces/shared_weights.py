"""Published weights in shared memory, and the file that describes them.

A trainer copies the tensors of a version into one buffer and writes `shared_weights.json` into the
directory of the version. `model.safetensors` follows in the background. The order of changes is fixed:

1. The description appears when the buffer is complete, and is removed before the buffer is overwritten.
2. It is removed only after the weight file is complete: while its trainer lives, a directory has one of both.
3. A token follows the tensors in the buffer. Readers compare it before and after they copy.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec
from msgspec import Struct

from afield.errors import Unavailable, UsageError
from afield.interfaces.weight_probe import WeightProbe
from afield.utils.process_tree import start_time

FILE = "shared_weights.json"
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
TOKEN_BYTES = 16
"""Length of the token behind the tensors."""
FILE_TIMEOUT_S = 600.0
"""Seconds to wait for a weight file that another process writes."""
POLL_S = 0.05
"""Seconds between two looks whether a weight file is complete."""


class SharedTensor(Struct, frozen=True, kw_only=True):
    """Tensor in a shared buffer; tied tensors have the same bytes."""

    name: str
    """Name in the checkpoint."""
    dtype: str
    """Dtype, such as `bfloat16`."""
    shape: tuple[int, ...]
    """Shape."""
    first: int
    """Index of its first byte in the buffer."""
    size: int
    """Number of bytes."""


class CudaHandle(Struct, frozen=True, kw_only=True):
    """CUDA IPC handle of a buffer: the arguments with which torch opens it in another process."""

    memory: bytes
    """Handle of the allocation."""
    storage_bytes: int
    """Size of the buffer's storage in bytes."""
    storage_offset: int
    """Index of the storage's first byte in the allocation."""
    ref_counter: bytes
    """Handle of torch's reference counter."""
    ref_counter_offset: int
    """Index of the reference counter in its file."""
    event: bytes
    """Handle of the event after which the buffer was ready."""
    event_sync: bool
    """Whether the reader has to wait for the event."""


class SharedWeights(Struct, frozen=True, kw_only=True):
    """Description of one version's weights in a buffer."""

    version: int
    """Version of the weights."""
    host: str
    """Machine and process namespace of the trainer; see `this_host`."""
    pid: int
    """Process that holds the buffer."""
    started: str
    """Start time of that process in clock ticks since boot: process ids are used again."""
    token: bytes
    """Random bytes that follow the tensors in the buffer."""
    size: int
    """Bytes of the tensors; the token begins there."""
    tensors: tuple[SharedTensor, ...]
    """Tensors in the buffer."""
    descriptor: int | None = None
    """File descriptor of a buffer in CPU memory; None on a GPU."""
    cuda: CudaHandle | None = None
    """Handle of a buffer in GPU memory; None on a CPU."""
    vllm_handles: str = ""
    """Handles of all tensors as vLLM's endpoint takes them: a pickle in base64; empty on a CPU."""
    probe: WeightProbe | None = None
    """Probe of the weights, until its own file is written."""

    @property
    def is_local(self) -> bool:
        """Whether the process runs on this machine, in this process namespace."""
        return self.host == this_host()

    @property
    def is_alive(self) -> bool:
        """Whether the process can be reached from here and has not ended."""
        return self.is_local and bool(self.started) and start_time(self.pid) == self.started


@cache
def this_host() -> str:
    """Id of this boot of the machine and of the process namespace; empty without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 (a link to no file)
    except OSError:
        return ""


def write_shared_weights(directory: Path, shared: SharedWeights) -> None:
    """Write the description, which makes the buffer readable."""
    partial = directory / f".{FILE}.partial"
    partial.write_bytes(msgspec.json.encode(shared))
    partial.replace(directory / FILE)


def remove_shared_weights(directory: Path) -> None:
    """Remove the description; harmless without one."""
    with suppress(OSError):
        (directory / FILE).unlink()


def read_shared_weights(directory: Path) -> SharedWeights | None:
    """Read the description; None without one, or if it is damaged."""
    try:
        return msgspec.json.decode((directory / FILE).read_bytes(), type=SharedWeights)
    except (OSError, msgspec.MsgspecError):
        return None


def has_weight_file(directory: Path) -> bool:
    """Whether the weights of the directory are complete on disk."""
    return any((directory / name).is_file() for name in WEIGHT_FILES)


def can_be_loaded(directory: Path) -> bool:
    """Whether an engine can load the version: from its files, or from a live process.

    A directory without a description is one that was written as a whole.
    """
    shared = read_shared_weights(directory)
    if shared is None:
        return directory.is_dir()
    return shared.is_alive or has_weight_file(directory)


def pending_file(directory: Path) -> SharedWeights | None:
    """Description of a version whose weight file is still being written; None for any other directory.

    Raises UsageError if its process has ended.
    """
    shared = read_shared_weights(directory)
    if shared is None or has_weight_file(directory):
        return None
    if shared.is_local and not shared.is_alive and not has_weight_file(directory):
        raise UsageError(
            f"{_source(directory, shared)}, which ended before it wrote {WEIGHT_FILES[0]}; resume the run,"
            " which writes it"
        )
    return shared


def overdue(directory: Path, shared: SharedWeights, timeout_s: float) -> Unavailable:
    """Error for a weight file that is not complete after `timeout_s` seconds."""
    return Unavailable(
        f"{_source(directory, shared)}, which has not written {WEIGHT_FILES[0]} for {timeout_s:g} s; is there"
        " room on its disk? Set weight_transfer = disk to write it first"
    )


def _source(directory: Path, shared: SharedWeights) -> str:
    return f"{directory}: version {shared.version} is in the memory of process {shared.pid}"


def wait_for_file(directory: Path, timeout_s: float = FILE_TIMEOUT_S) -> None:
    """Wait until a version that is shared in memory is on disk; returns at once for any other directory.

    Raises UsageError if its process has ended, and Unavailable after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while (shared := pending_file(directory)) is not None:
        if time.monotonic() >= deadline:
            raise overdue(directory, shared, timeout_s)
        time.sleep(POLL_S)
