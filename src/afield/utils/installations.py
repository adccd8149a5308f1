"""Cached installations of third-party programs: virtual environments, npm packages, git files.

Each is installed once, in a directory named by a hash of its contents; a file in it marks a complete
installation. Processes that need the same one wait for each other.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from afield.errors import Unavailable

READY = "afield-ready"
FETCH_S = 300.0
INSTALL_S = 900.0
"""Time limit of one installer, in seconds."""
PIP = ["-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-input"]


def interpreter(version: str) -> str:
    """Find a Python of this version ("3.12") on the PATH or in the directories of pyenv and uv.

    Each candidate is run, because a program on the PATH may be a shim without such a version.
    """
    name = f"python{version}"
    kept = (
        f".pyenv/versions/{version}.*/bin/{name}",
        f".local/share/uv/python/cpython-{version}.*/bin/{name}",
    )
    candidates = [name, *(str(path) for pattern in kept for path in sorted(Path.home().glob(pattern)))]
    for candidate in candidates:
        try:
            if (
                _run([candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).strip()
                == version
            ):
                return candidate
        except Unavailable:
            continue
    raise Unavailable(f"{name} is not installed here; install Python {version} and put it on the PATH")


def python_environment(
    cache: Path,
    name: str,
    requirements: Sequence[str],
    *,
    python: str = "python3",
    without: Sequence[str] = (),
    constraints: Path | None = None,
) -> Path:
    """Install `requirements` into a virtual environment and remove the packages `without`.

    Returns the path of its interpreter.
    """
    version = _run([python, "-c", "import sys; print(sys.version)"]).strip()
    pins = constraints.read_text() if constraints else ""

    def install(home: Path) -> None:
        _run([python, "-m", "venv", str(home)])
        inside = str(home / "bin" / "python")
        limits = ["-c", str(constraints)] if constraints else []
        _run([inside, *PIP, *limits, *requirements], timeout_s=INSTALL_S)
        if without:
            _run([inside, "-m", "pip", "uninstall", "-q", "-y", *without])

    home = _made_once(cache, name, [*requirements, "--", *without, version, pins], install)
    return home / "bin" / "python"


def npm_environment(cache: Path, name: str, packages: Sequence[str]) -> Path:
    """Install npm packages; returns the directory of their programs (`node_modules/.bin`)."""

    def install(home: Path) -> None:
        home.mkdir(parents=True)
        (home / "package.json").write_text(json.dumps({"private": True, "name": "clients"}))
        npm = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", *packages]
        _run(npm, cwd=home, timeout_s=INSTALL_S)

    return _made_once(cache, name, list(packages), install) / "node_modules" / ".bin"


def wheel_files(cache: Path, package: str, prefix: str) -> Path:
    """Download a package without dependencies; returns the directory of its files named `prefix...`."""

    def install(home: Path) -> None:
        home.mkdir(parents=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check"]
        _run([*pip, "-d", str(home), package])
        [wheel] = home.glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            files.extractall(home, [name for name in files.namelist() if name.startswith(prefix)])
        wheel.unlink()

    return _made_once(cache, package.partition("=")[0], [package, prefix], install)


def git_files(cache: Path, name: str, url: str, commit: str, paths: Sequence[str]) -> Path:
    """Export paths of a git repository at a commit; returns their directory.

    Uses the clone `sources/NAME` in the cache if it exists, else fetches from `url`.
    """
    clone = cache / "sources" / name

    def install(home: Path) -> None:
        home.mkdir(parents=True)
        repository = clone
        if not clone.exists():
            repository = home / "repository"
            _run(["git", "init", "-q", "--bare", str(repository)])
            fetch = ["git", "-C", str(repository), "fetch", "-q", "--depth", "1", url, commit]
            _run(fetch, timeout_s=FETCH_S)
        archive = home / "files.tar"
        _run(["git", "-C", str(repository), "archive", "-o", str(archive), commit, *paths])
        with tarfile.open(archive) as files:
            files.extractall(home / "files", filter="data")
        archive.unlink()
        shutil.rmtree(home / "repository", ignore_errors=True)

    return _made_once(cache, name, [url, commit, *paths], install) / "files"


def _made_once(cache: Path, name: str, contents: Sequence[str], install: Callable[[Path], None]) -> Path:
    digest = hashlib.sha256("\0".join(contents).encode()).hexdigest()[:12]
    home = cache / f"{name}-{digest}"
    if (home / READY).exists():
        return home
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f"{name}-{digest}.lock"):
        if not (home / READY).exists():
            # Virtual environments cannot be moved, so a file marks completion instead of a rename.
            shutil.rmtree(home, ignore_errors=True)
            install(home)
            (home / READY).write_text("\n".join(contents))
    return home


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(command: Sequence[str], cwd: Path | None = None, timeout_s: float | None = None) -> str:
    try:
        process = subprocess.run(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise Unavailable(f"{command[0]} is not installed here") from error
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{' '.join(command[:6])} ... took more than {timeout_s:g} s") from error
    if process.returncode:
        printed = (process.stderr or process.stdout).strip().splitlines()
        lines = ([line for line in printed if not line.startswith("WARNING")] or printed)[-8:]
        raise Unavailable(f"{' '.join(command[:6])} ... failed:\n" + "\n".join(lines))
    return process.stdout
