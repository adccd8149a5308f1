"""Where agents and verifiers run; what is launched there is noted, and ended if we are killed."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import structs

from afield.errors import UsageError
from afield.factory.registry import IN_SHORT, RUNTIMES, TAKES_TARGET, choose, load
from afield.interfaces import Runtime, Transport
from afield.orchestrator.state import RunDirectory, write_whole
from afield.settings import Environment, TrainConfig, agent_environment

log = logging.getLogger("afield.factory")


def runtime(config: TrainConfig, run: RunDirectory, carrier: Transport) -> Runtime:
    """Where agents run; what is launched there is noted in the run's roster."""
    made = _runtime(config, run, carrier, run.id)
    return _rostered(made, run, config.place, lambda: guard(config, run))


def verifiers(config: TrainConfig, run: RunDirectory, carrier: Transport) -> Runtime | None:
    """Where verifiers run: the same kinds of places, each for one verifier alone."""
    if not config.verifier:
        return None
    judging = structs.replace(
        config,
        agent=config.verifier,
        runtime=config.verifier_runtime,
        process_per_rollout=True,
        workers=1,
        verifier="",
        deliver="auto",
    )
    home = RunDirectory(run.path / "verifiers")
    return _rostered(_runtime(judging, home, carrier, f"{run.id}.verifiers"), home, judging.place)


def _rostered(made: Runtime, run: RunDirectory, name: str, guard: Any = None) -> Runtime:
    return load("runtimes.registry:TrackedRuntime")(
        made, load("runtimes.registry:SessionRegistry")(run.sessions), name, guard
    )


@asynccontextmanager
async def guard(config: TrainConfig, run: RunDirectory) -> AsyncIterator[None]:
    """A process that ends what we leave running if we are killed, unless another of us takes it over."""
    if not run.config.exists():  # it has to know the places it reaps in
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
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def _runtime(config: TrainConfig, run: RunDirectory, carrier: Transport, called: str) -> Runtime:
    """`called`: what its sessions are found by in a place that others share."""
    name, _, argument = config.runtime.partition("=")
    if name == "sandbox" and config.sandbox.without_bubblewrap == "process" and not shutil.which("bwrap"):
        log.warning("there is no bubblewrap here: agents run in plain processes, as you allowed")
        config, name = structs.replace(config, process_per_rollout=True), "process"
    made = choose("runtime", name, RUNTIMES)
    if name == "served":
        return made(addresses(argument), key_file=Environment.read().invocation_key)
    if name == "inline":
        return made(_function(config), **({"deliver": carrier.deliver} if config.delivery == "store" else {}))
    if name == "process":
        return made(
            config.agent,
            workers=config.workers,
            fresh=config.process_per_rollout,
            log_dir=run.logs,
            env=agent_environment(),
            outcome_root=_outcome_root(config, run),
        )
    options = getattr(config, name)
    if argument:
        options = structs.replace(options, **{IN_SHORT[name]: argument})
    if name == "sandbox":
        return made(config.agent, options, log_dir=run.logs, hidden=kept_from_agents(config))
    if name == "agentcore":
        return made(options, name=called, ledger=run.path / "agentcore.sqlite")
    target = (config.agent,) if name in TAKES_TARGET else ()
    return made(*target, options, name=called, log_dir=run.logs)


def kept_from_agents(config: TrainConfig) -> list[str]:
    """Files that no agent may see, should they lie where it sees anything: verifiers, tasks, secrets."""
    secrets = Environment.read().secrets
    kept = [file_of(config.verifier) if config.verifier else "", config.tasks, config.val_tasks, str(secrets)]
    if config.verifier and file_of(config.verifier) == file_of(config.agent):
        log.warning(
            "agent and verifier are both in %s: the agent can read how it is graded; give each its own file",
            file_of(config.agent),
        )
        kept[0] = ""
    return [str(Path(place).resolve()) for place in kept if place]


def file_of(target: str) -> str:
    """The file of `path/to/file.py:name` or `package.module:name`; empty where none is found."""
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
    """The directory that `file:` outcomes of this run go to."""
    _, given, path = config.outcomes.partition("files://")
    return Path(path.partition("?")[0]) if given else run.outcomes


def _function(config: TrainConfig) -> Any:
    agent = load("sdk.serve:load_object")(config.agent)
    if isinstance(agent, load("sdk.app:Entrypoints")):
        raise UsageError(f"{config.agent} is an app: run it with --runtime process")
    return agent


def addresses(given: str) -> list[str]:
    """Those of `served=URL,URL`."""
    urls = [url.strip().rstrip("/") for url in given.split(",") if url.strip()]
    for url in urls or [""]:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise UsageError(f"runtime served={given} needs addresses: served=http://HOST:PORT,...")
    return urls
