"""Parquet and JSONL files of tasks, written only when their content changes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from afield.datasets.reader import needs_pyarrow
from afield.errors import UsageError

KEY = b"afield-tasks"
"""Schema metadata with the digest of the rows."""


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Write rows as Parquet or JSONL, by the file's ending, atomically.

    Returns False, and leaves the file alone, if it has the same rows already. Parquet has one set of columns:
    a key that only some rows have is null in the others.
    """
    lines = [msgspec.json.encode(row) + b"\n" for row in rows]
    if path.suffix == ".jsonl":
        content = b"".join(lines)
        if path.is_file() and path.read_bytes() == content:
            return False
        _replace(path, lambda partial: partial.write_bytes(content))
        return True
    if path.suffix != ".parquet":
        raise UsageError(f"{path} must end in .parquet or .jsonl")
    with needs_pyarrow():
        import pyarrow
        from pyarrow import parquet
    digest = hashlib.sha256(b"".join(lines)).hexdigest().encode()
    if path.is_file() and _digest(path) == digest:
        return False
    table = pyarrow.Table.from_pylist(list(rows))
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), KEY: digest})
    _replace(path, lambda partial: parquet.write_table(table, partial))
    return True


def _digest(path: Path) -> bytes:
    import pyarrow
    from pyarrow import parquet

    try:
        return (parquet.read_schema(path).metadata or {}).get(KEY, b"")
    except (OSError, pyarrow.ArrowException):  # another file: it is replaced
        return b""


def _replace(path: Path, write: Any) -> None:
    partial = path.with_name(f"{path.name}.partial")
    try:
        write(partial)
        partial.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
