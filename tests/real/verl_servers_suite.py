"""vLLM servers of replicas beside a real Ray: their places, the gateway in front of them, restart and end."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from tests.real.verl_rollouts import POLICY, veRL_config
from verl.utils.config import omega_conf_to_dataclass

from afield.errors import UsageError
from afield.integrations.verl.gateway_actor import GatewayActor, GatewayOptions, actor_name
from afield.integrations.verl.vllm_server import VllmServer, server_options
from support.processes import alive
from support.vllm_package import python_with_vllm, starts

pytestmark = pytest.mark.real
WAIT_S = 120.0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


def lines(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in starts(root).read_text().splitlines()]


def test_replicas_have_servers_behind_one_gateway_that_start_again_and_end(tmp_path: Path) -> None:
    python = python_with_vllm(tmp_path / "vllm")
    options = GatewayOptions(folder=str(tmp_path / "gateway"), engine="vllm", vllm_python=str(python))
    rollout = veRL_config("actor_rollout_ref.rollout.name=afield", "data.max_response_length=100")
    rollout = omega_conf_to_dataclass(rollout.actor_rollout_ref.rollout)
    gateway = GatewayActor.options(name=actor_name(), max_concurrency=64).remote(options, str(POLICY))
    with pytest.raises(UsageError, match=r"has 0 vLLM servers and waits for others"):
        ray.get(gateway.gateway.remote())
    servers = [
        VllmServer.remote(
            server_options(rollout, options, str(POLICY), rank), f"{rank},{rank + 4}", alone=True
        )
        for rank in (0, 1)
    ]
    urls = ray.get([server.start.remote() for server in servers])
    ray.get(gateway.add_server.remote(1, urls[1], 2))
    with pytest.raises(UsageError, match=r"has 1 vLLM servers and waits for others"):
        ray.get(gateway.gateway.remote())
    ray.get(gateway.add_server.remote(0, urls[0], 2))
    info = ray.get(gateway.gateway.remote())

    request = urllib.request.Request(
        f"{info.local_url}/engines", headers={"authorization": f"Bearer {info.admin_key}"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        engines = json.load(reply)["engines"]
    assert [(engine["url"], engine["health"]) for engine in engines] == [(url, "ready") for url in urls]

    started = {
        tuple(line["environment"]["CUDA_VISIBLE_DEVICES"].split(",")): line for line in lines(python.parent)
    }
    assert set(started) == {("0", "4"), ("1", "5")}
    seeds = {line["flags"][line["flags"].index("--seed") + 1] for line in started.values()}
    assert len(seeds) == 2
    os.kill(started["0", "4"]["pid"], signal.SIGKILL)
    wait_until(lambda: len(lines(python.parent)) == 3 and answers(urls[0]))
    assert lines(python.parent)[2]["environment"]["CUDA_VISIBLE_DEVICES"] == "0,4"

    for server in servers:
        ray.kill(server)
    processes = [line[name] for line in lines(python.parent) for name in ("pid", "child")]
    wait_until(lambda: not any(map(alive, processes)))
    ray.kill(gateway)
