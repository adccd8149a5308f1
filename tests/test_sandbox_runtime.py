"""Agents in sandboxes: the contract of runtimes, and what is the sandbox's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from afield.options import Limits, SandboxOptions
from afield.runtimes.sandbox import SandboxRuntime
from agents.places import ACTING, Spec
from contracts.runtime_contract import RuntimeContract
from isolation import needs_bubblewrap

pytestmark = pytest.mark.anyio


def made(target: str, folder: str) -> SandboxRuntime:
    """For the contract: also called by a controller in a process of its own."""
    options = SandboxOptions(limits=Limits(memory_mb=256))
    return SandboxRuntime(target, options, log_dir=Path(folder) / "logs")


@needs_bubblewrap
class TestSandbox(RuntimeContract):
    def spec(self, folder: Path, target: str = f"{ACTING}:act") -> Spec:
        return Spec("test_sandbox_runtime:made", {"target": target, "folder": str(folder)})
