"""`make accept`: everything that must be shown, part by part, with its numbers saved.

Each part runs the real commands, checks its bars, and writes bench/results/PART-COMMIT.json. The exit
code is 0 only if every bar of every chosen part was met.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import page
from bars import RESULTS, ROOT, Absent, Bars, commit, last_line, passes

import trainers

AFIELD = [str(Path(sys.executable).parent / "afield")]
BUSY = [sys.executable, "bench/collect.py"]
SEEDS = (0, 1, 2)


def demo(
    cwd: Path, *options: object, before: tuple[str, ...] = (), afield: list[str] = AFIELD
) -> dict[str, Any]:
    command = [*before, *afield, "demo", "--json", *map(str, options)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    told = json.loads(done.stdout.strip().splitlines()[-1])
    return {key: value for key, value in told.items() if key not in ("run", "agent")}  # paths of a machine


def loop(bars: Bars, cwd: Path) -> dict[str, Any]:
    """The whole loop: learning over seeds, frozen weights, other agents, offline."""
    runs: dict[str, Any] = {}
    for seed in SEEDS:
        told = runs[f"seed {seed}"] = demo(cwd, "--seed", seed)
        check_learning(bars, f"seed {seed}", told)
    for seed in SEEDS:
        told = runs[f"frozen, seed {seed}"] = demo(cwd, "--seed", seed, "--freeze-weights")
        change = abs(told["last"] - told["first"])
        bars.check(f"frozen, seed {seed}: |last - first|", round(change, 4), change <= 0.12, "<= 0.12")
    for agent in ("strands", "langgraph"):
        told = runs[agent] = demo(cwd, "--agent", agent)
        check_learning(bars, agent, told)
    offline = offline_prefix()
    if offline:
        told = runs["offline"] = demo(cwd, "--steps", 3, before=offline)
        bars.check("offline: failed rollouts", told["failed"], told["failed"] == 0, "0")
    else:
        bars.check("offline", "unshare is not here", False, "runs without a network")
    exact = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/orchestrator/test_exactness.py"], cwd=ROOT, check=False
    )
    bars.check("exactness tests", exact.returncode, exact.returncode == 0, "pass")
    return runs


def check_learning(bars: Bars, name: str, told: dict[str, Any]) -> None:
    bars.check(f"{name}: first", told["first"], told["first"] <= 0.35, "<= 0.35")
    bars.check(f"{name}: last", told["last"], told["last"] >= 0.80, ">= 0.80")
    turns = told["turns_per_rollout"]
    bars.check(f"{name}: turns per rollout", turns, turns >= 2, ">= 2")
    bars.check(f"{name}: wall time", told["wall_s"], told["wall_s"] <= 180, "<= 180 s")
    bars.check(f"{name}: failed rollouts", told["failed"], told["failed"] == 0, "0")


def offline_prefix() -> tuple[str, ...]:
    """A network namespace with nothing in it but loopback."""
    if not (shutil.which("unshare") and shutil.which("ip")):
        return ()
    return ("unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "offline")


# --- the gateway ---------------------------------------------------------------------------------


def gateway(bars: Bars, cwd: Path) -> dict[str, Any]:
    """Any harness, every token exact: real clients, the forest oracle, kill -9, invariants, cost."""
    runs: dict[str, Any] = {}
    told = runs["conformance"] = last_line([*AFIELD, "conformance", "--json"], cwd)
    for name, client in told["clients"].items():
        seen = f"{client['matched']} of {client['calls']} calls, {client['duplicates']} duplicates"
        exact = client["ok"] and client["matched"] == client["calls"] and not client["duplicates"]
        seen += f", on {', '.join(client['templates'])}, excluded {client['excluded']}"
        both = len(client["templates"]) >= 2
        bars.check(f"conformance, {name}", seen, exact and both, "every call once, on two templates")
    told = runs["suites"] = last_line([*AFIELD, "conformance", "--suites", "--json"], cwd)
    for name, suite in told["suites"].items():
        seen = f"{suite['passed']} passed, {suite['failed']} failed, {suite['skipped']} skipped"
        seen += f", {len(suite['not_ours'])} not ours"
        if away := suite.get("unavailable"):
            seen += f"; not run: {away.splitlines()[0]}"
        bars.check(f"suite {name}", seen, not suite["failed"], "no failure that is ours")
    told = runs["mutants"] = last_line([sys.executable, "bench/mutants.py", "--json"], ROOT)
    seen = f"{told['killed']} of {told['mutants']} killed, errors {told['errors']}"
    killed = told["killed"] == told["mutants"] >= 20 and not told["survived"] and not told["errors"]
    bars.check("mutants of the gateway", seen, killed, ">= 20, all killed")
    told = runs["parameters"] = last_line([sys.executable, "bench/parameters.py", "--json"], ROOT)
    seen = f"{told['requests']} requests, {told['answered']} answered, {told['refused']} refused by name"
    well = told["requests"] >= 1000 and not told["problems"]
    bars.check("random parameters, every dialect", seen, well, ">= 1000, each honoured or refused by name")
    told = runs["oracle"] = last_line([sys.executable, "bench/oracle.py"], ROOT)
    bars.check(
        "forest oracle: sessions", told["sessions"], told["ok"] and told["sessions"] >= 2000, ">= 2000"
    )
    told = runs["kill -9"] = last_line([sys.executable, "bench/kill.py"], ROOT)
    seen = f"{told['kills']} kills, {told['lost']} lost, {told['duplicates']} duplicates"
    bars.check("kill -9 of the gateway", seen, told["ok"] and told["kills"] >= 20, "20, 0, 0")
    for name, file in (
        ("invariants, each seen to fail", "tests/gateway/test_invariants.py"),
        ("template battery", "tests/chat/test_sample_conversations.py"),
        ("bad input", "tests/gateway/test_bad_input.py"),
        ("real vLLM", "tests/real/test_vllm.py"),
    ):
        passes(bars, name, file)
    runs["cost"] = cost(bars)
    return runs


def cost(bars: Bars) -> dict[str, Any]:
    """What the gateway costs, as ratios inside one run."""
    told = last_line([sys.executable, "bench/gateway.py", "--json"], ROOT)
    ours, peers = told["cpu_us"]["afield"], told["cpu_us"]
    for peer, load, bar in (
        ("rllm", "small", 0.2),
        ("litellm", "small", 0.08),
        ("capture", "small", 4.0),
        ("rllm", "stream", 0.5),
    ):
        ratio = ours[load] / peers[peer][load]
        bars.check(f"CPU of a {load} call over {peer}'s", round(ratio, 3), ratio <= bar, f"<= {bar}")
    token = ours["stream"] / 200
    bars.check("CPU us per streamed token", round(token, 1), token <= 40, "<= 40")
    bars.check("errors at 512 calls in flight", told["errors_512"], told["errors_512"] == 0, "0")
    grown = told["turn128_over_turn8"]
    bars.check("own work of turn 128 over turn 8", grown, grown <= 1.5, "<= 1.5")
    held = told["rss_mib_2000"]
    bars.check("MiB with 2,000 open sessions", held, held <= 1024, "<= 1024")
    return told


# --- collection ----------------------------------------------------------------------------------


def collection(bars: Bars, cwd: Path) -> dict[str, Any]:
    """Never lost, never counted twice: real stores and queues, kills of everything, asynchrony, memory."""
    runs: dict[str, Any] = {}
    passes(bars, "transports, memory and files", "tests/contracts/test_transport.py")
    passes(bars, "transports on moto, SeaweedFS, NATS, Redis", "tests/real/test_transports.py")
    passes(bars, "the AgentCore toolkit's wheel as agent", "tests/real/test_toolkit.py")
    told = runs["delivery"] = last_line([sys.executable, "bench/delivery.py", "--json"], ROOT)
    bars.check("commit to future, median s", told["median_s"], told["median_s"] < 0.5, "< 0.5")
    slowest, poll_interval_s = told["dropped_max_s"], told["poll_interval_s"]
    bars.check(
        "... every message dropped, slowest s", slowest, slowest < poll_interval_s, f"< {poll_interval_s}"
    )
    told = runs["throughput"] = last_line([*BUSY, "--json", "--plot", "docs/img/collect-load.png"], ROOT)
    bars.check("engine busy, asynchronous", told["busy"], told["busy"] >= 0.9, ">= 0.9")
    ratio = told["async_over_sync"]
    bars.check("asynchronous over synchronous rate", ratio, ratio >= 2, ">= 2")
    bars.check("tokens wasted", told["waste"], told["waste"] <= 0.05, "<= 0.05")
    bars.check("greatest staleness", told["max_staleness"], told["max_staleness"] <= 2, "<= 2")
    told = runs["memory"] = last_line([*BUSY, "--memory", "--json"], ROOT)
    bars.check("memory over 20,000 rollouts", told, bool(told["ok"]), "flat")
    told = runs["chaos"] = last_line([sys.executable, "bench/chaos.py", "--json"], ROOT)
    bars.check("kills", told["kills"], told["kills"] >= 40, ">= 40")
    exact = told["trained_equals_dataset"] is True
    bars.check("trained groups equal the data set", told["trained_equals_dataset"], exact, "exactly")
    for name in ("duplicates", "orphans"):
        bars.check(name, told[name], told[name] == 0, "0")
    bars.check("tokens reused after kills", told["reused"], told["reused"] >= 0.95, ">= 0.95")
    bars.check("lengths as without kills, KS p", told["ks_p"], told["ks_p"] >= 0.01, ">= 0.01")
    faults(bars, runs)
    for mode in ("one-step-off", "async"):
        told = runs[mode] = demo(cwd, "--mode", mode)
        bars.check(f"demo in mode {mode}: last", told["last"], told["last"] >= 0.8, ">= 0.8")
    return runs


def faults(bars: Bars, runs: dict[str, Any]) -> None:
    """One rollout's trouble is its own: random faults with a verifier, and every fault of every method."""
    told = runs["faults"] = last_line([sys.executable, "bench/faults.py", "--every", "--json"], ROOT)
    seen = f"{told['seeds']} seeds x {told['faults']} faults, {told['met']} met"
    bars.check("random faults", seen, told["seeds"] >= 10 and told["faults"] >= 9, "10 x 9")
    for name in ("missing", "doubled"):
        bars.check(f"rollouts {name} after random faults", len(told[name]), not told[name], "0")
    every = told["every"]
    wrong = f"{len(every['wrong'])} of {every['cases']} faults of {every['methods']} methods"
    bars.check(
        "one faulty rollout in 32: others untrained, or it unexplained", wrong, not every["wrong"], "0"
    )


# --- runtimes ------------------------------------------------------------------------------------


def runtimes(bars: Bars, cwd: Path) -> dict[str, Any]:
    """The same agent everywhere: one contract, the demo in four kinds of places, limits, attacks."""
    runs: dict[str, Any] = {}
    for place in ("process", "sandbox", "agentcore", "ray"):
        told = runs[f"demo, {place}"] = demo(cwd, "--runtime", place, afield=afield_of(place))
        bars.check(f"demo, {place}: last", told["last"], told["last"] >= 0.80, ">= 0.80")
        bars.check(f"demo, {place}: wall time", told["wall_s"], told["wall_s"] <= 600, "<= 600 s")
        bars.check(f"demo, {place}: failed rollouts", told["failed"], told["failed"] == 0, "0")
    told = runs["throttle"] = last_line([sys.executable, "bench/throttle.py", "--json"], ROOT)
    bars.check("launch rate over the limit", told["share"], told["share"] >= 0.95, ">= 0.95")
    bars.check("calls answered 429", told["throttled"], told["throttled"] <= 0.01, "<= 0.01")
    bars.check("rollouts that failed", told["failed"], told["failed"] == 0, "0")
    for name, file in (
        ("contract: process, inline, served", "tests/contracts/test_runtime.py"),
        ("contract: sandbox", "tests/runtimes/test_sandbox.py"),
        ("contract: agentcore", "tests/runtimes/test_agentcore.py"),
        ("contract: kubernetes", "tests/runtimes/test_kubernetes_contract.py"),
        ("contract: container", "tests/real/test_containers.py"),
        ("contract: ray, a node killed", "tests/real/test_ray.py"),
        ("hostile agents", "tests/runtimes/test_hostile_agents.py"),
        ("verifiers", "tests/orchestrator/test_verifier.py"),
    ):
        passes(bars, name, file)
    return runs


def crowd(bars: Bars, cwd: Path) -> dict[str, Any]:
    """What a start costs, and five hundred sandboxes at once."""
    told = last_line([sys.executable, "bench/runtimes.py", "--json"], ROOT)
    bars.check("sandboxes at once", told["peak"], told["peak"] >= 500, ">= 500")
    bars.check("sandboxes that failed", told["failed"], told["failed"] == 0, "0")
    bars.check("left 30 s after SIGKILL", told["orphans"], told["orphans"] == 0, "0")
    bars.check("controller's memory, second wave over first", told["growth"], told["growth"] <= 1.1, "<= 1.1")
    for place, times in told["start_ms"].items():
        bars.check(f"start of a {place}, ms (p50, p99)", times, bool(times), "measured")
    start = told["start_ms"]["sandbox"][0]
    bars.check("start of a sandbox, ms", start, start < 150, "< 150")
    return told


def afield_of(place: str) -> list[str]:
    """Ray has an environment of its own."""
    if place != "ray":
        return AFIELD
    sys.path.append(str(ROOT / "tests"))
    from support.ray_env import ray_python

    return [str(ray_python()), "-m", "afield"]


def security(bars: Bars, cwd: Path) -> dict[str, Any]:
    """Who gets in: agents, another user, clients with and without a key."""
    told = last_line([sys.executable, "bench/attacks.py", "--json"], ROOT)
    bars.check("attacks tried", told["tried"], told["tried"] >= 60, ">= 60")
    bars.check("attacks that broke something", told["broke"], not told["broke"], "none")
    for name, file in (
        ("what a sandboxed agent sees", "tests/runtimes/test_agent_view.py"),
        ("files of a second user's", "tests/test_private_files.py"),
        ("workers and a second user", "tests/sdk/test_signed_invocations.py"),
        ("keys in /proc", "tests/test_process_secrets.py"),
        ("warm parents", "tests/sandbox/test_import_prewarm.py"),
    ):
        passes(bars, name, file)
    return {"attacks": told}


PARTS: dict[str, Callable[[Bars, Path], dict[str, Any]]] = {
    "loop": loop,
    "gateway": gateway,
    "collect": collection,
    "runtimes": runtimes,
    "security": security,
    "crowd": crowd,
    "trainers": trainers.trainers,
    "gpu": trainers.gpu,
}
WRITTEN = ("collect", "runtimes", "crowd", "trainers", "gpu")  # parts that docs/benchmarks.md tells of


def shown(name: str) -> bool:
    """Run a part, save what was seen, and say whether all of it was met."""
    bars = Bars()
    began, tree = time.monotonic(), commit()
    with tempfile.TemporaryDirectory() as scratch:
        numbers = PARTS[name](bars, Path(scratch))
    machine = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    if commit() != tree:  # what was run is partly this, partly that
        tree = f"{tree.removesuffix('-dirty')}-dirty"
    result = {"part": name, "commit": tree, "ok": bars.ok, "bars": bars.rows, "runs": numbers}
    result |= {"machine": machine, "wall_s": round(time.monotonic() - began, 1)}
    result["ended"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    path = RESULTS / f"{name}-{tree}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"  saved {path.relative_to(ROOT)}")
    if name in WRITTEN:
        page.rewrite()
    return bars.ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", default="all", choices=["all", *PARTS])
    asked = parser.parse_args().part
    met = True
    for name in PARTS if asked == "all" else (asked,):
        print(f"{name}:", flush=True)
        try:
            met &= shown(name)
        except Absent as why:
            print(f"  skipped, not met: {why}")
            met = False
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
