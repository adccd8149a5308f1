"""Local AgentCore, S3 and SQS servers for the demo.

`afield agentcore-local` and moto run as child processes that end with this process. Their addresses are
settings of the run, so that a resumed run uses the same ones. All traffic stays on the machine.
"""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from afield.errors import Unavailable, UsageError
from afield.settings.train import TrainConfig
from afield.utils.child_process import wait_or_kill_popen

BUCKET = "afield-demo"
"""S3 bucket of the demo."""
KEYS = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local", "AWS_REGION": "us-east-1"}
"""Environment of clients of the local servers, which accept any key."""
QUICK = 100
"""Session starts and stops per second that the local AgentCore accepts; AWS accepts fewer."""


def values() -> dict[str, Any]:
    """Settings of a run that uses the local servers, with free ports."""
    gateway, acr, aws = _free_ports(3)
    storing = f"http://127.0.0.1:{aws}"
    return {
        "transport": f"s3://{BUCKET}?queues=afield&endpoint={storing}&region=us-east-1",
        "gateway_port": gateway,
        "agentcore": {
            "agent_name": "afield_demo",
            "container_uri": "123456789012.dkr.ecr.us-east-1.amazonaws.com/afield-demo:latest",
            "role_arn": "arn:aws:iam::123456789012:role/afield-demo",
            "endpoint_url": f"http://127.0.0.1:{acr}",
            "region": "us-east-1",
            "rate": float(QUICK),
            "stop_rate": float(QUICK),
            "cold_start_s": 0.5,
            "idle_s": 300,
            "max_rollout_s": 600,
            "env": {**KEYS, "AWS_ENDPOINT_URL": storing},
        },
    }


def on_this_machine(config: TrainConfig) -> bool:
    """Whether a run uses the local servers."""
    return config.runtime_name == "agentcore" and config.transport.startswith(
        f"s3://{BUCKET}?queues=afield&endpoint="
    )


@contextmanager
def running(config: TrainConfig, environ: Mapping[str, str], logs: Path) -> Generator[None]:
    """Run the local servers during the block."""
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
        raise UsageError("a cloud on this machine needs moto: pip install 'afield[local-aws]'")
    cloud = config.agentcore
    aws = urlsplit(cloud.env["AWS_ENDPOINT_URL"]).port
    acr = urlsplit(cloud.endpoint_url).port
    python = [sys.executable, "-m"]
    logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    allowed = [f"127.0.0.1:{port}" for port in (config.gateway_port, aws)]
    with ExitStack() as stack:

        def start(name: str, *command: str) -> None:
            stack.enter_context(_child(name, [*python, *command], environ, logs / f"{name}.log"))

        start("aws", "afield.demo.aws", str(aws), BUCKET)
        start(
            "agentcore-local",
            *("afield", "agentcore-local", "--json", "--exit-with-parent", "--port", str(acr)),
            *("--image", f"{cloud.container_uri}={config.agent}", "--logs", str(logs / "agentcore-local")),
            *("--starts-per-s", str(QUICK), "--stops-per-s", str(QUICK), "--sessions", "1000"),
            *("--warm", "afield.sdk.prewarm_aws", "--warm", "afield.sdk.prewarm_openai"),
            *(word for address in allowed for word in ("--allow", address)),
        )
        yield


@contextmanager
def _child(name: str, command: list[str], environ: Mapping[str, str], log: Path) -> Generator[None]:
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env={**environ, **KEYS},
            start_new_session=True,
        )
    assert process.stdin and process.stdout
    try:
        if not process.stdout.readline():
            tail = log.read_text(errors="replace").strip().splitlines()[-5:]
            raise Unavailable(f"the local {name} did not start:\n" + "\n".join(tail))
        yield
    finally:
        process.stdin.close()
        wait_or_kill_popen(process)
        process.stdout.close()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]
