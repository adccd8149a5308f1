"""Scenario of a conformance run: the model's replies and the network faults.

1. The last marker in a request, such as `[at main-3]`, identifies the step of its thread. Markers come from
   the output of tools that really ran, from a sub-agent's reply or from a summary, so the order in which
   threads send requests does not matter.
2. A repeated request gets the same text in other tokens.
3. Requests whose new messages contain a certain phrase (titles, summaries) are asides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct

MARKER = re.compile(r"\[at ([a-z]+-\d+)\]")
BESIDE = "Beside"  # thread of the first of two parallel calls; not a marker, so the second call counts
ABORTED = "aborted"  # exclusion reason of a call whose connection was cut
ABANDONED = "abandoned"  # exclusion reason of a lost reply that the client requested again
LONG = (
    "This takes a while to say, because the connection is going to break before it is said: first a few"
    " words in plain letters, then some that are not (naïve café, 北京 を見る, ☂ 🚲), and then again the same"
    " thought once more, so that there is enough of it on the way when the line goes dead. After that the"
    " client asks again, and hears it from the beginning, in the same words and in other tokens than before."
)


def marker(thread: str, step: int) -> str:
    """Marker of a step of a thread."""
    return bracketed(f"{thread}-{step}")


def bracketed(where: str) -> str:
    """Marker with this content."""
    return f"[at {where}]"


def shell(thread: str, step: int) -> str:
    """Shell command that prints the marker but does not contain it."""
    return f"printf '[at %s-%d]\\n' {thread} {step}"


def last_marker(text: str) -> str | None:
    """Content of the last marker in a text; None without one."""
    markers = MARKER.findall(text)
    return markers[-1] if markers else None


class ToolUse(Struct, frozen=True):
    """Tool call of the model."""

    name: str
    """Name of the tool."""
    arguments: dict[str, Any]
    """Arguments of the call."""


class ModelReply(Struct, frozen=True, kw_only=True):
    """Reply of the scripted model."""

    text: str = ""
    """Text; empty for none."""
    reasoning: str = ""
    """Reasoning; empty for none."""
    uses: tuple[ToolUse, ...] = ()
    """Tool calls in order."""


Answer = ModelReply | Callable[[str], ModelReply]
"""Reply, or a function from the prompt for replies that quote it."""


class NetworkFault(StrEnum):
    """Fault of one request, injected once."""

    REFUSE = "refuse"
    """HTTP 500 before the gateway sees the request."""
    CUT = "cut"
    """The connection breaks while the model is sampling."""
    LOSE = "lose"
    """The connection breaks after the gateway has delivered the response."""


FAULTS = {"main-3": NetworkFault.REFUSE, "main-4": NetworkFault.LOSE, "main-5": NetworkFault.CUT}
LEFT_OUT = {ABORTED: ("main-5",), ABANDONED: ("main-4",)}


class Scenario(Struct, frozen=True, kw_only=True):
    """Script of one client run."""

    replies: Mapping[str, Answer]
    """Replies by the marker of the request."""
    faults: Mapping[str, NetworkFault]
    """Network faults by the marker of the request."""
    branches: int
    """Expected number of committed leaves of the turn tree."""
    asides: Mapping[str, Answer] = {}
    """Replies to requests whose new messages contain a phrase, by phrase."""
    excluded: Mapping[str, tuple[str, ...]] = {}
    """Calls that may be excluded from training: markers or phrases by reason, one call each."""
    clean: bool = False
    """Whether a broken stream ends without its last events instead of resetting the connection."""

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.faults) - set(self.replies)):
            raise ValueError(f"faults at {unknown}, where nothing is said; known: {sorted(self.replies)}")


def steps(
    use: Callable[[str, int], ToolUse],
    *,
    last: int = 9,
    branches: int = 1,
    parallel: bool = True,
    instead: Mapping[str, Answer] | None = None,
    asides: Mapping[str, Answer] | None = None,
    faults: Mapping[str, NetworkFault] | None = None,
    excluded: Mapping[str, tuple[str, ...]] = LEFT_OUT,
    clean: bool = False,
) -> Scenario:
    """Common scenario: one tool call per step up to `last`.

    By default the first turn makes two parallel calls, step 3 fails with a 500, step 4 loses its response,
    and the connection is cut at step 5.

    Args:
        use: function from thread and step to a tool call whose result contains the marker of that step.
        last: number of the last step.
        branches: expected number of committed leaves of the turn tree.
        parallel: whether the first turn makes two parallel calls.
        instead: replies that replace or extend the common ones, by marker.
        asides: replies to requests that contain a phrase, by phrase.
        faults: network faults by marker; None for the common ones.
        excluded: calls that may be excluded from training; by default the lost and the cut one.
        clean: see `Scenario.clean`.
    """
    replies: dict[str, Answer] = {}
    for n in range(last):
        text = LONG if n == 5 else "" if n % 3 == 2 else f"Step {n} is done – on to the next, naïvely ☂."
        thought = f"What comes after {n}? Number {n + 1}, 当然." if n % 3 == 1 else ""
        uses = (use(BESIDE, n + 1), use("main", n + 1)) if parallel and n == 0 else (use("main", n + 1),)
        replies[f"main-{n}"] = ModelReply(text=text, reasoning=thought, uses=uses)
    replies[f"main-{last}"] = ModelReply(text="All steps are done. ✓")
    return Scenario(
        replies=replies | dict(instead or {}),
        faults=faults if faults is not None else FAULTS,
        branches=branches,
        asides=asides or {},
        excluded=excluded,
        clean=clean,
    )
