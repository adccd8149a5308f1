"""Model directories in the Hugging Face layout: load, copy, write, replace atomically.

A directory is written under a temporary name and renamed, so that it is never half written.
"""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from afield.errors import Unavailable, UsageError, boundary
from afield.interfaces import shared_weights
from afield.models.model_lock import ALONE
from afield.models.vision import has_vision
from afield.settings.trainer import FloatDtype
from afield.types import Failure, FailureKind, Reason

WEIGHT_FILE = "model.safetensors"
"""File of exported weights."""
WEIGHTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.partial",
    shared_weights.FILE,
)


def load_model(path: Path, device: Any, dtype: FloatDtype = "float32") -> Any:
    import transformers

    if not (path / "config.json").is_file():
        raise UsageError(f"{path} is not a model directory: it has no config.json")
    transformers.logging.disable_progress_bar()
    problems: list[Failure] = []
    loaded: Any = None
    with boundary(FailureKind.INFRASTRUCTURE, Reason.LAUNCH, problems.append), ALONE:
        kind = (
            transformers.AutoModelForImageTextToText
            if has_vision(path)
            else transformers.AutoModelForCausalLM
        )
        loaded = kind.from_pretrained(path, dtype=dtype, local_files_only=True, output_loading_info=True)
    if loaded is None:
        raise UsageError(f"{path} cannot be loaded as a causal language model: {problems[0].message}")
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise UsageError(f"{path} lacks the tensor {missing[0]!r}; save the whole model there")
    # No dropout: rescored log-probabilities have to match the sampler's.
    return model.to(device).eval()


def copy_but_weights(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*WEIGHTS), dirs_exist_ok=True)


def write_weights(file: Path, state: Mapping[str, Any]) -> None:
    """Write all of `state` to one file, tied tensors twice: engines that reload weights in place may update
    only one of the two."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    state = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    shared = Counter(tensor.data_ptr() for tensor in state.values())
    state = {n: t.clone() if shared[t.data_ptr()] > 1 else t for n, t in state.items()}
    try:
        save_file(state, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error


def untie(model: Any, directory: Path) -> None:
    """Let the configuration say that the weights are untied, as `write_weights` writes them."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    if config.get("tie_word_embeddings", model.config.tie_word_embeddings):
        path.write_text(json.dumps(config | {"tie_word_embeddings": False}, indent=2) + "\n")


@contextmanager
def replaced(directory: Path) -> Iterator[Path]:
    """Yield a new directory that replaces `directory` when the block ends without an error."""
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is a file; name a directory, or move the file away")
    with writing(directory), _replaced(directory) as fresh:
        yield fresh


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Raise Unavailable, with a remedy, if the block cannot write to `directory`."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a full disk
        raise Unavailable(f"{directory} cannot be written: {error}; {_remedy(error)}") from error


def _remedy(error: OSError | RuntimeError) -> str:
    """Remedy for a failed write."""
    if not isinstance(error, OSError) or error.errno in (None, errno.ENOSPC, errno.EDQUOT):
        return "is there room on the disk?"
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
        return "another process wrote it at the same time; let one process write it"
    return "check the path and its permissions"


@contextmanager
def _replaced(directory: Path) -> Iterator[Path]:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        fresh = Path(scratch) / "new"
        fresh.mkdir()
        yield fresh
        if directory.exists():
            directory.rename(Path(scratch) / "old")
        fresh.rename(directory)
