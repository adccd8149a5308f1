"""Caches of decoded and recognised conversations, per session.

Clients send the whole conversation with every request. `MessageCache` decodes only the bytes after a
known prefix; `ConversationCache` recognises echoed replies only in new messages. Both give the same
result as a full read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct

from afield.gateway.echoed_turns import match_replies, moved, recognise_replies, turn_of
from afield.turn_tree import TurnTree
from afield.types import Message

CONVERSATIONS = 3
"""Conversations in a cache; a harness and its sub-agents alternate."""


class ReadConversation(Struct, frozen=True):
    """A conversation as sent and as recognised, with a digest per prefix."""

    root: str
    """Root of the conversation."""
    came: tuple[Message, ...]
    """Messages as sent."""
    messages: tuple[Message, ...]
    """Messages with recognised replies."""
    digests: list[str]
    """Digest per prefix."""


class ConversationCache:
    """Recognised conversations of a session."""

    def __init__(self) -> None:
        self._read: deque[ReadConversation] = deque(maxlen=CONVERSATIONS)

    def read(
        self, tree: TurnTree, root: str, messages_in: tuple[Message, ...]
    ) -> tuple[tuple[Message, ...], Sequence[str]]:
        """Returns the messages with recognised replies, and their digests."""
        shares = [(_shared(tree, read, root, messages_in), read) for read in self._read]
        shared, cached = max(shares, key=lambda pair: pair[0], default=(0, None))
        if cached is None or not shared:
            messages, digests = match_replies(tree, root, recognise_replies(tree, messages_in))
            read = ReadConversation(root, messages_in, messages, digests)
        else:
            digests = cached.digests[:shared]
            new, more = match_replies(tree, digests[-1], recognise_replies(tree, messages_in[shared:]))
            read = ReadConversation(root, messages_in, cached.messages[:shared] + new, digests + more)
            self._read.remove(cached)
        self._read.append(read)
        return read.messages, read.digests


def _shared(tree: TurnTree, read: ReadConversation, root: str, messages: tuple[Message, ...]) -> int:
    """Returns how many leading messages a cached conversation covers."""
    if read.root != root or len(read.came) != len(read.messages):
        return 0
    length = min(len(messages), len(read.came))
    if messages[:length] != read.came[:length]:
        pairs = enumerate(zip(messages, read.came, strict=False))
        length = next(n for n, (new, old) in pairs if new is not old and new != old)
    # A turn and its results are recognised together.
    while length and length < len(messages) and messages[length].role == "tool":
        length -= 1
    if length == len(messages):
        return length
    return length if messages[length].role != "assistant" or _begins(tree, messages, length) else 0


def _begins(tree: TurnTree, messages: tuple[Message, ...], index: int) -> bool:
    """Returns whether an assistant message is the first of its turn."""
    if index == 0 or messages[index - 1].role != "tool":
        return index == 0 or messages[index - 1].role != "assistant"
    before = next((m for m in reversed(messages[:index]) if m.role == "assistant"), None)
    turn, owner = turn_of(tree, messages[index]), before and turn_of(tree, before)
    if owner is not None and turn is None:
        return not moved(tree, owner, messages[index])
    return turn is None or owner is not turn


COMMA = ord(",")
Messages = tuple[Message, ...]


class MessageCache:
    """Decoded messages of a session, by the bytes that were sent."""

    def __init__(self) -> None:
        self._read: deque[tuple[bytes, Messages]] = deque(maxlen=CONVERSATIONS)

    def read(self, raw: bytes, decode: Callable[[bytes, int], Messages]) -> Messages:
        """Decodes a JSON array of messages. `decode` gets the bytes and the index of the first message."""
        for entry in self._read:
            cached, messages = entry
            if len(raw) > len(cached) and raw[len(cached) - 1] == COMMA and raw.startswith(cached[:-1]):
                messages += decode(b"[" + raw[len(cached) :], len(messages))
                self._read.remove(entry)
                break
        else:
            messages = decode(raw, 0)
        self._read.append((raw, messages))
        return messages
