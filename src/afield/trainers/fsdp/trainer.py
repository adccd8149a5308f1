"""A trainer whose model is shared out over several processes, one for each device.

To the loop it is a trainer like any other: `step`, `export`, `save` and `restore` go to every rank
(`afield.trainers.fsdp.rank`), and what they answer comes back once. Its checkpoints are those of a single
process, so a run may go on with another number of devices. What all ranks refuse alike is refused; a rank
that dies, or that fails alone, ends the others, and every later call says so.
"""

from __future__ import annotations

import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from afield.errors import AfieldError, Unavailable, UsageError
from afield.interfaces.trainer import StepReport
from afield.types import Group

ALIKE_S = 30.0  # ranks that fail alike do so within this time of each other
END_S = 10.0
Method = Literal["step", "export", "publish_as", "save", "restore"]


class RankReply(NamedTuple):
    """What a rank says to a call: a result, an error that leaves it as it was, or its last words."""

    kind: Literal["done", "refused", "broken"]
    result: Any = None
    error: AfieldError | None = None
    last_words: str = ""


class RankConfig(NamedTuple):
    """What a rank is told first. `meeting` is a file that does not exist yet, where the ranks meet."""

    rank: int
    ranks: int
    meeting: str
    device: str
    model_path: str
    settings: dict[str, Any]


class RankProcess(NamedTuple):
    number: int
    process: subprocess.Popen[bytes]
    wire: Connection


class FSDPTrainer:
    """`settings` are GRPO's. Without CUDA, or with device "cpu", the ranks share this machine's CPU."""

    def __init__(
        self, model_path: str | Path, *, devices: int, device: str | None = None, **settings: Any
    ) -> None:
        kind = _kind(device, devices)
        self.devices = devices
        self._broken = ""
        self._scratch = tempfile.TemporaryDirectory(prefix="afield-ranks-")
        meeting = str(Path(self._scratch.name) / "meeting")
        self._ranks = [_start(n) for n in range(devices)]
        begins = [
            RankConfig(
                n, devices, meeting, f"cuda:{n}" if kind == "cuda" else kind, str(model_path), settings
            )
            for n in range(devices)
        ]
        for rank, begin in zip(self._ranks, begins, strict=True):
            self._say(rank, pickle.dumps(begin))
        try:
            self.context: int | None = self._hear()
        except AfieldError:
            self.close()
            raise

    def step(self, groups: Sequence[Group]) -> StepReport:
        return self._all("step", tuple(groups))

    def export(self, directory: Path) -> None:
        self._all("export", Path(directory).absolute())

    def publish(self, directory: Path, *, version: int, dtype: str) -> dict[str, float]:
        return self._all("publish_as", Path(directory).absolute(), version, dtype)

    def save(self, directory: Path) -> None:
        self._all("save", Path(directory).absolute())

    def restore(self, directory: Path) -> None:
        self._all("restore", Path(directory).absolute())

    def close(self) -> None:
        """End the ranks. They end by themselves, too, when this process does."""
        self._broken = self._broken or "the ranks have been closed; make a new trainer"
        for rank in self._ranks:
            rank.wire.close()  # doing it again is fine
        for rank in self._ranks:
            try:
                rank.process.wait(END_S)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
        self._scratch.cleanup()

    # --- the ranks ------------------------------------------------------------------------------------

    def _all(self, verb: Method, *arguments: Any) -> Any:
        if self._broken:
            raise Unavailable(self._broken)
        message = pickle.dumps((verb, arguments))
        for rank in self._ranks:
            self._say(rank, message)
        return self._hear()

    def _say(self, rank: RankProcess, message: bytes) -> None:
        try:
            rank.wire.send_bytes(message)
        except OSError:
            self._give_up(rank, "")

    def _hear(self) -> Any:
        """What rank 0 answers, when all have. After a first failure the others have little time left."""
        waiting = {rank.wire: rank for rank in self._ranks}
        heard: dict[int, RankReply] = {}
        while waiting:
            refused = {n: told.error for n, told in heard.items() if told.error is not None}
            ready = wait(list(waiting), ALIKE_S if refused else None)
            if not ready:
                number = min(refused)
                self._give_up(self._ranks[number], str(refused[number]))
            for wire in ready:
                assert isinstance(wire, Connection)
                rank = waiting.pop(wire)
                heard[rank.number] = self._read(rank)
        for told in heard.values():
            if told.error is not None:
                raise told.error
        return heard[0].result

    def _read(self, rank: RankProcess) -> RankReply:
        try:
            told = pickle.loads(rank.wire.recv_bytes())
        except (EOFError, OSError):
            self._give_up(rank, "")
        if told.kind == "broken":
            self._give_up(rank, told.last_words)
        return told

    def _give_up(self, rank: RankProcess, why: str) -> NoReturn:
        why = why or _ended(rank.process)
        self._broken = (
            f"rank {rank.number} of {self.devices} failed: {why};"
            " make a new trainer and restore its last checkpoint"
        )
        for other in self._ranks:
            other.process.kill()
        self.close()
        raise Unavailable(self._broken)


def _kind(device: str | None, devices: int) -> str:
    import torch

    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise UsageError(f'device {kind!r} is one device, but devices = {devices}; say "cuda" or "cpu"')
    if kind == "cuda" and torch.cuda.device_count() < devices:
        raise UsageError(
            f"devices = {devices}, but this machine has {torch.cuda.device_count()} GPUs; lower it"
        )
    return kind


def _start(number: int) -> RankProcess:
    ours, theirs = socket.socketpair()
    with theirs:
        # A program of its own, so that nothing of this one's main module is run again.
        command = [sys.executable, "-m", "afield.trainers.fsdp.rank", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    return RankProcess(number, process, Connection(ours.detach()))


def _ended(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(END_S)
    except subprocess.TimeoutExpired:
        return "it does not answer"
    return f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with status {code}"
