"""The token forest of one session: which turn descends from which (pure, in memory).

A turn is added once and never changes. A request finds its place by content: `chain` gives one
digest per prefix of its messages, and `find` the deepest turn whose conversation is such a prefix.
Clients re-serialise what they echo, so messages are compared in a canonical form: tool arguments as
JSON values, null, "" and absent content alike, text trimmed, provider ids and reasoning ignored.
Nothing is overwritten: what matches nothing starts a new root, what matches in the middle a branch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Container, Iterable, Sequence
from functools import lru_cache
from itertools import islice

from afield.types import Message, Turn, TurnStatus

_KEPT = 2
_RESPONSE = re.compile(r".*[-_](t\d+)")  # the id of a response ends with the turn's
_DIGITS = 9  # of a call's number; no session has more calls


def turn_named(name: str, known: Container[str], answered: Sequence[str]) -> str | None:
    """The id of the turn that this names: by its id, by that of the response to it, or by the number of the
    answered call, from 0. None if there is none.
    """
    if name in known:
        return name
    if (n := call_number(name)) is not None:
        return answered[n] if n < len(answered) else None
    found = _RESPONSE.fullmatch(name)
    return found[1] if found and found[1] in known else None


def call_number(name: str) -> int | None:
    return int(name) if name.isdecimal() and len(name) <= _DIGITS else None


def listed(turns: Sequence[str]) -> str:
    """Ids of turns, for people to read."""
    return ", ".join(turns[:8]) + (", ..." if len(turns) > 8 else "") or "none"


class TurnTree:
    def __init__(self, turns: Iterable[Turn] = ()) -> None:
        self._turns: dict[str, Turn] = {}
        self._by_digest: dict[str, list[str]] = {}
        self._by_request: dict[str, list[str]] = {}
        self._by_call: dict[str, str] = {}
        self._parents: set[str] = set()
        self._roots: list[Turn] = []
        self._prompts: dict[str, tuple[int, ...]] = {}  # of the latest turns; see `keep`
        self.pictured = False
        self._lengths: dict[str, int] = {}
        for turn in turns:
            self.add(turn)

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, turn_id: str) -> bool:
        return turn_id in self._turns

    def __getitem__(self, turn_id: str) -> Turn:
        return self._turns[turn_id]

    @property
    def turns(self) -> list[Turn]:
        """In the order they were committed."""
        return list(self._turns.values())

    def latest(self, count: int) -> Iterable[Turn]:
        """The last ones to be committed, the very last first."""
        return islice(reversed(self._turns.values()), count)

    @property
    def roots(self) -> Iterable[Turn]:
        return self._roots

    def add(self, turn: Turn) -> None:
        """Take a turn in. Adding the same turn again is harmless; another one under its id is an error."""
        known = self._turns.get(turn.id)
        if known == turn:
            return
        if known is not None:
            raise ValueError(f"turn {turn.id} is already there and differs; turns are never edited")
        length = len(turn.delta_ids) + len(turn.token_ids)
        if turn.parent is None:
            self._roots.append(turn)
        else:
            parent = self._turns.get(turn.parent)
            if parent is None:
                raise ValueError(f"turn {turn.id} names an unknown parent {turn.parent}")
            if parent.root != turn.root:
                raise ValueError(f"turn {turn.id} has root {turn.root}, its parent {parent.root}")
            length += self._lengths[parent.id]
            self._parents.add(parent.id)
        self.pictured |= bool(turn.sent_ids)
        self._turns[turn.id] = turn
        self._lengths[turn.id] = length
        self._by_request.setdefault(turn.request_digest, []).append(turn.id)
        if turn.status is TurnStatus.COMMITTED:
            self._by_digest.setdefault(turn.digest, []).append(turn.id)
            for call in turn.messages[-1].tool_calls if turn.messages else ():
                # An id that models spell themselves and spell twice names nobody.
                self._by_call[call.id] = turn.id if self._by_call.get(call.id, turn.id) == turn.id else ""

    def path(self, turn_id: str) -> list[Turn]:
        """From the root to this turn."""
        path = [self._turns[turn_id]]
        while (parent := path[-1].parent) is not None:
            path.append(self._turns[parent])
        return path[::-1]

    def ids(self, turn_id: str, more: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Everything the engine saw and sampled up to the end of this turn; and `more` behind it."""
        turn = self._turns[turn_id]
        if (prompt := self._prompts.get(turn_id)) is not None:
            return prompt + (turn.token_ids + more)
        if (tip := next((tip for tip in self._prompts if self._above(turn_id, tip)), None)) is not None:
            return self._prompts[tip][: self._lengths[turn_id]] + more
        ids = list[int]()
        for step in self.path(turn_id):
            ids.extend(step.delta_ids)
            ids.extend(step.token_ids)
        ids.extend(more)
        return tuple(ids)

    def kept(self, turn_id: str) -> tuple[int, ...]:
        """The prompt of a turn, if it was kept: the same object."""
        return self._prompts.get(turn_id, ())

    def keep(self, turn_id: str, prompt: tuple[int, ...]) -> None:
        """Remember the prompt of a turn whose conversation is likely to go on."""
        self._prompts[turn_id] = prompt
        if len(self._prompts) > _KEPT:
            del self._prompts[next(iter(self._prompts))]

    def _above(self, turn_id: str, tip: str) -> bool:
        """Whether a turn is on the way to a tip."""
        at: str | None = tip
        while at is not None and at != turn_id and self._lengths[at] > self._lengths[turn_id]:
            at = self._turns[at].parent
        return at == turn_id

    def sent(self, turn_id: str) -> list[int]:
        """The same as it goes to an engine, which expands images itself."""
        ids: list[int] = []
        for turn in self.path(turn_id):
            ids.extend(turn.sent_ids or turn.delta_ids)
            ids.extend(turn.token_ids)
        return ids

    def sampled(self, turn_id: str) -> list[tuple[int, int]]:
        """Where in `sent` the tokens lie that were sampled, from and to, in order."""
        spans: list[tuple[int, int]] = []
        end = 0
        for turn in self.path(turn_id):
            start = end + len(turn.sent_ids or turn.delta_ids)
            end = start + len(turn.token_ids)
            spans.append((start, end))
        return spans

    def length(self, turn_id: str) -> int:
        return self._lengths[turn_id]

    def knows(self, digest: str) -> bool:
        """Whether a turn ends a conversation with this digest."""
        return digest in self._by_digest

    def asked(self, digest: str) -> list[Turn]:
        """The turns, of any status, that answered this conversation."""
        return [self._turns[turn_id] for turn_id in self._by_request.get(digest, ())]

    def caller(self, call_id: str) -> Turn | None:
        """The turn that made a tool call."""
        turn_id = self._by_call.get(call_id)
        return self._turns[turn_id] if turn_id else None

    def has_children(self, turn_id: str) -> bool:
        return turn_id in self._parents

    def find(
        self,
        digests: Sequence[str],
        hints: Iterable[str] = (),
        missed: frozenset[str] = frozenset(),
        messages: Sequence[Message] = (),
        apart: Callable[[str], bool] = lambda _: False,
        again: Container[str] = (),
    ) -> tuple[int, Turn] | None:
        """The deepest turn whose conversation is a prefix of the request, and how many messages it covers.

        Twins sampled the same words. A hint (a turn id the client echoed) tells them apart, wherever
        it is on the path, and so do the client's own threads (`apart`: a turn is of another one) and
        reasoning that `messages` repeat. Without any the latest twin is taken that was not `missed` by its
        client and that nothing continues yet: of two clients that got the same words, each has its own. The
        retry of a call that broke off, or whose answer may be given `again`, goes on from the twin that
        the call went on from.
        """
        for depth in range(len(digests), 0, -1):
            if twins := self._by_digest.get(digests[depth - 1]):
                if len(twins) > 1:
                    twins = self._most_named(twins, {hint for hint in hints if hint in self._turns})
                    twins = [t for t in twins if not apart(t)] or twins
                    twins = [t for t in twins if self._thought(t, messages)] or twins
                    twins = [t for t in twins if t not in missed] or twins
                    repeated = {turn.parent for turn in self.asked(digests[-1]) if turn.id in again}
                    twins = [t for t in twins if t in repeated] or self._free(twins, digests[-1])
                return depth, self._turns[twins[-1]]
        return None

    def _most_named(self, twins: list[str], named: set[str]) -> list[str]:
        """The twins with most named turns on their paths; a turn that the client edited is on none."""
        if not named:
            return twins
        counts = {t: sum(turn.id in named for turn in self.path(t)) for t in twins}
        return [t for t in twins if counts[t] == max(counts.values())]

    def _free(self, twins: list[str], asked: str) -> list[str]:
        """The twin that a broken call with the same request went on from, or those that nothing continues."""
        broken = {turn.parent for turn in self.asked(asked) if turn.status is TurnStatus.ABORTED}
        tried = [t for t in twins if t in broken]
        return tried or [t for t in twins if t not in self._parents] or twins

    def _thought(self, turn_id: str, messages: Sequence[Message]) -> bool:
        """Whether the reasoning on the way to a turn is what these messages repeat of it."""
        ours = [message for turn in self.path(turn_id) for message in turn.messages]
        pairs = zip(ours, messages, strict=False)
        return all(m.reasoning.strip() in ("", mine.reasoning.strip()) for mine, m in pairs)

    @property
    def leaves(self) -> list[Turn]:
        """Turns nothing extends, in the order they were committed."""
        return [turn for turn in self._turns.values() if turn.id not in self._parents]

    @property
    def branches(self) -> int:
        return len(self._turns) - len(self._parents)


def chain(root: str, messages: Sequence[Message]) -> list[str]:
    """One digest per prefix of the conversation; equal digests mean equal canonical conversations."""
    digests: list[str] = []
    previous = root
    for message in messages:
        previous = extend_digest(previous, message)
        digests.append(previous)
    return digests


def extend_digest(previous: str, message: Message) -> str:
    state = hashlib.blake2b(previous.encode(), digest_size=16)
    for part in canonical(message):
        said = part.encode("utf-8", "surrogatepass")
        state.update(b"%d:" % len(said))  # lengths, so that no two lists of parts look alike
        state.update(said)
    return state.hexdigest()


def canonical(message: Message) -> list[str]:
    """The parts of a message that tell it from others."""
    parts = [message.role, message.content.strip()]
    for call in message.tool_calls:
        parts += ["call", call.name, arguments_value(call.arguments)]
    if message.images:
        before = len(message.content) - len(message.content.lstrip())
        for image in message.images:
            parts += ["image", image.digest, str(min(max(image.offset - before, 0), len(parts[1])))]
    return parts


def arguments_value(text: str) -> str:
    """Arguments by value: one spelling for all that clients make of the same JSON; else the text as it is."""
    return _spelled(text) if len(text) <= _REMEMBERED else _spell(text)


_REMEMBERED = 4096


def _spell(text: str) -> str:
    if text.strip() in ("", "null"):
        return "{}"  # what clients make of a call without arguments
    try:
        return json.dumps(json.loads(text, parse_float=_number), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return text


_spelled = lru_cache(maxsize=4096)(_spell)


def _number(text: str) -> float | int:
    """Numbers by value: 1e4, 10000.0 and 10000 are what different clients make of one number."""
    value = float(text)
    return int(value) if value.is_integer() else value
