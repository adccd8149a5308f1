"""Checks before a run starts: names, agent files, model directories, reachability.

Agent and verifier files are read, never imported.
"""

from __future__ import annotations

import difflib
import json
import logging
import symtable
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from afield import __version__, harnesses
from afield.errors import UsageError
from afield.factory.gateway import chat_tokenizer
from afield.factory.harnesses import check_harbor_tasks, check_harness
from afield.factory.model_download import download_model
from afield.factory.registry import (
    ENGINES,
    RUNTIMES,
    TRACKERS,
    TRAINERS,
    Backend,
    check_libraries,
    check_name,
    load,
    needs,
)
from afield.factory.relay import engine_spec, relay_route
from afield.factory.runs import rollout_config, transport
from afield.factory.runtimes import addresses
from afield.factory.telemetry import traces_wanted
from afield.factory.weight_transfer import weight_transfer
from afield.orchestrator.state import RunDirectory
from afield.settings.environment import Environment, agent_environment
from afield.settings.train import TrainConfig
from afield.types import HIDDEN_FIELD, Task
from afield.utils.interpreter import check_interpreter

log = logging.getLogger(__name__)
UNPROTECTED = {"process": "as your own user", "inline": "in this process", "ray": "as the user of its node"}
"""Runtimes in which agents can read the files of the user that runs them."""
DYNAMIC_NAMES = ("import *", "globals(", "exec(", "setattr(", "__getattr__", "__dict__", "global ")
"""Source text that may define names dynamically, so that a missing name is no error."""
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
PICKLED_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def check_choices(config: TrainConfig) -> None:
    """Check everything about the settings that can be checked before anything is started."""
    check_name("trainer", config.trainer, TRAINERS)
    engine = _engine_kind(config)
    check_name("engine", engine, ENGINES)
    backends: list[Backend] = [] if config.gateway else [ENGINES[engine]]
    backends += [] if config.freeze_weights else [TRAINERS[config.trainer]]
    check_collection(config, backends)
    weight_transfer(config)
    download_model(Path(config.model))
    chat_tokenizer(Path(config.model))


def check_collection(config: TrainConfig, backends: Sequence[Backend] = ()) -> None:
    """Check the settings of agents, their runtime and the transport of outcomes, and all libraries.

    `backends` are used besides those of collecting.
    """
    check_name("runtime", config.runtime_name, RUNTIMES)
    for name in config.track:
        check_name("tracker", name, TRACKERS)
    trackers = [TRACKERS[name] for name in config.track]
    check_libraries([*backends, RUNTIMES[config.runtime_name], *trackers])
    check_runtime(config)
    check_reachable(config)
    check_gateways(config)
    traces_wanted(config)
    transport(config, RunDirectory(Path("check")))
    rollout_config(config, RunDirectory(Path("check")))
    if config.transport == "memory" and (config.runtime != "inline" or config.verifier):
        raise UsageError("--transport memory works with --runtime inline only; use --transport files")


def _engine_kind(config: TrainConfig) -> str:
    """Kind of engine; checks the settings of the relay that the gateway or the engine dials out to."""
    if config.gateway:
        return config.engine.partition("=")[0]
    route = relay_route(config, Environment.read().relay_secret)
    return engine_spec(config.engine, route).partition("=")[0]


def check_runtime(config: TrainConfig) -> None:
    """Check the runtimes of agents and verifiers, and the options that they need."""
    name, _, argument = config.runtime.partition("=")
    load("runtime", name, RUNTIMES)
    if name == "served":
        addresses(argument)
    elif argument and not RUNTIMES[name].argument:
        raise UsageError(f"runtime {name} takes nothing after '=', not {argument!r}")
    if RUNTIMES[name].takes_agent:
        check_target("agent", harnesses.resolve(config.agent))
    elif name != "served":
        _check_image(name, config, argument)
    if config.verifier:
        check_target("verifier", config.verifier)
    if config.reward_function:
        check_target("reward function", config.reward_function)
    check_harness(config)
    if config.python:
        check_interpreter(config.python, __version__, agent_environment())


def _check_image(name: str, config: TrainConfig, argument: str) -> None:
    options = getattr(config, name)
    if name == "agentcore":
        created = options.agent_name and options.container_uri and options.role_arn
        if not (argument or options.arn or created or (options.arns and options.image_key)):
            raise UsageError(
                "runtime agentcore needs a runtime that exists (--runtime agentcore=ARN), or in"
                " [train.agentcore] agent_name, container_uri and role_arn to create one"
            )
    elif not (argument or options.image or options.image_key):
        raise UsageError(
            f"runtime {name} needs an image: --runtime {name}=IMAGE, --set {name}.image=IMAGE, or --set"
            f" {name}.image_key=COLUMN if task rows name one"
        )


def check_trust(config: TrainConfig, tasks: Sequence[Task]) -> None:
    """Refuse hidden task fields that nobody gets, and Harbor tasks that need what sandboxes lack.

    Warns where agents can read what gives the rewards.
    """
    hidden = [task.id for task in tasks if HIDDEN_FIELD in task.input]
    verified = config.verifier or config.agent in harnesses.TRIALS  # trials have Harbor's verifier
    if hidden and not verified and not config.reward_function:
        raise UsageError(
            f"task {hidden[0]!r} has a '{HIDDEN_FIELD}' object, which only a verifier gets, but no verifier:"
            " name one with --verifier, or a function with --reward-function, or give the agent what is in it"
            " under another name"
        )
    check_harbor_tasks(config, tasks)
    option = "--verifier" if config.verifier else "--reward-function" if config.reward_function else ""
    if option and (user := UNPROTECTED.get(config.runtime_name)):
        log.warning(
            "%s with --runtime %s: the agent runs %s, and can read the %s, the tasks and the"
            " gateway's secret; use --runtime sandbox or container where the reward must be safe from it",
            option,
            config.runtime_name,
            user,
            "verifier" if config.verifier else "reward function",
        )


def check_gateways(config: TrainConfig) -> None:
    """Check the directory of a pool's stores."""
    if config.gateway_store and not Path(config.gateway_store).is_dir():
        raise UsageError(
            f"gateway_store {config.gateway_store} is not a directory; give one that all nodes mount"
        )


def check_reachable(config: TrainConfig) -> None:
    """Refuse agents on other machines with a gateway that listens on loopback."""
    name = config.runtime_name
    remote = name == "kubernetes" or (
        name == "agentcore" and not _is_loopback(urlsplit(config.agentcore.endpoint_url).hostname)
    )
    elsewhere = config.gateway or config.gateway_url or config.relay
    if remote and not elsewhere and _is_loopback(config.gateway_host):
        raise UsageError(
            f"agents on {name} cannot reach a gateway that listens at {config.gateway_host}: set"
            " gateway_host = '0.0.0.0', and gateway_port and gateway_url if they know this machine by"
            " another address; or name a gateway that runs elsewhere with --gateway, or a relay with --relay"
        )


def check_served_model(model: Path, served: Any, version: int, url: str) -> None:
    """Refuse a gateway that serves another model than `model`.

    Other weights of the same model are accepted after a run has published some: this run publishes its own.
    """
    if served is None or not model.is_dir():
        return
    with needs("gateway"):
        from afield.chat import identify
    own = identify(model)
    difference = own.difference(served)
    if not difference or (difference == "weights" and version > 0):
        return
    names = f"model {model} ({own.name}), but the gateway at {url} serves {served.name!r}"
    raise UsageError(
        f"{names}, whose {difference} {'are' if difference == 'weights' else 'is'} different: start the"
        f" gateway with --model {model}, or give the directory of {served.name!r} with --model"
    )


def _is_loopback(host: str | None) -> bool:
    return host in ("127.0.0.1", "::1", "localhost")


# --- agents and verifiers ------------------------------------------------------------------------------


def check_target(role: str, target: str) -> None:
    """Check that `file.py:name` exists, by reading the file."""
    place, _, name = target.rpartition(":")
    if not target:
        raise UsageError(f"{role} is missing: give path/to/file.py:name or package.module:name")
    if not place or not name:
        raise UsageError(f"{role} {target!r} must be path/to/file.py:name or package.module:name")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise UsageError(f"there is no file {place}")
        _check_source(role, place, name)


def _check_source(role: str, file: str, name: str) -> None:
    try:
        with tokenize.open(file) as opened:
            source = opened.read()
        table = symtable.symtable(source, file, "exec")
    except (SyntaxError, ValueError, OSError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UsageError(f"the {role}'s file {file}{line} cannot be read as Python: {message}") from error
    names = {
        symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()
    }
    if name in names or any(text in source for text in DYNAMIC_NAMES):
        return
    functions = sorted(child.get_name() for child in table.get_children() if child.get_name() in names)
    near = difflib.get_close_matches(name, sorted(names), 1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(functions) or 'nothing to run'}"
    raise UsageError(f"{file} has no {name!r}, the {role}; {hint}")


# --- model directories ---------------------------------------------------------------------------------


def check_model(config: TrainConfig, *, trains: bool) -> None:
    """Check the files of the model that the engine and, if this process `trains`, the trainer read."""
    model = Path(config.model)
    if not config.gateway:
        check_engine_model(config.engine, model)
    if trains:
        _check_model_config(model)
    if trains and not config.freeze_weights:
        _check_weights(model, pickled=True)


def check_engine_model(spec: str, model: Path) -> None:
    """Check the libraries of an engine, download its model, and check what the embedded one reads."""
    if backend := ENGINES.get(spec.partition("=")[0]):
        check_libraries([backend])
    download_model(model)
    if spec.partition("=")[0] == "torch":
        _check_model_config(model)
        _check_weights(model)


def _check_model_config(model: Path) -> None:
    if not model.is_dir():
        from afield.chat.model_files import missing_model

        raise missing_model(model)
    path = model / "config.json"
    if not path.is_file():
        raise UsageError(f"{model} is not a whole model directory: it has no config.json")
    try:
        json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}; save the model there again") from error


def _check_weights(model: Path, *, pickled: bool = False) -> None:
    """Check that all weight files are there and complete; `pickled` accepts pytorch_model.bin as well."""
    if (model / WEIGHTS).is_file():
        files = [WEIGHTS]
    elif (model / WEIGHTS_INDEX).is_file():
        files = _indexed_files(model / WEIGHTS_INDEX)
    elif pickled and any((model / name).is_file() for name in PICKLED_WEIGHTS):
        return
    else:
        raise UsageError(
            f"{model} has no weights: no {WEIGHTS}, and no {WEIGHTS_INDEX}; save the whole model there"
        )
    for name in files:
        if not (model / name).is_file():
            raise UsageError(
                f"{model} lacks {name}, which its {WEIGHTS_INDEX} names; save or download it again"
            )
        if not _is_complete(model / name):
            raise UsageError(f"{model / name} is cut off, or no such file at all; save or download it again")


class SafetensorsIndex(msgspec.Struct):
    """Fields read from model.safetensors.index.json."""

    weight_map: dict[str, str]
    """File name by tensor name."""


class SafetensorsEntry(msgspec.Struct):
    """Tensor entry in the header of a safetensors file."""

    data_offsets: tuple[int, int] = (0, 0)
    """Start and end of the tensor data, in bytes after the header."""


def _indexed_files(index: Path) -> list[str]:
    try:
        return sorted(set(msgspec.json.decode(index.read_bytes(), type=SafetensorsIndex).weight_map.values()))
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{index} cannot be read: {error}; save the model there again") from error


def _is_complete(path: Path) -> bool:
    """Whether a safetensors file has the length that its header implies."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            return False
        try:
            header = msgspec.json.decode(file.read(length), type=dict[str, SafetensorsEntry])
        except msgspec.MsgspecError:
            return False
    return 8 + length + max((entry.data_offsets[1] for entry in header.values()), default=0) == size
