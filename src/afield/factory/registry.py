"""Registry of backends: engines, runtimes, trainers, sandboxes, trackers.

A backend is one module, one function here that imports it, and one line of a table. It is imported when it
is chosen; a missing library is reported with the extra that installs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from msgspec import Struct

from afield.errors import UsageError

GATEWAY_LIBRARIES = ("aiohttp", "jinja2", "tokenizers")
TORCH_LIBRARIES = ("torch", "transformers", "safetensors")
EXTRAS = {
    "docker": "container",
    "kubernetes_asyncio": "kubernetes",
    "ray": "ray",
    "boto3": "aws",
    "botocore": "aws",
    "nats": "nats",
    "redis": "redis",
}
"""Extras by library, for libraries with a separate extra."""


class Backend(Struct, frozen=True, kw_only=True):
    """A backend that can be chosen by name."""

    load: Callable[[], Any]
    """Function that imports the backend and returns its class."""
    extra: str = "gateway"
    """Extra that installs its libraries."""
    libraries: tuple[str, ...] = ()
    """Libraries whose presence is checked before a run starts, without importing them, which takes
    seconds."""


class EngineBackend(Backend, frozen=True, kw_only=True):
    """Engine backend."""

    server: bool = False
    """Whether it is an inference server, named as KIND=URL."""


class RuntimeBackend(Backend, frozen=True, kw_only=True):
    """Runtime backend."""

    takes_agent: bool = False
    """Whether it runs an agent named FILE.py:NAME; the others run an image, or are served elsewhere."""
    argument: str = ""
    """Option that `--runtime NAME=VALUE` sets."""


def _torch_engine() -> Any:
    from afield.engines.torch.process import TorchEngineProcess

    return TorchEngineProcess


def _scripted_engine() -> Any:
    from afield.engines.scripted import ScriptedEngine

    return ScriptedEngine


def _vllm_engine() -> Any:
    from afield.engines.vllm.engine import VllmEngine

    return VllmEngine


def _sglang_engine() -> Any:
    from afield.engines.sglang.engine import SglangEngine

    return SglangEngine


ENGINES: dict[str, EngineBackend] = {
    "torch": EngineBackend(load=_torch_engine, extra="train", libraries=TORCH_LIBRARIES),
    "scripted": EngineBackend(load=_scripted_engine),
    "vllm": EngineBackend(load=_vllm_engine, server=True),
    "sglang": EngineBackend(load=_sglang_engine, server=True),
}


def _process_runtime() -> Any:
    from afield.runtimes.process import ProcessRuntime

    return ProcessRuntime


def _sandbox_runtime() -> Any:
    from afield.runtimes.sandbox import SandboxRuntime

    return SandboxRuntime


def _container_runtime() -> Any:
    from afield.runtimes.docker.runtime import ContainerRuntime

    return ContainerRuntime


def _agentcore_runtime() -> Any:
    from afield.runtimes.agentcore.runtime import AgentCoreRuntime

    return AgentCoreRuntime


def _kubernetes_runtime() -> Any:
    from afield.runtimes.kubernetes.runtime import KubernetesRuntime

    return KubernetesRuntime


def _ray_runtime() -> Any:
    from afield.runtimes.ray.runtime import RayRuntime

    return RayRuntime


def _inline_runtime() -> Any:
    from afield.runtimes.inline import InlineRuntime

    return InlineRuntime


def _served_runtime() -> Any:
    from afield.runtimes.remote import RemoteRuntime

    return RemoteRuntime


RUNTIMES: dict[str, RuntimeBackend] = {
    "process": RuntimeBackend(load=_process_runtime, takes_agent=True),
    "sandbox": RuntimeBackend(load=_sandbox_runtime, takes_agent=True),
    "container": RuntimeBackend(load=_container_runtime, libraries=("docker",), argument="image"),
    "agentcore": RuntimeBackend(load=_agentcore_runtime, libraries=("boto3",), argument="arn"),
    "kubernetes": RuntimeBackend(
        load=_kubernetes_runtime, libraries=("kubernetes_asyncio",), argument="image"
    ),
    "ray": RuntimeBackend(load=_ray_runtime, libraries=("ray",), takes_agent=True, argument="address"),
    "inline": RuntimeBackend(load=_inline_runtime, takes_agent=True),
    "served": RuntimeBackend(load=_served_runtime),
}


def _grpo_trainer() -> Any:
    from afield.trainers.grpo import GRPO

    return GRPO


TRAINERS: dict[str, Backend] = {
    "grpo": Backend(load=_grpo_trainer, extra="train", libraries=TORCH_LIBRARIES),
}


def _local_sandbox() -> Any:
    from afield.local_sandbox.local_sandbox import LocalSandbox

    return LocalSandbox


def _container_sandbox() -> Any:
    from afield.runtimes.docker.sandbox import ContainerSandbox

    return ContainerSandbox


def _agentcore_sandbox() -> Any:
    from afield.runtimes.agentcore.sandbox import AgentCoreSandbox

    return AgentCoreSandbox


SANDBOXES: dict[str, Backend] = {
    "sandbox": Backend(load=_local_sandbox),
    "container": Backend(load=_container_sandbox),
    "agentcore": Backend(load=_agentcore_sandbox),
}


def _tensorboard() -> Any:
    from afield.trackers.tensorboard import TensorBoard

    return TensorBoard


def _wandb() -> Any:
    from afield.trackers.wandb import WeightsAndBiases

    return WeightsAndBiases


def _mlflow() -> Any:
    from afield.trackers.mlflow import MLflow

    return MLflow


def _trackio() -> Any:
    from afield.trackers.trackio import Trackio

    return Trackio


TRACKERS: dict[str, Backend] = {
    "tensorboard": Backend(load=_tensorboard, extra="tensorboard", libraries=("tensorboard",)),
    "wandb": Backend(load=_wandb, extra="wandb", libraries=("wandb",)),
    "mlflow": Backend(load=_mlflow, extra="mlflow", libraries=("mlflow",)),
    "trackio": Backend(load=_trackio, extra="trackio", libraries=("trackio",)),
}


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Report an import that fails in this block with the extra that installs the library."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library == "afield":
            raise
        extra = EXTRAS.get(library, extra)
        raise UsageError(f"{error.name} is not installed: pip install 'afield[{extra}]'") from error


def load(kind: str, name: str, backends: Mapping[str, Backend]) -> Any:
    """Import the backend of a name and return its class."""
    check_name(kind, name, backends)
    with needs(backends[name].extra):
        return backends[name].load()


def check_name(kind: str, name: str, backends: Mapping[str, Backend]) -> None:
    if name not in backends:
        raise UsageError(f"unknown {kind} {name!r}; choose one of: {', '.join(sorted(backends))}")


def check_libraries(backends: Iterable[Backend]) -> None:
    """Report all libraries that the gateway and these backends lack, with all extras that install them."""
    needed: dict[str, str] = {}
    needed |= dict.fromkeys(GATEWAY_LIBRARIES, "gateway")
    for backend in backends:
        needed |= {library: EXTRAS.get(library, backend.extra) for library in backend.libraries}
    check_installed(needed)


def check_installed(needed: Mapping[str, str]) -> None:
    """Report libraries that are not installed, given their extras, without importing them."""
    missing = {library: extra for library, extra in needed.items() if find_spec(library) is None}
    if missing:
        extras = set(missing.values())
        extras -= {"gateway"} if "train" in extras else set()  # which it includes
        raise UsageError(
            f"not installed: {', '.join(missing)}; pip install 'afield[{','.join(sorted(extras))}]'"
        )
