"""Managed vLLM: flags by version, start, restart with the current weights, and end with its owner."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from afield.engines.vllm.server import (
    ManagedVllmEngine,
    VllmInstallation,
    VllmServerOptions,
    inspect_vllm,
    server_command,
    server_environment,
    split_devices,
)
from afield.errors import UsageError
from afield.gateway.engine_pool import EnginePool
from support.engine_calls import a_call, answer, ids
from support.processes import alive
from support.vllm_package import python_with_vllm, starts

pytestmark = pytest.mark.anyio
NEW = VllmInstallation(version="0.32.0", cpu=False, scale_out=True, importable=True)
OPTIONS = VllmServerOptions(model="/models/m", log="vllm.log")
BOUND_S = 60


def options(root: Path, **values: Any) -> VllmServerOptions:
    log = str(root / "logs" / "vllm-1.log")
    return VllmServerOptions(**{"model": str(root), "log": log, "environment": dict(os.environ), **values})


def started(root: Path) -> list[dict[str, Any]]:
    path = starts(root)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def until(predicate: Any) -> None:
    async with asyncio.timeout(BOUND_S):
        while not predicate():
            await asyncio.sleep(0.05)


def test_flags_and_variables_fit_gpus_and_cpus_and_the_version() -> None:
    gpu = structs.replace(
        OPTIONS, devices=(2, 3), tensor_parallel=2, memory=0.45, adapters=4, adapter_rank=32
    )
    command = " ".join(server_command(gpu, NEW, 9))
    for flag in ("--enable-scale-out", "--tensor-parallel-size 2", "--gpu-memory-utilization 0.45"):
        assert flag in command
    assert "--enable-lora --max-loras 4 --max-lora-rank 32" in command
    assert "--logprobs-mode processed_logprobs" in command
    environment = server_environment(gpu, NEW)
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment["VLLM_SERVER_DEV_MODE"] == environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    old = " ".join(server_command(gpu, structs.replace(NEW, version="0.26.0", scale_out=False), 9))
    assert "scale-out" not in old
    cpu = " ".join(server_command(OPTIONS, structs.replace(NEW, cpu=True), 9))
    assert "--dtype float32 --enforce-eager" in cpu
    assert "gpu" not in cpu


def test_servers_on_gpus_are_started_so_that_they_take_weights_from_memory() -> None:
    shared = structs.replace(OPTIONS, shared_weights=True)
    for installed, takes in ((NEW, True), (structs.replace(NEW, cpu=True), False)):
        assert ('{"backend": "ipc"}' in server_command(shared, installed, 9)) == takes
        variables = server_environment(shared, installed)
        assert ("VLLM_ALLOW_INSECURE_SERIALIZATION" in variables) == takes
    assert "--weight-transfer-config" not in server_command(OPTIONS, NEW, 9)


def test_devices_are_split_into_servers() -> None:
    assert split_devices((), 1, 0) == [()]
    assert split_devices((4, 5, 6, 7), 2, 0) == [(4, 5), (6, 7)]
    assert split_devices((4, 5, 6, 7), 1, 2) == [(4,), (5,)]
    with pytest.raises(UsageError, match=r"3 vLLM servers of 2 GPUs each need 6 devices, but .* has 4"):
        split_devices((0, 1, 2, 3), 2, 3)


async def test_an_interpreter_without_vllm_or_with_an_old_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no vLLM in the environment of .*--vllm-python"):
        await inspect_vllm("")
    with pytest.raises(UsageError, match="cannot be run"):
        await inspect_vllm(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"vLLM 0\.9\.2 .* is too old; 0\.26 is the oldest"):
        await inspect_vllm(str(python_with_vllm(tmp_path, "0.9.2")))


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0"])
async def test_a_dead_server_is_started_again_with_the_current_weights(tmp_path: Path, version: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    python = str(python_with_vllm(tmp_path / "env", version))
    engine = ManagedVllmEngine(options(tmp_path, python=python))
    async with EnginePool({"vllm-1": engine}, unavailable_timeout_s=BOUND_S) as pool:
        await pool.load(5, str(tmp_path))
        before = await answer(pool, a_call())
        (first,) = started(tmp_path / "env")
        assert ("--enable-scale-out" in first["flags"]) == (version == "0.32.0")
        os.kill(first["pid"], signal.SIGKILL)
        await until(lambda: len(started(tmp_path / "env")) == 2)
        after = await answer(pool, a_call())
        assert ids(after) == ids(before)
        assert {(chunk.low, chunk.high) for chunk in (*before, *after)} == {(5, 5)}
        assert not alive(first["child"])  # whatever a server started ends with it
        second = started(tmp_path / "env")[1]
    assert not alive(second["pid"]) and not alive(second["child"])
    assert "vllm.entrypoints.openai.api_server" in (tmp_path / "logs" / "vllm-1.log").read_text()


async def test_a_server_that_cannot_start_is_an_error_with_its_last_output(tmp_path: Path) -> None:
    python = str(python_with_vllm(tmp_path / "env", server="raise SystemExit('CUDA out of memory')"))
    last_words = r"vLLM 0\.32\.0 ended with status 1 while it started(?s:.*)out of memory"
    with pytest.raises(UsageError, match=last_words):
        async with EnginePool({"vllm-1": ManagedVllmEngine(options(tmp_path, python=python))}):
            pass


async def test_a_server_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    python = str(python_with_vllm(tmp_path / "env"))
    code = (
        "import asyncio, msgspec, sys\n"
        "from afield.engines.vllm.server import ManagedVllmEngine, VllmServerOptions\n"
        "async def main():\n"
        "    options = msgspec.json.decode(sys.argv[1], type=VllmServerOptions)\n"
        "    async with ManagedVllmEngine(options):\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    given = msgspec.json.encode(options(tmp_path, python=python)).decode()
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", code, given)
    try:
        await until(lambda: started(tmp_path / "env"))
    finally:
        owner.kill()
        await owner.wait()
    (server,) = started(tmp_path / "env")
    await until(lambda: not alive(server["pid"]) and not alive(server["child"]))
