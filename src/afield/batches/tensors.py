"""TensorDict form of a batch: left-padded prompts and right-padded responses.

1. Real numbers become float32 by default; only float64 restores them bit for bit.
2. Response tokens that the row does not own have log-probability 0 and versions -1.
3. Ids, turns and records are non-tensor data, so `from_tensordict` restores the batch, also from a slice of
   whole rollouts.

Needs torch and tensordict (extra `batches`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from afield.batches.rows import (
    Batch,
    OwnedTurn,
    RolloutRecord,
    Row,
    RowColumns,
    describe_columns,
    failure_kind,
    in_order,
    records_by_id,
    usage_errors,
)
from afield.errors import UsageError
from afield.types import VersionSpan

UNOWNED = -1
TENSORS = (
    *("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask"),
    *(
        "rollout_log_probs",
        "scores",
        "temperature",
        "version_low",
        "version_high",
        "weight",
        "row",
        "rollout",
    ),
)
OTHERS = ("rollout_id", "group_id", "turns", "versions", "record", "form", "rowless")
T = TypeVar("T")


def to_tensordict(
    batch: Batch,
    *,
    pad_token_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
    dtype: Any = None,
) -> Any:
    """Convert a batch to a TensorDict with one entry per row.

    Rows are padded to `prompt_length` and `response_length`, by default those of the longest row.

    Tensors: `prompts`, `responses`, `input_ids`, `attention_mask`, `position_ids`, `response_mask`,
    `rollout_log_probs`, `scores` (the rollout's, on the row's last owned token), `temperature`,
    `version_low`, `version_high`, `weight`, `row`, and `rollout`, the rollout's index in the batch.
    Text per row: `rollout_id`, `group_id`, `turns`, `versions`, `record`; per batch: `form` and `rowless`.
    """
    torch, tensordict = _libraries()
    if not batch.rows:
        raise UsageError("a batch without rows has no tensors: no rollout in it carries a reward")
    records = records_by_id(batch.rollouts)
    rows = [row.columns(records[row.rollout_id]) for row in batch.rows]
    prompt = _length("prompt", [len(row.prompt_ids) for row in rows], prompt_length, batch)
    response = _length("response", [len(row.response_ids) for row in rows], response_length, batch)
    index = {record.rollout.id: n for n, record in enumerate(batch.rollouts)}
    tensors = {
        **_ids(rows, prompt, response, pad_token_id),
        **_per_token(rows, response, dtype or torch.float32),
        "weight": torch.tensor([row.weight for row in rows], dtype=dtype or torch.float32),
        "row": torch.tensor([row.row for row in rows]),
        "rollout": torch.tensor([index[row.rollout_id] for row in rows]),
    }
    result = tensordict.TensorDict(tensors, batch_size=[len(rows)])
    return _add_text(result, rows, batch, tensordict)


def _ids(rows: Sequence[RowColumns], prompt: int, response: int, pad: int) -> dict[str, Any]:
    import torch

    prompts = torch.tensor([_left(row.prompt_ids, prompt, pad) for row in rows])
    responses = torch.tensor([_right(row.response_ids, response, pad) for row in rows])
    attention = torch.tensor(
        [
            _left([1] * len(row.prompt_ids), prompt, 0) + _right([1] * len(row.response_ids), response, 0)
            for row in rows
        ]
    )
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(dim=1) - 1).clamp(min=0),
    }


def _per_token(rows: Sequence[RowColumns], response: int, dtype: Any) -> dict[str, Any]:
    """Tensors with one value per response token."""
    import torch

    whole: dict[str, list[list[int]]] = {
        "response_mask": [_right(row.response_mask, response, 0) for row in rows],
        "version_low": [_right(_versions(row, "low"), response, UNOWNED) for row in rows],
        "version_high": [_right(_versions(row, "high"), response, UNOWNED) for row in rows],
    }
    real: dict[str, list[list[float]]] = {
        "rollout_log_probs": [_right(row.logprobs, response, 0.0) for row in rows],
        "scores": [_right(_score(row), response, 0.0) for row in rows],
        "temperature": [_right(_temperatures(row), response, 1.0) for row in rows],
    }
    return {
        **{name: torch.tensor(values) for name, values in whole.items()},
        **{name: torch.tensor(values, dtype=dtype) for name, values in real.items()},
    }


def _add_text(result: Any, rows: Sequence[RowColumns], batch: Batch, tensordict: Any) -> Any:
    """Add non-tensor data as text, which every tensordict version slices, stacks and pickles."""
    records = {record.rollout.id: msgspec.json.encode(record).decode() for record in batch.rollouts}
    columns = {
        "rollout_id": [row.rollout_id for row in rows],
        "group_id": [row.group_id for row in rows],
        "turns": [msgspec.json.encode(row.turns).decode() for row in rows],
        "versions": [msgspec.json.encode(row.versions).decode() for row in rows],
        "record": [records[row.rollout_id] for row in rows],
    }
    for name, values in columns.items():
        result[name] = tensordict.NonTensorStack(*values)
    with_rows = {row.rollout_id for row in rows}
    rowless = [(n, record) for n, record in enumerate(batch.rollouts) if record.rollout.id not in with_rows]
    size = result.batch_size
    result["form"] = tensordict.NonTensorData(batch.form, batch_size=size)
    result["rowless"] = tensordict.NonTensorData(msgspec.json.encode(rowless).decode(), batch_size=size)
    return result


def from_tensordict(tensors: Any) -> Batch:
    """Restore the batch from a TensorDict of `to_tensordict`, in the precision of its tensors."""
    torch, _ = _libraries()
    there = set(tensors.keys())
    missing = [name for name in (*TENSORS, *OTHERS) if name not in there]
    if missing:
        raise UsageError(f"the TensorDict has no {missing[0]!r}; `to_tensordict` makes one that has")
    both = torch.cat([tensors["prompts"], tensors["responses"]], dim=1)
    columns = {name: tensors[name].tolist() for name in TENSORS}
    columns |= {name: list(tensors.get(name).tolist()) for name in OTHERS if name not in ("form", "rowless")}
    records: dict[int, RolloutRecord] = {}
    rows: list[Row] = []
    with usage_errors("the TensorDict is not a consistent batch"):
        for n in range(len(both)):
            line = {name: values[n] for name, values in columns.items()}
            record = msgspec.json.decode(line["record"], type=RolloutRecord)
            if records.setdefault(line["rollout"], record) != record:
                raise ValueError(
                    f"rows of rollout {line['rollout_id']} hold different records of it;"
                    " make the TensorDict again with `to_tensordict`"
                )
            if not bool((both[n] == tensors["input_ids"][n]).all()):
                raise ValueError(f"{_where(line)}: input_ids must be the prompt followed by the response")
            rows.append(_row(line, record, lambda value: tensors["scores"].new_tensor(value).item()))
        idle = msgspec.json.decode(tensors["rowless"], type=list[tuple[int, RolloutRecord]])
        rollouts = [record for _, record in sorted((*records.items(), *idle), key=lambda pair: pair[0])]
        return Batch(form=tensors["form"], rows=in_order(rows), rollouts=tuple(rollouts))


def _row(line: dict[str, Any], record: RolloutRecord, rounded: Callable[[float], float]) -> Row:
    where = _where(line)
    if line["rollout_id"] != record.rollout.id or line["group_id"] != record.rollout.group_id:
        raise ValueError(f"{where}: its record is of rollout {record.rollout.id}")
    width = len(line["prompts"])
    attended = line["attention_mask"]
    prompt, response = sum(attended[:width]), sum(attended[width:])
    if attended != _left([1] * prompt, width, 0) + _right([1] * response, len(line["responses"]), 0):
        raise ValueError(f"{where}: its attention mask is not a padded prompt and a padded response")
    if line["position_ids"][width - prompt : width + response] != list(range(prompt + response)):
        raise ValueError(f"{where}: position_ids must count the tokens of the row from 0")
    row = RowColumns(
        rollout_id=line["rollout_id"],
        group_id=line["group_id"],
        row=line["row"],
        prompt_ids=tuple(line["prompts"][width - prompt :]),
        response_ids=tuple(line["responses"][:response]),
        response_mask=tuple(line["response_mask"][:response]),
        logprobs=tuple(line["rollout_log_probs"][:response]),
        versions=msgspec.json.decode(line["versions"], type=tuple[VersionSpan, ...]),
        turns=msgspec.json.decode(line["turns"], type=tuple[OwnedTurn, ...]),
        weight=line["weight"],
        score=record.score if record.score is not None else math.nan,
        rewards=record.outcome.rewards,
        failure=failure_kind(record.outcome),
        attempts=record.attempts,
    )
    _check_columns(row, line, rounded)
    return row.to_row(record)


def _where(line: dict[str, Any]) -> str:
    return describe_columns(line | {"turns": msgspec.json.decode(line["turns"])})


def _check_columns(row: RowColumns, line: dict[str, Any], rounded: Callable[[float], float]) -> None:
    """Check that redundant columns agree, in the precision of the tensors."""
    width = len(line["responses"])
    columns = {
        "scores": _right([rounded(value) for value in _score(row)], width, 0.0),
        "temperature": _right([rounded(value) for value in _temperatures(row)], width, 1.0),
        "rollout_log_probs": _right(row.logprobs, width, 0.0),
        "version_low": _right(_versions(row, "low"), width, UNOWNED),
        "version_high": _right(_versions(row, "high"), width, UNOWNED),
        "response_mask": _right(row.response_mask, width, 0),
    }
    for name, expected in columns.items():
        if line[name] != expected:
            at = next(
                n for n, pair in enumerate(zip(line[name], expected, strict=True)) if pair[0] != pair[1]
            )
            turn = next((t.id for t in row.turns if t.start <= at < t.end), row.turns[-1].id)
            where = f"rollout {row.rollout_id}, turn {turn}"
            raise ValueError(
                f"{where}: {name} is {line[name][at]} at response token {at}, where {expected[at]} belongs"
            )


# --- rows ----------------------------------------------------------------------------------------


def _length(part: str, lengths: list[int], limit: int | None, batch: Batch) -> int:
    longest = max(lengths)
    if limit is not None and longest > limit:
        where = batch.rows[lengths.index(longest)].where
        raise UsageError(f"{where}: its {part} has {longest} tokens, more than {part}_length={limit}")
    return longest if limit is None else limit


def _left(values: Sequence[int], width: int, pad: int) -> list[int]:
    return [pad] * (width - len(values)) + list(values)


def _right(values: Sequence[T], width: int, pad: T) -> list[T]:
    return list(values) + [pad] * (width - len(values))


def _last(row: RowColumns) -> list[int]:
    """Mask with 1 at the last owned token."""
    end = row.turns[-1].end
    return [0] * (end - 1) + [1] + [0] * (len(row.response_ids) - end)


def _score(row: RowColumns) -> list[float]:
    return [row.score if last else 0.0 for last in _last(row)]


def _temperatures(row: RowColumns) -> list[float]:
    values = [1.0] * len(row.response_ids)
    for turn in row.turns:
        values[turn.start : turn.end] = [turn.temperature] * (turn.end - turn.start)
    return values


def _versions(row: RowColumns, bound: Literal["low", "high"]) -> list[int]:
    values = [UNOWNED] * len(row.response_ids)
    for span in row.versions:
        values[span.start : span.end] = [getattr(span, bound)] * (span.end - span.start)
    return values


def _libraries() -> tuple[Any, Any]:
    try:
        import tensordict
        import torch
    except ImportError as error:
        raise UsageError("a TensorDict needs torch and tensordict: pip install 'afield[batches]'") from error
    return torch, tensordict
