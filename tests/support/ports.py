"""Ports for servers that are told theirs, and for those that come back at the same one.

They lie below what the kernel gives to outgoing connections: none of those takes one of them between the
choice and the start, or while a server that was killed is down.
"""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

LOWEST, TRIED = 10_000, 1000
OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    first = int(OUTGOING.read_text().split()[0]) if OUTGOING.exists() else 32_768
    lowest = min(LOWEST, first // 2)
    chosen: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.SystemRandom().sample(range(lowest, first), TRIED):
            one = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", port))
                chosen.append(port)
            if len(chosen) == count:
                return chosen
    raise OSError(f"of {TRIED} ports between {lowest} and {first} fewer than {count} are free")
