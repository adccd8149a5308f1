"""Tables of commands: aligned text, TSV, or lines of JSON."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def print_table(
    rows: Iterable[Mapping[str, Any]], columns: Sequence[str], *, as_json: bool = False, header: bool = True
) -> None:
    """Print rows. JSON has all fields of a row; a table has `columns`, and a terminal cuts long lines."""
    if as_json:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False))
        return
    lines = [[cell(row.get(name)) for name in columns] for row in rows]
    if not sys.stdout.isatty():
        for line in ([list(columns)] if header else []) + lines:
            print("\t".join(line))
        return
    if header:
        lines.insert(0, [name.upper() for name in columns])
    widths = [max(len(line[n]) for line in lines) for n in range(len(columns))] if lines else []
    room = shutil.get_terminal_size().columns
    for line in lines:
        text = "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        print(text if len(text) <= room else text[: room - 1] + "~")


def print_note(text: str) -> None:
    """Print text about a table: below it in a terminal, to stderr if another program reads the table."""
    print(text, file=sys.stdout if sys.stdout.isatty() else sys.stderr)


def cell(value: Any) -> str:
    """Text of a value in a table: one line without control characters."""
    if value is None or value in ("", {}):
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 1e6 else f"{value:g}"
    if isinstance(value, Mapping):
        value = ", ".join(f"{name} {number}" for name, number in value.items())
    return printable(str(value))


def printable(text: str) -> str:
    """Replace control characters, so that the output of agents cannot control the terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(text.split()))


def printable_lines(text: str) -> str:
    """As `printable`, with the text's own lines, tabs and spaces."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
