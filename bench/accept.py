"""Acceptance checks behind `make accept PART=...`.

Each part runs the real commands, checks its criteria and writes bench/results/PART-COMMIT.json. The exit code
is 0 only if every criterion of every chosen part is met.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import ROOT, benchmarks_page, report
from bench.criteria import Criteria, RequirementMissing, check_tests, run_benchmark, run_json, run_tests
from bench.gateway.tables import requirements
from bench.pool.node_loss import MUST_BE_ZERO
from bench.training import acceptance as training

AFIELD = [str(Path(sys.executable).parent / "afield")]
SEEDS = (0, 1, 2)


def demo(
    cwd: Path, *options: object, before: tuple[str, ...] = (), afield: list[str] = AFIELD
) -> dict[str, Any]:
    command = [*before, *afield, "demo", "--json", *map(str, options)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return {key: value for key, value in result.items() if key not in ("run", "agent")}  # paths of a machine


def loop(criteria: Criteria, cwd: Path) -> dict[str, Any]:
    """The training loop: learning over seeds, frozen weights, other agents, offline."""
    runs: dict[str, Any] = {}
    for seed in SEEDS:
        result = runs[f"seed {seed}"] = demo(cwd, "--seed", seed)
        check_learning(criteria, f"seed {seed}", result)
    for seed in SEEDS:
        result = runs[f"frozen, seed {seed}"] = demo(cwd, "--seed", seed, "--freeze-weights")
        change = abs(result["last"] - result["first"])
        criteria.check(f"frozen, seed {seed}: |last - first|", round(change, 4), change <= 0.12, "<= 0.12")
    for agent in ("strands", "langgraph"):
        result = runs[agent] = demo(cwd, "--agent", agent)
        check_learning(criteria, agent, result)
    offline = offline_prefix()
    if offline:
        result = runs["offline"] = demo(cwd, "--steps", 3, before=offline)
        criteria.check("offline: failed rollouts", result["failed"], result["failed"] == 0, "0")
    else:
        criteria.check("offline", "unshare or ip is not installed", False, "runs without a network")
    exact = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/orchestrator/test_exactness.py"], cwd=ROOT, check=False
    )
    criteria.check("exactness tests", exact.returncode, exact.returncode == 0, "pass")
    return runs


def check_learning(criteria: Criteria, name: str, result: dict[str, Any]) -> None:
    criteria.check(f"{name}: first", result["first"], result["first"] <= 0.35, "<= 0.35")
    criteria.check(f"{name}: last", result["last"], result["last"] >= 0.80, ">= 0.80")
    turns = result["turns_per_rollout"]
    criteria.check(f"{name}: turns per rollout", turns, turns >= 2, ">= 2")
    criteria.check(f"{name}: wall time", result["wall_s"], result["wall_s"] <= 180, "<= 180 s")
    criteria.check(f"{name}: failed rollouts", result["failed"], result["failed"] == 0, "0")


def offline_prefix() -> tuple[str, ...]:
    """Command prefix that runs in a network namespace with only loopback; empty without unshare."""
    if not (shutil.which("unshare") and shutil.which("ip")):
        return ()
    return ("unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "offline")


# --- the gateway ---------------------------------------------------------------------------------


def gateway(criteria: Criteria, cwd: Path) -> dict[str, Any]:
    """Gateway: real clients, mutants, the turn-tree oracle, kill -9, invariants, CPU per call."""
    runs: dict[str, Any] = {}
    result = runs["conformance"] = run_json([*AFIELD, "conformance", "--json"], cwd)
    for name, client in result["clients"].items():
        measured = f"{client['matched']} of {client['calls']} calls, {client['duplicates']} duplicates"
        exact = client["ok"] and client["matched"] == client["calls"] and not client["duplicates"]
        measured += f", on {', '.join(client['templates'])}, excluded {client['excluded']}"
        both = len(client["templates"]) >= 2
        criteria.check(f"conformance, {name}", measured, exact and both, "every call once, on two templates")
    result = runs["suites"] = run_json([*AFIELD, "conformance", "--suites", "--json"], cwd)
    for name, suite in result["suites"].items():
        measured = f"{suite['passed']} passed, {suite['failed']} failed, {suite['skipped']} skipped"
        measured += f", {len(suite['not_ours'])} not ours"
        if away := suite.get("unavailable"):
            measured += f"; not run: {away.splitlines()[0]}"
        criteria.check(f"suite {name}", measured, not suite["failed"], "no failure that is ours")
    result = runs["mutants"] = run_benchmark("gateway.mutants", "--json")
    measured = f"{result['killed']} of {result['mutants']} killed, errors {result['errors']}"
    killed = result["killed"] == result["mutants"] >= 20 and not result["survived"] and not result["errors"]
    criteria.check("mutants of the gateway", measured, killed, ">= 20, all killed")
    result = runs["parameters"] = run_benchmark("gateway.random_parameters", "--json")
    measured = (
        f"{result['requests']} requests, {result['answered']} answered, {result['refused']} refused by name"
    )
    honoured = result["requests"] >= 1000 and not result["problems"]
    criteria.check(
        "random parameters, every dialect", measured, honoured, ">= 1000, each honoured or refused by name"
    )
    result = runs["oracle"] = run_benchmark("gateway.turn_tree_oracle")
    criteria.check(
        "turn-tree oracle: sessions",
        result["sessions"],
        result["ok"] and result["sessions"] >= 2000,
        ">= 2000",
    )
    result = runs["kill -9"] = run_benchmark("gateway.crash_recovery")
    measured = f"{result['kills']} kills, {result['lost']} lost, {result['duplicates']} duplicates"
    criteria.check("kill -9 of the gateway", measured, result["ok"] and result["kills"] >= 20, "20, 0, 0")
    for name, file in (
        ("invariants, each measured to fail", "tests/gateway/test_invariants.py"),
        ("template profiles", "tests/chat/test_sample_conversations.py"),
        ("bad input", "tests/gateway/test_bad_input.py"),
        ("real vLLM", "tests/real/test_vllm.py"),
    ):
        check_tests(criteria, name, file)
    runs["cost"] = cost(criteria)
    return runs


def cost(criteria: Criteria) -> dict[str, Any]:
    """CPU and memory of the gateway, as ratios inside one run."""
    result = run_benchmark("gateway.cost", "--json")
    for name, measured, limit in requirements(result):
        criteria.check(name, round(measured, 3), measured <= limit, f"<= {limit:g}")
    return result


# --- collection ----------------------------------------------------------------------------------


def collection(criteria: Criteria, cwd: Path) -> dict[str, Any]:
    """Collection: stores and queues, delivery latency, throughput, memory, kills, faults."""
    runs: dict[str, Any] = {}
    check_tests(criteria, "transports, memory and files", "tests/contracts/test_transport.py")
    check_tests(criteria, "transports on moto, SeaweedFS, NATS, Redis", "tests/real/test_transports.py")
    check_tests(criteria, "the AgentCore toolkit's wheel as agent", "tests/real/test_toolkit.py")
    result = runs["delivery"] = run_benchmark("collect.delivery_latency", "--json")
    criteria.check("commit to future, median s", result["median_s"], result["median_s"] < 0.5, "< 0.5")
    slowest, poll_interval_s = result["dropped_max_s"], result["poll_interval_s"]
    criteria.check(
        "... every message dropped, slowest s", slowest, slowest < poll_interval_s, f"< {poll_interval_s}"
    )
    result = runs["throughput"] = run_benchmark(
        "collect.throughput", "--json", "--plot", "docs/img/collect-load.png"
    )
    criteria.check("engine busy, asynchronous", result["busy"], result["busy"] >= 0.9, ">= 0.9")
    ratio = result["async_over_sync"]
    criteria.check("asynchronous over synchronous rate", ratio, ratio >= 2, ">= 2")
    criteria.check("tokens wasted", result["waste"], result["waste"] <= 0.05, "<= 0.05")
    criteria.check("greatest staleness", result["max_staleness"], result["max_staleness"] <= 2, "<= 2")
    result = runs["memory"] = run_benchmark("collect.throughput", "--memory", "--json")
    criteria.check("memory over 20,000 rollouts", result, bool(result["ok"]), "flat")
    result = runs["chaos"] = run_benchmark("chaos.kills", "--json")
    criteria.check("kills", result["kills"], result["kills"] >= 40, ">= 40")
    exact = result["trained_equals_dataset"] is True
    criteria.check("trained groups equal the data set", result["trained_equals_dataset"], exact, "exactly")
    for name in ("duplicates", "orphans"):
        criteria.check(name, result[name], result[name] == 0, "0")
    criteria.check("tokens reused after kills", result["reused"], result["reused"] >= 0.95, ">= 0.95")
    criteria.check("lengths as without kills, KS p", result["ks_p"], result["ks_p"] >= 0.01, ">= 0.01")
    faults(criteria, runs)
    for mode in ("one-step-off", "async"):
        result = runs[mode] = demo(cwd, "--mode", mode)
        criteria.check(f"demo in mode {mode}: last", result["last"], result["last"] >= 0.8, ">= 0.8")
    return runs


def faults(criteria: Criteria, runs: dict[str, Any]) -> None:
    """Random faults with a verifier, and every fault of every method of every interface."""
    result = runs["faults"] = run_benchmark("collect.faults", "--every", "--json")
    measured = f"{result['seeds']} seeds x {result['faults']} faults, {result['met']} met"
    criteria.check("random faults", measured, result["seeds"] >= 10 and result["faults"] >= 9, "10 x 9")
    for name in ("missing", "doubled"):
        criteria.check(f"rollouts {name} after random faults", len(result[name]), not result[name], "0")
    every = result["every"]
    wrong = f"{len(every['wrong'])} of {every['cases']} faults of {every['methods']} methods"
    criteria.check(
        "one faulty rollout in 32: others untrained, or it unexplained", wrong, not every["wrong"], "0"
    )


# --- runtimes ------------------------------------------------------------------------------------


def runtimes(criteria: Criteria, cwd: Path) -> dict[str, Any]:
    """Runtimes: the demo on four of them, a launch-rate limit, one contract, hostile agents."""
    runs: dict[str, Any] = {}
    for runtime in ("process", "sandbox", "agentcore", "ray"):
        result = runs[f"demo, {runtime}"] = demo(cwd, "--runtime", runtime, afield=afield_of(runtime))
        criteria.check(f"demo, {runtime}: last", result["last"], result["last"] >= 0.80, ">= 0.80")
        criteria.check(f"demo, {runtime}: wall time", result["wall_s"], result["wall_s"] <= 600, "<= 600 s")
        criteria.check(f"demo, {runtime}: failed rollouts", result["failed"], result["failed"] == 0, "0")
    result = runs["throttle"] = run_benchmark("runtimes.rate_limit", "--json")
    criteria.check("launch rate over the limit", result["share"], result["share"] >= 0.95, ">= 0.95")
    criteria.check("calls answered 429", result["throttled"], result["throttled"] <= 0.01, "<= 0.01")
    criteria.check("rollouts that failed", result["failed"], result["failed"] == 0, "0")
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
        check_tests(criteria, name, file)
    return runs


def crowd(criteria: Criteria, cwd: Path) -> dict[str, Any]:
    """Launch latency, and 500 sandboxes at once."""
    result = run_benchmark("runtimes.launch", "--json")
    criteria.check("sandboxes at once", result["peak"], result["peak"] >= 500, ">= 500")
    criteria.check("sandboxes that failed", result["failed"], result["failed"] == 0, "0")
    criteria.check("left 30 s after SIGKILL", result["orphans"], result["orphans"] == 0, "0")
    criteria.check(
        "controller's memory, second wave over first", result["growth"], result["growth"] <= 1.1, "<= 1.1"
    )
    for runtime, times in result["start_ms"].items():
        criteria.check(f"start of a {runtime}, ms (p50, p99)", times, bool(times), "measured")
    start = result["start_ms"]["sandbox"][0]
    criteria.check("start of a sandbox, ms", start, start < 150, "< 150")
    return result


def afield_of(runtime: str) -> list[str]:
    """The afield command for a runtime; Ray has its own environment."""
    if runtime != "ray":
        return AFIELD
    from support.ray_env import ray_python

    return [str(ray_python()), "-m", "afield"]


def pool(criteria: Criteria, cwd: Path) -> dict[str, Any]:
    """Gateway pool: a lost Ray node, the demo with gateways on Ray, a launch budget across processes."""
    runs: dict[str, Any] = {}
    (python, *_) = afield_of("ray")
    for name, options in (("store that all nodes see", ()), ("stores of the nodes", ("--no-shared-store",))):
        command = [python, "-m", "bench.pool.node_loss", "--json", *options]
        result = runs[f"lost node, {name}"] = run_json(command)
        criteria.check(f"{name}: sessions", result["rollouts"], result["rollouts"] >= 200, ">= 200")
        criteria.check(f"{name}: gateways lost", result["lost_gateways"], result["lost_gateways"] > 0, ">= 1")
        for key in MUST_BE_ZERO:
            criteria.check(f"{name}: {key}", result[key], result[key] == 0, "0")
    result = runs["demo"] = demo(cwd, "--gateways", 2, "--on", "ray", afield=afield_of("ray"))
    check_learning(criteria, "demo with gateways on Ray", result)
    for name, file in (
        ("placement, replacement and weights", "tests/gateway/test_pool.py"),
        ("one launch budget at two addresses", "tests/real/test_redis_limiter.py"),
    ):
        check_tests(criteria, name, file)
    return runs


def relay(criteria: Criteria, cwd: Path) -> dict[str, Any]:
    """Relay between three network namespaces: kills, cuts, added latency."""
    result = run_benchmark("relay", "--json")
    size = f"{result['sessions']} sessions x {result['turns']} turns"
    large = result["sessions"] >= 200 and result["turns"] >= 5
    criteria.check("size", size, large, "200 x 5")
    measured = f"{result['kills']} kills, {result['cuts']} cuts"
    broken = result["kills"] >= 2 and result["cuts"] >= 3 and result["faults_before_the_end"]
    criteria.check("faults while answers stream", measured, broken, "2 kills, 3 cuts")
    for name in ("failed", "wrong", "duplicates"):
        criteria.check(name, result[name], result[name] == 0, "0")
    criteria.check(
        "agents and cluster accept nothing inbound",
        result["inbound_closed"],
        result["inbound_closed"],
        "true",
    )
    for name, limit in (("added_p50_ms", 3), ("added_p95_ms", 10)):
        criteria.check(name, result[name], result[name] <= limit, f"<= {limit}")
    check_tests(criteria, "resumption, limits, authentication, engines", "tests/relay")
    return {"relay": result}


def security(criteria: Criteria, cwd: Path) -> dict[str, Any]:
    """Security: attacks by agents, another user, and clients with and without a key."""
    result = run_benchmark("security.attacks", "--json")
    criteria.check("attacks tried", result["tried"], result["tried"] >= 60, ">= 60")
    criteria.check("attacks that broke something", result["broke"], not result["broke"], "none")
    for name, file in (
        ("what a sandboxed agent sees", "tests/runtimes/test_agent_view.py"),
        ("files of a second user's", "tests/utils/test_private_files.py"),
        ("workers and a second user", "tests/sdk/test_signed_invocations.py"),
        ("keys in /proc", "tests/utils/test_process_secrets.py"),
        ("warm parents", "tests/local_sandbox/test_import_prewarm.py"),
    ):
        check_tests(criteria, name, file)
    return {"attacks": result}


def ui(criteria: Criteria, cwd: Path) -> dict[str, Any]:
    """The browser: speed and memory on large runs, hostile strings, exported files, end-to-end tests."""
    result = run_benchmark("ui.run", "--json")
    size = f"{result['rollouts']} rollouts, {result['tokens']} tokens"
    large = result["rollouts"] >= 100_000 and result["tokens"] >= 1_000_000
    criteria.check("size of the runs", size, large, ">= 100,000 and >= 1,000,000")
    for name, key, limit in (
        ("first paint, s", "first_paint_s", 1.0),
        ("opening the large rollout, s", "open_long_s", 0.5),
        ("memory of the tab, MB", "tab_mb", 300.0),
    ):
        criteria.check(name, result[key], result[key] < limit, f"< {limit:g}")
    for name, key in (
        ("what scripts of agents did", "hostile_problems"),
        ("errors on the pages of a veRL run", "verl_problems"),
        ("problems of the exported file", "export_problems"),
    ):
        criteria.check(name, result[key], not result[key], "nothing")
    check_tests(criteria, "pages in Chromium", "tests/real/test_ui.py")
    return {"ui": result}


HARBOR_TASKS = ROOT / "tests" / "harbor" / "tasks"


def harbor(criteria: Criteria, cwd: Path) -> dict[str, Any]:
    """Harbor tasks without Docker: solutions, no work, a hostile agent, broken tasks."""
    runs: dict[str, Any] = {}
    (cwd / "script.jsonl").write_text('{"match": "", "text": "DONE"}\n')
    tasks = len(list(HARBOR_TASKS.iterdir()))
    criteria.check("tasks", tasks, tasks >= 10, ">= 10")
    for agent, reward in (("oracle", 1.0), ("nop", 0.0)):
        words = [*AFIELD, "train", "--agent", agent, "--tasks", HARBOR_TASKS, "--json"]
        words += ["--model", ROOT / "src/afield/demo/policy", "--engine", "scripted=script.jsonl"]
        words += ["--tasks-per-step", tasks]
        result = runs[agent] = run_json([*map(str, words)], cwd)
        measured = f"{result['first']:g} over {result['rollouts']} rollouts, {result['failed']} failed"
        sound = result["first"] == reward and result["rollouts"] == tasks and not result["failed"]
        criteria.check(f"mean reward of {agent}", measured, sound, f"{reward:g} over {tasks}, 0 failed")
        del result["run"]  # a path of this machine
    for name, file in (
        ("whole runs, and a hostile agent", "tests/real/test_harbor.py"),
        ("tokens of harbor's own trials: trained, served, collected", "tests/real/test_harbor_trial.py"),
        ("submissions and environments", "tests/harbor"),
        ("broken task.toml files and Dockerfiles", "tests/datasets"),
    ):
        check_tests(criteria, name, file)
    return runs


def deploy(criteria: Criteria, cwd: Path) -> dict[str, Any]:
    """Deployment: manifests, images under podman, TLS, documentation followed literally, sizing."""
    for name, files in (
        (
            "manifests against the API schemas, and rights",
            ("tests/deploy", "tests/runtimes/test_kubernetes_role.py"),
        ),
        ("images run like their pods", ("tests/real/test_images.py",)),
        ("TLS and streams behind nginx", ("tests/real/test_tls.py",)),
        ("deployment pages followed literally", ("tests/real/test_deploy_pages.py",)),
    ):
        result = run_tests(*files)
        criteria.check(name, result.summary, result.ok, "all pass, none skipped")
    sizing = run_benchmark("sizing", "--json")
    others = [row for row in sizing["validation"] if not row["required"]]
    without = "; ".join(f"{row['point']}, {row['quantity']}: {row['error']:+.1%}" for row in others)
    measured = f"{sizing['worst_error']}; without a limit: {without or 'none'}"
    name = "sizing: largest error of rates, and of medians below full load"
    criteria.check(name, measured, sizing["worst_error"] <= 0.15, "<= 0.15")
    largest = max(plan["rollouts"] for plan in sizing["plans"])
    criteria.check("sizing: largest number of rollouts", largest, largest >= 100_000, ">= 100,000")
    return {"sizing": sizing}


SHOWN_HARNESSES = ("claude-code", "codex", "mini-swe-agent", "opencode")


def harnesses(criteria: Criteria, cwd: Path) -> dict[str, Any]:
    """Ready harnesses: 16 rollouts of four on Harbor tasks in sandboxes, and a smoke test of all."""
    runs: dict[str, Any] = {}
    for name in SHOWN_HARNESSES:
        result = runs[name] = run_benchmark("harnesses.training", name, "--json")
        graded = result["solved"] + result["missed"]
        measured = f"{graded} of {result['rollouts']} graded, {result['solved']} solved"
        both = result["solved"] > 0 and result["missed"] > 0
        criteria.check(f"{name}: rollouts", measured, graded == 16 and both, "16 of 16 graded, some solved")
        measured = f"{len(result['problems'])} of {result['calls']} calls, excluded {result['excluded']}"
        exact = not result["problems"] and set(result["excluded"]) <= {"side:opencode/title"}
        criteria.check(f"{name}: engine calls that differ", measured, exact, "0, only titles excluded")
    check_tests(criteria, "all harnesses, and their turn limit", "tests/real/test_harnesses.py")
    return runs


def evaluation(criteria: Criteria, cwd: Path) -> dict[str, Any]:
    """Evaluation: exact statistics, coverage, validation, and a run that is killed."""
    result = run_benchmark("eval", "--json")
    for name, difference in result["agreement"].items():
        criteria.check(
            f"{name}: largest difference from another computation", difference, difference < 1e-9, "< 1e-9"
        )
    for name, share in result["coverage"].items():
        criteria.check(f"{name}: coverage of 400 intervals, %", share, 93 <= share <= 97, "93 to 97")
    validation, resumed = result["validation"], result["resumed"]
    criteria.check("eval and validation sample alike", validation, validation["equal"], "equal")
    criteria.check(
        "replies differ", validation["distinct_replies"], validation["distinct_replies"] > 4, "> 4"
    )
    for name in ("attempts", "rows"):
        criteria.check(f"{name} after kills", resumed[name], resumed[name] == 5000, "5000")
    criteria.check("results that changed", resumed["changed"], resumed["changed"] == 0, "0")
    return result


def why(criteria: Criteria, cwd: Path) -> dict[str, Any]:
    """Diagnosis: each class is found first in a run that is really broken; healthy runs give no alarm."""
    result = run_benchmark("why", "--json")
    classes, diagnosed = result["classes"], result["found_first"]
    criteria.check("classes", classes, classes >= 18, ">= 18")
    criteria.check("broken runs whose class is found first", diagnosed, diagnosed == classes, f"{classes}")
    criteria.check("false alarms", result["false_alarms"], result["false_alarms"] == 0, "0")
    return {"why": result}


def plan(criteria: Criteria, cwd: Path) -> dict[str, Any]:
    """Planned memory against measured peaks."""
    result = run_benchmark("plan.compare", "--json")
    criteria.check("measured points", result["points"], result["points"] >= 20, ">= 20")
    criteria.check("largest difference", result["worst"], result["ok"], "<= 0.15")
    return {"plan": result}


PARTS: dict[str, Callable[[Criteria, Path], dict[str, Any]]] = {
    "loop": loop,
    "gateway": gateway,
    "collect": collection,
    "runtimes": runtimes,
    "pool": pool,
    "relay": relay,
    "security": security,
    "harnesses": harnesses,
    "crowd": crowd,
    "ui": ui,
    "harbor": harbor,
    "deploy": deploy,
    "eval": evaluation,
    "why": why,
    "plan": plan,
    "trainers": training.trainers,
    "gpu": training.gpu,
}
DOCUMENTED = ("collect", "runtimes", "crowd", "trainers", "gpu")  # in docs/benchmarks.md


def run_part(name: str) -> bool:
    """Run a part, save its result, and answer whether all its criteria are met."""
    criteria = Criteria()
    began, tree = time.monotonic(), report.commit()
    with tempfile.TemporaryDirectory() as scratch:
        numbers = PARTS[name](criteria, Path(scratch))
    result = {"part": name, "ok": criteria.ok, "criteria": criteria.rows, "runs": numbers}
    result["wall_s"] = round(time.monotonic() - began, 1)
    path = report.save(name, result, tree)
    print(f"  saved {path.relative_to(ROOT)}")
    if name in DOCUMENTED:
        benchmarks_page.write()
    return criteria.ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", default="all", choices=["all", *PARTS])
    chosen = parser.parse_args().part
    met = True
    for name in PARTS if chosen == "all" else (chosen,):
        print(f"{name}:", flush=True)
        try:
            met &= run_part(name)
        except RequirementMissing as error:
            print(f"  skipped, not met: {error}")
            met = False
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
