"""Deployment of a chaos run: gateway, agents, collector and trainer as processes.

1. Kills come at random points of the work, counted in decided attempts, so that they spread over the run on
   any machine. A killed process may be busy, starting or halfway through a step.
2. The run ends when collector and trainer exit with 0. Then it waits for open sessions and leases to drain,
   and reports what is left.
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
from msgspec import Struct

from bench import ROOT
from bench.chaos.engine_script import write_script
from bench.chaos.processes import MARK, STEP_S, Kill, ManagedProcess, free_ports, marked_processes

POLICY = ROOT / "src" / "afield" / "demo" / "policy"
ADMIN = "chaos-admin-key"
AGENT = "bench.chaos.agent:run"
KINDS: tuple[str, ...] = ("collector", "gateway", "trainer", "agents")
HOSTS = 3
SETTLE_S = 90.0  # time for sessions to close and leases of hints to expire
FIRST, LAST = 0.03, 0.90  # share of the work at the first and the last kill
MAX_REQUESTS = 150  # 0.2 s apart
MAX_DELAY_S = 1.2  # random delay of a kill
CONFIG = """[train]
exp_id = "{exp}"
attempt_timeout_s = 90.0
retries_infrastructure = 20
keep_weights = 3
"""


class Size(Struct, frozen=True, kw_only=True):
    tasks: int = 200
    rollouts: int = 4
    batch: int = 10
    """Groups of each step."""
    staleness: int = 2
    concurrency: int = 32
    step_s: float = 2.5
    work_s: float = 0.8
    """Mean time of an agent between two model calls, in seconds."""
    delay_s: float = 0.02
    """Delay of the engine before each chunk, in seconds."""
    limit_s: float = 240.0
    """Seconds after which the run stops unfinished."""
    deliver: str = "store"
    """Destination of outcomes: "store" or "gateway"."""

    @property
    def steps(self) -> int:
        return -(-self.tasks // self.batch)


class Leftovers(Struct, frozen=True, kw_only=True):
    """Resources that exist after the run ended."""

    processes: list[str]
    sessions: list[str]
    leases: list[str]
    active: list[str]
    phases: dict[str, int]

    @property
    def orphans(self) -> int:
        return len(self.processes) + len(self.sessions) + len(self.leases) + len(self.active)


class Deployment:
    def __init__(self, directory: Path, size: Size, seed: int) -> None:
        self.directory, self.size = directory, size
        self.exp = f"chaos-{seed}"
        self.run, self.ledger = directory / "run", directory / "engine.jsonl"
        self.kills: list[Kill] = []
        self._rng = random.Random(f"chaos {seed}")
        self._mark = uuid.uuid4().hex
        for folder in ("logs", "notes"):
            (directory / folder).mkdir(parents=True)
        rows = [{"id": f"task-{n}", "seed": seed, "work_s": size.work_s} for n in range(size.tasks)]
        (directory / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_script(directory / "script.jsonl", size.delay_s)
        (directory / "chaos.toml").write_text(CONFIG.format(exp=self.exp))
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

    def _part(self, kind: str, name: str, command: list[object], *, ends: bool = False) -> ManagedProcess:
        environment = {MARK: self._mark, "AFIELD_ADMIN_KEY": ADMIN, "AFIELD_RUNS": str(self.directory)}
        environment |= {STEP_S: str(self.size.step_s), "PYTHONPATH": str(ROOT)}
        rng = random.Random(self._rng.random())
        return ManagedProcess(
            kind, name, command, directory=self.directory, environment=environment, rng=rng, ends=ends
        )

    def _gateway_command(self, port: int) -> list[object]:
        engine = (
            "--engine",
            f"scripted={self.directory / 'script.jsonl'}",
            "--record-engine-calls",
            self.ledger,
        )
        store = ["--store", self.directory / "gateway", "--port", port, "--json"]
        if self.size.deliver == "gateway":
            store += ["--outcomes", f"files://{self.outcomes}"]
        return [sys.executable, "-m", "afield", "gateway", "--model", POLICY, *engine, *store]

    def _host_command(self, port: int) -> list[object]:
        return [
            sys.executable,
            "-m",
            "afield.sdk.serve",
            AGENT,
            "--port",
            port,
            "--outcome-root",
            "/",
        ]

    def _train_command(self, part: str) -> list[object]:
        size = self.size
        program = ["-m", "bench.chaos.trainer"] if part == "learn" else ["-m", "afield"]
        values = {
            "config": self.directory / "chaos.toml",
            "tasks": self.directory / "tasks.jsonl",
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
            "role": part,
        }
        options = [word for name, value in values.items() for word in (f"--{name}", value)]
        return [sys.executable, *program, "train", AGENT, *options, "--json"]

    # --- running ---------------------------------------------------------------------------------

    async def live(self, kills: dict[str, int]) -> tuple[bool, Leftovers]:
        """Run to the end; whether it finished in time, and what is left."""
        keeping = [asyncio.create_task(part.keep()) for part in self.parts]
        killing = [asyncio.create_task(self._kill(kind, at)) for kind, at in self._schedule(kills)]
        try:
            whole = await self._ended()
            await _cancelled(killing)
            left = await self._settled(SETTLE_S if whole else 0.0)
        finally:
            await _cancelled([*killing, *keeping])
        return whole, Leftovers(
            processes=list(marked_processes(self._mark).values()) + left.processes,
            sessions=left.sessions,
            leases=left.leases,
            active=left.active,
            phases=left.phases,
        )

    async def _ended(self) -> bool:
        """Wait for collector and trainer; False on a timeout or when a process crashed too often."""
        ending = [part for part in self.parts if part.kind in ("collector", "trainer")]
        done = asyncio.gather(*(part.done.wait() for part in ending))
        gave_up = [asyncio.create_task(part.gave_up.wait()) for part in self.parts]
        limit_s = self.size.limit_s
        await asyncio.wait([done, *gave_up], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        whole = done.done()
        for waiting in (done, *gave_up):
            waiting.cancel()
        await asyncio.gather(done, *gave_up, return_exceptions=True)
        return whole

    def _schedule(self, kills: dict[str, int]) -> list[tuple[str, float]]:
        return [(kind, self._rng.uniform(FIRST, LAST)) for kind in KINDS for _ in range(kills.get(kind, 0))]

    async def _kill(self, kind: str, at: float) -> None:
        target = at * self.size.tasks * self.size.rollouts
        delay = self._rng.uniform(0.0, MAX_DELAY_S)
        while self._decided() < target:
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
            await asyncio.sleep(self._rng.uniform(0.0, MAX_DELAY_S))

    def _decided(self) -> int:
        return sum(1 for _ in os.scandir(self.commits)) if self.commits.exists() else 0

    # --- leftovers ----------------------------------------------------------------------------

    async def _settled(self, seconds: float) -> Leftovers:
        """Wait up to `seconds` until nothing is left."""
        end = time.monotonic() + seconds
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {ADMIN}"}) as http:
            while True:
                left = await self._look(http)
                if not left.orphans or time.monotonic() > end:
                    return left
                await asyncio.sleep(0.5)

    async def _look(self, http: aiohttp.ClientSession) -> Leftovers:
        own_pids = {part.pid for part in self.parts}
        phases: dict[str, int] = {}
        open_sessions: list[str] = []
        for phase in ("open", "completed", "aborted", "finalized"):
            ids = await self._sessions(http, phase)
            phases[phase] = len(ids)
            open_sessions = ids if phase == "open" else open_sessions
        active: list[str] = []
        for url in self._hosts:
            active += (await _get_json(http, f"{url}/ping")).get("active", [])
        return Leftovers(
            processes=[line for pid, line in marked_processes(self._mark).items() if pid not in own_pids],
            sessions=open_sessions,
            leases=leases(self.outcomes),
            active=active,
            phases=phases,
        )

    async def _sessions(self, http: aiohttp.ClientSession, phase: str) -> list[str]:
        session_ids: list[str] = []
        while True:
            after = session_ids[-1] if session_ids else ""
            page = await _get_json(http, f"{self._gateway}/sessions?phase={phase}&limit=1000&after={after}")
            ids = [session["id"] for session in page.get("sessions", [])]
            session_ids += ids
            if len(ids) < 1000:
                return session_ids


async def _get_json(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """GET with retries, since the server may just have been killed; {} if it never answers."""
    for _ in range(MAX_REQUESTS):
        try:
            async with http.get(url) as response:
                response.raise_for_status()
                return await response.json()
        except aiohttp.ClientError:
            await asyncio.sleep(0.2)
    print(f"{url} does not respond", file=sys.stderr)
    return {}


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


def leases(outcomes: Path) -> list[str]:
    """Unacknowledged hints and dead letters."""
    path = outcomes / "hints.sqlite"
    if not path.exists():
        return []
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as db:
        sql = "SELECT body FROM notices UNION ALL SELECT reason || ' ' || body FROM dead"
        return [str(body) for (body,) in db.execute(sql)]
