"""Batches and trees as Parquet, one table: a line per sample or node, and one per rollout without any.

Token ids, masks, log-probabilities (doubles), versions and turns are columns of their own; what is known of
the rollout is repeated on each of its lines, whole as JSON in `record` and in part as columns to filter by.
Reading takes the JSON for true and refuses lines whose columns say otherwise. Needs pyarrow, extra `batches`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from afield import wire
from afield.batches.jsonl import FileHeader
from afield.batches.sample import (
    Batch,
    RolloutRecord,
    Sample,
    convert_row,
    describe_row,
    failure_kind,
    in_order,
    usage_errors,
)
from afield.batches.tree import Node, TreeBatch
from afield.errors import UsageError

HEAD = b"afield-batch"
SPAN = ("start", "end", "low", "high")


def write_parquet(path: Path, batch: Batch | TreeBatch) -> None:
    arrow = _pyarrow()
    import pyarrow.parquet

    if isinstance(batch, TreeBatch):
        form, rows, columns = "tree", batch.nodes, _node_columns(arrow)
    else:
        form, rows, columns = batch.form, batch.samples, _sample_columns(arrow)
    head = FileHeader(form=form, rollouts=len(batch.rollouts), rows=len(rows))
    schema = arrow.schema([*_record_columns(arrow), *columns], metadata={HEAD: msgspec.json.encode(head)})
    table = arrow.Table.from_pylist(list(_lines(batch.rollouts, rows)), schema=schema)
    pyarrow.parquet.write_table(table, path)


def read_parquet(path: Path) -> Batch | TreeBatch:
    """What `write_parquet` wrote."""
    arrow = _pyarrow()
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, arrow.ArrowException) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    head = _head(path, table.schema.metadata or {})
    columns = _node_columns(arrow) if head.form == "tree" else _sample_columns(arrow)
    wanted = [name for name, _ in (*_record_columns(arrow), *columns)]
    if missing := [name for name in wanted if name not in table.column_names]:
        raise UsageError(f"{path} has no column {missing[0]!r}; `write_parquet` makes a table that has")
    records: dict[str, tuple[int, RolloutRecord]] = {}
    samples: list[Sample] = []
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
                samples.append(_sample(line))
    if (rows, len(records)) != (head.rows, head.rollouts):
        told = f"{rows} rows of {len(records)} rollouts, and its head names {head.rows} of {head.rollouts}"
        raise UsageError(f"{path} has {told}: write it as a whole")
    rollouts = tuple(record for _, record in sorted(records.values(), key=lambda known: known[0]))
    with usage_errors(f"{path} does not line up"):
        if head.form == "tree":
            return TreeBatch(nodes=tuple(nodes), rollouts=rollouts)
        return Batch(form=head.form, samples=in_order(samples), rollouts=rollouts)


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise UsageError("Parquet needs pyarrow: pip install 'afield[batches]'") from error
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


def _lines(records: Iterable[RolloutRecord], rows: Iterable[Sample | Node]) -> Iterable[dict[str, Any]]:
    """In the order of the rows, then what has none."""
    known = {record.rollout.id: (n, record) for n, record in enumerate(records)}
    about = {rollout_id: _record_line(n, record) for rollout_id, (n, record) in known.items()}
    shown: set[str] = set()
    for n, row in enumerate(rows):
        shown.add(row.rollout_id)
        line = _sample_line(row) if isinstance(row, Sample) else _node_line(n, row)
        yield {**about.get(row.rollout_id, {}), **line}
    yield from (line for rollout_id, line in about.items() if rollout_id not in shown)


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
        raise ValueError(f"rollout {record.rollout.id}: it has no place, the column 'rollout' is null")
    for name, value in _record_line(line["rollout"], record).items():
        if name != "record" and line[name] != value:
            raise ValueError(
                f"rollout {record.rollout.id}: {name} is {line[name]!r}, its record says {value!r}"
            )
    if records.setdefault(record.rollout.id, (line["rollout"], record))[1] != record:
        raise ValueError(f"rollout {record.rollout.id} has two records that differ")


def _sample_line(sample: Sample) -> dict[str, Any]:
    """What is known of the rollout stands in its own columns."""
    return {
        "row": sample.row,
        "prompt_ids": sample.prompt_ids,
        "response_ids": sample.response_ids,
        "response_mask": sample.response_mask,
        "logprobs": sample.logprobs,
        "versions": _spans(sample),
        "turns": [msgspec.to_builtins(turn) for turn in sample.turns],
        "weight": sample.weight,
    }


def _sample(line: dict[str, Any]) -> Sample:
    if line["record"] is None:
        raise ValueError(f"{describe_row(line)}: it has no record, the column 'record' is null")
    record = msgspec.json.decode(line["record"], type=RolloutRecord)
    given = {
        **{name: line[name] for name in _SAMPLE},
        "versions": _read_spans(line["versions"]),
        "rollout_id": record.rollout.id,
        "group_id": record.rollout.group_id,
        "score": record.score,
        "rewards": record.outcome.rewards,
        "failure": failure_kind(record.outcome),
        "attempts": record.attempts,
    }
    return convert_row(given, Sample)


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
        raise ValueError(f"{describe_row(line)}: it has no record, the column 'record' is null")
    given = {**{name: line[name] for name in Node.__struct_fields__}}
    given["versions"] = _read_spans(line["versions"])
    return convert_row(given, Node)


def _spans(row: Sample | Node) -> list[dict[str, int]]:
    return [{name: getattr(span, name) for name in SPAN} for span in row.versions]


def _read_spans(spans: list[dict[str, Any] | None] | None) -> list[list[Any] | None] | None:
    """As they are; what is null there is refused with all else."""
    if spans is None:
        return None
    return [None if span is None else [span[name] for name in SPAN] for span in spans]


# --- columns -------------------------------------------------------------------------------------

_SAMPLE = ("row", "prompt_ids", "response_ids", "response_mask", "logprobs", "turns", "weight")


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


def _sample_columns(arrow: Any) -> list[tuple[str, Any]]:
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
