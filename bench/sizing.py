"""Sizing: gateways, relays, memory, disk and network for a number of concurrent rollouts.

    python bench/sizing.py [--measure] [--json]

1. Costs come from bench/results: `gateway-cost` (CPU per call, streamed token and byte) and `sizing`, which
   `--measure` writes (relay, memory per turn, disk per token, rollouts with tool time).
2. A discrete-event simulation of rollouts, tool times, generation and one queue per gateway process. It is
   compared with measured rates and latencies.
3. The simulation runs for up to 100,000 rollouts. Its result is saved as `sizing`, and the tables and the
   plot of docs/deploy/sizing.md are written from it. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import math
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import uvloop

from bench import ROOT, report
from bench.gateway import servers
from bench.gateway.conversations import Conversations
from bench.gateway.http_client import Connection, connect, post
from bench.gateway.workload import ANSWER, Workload

PAGE = ROOT / "docs" / "deploy" / "sizing.md"
PLOT = ROOT / "docs" / "img" / "sizing.svg"
SIZES = (100, 1_000, 10_000, 100_000)
UTILISATION = 0.6
"""Share of a gateway process's event loop that is planned for; the rest is for bursts."""
BUSY = 3.0
"""Load average above which rates say more about other programs than about the gateway."""
TOLERANCE = 0.15
"""Largest accepted error of rates, and of medians below full load, against a measurement."""


# --- costs ---------------------------------------------------------------------------------------


class Costs(NamedTuple):
    """Measured costs of gateway and relay."""

    call_us: float
    """CPU of a gateway for a call without streaming and without its history, in microseconds."""
    kilobyte_us: float
    """CPU of a gateway per kilobyte of the request's history."""
    token_us: float
    """CPU of a gateway per streamed token that arrives alone."""
    loop_share: float
    """Share of the CPU that runs on the event loop; the rest runs in threads."""
    relay_call_us: float
    """CPU of a relay per call without streaming."""
    relay_token_us: float
    """CPU of a relay per streamed token."""
    process_mib: float
    """Memory of a gateway process without sessions."""
    session_kib: float
    """Memory of a gateway per open session, without its turns."""
    turn_kib: float
    """Memory of a gateway per recorded turn of an open session."""
    disk_bytes: float
    """Bytes of the store per recorded token."""


def read_costs(gateway: dict[str, Any], measured: dict[str, Any]) -> Costs:
    afield = gateway["servers"]["afield"]
    first, last = afield["turn_8"], afield["turn_128"]
    kilobyte_us = (last["cpu_us"] - first["cpu_us"]) / (last["bytes"] - first["bytes"]) * 1000
    small, paced = afield["small"], afield["stream_paced"]
    relay = measured["relay"]
    memory = measured["memory"]
    (few, many), (few_mib, many_mib) = memory["turns"], memory["mib"]
    turn_kib = (many_mib - few_mib) * 1024 / memory["sessions"] / (many - few)
    opened_kib = (few_mib - memory["empty_mib"]) * 1024 / memory["sessions"]
    return Costs(
        call_us=first["cpu_us"] - first["bytes"] / 1000 * kilobyte_us,
        kilobyte_us=kilobyte_us,
        token_us=(paced["cpu_us"] - small["cpu_us"]) / ANSWER,
        # At full load the event loop is busy all the time.
        loop_share=1e6 / small["per_s"] / small["cpu_us"],
        relay_call_us=relay["call_us"],
        relay_token_us=(relay["paced_us"] - relay["call_us"]) / ANSWER,
        process_mib=memory["empty_mib"],
        session_kib=max(0.0, opened_kib - turn_kib * few),
        turn_kib=turn_kib,
        disk_bytes=measured["disk"]["bytes_per_token"],
    )


# --- simulation ----------------------------------------------------------------------------------


class Rollouts(NamedTuple):
    """Shape of rollouts; the default is a coding agent."""

    turns: int = 20
    sampled: int = 300
    """Sampled tokens per turn."""
    added: int = 500
    """Tokens that a tool result adds per turn."""
    prompt: int = 2_000
    """Tokens of the first prompt."""
    token_s: float = 0.02
    """Time per sampled token."""
    tool_median_s: float = 2.0
    tool_sigma: float = 1.3
    """Median and sigma of the log-normal time between turns."""
    stream: bool = True
    bytes_per_token: float = 4.5
    """Bytes of a request per token of history."""

    @property
    def tool_s(self) -> float:
        """Mean time between turns."""
        return self.tool_median_s * math.exp(self.tool_sigma**2 / 2)

    def body_kb(self, turn: float) -> float:
        return (self.prompt + turn * (self.sampled + self.added)) * self.bytes_per_token / 1000

    @property
    def tokens(self) -> int:
        """Recorded tokens of a finished rollout."""
        return self.prompt + self.turns * (self.sampled + self.added)


class Load(NamedTuple):
    """Simulated load of gateway processes."""

    calls_per_s: float
    utilisation: float
    """Busy share of the event loops."""
    added_ms: list[float]
    """Sorted time that calls spend in the gateway: waiting and work."""
    call_ms: list[float]
    """Sorted times of whole calls."""

    def quantile(self, values: list[float], q: float) -> float:
        return values[min(len(values) - 1, int(q * len(values)))] if values else 0.0


class Call:
    """A call in progress."""

    __slots__ = ("added_s", "began", "pieces", "process", "rollout")

    def __init__(self, rollout: int, process: int, began: float, pieces: int) -> None:
        self.rollout, self.process, self.began, self.pieces = rollout, process, began, pieces
        self.added_s = 0.0


def simulate(
    rollouts: int,
    processes: int,
    shape: Rollouts,
    costs: Costs,
    *,
    seconds: float,
    pieces: int = 8,
    seed: int = 0,
) -> Load:
    """Run rollouts for a time; the first third is not counted.

    Each process is a queue with one server. A call is one piece of work for its request, and `pieces` for its
    answer, spread over the time of generation. Sessions have a process at random, as by their id's hash.
    """
    rng = random.Random(seed)
    share = costs.loop_share / 1e6
    answer_s = (shape.sampled * costs.token_us * share if shape.stream else 0.0) + costs.call_us * share / 2
    generate_s = shape.sampled * shape.token_s
    free = [0.0] * processes
    turn = [rng.randrange(shape.turns) for _ in range(rollouts)]
    home = [rng.randrange(processes) for _ in range(rollouts)]
    events: list[tuple[float, int, Call | int]] = [(first_call_s(shape, rng), n, n) for n in range(rollouts)]
    heapq.heapify(events)
    number, begin = rollouts, seconds / 3
    busy, added, whole = 0.0, [], []
    while events:
        now, _, event = heapq.heappop(events)
        if now > seconds:
            break
        if isinstance(event, int):
            call = Call(event, home[event], now, pieces)
            work_s = (costs.call_us / 2 + costs.kilobyte_us * shape.body_kb(turn[event])) * share
        else:
            call, work_s = event, answer_s / pieces
            call.pieces -= 1
        end = max(now, free[call.process]) + work_s
        free[call.process] = end
        call.added_s += end - now
        if now >= begin:
            busy += work_s
        number += 1
        if call.pieces:
            heapq.heappush(events, (end + generate_s / pieces, number, call))
            continue
        if end >= begin:
            added.append(call.added_s * 1000)
            whole.append((end - call.began) * 1000)
        n = call.rollout
        turn[n] = (turn[n] + 1) % shape.turns
        if not turn[n]:
            home[n] = rng.randrange(processes)  # the next rollout's session
        pause_s = (
            rng.lognormvariate(math.log(shape.tool_median_s), shape.tool_sigma)
            if shape.tool_median_s
            else 0.0
        )
        heapq.heappush(events, (end + pause_s, number, n))
    counted_s = seconds - begin
    return Load(len(whole) / counted_s, busy / counted_s / processes, sorted(added), sorted(whole))


def first_call_s(shape: Rollouts, rng: random.Random) -> float:
    """Time until the next call of a rollout that is observed at random: the rest of a pause or of a call."""
    generate_s = shape.sampled * shape.token_s
    if not shape.tool_median_s or rng.random() * (shape.tool_s + generate_s) < generate_s:
        return rng.random() * generate_s
    # A random moment lies in a long pause more often than in a short one.
    mean = math.log(shape.tool_median_s) + shape.tool_sigma**2
    return rng.random() * rng.lognormvariate(mean, shape.tool_sigma)


def plan(rollouts: int, shape: Rollouts, costs: Costs, seconds: float) -> dict[str, Any]:
    """Resources for a number of concurrent rollouts, with the simulated load of the gateways."""
    body_kb = shape.body_kb((shape.turns - 1) / 2)
    call_us = costs.call_us + costs.kilobyte_us * body_kb
    call_us += shape.sampled * costs.token_us if shape.stream else 0.0
    calls_per_s = rollouts / (shape.tool_s + shape.sampled * shape.token_s)
    processes = max(1, math.ceil(calls_per_s * call_us * costs.loop_share / 1e6 / UTILISATION))
    load = simulate(rollouts, processes, shape, costs, seconds=seconds)
    relay_us = costs.relay_call_us + (shape.sampled * costs.relay_token_us if shape.stream else 0.0)
    sessions_mib = rollouts * (costs.session_kib + costs.turn_kib * shape.turns / 2) / 1024
    bytes_per_s = load.calls_per_s * (shape.sampled + shape.added) * costs.disk_bytes
    return {
        "rollouts": rollouts,
        "stream": shape.stream,
        "calls_per_s": round(load.calls_per_s, 1),
        "engine_tokens_per_s": round(load.calls_per_s * shape.sampled),
        "processes": processes,
        "gateway_cores": round(load.calls_per_s * call_us / 1e6, 2),
        "utilisation": round(load.utilisation, 3),
        "added_p50_ms": round(load.quantile(load.added_ms, 0.5), 1),
        "added_p99_ms": round(load.quantile(load.added_ms, 0.99), 1),
        "memory_gib": round((processes * costs.process_mib + sessions_mib) / 1024, 2),
        "disk_gib_per_h": round(bytes_per_s * 3600 / 2**30, 2),
        "requests_mbit_per_s": round(load.calls_per_s * body_kb * 8 / 1000, 1),
        "relay_cores": round(load.calls_per_s * relay_us / 1e6, 2),
    }


# --- comparison with measurements ----------------------------------------------------------------


def validate(gateway: dict[str, Any], measured: dict[str, Any], costs: Costs) -> list[dict[str, Any]]:
    """The simulation beside what was measured. Each point has the CPU per call of its own run."""
    afield, capture = gateway["servers"]["afield"], gateway["servers"]["capture"]
    rows: list[dict[str, Any]] = []

    def compare(name: str, quantity: str, simulated: float, value: float, required: bool = True) -> None:
        error = round(simulated / value - 1, 3)
        point = {"point": name, "quantity": quantity, "simulated": round(simulated, 1), "measured": value}
        rows.append({**point, "error": error, "required": required})

    for connections in (64, 512):
        point = afield[f"connections_{connections}"]
        load = closed(connections, point["cpu_us"], 1, 0.0, 0.0, costs)
        name = f"{connections} connections without pauses"
        compare(name, "calls/s", load.calls_per_s, point["per_s"])
        # A full event loop does not serve connections in order, so the median is not the mean.
        median = load.quantile(load.call_ms, 0.5)
        compare(name, "median ms", median, point["p50_ms"], required=connections == 64)
    point, bare_s = afield["stream_paced"], capture["stream_paced"]["p50_ms"] / 1000
    load = closed(64, point["cpu_us"], ANSWER, bare_s, 0.0, costs)
    name = "64 streams, a token every 5 ms"
    compare(name, "calls/s", load.calls_per_s, point["per_s"])
    compare(name, "median ms", load.quantile(load.call_ms, 0.5), point["p50_ms"])
    point = measured["rollouts"]
    tool_s, sigma = point["tool_median_s"], point["tool_sigma"]
    load = closed(point["rollouts"], point["cpu_us"], 1, 0.0, tool_s, costs, sigma)
    busy = point["load_1m"] > BUSY
    name = f"{point['rollouts']} rollouts with tool times" + (
        f" (machine busy: {point['load_1m']})" if busy else ""
    )
    compare(name, "calls/s", load.calls_per_s, point["per_s"], required=not busy)
    return rows


def closed(
    rollouts: int,
    cpu_us: float,
    pieces: int,
    generate_s: float,
    tool_s: float,
    costs: Costs,
    sigma: float = 0.0,
) -> Load:
    """Simulate a load generator with a fixed number of connections on one process."""
    shape = Rollouts(
        turns=1,
        sampled=1,
        added=0,
        prompt=0,
        token_s=generate_s,
        tool_median_s=tool_s,
        tool_sigma=sigma,
        stream=False,
    )
    fixed = costs._replace(call_us=cpu_us, kilobyte_us=0.0)
    return simulate(rollouts, 1, shape, fixed, seconds=60.0, pieces=pieces)


# --- measurement ---------------------------------------------------------------------------------


@asynccontextmanager
async def gateway_and_relay(
    work: Workload, engine: str, scratch: Path
) -> AsyncIterator[tuple[servers.Server, servers.Server]]:
    """A gateway that is reachable directly and through a relay."""
    secret = scratch / "lab.secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    port, relay_port = servers.free_port(), servers.free_port()
    relay_command = [str(servers.AFIELD), "relay", "--port", str(relay_port), "--cluster", f"lab={secret}"]
    command, health, _ = servers.afield_command(port, work.model, engine, scratch, scratch)
    link = [
        "--relay",
        f"http://127.0.0.1:{relay_port}",
        "--relay-cluster",
        "lab",
        "--relay-secret-file",
        str(secret),
    ]
    async with (
        servers.running("relay", relay_command, relay_port, scratch, "/health") as relay,
        servers.running("afield", [*command, *link], port, scratch, health) as gateway,
    ):
        yield gateway, relay


async def open_sessions(gateway: servers.Server, count: int) -> list[tuple[str, str]]:
    """Paths at the relay and keys of new sessions."""
    connection = await connect(gateway.url)
    targets = []
    for _ in range(count):
        session = json.loads((await connection.ask(post("/sessions", b"{}", servers.ADMIN))).body)
        targets.append((f"{urlsplit(session['openai_base_url']).path}/chat/completions", session["api_key"]))
    connection.close()
    return targets


async def converse(
    url: str,
    targets: list[tuple[str, str]],
    work: Workload,
    *,
    seconds: float,
    stream: bool,
    tool: tuple[float, float],
) -> dict[str, Any]:
    """Every session calls again and again, with a pause between calls."""
    rng = random.Random(0)
    end, times, number = time.perf_counter() + seconds, [], 0

    async def run(path: str, key: str) -> None:
        nonlocal number
        connection = await connect(url)
        await asyncio.sleep(rng.random() * tool[0])
        while time.perf_counter() < end:
            number += 1
            body = work.body(work.opening(number), stream=stream)
            times.append((await checked(connection, post(path, body, key))) * 1000)
            if tool[0]:
                await asyncio.sleep(rng.lognormvariate(math.log(tool[0]), tool[1]))
        connection.close()

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for path, key in targets:
            group.create_task(run(path, key))
    wall_s = time.perf_counter() - began
    return {
        "calls": len(times),
        "per_s": round(len(times) / min(wall_s, seconds), 1),
        "p50_ms": round(sorted(times)[len(times) // 2], 2),
    }


async def checked(connection: Connection, request: bytes) -> float:
    reply = await connection.ask(request)
    if reply.status != 200:
        raise SystemExit(f"{reply.status} {reply.body[:300]!r}")
    return reply.whole_s


async def pace(engine: servers.Server, milliseconds: int) -> None:
    connection = await connect(engine.url)
    await connection.ask(post(f"/pace?ms={milliseconds}", b""))
    connection.close()


async def measure(cache: Path, scratch: Path) -> dict[str, Any]:
    work = Workload(cache / "bench")
    with suppress(PermissionError):  # other programs of the machine would add their own waiting times
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(servers.upstream(work.answer(), scratch))
        gateway, relay = await stack.enter_async_context(gateway_and_relay(work, engine.url, scratch))
        targets = await open_sessions(gateway, 64)
        await converse(relay.url, targets, work, seconds=1.0, stream=False, tool=(0.0, 0.0))
        costs: dict[str, float] = {}
        for name, stream, pause_ms in (("call_us", False, 0), ("paced_us", True, 5)):
            await pace(engine, pause_ms)
            before = await relay.quiet_cpu_s()
            load = await converse(relay.url, targets, work, seconds=4.0, stream=stream, tool=(0.0, 0.0))
            costs[name] = round((await relay.quiet_cpu_s() - before) / load["calls"] * 1e6)
        await pace(engine, 0)
        rollouts = await measure_rollouts(gateway, work)
    return {"relay": costs, "rollouts": rollouts, **await measure_memory(work, scratch)}


async def measure_rollouts(gateway: servers.Server, work: Workload) -> dict[str, Any]:
    """Rollouts with tool times on one process, which is far from full."""
    count, tool = 200, (0.8, 0.5)
    targets = [(f"/s/{path.rsplit('/s/', 1)[1]}", key) for path, key in await open_sessions(gateway, count)]
    before, load_1m = await gateway.quiet_cpu_s(), round(os.getloadavg()[0], 1)
    load = await converse(gateway.url, targets, work, seconds=15.0, stream=False, tool=tool)
    cpu_us = round((await gateway.quiet_cpu_s() - before) / load["calls"] * 1e6)
    return {
        "rollouts": count,
        "tool_median_s": tool[0],
        "tool_sigma": tool[1],
        "cpu_us": cpu_us,
        "load_1m": load_1m,
        **load,
    }


async def measure_memory(work: Workload, scratch: Path) -> dict[str, Any]:
    """Memory after few and after more turns of many sessions, and bytes of the store per token."""
    sessions, turns = 500, (3, 12)
    async with servers.upstream(work.answer(), scratch) as engine:
        home = servers.serving("afield", work.model, engine.url, scratch, scratch / "memory")
        async with home as gateway:
            empty = gateway.rss_mib()
            targets = await gateway.fresh(sessions)
            talk = Conversations(gateway, work, targets)
            sizes, begin = [], 1
            for last in turns:
                await talk.run(begin, last)
                sizes.append(round(gateway.rss_mib(), 1))
                begin = last + 1
            tokens = sessions * await session_tokens(gateway, targets[0][0].split("/")[2])
        stored = sum(file.stat().st_size for file in (scratch / "memory" / "afield").glob("gateway.sqlite*"))
    memory = {"sessions": sessions, "turns": list(turns), "empty_mib": round(empty, 1), "mib": sizes}
    return {"memory": memory, "disk": {"tokens": tokens, "bytes_per_token": round(stored / tokens, 1)}}


async def session_tokens(gateway: servers.Server, session_id: str) -> int:
    """Tokens of a conversation without branches: the last prompt and its answer."""
    connection = await connect(gateway.url)
    head = f"GET /sessions/{session_id}/turns HTTP/1.1\r\nhost: x\r\n"
    request = f"{head}authorization: Bearer {servers.ADMIN}\r\n\r\n".encode()
    turns = json.loads((await connection.ask(request)).body)["turns"]
    connection.close()
    return max(turn["prompt_len"] for turn in turns) + ANSWER


# --- result --------------------------------------------------------------------------------------


def run(measured: dict[str, Any]) -> dict[str, Any]:
    gateway = report.newest("gateway-cost")
    if gateway is None:
        raise SystemExit("bench/results has no gateway-cost; run python -m bench.gateway.cost")
    costs = read_costs(gateway, measured)
    comparison = validate(gateway, measured, costs)
    plans = [plan(n, Rollouts(stream=stream), costs, seconds=30.0) for stream in (True, False) for n in SIZES]
    worst = max(abs(row["error"]) for row in comparison if row["required"])  # of the rows with a limit
    return {
        "gateway_cost": gateway["commit"],
        "measured": measured,
        "costs": {name: round(value, 3) for name, value in costs._asdict().items()},
        "validation": comparison,
        "worst_error": worst,
        "ok": worst <= TOLERANCE and all(row["added_p99_ms"] < 250 for row in plans),
        "plans": plans,
    }


COLUMNS = {
    "rollouts": "rollouts",
    "calls/s": "calls_per_s",
    "sampled tokens/s": "engine_tokens_per_s",
    "gateway processes": "processes",
    "gateway cores": "gateway_cores",
    "added p50, ms": "added_p50_ms",
    "added p99, ms": "added_p99_ms",
    "memory, GiB": "memory_gib",
    "disk, GiB/h": "disk_gib_per_h",
    "requests, Mbit/s": "requests_mbit_per_s",
    "relay cores": "relay_cores",
}


def tables(result: dict[str, Any]) -> dict[str, str]:
    """Tables of the page by name."""
    costs = Costs(**result["costs"])
    streamed_us = costs.call_us + 300 * costs.token_us
    rows = [
        ("gateway, call", f"{costs.call_us:,.0f} us and {costs.kilobyte_us:.1f} us per kB of history"),
        ("gateway, streamed token", f"{costs.token_us:.0f} us, if tokens arrive one by one"),
        ("gateway, calls per core", f"{1e6 / costs.call_us:,.0f} a second"),
        ("... with 300 streamed tokens", f"{1e6 / streamed_us:,.0f} a second"),
        ("relay, call", f"{costs.relay_call_us:,.0f} us"),
        ("relay, streamed token", f"{costs.relay_token_us:.0f} us"),
        ("memory of a gateway process", f"{costs.process_mib:.0f} MiB"),
        ("... of an open session", f"{costs.session_kib:.0f} KiB and {costs.turn_kib:.0f} KiB per turn"),
        ("sessions of ten turns per GiB", f"{2**20 / (costs.session_kib + 10 * costs.turn_kib):,.0f}"),
        ("disk", f"{costs.disk_bytes:.0f} bytes per recorded token"),
    ]
    comparison = [
        (
            *(row["point"], row["quantity"], row["simulated"], row["measured"], f"{row['error']:+.1%}"),
            f"{TOLERANCE:.0%}" if row["required"] else "none",
        )
        for row in result["validation"]
    ]
    plans = {
        stream: [
            [f"{row[key]:,}" for key in COLUMNS.values()]
            for row in result["plans"]
            if row["stream"] is stream
        ]
        for stream in (True, False)
    }
    return {
        "costs": report.table(("cost", "measured"), rows),
        "validation": report.table(
            ("load", "quantity", "simulated", "measured", "error", "limit"), comparison
        ),
        "streamed": report.table([*COLUMNS], plans[True]),
        "whole": report.table([*COLUMNS], plans[False]),
    }


def with_tables(text: str, result: dict[str, Any]) -> str:
    """The page with its tables written again; each follows a comment with its name."""
    for name, table in tables(result).items():
        pattern = rf"(<!-- table: {name} -->\n)(?:\n?\|[^\n]*\n)*"
        text, count = re.subn(pattern, lambda match, table=table: f"{match[1]}\n{table}\n", text)
        if count != 1:
            raise SystemExit(f"{PAGE.name} has {count} comments <!-- table: {name} -->, not one")
    return text


def draw(result: dict[str, Any]) -> None:
    drawing, axes = report.figure(size=(8, 4))
    lines = (
        (True, "gateway_cores", "blue", "o-", "gateway cores, streamed"),
        (False, "gateway_cores", "orange", "o-", "gateway cores, not streamed"),
        (True, "relay_cores", "purple", "^-", "relay cores, streamed"),
        (True, "memory_gib", "grey", "s--", "gateway memory, GiB"),
    )
    for stream, key, colour, marker, label in lines:
        rows = [row for row in result["plans"] if row["stream"] is stream]
        values = [row[key] for row in rows]
        axes.loglog(
            [row["rollouts"] for row in rows], values, marker, color=report.COLOURS[colour], label=label
        )
    axes.set_xlabel("concurrent rollouts")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    report.save_figure(drawing, PLOT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--measure", action="store_true", help="measure relay, memory, disk and rollouts again"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    tree = report.commit()
    before = report.newest("sizing")
    if args.measure or before is None:
        with (
            tempfile.TemporaryDirectory() as scratch,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop,
        ):
            measured = loop.run(measure(Path.home() / ".cache" / "afield", Path(scratch)))
        measured["load_15m"] = round(os.getloadavg()[2], 1)
    else:
        measured = before["measured"]
    result = run(measured)
    print(f"saved {report.save('sizing', result, tree).name}")
    draw(result)
    PAGE.write_text(with_tables(PAGE.read_text(), result))
    for name, table in tables(result).items():
        print(f"\n{name}\n{table}")
    if args.json:
        print(json.dumps({key: result[key] for key in ("worst_error", "ok", "costs", "validation", "plans")}))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
