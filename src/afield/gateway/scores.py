"""Log-probabilities that a client asked for besides those of the sampled tokens, kept with the turn.

They are stored so that an answer that is given again, or fetched later, has them too. Calls that do not ask
for them have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from afield.chat import Event, TextDelta
from afield.interfaces.engine import TopLogprobs


class Scores(Struct, frozen=True, kw_only=True):
    count: int = 0
    """How many of the likeliest tokens were asked for at each place."""
    top: tuple[TopLogprobs, ...] = ()
    """The likeliest tokens at the place of each sampled one; empty if none were asked for."""
    prompt_count: int | None = None
    prompt: tuple[TopLogprobs, ...] | None = None
    """Of each token of the prompt its own and then the likeliest ones; the first has none."""
    spoken: tuple[int, ...] | None = None
    """Which of the sampled tokens are text of the reply, where that was asked for."""

    def answers(self, count: int, prompt_count: int | None, spoken: bool) -> bool:
        """Whether they are what another request asks for."""
        if prompt_count is not None and (self.prompt_count is None or self.prompt_count < prompt_count):
            return False
        return self.count >= count and (self.spoken is not None or not spoken)


class Spoken:
    """Tells which tokens are text of the reply, rather than reasoning, calls or markers."""

    def __init__(self, size: Callable[[int], int]) -> None:
        """`size` is how many bytes of text a token stands for."""
        self._size = size
        self._open: list[tuple[int, int]] = []
        self._fed = 0
        self.all: list[int] = []

    def feed(self, token: int, events: Sequence[Event]) -> tuple[int, ...]:
        """The places of the tokens whose text these events tell, after one more token."""
        self._open.append((self._fed, self._size(token)))
        self._fed += 1
        return self.tell(events)

    def tell(self, events: Sequence[Event]) -> tuple[int, ...]:
        if not events:
            return ()
        left = sum(len(event.text.encode()) for event in events if isinstance(event, TextDelta))
        told: list[int] = []
        while self._open and left > 0:
            place, size = self._open.pop()
            if size:
                told.append(place)
                left -= size
        self._open.clear()
        told.reverse()
        self.all += told
        return tuple(told)
