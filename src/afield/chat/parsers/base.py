"""What a reply is made of, said in no provider's dialect.

A parser emits these as tokens arrive; a dialect's encoder turns them into its own stream. A call that
was started and then turns out to be malformed gets no `ToolEnd`: it is withdrawn, and everything
sampled for it follows as text.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from msgspec import Struct


class TextDelta(Struct, frozen=True, gc=False):
    text: str


class ReasoningDelta(Struct, frozen=True, gc=False):
    text: str


class ToolStart(Struct, frozen=True, gc=False):
    """`id` is the one the model spelled, in formats where it does; the gateway fills in the others."""

    index: int
    name: str
    id: str = ""


class ToolArguments(Struct, frozen=True, gc=False):
    index: int
    text: str


class ToolEnd(Struct, frozen=True, gc=False):
    index: int


Event = TextDelta | ReasoningDelta | ToolStart | ToolArguments | ToolEnd


# --- calls -----------------------------------------------------------------------------------------


class CallState(Enum):
    OPEN = "open"
    CLOSED = "closed"
    BROKEN = "broken"


class CallReader(Protocol):
    """Reads one call."""

    @property
    def status(self) -> CallState: ...

    @property
    def name(self) -> str | None:
        """None until it is known."""
        ...

    @property
    def id(self) -> str:
        """Where the format spells one."""
        ...

    def feed(self, text: str) -> int:
        """How much of the text was taken; the rest comes again, with more behind it."""
        ...

    def take(self) -> str:
        """The text of the arguments since the last time; nothing before the name is known."""
        ...


def matches(text: str, at: int, literal: str) -> bool | None:
    """Whether the literal stands there; None while the text ends too early to tell."""
    if text.startswith(literal, at):
        return True
    return None if len(text) - at < len(literal) and literal.startswith(text[at:]) else False


def partial(text: str, marker: str) -> int:
    """How many characters at the end of the text may be the beginning of the marker."""
    for n in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-n:]):
            return n
    return 0
