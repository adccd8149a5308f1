"""Number of arenas of the C allocator (glibc)."""

from __future__ import annotations

import ctypes
import sys

M_ARENA_MAX = -8


def share_arena() -> None:
    """Have all threads of this process allocate from one arena; call it before threads start.

    By default each thread has an arena of its own, and memory freed in one is not used by the others. A
    process whose worker threads take turns at reading batches then holds a batch per thread: 174 MiB instead
    of 106 in `bench/collect/simulation/memory.py`. Does nothing without glibc.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_ARENA_MAX, 1)
