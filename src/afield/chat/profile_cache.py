"""Certificates kept between starts, one small JSON file each.

A file's name is a digest of everything its content depends on, also of this version of afield and of
the package whose bridges it may have tried; so nothing in it can be out of date. A file that cannot be
read is made again, and one that cannot be written is done without.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from afield.chat.profile import TemplateProfile
from afield.chat.renderers_bridge import available


def remembered(
    folder: Path | None, known: Sequence[Any], make: Callable[[], TemplateProfile]
) -> TemplateProfile:
    """The certificate for what is `known`, from the folder where it is there."""
    if folder is None:
        return make()
    inputs = json.dumps([*known, _certifier()], sort_keys=True, default=str)
    path = folder / f"certificate-{hashlib.blake2b(inputs.encode(), digest_size=16).hexdigest()}.json"
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(path.read_bytes(), type=TemplateProfile)
    certificate = make()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(certificate), indent=1))
        draft.replace(path)
    return certificate


@cache
def _certifier() -> list[str]:
    """Who certifies: the version is not enough where the code is edited in place."""
    code = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        code.update(path.read_bytes())
    families = importlib.metadata.version("renderers") if available() else "none"
    return [importlib.metadata.version("afield"), code.hexdigest(), families]
