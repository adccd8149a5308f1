"""Builds images with Podman, on a base made here that stands for python:3.12-slim.

The base is Debian's Python from Debian's packages, so that no registry is needed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from support import podman as containers
from support.servers import CACHE, Server

BASE = "docker.io/library/python:3.12-slim"
PACKAGES = "python3,python3-pip,python3-venv,ca-certificates"
AS_IN_THE_REAL_BASE = 'rm -f "$1"/usr/lib/python3.11/EXTERNALLY-MANAGED; ln -sf python3 "$1/usr/bin/python"'


class ImageBuilder:
    """Podman with a store of its own, which keeps the base between runs."""

    def __init__(self, folder: Path) -> None:
        self.socket = f"unix://{folder}/podman.sock"
        home = CACHE / "podman-examples"
        home.mkdir(parents=True, exist_ok=True)
        self._home, self._folder = home, folder
        served = containers._command(home, self.socket)
        self.command = served[: served.index("system")]
        """Words before a subcommand."""
        self.server = Server("unix", 0, served, folder)

    def podman(self, *words: object) -> str:
        done = subprocess.run([*self.command, *map(str, words)], capture_output=True, text=True)
        assert done.returncode == 0, f"podman {words[0]}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def ensure_base(self) -> None:
        if BASE in self.podman("images", "--format", "{{.Repository}}:{{.Tag}}").splitlines():
            return
        tar = self._home / "base.tar"
        hook = f"--customize-hook={AS_IN_THE_REAL_BASE}"
        made = ["mmdebstrap", "--quiet", "--format=tar", "--variant=minbase", f"--include={PACKAGES}", hook]
        subprocess.run([*made, "bookworm", str(tar)], check=True)
        self.podman("import", tar, BASE)
        tar.unlink()

    def build(self, context: Path, tag: str, *options: object) -> str:
        """Build an image without a registry; pip in it finds packages where pip here does."""
        offline = ("--network", "host", "--pull=never", "--isolation", "oci", *self._pip())
        self.podman("build", *offline, *options, "--tag", tag, context)
        return tag

    def _pip(self) -> list[str]:
        listed = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True
        )
        lines = [line.partition("=") for line in listed.stdout.splitlines() if line.startswith("global.")]
        values = {name.removeprefix("global."): value.strip("'") for name, _, value in lines}
        config = self._folder / "pip.conf"
        config.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in values.items()))
        words = [Path(urlsplit(word).path) for value in values.values() for word in value.split()]
        # An index of files links to what lies beside it.
        places = {word.parent if word.name == "simple" else word for word in words if word.is_absolute()}
        mounts = [f"--volume={place}:{place}:ro" for place in sorted(places) if place.exists()]
        return [f"--volume={config}:/etc/pip.conf:ro", *mounts]


@contextlib.contextmanager
def image_builder(folder: Path) -> Iterator[ImageBuilder]:
    """Skips where images cannot be built; where `CI` is set, it fails."""
    missing = [name for name in ("podman", "mmdebstrap") if shutil.which(name) is None]
    if missing or os.getuid() != 0:
        reason = f"not installed: {missing} ({containers.PODMAN})" if missing else "podman is started as root"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    builder = ImageBuilder(folder)
    builder.ensure_base()
    builder.server.start(lambda: containers._answers(builder.socket))
    try:
        yield builder
    finally:
        builder.server.stop()
