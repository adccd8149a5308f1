"""What was read before need not be read again.

Clients send the whole conversation with every request, and all of it but the end is what they sent the
last time. A session remembers its latest conversations, as they came and as they were understood, and
takes up where one of them ended: the work is that of the new messages. It is a memory only: what it does
not know is read from the beginning, with the same result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from afield.forest import Forest, chain
from afield.gateway.echo import recognised
from afield.types import Message

CONVERSATIONS = 3  # a harness and its sub-agents take turns


class Read(Struct, frozen=True):
    """A conversation: as it came, as it was understood, and a digest for each of its prefixes."""

    root: str
    came: tuple[Message, ...]
    messages: tuple[Message, ...]
    digests: list[str]


class Recall:
    def __init__(self) -> None:
        self._read: deque[Read] = deque(maxlen=CONVERSATIONS)

    def read(
        self, forest: Forest, root: str, came: tuple[Message, ...]
    ) -> tuple[tuple[Message, ...], Sequence[str]]:
        """The messages with our own turns recognised, and their digests."""
        known = max((r for r in self._read if _continues(r, root, came)), key=_length, default=None)
        if known is None:
            messages = recognised(forest, came)
            read = Read(root, came, messages, chain(root, messages))
        else:
            new = recognised(forest, came[len(known.came) :])
            digests = known.digests + chain(known.digests[-1], new)
            read = Read(root, came, known.messages + new, digests)
            self._read.remove(known)
        self._read.append(read)
        return read.messages, read.digests


def _length(read: Read) -> int:
    return len(read.came)


def _continues(read: Read, root: str, came: tuple[Message, ...]) -> bool:
    length = len(read.came)
    if read.root != root or not length < len(came) or came[length - 1] != read.came[-1]:
        return False
    # A result behind it may belong to the last turn that was read, which is then put in order anew.
    return came[length].role != "tool" and came[:length] == read.came
