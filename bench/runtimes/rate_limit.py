"""Launch rate under a limit on session starts.

    python -m bench.runtimes.rate_limit [--json]

`afield agentcore-local` allows 25 session starts per second (a token bucket of one second; stops have their
own), each with a cold start of 10 s. The rollout runner, rate limiter and AgentCore runtime launch 1,000
rollouts of an agent that only returns a reward. The server measures: `rate_per_s` is starts per second from
the first to the last, `throttled` the share of calls answered with 429. The last line is {"rollouts",
"limit_per_s", "rate_per_s", "share", "throttled", "failed"}; the exit code is 1 if a requirement is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from afield.gateway.client import HttpGateway
from afield.orchestrator.config import RolloutConfig
from afield.orchestrator.deadlines import Deadlines
from afield.orchestrator.rollout import RolloutRunner
from afield.orchestrator.state import RolloutStore, RunState
from afield.ratelimit import LocalLimiter, RateLimits
from afield.runtimes.agentcore.runtime import AgentCoreRuntime
from afield.settings.runtimes import AgentCoreOptions
from afield.transports.stores.files import FilesTransport
from afield.types import Outcome, Rollout, RolloutResult, Task
from bench import ROOT
from bench.chaos.engine_script import write_script

AGENT = Path(__file__).with_name("instant_agent.py")
POLICY = ROOT / "src" / "afield" / "demo" / "policy"
ADMIN = "throttle-admin-key"
IMAGE = "minimal"
SHARE, THROTTLED = 0.95, 0.01
EXP = "throttle"
STARTED_S = 120.0
LIMIT_S = 180.0  # beyond twice what the limit allows


class Quiet:
    """Watches nothing; failures are counted at the end."""

    def attempt_ended(self, rollout: Rollout, outcome: Outcome, will_retry: bool) -> None:
        if outcome.failure:
            print(f"{outcome.session_id}: {outcome.failure.message[:500]}", file=sys.stderr, flush=True)

    def rollout_finished(self, result: RolloutResult) -> None: ...


@asynccontextmanager
async def part(log: Path, *command: object) -> AsyncIterator[dict[str, Any]]:
    """A part of afield in a process of its own; what it said of itself once it was ready."""
    environment = {**os.environ, "AFIELD_ADMIN_KEY": ADMIN}
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *map(str, (sys.executable, "-m", "afield", *command, "--json", "--exit-with-parent")),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=environment,
        )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(STARTED_S):
            line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"{command[0]} did not start; see {log}")
        yield json.loads(line)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def measure(args: argparse.Namespace, place: Path) -> dict[str, Any]:
    script = write_script(place / "script.jsonl", 0.0)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        store = ("--store", place / "gateway", "--outcomes", f"files://{place / 'outcomes'}")
        engine = ("--model", POLICY, "--engine", f"scripted={script}")
        up = await enter(part(place / "gateway.log", "gateway", *engine, *store, "--port", 0))
        host = up["url"].rpartition("//")[2]
        limits = (
            "--starts-per-s",
            args.limit,
            "--stops-per-s",
            args.limit,
            "--cold-start-s",
            args.cold_start,
        )
        where = ("--image", f"{IMAGE}={AGENT}:run", "--allow", host, "--port", 0)
        quiet = ("--logs", place / "sessions", "--isolation", args.isolation)
        acr = await enter(part(place / "acr.log", "agentcore-local", *where, *limits, *quiet))
        async with asyncio.timeout(LIMIT_S + 2 * args.rollouts / args.limit):
            launched = await launch(args, place, up["url"], acr["url"])
        async with aiohttp.ClientSession() as http, http.get(f"{acr['url']}/_acr/stats") as answer:
            stats = await answer.json()
    return summary(args, launched, stats)


async def launch(args: argparse.Namespace, place: Path, gateway_url: str, acr_url: str) -> list[Outcome]:
    options = AgentCoreOptions(
        endpoint_url=acr_url,
        agent_name=IMAGE,
        container_uri=IMAGE,
        role_arn="arn:aws:iam::123456789012:role/agents",
        rate=args.limit,
        stop_rate=args.limit,
        cold_start_s=args.cold_start,
    )
    plan = RolloutConfig(
        exp_id=EXP,
        model_id="policy",
        concurrency=args.rollouts,
        deliver="gateway",
        deadlines=Deadlines(attempt_timeout_s=90.0, teardown_timeout_s=60.0),
    )
    pace = RateLimits(
        rate_per_s=options.rate, stop_per_s=options.stop_rate, cold_start_s=options.cold_start_s
    )
    runtime = AgentCoreRuntime(options, name=EXP, session_table=place / "sessions.sqlite")
    async with (
        HttpGateway(gateway_url, ADMIN) as gateway,
        FilesTransport(place / "outcomes") as transport,
        runtime,
    ):
        await runtime.check()
        with RunState(place / "run_state.sqlite") as run_state:
            conductor = RolloutRunner(
                plan,
                gateway=gateway,
                runtime=runtime,
                transport=transport,
                run_state=run_state,
                rollout_store=RolloutStore(place / "rollout_store"),
                observer=Quiet(),
                limiter=LocalLimiter(pace),
            )
            async with conductor:
                wishes = [
                    Rollout(id=f"r{n}", exp_id=EXP, group_id=f"g{n}", task=Task(f"t{n}", {}))
                    for n in range(args.rollouts)
                ]
                notes = await asyncio.gather(*(conductor.run(wish) for wish in wishes))
    return [note.outcome for note in notes]


def summary(args: argparse.Namespace, outcomes: list[Outcome], stats: dict[str, Any]) -> dict[str, Any]:
    answers = {name: stats["answers"].get(name, {}) for name in ("InvokeAgentRuntime", "StopRuntimeSession")}
    calls = sum(sum(counts.values()) for counts in answers.values())
    refused = sum(counts.get("429", 0) for counts in answers.values())
    result = {
        "rollouts": len(outcomes),
        "limit_per_s": args.limit,
        "rate_per_s": stats["start_rate"],
        "share": round(stats["start_rate"] / args.limit, 4),
        "throttled": round(refused / calls, 5),
        "failed": sum(outcome.failure is not None for outcome in outcomes),
        "calls": calls,
        "starts": stats["starts"],
        "cold_start_s": args.cold_start,
        "cpu_s": round(time.process_time(), 1),
    }
    return result | {
        "ok": result["share"] >= SHARE and result["throttled"] <= THROTTLED and not result["failed"]
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--limit", type=float, default=25.0, help="session starts a second, and stops")
    parser.add_argument("--cold-start", type=float, default=10.0, help="seconds")
    parser.add_argument("--isolation", choices=("sandbox", "none"), default="sandbox")
    parser.add_argument("--keep", type=Path, help="a new folder for logs and state, kept afterwards")
    parser.add_argument("--json", action="store_true", help="one line of JSON and nothing else")
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 16_384)), hard))
    with tempfile.TemporaryDirectory(prefix="afield-throttle-") as temporary:
        if args.keep:
            args.keep.mkdir(parents=True)
        result = asyncio.run(measure(args, args.keep or Path(temporary)))
    if not args.json:
        share = f"{result['share']:.1%} of {result['limit_per_s']:g} a second"
        print(f"{result['rollouts']} rollouts: {share}, {result['throttled']:.2%} of calls answered 429")
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
