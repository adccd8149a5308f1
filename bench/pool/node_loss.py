"""Loss of a Ray node during a run: two nodes, four gateways, recovered and retried sessions.

    python -m bench.pool.node_loss [--sessions 200] [--turns 5] [--gateways 4] [--no-shared-store] [--json]

1. Starts a Ray cluster of two nodes on this machine, and `afield train` with its gateways on it.
2. Kills one node with SIGKILL when a third of the calls are done.
3. Compares the turns of all rollouts with the engines' own records: none is lost, doubled or generated twice.

Without a shared store the attempts of the lost node's gateways are retried. Runs in an environment that has
Ray. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench import ROOT

POLICY = ROOT / "src" / "afield" / "demo" / "policy"
AGENT = Path(__file__).with_name("agent.py")
NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
GROUP = 8
START_S = 300.0
LOST_S = 60.0
DELAY_S = 1.0
MUST_BE_ZERO = ("failed", "lost", "doubled", "generated_twice")
"""Numbers of the result that a lost node must leave at 0."""


def train(cwd: Path, address: str, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    script = cwd / "script.jsonl"
    answer = {"match": "", "one_of": ["Yes.", "No, and this is why.", "Perhaps."], "delay_s": DELAY_S}
    script.write_text(json.dumps(answer) + "\n")
    tasks = cwd / "tasks.jsonl"
    rows = [{"id": f"t{n}", "turns": options.turns} for n in range(options.sessions // GROUP)]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "afield", "train", f"{AGENT}:agent", "--json", "--run", "pool"]
    command += ["--tasks", str(tasks), "--model", str(POLICY), "--engine", f"scripted={script}"]
    command += ["--freeze-weights", "--record-engine-calls", "--steps", "1"]
    command += ["--tasks-per-step", str(len(rows)), "--rollouts", str(GROUP), "--concurrency", "64"]
    command += ["--gateways", str(options.gateways), "--on", "ray", "--set", f"ray.address={address}"]
    if options.shared_store:
        (cwd / "stores").mkdir()
        command += ["--gateway-store", str(cwd / "stores")]
    with (cwd / "train.log").open("wb") as log:
        return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=log)


def recorded_calls(run: Path) -> dict[int, list[Any]]:
    """Complete engine calls by gateway."""
    from afield.engines.recording import CallStatus, RecordedCall
    from afield.wire import decode

    calls: dict[int, list[RecordedCall]] = {}
    for path in run.glob("engine-calls-*.jsonl"):
        number = int(path.stem.rpartition("-")[2])
        # The last line of a killed gateway may be cut.
        lines = [line for line in path.read_bytes().split(b"\n")[:-1] if line]
        read = [decode(line, RecordedCall, str(path)) for line in lines]
        calls[number] = [call for call in read if call.served is CallStatus.COMPLETE]
    return calls


def gateway_pids(run: Path) -> dict[str, int]:
    from afield.runtimes.registry import SessionRegistry

    entries = SessionRegistry(run / "gateway" / "sessions.sqlite").entries()
    return {entry.session_id: entry.process.pid for entry in entries if entry.process}


def kill_node(cluster: Any, run: Path, training: subprocess.Popen[bytes], calls: int) -> list[int]:
    """Kill the second node once `calls` are done; returns the numbers of its gateways."""
    end = time.monotonic() + START_S
    while sum(map(len, recorded_calls(run).values())) < calls:
        if training.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"no {calls} calls after {START_S:g} s; see train.log")
        time.sleep(0.1)
    before = gateway_pids(run)
    (node,) = cluster.worker_nodes
    cluster.remove_node(node, allow_graceful=False)
    end = time.monotonic() + LOST_S
    while not (lost := [name for name, pid in before.items() if not Path(f"/proc/{pid}").exists()]):
        if time.monotonic() > end:
            raise SystemExit(f"no gateway ended within {LOST_S:g} s after its node")
        time.sleep(0.1)
    time.sleep(1.0)  # for the others of this node
    lost = [name for name, pid in before.items() if not Path(f"/proc/{pid}").exists()]
    print(f"killed a node with {', '.join(lost)}", file=sys.stderr, flush=True)
    return [int(name.rpartition("-")[2]) for name in lost]


def check(run: Path, turns: int, lost: list[int]) -> dict[str, Any]:
    """Compare the rollouts of the run with the engines' records."""
    from afield.turn_tree import TurnTree
    from afield.types import RolloutResult, TurnStatus
    from afield.wire import decode

    lines = [line for path in run.glob("rollouts/*.jsonl") for line in path.read_bytes().splitlines()]
    results = [decode(line, RolloutResult, "rollouts") for line in lines]
    calls = recorded_calls(run)
    ledger = Counter(
        (call.session_id, call.prompt_ids, call.token_ids, call.logprobs)
        for own in calls.values()
        for call in own
    )
    missing = doubled = wrong = generated_twice = recovered = retried = 0
    for result in results:
        session = result.outcome.session_id
        tree = TurnTree(result.turns)
        committed = [turn for turn in result.turns if turn.status is TurnStatus.COMMITTED]
        keys = []
        for turn in committed:
            prompt = (*(tree.ids(turn.parent) if turn.parent else ()), *turn.delta_ids)
            keys.append((session, tuple(prompt), turn.token_ids, turn.logprobs))
        prompts = Counter(key[1] for key in keys)
        doubled += sum(count - 1 for count in prompts.values())
        missing += max(0, turns - len(prompts))
        wrong += sum(not ledger[key] for key in keys)
        generated_twice += sum(ledger[key] - 1 for key in set(keys) if ledger[key])
        homes = {n for n, own in calls.items() for call in own if call.session_id == session}
        if homes & set(lost):
            recovered += result.attempts == 1
        retried += result.attempts > 1
    ids = Counter(result.rollout.id for result in results)
    return {
        "rollouts": len(ids),
        "failed": sum(result.outcome.reward is None for result in results),
        "lost": missing + wrong,
        "doubled": doubled + sum(count - 1 for count in ids.values()),
        "generated_twice": generated_twice,
        "kept": recovered,
        "retried": retried,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Loss of a Ray node during a run.")
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--gateways", type=int, default=4)
    parser.add_argument("--no-shared-store", dest="shared_store", action="store_false")
    parser.add_argument("--json", action="store_true", help="print only the last line")
    options = parser.parse_args()
    # Otherwise Ray ends its workers when other programs of the machine use most of its memory.
    os.environ.update(RAY_memory_monitor_refresh_ms="0")
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="afield-pool-") as folder:
        cwd = Path(folder)
        run = cwd / "runs" / "pool"
        cluster = Cluster(initialize_head=True, head_node_args=NODE)
        training = None
        try:
            cluster.add_node(**NODE)
            training = train(cwd, cluster.address, options)
            third = options.sessions * options.turns // 3
            lost = kill_node(cluster, run, training, third)
            out, _ = training.communicate(timeout=600)
        except BaseException:
            print((cwd / "train.log").read_text()[-5000:], file=sys.stderr)
            raise
        finally:
            if training is not None and training.poll() is None:
                training.kill()
                training.wait()
            cluster.shutdown()
        if training.returncode != 0:
            print((cwd / "train.log").read_text()[-5000:], file=sys.stderr)
            raise SystemExit(f"afield train ended with {training.returncode}")
        if not options.json:
            print((cwd / "train.log").read_text(), file=sys.stderr)
        result: dict[str, Any] = {"sessions": options.sessions, "gateways": options.gateways}
        result |= {"shared_store": options.shared_store, "lost_gateways": len(lost)}
        result |= check(run, options.turns, lost)
        result["wall_s"] = json.loads(out.splitlines()[-1])["wall_s"]
    print(json.dumps(result))
    return exit_code(result)


def exit_code(result: dict[str, Any]) -> int:
    missing = result["rollouts"] < result["sessions"] // GROUP * GROUP
    return 1 if missing or any(result[name] for name in MUST_BE_ZERO) else 0


if __name__ == "__main__":
    raise SystemExit(main())
