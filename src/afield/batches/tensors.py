"""Batches as a TensorDict, padded as trainers expect: prompts on the left, responses on the right.

Real numbers become float32 unless `dtype` says float64: then, and only then, they come back bit for bit.
Where a response token is not owned its log-probability is 0 and its versions are -1. What is no tensor
(ids, turns, records) travels along as non-tensor data, so that `from_tensordict` gives the batch back, also
from a part of the rows that holds whole rollouts. Needs torch and tensordict (extra `batches`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from afield.batches.sample import (
    Batch,
    OwnedTurn,
    RolloutRecord,
    Sample,
    describe_row,
    failure_kind,
    in_order,
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
    """One row per sample. The lengths are the longest there is, or those that are given.

    Tensors: `prompts`, `responses`, `input_ids`, `attention_mask`, `position_ids`, `response_mask`,
    `rollout_log_probs`, `scores` (the rollout's, on the row's last owned token), `temperature`,
    `version_low`, `version_high`, `weight`, `row`, and `rollout`, the place of the rollout in the batch.
    Texts: `rollout_id`, `group_id`, `turns`, `versions`, `record` of each row; `form` and `rowless` of all.
    """
    torch, tensordict = _libraries()
    if not batch.samples:
        raise UsageError("a batch without rows has no tensors: no rollout in it carries a reward")
    samples = batch.samples
    prompt = _length("prompt", [len(s.prompt_ids) for s in samples], prompt_length, batch)
    response = _length("response", [len(s.response_ids) for s in samples], response_length, batch)
    places = {record.rollout.id: n for n, record in enumerate(batch.rollouts)}
    tensors = {
        **_ids(samples, prompt, response, pad_token_id),
        **_per_token(samples, response, dtype or torch.float32),
        "weight": torch.tensor([s.weight for s in samples], dtype=dtype or torch.float32),
        "row": torch.tensor([s.row for s in samples]),
        "rollout": torch.tensor([places[s.rollout_id] for s in samples]),
    }
    made = tensordict.TensorDict(tensors, batch_size=[len(samples)])
    return _with_others(made, batch, tensordict)


def _ids(samples: Sequence[Sample], prompt: int, response: int, pad: int) -> dict[str, Any]:
    import torch

    prompts = torch.tensor([_left(s.prompt_ids, prompt, pad) for s in samples])
    responses = torch.tensor([_right(s.response_ids, response, pad) for s in samples])
    attention = torch.tensor(
        [
            _left([1] * len(s.prompt_ids), prompt, 0) + _right([1] * len(s.response_ids), response, 0)
            for s in samples
        ]
    )
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(dim=1) - 1).clamp(min=0),
    }


def _per_token(samples: Sequence[Sample], response: int, dtype: Any) -> dict[str, Any]:
    """Of the response tokens."""
    import torch

    whole: dict[str, list[list[int]]] = {
        "response_mask": [_right(s.response_mask, response, 0) for s in samples],
        "version_low": [_right(_versions(s, "low"), response, UNOWNED) for s in samples],
        "version_high": [_right(_versions(s, "high"), response, UNOWNED) for s in samples],
    }
    real: dict[str, list[list[float]]] = {
        "rollout_log_probs": [_right(s.logprobs, response, 0.0) for s in samples],
        "scores": [_right(_score(s), response, 0.0) for s in samples],
        "temperature": [_right(_temperatures(s), response, 1.0) for s in samples],
    }
    return {
        **{name: torch.tensor(rows) for name, rows in whole.items()},
        **{name: torch.tensor(rows, dtype=dtype) for name, rows in real.items()},
    }


def _with_others(made: Any, batch: Batch, tensordict: Any) -> Any:
    """Texts, because they survive slicing, stacking and pickling whatever the version of tensordict."""
    of = {record.rollout.id: msgspec.json.encode(record).decode() for record in batch.rollouts}
    each = {
        "rollout_id": [s.rollout_id for s in batch.samples],
        "group_id": [s.group_id for s in batch.samples],
        "turns": [msgspec.json.encode(s.turns).decode() for s in batch.samples],
        "versions": [msgspec.json.encode(s.versions).decode() for s in batch.samples],
        "record": [of[s.rollout_id] for s in batch.samples],
    }
    for name, values in each.items():
        made[name] = tensordict.NonTensorStack(*values)
    rows = {s.rollout_id for s in batch.samples}
    idle = [(n, record) for n, record in enumerate(batch.rollouts) if record.rollout.id not in rows]
    made["form"] = tensordict.NonTensorData(batch.form, batch_size=made.batch_size)
    made["rowless"] = tensordict.NonTensorData(msgspec.json.encode(idle).decode(), batch_size=made.batch_size)
    return made


def from_tensordict(tensors: Any) -> Batch:
    """What `to_tensordict` made, as exact as its numbers are."""
    torch, _ = _libraries()
    there = set(tensors.keys())
    missing = [name for name in (*TENSORS, *OTHERS) if name not in there]
    if missing:
        raise UsageError(f"the TensorDict has no {missing[0]!r}; `to_tensordict` makes one that has")
    both = torch.cat([tensors["prompts"], tensors["responses"]], dim=1)
    columns = {name: tensors[name].tolist() for name in TENSORS}
    columns |= {name: list(tensors.get(name).tolist()) for name in OTHERS if name not in ("form", "rowless")}
    records: dict[int, RolloutRecord] = {}
    samples: list[Sample] = []
    with usage_errors("the TensorDict does not line up"):
        for n in range(len(both)):
            line = {name: values[n] for name, values in columns.items()}
            record = msgspec.json.decode(line["record"], type=RolloutRecord)
            if records.setdefault(line["rollout"], record) != record:
                raise ValueError(f"rollout {line['rollout_id']} has two records that differ")
            if not bool((both[n] == tensors["input_ids"][n]).all()):
                raise ValueError(f"{_where(line)}: input_ids are not its prompt and response")
            samples.append(_sample(line, record, lambda value: tensors["scores"].new_tensor(value).item()))
        idle = msgspec.json.decode(tensors["rowless"], type=list[tuple[int, RolloutRecord]])
        rollouts = [record for _, record in sorted((*records.items(), *idle), key=lambda known: known[0])]
        return Batch(form=tensors["form"], samples=in_order(samples), rollouts=tuple(rollouts))


def _sample(line: dict[str, Any], record: RolloutRecord, rounded: Callable[[float], float]) -> Sample:
    where = _where(line)
    if line["rollout_id"] != record.rollout.id or line["group_id"] != record.rollout.group_id:
        raise ValueError(f"{where}: its record is of rollout {record.rollout.id}")
    width = len(line["prompts"])
    attended = line["attention_mask"]
    prompt, response = sum(attended[:width]), sum(attended[width:])
    if attended != _left([1] * prompt, width, 0) + _right([1] * response, len(line["responses"]), 0):
        raise ValueError(f"{where}: its attention mask is not a padded prompt and a padded response")
    if line["position_ids"][width - prompt : width + response] != list(range(prompt + response)):
        raise ValueError(f"{where}: its positions do not count its tokens from 0")
    sample = Sample(
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
    _check_columns(sample, line, rounded)
    return sample


def _where(line: dict[str, Any]) -> str:
    return describe_row(line | {"turns": msgspec.json.decode(line["turns"])})


def _check_columns(sample: Sample, line: dict[str, Any], rounded: Callable[[float], float]) -> None:
    """What is told twice is told alike, as precisely as the tensors do."""
    width = len(line["responses"])
    told = {
        "scores": _right([rounded(value) for value in _score(sample)], width, 0.0),
        "temperature": _right([rounded(value) for value in _temperatures(sample)], width, 1.0),
        "rollout_log_probs": _right(sample.logprobs, width, 0.0),
        "version_low": _right(_versions(sample, "low"), width, UNOWNED),
        "version_high": _right(_versions(sample, "high"), width, UNOWNED),
        "response_mask": _right(sample.response_mask, width, 0),
    }
    for name, expected in told.items():
        if line[name] != expected:
            at = next(
                n for n, pair in enumerate(zip(line[name], expected, strict=True)) if pair[0] != pair[1]
            )
            turn = next((t.id for t in sample.turns if t.start <= at < t.end), sample.turns[-1].id)
            where = f"rollout {sample.rollout_id}, turn {turn}"
            raise ValueError(
                f"{where}: {name} is {line[name][at]} at response token {at}, where {expected[at]} belongs"
            )


# --- rows ----------------------------------------------------------------------------------------


def _length(what: str, lengths: list[int], wanted: int | None, batch: Batch) -> int:
    longest = max(lengths)
    if wanted is not None and longest > wanted:
        where = batch.samples[lengths.index(longest)].where
        raise UsageError(f"{where}: its {what} has {longest} tokens, more than {what}_length={wanted}")
    return longest if wanted is None else wanted


def _left(values: Sequence[int], width: int, pad: int) -> list[int]:
    return [pad] * (width - len(values)) + list(values)


def _right(values: Sequence[T], width: int, pad: T) -> list[T]:
    return list(values) + [pad] * (width - len(values))


def _last(sample: Sample) -> list[int]:
    """1 at the last owned token."""
    end = sample.turns[-1].end
    return [0] * (end - 1) + [1] + [0] * (len(sample.response_ids) - end)


def _score(sample: Sample) -> list[float]:
    return [sample.score if last else 0.0 for last in _last(sample)]


def _temperatures(sample: Sample) -> list[float]:
    values = [1.0] * len(sample.response_ids)
    for turn in sample.turns:
        values[turn.start : turn.end] = [turn.temperature] * (turn.end - turn.start)
    return values


def _versions(sample: Sample, which: Literal["low", "high"]) -> list[int]:
    values = [UNOWNED] * len(sample.response_ids)
    for span in sample.versions:
        values[span.start : span.end] = [getattr(span, which)] * (span.end - span.start)
    return values


def _libraries() -> tuple[Any, Any]:
    try:
        import tensordict
        import torch
    except ImportError as error:
        raise UsageError("a TensorDict needs torch and tensordict: pip install 'afield[batches]'") from error
    return torch, tensordict
