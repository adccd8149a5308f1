"""Harbor's environment and verifier interfaces over local sandboxes.

1. `SandboxEnvironment` runs the agent's commands in a sandbox that has the task's environment.
2. `FreshSandboxVerifier` applies the agent's changes to a new sandbox and runs the tests there. The agent's
   sandbox never holds the tests, and no process or program of the agent's runs beside them.

The `harbor` package loads both by their import paths.
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false
from __future__ import annotations

import asyncio
import io
import json
import shlex
import stat
import sys
import tarfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
from harbor.environments.base import BaseEnvironment, ExecResult, transfer_tar_filter
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.verifier.result import VerifierResult
from harbor.verifier.base import BaseVerifier
from msgspec import structs

from afield.datasets.harbor import read_task
from afield.errors import InfrastructureFailure
from afield.harbor.environments import Environments
from afield.harbor.verifier import apply, read_submission, run_tests, sandbox_options, upload_directory
from afield.local_sandbox.local_sandbox import LocalSandbox
from afield.local_sandbox.messages import Layer
from afield.sdk.workspace import TaskEnvironment
from afield.settings.environment import Environment, agent_environment
from afield.types import Reason, Task

SUBMISSION = "/dev/shm/submission.json"
END = "/dev/shm/end-of-agent"
WAIT = f"while [ ! -e {END} ]; do sleep 0.1; done"
LOGS = "mkdir -p /logs/agent /logs/verifier /logs/artifacts"
DOWNLOAD = "/dev/shm/download.tar"
COMMAND_S = 24 * 3600.0
"""Time limit of a command without one, in seconds; Harbor's own limits end the agent earlier."""


class SandboxEnvironment(BaseEnvironment):
    """Harbor environment in a sandbox of this machine, without Docker.

    `task_path` is the directory of the task, and `allow` the addresses that its commands may reach.
    """

    def __init__(self, *args: Any, task_path: str, allow: tuple[str, ...] = (), **kwargs: Any) -> None:
        self._task = read_task(Path(task_path))
        self._allow = tuple(allow)
        self._stack = AsyncExitStack()
        self._sandbox: LocalSandbox | None = None
        self._recorder: asyncio.Task[Any] | None = None
        self._submission: dict[str, Any] | None = None
        self.layer: Layer | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "afield-sandbox"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        """Nothing to check: `read_task` checked the task."""

    async def start(self, force_build: bool) -> None:
        row = self._task.row()
        environments = Environments(Environment.read().environments, agent_environment())
        self.layer = await environments.layer(Task(self._task.id, {**row, "task_path": str(self._task.path)}))
        options = structs.replace(sandbox_options(self._task), allow=self._allow)
        self._sandbox = await self._stack.enter_async_context(LocalSandbox(options=options, layer=self.layer))
        await self._sandbox.exec(LOGS, cwd="/")
        # The recorder notes the state of the files now, and writes the changes when the agent has ended.
        self._recorder = asyncio.create_task(
            self._sandbox.exec(
                [sys.executable, "-P", "-m", "afield.sdk.workspace", SUBMISSION, "sh", "-c", WAIT],
                stdin=json.dumps(row).encode(),
                timeout=COMMAND_S,
            )
        )

    async def stop(self, delete: bool) -> None:
        if self._recorder is not None:
            self._recorder.cancel()
            await asyncio.gather(self._recorder, return_exceptions=True)
        await self._stack.aclose()
        self._sandbox = None

    async def submission(self) -> dict[str, Any]:
        """Changes of the agent, collected once; processes that it left may go on."""
        if self._submission is None:
            assert self._recorder is not None
            await self._running.exec(["touch", END])
            recorded = await self._recorder
            if not recorded.ok:
                raise InfrastructureFailure(
                    f"the changes in the sandbox cannot be read: {recorded.stderr[-2000:]}", Reason.UPLOAD
                )
            submission: dict[str, Any] = json.loads(await self._running.download(SUBMISSION))
            self._submission = submission
        return self._submission

    @property
    def _running(self) -> LocalSandbox:
        if self._sandbox is None:
            raise InfrastructureFailure("the environment is not running", Reason.LAUNCH)
        return self._sandbox

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        content, mode = await asyncio.to_thread(_read, Path(source_path))
        await self._running.upload(target_path, content)
        await self._running.exec(["chmod", f"{mode:o}", target_path])

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await upload_directory(self._running, Path(source_dir), target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await asyncio.to_thread(_write, Path(target_path), await self._running.download(source_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        packed = await self._running.exec(["tar", "-c", "-f", DOWNLOAD, "-C", source_dir, "."], cwd="/")
        if not packed.ok:
            raise FileNotFoundError(f"{source_dir} in the sandbox: {packed.stderr.strip()}")
        await asyncio.to_thread(_unpack, Path(target_dir), await self._running.download(DOWNLOAD))

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command with bash. The sandbox has one user, whatever `user` names."""
        result = await self._running.exec(
            ["bash", "-c", command],
            cwd=cwd or self.task_env_config.workdir,
            env=self._merge_env(env),
            timeout=timeout_sec or COMMAND_S,
        )
        if result.timed_out:
            raise TimeoutError(f"{shlex.quote(command[:200])} did not end within {timeout_sec} s")
        return ExecResult(stdout=result.stdout, stderr=result.stderr, return_code=result.exit_code or 0)


class FreshSandboxVerifier(BaseVerifier):
    """Runs the tests on the agent's changes in a sandbox that the agent has never used."""

    async def verify(self) -> VerifierResult:
        environment = self.environment
        assert isinstance(environment, SandboxEnvironment)
        task = read_task(Path(self.task.paths.task_dir))
        described = msgspec.convert(task.row()["environment"], TaskEnvironment)
        archive, removed = read_submission(await environment.submission(), described)
        async with LocalSandbox(options=sandbox_options(task), layer=environment.layer) as sandbox:
            await apply(sandbox, archive, removed)
            result = await run_tests(sandbox, task)
        self.trial_paths.verifier_dir.mkdir(parents=True, exist_ok=True)
        self.trial_paths.test_stdout_path.write_text(result["verifier_log"])
        return VerifierResult(rewards=result["metrics"])


def _read(file: Path) -> tuple[bytes, int]:
    return file.read_bytes(), stat.S_IMODE(file.stat().st_mode)


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def _unpack(directory: Path, content: bytes) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(directory, filter=transfer_tar_filter)
