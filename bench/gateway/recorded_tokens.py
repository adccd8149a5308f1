"""Checks that a server recorded the tokens that the upstream sampled."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

from bench.gateway.http_client import connect
from bench.gateway.servers import ADMIN, Server
from bench.gateway.workload import Workload


async def kept(server: Server, work: Workload, path: str) -> str:
    """What the server can tell about its last call in a session; ends the run where that is wrong."""
    session = path.split("/")[2]
    if server.name == "afield":
        last = (await _get(server, f"/sessions/{session}/turns"))["turns"][-1]
        ids, logprobs = last["token_ids"], last["logprobs"]
    elif server.name == "rllm":
        last = (await _get(server, f"/sessions/{session}/traces"))[-1]
        ids, logprobs = last["completion_token_ids"], last["logprobs"]
    else:
        return "bytes" if server.name == "capture" else "nothing"
    if ids != work.ids or len(logprobs) != len(ids) or not all(map(math.isfinite, logprobs)):
        raise SystemExit(f"{server.name} kept {len(ids)} ids that are not the {len(work.ids)} sampled")
    return "ids and log-probabilities"


async def _get(server: Server, path: str) -> Any:
    connection = await connect(server.url)
    head = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {ADMIN}\r\n\r\n"
    reply = await connection.ask(head.encode())
    for _ in range(20):
        if reply.status == 200 and len(reply.body) > 20:
            break
        await asyncio.sleep(0.1)  # what is stored in the background may still be on its way
        reply = await connection.ask(head.encode())
    connection.close()
    if reply.status != 200:
        raise SystemExit(f"{server.name} answers {reply.status} to {path}: {reply.body[:300]!r}")
    return json.loads(reply.body)
