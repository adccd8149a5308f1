"""Sampled ids to a reply, as they come.

Promises: any way of cutting the ids into pieces gives the same events in sum and the same reply; a
character cut between ids is held back until it is whole; stop tokens and other control tokens never
show as text; each id costs the same whatever came before. Markers are found in the text, so a marker
that is one token and one spelled in several are the same.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from afield.chat.parsers.events import Event
from afield.chat.parsers.reply import Reader
from afield.chat.vocabulary import Vocabulary
from afield.types import Message


class Spellings(dict[int, bytes]):
    """What each id shows, looked up once. One for all parsers of a model."""

    def __init__(self, vocab: Vocabulary, hidden: frozenset[int]) -> None:
        self._vocab = vocab
        self._hidden = hidden

    def __missing__(self, id: int) -> bytes:
        piece = self[id] = b"" if id in self._hidden else self._vocab.piece(id)
        return piece


class ReplyParser:
    """Ids in, events out; one per model call."""

    def __init__(self, spellings: Spellings, reader: Reader) -> None:
        self._spell = spellings.__getitem__
        self._reader = reader
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int]) -> list[Event]:
        return self._reader.feed(self._utf8.decode(b"".join(map(self._spell, ids))))

    @property
    def held(self) -> str:
        """Text that no event has told yet, because a marker may follow; it is text if the reply ends here."""
        return self._reader.held

    def size(self, id: int) -> int:
        """How many bytes of text an id stands for."""
        return len(self._spell(id))

    def thought(self, ids: Sequence[int]) -> int:
        """How many of these ids are reasoning: from the first one of it to the one that closes it. A fresh
        parser is used up by this."""
        count = 0
        for token in ids:
            count += self._reader.thinking
            self.feed((token,))
        return count

    def finish(self) -> list[Event]:
        """What was held back. Nothing may be fed afterwards."""
        return self._reader.feed(self._utf8.decode(b"", final=True)) + self._reader.finish()

    @property
    def malformed(self) -> bool:
        """Whether something that began as a call stayed text."""
        return getattr(self._reader, "malformed", False)

    @property
    def reply(self) -> Message:
        """What is known so far; calls appear when they are closed, with the ids their format spells."""
        return self._reader.reply
