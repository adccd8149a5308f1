"""FSDP trainer: GRPO with its model sharded over one process per device.

`step`, `export`, `publish`, `save` and `restore` run on every rank (`afield.trainers.fsdp.rank`); the reply
of rank 0 is returned. Checkpoints are sharded, and may be read by any number of ranks and by a single
process. An error that all ranks raise is raised here. A rank that dies or fails alone ends
the others, and every later call raises Unavailable.
"""

from __future__ import annotations

import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from afield.errors import AfieldError, Unavailable, UsageError
from afield.interfaces.trainer import StepReport
from afield.types import Group
from afield.utils.child_process import wait_or_kill_popen

SAME_ERROR_TIMEOUT_S = 30.0
"""Time within which all ranks must raise the same error, in seconds."""
EXIT_TIMEOUT_S = 10.0
Method = Literal[
    "step", "export", "publish_as", "finish_publication", "save", "begin_save", "finish_save", "restore"
]


class RankReply(NamedTuple):
    """A rank's reply to a call."""

    kind: Literal["done", "refused", "broken"]
    """`refused` leaves the rank as it was; after `broken` it exits."""
    result: Any = None
    """Return value, if `done`."""
    error: AfieldError | None = None
    """Error to raise, if `refused`."""
    message: str = ""
    """Reason, if `broken`."""


class RankConfig(NamedTuple):
    """First message to a rank."""

    rank: int
    """Number of the rank, from 0."""
    ranks: int
    """Number of ranks."""
    meeting: str
    """Path of a new file for torch.distributed's file store."""
    device: str
    """Device of the rank, such as `cuda:0` or `cpu`."""
    model_path: str
    """Model directory."""
    settings: dict[str, Any]
    """Settings of GRPO."""


class RankProcess(NamedTuple):
    """Running rank."""

    number: int
    """Number of the rank, from 0."""
    process: subprocess.Popen[bytes]
    """Process of the rank."""
    connection: Connection
    """Connection for calls and replies."""


class FSDPTrainer:
    """A `Trainer` over several ranks. `settings` are those of GRPO. Without CUDA, or with device "cpu", the
    ranks share this machine's CPU."""

    def __init__(
        self, model_path: str | Path, *, devices: int, device: str | None = None, **settings: Any
    ) -> None:
        kind = _kind(device, devices)
        self.devices = devices
        self._broken = ""
        self._scratch = tempfile.TemporaryDirectory(prefix="afield-ranks-")
        meeting = str(Path(self._scratch.name) / "meeting")
        self._ranks = [_start(n) for n in range(devices)]
        configs = [
            RankConfig(
                n, devices, meeting, f"cuda:{n}" if kind == "cuda" else kind, str(model_path), settings
            )
            for n in range(devices)
        ]
        for rank, config in zip(self._ranks, configs, strict=True):
            self._send(rank, pickle.dumps(config))
        try:
            self.context: int | None = self._receive()
        except AfieldError:
            self.close()
            raise

    def step(self, groups: Sequence[Group]) -> StepReport:
        return self._all("step", tuple(groups))

    def export(self, directory: Path) -> None:
        self._all("export", Path(directory).absolute())

    def publish(self, directory: Path, *, version: int, dtype: str) -> dict[str, float]:
        return self._all("publish_as", Path(directory).absolute(), version, dtype)

    def finish_publication(self) -> None:
        self._all("finish_publication")

    def save(self, directory: Path) -> None:
        self._all("save", Path(directory).absolute())

    def begin_save(self, directory: Path) -> Callable[[], None]:
        """Copy the shards and write a checkpoint in threads of the ranks; the returned function waits for its
        end. Other calls may come between the two."""
        self._all("begin_save", Path(directory).absolute())
        return lambda: self._all("finish_save")

    def restore(self, directory: Path) -> None:
        self._all("restore", Path(directory).absolute())

    def close(self) -> None:
        """End the ranks, which also exit when this process does; idempotent."""
        self._broken = self._broken or "the ranks have been closed; make a new trainer"
        for rank in self._ranks:
            rank.connection.close()
        for rank in self._ranks:
            wait_or_kill_popen(rank.process, EXIT_TIMEOUT_S)
        self._scratch.cleanup()

    # --- the ranks ------------------------------------------------------------------------------------

    def _all(self, method: Method, *arguments: Any) -> Any:
        if self._broken:
            raise Unavailable(self._broken)
        message = pickle.dumps((method, arguments))
        for rank in self._ranks:
            self._send(rank, message)
        return self._receive()

    def _send(self, rank: RankProcess, message: bytes) -> None:
        try:
            rank.connection.send_bytes(message)
        except OSError:
            self._give_up(rank, "")

    def _receive(self) -> Any:
        """The result of rank 0 once all ranks have replied, soon after a first error."""
        waiting = {rank.connection: rank for rank in self._ranks}
        replies: dict[int, RankReply] = {}
        while waiting:
            refused = {n: reply.error for n, reply in replies.items() if reply.error is not None}
            ready = wait(list(waiting), SAME_ERROR_TIMEOUT_S if refused else None)
            if not ready:
                number = min(refused)
                self._give_up(self._ranks[number], str(refused[number]))
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                replies[rank.number] = self._read(rank)
        for reply in replies.values():
            if reply.error is not None:
                raise reply.error
        return replies[0].result

    def _read(self, rank: RankProcess) -> RankReply:
        try:
            reply = pickle.loads(rank.connection.recv_bytes())
        except (EOFError, OSError):
            self._give_up(rank, "")
        if reply.kind == "broken":
            self._give_up(rank, reply.message)
        return reply

    def _give_up(self, rank: RankProcess, why: str) -> NoReturn:
        why = why or _exit_reason(rank.process)
        self._broken = (
            f"rank {rank.number} of {self.devices} failed: {why};"
            " make a new trainer and restore its last checkpoint"
        )
        for peer in self._ranks:
            peer.process.kill()
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
    parent, child = socket.socketpair()
    with child:
        # Not multiprocessing: it would run this program's main module again.
        command = [sys.executable, "-m", "afield.trainers.fsdp.rank", str(child.fileno())]
        process = subprocess.Popen(command, pass_fds=[child.fileno()], stdin=subprocess.DEVNULL)
    return RankProcess(number, process, Connection(parent.detach()))


def _exit_reason(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "it does not answer"
    return f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with status {code}"
