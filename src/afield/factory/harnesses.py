"""Harnesses in settings: defaults, installation, options of runtimes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from afield import harnesses
from afield.datasets.harbor import is_task
from afield.datasets.reader import is_harbor
from afield.errors import Unavailable, UsageError
from afield.harbor.native import exceeded_limits, ignored_keys, refused_keys, summary
from afield.harnesses.base import Harness
from afield.local_sandbox import cgroups
from afield.settings.environment import PROGRAMS, Environment
from afield.settings.runtimes import ResourceLimits
from afield.settings.train import TrainConfig
from afield.types import HIDDEN_FIELD, Task

log = logging.getLogger(__name__)

LOCAL = ("process", "sandbox")
"""Runtimes whose agents use programs that are installed on this machine."""
LIMITS = ResourceLimits(cpus=2.0, memory_mb=4096, pids=1024, disk_mb=2048, files=8192)
"""Default limits of a sandbox for a harness: its client is a large program."""
DEFAULTS = {"runtime": "sandbox", "max_tokens": 4096}
"""Default settings of a run with a harness: tool calls that write files are long."""
HARBOR_DEFAULTS = {
    "runtime": "sandbox",
    "verifier": "afield.harbor.verifier:verify",
    "verifier_runtime": "process",  # it opens a sandbox of its own
}
"""Default settings of a run on Harbor tasks."""
CHECK_DEFAULTS = {"runtime": "process", "freeze_weights": True, "rollouts": 1, "quorum": 1}
"""Default settings of a run that checks tasks: its agents have no model."""
AGENT_MARGIN_S = 120.0
"""Seconds of an attempt beyond the time limit of its agent."""


def agent_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Default settings that depend on the agent and the tasks."""
    agent, tasks = str(values.get("agent") or ""), values.get("tasks")
    defaults: dict[str, Any] = {}
    if agent in harnesses.TRIALS:  # they open sandboxes and verify themselves
        return {"agent_args": {"tasks": tasks}} if tasks and is_harbor(Path(tasks)) else {}
    if tasks and is_harbor(Path(tasks)):
        defaults |= {"runtime": "sandbox"} if values.get("verifier") else HARBOR_DEFAULTS
    if agent in harnesses.CHECKS:
        defaults |= {**CHECK_DEFAULTS, "agent_args": {"tasks": tasks}}
        defaults |= {} if "steps" in values else {"epochs": 1}
    elif harnesses.find(agent):
        defaults |= DEFAULTS
    return defaults


def attempt_timeout(config: TrainConfig, tasks: Sequence[Task]) -> float:
    """Time limit of attempts that leaves room for the longest time limits of an agent and its verifier."""
    longest_s = config.attempt_timeout_s
    for row in (task.input for task in tasks):
        if limit_s := row.get("agent_timeout_s"):
            hidden = row.get(HIDDEN_FIELD)
            verifier_s = hidden.get("verifier_timeout_s", 0.0) if isinstance(hidden, dict) else 0.0
            longest_s = max(longest_s, float(limit_s) + verifier_s + AGENT_MARGIN_S)
    return longest_s


def check_harbor_tasks(config: TrainConfig, tasks: Sequence[Task]) -> None:
    """Refuse Harbor tasks that need what the run's sandboxes lack; warn about keys without effect."""
    agent = config.runtime_name == "sandbox" or config.agent in harnesses.CHECKS
    verifier = config.verifier == HARBOR_DEFAULTS["verifier"]
    if config.agent in harnesses.TRIALS or not (agent or verifier):
        return
    hidden = (task.input.get(HIDDEN_FIELD) for task in tasks)
    named = [Path(row["task_path"]) for row in hidden if isinstance(row, dict) and row.get("task_path")]
    paths = [path for path in named if is_task(path)]
    refused = [key for path in paths for key in refused_keys(path, agent=agent, verifier=verifier)]
    if refused:
        shown = "\n  ".join(map(str, refused[:50]))
        more = f"\n  and {len(refused) - 50} more" if len(refused) > 50 else ""
        raise UsageError(f"tasks need what sandboxes do not have:\n  {shown}{more}")
    for line in summary(key for path in paths for key in ignored_keys(path)):
        log.warning("%s", line)
    if config.runtime_name == "sandbox":
        limits = config.sandbox.limits
        if limits == ResourceLimits() and harnesses.find(config.agent):
            limits = LIMITS
        for line in exceeded_limits(paths, limits):
            log.warning("%s", line)


def check_harness(config: TrainConfig) -> None:
    """Check the settings of a run with a harness, and install its client where agents run on this machine."""
    if (harness := harnesses.find(config.agent)) is None:
        return
    if not config.verifier:
        raise UsageError(
            f"harness {harness.name} gives no reward: name a verifier of its work, FILE.py:NAME, with"
            " --verifier, or give Harbor tasks, which have their own"
        )
    if config.runtime_name in LOCAL:
        programs_of(harness)


def programs_of(harness: Harness) -> Path:
    """Directory of the harness's programs in the cache, installed on first use."""
    try:
        return harness.install(Environment.read().envs)
    except Unavailable as error:
        raise UsageError(f"harness {harness.name} cannot be installed: {error}") from error


def program_variable(harness: Harness | None) -> dict[str, str]:
    """Environment variable that names the installed programs."""
    return {PROGRAMS: str(programs_of(harness))} if harness else {}


def runtime_options(harness: Harness, target: str, runtime: str, options: Any) -> Any:
    """Options of a runtime for a harness: a sandbox sees the programs, an image serves the harness."""
    if runtime == "sandbox":
        mounts = map(str, harness.package.mounts(programs_of(harness)))
        return structs.replace(
            options,
            mounts=(*options.mounts, *mounts),
            env={**program_variable(harness), **options.env},
            limits=_limits(options.limits),
        )
    if runtime in ("container", "kubernetes") and not options.command:
        serve = ("python3", "-m", "afield.sdk.serve", target, "--host", "0.0.0.0")
        return structs.replace(options, command=(*serve, "--port", str(options.port)))
    return options


def _limits(limits: ResourceLimits) -> ResourceLimits:
    limits = LIMITS if limits == ResourceLimits() else limits
    if limits.memory_mb is not None and "memory" not in cgroups.find_groups().kinds:
        # The fallback limits the address space, of which JavaScript engines reserve far more than they use.
        log.warning("this machine has no memory control group: sandboxes of harnesses have no memory limit")
        limits = structs.replace(limits, memory_mb=None)
    return limits
