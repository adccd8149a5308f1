"""A Ray job with a gateway and no trainer: publishes weights under calls, then waits to be killed.

Run with veRL's interpreter in an empty folder. Says what it saw in one line of JSON each, in the order below.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import ray
from safetensors.torch import load_file

from afield.errors import UsageError
from afield.gateway.client import HttpGateway
from afield.integrations.verl.gateway_actor import (
    GatewayActor,
    GatewayInfo,
    GatewayOptions,
    actor_name,
    gateway_info,
)
from afield.integrations.verl.weights import send
from afield.interfaces import SessionSpec
from afield.types import Sampling

LAST = 5


def say(**told: Any) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def refused(weights: Any, version: int) -> str:
    try:
        asyncio.run(send(weights, version, leader=True))
    except UsageError as error:
        return str(error)
    return ""


def refused_without(gateway: GatewayInfo, weights: dict[str, Any]) -> str:
    """The engine has a version of this number, and nobody here has written it."""
    written = Path(gateway.weights) / f"v{LAST}"
    aside = written.rename(written.parent / "aside")
    told = refused(weights.items(), LAST)
    aside.rename(written)
    return told


def chat(base_url: str, key: str) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "How much is the red mug?"}]}
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=180) as response:
        response.read()


async def under_calls(gateway: GatewayInfo, weights: dict[str, Any]) -> dict[str, Any]:
    """Every version up to LAST, while agents call; which versions sampled, and whether a call failed."""
    seen: set[int] = set()
    failed = 0
    ended = False
    async with HttpGateway(gateway.local_url, gateway.admin_key) as client:

        async def agent() -> None:
            nonlocal failed
            while not ended:
                ticket = await client.open(SessionSpec(sampling=Sampling(temperature=2.0, max_tokens=64)))
                try:
                    await asyncio.to_thread(chat, ticket.openai_base_url, ticket.api_key)
                except OSError:
                    failed += 1
                for trajectory in (await client.finalize(ticket.id)).trajectories:
                    seen.update(span.high for span in trajectory.versions)

        async def publish() -> None:
            nonlocal ended
            for version in range(1, LAST + 1):
                noisy = ((name, tensor * (1 + version / 1000)) for name, tensor in weights.items())
                await send(noisy, version, leader=True)
                until = time.monotonic() + 180
                while version not in seen and time.monotonic() < until:
                    await asyncio.sleep(0.05)
            ended = True

        await asyncio.gather(publish(), agent(), agent())
        served = await client.version()
    return {"served": served, "seen": sorted(seen), "failed": failed}


def main() -> None:
    model = sys.argv[1]
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    keeper = GatewayActor.options(name=actor_name()).remote(GatewayOptions(folder="gateway"), model)
    ray.get(keeper.gateway.remote())
    gateway = gateway_info()
    weights = load_file(Path(model) / "model.safetensors")
    say(other_start=refused([(name, tensor + 1) for name, tensor in weights.items()], 0))
    say(same_start=refused(weights.items(), 0))
    published = asyncio.run(under_calls(gateway, weights))
    say(**published, kept=sorted(path.name for path in Path(gateway.weights).iterdir()))
    say(older=refused(weights.items(), LAST - 1), taken=refused_without(gateway, weights))
    say(lacking=refused(list(weights.items())[1:], LAST + 1))
    say(url=gateway.local_url)
    time.sleep(600)


if __name__ == "__main__":
    main()
