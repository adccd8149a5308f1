"""Engines and engine pools from specifications such as torch or vllm=URL."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from afield.errors import UsageError
from afield.factory.registry import ENGINES, load, needs
from afield.factory.weight_transfer import is_loopback
from afield.interfaces import Engine, EngineInfo
from afield.models.vision import has_vision, read_config
from afield.settings.environment import agent_environment
from afield.settings.gateway import ManagedEngineSettings

log = logging.getLogger(__name__)
HALF_DTYPES = ("bfloat16", "float16")


def engine(
    spec: str,
    model: Path,
    *,
    slots: int,
    seed: int,
    record: Path | None,
    images: bool = False,
    dtype: str = "auto",
    device: str | None = None,
    shared_weights: bool = False,
) -> Engine:
    """Engine of a specification: `torch`, `scripted=FILE`, `vllm=URL` or `sglang=URL`.

    With `record`, the engine's calls are written to that file.
    """
    name, _, argument = spec.partition("=")
    backend = load("engine", name, ENGINES)
    if ENGINES[name].server:
        engine: Engine = connect(
            name,
            argument,
            images=images,
            vocabulary=vocabulary_size(model),
            shared_weights=shared_weights,
        )
    elif name == "scripted":
        if not argument:
            raise UsageError("--engine scripted needs a file: scripted=FILE")
        from afield.engines.scripted import read_script

        context = read_config(model).get("max_position_embeddings")
        sized = {"max_context": context} if isinstance(context, int) else {}
        engine = backend(read_script(argument, vocabulary_of(model)), model=model, **sized)
    else:
        chosen = None if dtype == "auto" else dtype
        engine = backend(model, max_slots=slots or None, seed=seed, dtype=chosen, device=device)
    return recorded(engine, record)


def recorded(engine: Engine, record: Path | None) -> Engine:
    """The engine, whose calls are written to `record` unless it is None."""
    if record is None:
        return engine
    from afield.engines.recording import RecordingEngine

    return RecordingEngine(engine, record)


def managed_vllm(
    model: Path,
    placement: ManagedEngineSettings,
    *,
    images: bool = False,
    dtype: str = "auto",
    timeout_s: float = 600.0,
) -> list[Engine]:
    """Engines with vLLM servers of their own, on the devices of `placement`."""
    with needs("gateway"):
        from afield.engines.vllm.server import ManagedVllmEngine, VllmServerOptions, split_devices

    parts = split_devices(placement.engine_devices, placement.vllm_tensor_parallel, placement.vllm_replicas)
    return [
        ManagedVllmEngine(
            VllmServerOptions(
                python=placement.vllm_python,
                model=str(model),
                devices=devices,
                tensor_parallel=placement.vllm_tensor_parallel,
                memory=placement.vllm_memory or 0.9,
                dtype=dtype,
                max_seqs=placement.vllm_max_seqs,
                adapters=placement.vllm_adapters,
                adapter_rank=placement.vllm_adapter_rank,
                shared_weights=placement.vllm_shared_weights,
                args=placement.vllm_args,
                environment=agent_environment(),
                log=str(Path(placement.vllm_logs) / f"vllm-{number}.log"),
                start_timeout_s=timeout_s,
            ),
            images=images,
        )
        for number, devices in enumerate(parts, 1)
    ]


def connect(
    kind: str,
    url: str,
    *,
    images: bool = False,
    vocabulary: int | None = None,
    shared_weights: bool = False,
) -> Engine:
    """Client of a running inference server.

    SGLang needs the size of the `vocabulary`, as it crashes on token ids outside of it. With
    `shared_weights`, a vLLM server on this machine takes weights from a trainer's GPU memory.
    """
    servers = [name for name, backend in ENGINES.items() if backend.server]
    if kind not in servers:
        raise UsageError(f"unknown kind of worker {kind!r}; choose one of: {', '.join(servers)}")
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--engine {kind} needs the server's address, not {url!r}: {kind}=http://HOST:PORT")
    backend = load("engine", kind, ENGINES)
    if kind == "sglang":
        return backend(url.rstrip("/"), vocab_size=vocabulary)
    options = {"images": True} if images else {}
    if shared_weights and is_loopback(url):
        options["shared_weights"] = True
    return backend(url.rstrip("/"), **options)


def engine_pool(
    specs: Sequence[str],
    model: Path,
    *,
    slots: int,
    seed: int,
    record: Path | None,
    start_timeout_s: float = 0.0,
    dtype: str = "auto",
    placement: ManagedEngineSettings = ManagedEngineSettings(),  # noqa: B008
) -> Any:
    """All engines of a gateway as one; servers are probed before use."""
    with needs("gateway"):
        from afield.gateway.engine_pool import EnginePool

    images = has_vision(model)
    size, shares = vocabulary_size(model), placement.vllm_shared_weights
    engines: list[tuple[str, Engine]] = []
    for spec in specs:
        kind = spec.partition("=")[0]
        if spec == "vllm":
            servers = managed_vllm(model, placement, images=images, dtype=dtype, timeout_s=start_timeout_s)
            engines += [(kind, recorded(server, record)) for server in servers]
        else:
            device = f"cuda:{placement.engine_devices[0]}" if placement.engine_devices else None
            options: dict[str, Any] = {"slots": slots, "seed": seed, "images": images, "dtype": dtype}
            options |= {"device": device, "shared_weights": shares}
            engines.append((kind, engine(spec, model, record=record, **options)))
    workers = {f"{kind}-{number}": one for number, (kind, one) in enumerate(engines, 1)}
    return EnginePool(
        workers,
        connect=lambda kind, url: connect(kind, url, images=images, vocabulary=size, shared_weights=shares),
        check=check_engine,
        start_timeout_s=start_timeout_s,
    )


async def probe_server(kind: str, url: str, model: Path) -> tuple[Any, str]:
    """Probe a running inference server; returns the report, and the server's name of its model.

    The name is empty if the server does not tell it.
    """
    with needs("gateway"):
        import aiohttp

        from afield.engines.probe import probe

    async with connect(kind, url, vocabulary=vocabulary_size(model)) as worker:
        report = await probe(worker)
    name = ""
    with suppress(aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError):
        limit = aiohttp.ClientTimeout(total=10)
        address = f"{url.rstrip('/')}/v1/models"
        async with aiohttp.ClientSession() as http, http.get(address, timeout=limit) as response:
            name = str((await response.json())["data"][0]["id"])
    return report, name


def scripted_reply() -> Any:
    """The reply class of the scripted engine."""
    from afield.engines.scripted import ScriptedReply

    return ScriptedReply


async def check_engine(engine: Engine) -> EngineInfo:
    """Probe an inference server; an embedded engine only reports its info."""
    if not getattr(engine, "url", ""):
        return await engine.info()
    from afield.engines.probe import checked

    return await checked(engine)


def vocabulary_of(model: Path) -> Any:
    """Vocabulary of the tokenizer in a model directory."""
    with needs("gateway"):
        from afield.chat.vocabulary import Vocabulary

    tokenizer = model / "tokenizer.json"
    return Vocabulary(tokenizer.read_bytes(), tokenizer)


def vocabulary_size(model: Path) -> int | None:
    """Vocabulary size in a model's config.json; None if it has none."""
    config = read_config(model)
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return size if isinstance(size, int) else None


def published_dtype(setting: str, reported: str, model: Path) -> str:
    """Dtype of published weights: the setting, else the engine's report, else the model's own."""
    if setting != "auto":
        return setting
    if reported:
        return reported
    config = read_config(model)
    own = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    dtype = own if own in HALF_DTYPES else "float32"
    log.warning(
        "the engine reports no dtype; weights are published in %s, set engine_dtype if it is another",
        dtype,
    )
    return dtype
