"""Rewards of Harbor verifiers: what tests/test.sh may write, and what is no reward."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from afield.errors import VerifierFailure
from afield.harbor.verifier import FRESH, read_rewards
from afield.local_sandbox.local_sandbox import LocalSandbox
from afield.local_sandbox.messages import Layer
from afield.types import Reason
from support.sandboxes import needs_bubblewrap

pytestmark = [pytest.mark.anyio, needs_bubblewrap]

REWARDS = {
    "text": ("reward.txt", "0.5\n", {"reward": 0.5}),
    "number": ("reward.json", "1", {"reward": 1.0}),
    "only one": ("reward.json", '{"passed": true}', {"passed": 1.0, "reward": 1.0}),
    "several": ("reward.json", '{"reward": -2, "speed": 1e3}', {"reward": -2.0, "speed": 1000.0}),
}
BAD = {
    "empty": ("reward.txt", "", "could not convert string to float"),
    "word": ("reward.txt", "passed", "could not convert string to float: 'passed'"),
    "bytes": ("reward.txt", "\udcff", "codec can't decode"),
    "no number": ("reward.txt", "nan", "reward 'reward' is nan, not a finite number"),
    "infinite": ("reward.json", '{"reward": Infinity}', "is inf, not a finite number"),
    "beyond all floats": ("reward.json", f'{{"reward": 1{"0" * 400}}}', "not a finite number"),
    "null": ("reward.json", "null", "reward 'reward' is None, not a finite number"),
    "list": ("reward.json", "[1]", "is \\[1\\], not a finite number"),
    "none of several": ("reward.json", '{"a": 1, "b": 2}', "none of the rewards"),
    "nothing in it": ("reward.json", "{}", "none of the rewards"),
    "broken": ("reward.json", "{", "Expecting property name"),
    "deep": ("reward.json", "[" * 100_000, "reward.json: "),
}


@asynccontextmanager
async def fresh_sandbox(folder: Path) -> AsyncIterator[LocalSandbox]:
    async with LocalSandbox(layer=Layer(path=str(folder))) as sandbox:
        yield sandbox


async def write(sandbox: LocalSandbox, file: str, text: str) -> None:
    await sandbox.exec(FRESH, cwd="/")
    await sandbox.upload(f"/logs/verifier/{file}", text.encode(errors="surrogateescape"))


async def test_reward_is_read(tmp_path: Path) -> None:
    async with fresh_sandbox(tmp_path) as sandbox:
        for case, (file, text, rewards) in REWARDS.items():
            await write(sandbox, file, text)
            assert await read_rewards(sandbox, "") == rewards, case


async def test_anything_else_is_a_verifier_failure(tmp_path: Path) -> None:
    async with fresh_sandbox(tmp_path) as sandbox:
        for file, text, message in BAD.values():
            await write(sandbox, file, text)
            with pytest.raises(VerifierFailure, match=message) as caught:
                await read_rewards(sandbox, "output of the tests")
            assert caught.value.reason is Reason.REWARD
