"""Escape policies: keep message content from becoming control tokens.

1. `escape`, the default, keeps the text. It inserts a break character after the first character of every
   control literal, and where the text and its neighbour in the template could form a literal. The tokenizer
   encodes the pieces between breaks separately.
2. `reject` refuses a text that contains a control literal.
3. `faithful` lets the text become control tokens, as transformers does.

The break is a lone surrogate, which valid text cannot contain; surrogates in the content become U+FFFD.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

BREAK = "\udc00"

POLICIES = ("escape", "faithful", "reject")

_SURROGATE = re.compile("[\ud800-\udfff]")


class Spelled(Exception):
    """A text contains a control literal under the policy `reject`."""

    def __init__(self, literal: str) -> None:
        super().__init__(literal)
        self.literal = literal


class Escape:
    """Escapes control literals in a text.

    Args:
        literals: texts of the control tokens.
        fixed: texts that the template writes around content.
    """

    def __init__(self, literals: Iterable[str], fixed: Iterable[str] = ()) -> None:
        # A literal of one character cannot be broken.
        literals = sorted(literal for literal in literals if len(literal) > 1)
        by_first: dict[str, list[str]] = {}
        for literal in literals:
            by_first.setdefault(literal[0], []).append(re.escape(literal[1:]))
        starts = (f"{re.escape(first)}(?={'|'.join(rests)})" for first, rests in by_first.items())
        self._start = re.compile(f"({'|'.join(starts)})") if by_first else None
        splits = [(literal[:n], literal[n:]) for literal in literals for n in range(1, len(literal))]
        self._beginnings = {beginning for beginning, _ in splits}
        self._longest = max(map(len, self._beginnings), default=0)
        endings = {text[-n:] for text in fixed for n in range(1, self._longest + 1)}
        self._begun = sorted({rest for beginning, rest in splits if beginning in endings})

    def __call__(self, text: str) -> str:
        if not text.isascii():
            text = _SURROGATE.sub("\ufffd", text)
        if self._start is None:
            return text
        if self._start.search(text):
            text = self._start.sub(rf"\1{BREAK}", text)
        return self._head(self._tail(text))

    def _tail(self, text: str) -> str:
        # Templates may strip a text, so its end is the last visible character.
        end = len(text.rstrip())
        for n in range(min(self._longest, end), 0, -1):
            if text[end - n : end] in self._beginnings:
                return text[:end] + BREAK + text[end:]
        return text

    def _head(self, text: str) -> str:
        visible = text.strip()
        if visible and any(visible.startswith(rest) or rest.startswith(visible) for rest in self._begun):
            at = len(text) - len(text.lstrip())
            return text[:at] + BREAK + text[at:]
        return text


def policy(name: str, literals: Iterable[str], fixed: Iterable[str] = ()) -> Callable[[str], str]:
    """Function that escapes, keeps or rejects a text, by the policy's name (`POLICIES`)."""
    if name == "faithful":
        return lambda text: _SURROGATE.sub("\ufffd", text)
    literals = list(literals)
    escape = Escape(literals, fixed)
    if name == "escape" or not literals:
        return escape
    # Longest first, so that the error names the token that the text would have become.
    spelled = re.compile("|".join(map(re.escape, sorted(literals, key=len, reverse=True))))

    def reject(text: str) -> str:
        if match := spelled.search(text):
            raise Spelled(match.group())
        return escape(text)

    return reject
