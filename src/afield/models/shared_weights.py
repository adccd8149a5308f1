"""Weight buffers in shared memory: CUDA IPC or memfd.

1. `lay_out` gives each tensor a place; tied tensors share theirs.
2. `SharedBuffer` is the writer's side: it holds the tensors of one version and a token.
3. `opened` is the reader's side: it checks process and token, yields views of the tensors, and checks the
   token again after the reader has copied them.
"""

from __future__ import annotations

import base64
import fcntl
import mmap
import os
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from afield.interfaces.shared_weights import TOKEN_BYTES, CudaHandle, SharedTensor, SharedWeights

ALIGNMENT = 256
"""Bytes to which tensors are aligned."""
NAME = "afield-weights"
"""Name of buffers in CPU memory, which /proc shows."""
DEVICE_ARGUMENT = 6
"""Index of the device among the arguments of `rebuild_cuda_tensor`."""


class SharedMemoryError(Exception):
    """A shared buffer cannot be made, or no longer holds the described weights."""


def lay_out(tensors: Mapping[str, tuple[Tensor, torch.dtype]]) -> tuple[SharedTensor, ...]:
    """Places of tensors, each converted to a dtype. Names of the same tensor get the same place."""
    placed: list[SharedTensor] = []
    places: dict[tuple[int, torch.dtype, torch.Size], int] = {}
    end = 0
    for name, (tensor, dtype) in tensors.items():
        size = tensor.numel() * dtype.itemsize
        key = (_address(tensor), dtype, tensor.shape)
        first = places.setdefault(key, end)
        if first == end:
            end = _aligned(end + size)
        text = str(dtype).removeprefix("torch.")
        placed.append(SharedTensor(name=name, dtype=text, shape=tuple(tensor.shape), first=first, size=size))
    return tuple(placed)


def buffer_size(tensors: Sequence[SharedTensor]) -> int:
    """Bytes of all tensors, aligned."""
    return max((_aligned(tensor.first + tensor.size) for tensor in tensors), default=0)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _address(tensor: Tensor) -> int:
    """Address of a tensor's first element; that of its shard if it is sharded."""
    local: Any = tensor
    return local.to_local().data_ptr() if hasattr(tensor, "to_local") else tensor.data_ptr()


def view(buffer: Tensor, tensor: SharedTensor) -> Tensor:
    """A tensor in a buffer of bytes."""
    part = buffer[tensor.first : tensor.first + tensor.size]
    return part.view(getattr(torch, tensor.dtype)).view(tensor.shape)


class SharedBuffer:
    """Buffer of `size` bytes and a token, on a GPU or in CPU memory, that other processes can open.

    Raises SharedMemoryError where this is not possible.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self.descriptor: int | None = None
        self.cuda: CudaHandle | None = None
        self._arguments: tuple[Any, ...] = ()
        if device.type == "cuda":
            self._allocate_cuda()
        elif device.type == "cpu":
            self._allocate_memory()
        else:
            raise SharedMemoryError(f"device {device} cannot share its memory; use a CPU or CUDA")

    def _allocate_memory(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise SharedMemoryError("this system has no memfd_create; use Linux")
        length, available = self.size + TOKEN_BYTES, available_memory()
        if length > available:  # the kernel would kill a process instead of refusing the buffer
            raise SharedMemoryError(f"a copy of the weights takes {length:,} bytes, {available:,} are free")
        descriptor = None
        try:
            descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, length)
            # Readers map the buffer: its size must not change.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            mapped = mmap.mmap(descriptor, length)
        except OSError as error:
            if descriptor is not None:
                os.close(descriptor)
            raise SharedMemoryError(f"{length:,} bytes of shared memory cannot be had: {error}") from error
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self.bytes = torch.frombuffer(mapped, dtype=torch.uint8)

    def _allocate_cuda(self) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        try:
            self.bytes = torch.empty(self.size + TOKEN_BYTES, dtype=torch.uint8, device=self.device)
            # Once: each repetition would hold another event and reference count.
            reduced: Any = reduce_tensor(self.bytes)[1]
        except RuntimeError as error:  # out of memory, or no IPC (WSL, some containers)
            reason = str(error).partition("\n")[0]
            raise SharedMemoryError(f"the GPU cannot share {self.size:,} bytes: {reason}") from error
        self._arguments = tuple(reduced)
        memory, storage_bytes, storage_offset = reduced[7:10]
        ref_counter, ref_counter_offset, event, event_sync = reduced[11:15]
        self.cuda = CudaHandle(
            memory=memory,
            storage_bytes=storage_bytes,
            storage_offset=storage_offset,
            ref_counter=ref_counter,
            ref_counter_offset=ref_counter_offset,
            event=event,
            event_sync=event_sync,
        )

    def invalidate(self) -> None:
        """Overwrite the token, before the tensors are."""
        self.bytes[self.size :].zero_()

    def seal(self, token: bytes) -> None:
        """Write the token and wait until all is in memory."""
        self.bytes[self.size :].copy_(torch.frombuffer(bytearray(token), dtype=torch.uint8))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def vllm_handles(self, tensors: Sequence[SharedTensor]) -> str:
        """Handles of the tensors for vLLM's endpoint; empty on a CPU.

        vLLM looks up its own GPU. Handles are listed under each GPU that can read this one's memory.
        """
        if self.cuda is None:
            return ""
        readers = readable_from(self.device)
        handles: list[dict[str, tuple[Any, ...]]] = []
        for tensor in tensors:
            dtype = getattr(torch, tensor.dtype)
            arguments = list(self._arguments)
            own = view(self.bytes, tensor)
            arguments[1:4] = tuple(own.shape), own.stride(), own.storage_offset()
            arguments[5] = dtype
            handles.append(dict.fromkeys(readers, tuple(arguments)))
        return base64.b64encode(pickle.dumps(handles)).decode()


def available_memory() -> int:
    """Bytes of this machine's memory that processes can have without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024


def readable_from(device: torch.device) -> list[str]:
    """UUIDs of the visible GPUs that can read the memory of a GPU: itself and its peers."""
    own = device.index if device.index is not None else torch.cuda.current_device()
    numbers = [
        n for n in range(torch.cuda.device_count()) if n == own or torch.cuda.can_device_access_peer(n, own)
    ]
    return [str(torch.cuda.get_device_properties(n).uuid) for n in numbers]


@contextmanager
def opened(shared: SharedWeights, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """The tensors of a shared buffer, to be copied inside the block to `device`.

    Raises SharedMemoryError if the buffer cannot be opened, or does not hold the described weights before the
    block or after it: copies made in the block are then wrong.
    """
    if not shared.is_alive:
        raise SharedMemoryError(f"process {shared.pid} has ended, or runs on another machine")
    if shared.descriptor is not None:
        with _opened_memory(shared) as (buffer, token):
            _check(shared, token())
            yield {tensor.name: view(buffer, tensor) for tensor in shared.tensors}
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            _check(shared, token())
        return
    buffer = _open_cuda(shared, device)
    _check(shared, bytes(buffer[shared.size :].tolist()))
    yield {tensor.name: view(buffer, tensor) for tensor in shared.tensors}
    torch.cuda.synchronize(device)
    _check(shared, bytes(buffer[shared.size :].tolist()))


def _check(shared: SharedWeights, token: bytes) -> None:
    if token != shared.token:
        raise SharedMemoryError(f"the memory of process {shared.pid} holds other weights by now")


@contextmanager
def _opened_memory(shared: SharedWeights) -> Iterator[tuple[Tensor, Callable[[], bytes]]]:
    """The buffer in the memory of another process, and a function that reads its token."""
    path = Path(f"/proc/{shared.pid}/fd/{shared.descriptor}")
    length = shared.size + TOKEN_BYTES
    try:
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):  # noqa: PTH115 (a link to no file)
            raise SharedMemoryError(f"{path} is no buffer of weights")
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise SharedMemoryError(f"{path} cannot be opened: {error}") from error
    try:
        if os.fstat(descriptor).st_size != length:
            raise SharedMemoryError(f"{path} does not have {length:,} bytes")
        # Private, because torch wants memory that it may write; nobody does.
        mapped = mmap.mmap(descriptor, length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        buffer = torch.frombuffer(mapped, dtype=torch.uint8)
        yield buffer, lambda: os.pread(descriptor, TOKEN_BYTES, shared.size)
    finally:
        os.close(descriptor)


def _open_cuda(shared: SharedWeights, device: torch.device) -> Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    cuda = shared.cuda
    if cuda is None or device.type != "cuda":
        raise SharedMemoryError(f"the weights are in GPU memory, the engine is on {device}")
    if shared.pid == os.getpid():
        raise SharedMemoryError("CUDA does not open memory twice in one process")
    number = device.index if device.index is not None else torch.cuda.current_device()
    length = shared.size + TOKEN_BYTES
    try:
        return rebuild_cuda_tensor(
            torch.Tensor,
            torch.Size([length]),
            (1,),
            0,
            torch.UntypedStorage,
            torch.uint8,
            number,
            cuda.memory,
            cuda.storage_bytes,
            cuda.storage_offset,
            False,
            cuda.ref_counter,
            cuda.ref_counter_offset,
            cuda.event,
            cuda.event_sync,
        )
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise SharedMemoryError(f"the memory of process {shared.pid} cannot be opened: {reason}") from error
