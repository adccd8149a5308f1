"""The examples' Dockerfiles, built and run: by Podman, on a base made here that stands for python:3.12-slim.

That base is Debian's Python. Another base, the arm64 image and ECR are not tried here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from support import podman as containers
from support.processes import afield, summary
from support.servers import CACHE, Server

pytestmark = [pytest.mark.real, pytest.mark.timeout(2400)]
ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
BASE = "docker.io/library/python:3.12-slim"
PACKAGES = "python3,python3-pip,python3-venv,ca-certificates"
AS_IN_THE_REAL_BASE = 'rm -f "$1"/usr/lib/python3.11/EXTERNALLY-MANAGED; ln -sf python3 "$1/usr/bin/python"'


class Builder:
    """Podman with a store of its own, which keeps the base between runs."""

    def __init__(self, folder: Path) -> None:
        self.socket = f"unix://{folder}/podman.sock"
        home = CACHE / "podman-examples"
        home.mkdir(parents=True, exist_ok=True)
        self._home, self._folder = home, folder
        served = containers._command(home, self.socket)
        self._podman = served[: served.index("system")]
        self.server = Server("unix", 0, served, folder)

    def podman(self, *words: object) -> str:
        done = subprocess.run([*self._podman, *map(str, words)], capture_output=True, text=True)
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

    def build(self, example: Path) -> str:
        image = f"localhost/{example.name}"
        options = ("--network", "host", "--pull=never", "--isolation", "oci", *self._pip())
        context = ("--build-context", f"afield={ROOT}", "--tag", image)
        self.podman("build", *options, *context, example)
        return image

    def _pip(self) -> list[str]:
        """pip in there finds packages where pip here does."""
        told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
        lines = [line.partition("=") for line in told.stdout.splitlines() if line.startswith("global.")]
        values = {name.removeprefix("global."): value.strip("'") for name, _, value in lines}
        config = self._folder / "pip.conf"
        config.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in values.items()))
        words = [Path(urlsplit(word).path) for value in values.values() for word in value.split()]
        # An index of files links to what lies beside it.
        places = {word.parent if word.name == "simple" else word for word in words if word.is_absolute()}
        mounts = [f"--volume={place}:{place}:ro" for place in sorted(places) if place.exists()]
        return [f"--volume={config}:/etc/pip.conf:ro", *mounts]


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    missing = [name for name in ("podman", "mmdebstrap") if shutil.which(name) is None]
    if missing or os.getuid() != 0:
        reason = f"not installed: {missing} ({containers.PODMAN})" if missing else "podman is started as root"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    built = Builder(tmp_path_factory.mktemp("examples"))
    built.ensure_base()
    built.server.start(lambda: containers._answers(built.socket))
    try:
        yield built
    finally:
        built.server.stop()


@pytest.mark.parametrize("name", ["strands-math", "coding"])
def test_an_examples_image_is_built_and_trained_in_containers(
    name: str, builder: Builder, tmp_path: Path
) -> None:
    example = EXAMPLES / name
    image = builder.build(example)
    assert builder.podman("image", "inspect", "--format", "{{.Config.User}}", image).strip() == "agent"
    given = ("train", "--config", example / "train.toml", "--engine", f"scripted={example / 'script.jsonl'}")
    where = ("--runtime", f"container={image}", "--set", f"container.socket={builder.socket}")
    apart = () if name != "coding" else ("--set", "verifier_runtime=process")
    small = ("--steps", 1, "--rollouts", 3, "--concurrency", 3, "--freeze-weights", "--json")
    code, out, err = afield(
        tmp_path, *given, *where, "--set", "container.pull=never", *apart, *small, timeout=900
    )
    assert code == 0, err
    told = summary(out)
    assert told["failed"] == 0 and told["rollouts"] in (6, 12) and told["first"] > 0, told
