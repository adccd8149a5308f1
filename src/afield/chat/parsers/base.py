"""Reply events and the interface of tool-call readers.

A parser emits events as tokens arrive; a dialect's encoder converts them to its own stream. A call is
reported when it is complete; a malformed one is text, exactly as sampled.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from msgspec import Struct


class TextDelta(Struct, frozen=True, gc=False):
    """New text of the reply."""

    text: str
    """Text to append."""


class ReasoningDelta(Struct, frozen=True, gc=False):
    """New reasoning text of the reply."""

    text: str
    """Text to append."""


class ToolStart(Struct, frozen=True, gc=False):
    """Start of a tool call."""

    index: int
    """Number of the call in the reply, from 0."""
    name: str
    """Name of the function."""
    id: str = ""
    """Call id, in formats where the model writes one; empty otherwise, and the gateway adds one."""


class ToolArguments(Struct, frozen=True, gc=False):
    """New text of a call's arguments."""

    index: int
    """Number of the call in the reply, from 0."""
    text: str
    """Text to append."""


class ToolEnd(Struct, frozen=True, gc=False):
    """End of a well-formed tool call."""

    index: int
    """Number of the call in the reply, from 0."""


Event = TextDelta | ReasoningDelta | ToolStart | ToolArguments | ToolEnd


# --- calls -----------------------------------------------------------------------------------------


class CallState(Enum):
    """State of a call reader."""

    OPEN = "open"
    """The call is incomplete."""
    CLOSED = "closed"
    """The call is complete and well-formed."""
    BROKEN = "broken"
    """The text is not a call."""


class CallReader(Protocol):
    """Incremental reader of one tool call."""

    @property
    def status(self) -> CallState:
        """State of the call."""
        ...

    @property
    def name(self) -> str | None:
        """Name of the function; None until it is complete."""
        ...

    @property
    def id(self) -> str:
        """Call id, in formats where the model writes one; else empty."""
        ...

    def feed(self, text: str) -> int:
        """Read text; returns the number of characters consumed. The caller passes the rest again."""
        ...

    @property
    def arguments(self) -> str:
        """Arguments of a complete call, as JSON."""
        ...


def matches(text: str, at: int, literal: str) -> bool | None:
    """Whether `text` has the literal at `at`; None if it ends before that is decided."""
    if text.startswith(literal, at):
        return True
    return None if len(text) - at < len(literal) and literal.startswith(text[at:]) else False


def partial(text: str, marker: str) -> int:
    """Length of the longest suffix of the text that is a proper prefix of the marker."""
    at = text.find(marker[:1], max(0, len(text) - len(marker) + 1)) if marker else -1
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(marker[0], at + 1)
    return 0
