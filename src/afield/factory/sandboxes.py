"""Sandbox factory: a fresh, isolated environment for commands.

    async with sandbox() as sb:
        ran = await sb.exec("pytest -q", timeout=900)

A failed command is a result, not an exception. The sandbox starts with `async with`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afield import factory
from afield.errors import UsageError
from afield.interfaces import Sandbox
from afield.settings.train import TrainConfig
from afield.settings.values import converted


def sandbox(
    image: str = "", *, runtime: str = "sandbox", options: Mapping[str, Any] | None = None
) -> Sandbox:
    """Create a sandbox in a runtime: sandbox, container or agentcore.

    `image` is a container image, the ARN of an AgentCore runtime, or a directory with a root filesystem; by
    default the sandbox has this machine's filesystem, read-only. `options` are those of the runtime, as in
    [train.sandbox].
    """
    backend = factory.load("runtime for sandboxes", runtime, factory.SANDBOXES)
    values = {"model": "", runtime: dict(options or {})}
    runtime_options = getattr(converted(values, TrainConfig, "sandbox"), runtime)
    if runtime == "container" and not (image or runtime_options.image):
        raise UsageError("a sandbox in a container needs an image: sandbox(IMAGE, runtime='container')")
    return backend(image, runtime_options)
