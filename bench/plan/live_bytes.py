"""Bytes of all tensors that live in a process, and their peak."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class LiveBytes(TorchDispatchMode):
    """Counts storages when an operation returns them and when they are freed, as an allocator does.

    Memory that an operation takes and frees itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were made before."""
        for tensor in tensors:
            self._count(tensor)

    def restart(self) -> None:
        """Forget the peak."""
        self.peak = self.now

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()  # pyright: ignore[reportPrivateUsage]
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.adopt(leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor))
        return result
