"""`sandbox(image)`: a fresh place to run commands in, by the name of the runtime that gives it.

    async with sandbox() as sb:
        ran = await sb.exec("pytest -q", timeout=900)

What a command did is data; only a broken place raises. Nothing is started before `async with`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afield import factory
from afield.errors import UsageError
from afield.interfaces import Sandbox
from afield.settings import TrainConfig, converted

SANDBOXES = {
    "sandbox": "sandbox.commands:LocalSandbox",
    "container": "runtimes.docker.sandbox:ContainerSandbox",
    "agentcore": "runtimes.agentcore.sandbox:AgentCoreSandbox",
}


def sandbox(
    image: str = "", *, runtime: str = "sandbox", options: Mapping[str, Any] | None = None
) -> Sandbox:
    """`image` is a container's image, the ARN of an AgentCore runtime, or a directory with a root filesystem;
    none is this machine's own system, read-only. `options` are those of the runtime, as in [train.sandbox].
    """
    made = factory.choose("runtime for sandboxes", runtime, SANDBOXES)
    told = getattr(converted({"model": "", runtime: dict(options or {})}, TrainConfig, "sandbox"), runtime)
    if runtime == "container" and not (image or told.image):
        raise UsageError("a sandbox in a container needs an image: sandbox(IMAGE, runtime='container')")
    return made(image, told)
