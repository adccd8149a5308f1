"""Commands in a sandbox: what no system takes is refused by name, and what forks without end is only late."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import pytest

from afield import sandbox
from afield.errors import InfrastructureFailure, UsageError
from afield.interfaces import Sandbox
from afield.interfaces import sandbox as seam
from support.sandboxes import needs_bubblewrap

pytestmark = [pytest.mark.anyio, needs_bubblewrap]

BOMB = """
import os
while True:
    try:
        if os.fork() == 0:
            {each}
    except OSError:
        pass
"""


async def still_there(place: Sandbox) -> bool:
    return (await place.exec("echo on", timeout=20)).stdout == "on\n"


async def test_what_no_system_takes_is_refused_by_name_and_the_sandbox_continues() -> None:
    wrong: list[tuple[str, Any, Mapping[str, Any]]] = [
        ("command.*NUL", "echo a\0b", {}),
        (r"command.*\\ud800.*not Unicode", "echo \ud800", {}),
        ("command: an empty list", [], {}),
        ("env.*NUL", "env", {"env": {"A": "x\0"}}),
        ("env: 'A=B' is not a variable name", "env", {"env": {"A=B": "x"}}),
        ("env: '' is not a variable name", "env", {"env": {"": "x"}}),
        ("cwd.*NUL", "pwd", {"cwd": "/a\0b"}),
        ("timeout = nan", "true", {"timeout": math.nan}),
    ]
    async with sandbox() as place:
        for said, command, more in wrong:
            with pytest.raises(UsageError, match=said):
                await place.exec(command, **more)
        for path in ("", "a\0b", "\udcff"):
            with pytest.raises(UsageError, match="path"):
                await place.upload(path, b"x")
            with pytest.raises(UsageError, match="path"):
                await place.download(path)
        assert await still_there(place)


async def test_no_time_at_all_is_a_timeout() -> None:
    async with sandbox() as place:
        assert (await place.exec("sleep 60", timeout=0)).timed_out
        assert (await place.exec("sleep 60", timeout=-1)).timed_out
        assert (await place.exec("echo on", timeout=math.inf)).ok


@pytest.mark.parametrize("each", ["pass", "os.setsid()"])
async def test_a_command_that_forks_without_end_is_late_and_leaves_nothing(each: str) -> None:
    async with sandbox(options={"limits": {"pids": 100}}) as place:
        await place.upload("bomb.py", BOMB.format(each=each).encode())
        ran = await place.exec("python3 bomb.py", timeout=1)
        assert ran.timed_out and ran.exit_code is None
        left = await place.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout=20)
        assert not re.search("bomb", left.stdout)


async def test_a_file_larger_than_memory_should_hold_is_not_downloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("afield.local_sandbox.process.MAX_DOWNLOAD_BYTES", 1_000_000)
    async with sandbox() as place:
        assert (await place.exec("truncate -s 1000000 fits; truncate -s 100M holes")).ok
        assert len(await place.download("fits")) == 1_000_000
        with pytest.raises(InfrastructureFailure, match="holes in sandbox has more than"):
            await place.download("holes")
        assert await still_there(place)


def test_a_long_wrong_text_is_not_repeated_whole() -> None:
    with pytest.raises(UsageError) as raised:
        seam.check_text("command", "x" * 1_000_000 + "\0")
    assert len(str(raised.value)) < 300
