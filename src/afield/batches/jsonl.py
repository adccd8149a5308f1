"""JSONL form of batches and trees.

A file has a header, one line per rollout, and one line per row or node. Numbers are restored bit for bit. The
header counts the lines that follow, so truncated files are detected. Errors name line, rollout and turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from afield import wire
from afield.batches.rows import Batch, RolloutRecord, RowColumns, convert_columns, records_by_id, usage_errors
from afield.batches.tree import Node, TreeBatch
from afield.errors import UsageError

FORMAT = "afield-batch"
T = TypeVar("T")


class FileHeader(Struct, frozen=True, kw_only=True):
    """First line of a JSONL file, and schema metadata of a Parquet file."""

    format: Literal["afield-batch"] = FORMAT
    """Name of the format."""
    v: int = wire.VERSION
    """Format version."""
    form: Literal["linear", "per_turn", "tree"]
    """Kind of the lines: rows per path, rows per turn, or tree nodes."""
    rollouts: int
    """Number of rollout records."""
    rows: int
    """Number of rows or nodes."""


def write_jsonl(path: Path, batch: Batch | TreeBatch) -> None:
    """Write a batch or a tree."""
    if isinstance(batch, TreeBatch):
        form, rows = "tree", batch.nodes
    else:
        records = records_by_id(batch.rollouts)
        form, rows = batch.form, tuple(row.columns(records[row.rollout_id]) for row in batch.rows)
    head = FileHeader(form=form, rollouts=len(batch.rollouts), rows=len(rows))
    encoder = msgspec.json.Encoder()
    with path.open("wb") as out:
        for value in (head, *batch.rollouts, *rows):
            with usage_errors(f"{path} cannot be written"):
                out.write(encoder.encode(value) + b"\n")


def read_jsonl(path: Path) -> Batch | TreeBatch:
    """Read a file that `write_jsonl` wrote."""
    try:
        with path.open("rb") as file:
            return _read(path, enumerate(file, 1))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def _read(path: Path, lines: Iterator[tuple[int, bytes]]) -> Batch | TreeBatch:
    head = _next(path, lines, FileHeader)
    if head.v != wire.VERSION:
        raise UsageError(f"{path} has format version {head.v}; this afield reads {wire.VERSION}: upgrade it")
    rollouts = tuple(_next(path, lines, RolloutRecord) for _ in range(head.rollouts))
    nodes: tuple[Node, ...] = ()
    columns: tuple[RowColumns, ...] = ()
    if head.form == "tree":
        nodes = tuple(_row(path, lines, Node) for _ in range(head.rows))
    else:
        columns = tuple(_row(path, lines, RowColumns) for _ in range(head.rows))
    if (more := next(lines, None)) is not None:
        raise UsageError(f"{path} line {more[0]}: more rows than the {head.rows} that its header states")
    with usage_errors(f"{path} is not a consistent batch"):
        if head.form == "tree":
            return TreeBatch(nodes=nodes, rollouts=rollouts)
        records = records_by_id(rollouts)
        rows = tuple(row.to_row(records.get(row.rollout_id)) for row in columns)
        return Batch(form=head.form, rows=rows, rollouts=rollouts)


def _row(path: Path, lines: Iterator[tuple[int, bytes]], into: type[T]) -> T:
    number, line = _line(path, lines, into)
    try:
        return msgspec.json.decode(line, type=into)
    except msgspec.DecodeError:
        with usage_errors(f"{path} line {number}"):
            return convert_columns(msgspec.json.decode(line, type=dict[str, Any]), into)


def _next(path: Path, lines: Iterator[tuple[int, bytes]], into: type[T]) -> T:
    number, line = _line(path, lines, into)
    with usage_errors(f"{path} line {number}"):
        return msgspec.json.decode(line, type=into)


def _line(path: Path, lines: Iterator[tuple[int, bytes]], into: type[Any]) -> tuple[int, bytes]:
    number, line = next(lines, (0, b""))
    if not number:
        raise UsageError(f"{path} is cut short: it ends where a {into.__name__} should follow")
    return number, line
