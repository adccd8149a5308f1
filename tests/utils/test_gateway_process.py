"""Gateway processes without a log file of their own, and with descriptors that they inherit."""

from __future__ import annotations

import os
import signal
import socket
import sys

import pytest

from afield.errors import Unavailable, UsageError
from afield.utils.gateway_process import GatewayProcess

pytestmark = pytest.mark.anyio
SERVES = """
import json, os, sys
descriptor = int(sys.stdin.readline())
os.write(descriptor, b"x")
print(json.dumps({"url": "http://gateway"}), flush=True)
sys.stdin.read()
"""


def gateway(*command: str, start_timeout_s: float = 60.0) -> GatewayProcess:
    return GatewayProcess(command, os.environ, None, start_timeout_s=start_timeout_s)


async def test_a_gateway_gets_settings_and_descriptors_and_tells_its_address() -> None:
    process = gateway(sys.executable, "-c", SERVES)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        await process.start(b"%d" % theirs.fileno(), (theirs.fileno(),))
        assert await process.ready() == {"url": "http://gateway"}
        assert ours.recv(1) == b"x"
    assert process.returncode is None
    await process.stop()
    assert process.returncode == await process.wait() == -signal.SIGTERM
    assert await process.ended() == "the gateway ended with code -15; see its log"


async def test_a_gateway_that_ends_at_once_is_reported() -> None:
    process = gateway("false")
    await process.start(b"")
    with pytest.raises(UsageError, match="the gateway did not start:\nits log says why"):
        await process.ready()
    await process.stop()


async def test_a_gateway_that_says_nothing_is_not_waited_for_without_end() -> None:
    process = gateway("sleep", "600", start_timeout_s=0.01)
    await process.start(b"")
    with pytest.raises(Unavailable, match=r"the gateway did not start within 0.01 s; see its log$"):
        await process.ready()
    await process.stop()
    assert process.returncode == -signal.SIGTERM
