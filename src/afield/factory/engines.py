"""What a gateway samples from: engines in process, and servers that run somewhere."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afield.errors import UsageError
from afield.factory.registry import ENGINES, SERVERS, choose, load
from afield.interfaces import Engine, EngineInfo
from afield.vision import has_vision, read_config

log = logging.getLogger("afield.factory")
HALVES = ("bfloat16", "float16")


def engine(
    spec: str,
    model: Path,
    *,
    slots: int,
    seed: int,
    ledger: Path | None,
    images: bool = False,
    dtype: str = "auto",
) -> Engine:
    """`torch`, `scripted=FILE`, `vllm=URL` or `sglang=URL`."""
    name, _, argument = spec.partition("=")
    made = choose("engine", name, ENGINES)
    if name in SERVERS:
        built: Engine = connect(name, argument, images=images, vocabulary=vocabulary(model))
    elif name == "scripted":
        if not argument:
            raise UsageError("--engine scripted needs a file: scripted=FILE")
        tokenizer = model / "tokenizer.json"
        codec = load("chat.vocabulary:Vocabulary")(tokenizer.read_bytes(), tokenizer)
        built = made(load("engines.scripted:read_script")(argument, codec), model=model)
    else:
        built = made(model, max_slots=slots, seed=seed, dtype=None if dtype == "auto" else dtype)
    return load("engines.recording:RecordingEngine")(built, ledger) if ledger else built


def connect(kind: str, url: str, *, images: bool = False, vocabulary: int | None = None) -> Engine:
    """An inference server that is running somewhere. SGLang dies of ids that are not in its vocabulary."""
    if kind not in SERVERS:
        raise UsageError(f"unknown kind of worker {kind!r}; choose one of: {', '.join(SERVERS)}")
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--engine {kind} needs the server's address, not {url!r}: {kind}=http://HOST:PORT")
    made = choose("engine", kind, ENGINES)
    if kind == "sglang":
        return made(url.rstrip("/"), vocab_size=vocabulary)
    return made(url.rstrip("/"), images=True) if images else made(url.rstrip("/"))


def pool(
    specs: Sequence[str],
    model: Path,
    *,
    slots: int,
    seed: int,
    ledger: Path | None,
    start_timeout_s: float = 0.0,
    dtype: str = "auto",
) -> Any:
    """All engines of a gateway as one. Servers are tried out before use; what runs in process is ours."""
    images = has_vision(model)
    named = [f"{spec.partition('=')[0]}-{n}" for n, spec in enumerate(specs, 1)]
    workers = {
        name: engine(spec, model, slots=slots, seed=seed, ledger=ledger, images=images, dtype=dtype)
        for name, spec in zip(named, specs, strict=True)
    }
    made = load("gateway.engine_pool:EnginePool")
    size = vocabulary(model)
    return made(
        workers,
        connect=lambda kind, url: connect(kind, url, images=images, vocabulary=size),
        check=check,
        start_timeout_s=start_timeout_s,
    )


async def check(made: Engine) -> EngineInfo:
    """Whether an engine is fit for use: a server has to show it."""
    return await (load("engines.probe:checked")(made) if getattr(made, "url", "") else made.info())


def vocabulary(model: Path) -> int | None:
    """How many ids a model has, where its files say so."""
    config = read_config(model)
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return size if isinstance(size, int) else None


def published_dtype(wanted: str, told: str, model: Path) -> str:
    """The dtype in which weights are published: as set, else what the engines say, else the model's own."""
    if wanted != "auto":
        return wanted
    if told:
        return told
    config = read_config(model)
    own = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    chosen = own if own in HALVES else "float32"
    log.warning(
        "the engine does not say in which dtype it serves; weights are published in %s, set engine_dtype"
        " if it is another",
        chosen,
    )
    return chosen
