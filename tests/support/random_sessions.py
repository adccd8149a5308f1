"""Many random sessions at once, in one gateway that is reached without sockets."""

from __future__ import annotations

import asyncio
import functools
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from afield.engines.recording import RecordedCall
from afield.engines.scripted import ScriptedEngine
from afield.gateway.app import GatewayApp
from afield.gateway.engine_pool import EnginePool
from afield.gateway.service import LocalGateway
from afield.gateway.session_keys import SecretPlace
from afield.interfaces import SessionSpec
from support.dialect_clients import DIALECTS, Answer, knock
from support.gateways import ADMIN
from support.invariants import SINGLE, Seen, look
from support.random_agents import TOOLSETS, Agent, Wild
from support.tokenizers import load_tokenizer
from support.tree_oracle import judge

SIDE_BY_SIDE = 8
STEPS = 6


class World:
    """A gateway whose engine samples badly, and its agents. `counts` says what has happened in it."""

    def __init__(
        self,
        gateway: LocalGateway,
        engine: ScriptedEngine,
        wild: Wild,
        door: Callable[..., Awaitable[Answer]] | None = None,
    ) -> None:
        self.gateway = gateway
        self.engine = engine
        self.wild = wild
        self.door = door or functools.partial(knock, GatewayApp(gateway))
        self._leaves = door is None  # over a socket nobody knows what a client that leaves has got
        self.counts: Counter[str] = Counter()

    async def get(self, path: str) -> Any:
        answer = await self.door("GET", path, key=ADMIN)
        assert answer.status == 200, answer
        return json.loads(answer.body)

    async def live(self, seed: int, dialect: str, steps: int) -> Seen:
        """One session from its start to its judgement."""
        session_id = f"wild-{seed}.1"
        ticket = await self.gateway.open(SessionSpec(id=session_id))
        door = functools.partial(self.door, key=ticket.api_key)
        agent = Agent(seed, session_id, dialect, self.wild, door, leaves=self._leaves)
        try:
            await agent.live(steps)
            return await self.judged(agent)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {dialect}: {error}") from error

    async def judged(self, agent: Agent) -> Seen:
        mine, others = self._entries(agent.session_id)
        self.engine.recorded[:] = others
        tools = {made.turn_id: list(TOOLSETS[made.request[0]]) for made in agent.made if made.turn_id}
        seen = await look(self.get, agent.session_id, mine, tools)
        for turn in seen.turns:
            if turn["id"] not in tools:  # its client left before the engine was asked
                tools[turn["id"]] = list(TOOLSETS[agent.left(turn, tools.get(turn["parent"]))])
        for check in SINGLE.values():
            check(seen)
        court = judge(agent.made, seen)
        self.counts.update(made=len(agent.made), replayed=court.replays, sessions=1, calls=len(mine))
        self.counts.update(f"{turn['status']}" for turn in seen.turns)
        self.counts.update(f"excluded {e['reason']}" for e in seen.linear["excluded"])
        self.counts.update(f"link {link['type']}" for turn in seen.turns for link in turn["links"])
        self.counts.update(f"tier {turn['tier']}" for turn in seen.turns)
        self.counts["split"] += sum(len(turn["versions"]) > 1 for turn in seen.turns)
        await self.gateway.finalize(agent.session_id)
        return seen

    def _entries(self, session_id: str) -> tuple[list[RecordedCall], list[RecordedCall]]:
        mine = [entry for entry in self.engine.recorded if entry.session_id == session_id]
        return mine, [entry for entry in self.engine.recorded if entry.session_id != session_id]

    async def populate(self, seeds: Sequence[int], steps: int = STEPS) -> dict[str, Seen]:
        """All of them, a few at a time, every dialect in its turn."""
        left = iter(seeds)
        seen: dict[str, Seen] = {}

        async def worker() -> None:
            for seed in left:
                seen[f"wild-{seed}.1"] = await self.live(seed, DIALECTS[seed % len(DIALECTS)], steps)

        workers = [asyncio.create_task(worker()) for _ in range(SIDE_BY_SIDE)]
        try:
            await asyncio.gather(*workers)
        finally:
            for each in workers:
                each.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return seen


@asynccontextmanager
async def world(store: Path) -> AsyncIterator[World]:
    wild = Wild()
    engine = ScriptedEngine(wild)
    pool = EnginePool({"engine": engine}, tries=1)
    gateway = LocalGateway(
        tokenizer=load_tokenizer(),
        engine=pool,
        store=store,
        admin_key=ADMIN,
        public_url="http://gateway",
        secret=SecretPlace(directory=store.with_name(f"{store.name}-secrets")),
    )
    async with pool, gateway:
        yield World(gateway, engine, wild)
