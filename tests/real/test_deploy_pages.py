"""The pages of docs/deploy, followed literally: their shell blocks run in order.

They run in a network namespace of their own, because they use the documented ports. The only changes: the
engine is a script in place of vLLM, and images are built without a registry.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from afield.utils.installations import python_environment
from support.gateways import POLICY
from support.images import ImageBuilder, image_builder
from support.pages import DOCS, blocks
from support.paths import ROOT
from support.servers import CACHE

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(900)]
PAGES = DOCS / "deploy"
VLLM = "vllm=http://host.containers.internal:8000"
SCRIPTED = "scripted=/models/script.jsonl"
SAY_YES = json.dumps({"match": "", "text": "Yes."})
CHAT = """
call() {  # SESSION: call the model with a session's key and URL
  python3 - "$1" <<'PYTHON'
import json, sys, urllib.request
session = json.loads(sys.argv[1])
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Is it so?"}]}).encode()
headers = {"authorization": "Bearer " + session["api_key"]}
request = urllib.request.Request(session["openai_base_url"] + "/chat/completions", body, headers)
print(json.loads(urllib.request.urlopen(request, timeout=60).read())["choices"][0]["message"]["content"])
PYTHON
}
"""


@pytest.fixture
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageBuilder]:
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        reason = "needs unshare and ip (on Debian: apt-get install util-linux iproute2)"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    with image_builder(tmp_path_factory.mktemp("pages")) as builder:
        yield builder


def shell(page: str) -> list[str]:
    return [textwrap.dedent(block) for block in blocks(PAGES / page, "bash")]


def checkout(folder: Path) -> Path:
    """What an operator has: the files of the repository, and a model."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt", ".dockerignore"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("src", "deploy"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for models in (folder / "models", folder / "deploy" / "models"):
        shutil.copytree(POLICY, models / "policy")
        (models / "script.jsonl").write_text(f"{SAY_YES}\n")
    for path in folder.rglob("models/**"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def follow(builder: ImageBuilder, folder: Path, script: str, *programs: Path) -> str:
    """Run a script in a network namespace; `podman` builds images in that of this process."""
    tools = folder / "tools"
    tools.mkdir()
    build = " ".join(("--network host --pull=never --isolation oci", *builder._pip()))
    program = shutil.which("podman")
    assert program  # its path, since `podman` is this script
    podman = " ".join(program if word == "podman" else word for word in builder.command)
    network = f"nsenter --net=/proc/{os.getpid()}/ns/net"
    (tools / "podman").write_text(
        f'#!/bin/sh\nif [ "$1" = build ]; then shift; exec {network} {podman} build {build} "$@"; fi\n'
        f'exec {podman} "$@"\n'
    )
    (tools / "podman").chmod(0o755)
    path = os.pathsep.join(map(str, (tools, *programs, os.environ["PATH"])))
    command = ["unshare", "--net", "bash", "-euo", "pipefail", "-c", f"ip link set lo up\n{script}"]
    environment = {**os.environ, "PATH": path, "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def test_containers_page_and_backup_of_the_operations_page(builder: ImageBuilder, tmp_path: Path) -> None:
    build, gateway, session, stop, relay, agent = shell("containers.md")
    assert VLLM in gateway
    drain, backup, restore = shell("operate.md")
    resume = drain.replace("/policy/pause", "/policy/resume").replace("""{"in_flight": "drain"}""", "{}")
    session_json = session.replace("curl --fail", "SESSION=$(curl --fail").rstrip() + ")\n"
    wait = gateway.splitlines()[-1]
    script = [
        "clean() { podman rm --force --time 0 gateway relay; podman volume rm --force gateway-store; }",
        "clean >/dev/null 2>&1 || true",
        "trap 'podman logs gateway | tail -20; clean' EXIT",
        CHAT,
        *(build, gateway.replace(VLLM, SCRIPTED), session_json, 'call "$SESSION"'),
        *(drain, resume, backup, restore, wait, 'call "$SESSION"'),
        *(stop, relay, agent),
    ]
    output = follow(builder, checkout(tmp_path), "\n".join(script))
    assert output.count("Yes.") == 2
    assert (tmp_path / "backup.sqlite").stat().st_size > 0
    assert '"relay"' in output and '"workers": 1' in output.replace(":1", ": 1")
    assert "\n0\n" in output  # exit code of the stopped gateway


def test_commands_of_the_compose_page_start_gateway_and_relay(builder: ImageBuilder, tmp_path: Path) -> None:
    python = python_environment(CACHE, "podman-compose", ["podman-compose==1.6.0"])
    environment, up, check = shell("compose.md")
    assert "--profile vllm " in up
    *health, session = check.splitlines()
    script = [
        "trap 'podman-compose logs | tail -20; podman-compose down --volumes' EXIT",
        CHAT,
        shell("containers.md")[0],
        environment,
        f"export ENGINE={SCRIPTED}",
        up.replace("--profile vllm ", ""),
        *health,
        f"SESSION=$({session})",
        'echo "$SESSION"',
        'call "$SESSION"',
    ]
    output = follow(builder, checkout(tmp_path), "\n".join(script), python.parent)
    assert "http://127.0.0.1:8500/c/lab/g/gateway/t/" in output
    assert "Yes." in output.splitlines()
