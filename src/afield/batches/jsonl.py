"""Batches and trees as JSON lines: a head, then a line per rollout, then one per sample or node.

Numbers are written so that they come back bit for bit. The head says how many lines follow, so a file that
was cut short is refused; so is whatever does not line up, by line, rollout and turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from afield import wire
from afield.batches.sample import Batch, RolloutRecord, Sample, convert_row, usage_errors
from afield.batches.tree import Node, TreeBatch
from afield.errors import UsageError

FORMAT = "afield-batch"
T = TypeVar("T")


class FileHeader(Struct, frozen=True, kw_only=True):
    """The first line."""

    format: Literal["afield-batch"] = FORMAT
    v: int = wire.VERSION
    form: Literal["linear", "per_turn", "tree"]
    rollouts: int
    rows: int


def write_jsonl(path: Path, batch: Batch | TreeBatch) -> None:
    rows = batch.nodes if isinstance(batch, TreeBatch) else batch.samples
    form = "tree" if isinstance(batch, TreeBatch) else batch.form
    head = FileHeader(form=form, rollouts=len(batch.rollouts), rows=len(rows))
    encoder = msgspec.json.Encoder()
    with path.open("wb") as out:
        for value in (head, *batch.rollouts, *rows):
            with usage_errors(f"{path} cannot be written"):
                out.write(encoder.encode(value) + b"\n")


def read_jsonl(path: Path) -> Batch | TreeBatch:
    """What `write_jsonl` wrote."""
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
    samples: tuple[Sample, ...] = ()
    if head.form == "tree":
        nodes = tuple(_row(path, lines, Node) for _ in range(head.rows))
    else:
        samples = tuple(_row(path, lines, Sample) for _ in range(head.rows))
    if (more := next(lines, None)) is not None:
        raise UsageError(
            f"{path} line {more[0]}: there is more than the {head.rows} rows that its head names"
        )
    with usage_errors(f"{path} does not line up"):
        if head.form == "tree":
            return TreeBatch(nodes=nodes, rollouts=rollouts)
        return Batch(form=head.form, samples=samples, rollouts=rollouts)


def _row(path: Path, lines: Iterator[tuple[int, bytes]], into: type[T]) -> T:
    number, line = _line(path, lines, into)
    try:
        return msgspec.json.decode(line, type=into)
    except msgspec.DecodeError:
        with usage_errors(f"{path} line {number}"):
            return convert_row(msgspec.json.decode(line, type=dict[str, Any]), into)


def _next(path: Path, lines: Iterator[tuple[int, bytes]], into: type[T]) -> T:
    number, line = _line(path, lines, into)
    with usage_errors(f"{path} line {number}"):
        return msgspec.json.decode(line, type=into)


def _line(path: Path, lines: Iterator[tuple[int, bytes]], into: type[Any]) -> tuple[int, bytes]:
    number, line = next(lines, (0, b""))
    if not number:
        raise UsageError(f"{path} is cut short: it ends where a {into.__name__.lower()} should follow")
    return number, line
