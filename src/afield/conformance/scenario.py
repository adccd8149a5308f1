"""Scenario of a conformance run: the model's replies and the network faults.

Every request tells where its thread stands by the last marker in it, `[at main-3]`. The marker comes
out of a tool that was really run (or a sub-agent's answer, or a summary), so a reply is found by what
the request looks like, whatever the order in which threads ask. The same request again gets the same
words in other tokens. Requests whose new messages hold a certain phrase (titles, summaries) are asides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct

MARKER = re.compile(r"\[at ([a-z]+-\d+)\]")
BESIDE = "Beside"  # a thread whose steps are no markers: the second of two parallel calls leads on
ABORTED = "aborted"  # the reason a call that was cut stays untrained
ABANDONED = "abandoned"  # the reason for an answer that was lost, where the client asked again
LONG = (
    "This takes a while to say, because the connection is going to break before it is said: first a few"
    " words in plain letters, then some that are not (naïve café, 北京 を見る, ☂ 🚲), and then again the same"
    " thought once more, so that there is enough of it on the way when the line goes dead. After that the"
    " client asks again, and hears it from the beginning, in the same words and in other tokens than before."
)


def marker(thread: str, step: int) -> str:
    return bracketed(f"{thread}-{step}")


def bracketed(where: str) -> str:
    return f"[at {where}]"


def shell(thread: str, step: int) -> str:
    """A command whose output holds the marker; the command itself does not, and asks nothing of a shell."""
    return f"printf '[at %s-%d]\\n' {thread} {step}"


def last_marker(text: str) -> str | None:
    markers = MARKER.findall(text)
    return markers[-1] if markers else None


class ToolUse(Struct, frozen=True):
    """A tool call the model makes."""

    name: str
    arguments: dict[str, Any]


class ModelReply(Struct, frozen=True, kw_only=True):
    text: str = ""
    reasoning: str = ""
    uses: tuple[ToolUse, ...] = ()


Answer = ModelReply | Callable[[str], ModelReply]  # from the prompt, where the reply has to quote it


class NetworkFault(StrEnum):
    """What happens, once, to the request with a certain marker."""

    REFUSE = "refuse"  # a 500 before any byte
    CUT = "cut"  # the connection breaks while the model is sampling
    LOSE = "lose"  # the answer is complete, and breaks off on its way to the client


FAULTS = {"main-3": NetworkFault.REFUSE, "main-4": NetworkFault.LOSE, "main-5": NetworkFault.CUT}
LEFT_OUT = {ABORTED: ("main-5",), ABANDONED: ("main-4",)}


class Scenario(Struct, frozen=True, kw_only=True):
    """The course of one client."""

    replies: Mapping[str, Answer]
    """What the model says, by the marker of the request."""
    faults: Mapping[str, NetworkFault]
    """What goes wrong, by the marker of the request."""
    branches: int
    """Committed leaves that the forest has in the end."""
    asides: Mapping[str, Answer] = {}
    """What the model says to requests whose new messages hold a phrase."""
    excluded: Mapping[str, tuple[str, ...]] = {}
    """The only calls that may stay untrained: reason to markers or phrases, one call for each."""
    clean: bool = False
    """Whether a broken stream just ends, without its last events, instead of resetting the connection."""

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
    """The common course: step by step to `last`, two calls at once in the first turn, a 500 at the third
    step, a lost answer at the fourth, a cut at the fifth. `use(thread, n)` is a call whose result holds the
    marker of step n. Only the call that is cut and the answer that is lost may stay untrained, unless
    `excluded` says otherwise."""
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
