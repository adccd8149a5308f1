"""The messages a client has sent before, by their bytes: what comes again is not decoded again.

Clients send their whole conversation with every request, and nearly always byte for byte as the last
time with something behind it. So only what is behind is decoded. It is a memory only: what it does not
know is decoded from the beginning, with the same result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from afield.types import Message

CONVERSATIONS = 3  # a harness and its sub-agents take turns
COMMA = ord(",")
Messages = tuple[Message, ...]


class Memo:
    def __init__(self) -> None:
        self._read: deque[tuple[bytes, Messages]] = deque(maxlen=CONVERSATIONS)

    def read(self, raw: bytes, decode: Callable[[bytes, int], Messages]) -> Messages:
        """The messages of a JSON array; `decode` is told how many came before those it is given."""
        for entry in self._read:
            known, messages = entry
            if len(raw) > len(known) and raw[len(known) - 1] == COMMA and raw.startswith(known[:-1]):
                messages += decode(b"[" + raw[len(known) :], len(messages))
                self._read.remove(entry)
                break
        else:
            messages = decode(raw, 0)
        self._read.append((raw, messages))
        return messages
