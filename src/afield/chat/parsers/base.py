"""Reply events and the interface of tool-call readers.

A parser emits events as tokens arrive; a dialect's encoder turns them into its own stream. A call that turns
out malformed gets no `ToolEnd`: it is withdrawn, and everything sampled for it follows as text.
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
    """Start of a call. `id` is set in formats where the model writes one; the gateway fills in the others."""

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
    """Incremental reader of one tool call."""

    @property
    def status(self) -> CallState: ...

    @property
    def name(self) -> str | None:
        """Name of the function; None until it is complete."""
        ...

    @property
    def id(self) -> str:
        """Call id, in formats where the model writes one; else empty."""
        ...

    def feed(self, text: str) -> int:
        """Number of characters taken; the rest comes again with more text."""
        ...

    def take(self) -> str:
        """Text of the arguments since the last call; empty before the name is complete."""
        ...


def matches(text: str, at: int, literal: str) -> bool | None:
    """Whether the text has the literal at `at`; None if the text ends too early to tell."""
    if text.startswith(literal, at):
        return True
    return None if len(text) - at < len(literal) and literal.startswith(text[at:]) else False


def partial(text: str, marker: str) -> int:
    """Number of characters at the end of the text that may begin the marker."""
    for n in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-n:]):
            return n
    return 0
