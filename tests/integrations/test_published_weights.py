"""What trainers of others rely on when something breaks: weights that were published are served."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.engines.test_sglang import a_call

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.engines.sglang.engine import SglangEngine
from afield.errors import Unavailable
from afield.gateway.client import HttpGateway
from afield.types import Policy
from support.fake_sglang import FakeSglang, serving_sglang
from support.gateways import ADMIN, running

pytestmark = pytest.mark.anyio
BOUND_S = 60.0


class Unloading(ScriptedEngine):
    """Serves, and cannot load anything until it is told that it may."""

    may = False

    async def load(self, version: int, path: str) -> None:
        if not self.may:
            raise Unavailable("no room in memory")
        await super().load(version, path)


async def test_repeated_publish_of_a_version_that_no_engine_loaded_fails_again(tmp_path: Path) -> None:
    engine = Unloading(lambda _: ScriptedReply(token_ids=(1, 2)))
    async with (
        asyncio.timeout(BOUND_S),
        running(engine, tmp_path) as up,
        HttpGateway(up.url, ADMIN, unavailable_timeout_s=1.0) as hasty,
        HttpGateway(up.url, ADMIN, unavailable_timeout_s=40.0) as patient,
    ):
        with pytest.raises(Unavailable, match=r"no worker has loaded version 1 yet: engine: .*no room"):
            await hasty.publish(Policy("policy", 1), "one")
        engine.may = True
        await patient.publish(Policy("policy", 1), "one")
        assert engine.loaded == [(1, "one")]
        assert up.gateway.engine.list()[0].health == "ready"


async def test_an_sglang_server_that_was_started_again_gets_its_adapter_again(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    fake = FakeSglang(ScriptedEngine(lambda call: ScriptedReply(token_ids=(5,) * call.max_tokens)), loras=2)
    async with asyncio.timeout(BOUND_S), serving_sglang(fake) as url, SglangEngine(url) as engine:
        await engine.load(3, str(tmp_path))
        assert (await engine.info()).version == 3
        fake.adapters.clear()
        assert (await engine.info()).version == 0
        await engine.load(3, str(tmp_path))
        assert [name[:9] for name in fake.adapters] == ["policy-v3"]
        chunks = [chunk async for chunk in engine.generate(a_call())]
        assert {(chunk.low, chunk.high) for chunk in chunks} == {(3, 3)}
