"""Side calls: what harnesses ask besides their work (titles, quota probes, small models).

They are recorded like any other call and tagged here; a session that also did some work keeps them out
of its loss, unless it was opened with `side_calls: train`. The tag names its reason.
"""

from __future__ import annotations

import re

from afield.gateway.request import ModelRequest
from afield.types import Turn, TurnStatus

SIDE = "side:"
_SMALL = re.compile(r"haiku|mini\b|nano|small|lite\b|flash", re.IGNORECASE)
_TITLE = re.compile(
    r"\b(title|topic|commit message|summari[sz]e this (coding )?conversation)\b", re.IGNORECASE
)
_HEAD = 600  # characters of an instruction that say what it is about


def tags(request: ModelRequest, policy: str) -> tuple[str, ...]:
    """At most one tag, the strongest reason first."""
    if request.max_tokens == 1 and request.prompt is None:
        return (f"{SIDE}probe",)
    if request.model != policy and _SMALL.search(request.model.rpartition("/")[2]):
        return (f"{SIDE}small-model",)
    if request.messages and not request.tools and _asks_for_a_title(request):
        return (f"{SIDE}title",)
    return ()


def _asks_for_a_title(request: ModelRequest) -> bool:
    if any(message.role in ("assistant", "tool") for message in request.messages):
        return False
    head = request.messages[0]
    return head.role == "system" and bool(_TITLE.search(head.content[:_HEAD]))


def is_side(turn: Turn) -> bool:
    return any(tag.startswith(SIDE) for tag in turn.tags)


def withheld(turns: list[Turn]) -> dict[str, str]:
    """Which turns are side calls of a session that did something else as well."""
    committed = [turn for turn in turns if turn.status is TurnStatus.COMMITTED]
    if all(is_side(turn) for turn in committed):
        return {}
    return {
        turn.id: next(tag for tag in turn.tags if tag.startswith(SIDE)) for turn in committed if is_side(turn)
    }
