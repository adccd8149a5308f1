"""Tokenizer files of a model directory: vocabulary, chat template, stop ids.

`tokenizer.json` and a chat template are required; `tokenizer_config.json`, `special_tokens_map.json`,
`config.json` and `generation_config.json` are optional. A missing or invalid file raises UsageError with its
name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from afield.chat.vocabulary import Vocabulary
from afield.errors import UsageError

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""Shape of a model's name on the Hugging Face hub."""
_IMAGE = ("image_token_id", "image_token_index")
_SHAPE = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size"),
)
_CHUNK, _CHUNKS = 4096, 64
"""Bytes and number of the parts of a weight file that its digest reads."""


class ModelIdentity(Struct, frozen=True, kw_only=True):
    """Digests that tell two models apart; empty where the directory lacks the files."""

    name: str
    """Name of the model's directory."""
    tokenizer: str = ""
    """Digest of the vocabulary and the chat template."""
    architecture: str = ""
    """Digest of the sizes in config.json."""
    weights: str = ""
    """Digest of parts of the weight files."""

    def difference(self, other: ModelIdentity) -> str:
        """First of tokenizer, architecture and weights that both know and that differs; empty if none."""
        for part in ("tokenizer", "architecture", "weights"):
            mine, theirs = getattr(self, part), getattr(other, part)
            if mine and theirs and mine != theirs:
                return part
        return ""


class ModelFiles(Struct, frozen=True):
    """Contents of the tokenizer files."""

    vocab: Vocabulary
    """Vocabulary of tokenizer.json."""
    sources: dict[str, str]
    """Chat template sources by name: "default" and optionally "tool_use"."""
    special: dict[str, str]
    """Special tokens by role, such as `eos_token`."""
    stop_ids: tuple[int, ...]
    """End-of-sequence ids of generation_config.json, config.json and the tokenizer."""
    vocab_size: int
    """Vocabulary size of the model, else of the tokenizer."""
    image_id: int | None = None
    """Placeholder id of an image in a prompt; None if config.json has none."""


def hub_name(model_dir: Path) -> str:
    """Name on the Hugging Face hub that the end of a path may be; empty if it cannot be one."""
    name = "/".join(model_dir.parts[-2:])
    return name if HUB_NAME.fullmatch(name) else ""


def missing_model(model_dir: Path, reason: str = "") -> UsageError:
    """Error for a path that is no directory; names the download if it may be a name on the hub."""
    message = f"{model_dir} is not a directory; give the path of a model directory"
    name = hub_name(model_dir)
    if name and (reason or not model_dir.parent.exists()):
        message += f"; to fetch {name} from the Hugging Face hub: hf download {name} --local-dir {model_dir}"
    return UsageError(message + (f" ({reason})" if reason else ""))


def read(model_dir: Path) -> ModelFiles:
    """Read a model directory; raises UsageError if a file is missing or invalid."""
    if not model_dir.is_dir():
        raise missing_model(model_dir)
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise UsageError(f"{model_dir} has no tokenizer.json; save the tokenizer there (save_pretrained)")
    vocab = Vocabulary(path.read_bytes(), path)
    settings = _read_json(model_dir / "tokenizer_config.json")
    special = _special_tokens(settings, _read_json(model_dir / "special_tokens_map.json"))
    config = _read_json(model_dir / "config.json")
    generation = _read_json(model_dir / "generation_config.json")
    eos = vocab.id_of(special["eos_token"]) if "eos_token" in special else None
    return ModelFiles(
        vocab,
        _template_sources(model_dir, settings),
        special,
        (*_ids(_of(generation, "eos_token_id")), *_ids(_of(config, "eos_token_id")), *_ids(eos)),
        _of(config, "vocab_size") or vocab.size,
        next((i for name in _IMAGE if isinstance(i := config.get(name), int)), None),
    )


def identify(model_dir: Path) -> ModelIdentity:
    """Identity of a model directory; reads at most a few hundred kilobytes of each weight file."""
    files = read(model_dir)
    config = _read_json(model_dir / "config.json")
    sizes = {name: value for name in _SHAPE if (value := _of(config, name)) is not None}
    return ModelIdentity(
        name=model_dir.resolve().name,
        tokenizer=_digest(files.vocab.hash, json.dumps(files.sources, sort_keys=True)),
        architecture=_digest(json.dumps(sizes, sort_keys=True)) if sizes else "",
        weights=_weights_digest(sorted(model_dir.glob("model*.safetensors"))),
    )


def _weights_digest(files: list[Path]) -> str:
    parts: list[str | bytes] = []
    for path in files:
        size = path.stat().st_size
        parts.append(f"{path.name} {size}")
        with path.open("rb") as file:
            for offset in sorted({max(0, size - _CHUNK), *(size * n // _CHUNKS for n in range(_CHUNKS))}):
                file.seek(offset)
                parts.append(file.read(_CHUNK))
    return _digest(*parts) if parts else ""


def _digest(*parts: str | bytes) -> str:
    data = b"\0".join(part.encode() if isinstance(part, str) else part for part in parts)
    return hashlib.sha256(data).hexdigest()[:16]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} holds a {type(value).__name__}; it should be a JSON object")
    return value


def _template_sources(model_dir: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    configured = settings.get("chat_template")
    if isinstance(configured, str):
        return {"default": configured}
    named = {entry["name"]: entry["template"] for entry in configured or []}
    if "default" not in named:
        others = f", only templates named {', '.join(sorted(named))}" if named else ""
        raise UsageError(
            f"{model_dir} has no chat template{others}; put one into chat_template.jinja,"
            " or use a model that was trained for chat"
        )
    return {name: text for name, text in named.items() if name in {"default", "tool_use"}}


def _special_tokens(*settings: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in _SPECIAL:
        for source in settings:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens.setdefault(name, text)
    return tokens


def _of(config: Mapping[str, Any], key: str) -> Any:
    """Value of a configuration; multimodal models have it in `text_config`."""
    value = config.get(key)
    return value if value is not None else (config.get("text_config") or {}).get(key)


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
