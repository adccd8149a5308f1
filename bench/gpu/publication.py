"""Seconds until an engine serves new weights, from shared memory and from disk, while calls run.

    python bench/gpu/publication.py [--sizes 0.5b,1.5b,8b] [--engine vllm|torch] [--small] [--json]

For each size: a trainer's policy with float32 masters, `afield gateway` in front of an engine on the same
GPU, and a load of concurrent calls. Versions are published in turn on disk and in memory. `seconds` is the
time from the start of a publication to the engine serving it. Afterwards each version rescores tokens that
were sampled with it and tokens of the next version: `exact` says that only its own agree. `--small` runs on a
CPU with the embedded engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from afield.gateway.client import HttpGateway
from afield.interfaces.gateway import SessionSpec
from afield.models.rounding import Rounding
from afield.trainers.model import PolicyModel
from afield.trainers.shared_publication import SharedPublication
from afield.types import Policy, Turn
from bench import report
from bench.gpu.loop import START_S, VLLM_ENVIRONMENT, gateway, started, text
from bench.gpu.model import write_model

WAYS = ("disk", "memory")
VLLM_FLAGS = ("--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "64")
VLLM_FLAGS += ("--gpu-memory-utilization", "0.3", "--logprobs-mode", "processed_logprobs")
VLLM_FLAGS += ("--weight-transfer-config", '{"backend": "ipc"}')
PORT = 8012
ROWS = 12
"""Replies of each version that are rescored."""
HOLD_S = 60.0
"""Longest time to wait for calls that begin and end with one version."""
MOVE = 0.3
"""Change of a weight between versions, in standard deviations of its tensor."""
AGREE, APART = 0.25, 4.0
"""Largest mean difference to the own version, and smallest ratio of the difference to another version."""


class Load(NamedTuple):
    calls: int
    """Calls at once."""
    tokens: int
    """Tokens of a reply."""
    prompt: int
    """Characters of a prompt, about one token each."""


class Sampled(NamedTuple):
    """Tokens of one call that one version sampled."""

    ids: list[int]
    """Prompt and reply."""
    first: int
    """Index of the first token in `ids`."""
    logprobs: list[float]
    """The engine's log-probabilities."""


@asynccontextmanager
async def vllm(model: Path, scratch: Path, dtype: str) -> AsyncIterator[str]:
    """vLLM that takes weights by CUDA IPC."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "m", "--port", str(PORT), "--dtype", dtype, *VLLM_FLAGS]
    environment = VLLM_ENVIRONMENT | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    log, url = scratch / "vllm.log", f"http://127.0.0.1:{PORT}"
    async with started(command, log, piped=False, **environment) as process, aiohttp.ClientSession() as http:
        for _ in range(2 * START_S):
            if process.poll() is not None:
                raise SystemExit(f"vLLM exited with {process.returncode}:\n{log.read_text()[-3000:]}")
            try:
                async with http.get(f"{url}/health") as response:
                    if response.status == 200:
                        break
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)
        else:
            raise SystemExit(f"vLLM did not start:\n{log.read_text()[-3000:]}")
        yield url


# --- load ----------------------------------------------------------------------------------------------


class Calls:
    """Calls that follow each other in each of several sessions, until `stop` is set."""

    def __init__(self, client: HttpGateway, load: Load) -> None:
        self._client, self._load = client, load
        self.stop = asyncio.Event()
        self.version = 0
        self.within: dict[int, int] = {}
        """Calls that began and ended with a version."""
        self.done, self.failed = 0, list[str]()
        self.turns: list[Turn] = []

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        limit = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(connector=connector, timeout=limit) as http:
            await asyncio.gather(*(self._session(number, http) for number in range(self._load.calls)))

    async def _session(self, number: int, http: aiohttp.ClientSession) -> None:
        session = await self._client.open(SessionSpec())
        headers = {"authorization": f"Bearer {session.api_key}"}
        count = 0
        while not self.stop.is_set():
            count += 1
            content = text(number * 1009 + count, self._load.prompt)
            body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": content}]}
            body |= {"max_tokens": self._load.tokens, "logprobs": True, "stream": count % 2 == 0}
            before = self.version
            url = f"{session.openai_base_url}/chat/completions"
            try:
                async with http.post(url, json=body, headers=headers) as response:
                    answer = await response.read()
                    ended = answer.rstrip().endswith((b"}", b"[DONE]"))
                    if response.status != 200 or not ended or b'"error"' in answer[:20]:
                        self.failed.append(f"{response.status}: {answer[-300:]!r}")
            except (aiohttp.ClientError, TimeoutError) as error:
                self.failed.append(repr(error))
            self.done += 1
            if before == self.version:
                self.within[before] = self.within.get(before, 0) + 1
        self.turns += (await self._client.finalize(session.id)).turns

    async def hold(self, version: int) -> None:
        """Wait until enough calls began and ended with this version."""
        self.version = version
        with_limit = time.monotonic() + HOLD_S
        while self.within.get(version, 0) < max(ROWS, self._load.calls) and time.monotonic() < with_limit:
            await asyncio.sleep(0.05)


# --- publication ---------------------------------------------------------------------------------------


def move(policy: PolicyModel, version: int) -> None:
    """Change all weights, so much that log-probabilities tell versions apart."""
    generator = torch.Generator(policy.device).manual_seed(version)
    with torch.no_grad():
        for parameter in policy.trainable:
            noise = torch.empty_like(parameter).normal_(generator=generator)
            parameter.add_(noise, alpha=MOVE * float(parameter.std()) if parameter.ndim > 1 else 0.0)


async def publish(
    way: str, version: int, policy: PolicyModel, sharing: SharedPublication, client: HttpGateway, where: Path
) -> dict[str, float]:
    """Publish one version; returns its times."""
    dtype: Any = "bfloat16" if policy.device.type == "cuda" else "float32"
    rounding = Rounding(dtype=dtype, seed=1, version=version)
    began = time.perf_counter()
    shares = sharing if way == "memory" else None
    await asyncio.to_thread(policy.export, where, rounding, shares)
    exported = time.perf_counter()
    await client.publish(Policy("m", version), str(where))
    served = time.perf_counter()
    if way == "memory" and not sharing.holds(where):
        raise SystemExit("the weights were not shared in memory")
    await asyncio.to_thread(sharing.finish)
    times = {
        "seconds": served - began,
        "export_s": exported - began,
        "load_s": served - exported,
        "file_s": time.perf_counter() - began if way == "memory" else exported - began,
    }
    return {name: round(seconds, 3) for name, seconds in times.items()}


# --- exactness -----------------------------------------------------------------------------------------


def sampled_by(turns: list[Turn]) -> tuple[dict[int, list[Sampled]], int]:
    """Tokens by the version that sampled them, and the number of those with an interval of versions."""
    rows: dict[int, list[Sampled]] = {}
    unclear = 0
    for turn in turns:
        if turn.parent is not None:
            continue
        ids, start = [*turn.delta_ids, *turn.token_ids], len(turn.delta_ids)
        for span in turn.versions:
            if span.low != span.high:
                unclear += span.end - span.start
                continue
            part = list(turn.logprobs[span.start : span.end])
            rows.setdefault(span.low, []).append(Sampled(ids[: start + span.end], start + span.start, part))
    return rows, unclear


def differences(model: Any, rows: list[Sampled]) -> list[float]:
    """Distances of the engine's log-probabilities from the model's."""
    found: list[float] = []
    for row in rows:
        ids = torch.tensor([row.ids], device=model.device)
        with torch.inference_mode():
            table = model(input_ids=ids).logits[0, row.first - 1 : -1].float().log_softmax(-1)
        own = table.gather(1, ids[0, row.first :, None])[:, 0].tolist()
        found += [abs(a - b) for a, b in zip(own, row.logprobs, strict=True)]
    return found


@contextmanager
def loaded(directory: Path, device: str) -> Iterator[Any]:
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device).eval()
    yield model
    del model
    torch.cuda.empty_cache()


def exactness(turns: list[Turn], directories: dict[int, Path], device: str) -> dict[str, Any]:
    """Compare the tokens of each version with its weights, and with those of the version before."""
    rows, unclear = sampled_by(turns)
    own: dict[int, float] = {}
    other: dict[int, float] = {}
    counts = {version: sum(len(row.logprobs) for row in rows.get(version, ())) for version in directories}
    for version, directory in directories.items():
        with loaded(directory, device) as model:
            if mine := rows.get(version, [])[-ROWS:]:
                own[version] = statistics.mean(differences(model, mine))
            if later := rows.get(version + 1, [])[-ROWS:]:
                other[version + 1] = statistics.mean(differences(model, later))
    exact = all(own.get(v, 9.0) < AGREE for v in directories) and all(
        other[v] > APART * own[v] + 0.01 for v in other
    )
    return {
        "exact": exact,
        "tokens": counts,
        "tokens_without_exact_version": unclear,
        "own_version": {v: round(value, 5) for v, value in own.items()},
        "version_before": {v: round(value, 5) for v, value in other.items()},
    }


# --- command -------------------------------------------------------------------------------------------


async def measure(size: str, args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() and not args.small else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    load = Load(4, 24, 60) if args.small else Load(args.calls, args.tokens, 160)
    model = await asyncio.to_thread(write_model, scratch / "m", size, device, dtype)
    policy = await asyncio.to_thread(PolicyModel, model, device=torch.device(device))
    sharing = SharedPublication(policy.sharing_device, required=True)
    directories = {0: model}
    times: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    began = time.perf_counter()
    async with AsyncExitStack() as stack:
        flags: tuple[str, ...] = ("--engine", "torch")
        if args.engine == "vllm":
            torch.cuda.empty_cache()
            url = await stack.enter_async_context(vllm(model, scratch, "bfloat16"))
            flags = ("--engine", f"vllm={url}", "--vllm-shared-weights")
        server = await stack.enter_async_context(gateway(model, scratch, "gateway", *flags))
        client = await stack.enter_async_context(HttpGateway(server.url, server.key))
        start_s = time.perf_counter() - began
        calls = Calls(client, load)
        running = asyncio.create_task(calls.run())
        await calls.hold(0)
        for number in range(2 * args.repeats):
            way, version = WAYS[number % 2], number + 1
            await asyncio.to_thread(move, policy, version)
            directories[version] = scratch / f"v{version}"
            took = await publish(way, version, policy, sharing, client, directories[version])
            times[way].append(took)
            print(json.dumps({"size": size, way: took}), file=sys.stderr, flush=True)
            await calls.hold(version)
        calls.stop.set()
        await running
        log = (scratch / "gateway.log").read_text()
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    del policy, sharing
    torch.cuda.empty_cache()
    found = await asyncio.to_thread(exactness, calls.turns, directories, device)
    return {
        "parameters": parameters,
        "bytes": parameters * dtype.itemsize,
        "start_s": round(start_s, 1),
        **{way: {name: [one[name] for one in times[way]] for name in times[way][0]} for way in WAYS},
        "calls": calls.done,
        "failed_calls": len(calls.failed),
        "failures": calls.failed[:3],
        "fell_back": log.count("is loaded from its file") + log.count("read from their file"),
        **found,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", default="0.5b,1.5b,8b", help="sizes of the model, of 0.5b, 1.5b and 8b")
    parser.add_argument("--engine", choices=("vllm", "torch"), default="vllm")
    parser.add_argument("--calls", type=int, default=32, help="concurrent calls")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of a reply")
    parser.add_argument("--repeats", type=int, default=2, help="publications of each way")
    parser.add_argument("--small", action="store_true", help="a tiny model and load, without a GPU")
    parser.add_argument("--save", action="store_true", help="save the result under bench/results")
    parser.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    args = parser.parse_args()
    if args.small:
        args.engine, args.sizes = "torch", "tiny"
    before = report.commit() if args.save else ""
    results: dict[str, Any] = {}
    for size in args.sizes.split(","):
        with tempfile.TemporaryDirectory(prefix="afield-publication-") as scratch:
            results[size] = asyncio.run(measure(size, args, Path(scratch)))
    if args.save:
        report.save("publication", results, before)
    if args.json:
        print(json.dumps(results))
    else:
        print(json.dumps(results, indent=2))
    good = all(one["exact"] and not one["failed_calls"] and not one["fell_back"] for one in results.values())
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
