"""Training record: what the trainer computed for each sampled token.

`rollouts/step-0001.tokens` lies beside the rollouts of its step and is removed with them:

    bytes 0-7    AFTOKENS
    bytes 8-11   length of the table, little-endian
    table        JSON [[rollout id, length of its block], ...]
    blocks       one per rollout, in the order of the table; see `afield.utils.columns`

A block has the columns of `COLUMNS`, one value per token of the turns in its header. Values that were not
computed are NaN.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from afield.errors import DamagedFile
from afield.utils.columns import pack, unpack

MAGIC = b"AFTOKENS"
SUFFIX = ".tokens"
VALUES = ("logprob", "entropy", "ratio", "importance", "advantage")
"""Columns of float32 values, as `TokenRecord` explains them."""
COLUMNS = (*VALUES, "mask")


class MaskReason(StrEnum):
    """Reason why a token in the batch has no policy gradient; others are those of `exclusions`."""

    CLIPPED = "clipped"
    """The loss clipped its ratio in the last update, which removes its gradient."""
    IMPORTANCE = "importance"
    """Its importance weight is 0: with `importance = "masked"`, sampler and trainer are too far apart."""
    SKIPPED = "skipped_update"
    """The last update of its rollout was skipped because the gradient was not finite."""


class RecordedTurn(Struct, frozen=True):
    """Turn of a rollout in a training record."""

    id: str
    """Turn id."""
    tokens: int
    """Number of sampled tokens."""
    start: int = -1
    """Index of its first token in the columns; -1 for a turn that is in no training sequence."""
    reason: str = ""
    """Why the turn is in no training sequence (`exclusions.REASONS`); empty if it is in one."""


class TokenRecord(Struct, frozen=True):
    """Values of the sampled tokens of one rollout in the step that trained it.

    - `logprob`: the trainer's log-probability before the first update, at the sampling temperature.
    - `entropy`: entropy of the distribution that the token was drawn from, by the same policy, in nats.
    - `ratio`: ratio of the policy in training to the policy before the step, in the token's last update.
    - `importance`: importance weight, which corrects for the sampler's policy.
    - `advantage`: advantage of the token's turn.
    - `mask`: index into `reasons`; 0 for a token that trains.
    """

    turns: tuple[RecordedTurn, ...]
    """Turns with sampled tokens."""
    columns: dict[str, array[Any]]
    """Values by name (`COLUMNS`)."""
    reasons: tuple[str, ...] = ("",)
    """Reasons that `mask` refers to; the first is empty."""

    def encode(self) -> bytes:
        turns = msgspec.to_builtins(self.turns)
        return pack(self.columns, {"mask": self.reasons}, turns=turns)


def decode(data: bytes) -> TokenRecord:
    """Read a block; raises ValueError if it is damaged."""
    header, columns = unpack(data)
    turns = msgspec.convert(header["turns"], tuple[RecordedTurn, ...])
    reasons = next(column["values"] for column in header["columns"] if column["name"] == "mask")
    return TokenRecord(turns, columns, tuple(reasons))


def encode_file(records: Mapping[str, bytes]) -> bytes:
    """File of encoded records, by rollout id."""
    table = json.dumps([[rollout_id, len(block)] for rollout_id, block in records.items()]).encode()
    return b"".join((MAGIC, len(table).to_bytes(4, "little"), table, *records.values()))


def record_file(rollouts: Path) -> Path:
    """File with the training record of a file of rollouts."""
    return rollouts.with_suffix(SUFFIX)


def read_table(path: Path) -> dict[str, tuple[int, int]]:
    """Position and length of each rollout's block; empty if there is no file. Raises DamagedFile."""
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise DamagedFile(f"{path} is not a training record: it does not begin with {MAGIC.decode()}")
            size = int.from_bytes(file.read(4), "little")
            rows: Sequence[tuple[str, int]] = msgspec.json.decode(file.read(size), type=list[tuple[str, int]])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise DamagedFile(f"{path} cannot be read: {error}") from error
    places: dict[str, tuple[int, int]] = {}
    offset = len(MAGIC) + 4 + size
    for rollout_id, length in rows:
        places[rollout_id] = (offset, length)
        offset += length
    return places


def read_record(path: Path, offset: int, length: int) -> TokenRecord:
    """Record of one rollout; raises DamagedFile if it is missing or damaged."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return decode(file.read(length))
    except (OSError, ValueError, LookupError, StopIteration) as error:  # msgspec's errors are ValueErrors
        raise DamagedFile(f"the training record {path} cannot be read at byte {offset}: {error}") from error
