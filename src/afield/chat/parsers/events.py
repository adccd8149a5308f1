"""What a reply is made of, said in no provider's dialect.

A parser emits these as tokens arrive; a dialect's encoder turns them into its own stream. A call that
was started and then turns out to be malformed gets no `ToolEnd`: it is withdrawn, and everything
sampled for it follows as text.
"""

from __future__ import annotations

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
