"""Atomic file writes and renames, with optional fsync."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, data: bytes, *, private: bool = False, durable: bool = False) -> None:
    """Write a file atomically: a killed process leaves the old or the new content.

    `private` sets mode 0600. `durable` adds fsync, so that a power cut leaves the old or the new content too.
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
    """Flush a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Flush all files and directories below a directory to disk."""
    for folder, _, names in os.walk(directory):
        for name in names:
            sync(Path(folder) / name)
        sync(Path(folder))


def rename_whole(partial: Path, final: Path, *, durable: bool) -> None:
    """Rename a complete directory to its final name; `durable` flushes its files first."""
    if durable:
        sync_tree(partial)
    partial.rename(final)
    if durable:
        sync(final.parent)
