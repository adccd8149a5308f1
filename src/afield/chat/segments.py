"""Encoding text between control tokens, and remembering it.

A tokenizer cuts a text at its added tokens before it does anything else, so the stretches between them
can be encoded apart: system prompts and tools come again with every request and are encoded once. That
holds unless an added token takes the blanks around it, or a tokenizer treats the beginning of a text in
a way of its own; both are looked at here, and such tokenizers are given whole texts.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import Any

from tokenizers import Tokenizer

REMEMBERED = 4 * 1024 * 1024  # characters
OVERHEAD = 64  # characters' worth of what a short stretch takes besides its text
LONG = 256 * 1024  # characters of a stretch that is not remembered
_TRIALS = ("word", " word", "\nword", "word ", "  two  words\n", "Ä", "\n\n", "1234")


class Segments:
    def __init__(self, tokenizer: Tokenizer, added: Mapping[int, Any]) -> None:
        self._tokenizer = tokenizer
        self._ids = {token.content: n for n, token in added.items()}
        literals = sorted(self._ids, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, literals))})") if literals else None
        self._known: OrderedDict[str, list[int]] = OrderedDict()
        self._held = 0
        self._lock = Lock()
        greedy = any(token.lstrip or token.rstrip or token.single_word for token in added.values())
        if greedy or (self._cut and not self._agrees(literals)):
            self._cut = None

    def encode(self, text: str, into: list[int]) -> None:
        if self._cut is None:
            into.extend(self._whole(text))
            return
        for n, part in enumerate(self._cut.split(text)):
            if n % 2:
                into.append(self._ids[part])
            elif part:
                into.extend(self._stretch(part))

    def _whole(self, text: str) -> list[int]:
        try:
            # The fast one does not work out where in the text each id comes from.
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except BaseException as error:
            # The library panics over very long texts; its PanicException is no Exception.
            if type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"the tokenizer cannot take a text of {len(text)} characters: {error}") from None

    def _stretch(self, text: str) -> list[int]:
        if len(text) > LONG:
            return self._whole(text)
        known = self._known.get(text)
        if known is None:
            known = self._whole(text)
            with self._lock:
                self._remember(text, known)
        return known

    def _remember(self, text: str, ids: list[int]) -> None:
        if text not in self._known:
            self._known[text] = ids
            self._held += len(text) + OVERHEAD
        while self._held > REMEMBERED:
            gone, _ = self._known.popitem(last=False)
            self._held -= len(gone) + OVERHEAD

    def _agrees(self, literals: list[str]) -> bool:
        """Whether cutting changes nothing, for every added token and every kind of neighbour."""
        for n, literal in enumerate(literals[:64]):
            before, after = _TRIALS[n % len(_TRIALS)], _TRIALS[(n // 3) % len(_TRIALS)]
            for text in (f"{before}{literal}{after}", f"{literal}{literal}{before}", literal + after):
                cut: list[int] = []
                self.encode(text, cut)
                if cut != self._whole(text):
                    return False
        return True
