"""A repository on disk: made from a task's files, changed by commands, told as a patch."""

import subprocess
import sys
import tempfile
from pathlib import Path


class Repository:
    """A folder of its own, gone when the block ends."""

    def __init__(self, files: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="repository-")
        self.root = Path(self._folder.name) / "work"
        self.write(files)
        self.git("init", "--quiet")
        self._start = self._tree()

    def __enter__(self) -> "Repository":
        return self

    def __exit__(self, *exc: object) -> None:
        self._folder.cleanup()

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text)

    def run(self, *command: str, stdin: str = "", seconds: float = 20) -> subprocess.CompletedProcess[str]:
        """A command in the repository. Raises TimeoutExpired; an exit code is data."""
        # Nothing of our own environment, where secrets may be.
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        env = {"PATH": path, "HOME": self._folder.name, "PYTHONDONTWRITEBYTECODE": "1"}
        streams = {"input": stdin, "capture_output": True, "text": True, "errors": "replace"}
        return subprocess.run(command, cwd=self.root, env=env, timeout=seconds, **streams)

    def git(self, *words: str, stdin: str = "") -> str:
        # Kept beside the files, where `rm -rf *` does not reach.
        done = self.run("git", "--git-dir=../git", "--work-tree=.", *words, stdin=stdin)
        if done.returncode:
            raise ValueError(f"git {words[0]}: {done.stderr.strip()}")
        return done.stdout

    def patch(self) -> str:
        """All changes since the start."""
        self.root.mkdir(exist_ok=True)
        return self.git("diff", self._start, self._tree())

    def apply(self, patch: str) -> None:
        """Raises ValueError when it does not fit."""
        if patch:
            self.git("apply", "-", stdin=patch)

    def _tree(self) -> str:
        self.git("add", "--all")
        return self.git("write-tree").strip()
