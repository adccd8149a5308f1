"""The names of all backends, and how one is chosen and loaded."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from afield.errors import UsageError

EXTRAS = {
    "cli": "train",
    "tokens": "gateway",
    "sdk": "gateway",
    "engines": "train",
    "trainers": "train",
    "gateway": "gateway",
    "runtimes": "gateway",
    "transports": "gateway",
}
ENGINES = {
    "torch": "engines.torch.engine:TorchEngine",
    "scripted": "engines.scripted:ScriptedEngine",
    "vllm": "engines.vllm.engine:VllmEngine",
    "sglang": "engines.sglang.engine:SglangEngine",
}
START_TIMEOUT_S = 120.0
SERVERS = ("vllm", "sglang")
RUNTIMES = {
    "process": "runtimes.process:ProcessRuntime",
    "sandbox": "runtimes.sandbox:SandboxRuntime",
    "container": "runtimes.docker.runtime:ContainerRuntime",
    "agentcore": "runtimes.agentcore.runtime:AgentCoreRuntime",
    "kubernetes": "runtimes.kubernetes.runtime:KubernetesRuntime",
    "ray": "runtimes.ray.runtime:RayRuntime",
    "inline": "runtimes.inline:InlineRuntime",
    "served": "runtimes.remote:ServedRuntime",
}
# What `--runtime NAME=VALUE` says for short.
IN_SHORT = {"container": "image", "agentcore": "arn", "kubernetes": "image", "ray": "address"}
TOLD = ("sandbox", "container", "agentcore", "kubernetes", "ray")  # those with options of their own
TAKES_TARGET = ("process", "sandbox", "ray", "inline")  # the others run an image, or are served elsewhere
LIBRARIES = {
    "docker": "container",
    "kubernetes_asyncio": "kubernetes",
    "ray": "ray",
    "boto3": "aws",
    "botocore": "aws",
}
TRANSPORTS = {
    "files": "transports.stores.files:FilesTransport",
    "memory": "transports.stores.memory:MemoryTransport",
}
TRAINERS = {"grpo": "trainers.grpo:GRPO"}
LEARNING = ("torch", "transformers", "safetensors")
HEAVY: dict[str, tuple[str, ...]] = {"engines.torch": LEARNING, "trainers.grpo": LEARNING}


def choose(kind: str, name: str, among: dict[str, str]) -> Any:
    check_name(kind, name, among)
    return load(among[name])


def check_name(kind: str, name: str, among: dict[str, str]) -> None:
    if name not in among:
        raise UsageError(f"unknown {kind} {name!r}; choose one of: {', '.join(sorted(among))}")


def check_heavy(kind: str, name: str, among: dict[str, str], *, used: bool) -> None:
    """As `choose`, but nothing is loaded: it takes seconds, which all parts spend at the same time later."""
    check_name(kind, name, among)
    module = among[name].partition(":")[0]
    for library in HEAVY.get(module, ()) if used else ():
        if find_spec(library) is None:
            extra = EXTRAS[module.partition(".")[0]]
            raise UsageError(f"{library} is not installed: pip install 'afield[{extra}]'")


def load(where: str) -> Any:
    module, _, name = where.partition(":")
    try:
        return getattr(importlib.import_module(f"afield.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("afield"):
            raise
        extra = LIBRARIES.get((error.name or "").partition(".")[0]) or EXTRAS[module.partition(".")[0]]
        raise UsageError(f"{error.name} is not installed: pip install 'afield[{extra}]'") from error
