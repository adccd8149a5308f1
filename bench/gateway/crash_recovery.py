"""Crash recovery of the gateway: kill -9 under load, no call lost or duplicated.

    python -m bench.gateway.crash_recovery [--kills 20] [--sessions 64]

A gateway process is killed in the middle of streams and restarted on the same store, while clients go on and
repeat interrupted calls, half of them with a retry header. After each restart and at the end the store is
compared with what the clients received. The last line is JSON; `lost` and `duplicates` must be 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
from msgspec import Struct, field

from bench import ROOT
from bench.chaos.processes import free_ports

POLICY = ROOT / "src" / "afield" / "demo" / "policy"
ADMIN = "kill-admin-key"
REPLY = "Let me think about it, word by word, until somebody pulls the plug."
STARTS_S = 90.0
LEAVES = 0.08  # of answers are left by their own client at the first event
TURNS = 6  # then a conversation begins anew


class Cut(Exception):
    """The answer did not come to its end."""


class Ended(Struct, frozen=True):
    """An answer whose terminal event a client saw."""

    turn_id: str
    question: str
    text: str


class Client(Struct):
    """One session's client. It asks one thing at a time and asks again until it has the whole answer."""

    session_id: str
    base: str
    key: str
    says_retry: bool
    ended: list[Ended] = field(default_factory=list)
    cuts: int = 0

    async def talk(self, http: aiohttp.ClientSession, up: asyncio.Event, over: asyncio.Event) -> None:
        history: list[dict[str, str]] = []
        rng = random.Random(self.session_id)
        while not over.is_set():
            await asyncio.sleep(rng.uniform(0.0, 0.8))  # so that a kill meets calls in every stage
            question = f"Question {len(self.ended)} of {self.session_id}?"
            history.append({"role": "user", "content": question})
            done = await self._until_answered(http, up, history, question)
            self.ended.append(done)
            history.append({"role": "assistant", "content": done.text})
            history = history if len(history) < 2 * TURNS else []

    async def _until_answered(
        self, http: aiohttp.ClientSession, up: asyncio.Event, history: list[dict[str, str]], question: str
    ) -> Ended:
        tries = 0
        while True:
            await up.wait()
            try:
                return await self._ask(http, history, question, tries)
            except (aiohttp.ClientError, ConnectionError, TimeoutError, Cut):
                tries += 1
                self.cuts += 1
                await asyncio.sleep(0.05)

    async def _ask(
        self, http: aiohttp.ClientSession, history: list[dict[str, str]], question: str, tries: int
    ) -> Ended:
        says = tries if self.says_retry else 0
        body = {"model": "m", "messages": history, "stream": True}
        headers = {"authorization": f"Bearer {self.key}", "x-stainless-retry-count": str(says)}
        text, turn_id, whole = "", "", False
        async with http.post(f"{self.base}/chat/completions", json=body, headers=headers) as response:
            if response.status >= 500:
                raise Cut(await response.text())
            if response.status != 200:
                raise RuntimeError(f"{response.status} {await response.text()}")
            async for line in response.content:
                data = line.decode().strip().removeprefix("data: ")
                if data == "[DONE]":
                    whole = True
                elif data.startswith("{"):
                    event = json.loads(data)
                    if "error" in event:
                        raise Cut(data)
                    if not turn_id and random.Random(f"{question} {tries}").random() < LEAVES and tries == 0:
                        raise Cut("the client left")
                    turn_id = event["id"].rpartition("-")[2]
                    text += event["choices"][0]["delta"].get("content") or ""
        if not whole:
            raise Cut("the stream ended early")
        return Ended(turn_id, question, text)


class Gateway:
    """A gateway process that can be killed and started again."""

    def __init__(self, place: Path) -> None:
        [self.port] = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self._place = place
        self._process: asyncio.subprocess.Process | None = None
        row = {"match": "Question", "text": REPLY, "delay_s": 0.03}
        (place / "script.jsonl").write_text(json.dumps(row) + "\n")

    async def start(self) -> None:
        options = ["--model", POLICY, "--engine", f"scripted={self._place / 'script.jsonl'}"]
        options += ["--store", self._place / "store", "--port", self.port, "--admin-key", ADMIN, "--json"]
        command = [sys.executable, "-m", "afield", "gateway", *map(str, options)]
        with (self._place / "gateway.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=log, stdin=asyncio.subprocess.DEVNULL
            )
        assert self._process.stdout
        line = await asyncio.wait_for(self._process.stdout.readline(), STARTS_S)
        if not line:
            raise SystemExit(
                f"the gateway did not start:\n{(self._place / 'gateway.log').read_text()[-3000:]}"
            )

    async def kill(self) -> None:
        assert self._process
        self._process.send_signal(signal.SIGKILL)
        await self._process.wait()

    async def ask(self, http: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> Any:
        headers = {"authorization": f"Bearer {ADMIN}"}
        async with http.request(method, self.url + path, json=body, headers=headers) as response:
            if response.status >= 400:
                raise RuntimeError(f"{method} {path}: {response.status} {await response.text()}")
            return await response.json()


class Verdict(Struct):
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def say(self, what: str, message: str) -> None:
        self.counts[what] += 1
        self.wrong.append(f"{what}: {message}")


def check_ended(session_id: str, ended: list[Ended], turns: list[dict[str, Any]], verdict: Verdict) -> None:
    """What a client saw the end of is committed, as it saw it."""
    by_id = {turn["id"]: turn for turn in turns}
    for seen in ended:
        turn = by_id.get(seen.turn_id)
        if turn is None or turn["status"] != "committed":
            verdict.say("lost", f"{session_id} {seen.turn_id}: {turn and turn['status']}")
        elif turn["messages"][-1].get("content", "").strip() != seen.text.strip():
            verdict.say("lost", f"{session_id} {seen.turn_id}: other words than its client got")


def check_all(
    session_id: str, client: Client, state: dict[str, Any], record: dict[str, Any], verdict: Verdict
) -> None:
    """Every call is committed, aborted or dangling and visible; nothing asked once was committed twice."""
    turns = record["turns"]
    check_ended(session_id, client.ended, turns, verdict)
    statuses = Counter(turn["status"] for turn in turns)
    verdict.counts.update(statuses)
    verdict.counts["calls"] += len(turns)
    if odd := set(statuses) - {"committed", "aborted", "dangling"}:
        verdict.say("odd", f"{session_id}: {odd}")
    if (state["calls"], state["dangling"]) != (len(turns), statuses["dangling"]):
        verdict.say("odd", f"{session_id}: {state} but {statuses}")
    excluded = {e["turn"] for e in record["excluded"]}
    if hidden := {turn["id"] for turn in turns if turn["status"] != "committed"} - excluded:
        verdict.say("odd", f"{session_id}: {hidden} are neither trained nor excluded")
    questions = Counter(_question(turn) for turn in turns if turn["status"] == "committed")
    for question, n in questions.items():
        if n > 1:
            how = "says retry" if client.says_retry else "just asks"
            verdict.say("duplicates", f"{session_id}, {how}: {n} answers to {question}")


def _question(turn: dict[str, Any]) -> str:
    return next(m["content"] for m in reversed(turn["messages"]) if m["role"] == "user")


async def open_sessions(http: aiohttp.ClientSession, gateway: Gateway, n: int) -> list[Client]:
    clients = []
    for i in range(n):
        ticket = await gateway.ask(http, "POST", "/sessions", {"id": f"kill-{i}.1"})
        clients.append(Client(ticket["id"], ticket["openai_base_url"], ticket["api_key"], i % 2 == 0))
    return clients


async def run(kills: int, sessions: int, seed: int) -> dict[str, Any]:
    rng, verdict = random.Random(seed), Verdict()
    up, over = asyncio.Event(), asyncio.Event()
    with tempfile.TemporaryDirectory(prefix="afield-kill-") as place:
        gateway = Gateway(Path(place))
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as http:
            await gateway.start()
            try:
                clients = await open_sessions(http, gateway, sessions)
                talks = [asyncio.create_task(client.talk(http, up, over)) for client in clients]
                up.set()
                for n in range(kills):
                    await some_answers(clients, sessions // 2)
                    await asyncio.sleep(rng.uniform(0.0, 1.2))
                    await kill_once(http, gateway, clients, up, verdict)
                    print(f"kill {n + 1}: {sum(len(c.ended) for c in clients)} answers seen", file=sys.stderr)
                await asyncio.sleep(1.0)
                over.set()
                await asyncio.wait_for(asyncio.gather(*talks), 120)
                for client in clients:
                    state = await gateway.ask(http, "GET", f"/sessions/{client.session_id}")
                    record = await gateway.ask(http, "POST", f"/sessions/{client.session_id}/finalize")
                    check_all(client.session_id, client, state, record, verdict)
            finally:
                await gateway.kill()
    return summary(kills, sessions, sum(client.cuts for client in clients), verdict)


async def some_answers(clients: list[Client], n: int) -> None:
    """Until so many more answers came to their end, so that every kill meets a gateway at work."""
    seen = sum(len(client.ended) for client in clients)
    async with asyncio.timeout(60):
        while sum(len(client.ended) for client in clients) < seen + n:
            await asyncio.sleep(0.01)


async def kill_once(
    http: aiohttp.ClientSession, gateway: Gateway, clients: list[Client], up: asyncio.Event, verdict: Verdict
) -> None:
    up.clear()
    await gateway.kill()
    before = {client.session_id: list(client.ended) for client in clients}
    await gateway.start()
    for session_id, ended in before.items():
        record = await gateway.ask(http, "GET", f"/sessions/{session_id}/turns")
        check_ended(session_id, ended, record["turns"], verdict)
    up.set()


def summary(kills: int, sessions: int, cuts: int, verdict: Verdict) -> dict[str, Any]:
    names = ("calls", "committed", "aborted", "dangling", "duplicates", "lost", "odd")
    counts = {name: verdict.counts[name] for name in names}
    ok = not verdict.wrong and cuts >= kills and counts["committed"] > sessions
    return {
        "kills": kills,
        "sessions": sessions,
        "cut": cuts,
        **counts,
        "wrong": verdict.wrong[:20],
        "ok": ok,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.monotonic()
    result = asyncio.run(run(args.kills, args.sessions, args.seed))
    print(json.dumps(result | {"seconds": round(time.monotonic() - began, 1)}))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
