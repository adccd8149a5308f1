"""What a store is to a transport: where objects live that are written once.

`sdk.outcomes.Store` is what agents need of it; collectors also open and close it, and are told how it
is best asked. Stores: memory (here), a directory (`sdk.filestore`), S3 (`sdk.s3store`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from afield.sdk import outcomes


class Store(outcomes.Store, Protocol):
    @property
    def threads(self) -> int:
        """How many calls may run at once, each in a thread; 0 when no call ever blocks."""
        ...

    @property
    def page(self) -> int:
        """Keys that one listing request gives; 0 where asking for single keys is always cheaper."""
        ...

    @property
    def foreign(self) -> bool:
        """Whether programs that are not afield's write here, under keys of their own making."""
        ...

    @property
    def address(self) -> Mapping[str, Any]:
        """The fields of `_rollout` that tell an agent of this store."""
        ...

    def open(self) -> None:
        """Check that it can be used; raises UsageError or Unavailable with what to change."""
        ...

    def close(self) -> None: ...


class MemoryStore:
    threads = 0
    page = 0
    foreign = False
    # A name that never resolves: an agent elsewhere fails loudly instead of posting to a stranger.
    address: Mapping[str, Any] = {"outcome_url": "http://memory.invalid"}

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._objects.setdefault(key, data) is data

    def get(self, key: str) -> bytes | None:
        return self._objects.get(key)

    def list(self, prefix: str) -> list[str]:
        return sorted(key for key in self._objects if key.startswith(prefix))
