"""Relay under faults: three network namespaces, kills of the relay, cuts of the link, added latency.

    python bench/relay.py [--sessions 200] [--turns 5] [--tool-s 2] [--kills 2] [--cuts 3] [--json]

Agents, relay and cluster live in namespaces of their own; agents and cluster accept no inbound connections.

1. Latency: half of the sessions go through the relay and half directly (over a third link that exists only in
   this phase), at the same time. Agents wait `--tool-s` seconds on average between turns, as for a tool: all
   processes share this machine, and without a wait its cores are busy and the latency is that of their queue.
   Reported are differences of the quantiles of the time to the first event, and how busy the cores were.
2. Faults: all sessions go through the relay, which is killed with SIGKILL, and whose link to the cluster is
   taken down, while they stream. Clients repeat an interrupted request.
3. The tokens of every session are compared with the engine's own record; a generation that no client received
   is a duplicate.

Needs root, `ip` and `iptables`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import ROOT, report

POLICY = ROOT / "src" / "afield" / "demo" / "policy"
ADMIN = "relay-bench-admin-key"
REPLY = "Forty two is what the relay carries, one token after the other, and nothing twice."
DELAYS_S = {"latency": 0.02, "fault": 0.1}
"""Seconds per token in each phase: with faults, answers take so long that each fault meets some of them."""
AGENTS, RELAY, CLUSTER = (f"afb-{name}-{os.getpid()}" for name in ("agents", "relay", "cluster"))
RELAY_FOR_AGENTS, RELAY_FOR_CLUSTER, CLUSTER_DIRECT = "10.77.1.2", "10.77.2.2", "10.77.3.2"
PORT, GATEWAY_PORT = 8500, 8400
TRIES = 200
START_S = 60.0


# --- agents (run in their own namespace) ---------------------------------------------------------


async def converse(
    http: aiohttp.ClientSession, session: dict[str, Any], turns: int, tool_s: float
) -> dict[str, Any]:
    """Hold one conversation; interrupted requests are repeated as they were."""
    history: list[dict[str, str]] = []
    first_s: list[float] = []
    repeats = 0
    for turn in range(turns):
        await asyncio.sleep(random.uniform(0, 2 * tool_s))
        history.append({"role": "user", "content": f"Question {turn} of {session['id']}?"})
        for _ in range(TRIES):
            try:
                text, waited_s = await ask(http, session, history)
                break
            except (aiohttp.ClientError, ConnectionError, TimeoutError):
                repeats += 1
                await asyncio.sleep(0.1)
        else:
            return {"id": session["id"], "failed": f"turn {turn} had no answer", "first_s": first_s}
        first_s.append(waited_s)
        history.append({"role": "assistant", "content": text})
    return {"id": session["id"], "failed": "", "first_s": first_s, "repeats": repeats}


async def ask(
    http: aiohttp.ClientSession, session: dict[str, Any], history: list[dict[str, str]]
) -> tuple[str, float]:
    """One streamed call: its text, and the seconds until its first event."""
    headers = {"authorization": f"Bearer {session['key']}"}
    body = {"model": "m", "messages": history, "stream": True}
    text, began, first = "", time.perf_counter(), 0.0
    async with http.post(f"{session['url']}/chat/completions", json=body, headers=headers) as response:
        if response.status >= 500:
            raise ConnectionError(await response.text())
        if response.status != 200:
            raise SystemExit(f"{response.status} {await response.text()}")
        async for line in response.content:
            first = first or time.perf_counter() - began
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                return text, first
            if data.startswith("{"):
                event = json.loads(data)
                if "error" in event:
                    raise ConnectionError(data)
                text += event["choices"][0]["delta"].get("content") or ""
    raise ConnectionError("the stream ended early")


async def run_agents(sessions: list[dict[str, Any]], turns: int, tool_s: float) -> list[dict[str, Any]]:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        return await asyncio.gather(*(converse(http, session, turns, tool_s) for session in sessions))


# --- the cluster's own client (runs in the cluster's namespace) ----------------------------------


async def admin(calls: list[list[Any]]) -> list[Any]:
    headers = {"authorization": f"Bearer {ADMIN}"}
    answers = []
    async with aiohttp.ClientSession(headers=headers) as http:
        for method, path, body in calls:
            url = f"http://127.0.0.1:{GATEWAY_PORT}{path}"
            async with http.request(method, url, json=body) as response:
                if response.status >= 400:
                    raise SystemExit(f"{method} {path}: {response.status} {await response.text()}")
                answers.append(await response.json())
    return answers


# --- namespaces ----------------------------------------------------------------------------------


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def inside(namespace: str, *words: str) -> list[str]:
    return ["ip", "netns", "exec", namespace, *words]


def link(one: str, address: str, other: str, peer: str, name: str) -> None:
    """Connect two namespaces with a pair of interfaces."""
    ip("link", "add", f"{name}a", "netns", one, "type", "veth", "peer", "name", f"{name}b", "netns", other)
    for namespace, interface, own in ((one, f"{name}a", address), (other, f"{name}b", peer)):
        ip("-n", namespace, "addr", "add", f"{own}/24", "dev", interface)
        ip("-n", namespace, "link", "set", interface, "up")


def set_up() -> None:
    for namespace in (AGENTS, RELAY, CLUSTER):
        ip("netns", "add", namespace)
        ip("-n", namespace, "link", "set", "lo", "up")
    link(AGENTS, "10.77.1.1", RELAY, RELAY_FOR_AGENTS, "ar")
    link(CLUSTER, "10.77.2.1", RELAY, RELAY_FOR_CLUSTER, "cr")
    for namespace in (AGENTS, CLUSTER):
        for rule in (
            ("-A", "INPUT", "-i", "lo", "-j", "ACCEPT"),
            ("-A", "INPUT", "-p", "tcp", "--syn", "-j", "DROP"),
        ):
            subprocess.run(inside(namespace, "iptables", *rule), check=True)


def open_direct() -> None:
    """Let agents reach the gateway directly, for the comparison."""
    link(AGENTS, "10.77.3.1", CLUSTER, CLUSTER_DIRECT, "ac")
    rule = ("-I", "INPUT", "-i", "acb", "-j", "ACCEPT")
    subprocess.run(inside(CLUSTER, "iptables", *rule), check=True)


def close_direct() -> None:
    rule = ("-D", "INPUT", "-i", "acb", "-j", "ACCEPT")
    subprocess.run(inside(CLUSTER, "iptables", *rule), check=True)
    ip("-n", AGENTS, "link", "del", "aca")


def tear_down() -> None:
    for namespace in (AGENTS, RELAY, CLUSTER):
        with suppress(subprocess.CalledProcessError):
            subprocess.run(["ip", "netns", "del", namespace], check=True, stderr=subprocess.DEVNULL)


def inbound_is_closed() -> bool:
    """Whether the relay can open a connection neither to the agents nor to the cluster."""
    code = (
        "import socket,sys\n"
        "for host in ('10.77.1.1', '10.77.2.1'):\n"
        "    try: socket.create_connection((host, 8400), 1)\n"
        "    except TimeoutError: continue\n"
        "    except OSError as error: sys.exit(f'{host}: {error}')\n"
        "    sys.exit(host)\n"
    )
    return subprocess.run(inside(RELAY, sys.executable, "-c", code), check=False).returncode == 0


# --- processes -----------------------------------------------------------------------------------


class Program:
    """A process in a namespace that can be killed and started again."""

    def __init__(self, namespace: str, command: list[str], log: Path) -> None:
        self._command = inside(namespace, *command)
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}:{ROOT}"}
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdout=asyncio.subprocess.PIPE, stderr=log, env=environment
            )
        assert self._process.stdout is not None
        if not await asyncio.wait_for(self._process.stdout.readline(), START_S):
            raise SystemExit(f"{' '.join(self._command)} did not start:\n{self._log.read_text()[-3000:]}")

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


async def call(namespace: str, role: str, request: Any) -> Any:
    """Run a role of this script in a namespace, with JSON on standard input and output."""
    command = inside(namespace, sys.executable, "-m", "bench.relay", "--role", role)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=ROOT)
    out, _ = await process.communicate(json.dumps(request).encode())
    if process.returncode:
        raise SystemExit(f"{role} in {namespace} ended with {process.returncode}")
    return json.loads(out)


# --- the measurement -----------------------------------------------------------------------------


async def open_sessions(names: list[str]) -> list[dict[str, Any]]:
    opened = await call(CLUSTER, "admin", [["POST", "/sessions", {"id": name}] for name in names])
    return [{"id": one["id"], "url": one["openai_base_url"], "key": one["api_key"]} for one in opened]


def directly(session: dict[str, Any]) -> dict[str, Any]:
    return {**session, "url": f"http://{CLUSTER_DIRECT}:{GATEWAY_PORT}/s/{session['id']}/v1"}


def cpu_ticks() -> tuple[int, int]:
    """CPU time of the whole machine since it started, in ticks: busy, and all."""
    user, nice, system, idle, iowait, *others = map(int, Path("/proc/stat").read_text().split()[1:9])
    busy = user + nice + system + sum(others)
    return busy, busy + idle + iowait


async def measure_latency(
    sessions: int, turns: int, tool_s: float
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    open_direct()
    opened = await open_sessions([f"latency-{n}.1" for n in range(sessions)])
    mixed = [session if n % 2 else directly(session) for n, session in enumerate(opened)]
    busy_before, all_before = cpu_ticks()
    ended = await call(AGENTS, "agents", [mixed, turns, tool_s])
    busy, total = cpu_ticks()
    close_direct()
    relayed = [s for n, one in enumerate(ended) if n % 2 for s in one["first_s"]]
    direct = [s for n, one in enumerate(ended) if not n % 2 for s in one["first_s"]]
    numbers = {"cores_busy": round((busy - busy_before) / (total - all_before), 2)}
    for name, percent in (("p50", 50), ("p95", 95)):
        through, straight = (statistics.quantiles(rows, n=100)[percent - 1] for rows in (relayed, direct))
        numbers[f"direct_{name}_ms"] = round(1000 * straight, 2)
        numbers[f"added_{name}_ms"] = round(1000 * (through - straight), 2)
    return ended, numbers


async def break_things(relay: Program, kills: int, cuts: int) -> None:
    """Kill the relay and take its link to the cluster down, in turns."""
    for n in range(max(kills, cuts)):
        await asyncio.sleep(1.5)
        if n < cuts:
            ip("-n", RELAY, "link", "set", "crb", "down")
            await asyncio.sleep(1.0)
            ip("-n", RELAY, "link", "set", "crb", "up")
            await asyncio.sleep(1.5)
        if n < kills:
            await relay.kill()
            await relay.start()


def compare(ended: list[dict[str, Any]], records: list[Any], record: Path, turns: int) -> dict[str, Any]:
    """Compare turns with the engine's record: wrong tokens, and generations that no client received."""
    calls: dict[str, list[Any]] = defaultdict(list)
    for line in record.read_text().splitlines():
        entry = json.loads(line)
        calls[entry["session_id"]].append(entry)
    failed = [one["id"] for one in ended if one["failed"]]
    wrong, duplicates = [], 0
    for one, answer in zip(ended, records, strict=True):
        committed = [turn for turn in answer["turns"] if turn["status"] == "committed"]
        sampled = [(call["token_ids"], call["logprobs"]) for call in calls[one["id"]]]
        duplicates += max(0, len(sampled) - turns)
        wrong += [
            f"{one['id']} {turn['id']}"
            for turn in committed
            if (turn["token_ids"], turn["logprobs"]) not in sampled
        ]
        if len(committed) != turns and not one["failed"]:
            wrong.append(f"{one['id']} has {len(committed)} turns")
    return {"failed": len(failed), "wrong": len(wrong), "duplicates": duplicates}


async def run(sessions: int, turns: int, tool_s: float, kills: int, cuts: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="afield-relay-") as place:
        folder = Path(place)
        secret = folder / "secret"
        secret.write_text(secrets.token_hex(32))
        secret.chmod(0o600)
        rows = [{"match": f"of {phase}-", "text": REPLY, "delay_s": s} for phase, s in DELAYS_S.items()]
        (folder / "script.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        record = folder / "calls.jsonl"
        afield = [sys.executable, "-m", "afield"]
        relay = Program(
            RELAY,
            [
                *afield,
                "relay",
                "--json",
                "--host",
                "0.0.0.0",
                "--port",
                str(PORT),
                "--cluster",
                f"lab={secret}",
            ],
            folder / "relay.log",
        )
        gateway = Program(
            CLUSTER,
            [
                *(*afield, "gateway", "--json", "--model", str(POLICY), "--admin-key", ADMIN),
                *("--engine", f"scripted={folder / 'script.jsonl'}", "--store", str(folder / "store")),
                *("--record-engine-calls", str(record), "--host", "0.0.0.0", "--port", str(GATEWAY_PORT)),
                *("--relay", f"http://{RELAY_FOR_CLUSTER}:{PORT}", "--relay-cluster", "lab"),
                *("--relay-name", "g1", "--relay-secret-file", str(secret)),
                *("--public-url", f"http://{RELAY_FOR_AGENTS}:{PORT}"),
            ],
            folder / "gateway.log",
        )
        set_up()
        try:
            await relay.start()
            await gateway.start()
            closed = inbound_is_closed()
            latency, numbers = await measure_latency(sessions, turns, tool_s)
            print(f"latency: {numbers}", file=sys.stderr)
            opened = await open_sessions([f"fault-{n}.1" for n in range(sessions)])
            breaking = asyncio.create_task(break_things(relay, kills, cuts))
            ended = await call(AGENTS, "agents", [opened, turns, 0])
            in_time = breaking.done()
            await breaking
            everything = [*latency, *ended]
            records = await call(
                CLUSTER, "admin", [["GET", f"/sessions/{one['id']}/turns", None] for one in everything]
            )
            result = compare(everything, records, record, turns)
            if result["failed"] or result["wrong"] or result["duplicates"]:
                for name in ("relay.log", "gateway.log"):
                    print((folder / name).read_text()[-4000:], file=sys.stderr)
        finally:
            await gateway.kill()
            await relay.kill()
            tear_down()
    repeats = sum(one.get("repeats", 0) for one in ended)
    return {
        "sessions": sessions,
        "turns": turns,
        **result,
        **numbers,
        "kills": kills,
        "cuts": cuts,
        "faults_before_the_end": in_time,
        "repeated_requests": repeats,
        "inbound_closed": closed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tool-s", type=float, default=2.0, help="mean seconds between turns for latency")
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--cuts", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the last line as JSON (always done)")
    parser.add_argument("--save", action="store_true", help="save the result under bench/results")
    parser.add_argument("--role", choices=["agents", "admin"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        request = json.load(sys.stdin)
        work = run_agents(*request) if args.role == "agents" else admin(request)
        print(json.dumps(asyncio.run(work)))
        return 0
    for program in ("ip", "iptables"):
        if not shutil.which(program) or os.geteuid():
            raise SystemExit(f"needs root and the program {program}")
    result = asyncio.run(run(args.sessions, args.turns, args.tool_s, args.kills, args.cuts))
    if args.save:
        report.save("relay", result, report.commit())
    print(json.dumps(result))
    met = not (result["failed"] or result["duplicates"] or result["wrong"])
    met &= result["inbound_closed"] and result["faults_before_the_end"]
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
