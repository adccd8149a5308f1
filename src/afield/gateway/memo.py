"""Messages a session's client has sent before, by their bytes: what comes again is not decoded again.

Two generations, the older of which is dropped when the younger is full, so that the memory is bounded
and what is in use stays. It is a memory only: what it does not know is decoded, with the same result.
"""

from __future__ import annotations

from afield.types import Message

FULL = 1024 * 1024  # bytes of a generation


class Memo:
    def __init__(self) -> None:
        self._young: dict[bytes, Message] = {}
        self._old: dict[bytes, Message] = {}
        self._held = 0

    def get(self, raw: bytes) -> Message | None:
        known = self._young.get(raw)
        if known is None and (known := self._old.pop(raw, None)) is not None:
            self.put(raw, known)
        return known

    def put(self, raw: bytes, message: Message) -> None:
        if self._held > FULL:
            self._young, self._old, self._held = {}, self._young, 0
        self._young[raw] = message
        self._held += len(raw)
