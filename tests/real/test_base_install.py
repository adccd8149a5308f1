"""The base install as an agent's image has it: a wheel in a bare environment, no torch, no boto3."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.real
ROOT = Path(__file__).parent.parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "afield" / "real"
AGENT = """
import afield

@afield.agent
def agent(task, rollout):
    return task["x"] * 2
"""


@pytest.fixture(scope="module")
def python() -> Path:
    """An environment of its own under the cache, with nothing but afield's base install."""
    pins = hashlib.sha256((ROOT / "constraints.txt").read_bytes() + sys.version.encode()).hexdigest()[:12]
    home = CACHE / f"base-{pins}"
    python = home / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
    install = [
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "-c",
        ROOT / "constraints.txt",
        "--force-reinstall",
        ROOT,
    ]
    subprocess.run(install, check=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    return python


def test_the_base_install_is_light(python: Path) -> None:
    listed = subprocess.run([python, "-m", "pip", "list", "--format=json"], check=True, capture_output=True)
    names = {row["name"].lower() for row in json.loads(listed.stdout)} - {"pip", "setuptools", "wheel"}
    assert names == {"afield", "click", "h11", "msgspec", "uvicorn"}


def test_the_command_says_which_extra_is_missing(python: Path, tmp_path: Path) -> None:
    afield = python.parent / "afield"
    assert subprocess.run([afield, "--version"], capture_output=True, check=False).returncode == 0
    (tmp_path / "my_agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"x": 1}\n')
    run_options = ("my_agent.py:agent", "--tasks", "tasks.jsonl", "--model", "m")
    commands = {("demo",): "demo", ("conformance",): "gateway", ("inspect-template", "m"): "gateway"}
    commands |= {("train", *run_options): "train", ("eval", *run_options): "train"}
    for command, extra in commands.items():
        run = subprocess.run([afield, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert run.returncode == 2, run.stderr
        assert f"pip install 'afield[{extra}]'" in run.stderr


def test_an_agent_serves_and_delivers_from_the_base_install(python: Path, tmp_path: Path) -> None:
    (tmp_path / "my_agent.py").write_text(AGENT)
    store = tmp_path / "store"
    serve = [python, "-m", "afield.sdk.serve", "my_agent.py:agent", "--watch-stdin"]
    serve += ["--unsigned", "--outcome-root", str(store)]
    with subprocess.Popen(serve, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout and server.stdin
        port = int(server.stdout.readline())
        rollout = {
            "exp_id": "e",
            "input_id": "t",
            "rollout_id": "r",
            "attempt": 1,
            "group_id": "g",
            "session_id": "r.1",
            "base_url": "http://127.0.0.1:9/s/r.1",
            "api_key": "k",
            "model_id": "m",
            "outcome_url": store.as_uri(),
        }
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(port, {"x": 1})
        assert refused.value.code == 400
        refused.value.close()
        assert post(port, {"x": 21, "_rollout": rollout})["status"] == "processing"
        commit = store / "e" / "commits" / "r.1.json"
        end = time.monotonic() + 120
        while not commit.exists() and time.monotonic() < end:
            time.sleep(0.05)
        record = json.loads((store / json.loads(commit.read_text())["data_key"]).read_text())
        assert record["outcome"]["reward"] == 42.0
        server.stdin.close()
        server.wait(120)


def post(port: int, body: dict) -> dict:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/invocations", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())
