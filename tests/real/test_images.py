"""The images of deploy/images, built and run by Podman as the manifests run them.

The containers have the users, arguments, settings files, read-only root file system and capabilities of the
pods, and volumes with the owners and modes that the kubelet gives them. The base is Debian's Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from support.certificates import Certificate, certificate
from support.gateways import POLICY
from support.images import ImageBuilder, image_builder
from support.manifests import KUBERNETES, Manifest, arguments, container, mount_paths, pod
from support.pages import DOCS, README, blocks
from support.paths import ROOT
from support.ports import free_ports
from support.processes import afield, summary, unlearned

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
ADMIN, SESSION_SECRET, CLUSTER_SECRET = "a" * 64, "b" * 64, "c" * 64
USER = 10001
START_S = 60.0


class Images:
    """Podman with the images of this working tree."""

    def __init__(self, builder: ImageBuilder) -> None:
        self.builder = builder
        self.podman = builder.podman
        file = ("--format", "docker", "--file", ROOT / "deploy" / "images" / "Dockerfile", "--target")
        self.server = builder.build(ROOT, "localhost/afield", *file, "server")
        self.agent = builder.build(ROOT, "localhost/afield-agent", *file, "agent")

    @contextlib.contextmanager
    def running(self, *words: object) -> Iterator[str]:
        """Run a container; yields its name, and removes it afterwards."""
        name = f"afield-test-{uuid4().hex[:8]}"
        try:
            self.podman("run", "--detach", "--name", name, *words)
            yield name
        finally:
            self.podman("rm", "--force", "--time", "0", "--volumes", name)

    def stop(self, name: str) -> int:
        """Stop a container with SIGTERM, SIGKILL after 30 s; returns its exit code."""
        self.podman("stop", "--time", "30", name)
        return int(self.podman("inspect", "--format", "{{.State.ExitCode}}", name))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    with image_builder(tmp_path_factory.mktemp("images")) as builder:
        yield Images(builder)


def call(
    url: str, body: Any = None, key: str = "", context: ssl.SSLContext | None = None
) -> tuple[int, dict[str, Any]]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=30, context=context) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")


def wait_for(ready: Callable[[], bool], explain: Callable[[], str]) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError, json.JSONDecodeError):
            if ready():
                return
        time.sleep(0.2)
    raise AssertionError(explain())


# --- volumes as the kubelet makes them -----------------------------------------------------------


def give(folder: Path, mode: int) -> Path:
    """Create a directory that belongs to root and to the pod's group, as `fsGroup` makes volumes."""
    folder.mkdir(parents=True)
    os.chown(folder, 0, USER)
    folder.chmod(mode)
    return folder


def secret_volume(folder: Path, values: dict[str, str | bytes]) -> Path:
    give(folder, 0o2775)
    for name, value in values.items():
        file = folder / name
        file.write_bytes(value if isinstance(value, bytes) else f"{value}\n".encode())
        os.chown(file, 0, USER)
        file.chmod(0o440)
    return folder


def config_volume(folder: Path, file: Path, **changes: str) -> Path:
    """A settings file of the manifests; `changes` replace lines by their key."""
    lines = file.read_text().splitlines()
    for key, value in changes.items():
        (number,) = [n for n, line in enumerate(lines) if line.startswith(f"{key} = ")]
        lines[number] = f"{key} = {value}"
    give(folder, 0o2775)
    (folder / file.name).write_text("\n".join(lines))
    (folder / file.name).chmod(0o644)
    return folder


def models(folder: Path) -> Path:
    shutil.copytree(POLICY, folder / "policy")
    (folder / "script.jsonl").write_text(json.dumps({"match": "", "text": "Yes."}) + "\n")
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def pod_options(overlay: str, mounts: dict[str, Path], port: int) -> list[object]:
    """Options of `podman run` for the pod of an overlay."""
    security: Manifest = pod(overlay)["spec"]["securityContext"]
    own: Manifest = container(overlay)["securityContext"]
    assert own["readOnlyRootFilesystem"] and own["allowPrivilegeEscalation"] is False
    options = ["--user", f"{security['runAsUser']}:{security['runAsGroup']}"]
    options += ["--read-only", "--read-only-tmpfs=false", "--security-opt", "no-new-privileges"]
    options += [f"--cap-drop={name.lower()}" for name in own["capabilities"]["drop"]]
    options += [f"--publish=127.0.0.1:{port}:{container(overlay)['ports'][0]['containerPort']}"]
    for mount in container(overlay)["volumeMounts"]:
        if mount["name"] == "tmp":
            options += ["--tmpfs", mount["mountPath"]]
        else:
            mode = "ro" if mount.get("readOnly") else "rw"
            options.append(f"--volume={mounts[mount['name']]}:{mount['mountPath']}:{mode}")
    return [
        *options,
        *(f"--env={one['name']}" for one in container(overlay).get("env", []) if "value" in one),
    ]


# --- gateway -------------------------------------------------------------------------------------


def gateway_volumes(folder: Path) -> dict[str, Path]:
    return {
        "config": config_volume(
            folder / "config",
            KUBERNETES / "gateway" / "gateway.toml",
            engine='["scripted=/models/script.jsonl"]',
        ),
        "secrets": secret_volume(folder / "secrets", {"admin-key": ADMIN, "session-secret": SESSION_SECRET}),
        "models": models(folder / "models"),
        "store": give(folder / "store", 0o2775),
    }


def test_a_gateway_runs_like_its_pod_and_keeps_its_sessions(images: Images, tmp_path: Path) -> None:
    overlay, (port,) = "overlays/cluster", free_ports(1)
    options = pod_options(overlay, gateway_volumes(tmp_path), port)
    words = arguments(overlay, POD_NAME="afield-gateway-0", POD_NAMESPACE="afield")
    url = f"http://127.0.0.1:{port}"
    probes = {
        kind: container(overlay)[f"{kind}Probe"]["httpGet"]["path"] for kind in ("readiness", "liveness")
    }
    chat = {"model": "m", "messages": [{"role": "user", "content": "Is it so?"}]}
    with images.running(*options, images.server, *words) as name:
        wait_for(lambda: call(url + probes["readiness"])[0] == 200, lambda: images.podman("logs", name))
        assert call(url + probes["liveness"]) == (200, {"status": "ok"})
        images.podman("healthcheck", "run", name)
        assert images.podman("exec", name, "id", "-u").strip() == str(USER)
        denied = "import os\ntry: open('/opt/afield/x', 'w')\nexcept OSError as error: print(error.errno)"
        assert images.podman("exec", name, "python", "-c", denied).strip() in ("13", "30")
        status = images.podman("exec", name, "cat", "/proc/1/status")
        assert "CapEff:\t0000000000000000" in status and "NoNewPrivs:\t1" in status
        assert call(f"{url}/sessions", {"id": "s.1"}, "wrong")[0] == 401
        code, session = call(f"{url}/sessions", {"id": "s.1"}, ADMIN)
        assert code in (200, 201), session
        pod_url = "http://afield-gateway-0.afield-gateway.afield.svc:8400"
        assert session["base_url"] == f"{pod_url}/s/s.1"
        path = session["openai_base_url"].removeprefix(pod_url) + "/chat/completions"
        code, answer = call(url + path, chat, session["api_key"])
        assert (code, answer["choices"][0]["message"]["content"]) == (200, "Yes.")
        assert images.stop(name) == 0
        assert images.podman("logs", name).count("Traceback") == 0
        images.podman("start", name)
        wait_for(lambda: call(url + probes["readiness"])[0] == 200, lambda: images.podman("logs", name))
        chat["messages"] += [answer["choices"][0]["message"], {"role": "user", "content": "Again?"}]
        assert call(url + path, chat, session["api_key"])[0] == 200
        assert len(call(f"{url}/sessions/s.1/turns", key=ADMIN)[1]["turns"]) == 2
        assert images.stop(name) == 0
    (database,) = (tmp_path / "store").rglob("gateway.sqlite")
    assert (database.stat().st_uid, database.stat().st_mode & 0o777) == (USER, 0o600)


def test_a_gateway_without_an_engine_ends_at_once_on_sigterm(images: Images, tmp_path: Path) -> None:
    """The first process of a container gets no signal that it does not handle."""
    folder = models(tmp_path / "models")
    words = ("gateway", "--model", "/models/policy", "--engine", "vllm=http://127.0.0.1:9")
    with images.running(f"--volume={folder}:/models:ro", "--read-only", images.server, *words) as name:
        wait_for(lambda: "127.0.0.1:9" in log_of(images, name), lambda: log_of(images, name))
        assert images.stop(name) == 143  # 137 is SIGKILL


def log_of(images: Images, name: str) -> str:
    command = [*images.builder.command, "logs", name]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout


# --- relay ---------------------------------------------------------------------------------------


@pytest.fixture
def tls(tmp_path: Path) -> Certificate:
    return certificate(tmp_path / "tls-files")


def test_a_relay_runs_like_its_pod_and_a_gateway_dials_out_to_it(
    images: Images, tmp_path: Path, tls: Certificate
) -> None:
    relay_port, gateway_port = free_ports(2)
    files = {"tls.crt": tls.chain.read_bytes(), "tls.key": tls.key.read_bytes()}
    mounts = {
        "config": config_volume(tmp_path / "relay" / "config", KUBERNETES / "relay" / "relay.toml"),
        "secrets": secret_volume(tmp_path / "relay" / "secrets", {"lab": CLUSTER_SECRET}),
        "tls": secret_volume(tmp_path / "relay" / "tls", files),
    }
    relay_url = f"https://localhost:{relay_port}"
    trust = ssl.create_default_context(cafile=tls.authority)
    path = container("relay")["readinessProbe"]["httpGet"]["path"]
    options = pod_options("relay", mounts, relay_port)
    with images.running(*options, images.server, *arguments("relay")) as relay:
        wait_for(
            lambda: call(relay_url + path, context=trust)[0] == 200, lambda: images.podman("logs", relay)
        )
        images.podman("healthcheck", "run", relay)
        # The gateway's container has the relay's address on this machine, so it shares its network.
        dial_out = gateway_volumes(tmp_path / "gateway")
        shutil.rmtree(dial_out["config"])
        secret_volume(
            tmp_path / "gateway" / "all",
            {"admin-key": ADMIN, "session-secret": SESSION_SECRET, "relay-secret": CLUSTER_SECRET},
        )
        dial_out["secrets"] = tmp_path / "gateway" / "all"
        dial_out["config"] = config_volume(
            tmp_path / "gateway" / "dial-out",
            KUBERNETES / "overlays" / "dial-out" / "gateway.toml",
            engine='["scripted=/models/script.jsonl"]',
            relay=f'"{relay_url}"',
            host=f'"127.0.0.1"\nport = {gateway_port}',
        )
        overlay = "overlays/dial-out"
        options = [o for o in pod_options(overlay, dial_out, 0) if not str(o).startswith("--publish")]
        options += ["--network=host", f"--volume={tls.authority}:/ca.pem:ro", "--env=SSL_CERT_FILE=/ca.pem"]
        tls.authority.chmod(0o644)
        with images.running(*options, images.server, *arguments(overlay)) as gateway:
            url = f"http://127.0.0.1:{gateway_port}"
            wait_for(lambda: call(f"{url}/health")[0] == 200, lambda: log_of(images, gateway))
            _, session = call(f"{url}/sessions", {"id": "s.1"}, ADMIN)
            assert session["base_url"].startswith(f"{relay_url}/c/lab/g/")
            chat = {"model": "m", "messages": [{"role": "user", "content": "Is it so?"}]}
            address = f"{session['openai_base_url']}/chat/completions"
            code, answer = call(address, chat, session["api_key"], trust)
            assert (code, answer["choices"][0]["message"]["content"]) == (200, "Yes.")
            assert call(f"{relay_url}/c/lab/g/x/t/wrong/v1/models", context=trust)[0] == 401
            assert images.stop(relay) == 0
            assert images.stop(gateway) == 0
    assert {*mount_paths("relay")} == {*mounts}


# --- agents --------------------------------------------------------------------------------------


def test_the_documented_agent_image_is_trained_in_containers(images: Images, tmp_path: Path) -> None:
    (dockerfile,) = blocks(DOCS / "deploy" / "containers.md", "dockerfile")
    (tmp_path / "Dockerfile").write_text(dockerfile)
    (tmp_path / "agent.py").write_text(blocks(README, "python")[0])
    (tmp_path / "tasks.jsonl").write_text(blocks(README, "json")[0])
    image = images.builder.build(tmp_path, "localhost/afield-agent-child", "--format", "docker")
    with images.running("--read-only", "--cap-drop=all", image) as name:
        wait_for(
            lambda: subprocess.run([*images.builder.command, "healthcheck", "run", name]).returncode == 0,
            lambda: log_of(images, name),
        )
        assert images.podman("exec", name, "id", "-u").strip() == str(USER)
        assert images.stop(name) == 0
    where = ("--runtime", f"container={image}", "--set", f"container.socket={images.builder.socket}")
    sizes = ("--steps", 1, "--tasks-per-step", 2, "--rollouts", 2, "--concurrency", 2, "--json")
    code, out, err = afield(
        tmp_path,
        *("train", "--tasks", "tasks.jsonl", "--model", POLICY, *where, "--set", "container.pull=never"),
        *sizes,
        *unlearned(tmp_path),
        timeout=400,
    )
    assert code == 0, err
    assert summary(out)["failed"] == 0 and summary(out)["rollouts"] == 4
