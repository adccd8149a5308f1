"""Helpers of server commands: event loop, loopback check, exit with parent."""

from __future__ import annotations

import asyncio
import ipaddress
import os
from collections.abc import Coroutine
from typing import Any


def run_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on uvloop if it is installed, which halves CPU time, otherwise on asyncio."""
    try:
        from uvloop import new_event_loop
    except ModuleNotFoundError:
        new_event_loop = None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
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
