"""Verifier of Harbor tasks: runs `tests/test.sh` in a fresh sandbox.

    afield train AGENT --tasks DIR --verifier afield.harbor.verifier:verify --verifier-runtime process

1. The sandbox has the task's environment as it was built, without any process or file of the agent's.
2. The submission may add files to the working directory, the declared paths and new directories below `/`.
3. `tests/` arrives after it. A missing or invalid reward is a verifier failure, not a reward of 0.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from afield.datasets.harbor import HarborTask, read_task, task_directory
from afield.errors import NotFound, UsageError, VerifierFailure
from afield.harbor.environments import Environments, resolve
from afield.harbor.native import refused_keys
from afield.interfaces import Sandbox
from afield.local_sandbox.local_sandbox import LocalSandbox
from afield.sdk.agent import agent
from afield.sdk.workspace import ARTIFACTS, MAX_ARCHIVE_BYTES, MAX_BYTES, MAX_FILES, SYSTEM, TaskEnvironment
from afield.settings.environment import Environment, agent_environment
from afield.settings.runtimes import ResourceLimits, SandboxOptions
from afield.types import Reason, Task

LOG_CHARS = 64_000
"""Size of the part of the tests' output that is kept, in characters."""
# Directories of the system: a submission may change them only where the task declares a path in them.
PROTECTED = SYSTEM | {"/usr", "/var", "/tmp", "/work"}
UNPACK = "tar -x -p --no-same-owner -C /"
REMOVE = "xargs -0 -r rm -rf --"
FRESH = "rm -rf /tests /logs/verifier && mkdir -p /tests /logs/verifier /logs/agent /logs/artifacts"
TEST = "chmod +x /tests/test.sh && exec /tests/test.sh > /logs/verifier/test-stdout.txt 2>&1"


@agent
async def verify(task: dict[str, Any]) -> dict[str, Any]:
    """Grade the submission of a task: its reward, all rewards as metrics, and the output of the tests."""
    path = task_directory(task)
    harbor_task = read_task(path)
    if refused := refused_keys(path, agent=False, verifier=True):
        raise VerifierFailure(str(refused[0]))
    environments = Environments(Environment.read().environments, agent_environment())
    layer = await environments.layer(Task(str(task["id"]), task))
    archive, removed = read_submission(
        task["submission"], msgspec.convert(task["environment"], TaskEnvironment)
    )
    async with LocalSandbox(options=sandbox_options(harbor_task), layer=layer) as sandbox:
        await apply(sandbox, archive, removed)
        return await run_tests(sandbox, harbor_task)


def sandbox_options(task: HarborTask) -> SandboxOptions:
    """Limits of a sandbox for a task: those of its environment."""
    environment = task.config.environment
    return SandboxOptions(
        limits=ResourceLimits(
            cpus=environment.cpus,
            memory_mb=environment.memory_mb or 4096,
            pids=4096,
            disk_mb=environment.storage_mb or 4096,
            files=8192,
        )
    )


async def run_tests(sandbox: Sandbox, task: HarborTask) -> dict[str, Any]:
    """Copy the tests into a sandbox, run them and read the reward."""
    verifier = task.config.verifier
    if verifier.separate:
        raise VerifierFailure(f"{task.path}: a verifier with its own environment is not supported")
    await upload_directory(sandbox, task.path / "tests", "/tests", fresh=FRESH)
    try:
        env = resolve(verifier.env, agent_environment(), task.path / "task.toml")
    except UsageError as error:
        raise VerifierFailure(str(error)) from error
    result = await sandbox.exec(TEST, timeout=verifier.timeout_sec, env=env)
    log = await _download(sandbox, "/logs/verifier/test-stdout.txt")
    output = (log or b"").decode(errors="replace")[-LOG_CHARS:]
    if result.timed_out:
        message = f"tests/test.sh did not end within verifier.timeout_sec = {verifier.timeout_sec:g} s"
        raise VerifierFailure(f"{message}; its output ends: {output[-2000:]}", Reason.TIMEOUT)
    rewards = await read_rewards(sandbox, output)
    return {"reward": rewards["reward"], "metrics": rewards, "verifier_log": output}


async def read_rewards(sandbox: Sandbox, output: str) -> dict[str, float]:
    """Rewards by name, one of them `reward`, from reward.json or else reward.txt in /logs/verifier."""
    ending = f"; the output of the tests ends: {output[-2000:]}"
    rewards: Any = None
    for name in ("reward.json", "reward.txt"):
        content = await _download(sandbox, f"/logs/verifier/{name}")
        if content is None:
            continue
        try:
            text = content.decode()
            rewards = json.loads(text) if name == "reward.json" else float(text)
        except (ValueError, RecursionError) as error:
            raise VerifierFailure(f"/logs/verifier/{name}: {error}{ending}", Reason.REWARD) from error
        break
    else:
        message = "tests/test.sh wrote neither /logs/verifier/reward.txt nor reward.json"
        raise VerifierFailure(f"{message}{ending}", Reason.REWARD)
    if not isinstance(rewards, dict):
        rewards = {"reward": rewards}
    for name, value in rewards.items():
        if not isinstance(value, int | float) or not _is_finite(value):
            excerpt = repr(value)[:200]
            raise VerifierFailure(f"reward {name!r} is {excerpt}, not a finite number{ending}", Reason.REWARD)
    if "reward" not in rewards:
        if len(rewards) != 1:
            message = f"none of the rewards {sorted(rewards)} is named 'reward'"
            raise VerifierFailure(f"{message}; tests/test.sh must write one with this name", Reason.REWARD)
        rewards = {**rewards, "reward": next(iter(rewards.values()))}
    return {name: float(value) for name, value in rewards.items()}


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


async def _download(sandbox: Sandbox, path: str) -> bytes | None:
    try:
        return await sandbox.download(path)
    except NotFound:
        return None


# --- submissions ---------------------------------------------------------------------------------


def read_submission(submission: Mapping[str, Any], environment: TaskEnvironment) -> tuple[bytes, list[str]]:
    """Archive and removed paths of a submission, checked: it comes from the agent.

    Raises VerifierFailure for an archive that is too large, or has members other than files, links and
    directories in the places that a submission may change.
    """
    removed = submission.get("removed", [])
    if not isinstance(removed, list) or len(removed) > MAX_FILES:
        raise _refused(f"'removed' is not a list of at most {MAX_FILES} paths", removed)
    for path in removed:
        if not isinstance(path, str) or "\0" in path or not path.startswith("/"):
            raise _refused("'removed' has an entry that is not an absolute path", path)
        _check_path(path[1:], environment)
    return _checked_archive(_decompressed(submission.get("files", "")), environment), removed


def _decompressed(files: object) -> bytes:
    if not isinstance(files, str) or len(files) > MAX_ARCHIVE_BYTES * 4 // 3 + 4:
        raise _refused(
            f"'files' is not text in base64, or has more than {MAX_ARCHIVE_BYTES} bytes", type(files).__name__
        )
    if not files:
        return b""
    try:
        inflate = zlib.decompressobj(wbits=31)
        limit = MAX_BYTES + MAX_FILES * 2048
        content = inflate.decompress(base64.b64decode(files, validate=True), limit)
    except (binascii.Error, zlib.error) as error:
        raise _refused("'files' is not a tar.gz in base64", str(error)) from error
    if not inflate.eof:
        raise _refused(f"'files' is cut off, or has more than {MAX_BYTES} bytes", len(content))
    return content


def _checked_archive(content: bytes, environment: TaskEnvironment) -> bytes:
    buffer = io.BytesIO()
    if not content:
        return b""
    links: set[str] = set()
    with tarfile.open(fileobj=buffer, mode="w") as checked:
        try:
            with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
                for number, member in enumerate(archive):
                    if number >= MAX_FILES:
                        raise _refused(f"'files' has more than {MAX_FILES} members", number)
                    if not (member.isreg() or member.issym() or member.isdir()):
                        raise _refused(
                            "'files' has a member that is not a file, symbolic link or directory", member.name
                        )
                    name = _check_path(member.name, environment)
                    if any(parent in links for parent in _parents(name)):
                        raise _refused("'files' has a member below a symbolic link", member.name)
                    if member.issym():
                        links.add(name)
                    clean = tarfile.TarInfo(name)
                    clean.type, clean.linkname, clean.mtime = member.type, member.linkname, member.mtime
                    clean.mode = member.mode & 0o777
                    clean.size = member.size if member.isreg() else 0
                    checked.addfile(clean, archive.extractfile(member) if member.isreg() else None)
        except (tarfile.TarError, OSError, ValueError) as error:
            raise _refused("'files' is not a tar archive", str(error)) from error
    return buffer.getvalue()


def _check_path(path: str, environment: TaskEnvironment) -> str:
    """Path relative to the root directory; raises VerifierFailure if a submission may not change it."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or path.startswith("/"):
        raise _refused("a path leads out of the root directory", path)
    name = "/".join(parts)
    declared = (environment.workdir, *environment.paths, ARTIFACTS)
    inside = any(
        place not in ("", "/") and Path(f"/{name}").is_relative_to(place.rstrip("/")) for place in declared
    )
    if f"/{parts[0]}" in PROTECTED and not inside:
        raise _refused("a path is neither below the working directory nor declared by the task", f"/{name}")
    return name


def _parents(name: str) -> list[str]:
    return [str(parent) for parent in Path(name).parents if str(parent) != "."]


def _refused(problem: str, value: object) -> VerifierFailure:
    return VerifierFailure(f"the submission is refused: {problem}: {str(value)[:200]!r}", Reason.UPLOAD)


async def apply(sandbox: Sandbox, archive: bytes, removed: list[str]) -> None:
    """Apply a checked submission to the environment in a sandbox."""
    if removed:
        await _checked_exec(sandbox, REMOVE, b"\0".join(path.encode() for path in removed))
    if archive:
        await _checked_exec(sandbox, UNPACK, archive)


async def upload_directory(sandbox: Sandbox, source: Path, target: str, *, fresh: str = "true") -> None:
    """Copy a directory of the task into a sandbox, after the command `fresh`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(source, arcname=".")
    await _checked_exec(
        sandbox, f"{fresh} && mkdir -p {target} && tar -x --no-same-owner -C {target}", buffer.getvalue()
    )


async def _checked_exec(sandbox: Sandbox, command: str, content: bytes) -> None:
    result = await sandbox.exec(command, stdin=content, cwd="/")
    if not result.ok:
        raise VerifierFailure(
            f"{command}: exit code {result.exit_code}: {result.stderr[-2000:]}", Reason.UPLOAD
        )
