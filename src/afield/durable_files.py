"""Atomic file writes, with fsync where they must survive a power cut."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, data: bytes, *, private: bool = False, durable: bool = False) -> None:
    """All of it or nothing of it, whenever the process dies. `private`: its owner alone may read it.

    `durable`: whenever the machine loses power, too.
    """
    partial = path.with_name(path.name + ".partial")
    if private:
        partial.touch(0o600)
        partial.chmod(0o600)
    partial.write_bytes(data)
    if durable:
        sync(partial)
    partial.replace(path)
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """To the disk: a file, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """All files below a directory, and their names."""
    for folder, _, names in os.walk(directory):
        for name in names:
            sync(Path(folder) / name)
        sync(Path(folder))


def rename_whole(partial: Path, final: Path, *, durable: bool) -> None:
    """Give a directory its name once everything in it is written."""
    if durable:
        sync_tree(partial)
    partial.rename(final)
    if durable:
        sync(final.parent)
