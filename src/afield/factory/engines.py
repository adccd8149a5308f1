"""Engines and engine pools from specifications such as torch or vllm=URL."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afield.errors import UsageError
from afield.factory.registry import ENGINES, load, needs
from afield.interfaces import Engine, EngineInfo
from afield.vision import has_vision, read_config

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
) -> Engine:
    """Engine of a specification: `torch`, `scripted=FILE`, `vllm=URL` or `sglang=URL`.

    With `record`, the engine's calls are written to that file.
    """
    name, _, argument = spec.partition("=")
    backend = load("engine", name, ENGINES)
    if ENGINES[name].server:
        engine: Engine = connect(name, argument, images=images, vocabulary=vocabulary_size(model))
    elif name == "scripted":
        if not argument:
            raise UsageError("--engine scripted needs a file: scripted=FILE")
        from afield.engines.scripted import read_script

        engine = backend(read_script(argument, vocabulary_of(model)), model=model)
    else:
        engine = backend(model, max_slots=slots, seed=seed, dtype=None if dtype == "auto" else dtype)
    if record is None:
        return engine
    from afield.engines.recording import RecordingEngine

    return RecordingEngine(engine, record)


def connect(kind: str, url: str, *, images: bool = False, vocabulary: int | None = None) -> Engine:
    """Client of a running inference server.

    SGLang needs the size of the `vocabulary`, as it crashes on token ids outside of it.
    """
    servers = [name for name, backend in ENGINES.items() if backend.server]
    if kind not in servers:
        raise UsageError(f"unknown kind of worker {kind!r}; choose one of: {', '.join(servers)}")
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--engine {kind} needs the server's address, not {url!r}: {kind}=http://HOST:PORT")
    backend = load("engine", kind, ENGINES)
    if kind == "sglang":
        return backend(url.rstrip("/"), vocab_size=vocabulary)
    return backend(url.rstrip("/"), images=True) if images else backend(url.rstrip("/"))


def engine_pool(
    specs: Sequence[str],
    model: Path,
    *,
    slots: int,
    seed: int,
    record: Path | None,
    start_timeout_s: float = 0.0,
    dtype: str = "auto",
) -> Any:
    """All engines of a gateway as one; servers are probed before use."""
    with needs("gateway"):
        from afield.gateway.engine_pool import EnginePool

    images = has_vision(model)
    size = vocabulary_size(model)
    workers = {
        f"{spec.partition('=')[0]}-{number}": engine(
            spec, model, slots=slots, seed=seed, record=record, images=images, dtype=dtype
        )
        for number, spec in enumerate(specs, 1)
    }
    return EnginePool(
        workers,
        connect=lambda kind, url: connect(kind, url, images=images, vocabulary=size),
        check=check_engine,
        start_timeout_s=start_timeout_s,
    )


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
