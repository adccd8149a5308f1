"""Reads the body of a request, and looks up the parameters that its dialect does not read.

A request with parameters that its dialect's struct has fields for, or that have no effect, is read in one
pass. Any other name makes that pass fail; then the names are looked up in the table, one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec
from msgspec import Raw, Struct

from afield.gateway import parameters
from afield.gateway.dialects.base import RawRequest, read

T = TypeVar("T", bound=Struct)
VALUE = msgspec.json.Decoder()
NAMES = msgspec.json.Decoder(dict[str, Raw])


class Reading(Generic[T]):
    """`under` is the object that this reads, with a dot behind it; `spelled` gives the spelling of names."""

    def __init__(
        self,
        dialect: str,
        body: type[T],
        what: str,
        under: str = "",
        spelled: Callable[[str], str] = lambda name: name,
    ) -> None:
        self._dialect, self._what, self._under, self._spelled = dialect, what, under, spelled
        self._known = frozenset(body.__struct_encode_fields__)
        entries = [entry for name, entry in parameters.TABLE[dialect].items() if name.startswith(under)]
        names = [
            entry.name.removeprefix(under)
            for entry in entries
            if entry.fate != "refused" and not entry.unread
        ]
        unread = {
            f"unread_{n}": name for n, name in enumerate(names) if "." not in name and name not in self._known
        }
        fields: list[Any] = [(field, Raw, Raw(b"")) for field in unread]
        renamed = dict(zip(body.__struct_fields__, body.__struct_encode_fields__, strict=True))
        strict = msgspec.defstruct(
            f"Strict{body.__name__}",
            fields,
            bases=(body,),
            kw_only=True,
            forbid_unknown_fields=True,
            rename=renamed | unread,
            module=__name__,
        )
        self._strict = msgspec.json.Decoder(cast("type[T]", strict))
        self._lenient = msgspec.json.Decoder(body)

    def read(self, asked: RawRequest, body: bytes | None = None) -> tuple[T, tuple[str, ...]]:
        """The request, and the tags of what was ignored."""
        text = asked.body if body is None else body
        try:
            return self._strict.decode(text or b"{}"), ()
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return read(self._lenient, text, self._what), self._looked_up(text, asked.ignore)

    def _looked_up(self, text: bytes, ignore: bool) -> tuple[str, ...]:
        tags: list[str] = []
        for name, raw in read(NAMES, text, self._what).items():
            if name not in self._known:
                value, full = read(VALUE, bytes(raw), self._what), self._under + self._spelled(name)
                tags += parameters.check(self._dialect, full, value, ignore=ignore)
        return tuple(tags)
