"""Harbor task directories: scan, validation with file and line, content digests, rows.

A task directory has `task.toml`, `instruction.md`, `environment/`, `tests/test.sh` and, optionally,
`solution/solve.sh`. `scan` reads a directory of tasks. The row of a task holds its instruction and the path
of its directory, hidden from the agent; `task_directory` finds that directory again on another machine.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from afield.datasets.dockerfile import read_dockerfile
from afield.errors import UsageError
from afield.settings.values import line_of
from afield.types import Task

CONFIG = "task.toml"
INSTRUCTION = "instruction.md"
MAX_DEPTH = 4
"""Depth to which `scan` looks for tasks."""
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
NetworkMode = Literal["public", "no-network", "allowlist"]


class HarborAgent(Struct, frozen=True, kw_only=True):
    """Table `[agent]`."""

    timeout_sec: Seconds | None = None
    """Time limit of the agent in seconds; None for none."""
    user: str | int | None = None
    """User that the agent runs as; None for the environment's own."""
    network_mode: NetworkMode | None = None
    """Network access of the agent; None for the environment's."""
    allowed_hosts: tuple[str, ...] | None = None
    """Hosts of network mode `allowlist`."""


class HarborEnvironment(Struct, frozen=True, kw_only=True):
    """Table `[environment]`."""

    docker_image: str | None = None
    """Image to use instead of building `environment/Dockerfile`."""
    os: str = "linux"
    """Operating system of the environment."""
    build_timeout_sec: Seconds = 600.0
    """Time limit of building the environment, in seconds."""
    cpus: Annotated[float, Meta(gt=0)] | None = None
    """CPU cores; None for the runtime's default."""
    memory_mb: Annotated[int, Meta(gt=0)] | None = None
    """Memory in MiB; None for the runtime's default."""
    storage_mb: Annotated[int, Meta(gt=0)] | None = None
    """Disk space in MiB; None for the runtime's default."""
    gpus: Annotated[int, Meta(ge=0)] | None = None
    """Number of GPUs."""
    tpu: dict[str, Any] | None = None
    """TPU slice."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables; `${NAME}` and `${NAME:-default}` are taken from the collector's environment."""
    workdir: str | None = None
    """Working directory; None for that of the Dockerfile."""
    network_mode: NetworkMode | None = None
    """Network access; None for Harbor's default, `public`."""
    allowed_hosts: tuple[str, ...] | None = None
    """Hosts of network mode `allowlist`."""
    mcp_servers: tuple[dict[str, Any], ...] = ()
    """MCP servers for the agent."""


class HarborVerifier(Struct, frozen=True, kw_only=True):
    """Table `[verifier]`."""

    timeout_sec: Seconds = 600.0
    """Time limit of `tests/test.sh`, in seconds."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the verifier."""
    user: str | int | None = None
    """User that the verifier runs as."""
    network_mode: NetworkMode | None = None
    """Network access of the verifier; None for the environment's."""
    allowed_hosts: tuple[str, ...] | None = None
    """Hosts of network mode `allowlist`."""
    environment_mode: Literal["shared", "separate"] | None = None
    """Whether the verifier runs in the agent's environment or in one of its own."""
    environment: dict[str, Any] | None = None
    """Environment of the verifier, which implies the mode `separate`."""

    @property
    def separate(self) -> bool:
        """Whether the verifier has an environment of its own."""
        return self.environment_mode == "separate" or self.environment is not None


class HarborSolution(Struct, frozen=True, kw_only=True):
    """Table `[solution]`."""

    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of `solution/solve.sh`."""


class HarborArtifact(Struct, frozen=True, kw_only=True):
    """Entry of `artifacts`."""

    source: str
    """Path in the environment."""


class HarborConfig(Struct, frozen=True, kw_only=True):
    """Contents of a `task.toml`; unknown keys are accepted, as Harbor does. `harbor.native` names them."""

    schema_version: str = "1.4"
    """Version of the format."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Free-form metadata."""
    agent: HarborAgent = HarborAgent()
    """Limits of the agent."""
    environment: HarborEnvironment = HarborEnvironment()
    """Environment of the task."""
    verifier: HarborVerifier = HarborVerifier()
    """Limits of the verifier."""
    solution: HarborSolution = HarborSolution()
    """Settings of the solution."""
    artifacts: tuple[str | HarborArtifact, ...] = ()
    """Paths outside the working directory that are part of the agent's work."""
    steps: tuple[dict[str, Any], ...] | None = None
    """Steps of a multi-step task; not supported."""


class HarborTask(Struct, frozen=True, kw_only=True):
    """Task directory in the Harbor format."""

    id: str
    """Name of the directory, relative to the scanned one, with `/` as `--`."""
    path: Path
    """Absolute path of the directory."""
    instruction: str
    """Text of `instruction.md`."""
    config: HarborConfig
    """Contents of `task.toml`."""
    digest: str
    """Digest of all files; the key of caches."""

    def to_task(self) -> Task:
        return Task(self.id, self.row())

    def row(self) -> dict[str, Any]:
        """Row of the task. The path of tests and solution is `hidden`: the agent does not get it."""
        environment = self.config.environment
        row: dict[str, Any] = {
            "id": self.id,
            "instruction": self.instruction,
            "agent_timeout_s": self.config.agent.timeout_sec,
            "environment": self._environment(),
            "hidden": {
                "task_path": str(self.path),
                "task_digest": self.digest,
                "verifier_timeout_s": self.config.verifier.timeout_sec,
            },
        }
        if environment.docker_image:
            row["image"] = environment.docker_image
        return row

    def _environment(self) -> dict[str, Any]:
        """Working directory and further paths of the task's files; `digest` if there is a Dockerfile."""
        config, directory = self.config, self.path / "environment"
        workdir, paths, digest = "", (), ""
        if (directory / "Dockerfile").is_file():
            digest = digest_of(directory)
            with suppress(UsageError):  # a container engine may support what we do not
                build = read_dockerfile(directory / "Dockerfile", {})
                workdir, paths = build.workdir, build.paths
        workdir = config.environment.workdir or workdir
        declared = (one if isinstance(one, str) else one.source for one in config.artifacts)
        paths = tuple(dict.fromkeys(path for path in (*paths, *declared) if path not in (workdir, "/")))
        return {
            "workdir": workdir,
            "paths": list(paths),
            "env": [f"{name}={value}" for name, value in config.environment.env.items()],
            "digest": digest,
            "build_timeout_s": config.environment.build_timeout_sec,
        }


def is_task(path: Path) -> bool:
    return (path / CONFIG).is_file()


def scan(root: Path) -> list[HarborTask]:
    """Read all tasks below a directory, in the order of their names.

    Raises UsageError that lists every broken task with file and line.
    """
    tasks, problems = survey(root)
    if problems:
        listing = "\n  ".join(problems[:50])
        more = f"\n  and {len(problems) - 50} more" if len(problems) > 50 else ""
        raise UsageError(
            f"{len(problems)} of {len(problems) + len(tasks)} tasks are broken:\n  {listing}{more}"
        )
    return tasks


def survey(root: Path) -> tuple[list[HarborTask], list[str]]:
    """Read all tasks below a directory; returns the valid ones, and an error for each broken one."""
    tasks: list[HarborTask] = []
    problems: list[str] = []
    named: dict[str, Path] = {}
    for path in _task_folders(root, MAX_DEPTH):
        name = "--".join(path.relative_to(root).parts) or path.resolve().name
        try:
            if (other := named.setdefault(name, path)) != path:
                raise UsageError(
                    f"{path / CONFIG}: {other} has the same task id {name!r}; rename one of them"
                )
            tasks.append(read_task(path, name))
        except UsageError as error:
            problems.append(str(error))
    if not tasks and not problems:
        raise UsageError(f"{root} has no {CONFIG} within {MAX_DEPTH} levels")
    return tasks, problems


def _task_folders(path: Path, depth: int) -> Iterator[Path]:
    if is_task(path):
        yield path
    elif depth:
        real = path.resolve()
        for child in sorted(path.iterdir()):
            if child.is_dir() and not child.name.startswith(".") and not real.is_relative_to(child.resolve()):
                yield from _task_folders(child, depth - 1)


def read_task(path: Path, name: str = "") -> HarborTask:
    """Read and check one task directory."""
    config = read_config(path / CONFIG)
    instruction = path / INSTRUCTION
    if not instruction.exists():
        raise UsageError(f"{instruction}: missing; it holds the task for the agent")
    text = read_text(instruction)
    if not text.strip():
        raise UsageError(f"{instruction}:1: empty; write the task for the agent")
    if not (path / "tests" / "test.sh").is_file():
        raise UsageError(f"{path / 'tests' / 'test.sh'}: missing; it checks the agent's work")
    environment = config.environment
    dockerfile = path / "environment" / "Dockerfile"
    if not environment.docker_image and not dockerfile.is_file():
        raise UsageError(f"{dockerfile}: missing, and {path / CONFIG} has no environment.docker_image")
    return HarborTask(
        id=name or path.resolve().name,
        path=path.resolve(),
        instruction=text,
        config=config,
        digest=digest_of(path),
    )


def read_config(file: Path) -> HarborConfig:
    """Read a `task.toml`; errors name file, line, key and value."""
    text = read_text(file)
    try:
        values = tomllib.loads(text)
    except RecursionError as error:
        raise UsageError(f"{file}: its values are nested too deeply") from error
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at line (\d+), column \d+\)|\(at end of document\)", str(error))
        line = int(place[1]) if place and place[1] else text.count("\n") + 1
        message = re.sub(r" \(at [^)]*\)$", "", str(error))
        raise UsageError(f"{file}:{line}: {message}") from error
    values = _current_names(values, file, text)
    try:
        config = msgspec.convert(values, HarborConfig)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        keys = [key for key in re.split(r"[.\[\]`]+", path) if key and not key.isdigit() and key != "..."]
        value = _value_at(values, keys)
        if "[...]" in path and isinstance(value, dict):  # a table of strings: name the entry
            key, value = next((k, v) for k, v in value.items() if not isinstance(v, str))
            keys.append(key)
        setting = f" = {value!r}" if value is not None and not isinstance(value, dict) else ""
        name = ".".join(keys) or "the file"
        raise UsageError(f"{file}:{line_of(text, keys)}: {name}{setting}: {message}") from error
    return _checked(config, file, text)


def _current_names(values: dict[str, Any], file: Path, text: str) -> dict[str, Any]:
    """Replace names of older versions of the format."""
    values = dict(values)
    if "version" in values:
        values.setdefault("schema_version", values.pop("version"))
    environment = values.get("environment")
    if isinstance(environment, dict):
        environment = dict(environment)
        for name in ("memory", "storage"):
            if name not in environment:
                continue
            size = environment.pop(name)
            if (megabytes := _megabytes(size)) is None:
                line = line_of(text, ["environment", name])
                message = f"environment.{name} = {size!r}: write {name}_mb in MiB, or a size such as '4G'"
                raise UsageError(f"{file}:{line}: {message}")
            environment.setdefault(f"{name}_mb", megabytes)
        if environment.get("allow_internet") is False:
            environment.setdefault("network_mode", "no-network")
        values["environment"] = environment
    return values


def _megabytes(size: object) -> int | None:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([GMK])(?:i?B|i)?\s*", str(size), re.IGNORECASE)
    factors = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
    return max(1, int(float(match[1]) * factors[match[2].upper()])) if match else None


def _checked(config: HarborConfig, file: Path, text: str) -> HarborConfig:
    environment = config.environment
    if environment.workdir and not environment.workdir.startswith("/"):
        line = line_of(text, ["environment", "workdir"])
        message = f"environment.workdir = {environment.workdir!r}: write an absolute path"
        raise UsageError(f"{file}:{line}: {message}")
    for keys, env in (
        (["environment"], environment.env),
        (["verifier"], config.verifier.env),
        (["solution"], config.solution.env),
    ):
        for name, value in env.items():
            if not name or "=" in name or "\0" in name + value:
                line = line_of(text, [*keys, "env", name])
                message = f"{'.'.join(keys)}.env: {name!r} = {value!r} is no environment variable"
                raise UsageError(f"{file}:{line}: {message}")
    if config.steps:
        raise UsageError(f"{file}:{line_of(text, ['steps'])}: multi-step tasks are not supported")
    if environment.os.lower() != "linux":
        line = line_of(text, ["environment", "os"])
        raise UsageError(f"{file}:{line}: environment.os = {environment.os!r}: only linux is supported")
    for table, mode, hosts in (
        ("environment", environment.network_mode, environment.allowed_hosts),
        ("agent", config.agent.network_mode, config.agent.allowed_hosts),
        ("verifier", config.verifier.network_mode, config.verifier.allowed_hosts),
    ):
        if hosts and mode != "allowlist":
            line = line_of(text, [table, "allowed_hosts"])
            raise UsageError(f"{file}:{line}: {table}.allowed_hosts needs {table}.network_mode = 'allowlist'")
    return config


def _value_at(values: Any, keys: list[str]) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def read_text(file: Path) -> str:
    """Read a text file of a task, without a byte order mark; errors name file and line."""
    try:
        content = file.read_bytes()
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        message = f"byte 0x{error.object[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise UsageError(f"{file}:{line}: {message}") from error


def digest_of(path: Path) -> str:
    """Digest of the names, modes and contents of all files of a task, and of links and empty directories.

    A link counts as its text. Of a mode, only whether the owner may execute the file counts.
    """
    digest = hashlib.sha256()

    def raised(error: OSError) -> None:
        raise error

    try:
        for folder, folders, files in os.walk(path, onerror=raised):
            folders.sort()
            links = [name for name in folders if (Path(folder) / name).is_symlink()]
            if not folders and not files:
                relative = Path(folder).relative_to(path).as_posix()
                digest.update(f"{relative}\0directory\00\0".encode(errors="surrogateescape"))
            for name in sorted([*files, *links]):
                _update(digest, Path(folder) / name, path)
    except OSError as error:
        raise UsageError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _update(digest: Any, file: Path, root: Path) -> None:
    relative = file.relative_to(root).as_posix()
    status = file.lstat()
    if stat.S_ISLNK(status.st_mode):
        content = os.fsencode(file.readlink())
        digest.update(f"{relative}\0link\0{len(content)}\0".encode(errors="surrogateescape"))
        digest.update(content)
        return
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{file}: is no file, directory or symbolic link; remove it from the task")
    kind = "executable" if status.st_mode & stat.S_IXUSR else "file"
    digest.update(f"{relative}\0{kind}\0{status.st_size}\0".encode(errors="surrogateescape"))
    with file.open("rb") as opened:
        while block := opened.read(1024 * 1024):
            digest.update(block)


def task_directory(row: Mapping[str, Any], *, root: Path | None = None, template: str = "") -> Path:
    """Find the directory of a row: its own path, then root and id, then the template.

    `template` may name columns: `/data/{suite}/{id}`.
    """
    tried: list[str] = []
    candidates: list[Path] = []
    hidden = row.get("hidden")
    own = row.get("task_path") or (hidden.get("task_path") if isinstance(hidden, dict) else None)
    if isinstance(own, str) and own:
        candidates.append(Path(own))
    if root is not None:
        names = [str(row[name]) for name in ("instance_id", "id") if row.get(name)]
        candidates += [root / part for name in names for part in (name, name.replace("--", "/"))]
        candidates += [root] if root.resolve().name in names else []  # a single task
    if template:
        try:
            candidates.append(Path(template.format(**row)))
        except (KeyError, IndexError, ValueError) as error:
            raise UsageError(f"template {template!r} needs the column {error} of the row") from error
        except (AttributeError, TypeError) as error:
            raise UsageError(f"template {template!r} does not fit the row: {error}") from error
    for candidate in candidates:
        if is_task(candidate):
            return candidate
        tried.append(str(candidate))
    looked_at = ", ".join(dict.fromkeys(tried)) or "nothing"
    raise UsageError(f"task {row.get('id')!r} has no directory here; looked at: {looked_at}")
