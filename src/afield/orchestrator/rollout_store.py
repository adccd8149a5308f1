"""Finished rollouts on disk, from their end until the step that took them is done.

They leave memory as soon as they are whole; whoever trains on them reads them back. One file each, there
as a whole or not at all. Putting one again replaces it by the same.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from afield.durable_files import write_whole
from afield.errors import NotFound, Unavailable
from afield.types import RolloutResult

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(RolloutResult)


class RolloutStore:
    def __init__(self, root: Path, *, durable: bool = False) -> None:
        """`durable`: a rollout that was put survives a power cut, too."""
        self._root = root
        self._durable = durable

    def put(self, result: RolloutResult) -> None:
        path = self._path(result.rollout.id)
        partial = path.with_name(f"{path.name}.partial")
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(path, _ENCODER.encode(result), durable=self._durable)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            told = f"cannot keep the rollout {result.rollout.id} in {self._root}: {error}"
            raise Unavailable(f"{told}; make room, and it goes on") from error

    def get(self, rollout_id: str) -> RolloutResult:
        path = self._path(rollout_id)
        try:
            return _DECODER.decode(path.read_bytes())
        except FileNotFoundError:
            raise NotFound(f"rollout {rollout_id} is not in {self._root}") from None
        except (OSError, msgspec.MsgspecError) as error:
            raise Unavailable(f"cannot read {path}: {error}") from error

    def holds(self, rollout_id: str) -> bool:
        return self._path(rollout_id).exists()

    def remove(self, rollout_id: str) -> None:
        self._path(rollout_id).unlink(missing_ok=True)

    def __len__(self) -> int:
        if not self._root.exists():
            return 0
        with os.scandir(self._root) as found:
            return sum(entry.name.endswith(".rollout") for entry in found)

    def _path(self, rollout_id: str) -> Path:
        return self._root / f"{rollout_id}.rollout"
