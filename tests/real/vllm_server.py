"""A real vLLM on the CPU, in an environment of its own under the cache, for as long as it is needed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from afield.conformance import pins
from afield.utils.installations import python_environment
from support.ports import free_ports

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "afield" / "envs"
START_S = 600
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all servers of a machine share its first core
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}


TORCHVISION = "torchvision==0.28.0"
# The wheel is CUDA's, and torch is the CPU's: what is compiled in it cannot be loaded, and is not used.
CUSTOMIZE = """
import sys


class Before:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            Before.kept = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                Before.kept.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, Before())
"""


def with_torchvision() -> dict[str, str]:
    """What a server needs in its environment for images: vLLM's processors want torchvision."""
    python = python_environment(CACHE, "vllm", pins.VLLM, without=pins.VLLM_WITHOUT)
    place = CACHE / TORCHVISION.replace("==", "-")
    if not place.is_dir():
        with tempfile.TemporaryDirectory(dir=CACHE) as fresh:
            command = [
                str(python),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--target",
                f"{fresh}/made",
            ]
            done = subprocess.run([*command, TORCHVISION], capture_output=True, text=True, check=False)
            if done.returncode:
                why = f"{TORCHVISION} cannot be had here: {done.stderr[-500:]}"
                pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
            (Path(fresh) / "made" / "sitecustomize.py").write_text(CUSTOMIZE)
            with contextlib.suppress(OSError):  # another test was faster
                (Path(fresh) / "made").rename(place)
    return {"PYTHONPATH": str(place)}


@contextmanager
def serving_vllm(
    model: Path, log: Path, *options: str, settings: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The url of a server of `model`, under the name "policy"."""
    python = python_environment(CACHE, "vllm", pins.VLLM, without=pins.VLLM_WITHOUT)
    port = str(free_ports(1)[0])
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "policy", "--dtype", "float32", "--max-model-len", "2048"]
    command += ["--enforce-eager", "--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    command += ["--host", "127.0.0.1", "--port", port, *options]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env={**os.environ, **SETTINGS, **(settings or {})},
            stdout=out,
            stderr=out,
            cwd=log.parent,
            start_new_session=True,
        )
    try:
        _wait_until_up(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


def _wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail("vLLM did not start:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-30:]))
