"""Workspace: a task's directory, and the files an agent changed.

    workspace = Workspace.open(task)
    subprocess.run(["my-agent", task["instruction"]], cwd=workspace.directory)
    return workspace.submission()

The row of a Harbor task has an `environment` object; the sandbox, or the image of the row, holds its files.
For a row without one, the workspace is an empty temporary directory.
"""

from __future__ import annotations

import base64
import io
import json
import os
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
from msgspec import Struct

from afield.errors import PolicyFailure, TaskFailure
from afield.types import Reason

MAX_FILES = 50_000
"""Largest number of files of a submission."""
MAX_BYTES = 512 * 2**20
"""Largest size of the files of a submission, in bytes."""
MAX_ARCHIVE_BYTES = 24 * 2**20
"""Largest size of the compressed archive of a submission, in bytes."""
ARTIFACTS = "/logs/artifacts"
"""Directory that Harbor always collects."""
# Directories of the system and temporary files: part of a submission only where the task declares them.
SYSTEM = frozenset(
    {
        *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/mnt", "/proc", "/run"),
        *("/sbin", "/sys", "/logs", "/solution", "/tests"),
    }
)


class TaskEnvironment(Struct, frozen=True, kw_only=True):
    """The `environment` object of a task row."""

    workdir: str = ""
    """Working directory; empty for that of the agent's process."""
    digest: str = ""
    """Digest of the directory with the Dockerfile; empty if there is none."""
    paths: tuple[str, ...] = ()
    """Further paths that the environment fills, or the task declares as artifacts."""
    env: tuple[str, ...] = ()
    """Environment variables, as NAME=VALUE. `${NAME}` and `${NAME:-default}` in a value are taken from the
    collector's environment."""
    build_timeout_s: float = 600.0
    """Time limit of the build, in seconds."""


class Workspace:
    """Working directory of a task; remembers the state of its files at `open`."""

    def __init__(self, directory: Path, roots: tuple[str, ...]) -> None:
        self.directory = directory
        self._roots = roots
        self._top = _top_level()
        self._before = _entries(roots)

    @classmethod
    def open(cls, task: Mapping[str, Any]) -> Self:
        """Open the workspace of a task row; raises TaskFailure if the environment is not there."""
        if "environment" not in task:
            directory = tempfile.mkdtemp(prefix="workspace-")
            return cls(Path(directory), (directory,))
        environment = msgspec.convert(task["environment"], TaskEnvironment)
        directory = Path(environment.workdir) if environment.workdir else Path.cwd()
        if not directory.is_dir():
            raise TaskFailure(
                f"there is no working directory {directory}: run the task with --runtime sandbox, or in an"
                " image of its environment",
                Reason.LAUNCH,
            )
        places = (str(directory), *environment.paths, ARTIFACTS)
        roots = dict.fromkeys(map(os.path.realpath, places))
        roots.pop("/", None)  # new entries of the root directory are found without a walk
        return cls(directory, tuple(roots))

    def submission(self) -> dict[str, str | list[str]]:
        """Files that were added or changed, as `files`, a tar.gz in base64, and paths that were `removed`.

        Raises PolicyFailure if they exceed a limit.
        """
        after = _entries((*self._roots, *(_top_level() - self._top - SYSTEM)))
        changed = [path for path, entry in after.items() if self._before.get(path) != entry]
        removed = [
            path
            for path, entry in self._before.items()
            if path not in after or stat.S_IFMT(entry[0]) != stat.S_IFMT(after[path][0])
        ]
        return {"files": base64.b64encode(pack(changed)).decode(), "removed": removed}


def pack(paths: list[str]) -> bytes:
    """Compressed tar archive of files, symbolic links and directories, without their contents.

    Raises PolicyFailure if it exceeds a limit.
    """
    if len(paths) > MAX_FILES:
        raise PolicyFailure(f"the agent changed {len(paths)} files; the limit is {MAX_FILES}", Reason.UPLOAD)
    buffer, size = io.BytesIO(), 0
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as archive:
        for path in paths:
            try:
                member = archive.gettarinfo(path)
                if member.islnk():  # another name of the same file is a file of its own here
                    member.type, member.size = tarfile.REGTYPE, Path(path).stat().st_size
                member.mode &= 0o777
                member.uid = member.gid = 0
                member.uname = member.gname = ""
                size += member.size
                if size > MAX_BYTES or buffer.tell() > MAX_ARCHIVE_BYTES:
                    break
                if member.isreg():
                    with Path(path).open("rb") as file:
                        archive.addfile(member, file)
                else:
                    archive.addfile(member)
            except FileNotFoundError:  # a background process of the agent removed it
                continue
            except PermissionError as error:
                raise PolicyFailure(f"the agent left a file unreadable: {error}", Reason.UPLOAD) from error
    if size > MAX_BYTES or buffer.tell() > MAX_ARCHIVE_BYTES:
        raise PolicyFailure(
            f"the files that the agent changed have more than {MAX_BYTES // 2**20} MiB, or"
            f" {MAX_ARCHIVE_BYTES // 2**20} MiB compressed",
            Reason.UPLOAD,
        )
    return buffer.getvalue()


def _top_level() -> frozenset[str]:
    return frozenset(map(str, Path("/").iterdir()))


def _entries(roots: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Mode, size, inode and change time of all files, links and directories at and below the roots."""
    entries: dict[str, tuple[int, ...]] = {}
    for path in sorted({path for root in roots for path in _walk(root)}):
        try:
            status = os.lstat(path)
        except OSError:
            continue
        if stat.S_ISDIR(status.st_mode):
            entries[path] = (status.st_mode,)
        elif stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            entries[path] = (status.st_mode, status.st_size, status.st_ino, status.st_ctime_ns)
    return entries


def _walk(root: str) -> Iterator[str]:
    yield root
    for folder, folders, files in os.walk(root):
        yield from (f"{folder}/{name}" for name in (*folders, *files))


def main(argv: list[str]) -> int:
    """`python -m afield.sdk.workspace FILE COMMAND...`: run a command, write its submission to a file.

    The task row comes on standard input. Exits with the command's code.
    """
    file, *command = argv
    workspace = Workspace.open(json.load(sys.stdin))
    code = subprocess.run(command, cwd=workspace.directory, stdin=subprocess.DEVNULL).returncode
    Path(file).write_text(json.dumps(workspace.submission()))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
