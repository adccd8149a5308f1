"""Harbor task directories: scan, validation with file and line, content digests, rows.

A task directory has `task.toml`, `instruction.md`, `environment/`, `tests/test.sh` and, optionally,
`solution/solve.sh`. `scan` reads a directory of tasks. The row of a task holds its instruction and the path
of its directory; `task_directory` finds that directory again on another machine.
"""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from afield.errors import UsageError
from afield.types import Task

CONFIG = "task.toml"
INSTRUCTION = "instruction.md"
MAX_DEPTH = 4
"""Depth to which `scan` looks for tasks."""
Seconds = Annotated[float, Meta(gt=0)]
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
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables; `${NAME}` and `${NAME:-default}` are taken from the collector's environment."""
    workdir: str | None = None
    """Working directory; None for that of the Dockerfile."""
    network_mode: NetworkMode = "public"
    """Network access."""
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
    environment_mode: Literal["shared", "separate"] | None = None
    """Whether the verifier runs in the agent's environment or in one of its own."""


class HarborConfig(Struct, frozen=True, kw_only=True):
    """Contents of a `task.toml`; unknown keys are ignored, as Harbor does."""

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
    steps: tuple[dict[str, Any], ...] | None = None
    """Steps of a multi-step task; not supported."""


class HarborTask(Struct, frozen=True, kw_only=True):
    """One task directory."""

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
            "hidden": {
                "task_path": str(self.path),
                "task_digest": self.digest,
                "verifier_timeout_s": self.config.verifier.timeout_sec,
            },
        }
        if environment.docker_image:
            row["image"] = environment.docker_image
        return row


def is_task(path: Path) -> bool:
    return (path / CONFIG).is_file()


def scan(root: Path) -> list[HarborTask]:
    """Read all tasks below a directory, in the order of their names.

    Raises UsageError that lists every broken task with file and line.
    """
    tasks: list[HarborTask] = []
    problems: list[str] = []
    for path in _task_folders(root, MAX_DEPTH):
        name = "--".join(path.relative_to(root).parts) or path.resolve().name
        try:
            tasks.append(read_task(path, name))
        except UsageError as error:
            problems.append(str(error))
    if problems:
        shown = "\n  ".join(problems[:50])
        more = f"\n  and {len(problems) - 50} more" if len(problems) > 50 else ""
        raise UsageError(
            f"{len(problems)} of {len(problems) + len(tasks)} tasks are broken:\n  {shown}{more}"
        )
    if not tasks:
        raise UsageError(f"{root} has no {CONFIG} within {MAX_DEPTH} levels")
    return tasks


def _task_folders(path: Path, depth: int) -> Iterator[Path]:
    if is_task(path):
        yield path
    elif depth:
        for child in sorted(path.iterdir()):
            if child.is_dir() and not child.name.startswith("."):
                yield from _task_folders(child, depth - 1)


def read_task(path: Path, name: str = "") -> HarborTask:
    """Read and check one task directory."""
    config = read_config(path / CONFIG)
    instruction = path / INSTRUCTION
    try:
        text = instruction.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{instruction}: missing; it holds the task for the agent") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{instruction}: cannot be read: {error}") from error
    if not text.strip():
        raise UsageError(f"{instruction}:1: empty; write the task for the agent")
    if not (path / "tests" / "test.sh").is_file():
        raise UsageError(f"{path / 'tests' / 'test.sh'}: missing; it checks the agent's work")
    environment = config.environment
    dockerfile = path / "environment" / "Dockerfile"
    if environment.docker_image is None and not dockerfile.is_file():
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
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: cannot be read: {error}") from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at line (\d+), column \d+\)|\(at end of document\)", str(error))
        line = int(place[1]) if place and place[1] else text.count("\n") + 1
        message = re.sub(r" \(at [^)]*\)$", "", str(error))
        raise UsageError(f"{file}:{line}: {message}") from error
    values = _current_names(values)
    try:
        config = msgspec.convert(values, HarborConfig)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        keys = [key for key in re.split(r"[.\[\]`]+", path) if key and not key.isdigit() and key != "..."]
        value = _value_at(values, keys)
        if "[...]" in path and isinstance(value, dict):  # a table of strings: name the entry
            key, value = next((k, v) for k, v in value.items() if not isinstance(v, str))
            keys.append(key)
        shown = f" = {value!r}" if value is not None and not isinstance(value, dict) else ""
        name = ".".join(keys) or "the file"
        raise UsageError(f"{file}:{line_of(text, keys)}: {name}{shown}: {message}") from error
    return _checked(config, file, text)


def _current_names(values: dict[str, Any]) -> dict[str, Any]:
    """Replace names of older versions of the format."""
    values = dict(values)
    if "version" in values:
        values.setdefault("schema_version", values.pop("version"))
    environment = values.get("environment")
    if isinstance(environment, dict):
        environment = dict(environment)
        for name in ("memory", "storage"):
            if isinstance(size := environment.get(name), str) and (megabytes := _megabytes(size)):
                environment.setdefault(f"{name}_mb", megabytes)
                del environment[name]
        if environment.get("allow_internet") is False:
            environment.setdefault("network_mode", "no-network")
        values["environment"] = environment
    return values


def _megabytes(size: str) -> int | None:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([GMK])B?\s*", size, re.IGNORECASE)
    factors = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
    return max(1, int(float(match[1]) * factors[match[2].upper()])) if match else None


def _checked(config: HarborConfig, file: Path, text: str) -> HarborConfig:
    environment = config.environment
    if config.steps:
        raise UsageError(f"{file}:{line_of(text, ['steps'])}: multi-step tasks are not supported")
    if environment.os.lower() != "linux":
        line = line_of(text, ["environment", "os"])
        raise UsageError(f"{file}:{line}: environment.os = {environment.os!r}: only linux is supported")
    for table, mode, hosts in (
        ("environment", environment.network_mode, environment.allowed_hosts),
        ("agent", config.agent.network_mode, config.agent.allowed_hosts),
    ):
        if hosts and mode != "allowlist":
            line = line_of(text, [table, "allowed_hosts"])
            raise UsageError(f"{file}:{line}: {table}.allowed_hosts needs {table}.network_mode = 'allowlist'")
    return config


def _value_at(values: Any, keys: list[str]) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def line_of(text: str, keys: list[str]) -> int:
    """Line of a key in a TOML document; that of its table, or 1, if it is not found."""
    table: list[str] = []
    best, depth = 1, 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if header := re.fullmatch(r"\[\[?\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?", stripped):
            table = [part.strip().strip("\"'") for part in header[1].split(".")]
            found = table
        elif assignment := re.match(r"([A-Za-z0-9_.\"'\s-]+?)\s*=", stripped):
            found = [*table, *(part.strip().strip("\"'") for part in assignment[1].split("."))]
        else:
            continue
        if len(found) > depth and keys[: len(found)] == found:
            best, depth = number, len(found)
    return best


def digest_of(path: Path) -> str:
    """Digest of the names, modes and contents of all files of a task."""
    digest = hashlib.sha256()
    for folder, folders, files in os.walk(path):
        folders.sort()
        for name in sorted(files):
            file = Path(folder) / name
            relative = file.relative_to(path).as_posix()
            if file.is_symlink():
                content = str(file.readlink()).encode()
                kind = "link"
            else:
                content = file.read_bytes()
                kind = "executable" if os.access(file, os.X_OK) else "file"
            digest.update(f"{relative}\0{kind}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


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
    if template:
        try:
            candidates.append(Path(template.format(**row)))
        except (KeyError, IndexError, ValueError) as error:
            raise UsageError(f"template {template!r} needs the column {error} of the row") from error
    for candidate in candidates:
        if is_task(candidate):
            return candidate
        tried.append(str(candidate))
    looked_at = ", ".join(dict.fromkeys(tried)) or "nothing"
    raise UsageError(f"task {row.get('id')!r} has no directory here; looked at: {looked_at}")
