"""A `vllm` package that starts a real HTTP server with vLLM's endpoints, in place of the real one.

`python_with_vllm` writes it and an interpreter that finds it. The server refuses flags that its version does
not have, starts a child process as vLLM does, and writes down its flags and environment.
"""

from __future__ import annotations

import sys
from pathlib import Path

from support.paths import SRC, TESTS

SERVER = """
import argparse, asyncio, json, os, subprocess, sys
from pathlib import Path

from afield.engines.scripted import ScriptedEngine
from support.fake_vllm import FakeVllm, serving
from support.vllm_calls import counting

VERSION = "{version}"
NEW = tuple(map(int, VERSION.split(".")[:2])) >= (0, 30)
parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ("model", "served-model-name", "host", "port", "logprobs-mode", "dtype", "gpu-memory-utilization",
             "tensor-parallel-size", "max-num-seqs", "max-loras", "max-lora-rank", "max-model-len",
             "max-num-batched-tokens", "seed"):
    parser.add_argument("--" + name)
for name in ("enforce-eager", "enable-lora", *(["enable-scale-out"] if NEW else [])):
    parser.add_argument("--" + name, action="store_true")
args = parser.parse_args()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
environment = {{k: v for k, v in os.environ.items() if k.startswith(("VLLM_", "CUDA_", "HF_"))}}
with Path(__file__).with_name("starts.jsonl").open("a") as out:
    line = {{"pid": os.getpid(), "child": child.pid, "flags": sys.argv[1:], "environment": environment}}
    out.write(json.dumps(line) + "\\n")


async def main():
    dev = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
    scale_out = args.enable_scale_out if NEW else True
    fake = FakeVllm(ScriptedEngine(counting), scale_out=scale_out, dev=dev, labels=NEW)
    async with serving(fake, int(args.port)):
        await asyncio.Event().wait()


asyncio.run(main())
"""


def python_with_vllm(root: Path, version: str = "0.32.0", server: str = SERVER) -> Path:
    """An interpreter in whose environment this version of vLLM is installed."""
    package = root / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for directory in (package, package.parent, package.parent.parent):
        (directory / "__init__.py").touch()
    scale_out = "enable_scale_out: bool = False" if version >= "0.30" else ""
    (package / "cli_args.py").write_text(f"model: str\n{scale_out}\n")
    (package / "api_server.py").write_text(server.format(version=version) if server is SERVER else server)
    metadata = root / "site" / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    python = root / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{root / "site"}:{TESTS}:{SRC}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def starts(root: Path) -> Path:
    """File with a line for each start of the server."""
    return root / "site" / "vllm" / "entrypoints" / "openai" / "starts.jsonl"
