"""Harbor environment on this machine, imported by Harbor for the harness terminus-2.

Commands run in the directory in which Harbor was started. Harbor's own directories, such as /logs/agent, are
mapped below a temporary one.
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false
import asyncio
import os
import re
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult

PLACES = re.compile(r"(?<![\w./-])/(logs/(?:agent|user-agent|verifier|artifacts))(?![\w-])")


class LocalEnvironment(BaseEnvironment):
    @staticmethod
    def type() -> str:
        return "local"

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        # A short path, because the tmux socket is there.
        self._root = Path(tempfile.mkdtemp(prefix="afl-"))
        self._work = Path.cwd()
        await self.exec("mkdir -p /logs/agent /logs/verifier /logs/artifacts")

    async def stop(self, delete: bool) -> None:
        await self.exec("tmux kill-server")
        shutil.rmtree(self._root, ignore_errors=True)

    def _moved(self, text: object) -> str:
        return PLACES.sub(lambda match: str(self._root / match[1]), str(text))

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        self._copy(Path(source_path), Path(self._moved(target_path)))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        self._copy(Path(source_dir), Path(self._moved(target_dir)))

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        self._copy(Path(self._moved(source_path)), Path(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        self._copy(Path(self._moved(source_dir)), Path(target_dir))

    def _copy(self, source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, target)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: Any = None,
    ) -> ExecResult:
        inside = {"TMUX_TMPDIR": str(self._root), "PS1": "$ ", **(env or {})}
        exports = " ".join(f"{name}={self._quoted(value)}" for name, value in inside.items())
        process = await asyncio.create_subprocess_exec(
            "/bin/bash",
            "-c",
            f"export {exports}; {self._moved(command)}",
            cwd=cwd or self._work,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        except BaseException:  # out of time, or cancelled
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        texts = {"stdout": out.decode(errors="replace"), "stderr": err.decode(errors="replace")}
        return ExecResult(**texts, return_code=process.returncode or 0)

    @staticmethod
    def _quoted(value: str) -> str:
        return "'" + value.replace("'", "'\\''") + "'"
