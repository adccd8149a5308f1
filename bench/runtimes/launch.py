"""Launch latency of runtimes, and 500 concurrent sandboxes on one machine.

    python -m bench.runtimes.launch [--sessions 500] [--starts 40] [--json]

1. Latency from `launch` to the agent having its payload, one at a time: sandbox, process, container.
2. `afield train` with the scripted engine: two waves of rollouts, each in its own sandbox, all of a wave at
   once.
3. A third wave whose controller is killed with SIGKILL; sandboxes left behind are counted.

The last line is {"sessions", "failed", "orphans", "start_ms": {RUNTIME: [p50, p99]}, ...}; the exit code is 1
if a requirement is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from afield.errors import Unavailable
from afield.interfaces import Runtime
from afield.runtimes.process import ProcessRuntime
from afield.runtimes.sandbox import SandboxRuntime
from afield.settings.runtimes import SandboxOptions
from afield.transports.stores.files import FilesTransport
from afield.types import Attempt
from agents.invoking import payload
from agents.places import ACTING
from agents.sink import Sink
from bench import ROOT
from support import podman as containers

AFIELD = [sys.executable, "-m", "afield"]
POLICY = ROOT / "src" / "afield" / "demo" / "policy"
AGENT = Path(__file__).with_name("waiting_agent.py")
GONE_S = 30.0
START_MS = 150.0
GROWTH = 1.10  # of the controller's memory from the first wave to the second


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sessions", type=int, default=500, help="at once (default: 500)")
    parser.add_argument("--starts", type=int, default=40, help="of each kind, one at a time (default: 40)")
    parser.add_argument("--json", action="store_true", help="only the last line on stdout")
    args = parser.parse_args()
    out = sys.stderr if args.json else sys.stdout
    with tempfile.TemporaryDirectory(prefix="afield-runtimes-") as folder:
        place = Path(folder)
        starts = asyncio.run(all_starts(place, args.starts, out))
        result: dict[str, Any] = crowd(place, args.sessions, out)
        result["orphans"] = killed(place, args.sessions, out)
    result["start_ms"] = starts
    ok = (
        result["failed"] == result["orphans"] == 0
        and result["peak"] >= args.sessions
        and result["growth"] <= GROWTH
        and starts["sandbox"][0] < START_MS
    )
    print(json.dumps({**result, "ok": ok}))
    return 0 if ok else 1


# --- starts, one at a time -----------------------------------------------------------------------


async def all_starts(place: Path, count: int, out: Any) -> dict[str, list[float] | None]:
    target = f"{ACTING}:act"
    kinds: dict[str, Any] = {
        "sandbox": lambda: SandboxRuntime(target, SandboxOptions(), log_dir=place / "sandbox"),
        "subprocess": lambda: ProcessRuntime(target, fresh=True, log_dir=place / "subprocess"),
    }
    times: dict[str, list[float] | None] = {}
    async with AsyncExitStack() as stack:
        transport = await stack.enter_async_context(FilesTransport(place / "store"))
        try:
            short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pod-")))
            engine = stack.enter_context(containers.podman(short))
            kinds["container"] = lambda: containers.runtime(engine.socket, engine.image, str(place), "bench")
        except Unavailable as error:
            print(f"no containers here: {error}", file=out)
            times["container"] = None
        for kind, make in kinds.items():
            bind = "0.0.0.0" if kind == "container" else "127.0.0.1"
            async with Sink(transport).running(bind) as sink, make() as runtime:
                await runtime.check()
                times[kind] = await start_times(runtime, kind, sink, count)
            print(f"{kind}: a start takes {times[kind]} ms (p50, p99 of {count})", file=out, flush=True)
    return times


async def start_times(runtime: Runtime, kind: str, sink: Sink, count: int) -> list[float]:
    taken: list[float] = []
    for n in range(count + 2):
        attempt = Attempt(f"{kind}-{n}", 1)
        body = payload({"do": "reward"}, sink.invocation(attempt))
        began = time.perf_counter()
        await runtime.launch(attempt, body)
        taken.append((time.perf_counter() - began) * 1000)
        with suppress(TimeoutError):
            await asyncio.wait_for(runtime.wait(attempt), 30)
        await runtime.stop(attempt)
    taken = sorted(taken[2:])  # the first ones find nothing warm
    return [round(statistics.median(taken), 1), round(taken[min(len(taken) - 1, int(len(taken) * 0.99))], 1)]


# --- a crowd -------------------------------------------------------------------------------------


def crowd(place: Path, sessions: int, out: Any) -> dict[str, Any]:
    """Two waves to their end."""
    run = train(place, "crowd", sessions, waves=2, wait_s=20.0)
    watch = Watch(run.pid)
    thread = threading.Thread(target=watch.run, daemon=True)
    thread.start()
    output = run.communicate(timeout=1800)[0]
    watch.done.set()
    thread.join()
    if run.returncode != 0:
        raise SystemExit(
            f"afield train ended with {run.returncode}; see {place / 'crowd.log'}\n{tail(place)}"
        )
    summary = json.loads(output.strip().splitlines()[-1])
    first, second = watch.levels()
    result = {
        "sessions": summary["rollouts"],
        "at_once": sessions,
        "peak": watch.peak,
        "failed": summary["failed"],
        "controller_mib": [round(first / 1024, 1), round(second / 1024, 1)],
        "growth": round(second / first, 3),
        "cells_mib": round(watch.cell_kib / 1024, 1),
    }
    print(f"a crowd: {result}", file=out, flush=True)
    return result


def killed(place: Path, sessions: int, out: Any) -> int:
    """What is left 30 s after the controller of a crowd was killed with SIGKILL."""
    run = train(place, "killed", sessions, waves=1, wait_s=60.0)
    deadline = time.monotonic() + 600
    while len(innermost(run.pid)) < sessions:
        if time.monotonic() > deadline or run.poll() is not None:
            raise SystemExit(f"the second crowd did not come together\n{tail(place, 'killed')}")
        time.sleep(1)
    before = kin(run.pid)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    began = time.monotonic()
    left = len(before)
    while left and time.monotonic() - began < GONE_S:
        time.sleep(0.5)
        left = sum(born == start_time(pid) for pid, born in before.items())
    took = time.monotonic() - began
    print(f"{len(before)} processes; {left} left {took:.1f} s after SIGKILL", file=out, flush=True)
    return left


def train(place: Path, name: str, sessions: int, *, waves: int, wait_s: float) -> subprocess.Popen[str]:
    """`afield train` in sandboxes, with the scripted engine and no learning."""
    tasks = place / "tasks.jsonl"
    rows = [{"id": f"t{n}", "calls": 3, "wait_s": wait_s} for n in range(sessions // 2 * 2)]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = place / "script.jsonl"
    script.write_text(json.dumps({"match": "turn", "text": "Yes."}) + "\n")
    command = [*AFIELD, "train", f"{AGENT}:agent", "--json", "--run", name, "--runtime", "sandbox"]
    command += ["--tasks", str(tasks), "--model", str(POLICY), "--engine", f"scripted={script}"]
    command += ["--freeze-weights", "--steps", str(waves), "--tasks-per-step", str(sessions // 2)]
    command += ["--rollouts", "2", "--concurrency", str(sessions), "--attempt-timeout", "600"]
    command += ["--set", "launch_timeout_s=300", "--set", "sandbox.limits.memory_mb=256"]
    log = (place / f"{name}.log").open("wb")
    environ = {**os.environ, "AFIELD_RUNS": str(place / "runs")}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environ)


def tail(place: Path, name: str = "crowd") -> str:
    return (place / f"{name}.log").read_text(errors="replace")[-3000:]


class Watch:
    """The controller's memory and how many sandboxes there are, once a second."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.done = threading.Event()
        self.peak = 0
        self.cell_kib = 0.0
        self._rss: list[int] = []

    def run(self) -> None:
        while not self.done.wait(1.0):
            cells = innermost(self._pid)
            with suppress(OSError):
                if cells:  # the curve that is drawn at the end is no session's doing
                    self._rss.append(memory(self._pid, "VmRSS"))
            if len(cells) > self.peak:
                self.peak = len(cells)
                sizes = [size for pid in cells[:20] if (size := private(pid))]
                self.cell_kib = statistics.mean(sizes) if sizes else 0.0

    def levels(self) -> tuple[int, int]:
        """The controller's highest level in each half of the watch: the first wave, and the second."""
        half = len(self._rss) // 2
        return max(self._rss[:half]), max(self._rss[half:])


def kin(pid: int) -> dict[int, float]:
    """All descendants of a process, with when each was born."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    started: dict[int, float] = {}
    todo = [pid]
    while todo:
        for child in parents.get(todo.pop(), []):
            started[child] = start_time(child) or 0.0
            todo.append(child)
    return started


def innermost(pid: int) -> list[int]:
    """The init process of each sandbox: number 1 in a pid namespace two or more levels below ours."""
    cells: list[int] = []
    for one in kin(pid):
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/{one}/status").read_text().splitlines()
            ids = next(line for line in lines if line.startswith("NSpid:")).split()[1:]
            if len(ids) >= 3 and ids[-1] == "1":
                cells.append(one)
    return cells


def start_time(pid: int) -> float | None:
    with suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else float(fields[19])
    return None


def memory(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def private(pid: int) -> int:
    """What a process has for itself, in KiB."""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
