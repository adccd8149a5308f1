"""Reads the body of a request in one pass, and looks up what its dialect does not read.

The parameters of the table that a dialect's struct has no field for are decoded into fields of their own,
raw. Only where a refused one was sent, or one that nobody knows, is anything looked up.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Generic, TypeVar, cast

import msgspec
from msgspec import Raw, Struct

from afield.gateway import parameters
from afield.gateway.dialects.base import Asked, read

T = TypeVar("T", bound=Struct)
ABSENT = Raw(b"")
NAMES = msgspec.json.Decoder(dict[str, Raw])


class Reading(Generic[T]):
    """`under` is the object of the request that this reads, with a dot behind it."""

    def __init__(self, dialect: str, body: type[T], what: str, under: str = "") -> None:
        self._dialect, self._what, self._under = dialect, what, under
        self._known = frozenset(body.__struct_encode_fields__)
        table = parameters.TABLE[dialect]
        listed = [name.removeprefix(under) for name in table if name.startswith(under)]
        others = [name for name in listed if "." not in name and name not in self._known]
        names = {f"other_{n}": name for n, name in enumerate(others)}
        fields: list[Any] = [(field, Raw, ABSENT) for field in names]
        refused = {field: name for field, name in names.items() if table[under + name].fate == "refused"}
        self._refused = list(refused.values())
        renamed = names | dict(zip(body.__struct_fields__, body.__struct_encode_fields__, strict=True))
        strict = msgspec.defstruct(
            f"Strict{body.__name__}",
            fields,
            bases=(body,),
            kw_only=True,
            forbid_unknown_fields=True,
            rename=renamed,
            module=__name__,
        )
        self._strict = msgspec.json.Decoder(cast("type[T]", strict))
        self._lenient = msgspec.json.Decoder(body)
        self._sent = attrgetter(*refused)
        self._nothing = (ABSENT,) * len(refused)

    def read(self, asked: Asked, body: bytes | None = None) -> tuple[T, tuple[str, ...]]:
        """The request, and the tags of what was ignored."""
        text = asked.body if body is None else body
        try:
            wire = self._strict.decode(text or b"{}")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return read(self._lenient, text, self._what), self._unknown(text, asked.ignore)
        sent = self._sent(wire)
        if sent == self._nothing:
            return wire, ()
        pairs = [(name, raw) for name, raw in zip(self._refused, sent, strict=True) if raw is not ABSENT]
        return wire, self._checked(pairs, asked.ignore)

    def _unknown(self, text: bytes, ignore: bool) -> tuple[str, ...]:
        given = read(NAMES, text, self._what)
        return self._checked([(name, raw) for name, raw in given.items() if name not in self._known], ignore)

    def _checked(self, pairs: list[tuple[str, Raw]], ignore: bool) -> tuple[str, ...]:
        tags: list[str] = []
        for name, raw in pairs:
            value = read(VALUE, bytes(raw), self._what)
            tags += parameters.check(self._dialect, self._under + name, value, ignore=ignore)
        return tuple(tags)


VALUE = msgspec.json.Decoder()
