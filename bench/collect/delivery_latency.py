"""Delivery latency from an outcome's commit in S3 to the caller's future.

    python -m bench.collect.delivery_latency [--rollouts 120] [--dropped 40] [--json]

RolloutClient, gateway and boto3 run against moto's S3 and SQS server. Agents keep running after delivery, so
that only the queue's message (or, with every message dropped, polling) can announce an outcome. The last line
is {"median_s", "p99_s", "dropped_median_s", "dropped_max_s", "poll_interval_s"}; the exit code is 1 if a
requirement is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from afield import wire
from afield.runtimes.inline import InlineRuntime
from afield.sdk.agent import Context
from afield.sdk.deliver import send_hint
from afield.sdk.stores import aws_client, deliver_to_store
from afield.transports.notifiers.sqs import SqsNotifier
from afield.transports.stores.s3 import S3CollectorStore
from afield.transports.transport import StoreTransport
from afield.wire import Hint, Invocation, OutcomeRecord
from support import servers
from support.client_gateway import ThreadedGateway, threaded_gateway

SWEEP_S = 5.0
BAR_S = 0.5


class Agents:
    """Deliver as the SDK does, tell when the commit was there, and stay for `linger_s`."""

    def __init__(self, store: S3CollectorStore, *, drop: bool, linger_s: float) -> None:
        self._store = store
        self._drop = drop
        self._linger_s = linger_s
        self.committed: dict[str, float] = {}

    async def deliver(self, invocation: Invocation, record: OutcomeRecord) -> bool:
        stands = await asyncio.to_thread(self._deliver, invocation, record)
        await asyncio.sleep(self._linger_s)
        return stands

    def _deliver(self, invocation: Invocation, record: OutcomeRecord) -> bool:
        stands = deliver_to_store(self._store, invocation, record)
        self.committed[invocation.session_id] = time.monotonic()
        if not self._drop:
            send_hint(
                invocation, wire.encode(Hint(exp_id=invocation.exp_id, session_id=invocation.session_id))
            )
        return stands


def agent(task: dict[str, Any], rollout: Context) -> float:
    time.sleep(task["seconds"])
    return 1.0


def measure(there: ThreadedGateway, bucket: str, endpoint: str, count: int, *, drop: bool) -> list[float]:
    linger_s = SWEEP_S + 3.0 if drop else 2.0
    store = S3CollectorStore(bucket, endpoint=endpoint)
    queue = SqsNotifier(queue_prefix="hints", endpoint=endpoint)
    agents = Agents(S3CollectorStore(bucket, endpoint=endpoint), drop=drop, linger_s=linger_s)
    exp_id = f"exp-{uuid.uuid4().hex[:8]}"
    seen: dict[str, float] = {}
    draw, longest = random.Random(0), SWEEP_S if drop else 1.0
    client = there.client(
        runtime=InlineRuntime(agent, deliver=agents.deliver),
        transport=StoreTransport(store, queue),
        exp_id=exp_id,
        run=exp_id,
        concurrency=16,
        poll_interval_s=SWEEP_S if drop else 60.0,
    )
    with client:
        futures = [client.submit({"id": str(n), "seconds": draw.uniform(0.1, longest)}) for n in range(count)]
        for future in futures:
            future.add_done_callback(lambda one: seen.setdefault(f"{one.rollout.id}.1", time.monotonic()))
        for future in futures:
            future.result(300)
    return sorted(seen[session] - agents.committed[session] for session in seen)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=120)
    parser.add_argument("--dropped", type=int, default=40, help="rollouts whose messages are all dropped")
    parser.add_argument("--json", action="store_true", help="only the numbers")
    args = parser.parse_args()
    # Agents that linger are cut off in the end, and would say so.
    logging.getLogger("afield.sdk").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder, servers.moto(Path(folder) / "moto") as moto:
        os.environ.update({**servers.KEYS, "AWS_ENDPOINT_URL": moto.url})
        aws_client("s3").create_bucket(Bucket="outcomes")
        with threaded_gateway(Path(folder)) as there:
            latencies = measure(there, "outcomes", moto.url, args.rollouts, drop=False)
            dropped = measure(there, "outcomes", moto.url, args.dropped, drop=True)
    result = {
        "rollouts": len(latencies),
        "median_s": round(statistics.median(latencies), 4),
        "p99_s": round(latencies[min(len(latencies) - 1, int(0.99 * len(latencies)))], 4),
        "dropped": len(dropped),
        "dropped_median_s": round(statistics.median(dropped), 4),
        "dropped_max_s": round(dropped[-1], 4),
        "poll_interval_s": SWEEP_S,
    }
    if not args.json:
        print(f"from commit to future, S3 + SQS: median {result['median_s']} s, p99 {result['p99_s']} s")
        print(f"every message dropped: at most {result['dropped_max_s']} s, swept every {SWEEP_S} s")
    print(json.dumps(result))
    return 0 if result["median_s"] < BAR_S and result["dropped_max_s"] < SWEEP_S else 1


if __name__ == "__main__":
    sys.exit(main())
