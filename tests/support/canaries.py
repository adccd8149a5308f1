"""What a hostile agent must not reach, and whether it did: seen from outside."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.sandboxes import all_command_lines


class Canaries:
    """What must not be reached: a secret, a file, a process, and whoever listens here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secret = "-".join(("canary", "secret", secrets.token_hex(8)))
        self.mark = f"mark-{secrets.token_hex(8)}"
        self.seen = False  # a process with that mark
        self.born: set[int] = set()
        self._file = folder / "outside.txt"
        self._file.write_text("as it was")
        self._victim = subprocess.Popen(["sleep", "600"])
        self._heard: list[str] = []
        self._listening: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self.port = self._listen(socket.AF_INET, ("0.0.0.0", 0))
        with contextlib.suppress(OSError):  # where there is no such address
            self._listen(socket.AF_INET6, ("::1", self.port))
        self.sockets = [f"@{self.mark}", f"{folder}/canary.sock", f"{folder}/agent/canary.sock"]
        for address in self.sockets:
            self._listen(socket.AF_UNIX, address.replace("@", "\0", 1))
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(("0.0.0.0", 0))
        self._start(self._answer)

    def row(self) -> dict[str, Any]:
        """What the attacks are told."""
        scratch = self.folder / "scratch"
        scratch.mkdir(exist_ok=True)
        return {
            "look": [str(self.folder), str(Path.home() / ".aws")],
            "port": self.port,
            "udp": self._udp.getsockname()[1],
            "hosts": [socket.gethostbyname(socket.gethostname())],
            "sockets": self.sockets,
            "other": "other.1",
            "outside": [str(self._file)],
            "reward_file": f"{self.folder}/reward.json",
            "scratch": str(scratch),
            "victims": [self._victim.pid],
            "mark": self.mark,
        }

    def harm(self) -> list[str]:
        found = [f"somebody reached {place}" for place in self._heard]
        if self._file.read_text() != "as it was":
            found.append("the file was written")
        state = Path(f"/proc/{self._victim.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return found if state == "S" else [*found, f"the victim is in state {state}"]

    def watch(self, controller: int) -> None:
        """What it starts, and whether daemons are there at all, from now on."""
        threading.Thread(target=self._watch, args=(controller,), daemon=True).start()

    def close(self) -> None:
        self._over.set()
        self._victim.kill()
        self._victim.wait()
        sockets = (*self._listening, self._udp)
        for made in sockets:
            with contextlib.suppress(OSError):  # not connected; its thread wakes up all the same
                made.shutdown(socket.SHUT_RDWR)
        # A thread that still reads would read whatever gets the number of the closed socket next.
        for thread in self._threads:
            thread.join()
        for made in sockets:
            made.close()

    def _watch(self, controller: int) -> None:
        while not self._over.wait(0.3):
            self.born |= descendants(controller)
            self.seen = self.seen or any(self.mark.encode() in line for line in all_command_lines())

    def _listen(self, family: int, address: Any) -> int:
        made = socket.socket(family)
        made.bind(address)
        made.listen()
        self._listening.append(made)
        self._start(self._accept, made)
        return made.getsockname()[1] if family != socket.AF_UNIX else 0

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        self._threads.append(threading.Thread(target=target, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self, made: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = made.accept()
                self._heard.append(str(made.getsockname()))
                link.close()

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                _, sender = self._udp.recvfrom(100)
                if self._over.is_set():
                    return
                self._heard.append("udp")
                self._udp.sendto(b"heard", sender)


def descendants(pid: int) -> set[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(entry.name))
    found, todo = set(), [pid]
    while todo:
        born = parents.get(todo.pop(), [])
        found |= set(born)
        todo += born
    return found


@contextmanager
def watched() -> Iterator[Canaries]:
    # A short path, because of the socket in it; and not beneath one that pytest keeps.
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    (folder / "agent").mkdir()
    canaries = Canaries(folder)
    try:
        yield canaries
    finally:
        canaries.close()
        shutil.rmtree(folder)
