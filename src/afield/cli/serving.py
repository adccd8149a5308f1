"""Helpers of server commands: event loop, loopback check, exit with parent."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any


def run_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on uvloop if it is installed, which halves CPU time, otherwise on asyncio.

    Returns also when the coroutine is cancelled, as it is by SIGTERM once it serves.
    """
    try:
        from uvloop import new_event_loop
    except ModuleNotFoundError:
        new_event_loop = None
    if os.getpid() == 1:  # the kernel keeps unhandled signals from the first process of a container
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    with asyncio.Runner(loop_factory=new_event_loop) as runner, suppress(asyncio.CancelledError):
        runner.run(work)


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def exit_with_parent() -> None:
    """Exit when standard input closes, that is, when the parent process has ended."""
    while os.read(0, 4096):  # unbuffered: a thread inside a buffered reader would block the exit
        pass
    os._exit(0)
