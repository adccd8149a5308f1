"""One run of bench/chaos.py: gateway, agents, collector and trainer in processes of their own.

With a schedule of kills, or without one for comparison. Kills come at random points of the work, measured
in attempts that were decided, so that they are spread over the whole run however fast the machine is; the
process may be at work, starting or half way through a step. Ends when collector and trainer say that they
are done, then waits for what is still winding up, and looks at what is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sqlite3
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import aiohttp
from chaos_parts import MARK, STEP_S, Kill, Part, free_ports, marked
from chaos_script import write_script
from msgspec import Struct

BENCH = Path(__file__).resolve().parent
POLICY = BENCH.parent / "src" / "afield" / "demo" / "policy"
ADMIN = "chaos-admin-key"
KINDS: tuple[str, ...] = ("collector", "gateway", "trainer", "agents")
HOSTS = 3
SETTLES_S = 90.0  # how long what winds up may take; leases of hints run out within it
FIRST, LAST = 0.03, 0.90  # of the work: when the first and the last kill may come
ASKED = 150  # times, 0.2 s apart
WAITS_S = 1.2  # a kill comes up to this much after its point
CONFIG = """[train]
exp_id = "{exp}"
attempt_timeout_s = 90.0
retries_infrastructure = 20
keep_weights = 3
"""


class Size(Struct, frozen=True, kw_only=True):
    tasks: int = 200
    rollouts: int = 4
    batch: int = 10  # groups a step
    staleness: int = 2
    concurrency: int = 32
    step_s: float = 2.5
    work_s: float = 0.8  # of an agent between two calls, on average
    delay_s: float = 0.02  # of the engine before each chunk
    limit_s: float = 240.0
    deliver: str = "store"  # or "gateway", which then writes the store

    @property
    def steps(self) -> int:
        return -(-self.tasks // self.batch)


class Left(Struct, frozen=True, kw_only=True):
    """What is still there when everything is done."""

    processes: list[str]
    sessions: list[str]
    leases: list[str]
    active: list[str]
    phases: dict[str, int]

    @property
    def orphans(self) -> int:
        return len(self.processes) + len(self.sessions) + len(self.leases) + len(self.active)


class World:
    def __init__(self, place: Path, size: Size, seed: int) -> None:
        self.place, self.size = place, size
        self.exp = f"chaos-{seed}"
        self.run, self.ledger = place / "run", place / "engine.jsonl"
        self.kills: list[Kill] = []
        self._rng = random.Random(f"chaos {seed}")
        self._mark = uuid.uuid4().hex
        for folder in ("logs", "notes"):
            (place / folder).mkdir(parents=True)
        rows = [{"id": f"task-{n}", "seed": seed, "work_s": size.work_s} for n in range(size.tasks)]
        (place / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_script(place / "script.jsonl", size.delay_s)
        (place / "chaos.toml").write_text(CONFIG.format(exp=self.exp))
        gateway, *hosts = free_ports(1 + HOSTS)
        self._gateway = f"http://127.0.0.1:{gateway}"
        self._hosts = [f"http://127.0.0.1:{port}" for port in hosts]
        self.parts = [
            self._part("gateway", "gateway", self._gateway_command(gateway)),
            *(self._part("agents", f"agents-{n}", self._host_command(p)) for n, p in enumerate(hosts)),
            self._part("collector", "collector", self._train_command("collect"), ends=True),
            self._part("trainer", "trainer", self._train_command("learn"), ends=True),
        ]

    @property
    def task_ids(self) -> list[str]:
        return [f"task-{n}" for n in range(self.size.tasks)]

    @property
    def outcomes(self) -> Path:
        return self.run / "outcomes"

    @property
    def commits(self) -> Path:
        return self.outcomes / self.exp / "commits"

    def _part(self, kind: str, name: str, command: list[object], *, ends: bool = False) -> Part:
        environment = {MARK: self._mark, "AFIELD_ADMIN_KEY": ADMIN, "AFIELD_RUNS": str(self.place)}
        environment |= {STEP_S: str(self.size.step_s)}
        rng = random.Random(self._rng.random())
        return Part(kind, name, command, place=self.place, environment=environment, rng=rng, ends=ends)

    def _gateway_command(self, port: int) -> list[object]:
        engine = ("--engine", f"scripted={self.place / 'script.jsonl'}", "--record-engine-calls", self.ledger)
        store = ["--store", self.place / "gateway", "--port", port, "--json"]
        if self.size.deliver == "gateway":
            store += ["--outcomes", f"files://{self.outcomes}"]
        return [sys.executable, "-m", "afield", "gateway", "--model", POLICY, *engine, *store]

    def _host_command(self, port: int) -> list[object]:
        return [
            sys.executable,
            "-m",
            "afield.sdk.serve",
            f"{BENCH / 'chaos_agent.py'}:run",
            "--port",
            port,
            "--outcome-root",
            "/",
        ]

    def _train_command(self, part: str) -> list[object]:
        size = self.size
        program = [BENCH / "chaos_learn.py"] if part == "learn" else ["-m", "afield"]
        values = {
            "config": self.place / "chaos.toml",
            "tasks": self.place / "tasks.jsonl",
            "model": POLICY,
            "gateway": self._gateway,
            "runtime": "served=" + ",".join(self._hosts),
            "deliver": size.deliver,
            "mode": "async",
            "max-staleness": size.staleness,
            "steps": size.steps,
            "tasks-per-step": size.batch,
            "rollouts": size.rollouts,
            "concurrency": size.concurrency,
            "run": self.run.name,
            "part": part,
        }
        options = [word for name, value in values.items() for word in (f"--{name}", value)]
        return [sys.executable, *program, "train", f"{BENCH / 'chaos_agent.py'}:run", *options, "--json"]

    # --- running ---------------------------------------------------------------------------------

    async def live(self, kills: dict[str, int]) -> tuple[bool, Left]:
        """Whether it came to its end in time, and what was left then."""
        keeping = [asyncio.create_task(part.keep()) for part in self.parts]
        killing = [asyncio.create_task(self._kill(kind, at)) for kind, at in self._schedule(kills)]
        try:
            whole = await self._ended()
            await _cancelled(killing)
            left = await self._settled(SETTLES_S if whole else 0.0)
        finally:
            await _cancelled([*killing, *keeping])
        return whole, Left(
            processes=list(marked(self._mark).values()) + left.processes,
            sessions=left.sessions,
            leases=left.leases,
            active=left.active,
            phases=left.phases,
        )

    async def _ended(self) -> bool:
        """Whether collector and trainer are done, rather than the time up or some part past hope."""
        ending = [part for part in self.parts if part.kind in ("collector", "trainer")]
        done = asyncio.gather(*(part.done.wait() for part in ending))
        hopeless = [asyncio.create_task(part.hopeless.wait()) for part in self.parts]
        limit_s = self.size.limit_s
        await asyncio.wait([done, *hopeless], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        whole = done.done()
        for waiting in (done, *hopeless):
            waiting.cancel()
        await asyncio.gather(done, *hopeless, return_exceptions=True)
        return whole

    def _schedule(self, kills: dict[str, int]) -> list[tuple[str, float]]:
        return [(kind, self._rng.uniform(FIRST, LAST)) for kind in KINDS for _ in range(kills.get(kind, 0))]

    async def _kill(self, kind: str, at: float) -> None:
        wanted = at * self.size.tasks * self.size.rollouts
        delay = self._rng.uniform(0.0, WAITS_S)
        while self._decided() < wanted:
            await asyncio.sleep(0.1)
        await asyncio.sleep(delay)
        parts = [part for part in self.parts if part.kind == kind]
        while not all(part.done.is_set() for part in parts):
            part = self._rng.choice(parts)
            if kill := part.kill(self.ledger.stat().st_size if self.ledger.exists() else 0):
                self.kills.append(kill)
                print(f"{len(self.kills)}: {part.name} killed at the age of {kill.age_s} s", file=sys.stderr)
                return
            # It is down; the next one is killed while it starts, or soon afterwards.
            await asyncio.sleep(self._rng.uniform(0.0, WAITS_S))

    def _decided(self) -> int:
        return sum(1 for _ in os.scandir(self.commits)) if self.commits.exists() else 0

    # --- what is left ----------------------------------------------------------------------------

    async def _settled(self, seconds: float) -> Left:
        """As soon as nothing is left, or what there still is after that time."""
        end = time.monotonic() + seconds
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {ADMIN}"}) as http:
            while True:
                left = await self._look(http)
                if not left.orphans or time.monotonic() > end:
                    return left
                await asyncio.sleep(0.5)

    async def _look(self, http: aiohttp.ClientSession) -> Left:
        ours = {part.pid for part in self.parts}
        phases: dict[str, int] = {}
        opened: list[str] = []
        for phase in ("open", "completed", "aborted", "finalized"):
            found = await self._sessions(http, phase)
            phases[phase] = len(found)
            opened = found if phase == "open" else opened
        active: list[str] = []
        for url in self._hosts:
            active += (await _ask(http, f"{url}/ping")).get("active", [])
        return Left(
            processes=[line for pid, line in marked(self._mark).items() if pid not in ours],
            sessions=opened,
            leases=leases(self.outcomes),
            active=active,
            phases=phases,
        )

    async def _sessions(self, http: aiohttp.ClientSession, phase: str) -> list[str]:
        found: list[str] = []
        while True:
            after = found[-1] if found else ""
            page = await _ask(http, f"{self._gateway}/sessions?phase={phase}&limit=1000&after={after}")
            ids = [session["id"] for session in page.get("sessions", [])]
            found += ids
            if len(ids) < 1000:
                return found


async def _ask(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Until it answers: it may just have been killed. One that never does has nothing to tell."""
    for _ in range(ASKED):
        try:
            async with http.get(url) as response:
                response.raise_for_status()
                return await response.json()
        except aiohttp.ClientError:
            await asyncio.sleep(0.2)
    print(f"{url} does not answer", file=sys.stderr)
    return {}


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


def leases(outcomes: Path) -> list[str]:
    """Hints that nobody acknowledged, those that were set aside as undeliverable among them."""
    path = outcomes / "hints.sqlite"
    if not path.exists():
        return []
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as db:
        sql = "SELECT body FROM notices UNION ALL SELECT reason || ' ' || body FROM dead"
        return [str(body) for (body,) in db.execute(sql)]
