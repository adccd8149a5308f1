"""Columnar binary data: a JSON header, then one typed array per column.

    bytes 0-3   length of the header, little-endian
    header      {"rows": n, ..., "columns": [{"name", "type", "offset", "values"?}, ...]}, padded with spaces
    columns     float32 (f4), float64 (f8), uint32 (u4) or uint8 (u1) values, each at a multiple of 8 bytes

A column with `values` has indices into this list of strings. Missing numbers are NaN.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

CODES = {"f4": "f", "f8": "d", "u4": "I", "u1": "B"}
NAN = float("nan")


def numbers(kind: str, values: Iterable[float | None]) -> array[Any]:
    """A typed array; None becomes NaN."""
    return array(CODES[kind], [NAN if value is None else value for value in values])


def indexed(values: Iterable[str | None]) -> tuple[array[int], list[str]]:
    """Indices into a list of the distinct strings, and the list; None counts as an empty string."""
    places: dict[str, int] = {}
    codes = array("I", [places.setdefault(value or "", len(places)) for value in values])
    return codes, list(places)


def pack(
    columns: Mapping[str, array[Any]], strings: Mapping[str, Sequence[str]] | None = None, **header: Any
) -> bytes:
    """Encode columns; `strings` has the lists of indexed columns, `header` further fields of the header."""
    kinds = {code: kind for kind, code in CODES.items()}
    described: list[dict[str, Any]] = []
    offset = 0
    for name, column in columns.items():
        described.append({"name": name, "type": kinds[column.typecode], "offset": offset})
        if strings and name in strings:
            described[-1]["values"] = list(strings[name])
        offset += -(-len(column) * column.itemsize // 8) * 8
    rows = len(next(iter(columns.values()), ()))
    head = json.dumps({"rows": rows, **header, "columns": described}).encode()
    head += b" " * (-(len(head) + 4) % 8)
    parts = [len(head).to_bytes(4, "little"), head]
    for column in columns.values():
        if sys.byteorder != "little":
            column.byteswap()
        body = column.tobytes()
        parts += [body, bytes(-len(body) % 8)]
    return b"".join(parts)


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, array[Any]]]:
    """Decode columns: the header, and the columns by name. Raises ValueError if the data is cut short."""
    begin = 4 + int.from_bytes(data[:4], "little")
    header = json.loads(data[4:begin])
    columns: dict[str, array[Any]] = {}
    for described in header["columns"]:
        column = array(CODES[described["type"]])
        first = begin + described["offset"]
        column.frombytes(data[first : first + header["rows"] * column.itemsize])
        if len(column) != header["rows"]:
            raise ValueError(f"column {described['name']!r} has {len(column)} of {header['rows']} values")
        if sys.byteorder != "little":
            column.byteswap()
        columns[described["name"]] = column
    return header, columns
