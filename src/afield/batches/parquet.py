"""Parquet form of batches and trees: one line per row or node.

1. Token ids, masks, log-probabilities (doubles), versions and turns have their own columns.
2. The rollout's record is repeated on each of its lines: as JSON in `record`, and in part as columns for
   filters. A rollout without rows has one line.
3. Reading uses the JSON and raises UsageError for lines whose columns differ from it.

Needs pyarrow (extra `batches`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from afield import wire
from afield.batches.jsonl import FileHeader
from afield.batches.rows import (
    Batch,
    RolloutRecord,
    Row,
    RowColumns,
    convert_columns,
    describe_columns,
    failure_kind,
    in_order,
    records_by_id,
    usage_errors,
)
from afield.batches.tree import Node, TreeBatch
from afield.errors import UsageError

HEAD = b"afield-batch"
SPAN = ("start", "end", "low", "high")


def write_parquet(path: Path, batch: Batch | TreeBatch) -> None:
    """Write a batch or a tree."""
    table = to_table(batch)
    import pyarrow.parquet

    pyarrow.parquet.write_table(table, path)


def to_table(batch: Batch | TreeBatch) -> Any:
    """Arrow table of a batch or a tree, with a line per row or node."""
    arrow = _pyarrow()
    if isinstance(batch, TreeBatch):
        form, rows, columns = "tree", batch.nodes, _node_columns(arrow)
    else:
        records = records_by_id(batch.rollouts)
        rows = tuple(row.columns(records[row.rollout_id]) for row in batch.rows)
        form, columns = batch.form, _row_columns(arrow)
    head = FileHeader(form=form, rollouts=len(batch.rollouts), rows=len(rows))
    schema = arrow.schema([*_record_columns(arrow), *columns], metadata={HEAD: msgspec.json.encode(head)})
    return arrow.Table.from_pylist(list(_lines(batch.rollouts, rows)), schema=schema)


def read_parquet(path: Path) -> Batch | TreeBatch:
    """Read a file that `write_parquet` wrote."""
    arrow = _pyarrow()
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, arrow.ArrowException) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    head = _head(path, table.schema.metadata or {})
    columns = _node_columns(arrow) if head.form == "tree" else _row_columns(arrow)
    expected = [name for name, _ in (*_record_columns(arrow), *columns)]
    if missing := [name for name in expected if name not in table.column_names]:
        raise UsageError(f"{path} has no column {missing[0]!r}; `write_parquet` makes a table that has")
    records: dict[str, tuple[int, RolloutRecord]] = {}
    parsed: list[Row] = []
    nodes: list[Node] = []
    rows = 0
    for number, line in enumerate(table.to_pylist()):
        with usage_errors(f"{path} row {number}"):
            if line["record"] is not None:
                _remember(records, line)
            if line["row"] is None:
                continue
            rows += 1
            if head.form == "tree":
                nodes.append(_node(line))
            else:
                parsed.append(_row(line))
    if (rows, len(records)) != (head.rows, head.rollouts):
        counts = (
            f"{rows} rows of {len(records)} rollouts, but its metadata states {head.rows} of {head.rollouts}"
        )
        raise UsageError(f"{path} is incomplete: it has {counts}; write it again with write_parquet")
    rollouts = tuple(record for _, record in sorted(records.values(), key=lambda pair: pair[0]))
    with usage_errors(f"{path} is not a consistent batch"):
        if head.form == "tree":
            return TreeBatch(nodes=tuple(nodes), rollouts=rollouts)
        return Batch(form=head.form, rows=in_order(parsed), rollouts=rollouts)


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise UsageError(
            "Parquet and Hugging Face datasets need pyarrow: pip install 'afield[batches]'"
        ) from error
    return pyarrow


def _head(path: Path, metadata: dict[bytes, bytes]) -> FileHeader:
    if HEAD not in metadata:
        raise UsageError(f"{path} was not written by afield: its schema has no {HEAD.decode()!r}")
    with usage_errors(f"{path}: its head"):
        head = msgspec.json.decode(metadata[HEAD], type=FileHeader)
    if head.v != wire.VERSION:
        raise UsageError(f"{path} has format version {head.v}; this afield reads {wire.VERSION}: upgrade it")
    return head


# --- lines ---------------------------------------------------------------------------------------


def _lines(records: Iterable[RolloutRecord], rows: Iterable[RowColumns | Node]) -> Iterable[dict[str, Any]]:
    """The rows in order, then the rollouts without rows."""
    by_rollout = {record.rollout.id: _record_line(n, record) for n, record in enumerate(records)}
    with_rows: set[str] = set()
    for n, row in enumerate(rows):
        with_rows.add(row.rollout_id)
        line = _row_line(row) if isinstance(row, RowColumns) else _node_line(n, row)
        yield {**by_rollout.get(row.rollout_id, {}), **line}
    yield from (line for rollout_id, line in by_rollout.items() if rollout_id not in with_rows)


def _record_line(number: int, record: RolloutRecord) -> dict[str, Any]:
    return {
        "rollout": number,
        "rollout_id": record.rollout.id,
        "group_id": record.rollout.group_id,
        "task_id": record.rollout.task.id,
        "split": str(record.rollout.split),
        "epoch": record.epoch,
        "baseline": record.baseline,
        "reward": record.outcome.reward,
        "score": record.score,
        "failure": failure_kind(record.outcome),
        "attempts": record.attempts,
        "record": msgspec.json.encode(record).decode(),
    }


def _remember(records: dict[str, tuple[int, RolloutRecord]], line: dict[str, Any]) -> None:
    record = msgspec.json.decode(line["record"], type=RolloutRecord)
    if line["rollout"] is None:
        raise ValueError(
            f"rollout {record.rollout.id}: the column 'rollout', its position in the batch, is null"
        )
    for name, value in _record_line(line["rollout"], record).items():
        if name != "record" and line[name] != value:
            raise ValueError(
                f"rollout {record.rollout.id}: {name} is {line[name]!r}, its record says {value!r}"
            )
    if records.setdefault(record.rollout.id, (line["rollout"], record))[1] != record:
        raise ValueError(
            f"rows of rollout {record.rollout.id} hold different records of it; write the file again with"
            " write_parquet"
        )


def _row_line(row: RowColumns) -> dict[str, Any]:
    """The columns of a row that its record does not have."""
    line = {name: getattr(row, name) for name in _ROW}
    return line | {"versions": _spans(row), "turns": [msgspec.to_builtins(turn) for turn in row.turns]}


def _row(line: dict[str, Any]) -> Row:
    if line["record"] is None:
        raise ValueError(f"{describe_columns(line)}: it has no record, the column 'record' is null")
    record = msgspec.json.decode(line["record"], type=RolloutRecord)
    columns = {
        **{name: line[name] for name in _ROW},
        "versions": _read_spans(line["versions"]),
        "rollout_id": record.rollout.id,
        "group_id": record.rollout.group_id,
        "score": record.score,
        "rewards": record.outcome.rewards,
        "failure": failure_kind(record.outcome),
        "attempts": record.attempts,
    }
    return convert_columns(columns, RowColumns).to_row(record)


def _node_line(number: int, node: Node) -> dict[str, Any]:
    return {
        "row": number,
        "group_id": node.group_id,
        "rollout_id": node.rollout_id,
        "parent": node.parent,
        "context_ids": node.context_ids,
        "token_ids": node.token_ids,
        "logprobs": node.logprobs,
        "versions": _spans(node),
        "turn": msgspec.to_builtins(node.turn),
    }


def _node(line: dict[str, Any]) -> Node:
    if line["record"] is None and line["rollout_id"]:
        raise ValueError(f"{describe_columns(line)}: it has no record, the column 'record' is null")
    columns = {name: line[name] for name in Node.__struct_fields__}
    columns["versions"] = _read_spans(line["versions"])
    return convert_columns(columns, Node)


def _spans(row: RowColumns | Node) -> list[dict[str, int]]:
    return [{name: getattr(span, name) for name in SPAN} for span in row.versions]


def _read_spans(spans: list[dict[str, Any] | None] | None) -> list[list[Any] | None] | None:
    """Convert spans to lists. Nulls stay, so that the conversion to a struct reports them."""
    if spans is None:
        return None
    return [None if span is None else [span[name] for name in SPAN] for span in spans]


# --- columns -------------------------------------------------------------------------------------

_ROW = ("row", "prompt_ids", "response_ids", "response_mask", "logprobs", "turns", "weight")


def _record_columns(arrow: Any) -> list[tuple[str, Any]]:
    text, whole, real = arrow.string(), arrow.int64(), arrow.float64()
    return [
        ("rollout", whole),
        ("rollout_id", text),
        ("group_id", text),
        ("task_id", text),
        ("split", text),
        ("epoch", whole),
        ("baseline", arrow.bool_()),
        ("reward", real),
        ("score", real),
        ("failure", text),
        ("attempts", whole),
        ("record", text),
        ("row", whole),
    ]


def _row_columns(arrow: Any) -> list[tuple[str, Any]]:
    ids, real = arrow.list_(arrow.int64()), arrow.float64()
    return [
        ("prompt_ids", ids),
        ("response_ids", ids),
        ("response_mask", arrow.list_(arrow.int8())),
        ("logprobs", arrow.list_(real)),
        ("versions", arrow.list_(_span(arrow))),
        ("turns", arrow.list_(_turn(arrow))),
        ("weight", real),
    ]


def _node_columns(arrow: Any) -> list[tuple[str, Any]]:
    ids = arrow.list_(arrow.int64())
    return [
        ("parent", arrow.int64()),
        ("context_ids", ids),
        ("token_ids", ids),
        ("logprobs", arrow.list_(arrow.float64())),
        ("versions", arrow.list_(_span(arrow))),
        ("turn", _turn(arrow)),
    ]


def _span(arrow: Any) -> Any:
    return arrow.struct([(name, arrow.int64()) for name in SPAN])


def _turn(arrow: Any) -> Any:
    text, whole, real = arrow.string(), arrow.int64(), arrow.float64()
    return arrow.struct(
        [
            ("id", text),
            ("order", whole),
            ("start", whole),
            ("end", whole),
            ("temperature", real),
            ("truncated", arrow.bool_()),
            ("top_p", real),
            ("top_k", whole),
            ("tier", text),
            ("parent", text),
            ("finish_reason", text),
            ("constraint", arrow.struct([("grammar", text), ("stop_ids", arrow.list_(whole))])),
        ]
    )
