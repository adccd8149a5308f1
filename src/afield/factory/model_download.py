"""Download of models that are named as on the Hugging Face hub."""

from __future__ import annotations

import logging
from pathlib import Path

from afield.factory.registry import needs

log = logging.getLogger(__name__)
FILES = ("*.json", "*.jinja", "*.safetensors", "*.model", "*.txt")
"""Files of a repository that engines, trainer and tokenizer read."""
OTHER_FILES = ("original/*", "onnx/*")
"""Copies of the weights in other formats."""
MARK = ".cache/huggingface"
"""Directory that the hub's client leaves in a download."""
ANSWER_S = 5.0
"""Seconds to wait for the hub's first answer."""


def download_model(model: Path) -> None:
    """Download ORG/NAME, relative to the working directory, unless it is there; raises UsageError.

    A download that was interrupted continues in NAME.partial.
    """
    if model.is_dir():
        return
    with needs("gateway"):
        from afield.chat.model_files import hub_name, missing_model
    name = hub_name(model)
    folder = model.absolute().parent
    ours = not folder.exists() or any(folder.glob(f"*/{MARK}"))
    if not name or folder.parent != Path.cwd() or not ours:
        raise missing_model(model)
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise missing_model(model) from None
    partial = folder / f"{model.name}.partial"
    log.warning("downloading %s from the Hugging Face hub to %s", name, model)
    try:
        snapshot_download(
            name,
            local_dir=partial,
            etag_timeout=ANSWER_S,
            allow_patterns=list(FILES),
            ignore_patterns=list(OTHER_FILES),
        )
        partial.rename(model.absolute())
    except (OSError, ValueError, errors.HTTPError) as error:  # pyright: ignore[reportPrivateImportUsage]
        reason = str(error).strip().partition("\n")[0]
        raise missing_model(model, f"{name} cannot be downloaded: {reason}") from error
