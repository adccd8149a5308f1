"""Turn tree: model calls of a session, matched to requests by content.

1. Turns are added once and never change.
2. `chain` computes one digest per prefix of a request's messages; `find` returns the deepest turn whose
   conversation is such a prefix. A request that continues no turn starts a new root.
3. Messages are compared in a canonical form, because clients re-serialize them: tool arguments by JSON value,
   text stripped, missing content equal to "", provider ids and reasoning ignored.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Container, Iterable, Sequence
from functools import lru_cache
from itertools import islice

from afield.types import Message, Turn, TurnStatus

_KEPT = 2  # prompts in the cache
_RESPONSE = re.compile(r".*[-_](t\d+)")  # a response id ends with the turn id
_DIGITS = 9  # longest call number


def turn_named(name: str, turn_ids: Container[str], answered: Sequence[str]) -> str | None:
    """Resolve a turn by turn id, response id, or number of the answered call from 0; None if unknown."""
    if name in turn_ids:
        return name
    if (n := call_number(name)) is not None:
        return answered[n] if n < len(answered) else None
    match = _RESPONSE.fullmatch(name)
    return match[1] if match and match[1] in turn_ids else None


def call_number(name: str) -> int | None:
    """Parse the number of a call; None for other text."""
    return int(name) if name.isdecimal() and len(name) <= _DIGITS else None


def listed(turns: Sequence[str]) -> str:
    """Format turn ids for a message; at most eight."""
    return ", ".join(turns[:8]) + (", ..." if len(turns) > 8 else "") or "none"


class TurnTree:
    """Turns of one session with their parents. In memory, without I/O; may have several roots."""

    def __init__(self, turns: Iterable[Turn] = ()) -> None:
        self._turns: dict[str, Turn] = {}
        self._by_digest: dict[str, list[str]] = {}
        self._by_request: dict[str, list[str]] = {}
        self._by_call: dict[str, str] = {}
        self._parents: set[str] = set()
        self._roots: list[Turn] = []
        self._prompts: dict[str, tuple[int, ...]] = {}  # prompts of the latest turns; see `keep`
        self.pictured = False
        """Whether any prompt has images."""
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
        """All turns, in the order they were added."""
        return list(self._turns.values())

    def latest(self, count: int) -> Iterable[Turn]:
        """Iterate over the last `count` turns, newest first."""
        return islice(reversed(self._turns.values()), count)

    @property
    def roots(self) -> Iterable[Turn]:
        return self._roots

    def add(self, turn: Turn) -> None:
        """Add a turn. Repeating is harmless; a different turn with the same id raises ValueError."""
        earlier = self._turns.get(turn.id)
        if earlier == turn:
            return
        if earlier is not None:
            raise ValueError(f"turn {turn.id} is already there and differs; turns are never edited")
        length = len(turn.delta_ids) + len(turn.token_ids)
        if turn.parent is None:
            self._roots.append(turn)
        else:
            parent = self._turns.get(turn.parent)
            if parent is None:
                raise ValueError(f"turn {turn.id} names an unknown parent {turn.parent}")
            if parent.root != turn.root:
                raise ValueError(
                    f"turn {turn.id} has root {turn.root}, but its parent has root {parent.root}"
                )
            length += self._lengths[parent.id]
            self._parents.add(parent.id)
        self.pictured |= bool(turn.sent_ids)
        self._turns[turn.id] = turn
        self._lengths[turn.id] = length
        self._by_request.setdefault(turn.request_digest, []).append(turn.id)
        if turn.status is TurnStatus.COMMITTED:
            self._by_digest.setdefault(turn.digest, []).append(turn.id)
            for call in turn.messages[-1].tool_calls if turn.messages else ():
                # Some models sample call ids themselves: an id that two turns share identifies neither.
                self._by_call[call.id] = turn.id if self._by_call.get(call.id, turn.id) == turn.id else ""

    def path(self, turn_id: str) -> list[Turn]:
        """Turns from the root to this one."""
        path = [self._turns[turn_id]]
        while (parent := path[-1].parent) is not None:
            path.append(self._turns[parent])
        return path[::-1]

    def ids(self, turn_id: str, more: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Token ids of all prompts and replies up to the end of this turn, followed by `more`."""
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
        """Cached prompt of a turn, as the same object; empty if it is not cached."""
        return self._prompts.get(turn_id, ())

    def keep(self, turn_id: str, prompt: tuple[int, ...]) -> None:
        """Cache the prompt of a turn whose conversation is likely to continue."""
        self._prompts[turn_id] = prompt
        if len(self._prompts) > _KEPT:
            del self._prompts[next(iter(self._prompts))]

    def _above(self, turn_id: str, tip: str) -> bool:
        """Whether a turn is on the path from the root to `tip`."""
        at: str | None = tip
        while at is not None and at != turn_id and self._lengths[at] > self._lengths[turn_id]:
            at = self._turns[at].parent
        return at == turn_id

    def sent(self, turn_id: str) -> list[int]:
        """Token ids as `ids`, with one placeholder per image as sent to the engine."""
        ids: list[int] = []
        for turn in self.path(turn_id):
            ids.extend(turn.sent_ids or turn.delta_ids)
            ids.extend(turn.token_ids)
        return ids

    def sampled(self, turn_id: str) -> list[tuple[int, int]]:
        """Ranges (start, end) of sampled tokens in `sent`, in order."""
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
        """Whether a committed turn ends a conversation with this digest."""
        return digest in self._by_digest

    def turns_of_request(self, digest: str) -> list[Turn]:
        """Turns of any status whose request has this digest."""
        return [self._turns[turn_id] for turn_id in self._by_request.get(digest, ())]

    def caller(self, call_id: str) -> Turn | None:
        """Turn that made a tool call; None if unknown or ambiguous."""
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
        """Find the deepest turn whose conversation is a prefix of the request.

        Returns the number of messages that it covers, and the turn. Of several turns with the same
        conversation, each rule keeps the matching ones if there are any:

        1. most turns on its path are in `hints`, the turn ids that the client echoed;
        2. it is not `apart`, in another thread of the client;
        3. its reasoning equals the reasoning in `messages`;
        4. it is not in `missed`, the turns whose reply did not reach the client;
        5. it is the parent of an earlier turn in `again` with the same request;
        6. it is the parent of an aborted turn with the same request, or else has no children, so that two
           clients with equal conversations each continue their own.

        The latest of the remaining turns is returned.
        """
        for depth in range(len(digests), 0, -1):
            if twins := self._by_digest.get(digests[depth - 1]):
                if len(twins) > 1:
                    twins = self._most_named(twins, {hint for hint in hints if hint in self._turns})
                    twins = [t for t in twins if not apart(t)] or twins
                    twins = [t for t in twins if self._thought(t, messages)] or twins
                    twins = [t for t in twins if t not in missed] or twins
                    repeated = {
                        turn.parent for turn in self.turns_of_request(digests[-1]) if turn.id in again
                    }
                    twins = [t for t in twins if t in repeated] or self._free(twins, digests[-1])
                return depth, self._turns[twins[-1]]
        return None

    def _most_named(self, twins: list[str], named: set[str]) -> list[str]:
        """Keep the twins with most of the named turns on their paths."""
        if not named:
            return twins
        counts = {t: sum(turn.id in named for turn in self.path(t)) for t in twins}
        return [t for t in twins if counts[t] == max(counts.values())]

    def _free(self, twins: list[str], digest: str) -> list[str]:
        """Keep the parents of aborted turns with the same request, or else the twins without children."""
        broken = {turn.parent for turn in self.turns_of_request(digest) if turn.status is TurnStatus.ABORTED}
        tried = [t for t in twins if t in broken]
        return tried or [t for t in twins if t not in self._parents] or twins

    def _thought(self, turn_id: str, messages: Sequence[Message]) -> bool:
        """Whether the reasoning in `messages` equals the reasoning on the path to a turn."""
        ours = [message for turn in self.path(turn_id) for message in turn.messages]
        pairs = zip(ours, messages, strict=False)
        return all(m.reasoning.strip() in ("", mine.reasoning.strip()) for mine, m in pairs)

    @property
    def leaves(self) -> list[Turn]:
        """Turns without children, in the order they were added."""
        return [turn for turn in self._turns.values() if turn.id not in self._parents]

    @property
    def branches(self) -> int:
        return len(self._turns) - len(self._parents)


def chain(root: str, messages: Sequence[Message]) -> list[str]:
    """Digest of each prefix of the conversation; equal digests mean equal canonical conversations."""
    digests: list[str] = []
    previous = root
    for message in messages:
        previous = extend_digest(previous, message)
        digests.append(previous)
    return digests


def extend_digest(previous: str, message: Message) -> str:
    """Digest of a conversation that is `previous` followed by `message`."""
    state = hashlib.blake2b(previous.encode(), digest_size=16)
    for part in canonical(message):
        encoded = part.encode("utf-8", "surrogatepass")
        state.update(b"%d:" % len(encoded))  # length prefixes make the encoding unambiguous
        state.update(encoded)
    return state.hexdigest()


def canonical(message: Message) -> list[str]:
    """Canonical form of a message: role, stripped text, tool calls by value, and images."""
    parts = [message.role, message.content.strip()]
    for call in message.tool_calls:
        parts += ["call", call.name, arguments_value(call.arguments)]
    if message.images:
        before = len(message.content) - len(message.content.lstrip())
        for image in message.images:
            parts += ["image", image.digest, str(min(max(image.offset - before, 0), len(parts[1])))]
    return parts


def arguments_value(text: str) -> str:
    """Canonical JSON of tool arguments; text that is not JSON is returned unchanged."""
    return _spelled(text) if len(text) <= _REMEMBERED else _spell(text)


_REMEMBERED = 4096


def _spell(text: str) -> str:
    if text.strip() in ("", "null"):
        return "{}"  # clients write a call without arguments in all three ways
    try:
        return json.dumps(json.loads(text, parse_float=_number), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return text


_spelled = lru_cache(maxsize=4096)(_spell)


def _number(text: str) -> float | int:
    """Parse a number by value: clients re-serialize 1e4 as 10000.0 or 10000."""
    value = float(text)
    return int(value) if value.is_integer() else value
