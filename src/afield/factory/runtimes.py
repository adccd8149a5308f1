"""Runtimes of agents and verifiers from training settings."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import structs

from afield import harnesses
from afield.errors import UsageError
from afield.factory.harnesses import program_variable, runtime_options
from afield.factory.registry import RUNTIMES, load
from afield.harbor.environments import Environments
from afield.interfaces import Runtime, Transport
from afield.orchestrator.state import RunDirectory, write_whole
from afield.runtimes.registry import SessionRegistry, TrackedRuntime
from afield.settings.environment import Environment, agent_environment
from afield.settings.train import TrainConfig
from afield.utils.child_process import terminate

log = logging.getLogger(__name__)


def runtime(config: TrainConfig, run: RunDirectory, transport: Transport) -> Runtime:
    """The runtime of agents; its sessions are tracked in the run's registry."""
    inner = _runtime(config, run, transport, run.id)
    return _tracked(inner, run, config.runtime_name, lambda: cleanup_process(config, run))


def verifier_runtime(config: TrainConfig, run: RunDirectory, transport: Transport) -> Runtime | None:
    """The runtime of verifiers, with one process for each; None without a verifier."""
    if not config.verifier:
        return None
    config = structs.replace(
        config,
        agent=config.verifier,
        runtime=config.verifier_runtime,
        process_per_rollout=True,
        workers=1,
        verifier="",
        python="",
        deliver="auto",
    )
    home = RunDirectory(run.path / "verifiers")
    return _tracked(_runtime(config, home, transport, f"{run.id}.verifiers"), home, config.runtime_name)


def untracked(runtime: Runtime) -> Runtime:
    """Runtime without tracking: its sessions are not written to the registry."""
    return runtime.runtime if isinstance(runtime, TrackedRuntime) else runtime


def _tracked(inner: Runtime, run: RunDirectory, name: str, guard: Any = None) -> Runtime:
    return TrackedRuntime(inner, SessionRegistry(run.sessions), name, guard)


@asynccontextmanager
async def cleanup_process(config: TrainConfig, run: RunDirectory) -> AsyncIterator[None]:
    """Run a process that ends the run's sessions if this process is killed and no other takes over."""
    if not run.config.exists():  # the cleanup process reads the runtimes from run.json
        write_whole(run.config, msgspec.json.encode(config), private=True)
    run.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = [sys.executable, "-m", "afield", "cleanup", str(run.path), "--when-stdin-ends"]
    with (run.logs / "guard.log").open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=agent_environment(),
            start_new_session=True,
        )
    try:
        yield
    finally:
        await terminate(process)


def _runtime(config: TrainConfig, run: RunDirectory, transport: Transport, prefix: str) -> Runtime:
    """Runtime of a run. `prefix` starts session names in clusters and container engines that others share."""
    name, _, argument = config.runtime.partition("=")
    harness = harnesses.find(config.agent)
    config = structs.replace(config, agent=harnesses.resolve(config.agent))
    if name == "sandbox" and config.sandbox.without_bubblewrap == "process" and not shutil.which("bwrap"):
        log.warning(
            "bubblewrap is not installed: agents run in plain processes, as without_bubblewrap allows"
        )
        config, name = structs.replace(config, process_per_rollout=True), "process"
    backend = load("runtime", name, RUNTIMES)
    if name == "served":
        return backend(addresses(argument), key_file=Environment.read().invocation_key)
    if name == "inline":
        deliver = {"deliver": transport.deliver} if config.delivery == "store" else {}
        return backend(_function(config), **deliver)
    if name == "process":
        return backend(
            config.agent,
            workers=config.workers,
            fresh=config.process_per_rollout,
            log_dir=run.logs,
            env={**agent_environment(), **program_variable(harness)},
            outcome_root=_outcome_root(config, run),
            python=config.python,
        )
    options = getattr(config, name)
    if argument:
        options = structs.replace(options, **{RUNTIMES[name].argument: argument})
    if harness:
        options = runtime_options(harness, config.agent, name, options)
    if name == "sandbox":
        hidden = hidden_files(config)
        return backend(
            config.agent,
            options,
            log_dir=run.logs,
            hidden=hidden,
            environments=environments(),
            python=config.python,
        )
    if name == "agentcore":
        return backend(options, name=prefix, session_table=run.path / "agentcore.sqlite")
    agent = (config.agent,) if RUNTIMES[name].takes_agent else ()
    return backend(*agent, options, name=prefix, log_dir=run.logs)


def environments() -> Environments | None:
    """Cache of the environments of Harbor tasks; None if its directory cannot be written."""
    cache = Environments(Environment.read().environments, agent_environment())
    try:
        cache.prepare()
    except OSError as error:
        log.warning("Harbor tasks cannot be run: %s; set XDG_CACHE_HOME", error)
        return None
    return cache


def hidden_files(config: TrainConfig) -> list[str]:
    """Files that no sandboxed agent may see: what gives the rewards, the tasks, the gateways' secrets."""
    target, role = (
        config.verifier or config.reward_function,
        "verifier" if config.verifier else "reward function",
    )
    grader = file_of(target) if target else ""
    if grader and grader == file_of(config.agent):
        log.warning(
            "agent and %s are both in %s: the agent can read how it is graded; give each its own file",
            role,
            grader,
        )
        grader = ""
    files = (grader, config.tasks, config.val_tasks, str(Environment.read().secrets))
    return [str(Path(file).resolve()) for file in files if file]


def file_of(target: str) -> str:
    """The file of `path/to/file.py:name` or `package.module:name`; empty if there is none."""
    place = target.rpartition(":")[0]
    if place.endswith(".py"):
        return str(Path(place).resolve())
    parts = place.split(".")
    for folder in (Path.cwd(), *map(Path, sys.path)):
        for file in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
            if file.is_file():
                return str(file.resolve())
    return ""


def _outcome_root(config: TrainConfig, run: RunDirectory) -> Path:
    """Directory to which agents of this run write `file:` outcomes."""
    _, scheme, path = config.outcomes.partition("files://")
    return Path(path.partition("?")[0]) if scheme else run.outcomes


def _function(config: TrainConfig) -> Any:
    from afield.sdk.app import Entrypoints
    from afield.sdk.serve import load_object

    agent = load_object(config.agent)
    if isinstance(agent, Entrypoints):
        raise UsageError(f"{config.agent} is an app: run it with --runtime process")
    return agent


def addresses(argument: str) -> list[str]:
    """The addresses of `served=URL,URL`."""
    urls = [url.strip().rstrip("/") for url in argument.split(",") if url.strip()]
    for url in urls or [""]:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise UsageError(f"runtime served={argument} needs addresses: served=http://HOST:PORT,...")
    return urls
