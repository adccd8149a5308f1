"""Tokens per second through the gateway on one GPU: the embedded engine, and vLLM.

    python bench/gpu/loop.py [--parts NAME,...] [--slots N] [--json]

Sessions of several turns, all at once: each turn sends the whole conversation and samples a reply of fixed
length. `embedded` and `embedded_streamed` go through `afield gateway` with the embedded engine, `vllm` and
`vllm_streamed` through a gateway in front of vLLM, `vllm_alone` straight to the chat endpoint of vLLM, with
the same log-probabilities. `logprob_diff` is the mean distance of the embedded engine from the
model's own forward pass in the same dtype; the control is the distance of that pass from float32. `--small`
runs without a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench import report
from bench.gpu.model import write_model

PARTS = ("embedded", "embedded_streamed", "vllm", "vllm_alone", "logprobs")
START_S = 400
VLLM_FLAGS = ("--max-num-seqs", "512", "--gpu-memory-utilization", "0.6")
VLLM_FLAGS += ("--logprobs-mode", "processed_logprobs")
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"
}  # fmt: skip


class Load(NamedTuple):
    sessions: int
    turns: int
    tokens: int
    first: int
    """Characters of the first message, about one token each."""
    later: int
    """Characters of each later message."""


class Target(NamedTuple):
    """Where the calls of one session go."""

    url: str
    key: str


def text(seed: int, length: int) -> str:
    words = (f"{(seed * 7919 + n * 104729) % 99991:05d}" for n in range(length // 6 + 1))
    return " ".join(words)[:length]


# --- servers -------------------------------------------------------------------------------------------


class Server(NamedTuple):
    process: subprocess.Popen[bytes]
    url: str
    key: str


@asynccontextmanager
async def started(
    command: list[str], log: Path, *, piped: bool, **environment: str
) -> AsyncIterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(  # noqa: ASYNC220
            command, stdout=subprocess.PIPE if piped else out, stderr=out, env=os.environ | environment
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, 20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@asynccontextmanager
async def gateway(model: Path, scratch: Path, name: str, *flags: str) -> AsyncIterator[Server]:
    key = secrets.token_urlsafe(24)
    command = [sys.executable, "-m", "afield", "gateway", "--model", str(model), "--port", "0", "--json"]
    command += ["--store", str(scratch / f"{name}-store"), "--admin-key", key, *flags]
    async with started(command, scratch / f"{name}.log", piped=True) as process:
        assert process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), START_S)
        if not line:
            raise SystemExit((scratch / f"{name}.log").read_text()[-3000:])
        yield Server(process, json.loads(line)["local_url"], key)


@asynccontextmanager
async def vllm(model: Path, scratch: Path, dtype: str) -> AsyncIterator[Server]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "m", "--port", "8011", "--dtype", dtype, *VLLM_FLAGS]
    log = scratch / "vllm.log"
    async with (
        started(command, log, piped=False, **VLLM_ENVIRONMENT) as process,
        aiohttp.ClientSession() as http,
    ):
        url = "http://127.0.0.1:8011"
        for _ in range(START_S):
            if process.poll() is not None:
                raise SystemExit(f"vLLM exited with {process.returncode}:\n{log.read_text()[-3000:]}")
            try:
                async with http.get(f"{url}/health") as response:
                    if response.status == 200:
                        break
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(1)
        yield Server(process, url, "none")


# --- load ----------------------------------------------------------------------------------------------


async def targets(server: Server, count: int, http: aiohttp.ClientSession, *, direct: bool) -> list[Target]:
    if direct:
        return [Target(f"{server.url}/v1", server.key)] * count
    opened: list[Target] = []
    for _ in range(count):
        headers = {"authorization": f"Bearer {server.key}"}
        async with http.post(f"{server.url}/sessions", json={}, headers=headers) as response:
            session = await response.json()
            opened.append(Target(session["openai_base_url"], session["api_key"]))
    return opened


async def conversation(
    number: int, target: Target, load: Load, http: aiohttp.ClientSession, *, stream: bool
) -> list[int]:
    """Run one session; returns the tokens of each turn."""
    messages: list[dict[str, str]] = []
    counts: list[int] = []
    for turn in range(load.turns):
        length = load.first if turn == 0 else load.later
        messages.append({"role": "user", "content": text(number * 31 + turn, length)})
        body: dict[str, Any] = {
            "model": "m",
            "messages": messages,
            "max_tokens": load.tokens,
            "logprobs": True,
        }
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        headers = {"authorization": f"Bearer {target.key}"}
        async with http.post(f"{target.url}/chat/completions", json=body, headers=headers) as response:
            if response.status != 200:
                raise SystemExit(f"{response.status}: {(await response.text())[:500]}")
            reply, count = await (streamed(response) if stream else whole(response))
        messages.append({"role": "assistant", "content": reply})
        counts.append(count)
    return counts


async def whole(response: aiohttp.ClientResponse) -> tuple[str, int]:
    answer = json.loads(await response.read())
    return answer["choices"][0]["message"]["content"] or "", answer["usage"]["completion_tokens"]


async def streamed(response: aiohttp.ClientResponse) -> tuple[str, int]:
    pieces, count = [], 0
    async for line in response.content:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        pieces += [choice["delta"].get("content") or "" for choice in event["choices"]]
        if usage := event.get("usage"):
            count = usage["completion_tokens"]
    return "".join(pieces), count


async def measure(
    server: Server, load: Load, *, stream: bool = False, direct: bool = False
) -> dict[str, Any]:
    """Tokens per second of one run of the load, after a smaller one that warms up."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as http:

        async def run(sizes: Load, first: int) -> tuple[int, float]:
            opened = await targets(server, sizes.sessions, http, direct=direct)
            began = time.perf_counter()
            turns = await asyncio.gather(
                *(conversation(first + n, t, sizes, http, stream=stream) for n, t in enumerate(opened))
            )
            return sum(map(sum, turns)), time.perf_counter() - began

        await run(load._replace(turns=min(2, load.turns)), 100_000)
        tokens, seconds = await run(load, 0)
    cpu = tree_cpu(server.process.pid)
    return {"tokens": tokens, "seconds": round(seconds, 2), "per_s": round(tokens / seconds), "cpu_s": cpu}


def tree_cpu(pid: int) -> dict[str, float]:
    """CPU seconds since the start of a process and of its children."""
    tick = os.sysconf("SC_CLK_TCK")
    seconds: dict[str, float] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
            name = Path(f"/proc/{entry.parent.name}/cmdline").read_bytes().split(b"\0")[2:4]
        except OSError:
            continue
        if int(fields[1]) == pid or int(entry.parent.name) == pid:
            label = b" ".join(name).decode(errors="replace")[:40]
            seconds[f"{entry.parent.name} {label}"] = round((int(fields[11]) + int(fields[12])) / tick, 2)
    return seconds


# --- exactness -----------------------------------------------------------------------------------------


async def logprobs(server: Server, model: Path, load: Load, dtype: str) -> dict[str, float]:
    """Distance of the engine's log-probabilities from the model's own pass, and of that from float32."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[tuple[list[int], list[int], list[float]]] = []
    async with aiohttp.ClientSession() as http:
        for number, target in enumerate(await targets(server, 8, http, direct=False)):
            content = text(number, load.first)
            body = {"model": "m", "messages": [{"role": "user", "content": content}], "logprobs": True}
            body |= {"max_tokens": load.tokens, "return_token_ids": True}
            headers = {"authorization": f"Bearer {target.key}"}
            async with http.post(f"{target.url}/chat/completions", json=body, headers=headers) as response:
                answer = await response.json()
            choice = answer["choices"][0]
            sampled = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            rows.append((answer["prompt_token_ids"], choice["token_ids"], sampled))
    scores: dict[str, list[float]] = {"own": [], "exact": []}
    for name, kind in (("own", dtype), ("exact", "float32")):
        own = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, kind)).to(device).eval()
        for prompt, reply, _ in rows:
            ids = torch.tensor([prompt + reply], device=device)
            with torch.inference_mode():
                table = own(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            scores[name] += table.gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
        del own
    engine = [value for _, _, sampled in rows for value in sampled]

    def apart(a: list[float], b: list[float]) -> float:
        return round(statistics.mean(abs(x - y) for x, y in zip(a, b, strict=True)), 6)

    return {
        "tokens": len(engine),
        "engine_from_own": apart(engine, scores["own"]),
        "engine_from_float32": apart(engine, scores["exact"]),
        "own_from_float32": apart(scores["own"], scores["exact"]),
    }


# --- command -------------------------------------------------------------------------------------------


async def bench(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    dtype = "bfloat16" if cuda else "float32"
    device = "cuda" if cuda else "cpu"
    model = write_model(scratch / "m", "tiny" if args.small else "0.38b", device, getattr(torch, dtype))
    load = Load(8, 2, 16, 120, 40) if args.small else Load(args.sessions, args.turns, args.tokens, 160, 45)
    torch.cuda.empty_cache()
    results: dict[str, Any] = {"load": load._asdict(), "dtype": dtype}

    def note(name: str, result: Any) -> None:
        results[name] = result
        print(json.dumps({name: result}), file=sys.stderr, flush=True)

    wanted = set(args.parts.split(","))
    slots = ("--slots", str(args.slots)) if args.slots else ()
    if wanted & {"embedded", "embedded_streamed", "logprobs"}:
        async with gateway(model, scratch, "embedded", *slots) as server:
            if "embedded" in wanted:
                note("embedded", await measure(server, load))
            if "embedded_streamed" in wanted:
                note("embedded_streamed", await measure(server, load, stream=True))
            if "logprobs" in wanted:
                note("logprobs", await logprobs(server, model, load, dtype))
    if wanted & {"vllm", "vllm_alone"}:
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(vllm(model, scratch, dtype))
            if "vllm_alone" in wanted:
                note("vllm_alone", await measure(engine, load, direct=True))
            if "vllm" in wanted:
                server = await stack.enter_async_context(
                    gateway(model, scratch, "vllm-gateway", "--engine", f"vllm={engine.url}")
                )
                note("vllm", await measure(server, load))
                note("vllm_streamed", await measure(server, load, stream=True))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help=f"parts to measure, of {', '.join(PARTS)}")
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument(
        "--slots", type=int, default=0, help="slots of the embedded engine; 0 for its default"
    )
    parser.add_argument("--small", action="store_true", help="a tiny model and load, without a GPU")
    parser.add_argument("--save", action="store_true", help="save the result under bench/results")
    parser.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    args = parser.parse_args()
    before = report.commit() if args.save else ""
    with tempfile.TemporaryDirectory(prefix="afield-gpu-") as scratch:
        results = asyncio.run(bench(args, Path(scratch)))
    if args.save:
        report.save("gpu-loop", results, before)
    line = {
        "embedded": results.get("embedded", {}).get("per_s"),
        "embedded_streamed": results.get("embedded_streamed", {}).get("per_s"),
        "vllm": results.get("vllm", {}).get("per_s"),
        "vllm_alone": results.get("vllm_alone", {}).get("per_s"),
        "logprob_diff": results.get("logprobs", {}).get("engine_from_own"),
    }
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
