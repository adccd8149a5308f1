"""What must be true of a session, given what its agent did: the forest oracle.

It knows conversations by who said what, as the agent wrote it down, never by their text or ids on the wire.
From that follow which requests sample anew, what each turn descends from, what is trained, and why the rest
is not. `judge` compares; the ids themselves are the business of `invariants`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from afield.types import Message
from support.invariants import Seen

Key = tuple[Any, ...]
QUOTED = 24


class Made(Struct, frozen=True, kw_only=True):
    """A request as its agent knows it. `known` is how many were over when it was sent."""

    turn_id: str | None
    request: Key
    roles: tuple[str, ...]
    texts: tuple[str, ...]
    limit: int
    known: int
    heard: Key | None = None
    reply: Message | None = None
    replayed: bool = False
    retry: bool = False
    failed: bool = False
    side: str = ""
    named: frozenset[str] = frozenset()
    together: bool = False


def identity(message: Message) -> Key:
    """Two replies with the same identity cannot be told apart by their words."""
    calls = tuple((call.name, _value(call.arguments)) for call in message.tool_calls)
    return ("said", message.content.strip(), calls)


def _value(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        return text


class Known(Struct):
    """A turn the judge knows. `since` is the number of the request that made it."""

    made: Made
    since: int
    row: dict[str, Any]
    reply: Key | None
    withheld: str = ""


class Judge:
    def __init__(self, made: Sequence[Made], seen: Seen) -> None:
        self._rows = seen.by_id
        turn_ids = {one.turn_id for one in made}
        self._left = [row for row in seen.turns if row["id"] not in turn_ids]  # before the engine was asked
        self._gone: list[tuple[dict[str, Any], Key]] = []
        self._known: dict[str, Known] = {}
        self.replays = 0

    def before(self, made: Made) -> list[Known]:
        return [known for known in self._known.values() if known.since < made.known]

    def take(self, n: int, made: Made) -> None:
        """The next request, in the order they were made."""
        before = self.before(made)
        twins = [
            k for k in before if k.reply and k.made.request == made.request and k.made.limit == made.limit
        ]
        missed = [k for k in twins if k.withheld == "undelivered"]
        if made.turn_id is None:
            gone = {left["id"] for left, _ in self._gone}
            left = next((row for row in self._left if row["id"] not in gone and said_in(row, made)), None)
            self._gone += [(left, made.request)] if left else []
            return
        if made.replayed:
            allowed = {k.row["id"] for k in missed}
            assert made.turn_id in allowed, f"request {n} got {made.turn_id} again, not one of {allowed}"
            known = self._known[made.turn_id]
            known.withheld = "" if known.withheld == "undelivered" else known.withheld
            self.replays += 1
            return
        assert not missed, f"request {n} sampled again what its client had missed: {missed[0].row['id']}"
        self._new(n, made, before)

    def _new(self, n: int, made: Made, before: Sequence[Known]) -> None:
        row = self._rows[made.turn_id or ""]
        committed = row["status"] == "committed"
        assert not made.failed or not committed, f"{row['id']} failed and is committed"
        assert made.heard is None or committed, f"{row['id']} was seen to its end and is {row['status']}"
        depth = self._check_parent(made, row, before)
        self._check_links(made, row, before, depth)
        reply = identity(_message(row["messages"][-1])) if committed else None
        assert made.heard in (None, reply), f"{row['id']}: its client got {made.heard}, recorded is {reply}"
        known = Known(made=made, since=n, row=row, reply=reply)
        if committed and made.heard is None:
            known.withheld = "undelivered"
        self._known[row["id"]] = known

    def _children(self, parent: Known, among: Sequence[Known]) -> bool:
        return any(known.row["parent"] == parent.row["id"] for known in among)

    # --- where it stands --------------------------------------------------------------------------

    def _check_parent(self, made: Made, row: dict[str, Any], before: Sequence[Known]) -> int:
        depth, twins = self._deepest(made, before)
        invented = "assistant" in made.roles[depth:]
        allowed = {k.row["id"] for k in twins if k.withheld != "undelivered"} or {k.row["id"] for k in twins}
        if made.named & allowed:
            allowed = allowed & made.named
        where = f"{row['id']} ({row['tier']}) descends from {row['parent']}, should from {allowed or None}"
        if not twins:
            assert (row["parent"], row["tier"]) == (None, "full"), where
        elif invented:
            assert row["tier"] == ("full" if row["parent"] is None else "splice"), where
            assert row["parent"] is None or row["parent"] in allowed, where
        else:
            assert row["parent"] in allowed, where
            assert row["tier"] == "append", where
        return depth

    def _deepest(self, made: Made, before: Sequence[Known]) -> tuple[int, list[Known]]:
        for depth in range(len(made.roles), 0, -1):
            prefix = made.request[: depth + 1]
            if twins := [k for k in before if k.reply and (*k.made.request, k.reply) == prefix]:
                return depth, twins
        return 0, []

    # --- where it comes from ----------------------------------------------------------------------

    def _check_links(self, made: Made, row: dict[str, Any], before: Sequence[Known], depth: int) -> None:
        if made.together:
            return
        links = [(link["type"], link["to"]) for link in row["links"]]
        kind, to = self._link(made, row, before, depth)
        if kind:
            assert len(links) == 1, f"{row['id']}: links {links}, expected {kind} to {to}"
            assert links[0][0] == kind and links[0][1] in to, (
                f"{row['id']}: {links[0]}, expected {kind} to {to}"
            )

    def _link(
        self, made: Made, row: dict[str, Any], before: Sequence[Known], depth: int
    ) -> tuple[str, set[str]]:
        gone = [k.row["id"] for k in before if not k.reply and k.made.request == made.request][-1:]
        gone += [left["id"] for left, request in self._gone if request == made.request]
        if gone:
            return "retry", set(gone)
        for at in range(len(made.roles) - 1, max(depth, 1) - 1, -1):
            replaced = [k for k in before if k.reply and k.made.request == made.request[: at + 1]]
            if made.roles[at] == "assistant" and replaced:
                return "edit", {k.row["id"] for k in replaced}
        if depth:
            parent = self._known[row["parent"]] if row["parent"] else None
            branches = parent is not None and self._children(parent, before)
            return ("fork", {row["parent"]}) if branches else ("", set())
        if "assistant" in made.roles:
            return "", set()
        if quoted := [k for k in before if k.reply and _quotes(made.texts, k.reply[1])]:
            return "compaction", {k.row["id"] for k in quoted}
        heads = {_head(k.made) for k in before if k.row["parent"] is None}
        waiting = [k for k in before if k.reply and k.reply[2] and not self._children(k, before)]
        if waiting and _head(made) not in heads:
            return "sub-agent", {k.row["id"] for k in waiting}
        return "", set()

    # --- what is trained --------------------------------------------------------------------------

    def check_training(self, seen: Seen) -> None:
        for row in self._left:
            nothing = row["status"] == "aborted" and not row["token_ids"] and row["id"] not in seen.ledger
            assert nothing, f"{row['id']}: nobody asked for it"
        expected = {row["id"]: "aborted" for row in self._left} | {
            k.row["id"]: "aborted" for k in self._known.values() if not k.reply
        }
        whole = [k for k in self._known.values() if k.reply]
        repeated = self._repeated(whole, seen)
        recorded = {k.row["id"]: k.withheld or repeated.get(k.row["id"], "") for k in whole}
        worked_on = self._above([k for k in whole if not recorded[k.row["id"]] and not k.made.side])
        for known in whole:
            side = "" if known.row["id"] in worked_on else known.made.side
            if reason := recorded[known.row["id"]] or side:
                expected[known.row["id"]] = reason
        excluded = {e["turn"]: e["reason"] for e in seen.linear["excluded"]}
        assert excluded == expected, f"excluded {excluded}, expected {expected}"

    def _above(self, trained: Sequence[Known]) -> set[str]:
        """The turns that any of these descends from."""
        above: set[str] = set()
        for known in trained:
            parent = known.row["parent"]
            while parent is not None:
                above.add(parent)
                parent = self._rows[parent]["parent"]
        return above

    def _repeated(self, whole: Sequence[Known], seen: Seen) -> dict[str, str]:
        """Answers that nobody went on from, although their request was asked again."""
        expected: dict[str, str] = {}
        whole = [known for known in whole if not known.withheld]
        unused = [known for known in whole if not self._used(known, whole, seen)]
        for known in unused:
            twins = [k for k in whole if (k.made.request, k.row["parent"]) == _place(known)]
            later = twins[twins.index(known) + 1 :]
            cut = known.row["finish_reason"] == "length"
            retried = known is not twins[-1] and all(twin.made.retry for twin in twins[1:])
            if cut and any(twin.made.limit > known.made.limit for twin in later):
                expected[known.row["id"]] = "superseded"
            elif retried or any(twin not in unused for twin in twins):
                expected[known.row["id"]] = "abandoned"
        return expected

    def _used(self, known: Known, whole: Sequence[Known], seen: Seen) -> bool:
        """Whether something came of an answer: it was continued, or what was said next shows it and not
        another answer to the same request that said the same and was continued."""
        if _continued(known, seen):
            return True
        twins = [k for k in whole if _place(k) == _place(known) and _continued(k, seen)]
        return _text(known) not in [_text(twin) for twin in twins] and _quoted(known, seen)


def _place(known: Known) -> tuple[Key, str | None]:
    return known.made.request, known.row["parent"]


def _text(known: Known) -> str:
    return known.row["messages"][-1].get("content", "").strip()


def _continued(known: Known, seen: Seen) -> bool:
    turn_id = known.row["id"]
    return any(
        row["parent"] == turn_id or any(link["to"] == turn_id for link in row["links"]) for row in seen.turns
    )


def _quoted(known: Known, seen: Seen) -> bool:
    after = [row["id"] for row in seen.turns].index(known.row["id"]) + 1
    others = (m for row in seen.turns[after:] for m in row["messages"] if m["role"] != "assistant")
    return _quotes([m.get("content", "") for m in others], _text(known))


def said_in(row: dict[str, Any], made: Made) -> bool:
    """Whether a request has all that a turn was newly asked."""
    said = {message.get("content", "") for message in row["messages"] if message["role"] != "system"}
    return said <= set(made.texts) and row["messages"][-1]["role"] == made.roles[-1]


def _quotes(texts: Sequence[str], reply: str) -> bool:
    return len(reply) >= QUOTED and any(reply in text for text in texts)


def _head(made: Made) -> Key:
    first = made.request[1]
    return made.request[0], first if first[0] == "system" else None


def _message(row: dict[str, Any]) -> Message:
    return msgspec.convert(row, Message)


def judge(made: Sequence[Made], seen: Seen) -> Judge:
    court = Judge(made, seen)
    for n, one in enumerate(made):
        court.take(n, one)
    court.check_training(seen)
    return court
