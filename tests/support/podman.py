"""A Podman engine for tests and benchmarks, with an image to run agents in, built here without a registry.

Its images lie in the cache, so that they are made once; the engine ends with the block that started it.
What cannot be had here raises Unavailable with the reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docker import APIClient
from docker.errors import APIError, ImageNotFound
from msgspec import Struct
from requests.exceptions import RequestException

from afield.errors import Unavailable
from afield.runtimes.docker.engine import RUN
from afield.runtimes.docker.runtime import ContainerRuntime
from afield.settings.runtimes import ContainerOptions, ResourceLimits
from support.paths import ROOT, TESTS
from support.servers import CACHE, Server

RECIPE = TESTS / "images" / "agent.sh"
AGENTS = TESTS / "agents"
PODMAN = "on Debian: apt-get install podman runc netavark aardvark-dns catatonit iptables mmdebstrap"


class Podman(Struct, frozen=True):
    socket: str
    image: str
    server: Server | None = None

    def options(self, target: str = "acting.py:act", **changes: Any) -> ContainerOptions:
        """For an agent of tests/agents, with afield from this working tree."""
        serve = ("python3", "-u", "-m", "afield.sdk.serve", f"/agents/{target}")
        given: dict[str, Any] = {
            "image": self.image,
            "socket": self.socket,
            "pull": "never",
            "command": (*serve, "--host", "0.0.0.0", "--port", "8080"),
            "mounts": (f"{ROOT / 'src'}:/src:ro", f"{AGENTS}:/agents:ro"),
            "env": {"PYTHONPATH": "/src", "PYTHONDONTWRITEBYTECODE": "1"},
            "limits": ResourceLimits(memory_mb=256, disk_mb=None, files=None),
        }
        return ContainerOptions(**{**given, **changes})

    def api(self) -> APIClient:
        return APIClient(self.socket, version="auto", timeout=60)

    def restart(self) -> None:
        """The engine alone, as by an update of it; containers live on."""
        assert self.server is not None
        self.server.stop()
        Path(self.socket.removeprefix("unix://")).unlink(missing_ok=True)
        self.server.start(lambda: _answers(self.socket))

    def remove_all(self, run: str) -> None:
        """What is left of runs whose name begins so."""
        with contextlib.closing(self.api()) as api:
            for row in api.containers(all=True, filters={"label": [RUN]}):
                if row["Labels"][RUN].startswith(run):
                    api.remove_container(row["Id"], force=True, v=True)


def runtime(
    socket: str, image: str, folder: str, run: str, target: str = "acting.py:act", **changes: Any
) -> ContainerRuntime:
    """From plain values, so that another process can make the same."""
    options = Podman(socket, image).options(target, **changes)
    return ContainerRuntime(options, name=run, log_dir=Path(folder) / "logs", poll_s=0.1)


@contextlib.contextmanager
def podman(folder: Path) -> Iterator[Podman]:
    for program in ("podman", "mmdebstrap"):
        if shutil.which(program) is None:
            raise Unavailable(f"{program} is not installed ({PODMAN})")
    if os.getuid() != 0:
        raise Unavailable("the tests' podman is started as root")
    home = CACHE / "podman"
    home.mkdir(parents=True, exist_ok=True)
    # Short: the path of a socket has at most 107 characters.
    socket = f"unix://{folder}/podman.sock"
    server = Server("unix", 0, _command(home, socket), folder)
    try:
        server.start(lambda: _answers(socket))
        with (home / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            image = _image(home, socket)
        yield Podman(socket, image, server)
    finally:
        server.stop()


def _command(home: Path, socket: str) -> list[str]:
    config = home / "containers.conf"
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    processes = 4096 if most == resource.RLIM_INFINITY else min(most, 4096)
    # crun refuses machines that have both versions of control groups.
    oci = "runc" if shutil.which("runc") else "crun"
    config.write_text(
        f"""
[containers]
default_ulimits = ["nofile=1024:1024", "nproc={processes}:{processes}"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
runtime = "{oci}"
"""
    )
    where = ["--root", f"{home}/root", "--runroot", f"{home}/run", "--tmpdir", f"{home}/tmp"]
    return ["env", f"CONTAINERS_CONF={config}", "podman", *where, "system", "service", "--time", "0", socket]


def _answers(socket: str) -> bool:
    if not Path(socket.removeprefix("unix://")).exists():
        return False
    try:
        with contextlib.closing(APIClient(socket, timeout=5)) as api:
            return api.ping() is not None
    except RequestException:
        return False


def _image(home: Path, socket: str) -> str:
    constraints = ROOT / "constraints.txt"
    made_of = RECIPE.read_bytes() + constraints.read_bytes()
    name = f"localhost/afield-agent:{hashlib.sha256(made_of).hexdigest()[:12]}"
    with contextlib.closing(APIClient(socket, timeout=120)) as api:
        try:
            api.inspect_image(name)
        except ImageNotFound:
            tar = home / "agent.tar"
            built = subprocess.run(
                [RECIPE, sys.executable, constraints, tar], capture_output=True, text=True, check=False
            )
            if built.returncode:
                raise Unavailable(f"the image cannot be built: {built.stderr[-2000:]}") from None
            repository, _, tag = name.partition(":")
            said = api.import_image_from_file(str(tar), repository=repository, tag=tag)
            # Podman 4 calls it `latest`, whatever it was told.
            api.tag(json.loads(said.splitlines()[-1])["status"], repository, tag)
            tar.unlink()
            for old in (old for image in api.images(repository) for old in image["RepoTags"] if old != name):
                # Another run of the tests may still use it.
                with contextlib.suppress(APIError):
                    api.remove_image(old)
    return name
