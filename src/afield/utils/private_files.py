"""Private files (mode 0600) and directories (mode 0700).

1. Creates directories with mode 0700 and files with mode 0600.
2. Repairs wider modes of existing files and logs a warning.
3. Refuses directories that other users can write to, because they could replace files there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Collection
from pathlib import Path

from afield.errors import UsageError

log = logging.getLogger(__name__)

OTHERS = stat.S_IRWXG | stat.S_IRWXO
STATE = ("gateways", "invocations.key")  # entries of the state directory
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def state_directory() -> Path:
    """Directory of per-user state: `$XDG_STATE_HOME/afield`, by default `~/.local/state/afield`."""
    state_home = os.environ.get("XDG_STATE_HOME")  # noqa: TID251 - of all programs, not a setting of ours
    return (Path(state_home) if state_home else Path.home() / ".local" / "state") / "afield"


def private_directory(path: Path, contents: Collection[str] = ()) -> Path:
    """Create `path` with mode 0700, or check it; raises UsageError if other users can write to it.

    An existing directory is made private if it is empty or has an entry in `contents`, the names that mark
    it as afield's. Any other directory keeps its mode; files in it are private individually.
    """
    _make(path)
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        _refuse_owner(path, status.st_uid)
    mode = stat.S_IMODE(status.st_mode)
    if not mode & OTHERS:
        return path
    if _belongs_to_afield(path, contents) and status.st_uid == os.geteuid():
        path.chmod(0o700)
        log.warning("%s could be read by other users (mode %04o); it is private now (0700)", path, mode)
    elif mode & OTHERS_WRITE:
        raise UsageError(
            f"{path} can be written by other users (mode {mode:04o}), who could replace what is kept in it:"
            f" choose another directory, or: chmod go-w {path}"
        )
    return path


def private_file(path: Path) -> Path:
    """Create `path` with mode 0600 if it is missing, else repair its mode."""
    # An existing file is not opened: closing a descriptor drops the locks of SQLite's connections to it.
    with contextlib.suppress(FileExistsError, PermissionError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    if mode & OTHERS and status.st_uid == os.geteuid():
        path.chmod(0o600)
        log.warning("%s could be read by other users (mode %04o); it is private now (0600)", path, mode)
    return path


def private_database(path: Path) -> Path:
    """Make a SQLite file private, with its -wal and -shm files; SQLite creates those with the same mode."""
    private_file(path)
    for suffix in ("-wal", "-shm"):
        sidecar = path.with_name(path.name + suffix)
        if sidecar.exists():
            private_file(sidecar)
    return path


def write_once(path: Path, data: bytes) -> bytes:
    """Write `data` unless `path` exists, and return the file's content.

    Raises UsageError if other users can read the file.
    """
    if not path.exists():
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(partial, path)  # atomic: the first of several processes wins
        except FileExistsError:
            pass
        finally:
            partial.unlink(missing_ok=True)
    return read_private(path)


def read_private(path: Path) -> bytes:
    """Read a file; raises UsageError if another user owns it or can read it.

    A file of root's may be readable by its group, as Kubernetes mounts secrets for users other than root.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in (os.geteuid(), 0):
            _refuse_owner(path, status.st_uid)
        allowed = stat.S_IRGRP if status.st_uid == 0 != os.geteuid() else 0
        if stat.S_IMODE(status.st_mode) & OTHERS & ~allowed:
            raise UsageError(
                f"{path} holds a secret and can be read by other users"
                f" (mode {stat.S_IMODE(status.st_mode):04o}): chmod 600 {path}"
            )
        return file.read()


def _make(path: Path) -> None:
    """Create `path` with mode 0700 and its parents with the default mode."""
    if path.is_dir():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def _belongs_to_afield(path: Path, contents: Collection[str]) -> bool:
    with os.scandir(path) as entries:
        names = {entry.name for entry in entries}
    return not names or any(name in names for name in contents)


def _refuse_owner(path: Path, owner: int) -> None:
    if os.geteuid() == 0:
        log.warning("%s belongs to user %d, who can replace what is kept in it", path, owner)
        return
    raise UsageError(
        f"{path} belongs to user {owner}, not to user {os.geteuid()}: choose a place of your own"
    )
