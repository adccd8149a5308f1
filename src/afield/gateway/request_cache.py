"""What was read before need not be read again.

Clients send the whole conversation with every request, and all of it but the end is what they sent the
last time. A session remembers its latest conversations, as they came and as they were understood, and
takes up where one of them ended: the work is that of the new messages. It is a memory only: what it does
not know is read from the beginning, with the same result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct

from afield.gateway.echoed_turns import match_replies, moved, recognised, turn_of
from afield.turn_tree import TurnTree
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
        self, forest: TurnTree, root: str, came: tuple[Message, ...]
    ) -> tuple[tuple[Message, ...], Sequence[str]]:
        """The messages with our own turns recognised, and their digests."""
        shares = [(_shared(forest, read, root, came), read) for read in self._read]
        shared, known = max(shares, key=lambda pair: pair[0], default=(0, None))
        if known is None or not shared:
            messages, digests = match_replies(forest, root, recognised(forest, came))
            read = Read(root, came, messages, digests)
        else:
            digests = known.digests[:shared]
            new, more = match_replies(forest, digests[-1], recognised(forest, came[shared:]))
            read = Read(root, came, known.messages[:shared] + new, digests + more)
            self._read.remove(known)
        self._read.append(read)
        return read.messages, read.digests


def _shared(forest: TurnTree, read: Read, root: str, came: tuple[Message, ...]) -> int:
    """How many messages at the beginning can be taken from a conversation that was read before."""
    if read.root != root or len(read.came) != len(read.messages):
        return 0
    length = min(len(came), len(read.came))
    if came[:length] != read.came[:length]:
        pairs = enumerate(zip(came, read.came, strict=False))
        length = next(n for n, (mine, theirs) in pairs if mine is not theirs and mine != theirs)
    # Results are put in order with the turn that asked for them, so the two are not taken apart.
    while length and length < len(came) and came[length].role == "tool":
        length -= 1
    if length == len(came):
        return length
    return length if came[length].role != "assistant" or _begins(forest, came, length) else 0


def _begins(forest: TurnTree, came: tuple[Message, ...], at: int) -> bool:
    """Whether an assistant message is the first of its turn."""
    if at == 0 or came[at - 1].role != "tool":
        return at == 0 or came[at - 1].role != "assistant"
    before = next((m for m in reversed(came[:at]) if m.role == "assistant"), None)
    turn, owner = turn_of(forest, came[at]), before and turn_of(forest, before)
    if owner is not None and turn is None:
        return not moved(forest, owner, came[at])
    return turn is None or owner is not turn


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
