"""Environments of Harbor tasks in sandboxes, without Docker.

The Dockerfile runs over this machine's system. The files that it adds are kept in a directory named by the
digest of `environment/`; a sandbox of the task has them as a layer. `tests/` and `solution/` are not read.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import io
import os
import re
import shutil
import stat
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from afield.datasets.dockerfile import Build, Copy, MakeDirectory, Run, Step, read_dockerfile
from afield.datasets.harbor import digest_of, task_directory
from afield.errors import InfrastructureFailure, TaskFailure, UsageError
from afield.interfaces import ExecResult
from afield.local_sandbox.bwrap import environment as sandbox_environment
from afield.local_sandbox.local_sandbox import LocalSandbox
from afield.local_sandbox.messages import Layer, Program
from afield.sdk.workspace import TaskEnvironment
from afield.settings.runtimes import ResourceLimits, SandboxOptions
from afield.types import Reason, Task

VERSION = 1
"""Version of the layers' format, part of their names."""
BUILD = SandboxOptions(limits=ResourceLimits(cpus=None, memory_mb=8192, pids=4096, disk_mb=8192))
COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
COMPRESSION = {".gz": "-z", ".tgz": "-z", ".bz2": "-j", ".xz": "-J", ".tar": ""}
CHANGES_FILE = "/dev/shm/changes.tar"
WHITEOUT = os.makedev(0, 0)
OPAQUE = "user.overlay.opaque"
# $1 is the destination, $2 the name of the file if that is a directory, $3 its mode; the content is on stdin.
COPY_FILE = """
if [ -d "$1" ]; then file="$1/$2"; else file="$1"; mkdir -p "$(dirname "$1")"; fi
rm -f "$file" && cat > "$file" && chmod "$3" "$file"
"""
UNPACK = 'mkdir -p "$1" && tar -x $2 -p --no-same-owner -C "$1"'
PACK = f"tar -c --format=pax --xattrs --xattrs-include='user.*' -f {CHANGES_FILE} -C /.changes root usr"


class Environments:
    """Cache of environments in a directory, which processes of this machine may share.

    `variables` replace `${NAME}` in the values of a task's `environment.env`.
    """

    def __init__(self, directory: Path, variables: Mapping[str, str]) -> None:
        self._layers = directory / "layers"
        self._locks = directory / "locks"
        self._variables = variables
        self._building: dict[str, asyncio.Task[None]] = {}

    @property
    def layers(self) -> Path:
        """Directory of the layers."""
        return self._layers

    def prepare(self) -> None:
        """Create the directories."""
        for directory in (self._layers, self._locks):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    async def layer(self, task: Task) -> Layer:
        """Layer of a task's environment, built if it is not there yet.

        Raises TaskFailure if the Dockerfile cannot be built here. Concurrent calls share one build, which
        goes on when a caller is cancelled.
        """
        self.prepare()
        environment = msgspec.convert(task.input["environment"], TaskEnvironment)
        if not environment.digest:
            raise TaskFailure(
                f"task {task.id!r} has an image and no environment/Dockerfile: use --runtime container",
                Reason.LAUNCH,
            )
        try:
            directory = task_directory(task.input) / "environment"
            build = await asyncio.to_thread(read_build, directory)
            variables = dict(entry.split("=", 1) for entry in environment.env)
            env = {**build.env, **resolve(variables, self._variables, directory.parent / "task.toml")}
        except UsageError as error:
            raise TaskFailure(str(error), Reason.LAUNCH) from error
        workdir = environment.workdir or build.workdir
        name = f"{VERSION} {os.uname().machine} {environment.digest} {workdir}"
        key = hashlib.sha256(name.encode()).hexdigest()[:32]
        layer = self._layers / key
        if not layer.is_dir():
            building = self._building.get(key)
            if building is None or building.done():
                building = self._building[key] = asyncio.create_task(self._build(environment, build, layer))
            await asyncio.shield(building)
        return Layer(path=str(layer), workdir=workdir, env=env)

    async def close(self) -> None:
        """Cancel builds in progress."""
        for task in self._building.values():
            task.cancel()
        await asyncio.gather(*self._building.values(), return_exceptions=True)

    async def _build(self, environment: TaskEnvironment, build: Build, layer: Path) -> None:
        lock = await asyncio.to_thread(_lock, self._locks / layer.name)
        try:
            if await asyncio.to_thread(layer.is_dir):  # another process built it
                return
            if await asyncio.to_thread(digest_of, build.file.parent) != environment.digest:
                message = f"{build.file.parent} changed since its task was read; start a new run"
                raise TaskFailure(message, Reason.LAUNCH)
            partial = self._layers / f"{layer.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                changes = await _run_steps(build, environment, partial)
                await asyncio.to_thread(_write_layer, changes, partial, layer)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        finally:
            os.close(lock)


def read_build(directory: Path) -> Build:
    """Read the build of an `environment/` directory; raises UsageError for what is not supported."""
    for name in COMPOSE:
        if (directory / name).exists():
            raise UsageError(f"{directory / name}: environments of several containers are not supported")
    return read_dockerfile(directory / "Dockerfile", sandbox_environment(Program()))


def resolve(env: Mapping[str, str], variables: Mapping[str, str], source: Path) -> dict[str, str]:
    """Replace values `${NAME}` and `${NAME:-default}`; raises UsageError if a variable is not set."""
    resolved: dict[str, str] = {}
    for name, value in env.items():
        if template := re.fullmatch(r"\$\{([^}:]+)(?::-(.*))?\}", value):
            replaced = variables.get(template[1], template[2])
            if replaced is None:
                raise UsageError(f"{source}: the variable {name} needs {template[1]} in the environment")
            value = replaced
        resolved[name] = value
    return resolved


# --- build ---------------------------------------------------------------------------------------


async def _run_steps(build: Build, environment: TaskEnvironment, empty: Path) -> bytes:
    """Run the steps in a sandbox; returns an archive of the files that they added."""
    timeout_s = environment.build_timeout_s
    try:
        async with (
            asyncio.timeout(timeout_s),
            LocalSandbox(options=BUILD, layer=Layer(path=str(empty)), changes=True) as sandbox,
        ):
            for step in build.steps:
                await _run_step(sandbox, build, step, timeout_s)
            await sandbox.exec(["mkdir", "-p", environment.workdir or build.workdir])
            packed = await sandbox.exec(PACK, cwd="/")
            if not packed.ok:
                raise InfrastructureFailure(f"{build.file}: {_problem(packed)}", Reason.LAUNCH)
            return await sandbox.download(CHANGES_FILE)
    except TimeoutError as error:
        message = f"{build.file} was not built within {timeout_s:g} s; raise environment.build_timeout_sec"
        raise TaskFailure(message, Reason.TIMEOUT) from error


async def _run_step(sandbox: LocalSandbox, build: Build, step: Step, timeout_s: float) -> None:
    results: list[ExecResult] = []
    if isinstance(step, Run):
        results.append(await sandbox.exec(step.argv, cwd=step.workdir, env=step.env, timeout=timeout_s))
    elif isinstance(step, MakeDirectory):
        results.append(await sandbox.exec(["mkdir", "-p", step.path]))
    else:
        for argv, content in await asyncio.to_thread(lambda: list(_copies(build, step))):
            results.append(await sandbox.exec(argv, stdin=content))
    for result in results:
        if not result.ok:
            raise TaskFailure(f"{build.file}:{step.line}: {step.text}: {_problem(result)}", Reason.LAUNCH)


def _problem(result: ExecResult) -> str:
    how = "timed out" if result.timed_out else f"exit code {result.exit_code}"
    output = (result.stderr.strip() or result.stdout.strip())[-2000:]
    return f"{how} (the build has this machine's system, an unprivileged user and no network): {output}"


def _copies(build: Build, step: Copy) -> Iterator[tuple[list[str], bytes]]:
    """Commands of a copy, with their standard input."""
    context = build.file.parent
    ignored = _ignored(context)
    sources: list[Path] = []
    for pattern in step.sources:
        relative = pattern.lstrip("/") or "."
        matches = sorted(context.glob(relative)) if re.search(r"[*?\[]", relative) else [context / relative]
        matches = [path for path in matches if os.path.lexists(path)]
        if not matches:
            raise TaskFailure(
                f"{build.file}:{step.line}: {step.text}: there is no {pattern} in {context}", Reason.LAUNCH
            )
        sources += matches
    into = f"{step.destination.rstrip('/')}/" if len(sources) > 1 else step.destination
    for source in sources:
        if not source.resolve().is_relative_to(context.resolve()):
            message = f"{build.file}:{step.line}: {source} leads out of the build context"
            raise TaskFailure(message, Reason.LAUNCH)
        kind = COMPRESSION.get(source.suffix) if step.unpack else None
        if source.is_dir():
            yield ["sh", "-c", UNPACK, "copy", into, ""], _archive(source, context, step, ignored)
        elif kind is not None:
            yield ["sh", "-c", UNPACK, "copy", into, kind], source.read_bytes()
        else:
            mode = step.mode or stat.S_IMODE(source.stat().st_mode) & 0o777
            yield _copy_file(into, source.name, mode), source.read_bytes()
    for name, text in step.inline.items():
        yield _copy_file(into, name, step.mode or 0o644), text.encode()


def _copy_file(destination: str, name: str, mode: int) -> list[str]:
    file = f"{destination}{name}" if destination.endswith("/") else destination
    return ["sh", "-c", COPY_FILE, "copy", file, name, f"{mode:o}"]


def _archive(directory: Path, context: Path, step: Copy, ignored: re.Pattern[str] | None) -> bytes:
    """Archive of the contents of a directory."""

    def selected(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        path = (directory / member.name).relative_to(context).as_posix()
        if ignored and ignored.fullmatch(path):
            return None
        member.mode = step.mode or member.mode & 0o777
        if step.mode and member.isdir():
            member.mode |= 0o111
        return member

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(directory, arcname=".", filter=selected)
    return buffer.getvalue()


def _ignored(context: Path) -> re.Pattern[str] | None:
    """Pattern of the paths that .dockerignore leaves out."""
    file = context / ".dockerignore"
    if not file.is_file():
        return None
    patterns: list[str] = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("!"):
            raise TaskFailure(f"{file}:{number}: exceptions (!) are not supported", Reason.LAUNCH)
        parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]*\])", line.strip("/"))
        special = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
        patterns.append(
            "".join(special.get(p, p if p.startswith("[") else re.escape(p)) for p in parts) + "(?:/.*)?"
        )
    return re.compile("|".join(patterns)) if patterns else None


def _write_layer(changes: bytes, partial: Path, layer: Path) -> None:
    """Write the archive of a sandbox's changes as a layer; deleted files become whiteouts."""
    with tarfile.open(fileobj=io.BytesIO(changes)) as archive:
        modes: list[tuple[Path, int]] = []
        for member in archive:
            path = partial / member.name
            member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""
            if member.ischr() and (member.devmajor, member.devminor) == (0, 0):
                os.mknod(path, stat.S_IFCHR, WHITEOUT)
            elif member.isfile() or member.issym() or member.islnk() or member.isdir():
                archive.extract(member, partial, filter="tar")
                if member.isdir():
                    path.chmod(0o700)
                if member.isdir() or member.isreg():
                    modes.append((path, member.mode & 0o777))
                if member.pax_headers.get(f"SCHILY.xattr.{OPAQUE}"):
                    os.setxattr(path, OPAQUE, b"y")
    for path, mode in reversed(modes):  # a directory without write permission after its files
        path.chmod(mode)
    (partial / "usr").rename(partial / "root" / "usr")
    (partial / "root").rename(layer)


def _lock(file: Path) -> int:
    """Descriptor that holds an exclusive lock; closing it releases the lock."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor
