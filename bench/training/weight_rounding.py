"""Share of a weight update that reaches the engine: stochastic against nearest rounding.

    python -m bench.training.weight_rounding --json [--model DIR] [--vllm start] [--out FILE]

From a bfloat16 checkpoint the embedded trainer makes optimizer steps on groups that the embedded engine
sampled: the whole model, and merged LoRA, at each learning rate. After 1, 4 and 16 steps the weights are
published in bfloat16, loaded by the engine, and new replies are sampled. Measured are

- `kept`: share of the update along its own direction in the engine's weights; 1.0 is ideal,
- `logprob_diff`: mean difference of sampler's and trainer's log-probabilities of the sampled tokens,
- `control`: the same difference between bfloat16 and float32 arithmetic with the published weights, which
  bfloat16 holds exactly.

`--vllm URL` (a server of the checkpoint printed at the start) or `--vllm start` adds vLLM. Engines serve in
bfloat16 on a GPU and in float32 copies of the published weights on a CPU. Progress goes to standard error;
the last line is JSON. The exit code is 0 when every stochastic row keeps at least 0.99 and differs by at
most 1.5 times the control.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from afield.engines.torch.engine import TorchEngine
from afield.engines.vllm.engine import VllmEngine
from afield.errors import AfieldError
from afield.interfaces.engine import Chunk, Engine, GenerateRequest
from afield.models.rounding import PublishedUpdate, Rounding, measure_update
from afield.settings.trainer import LoraOptions
from afield.trainers.diagnostics import BatchDiagnostics
from afield.trainers.grpo import GRPO
from afield.trainers.model import PolicyModel
from afield.trajectories import linear
from afield.turn_tree import TurnTree
from afield.types import (
    FinishReason,
    Group,
    Outcome,
    Rollout,
    RolloutResult,
    Sampling,
    Split,
    Task,
    Turn,
    TurnStatus,
    VersionSpan,
)

HOME = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "afield" / "models"
MODEL = HOME / "smollm2-135m-instruct"
KEPT, TIMES = 0.99, 1.5
ROUNDINGS = ("stochastic", "nearest")
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Write one sentence about the sea.",
    "How many legs does a spider have?",
    "Why is the sky blue?",
    "Give a word that rhymes with light.",
    "What do bees make?",
    "Tell me about the moon in one sentence.",
)


class Load(NamedTuple):
    """How much is sampled: groups to learn from, replies of each, replies to measure with, tokens of each."""

    groups: int
    replies: int
    measured: int
    tokens: int


LARGE = Load(16, 16, 64, 48)
SMALL = Load(4, 4, 8, 24)


def say(*words: object) -> None:
    print(f"[{time.strftime('%H:%M:%S')}]", *words, file=sys.stderr, flush=True)


# --- the checkpoint -------------------------------------------------------------------------------


def checkpoint(source: Path, into: Path) -> Path:
    """A copy in bfloat16 with untied embeddings, as every version of it will be."""
    PolicyModel(source, device=torch.device("cpu")).export(into, Rounding(dtype="bfloat16", nearest=True))
    for name in ("rounding.json", "weight_probe.json"):
        (into / name).unlink(missing_ok=True)
    config = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2))
    return into


def random_model(into: Path) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, vocab_size=2048, max_position_embeddings=512,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(4)  # as peaked as a trained model's
    model.save_pretrained(into)
    return into


def prompts(model: Path) -> list[tuple[int, ...]]:
    if not (model / "tokenizer.json").is_file():
        generator = torch.Generator().manual_seed(1)
        return [tuple(torch.randint(2048, (12,), generator=generator).tolist()) for _ in QUESTIONS]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    texts = [
        tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True)
        for one in conversations
    ]
    return [tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]


# --- sampling -------------------------------------------------------------------------------------


class Reply(NamedTuple):
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


async def ask(engine: Engine, name: str, prompt: tuple[int, ...], tokens: int) -> Reply:
    call = GenerateRequest(
        id=name, session_id=name, prompt_ids=prompt, sampling=Sampling(), max_tokens=tokens, stop_ids=()
    )
    async with aclosing(engine.generate(call)) as stream:
        chunks: list[Chunk] = [chunk async for chunk in stream]
    return Reply(
        prompt,
        tuple(token for chunk in chunks for token in chunk.token_ids),
        tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
    )


async def sample(engine: Engine, name: str, prompt: tuple[int, ...], count: int, tokens: int) -> list[Reply]:
    return list(await asyncio.gather(*(ask(engine, f"{name}-{n}", prompt, tokens) for n in range(count))))


def group_of(name: str, replies: Sequence[Reply], version: int = 0) -> Group:
    """A reply is worth more the more different tokens it has."""
    finished: list[RolloutResult] = []
    for n, reply in enumerate(replies):
        forest = TurnTree()
        forest.add(
            Turn(
                id=f"{name}-{n}",
                root="root",
                parent=None,
                delta_ids=reply.prompt,
                token_ids=reply.ids,
                logprobs=reply.logprobs,
                versions=(VersionSpan(0, len(reply.ids), version, version),),
                finish_reason=FinishReason.LENGTH,
                status=TurnStatus.COMMITTED,
                sampling=Sampling(),
                digest=f"{name}-{n}",
            )
        )
        rollout = Rollout(id=f"{name}-{n}", exp_id="publish", group_id=name, task=Task(name, {}))
        reward = len(set(reply.ids)) / len(reply.ids) + n / 1000
        outcome = Outcome(rollout_id=rollout.id, attempt=1, reward=reward)
        finished.append(
            RolloutResult(rollout=rollout, outcome=outcome, trajectories=linear(forest).trajectories)
        )
    return Group(id=name, task_id=name, epoch=0, split=Split.TRAIN, finished=tuple(finished))


# --- measuring ------------------------------------------------------------------------------------


class Served(NamedTuple):
    """An engine that serves the checkpoint; `dtype` is what it holds weights in."""

    name: str
    engine: Engine
    dtype: str


def masters(trainer: GRPO) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in trainer.policy.weights().items()}


def reached(served: Served, directory: Path, start: Path, trainer: GRPO) -> float:
    """Of the embedded engine its weights themselves; of a server the files that it loads in its dtype."""
    exact, total = masters(trainer), PublishedUpdate()
    engine = served.engine
    with safe_open(start / "model.safetensors", framework="pt") as before:
        if isinstance(engine, TorchEngine):
            held = {parameter.names[0]: parameter.tensor for parameter in engine._parameters}
            for name, tensor in held.items():
                total = total.plus(measure_update(exact[name], tensor, before.get_tensor(name)))
        else:
            with safe_open(directory / "model.safetensors", framework="pt") as files:
                for name in files.keys():  # noqa: SIM118
                    loaded = files.get_tensor(name).to(getattr(torch, served.dtype))
                    total = total.plus(measure_update(exact[name], loaded, before.get_tensor(name)))
    return total.kept or 0.0


def compared(trainer: GRPO, published: Path, replies: Sequence[Reply]) -> tuple[float, float]:
    """How far sampler and trainer are apart, and the control, both about these tokens."""
    rows = trainer.batch([group_of("measured", replies)]).rows
    audit = BatchDiagnostics()
    trainer.optimizer.score(rows, audit)
    control = GRPO(published, lr=0.0, device=str(trainer.device)).optimizer.control_logprob_diff(
        rows, torch.bfloat16
    )
    assert control is not None
    return audit.summary()["sampler_trainer_logprob_diff_mean"], control


class Bench:
    def __init__(self, start: Path, load: Load, device: str, scratch: Path) -> None:
        self.start, self.load, self.device, self.scratch = start, load, device, scratch
        self.prompts = prompts(start)
        self.version = 0
        self.kept: dict[str, dict[str, Any]] = {}
        self.diff: dict[str, dict[str, Any]] = {}
        self.controls: list[float] = []
        self.missed: list[str] = []

    async def groups(self, engine: Engine) -> list[list[Group]]:
        """One step's worth each."""
        steps: list[list[Group]] = []
        for n in range(self.load.groups):
            prompt = self.prompts[n % len(self.prompts)]
            replies = await sample(engine, f"learn-{n}", prompt, self.load.replies, self.load.tokens)
            steps.append([group_of(f"g{n}", replies)])
        return steps

    async def run(
        self, kind: str, rate: float, marks: Sequence[int], steps: list[list[Group]], engines: list[Served]
    ) -> None:
        lora = LoraOptions(rank=16, publish="merged") if kind == "lora" else None
        trainer = await asyncio.to_thread(
            GRPO, self.start, lr=rate, device=self.device, lora=lora, importance="off"
        )
        name = f"{kind} {rate:g}"
        for step in range(1, max(marks) + 1):
            await asyncio.to_thread(trainer.step, steps[(step - 1) % len(steps)])
            if step in marks:
                await self.measure(name, step, trainer, engines)

    async def measure(self, name: str, step: int, trainer: GRPO, engines: list[Served]) -> None:
        for rounding in ROUNDINGS:
            self.version += 1
            trainer.rounding = "nearest" if rounding == "nearest" else "stochastic"
            directory = self.scratch / f"v{self.version}"
            await asyncio.to_thread(trainer.publish, directory, version=self.version, dtype="bfloat16")
            for served in list(engines):
                try:
                    await served.engine.load(self.version, str(directory))
                except AfieldError as error:  # the others go on
                    say(f"{served.name} is left out: {error}")
                    self.missed.append(f"{served.name} {name} after {step}: {error}")
                    engines.remove(served)
                    continue
                kept = await asyncio.to_thread(reached, served, directory, self.start, trainer)
                replies: list[Reply] = []
                each = max(1, self.load.measured // len(self.prompts))
                for n, prompt in enumerate(self.prompts[: self.load.measured]):
                    replies += await sample(
                        served.engine, f"{name}-{step}-{rounding}-{n}", prompt, each, self.load.tokens
                    )
                apart, control = await asyncio.to_thread(compared, trainer, directory, replies)
                self.note(served.name, name, step, rounding, kept, apart, control)
            shutil.rmtree(directory, ignore_errors=True)

    def note(
        self, engine: str, name: str, step: int, rounding: str, kept: float, apart: float, control: float
    ) -> None:
        self.kept.setdefault(engine, {}).setdefault(name, {}).setdefault(str(step), {})[rounding] = round(
            kept, 4
        )
        row = self.diff.setdefault(engine, {}).setdefault(name, {}).setdefault(str(step), {})
        row[rounding] = round(apart, 5)
        row[f"{rounding}_times_control"] = round(apart / control, 3)
        self.controls.append(control)
        if rounding == "stochastic" and (kept < KEPT or apart > TIMES * control):
            self.missed.append(
                f"{engine} {name} after {step}: kept {kept:.4f}, {apart / control:.2f} x control"
            )
        say(
            f"{engine:8} {name:12} after {step:2}  {rounding:10} kept {kept:7.4f}"
            f"  apart {apart:.5f}  control {control:.5f}  {apart / control:.2f}x"
        )

    def result(self) -> dict[str, Any]:
        control = sum(self.controls) / len(self.controls)
        return {"kept": self.kept, "logprob_diff": self.diff, "control": round(control, 5)}


# --- vLLM -----------------------------------------------------------------------------------------


def start_vllm(model: Path, dtype: str, log: Path, python: str) -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", dtype]
    command += ["--served-model-name", "policy", "--max-model-len", "512", "--enforce-eager"]
    command += ["--logprobs-mode", "processed_logprobs", "--host", "127.0.0.1", "--port", str(port)]
    if torch.cuda.is_available():
        command += ["--gpu-memory-utilization", "0.25", "--max-num-seqs", "128"]
    else:
        command += ["--enable-scale-out"]
    settings = {**os.environ, **SETTINGS}
    if not torch.cuda.is_available():
        settings["OMP_NUM_THREADS"] = "1"
        settings.pop("PYTHONPATH", None)
    say("vLLM:", " ".join(command))
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=settings, stdout=out, stderr=out, start_new_session=True)
    return process, f"http://127.0.0.1:{port}"


async def until_up(process: subprocess.Popen[bytes], url: str, log: Path, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while time.monotonic() < end and process.poll() is None:
        try:
            await asyncio.to_thread(urllib.request.urlopen, f"{url}/health", timeout=5)
        except OSError:
            await asyncio.sleep(1)
        else:
            say("vLLM is up")
            return
    text = await asyncio.to_thread(log.read_text, errors="replace")
    raise SystemExit("vLLM did not start:\n" + "\n".join(text.splitlines()[-40:]))


@asynccontextmanager
async def vllm(chosen: argparse.Namespace, start: Path, dtype: str, scratch: Path) -> AsyncIterator[Any]:
    """A function that gives the server once it is up; it starts meanwhile."""
    if chosen.vllm != "start":

        async def there() -> str:
            return chosen.vllm

        yield there
        return
    log = scratch / "vllm.log"
    process, url = start_vllm(start, dtype, log, chosen.vllm_python)

    async def ready() -> str:
        await until_up(process, url, log, chosen.vllm_wait_s)
        return url

    try:
        yield ready
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


# --- the program ----------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON (always so)")
    parser.add_argument("--model", type=Path, default=MODEL, help="model directory (default: SmolLM2)")
    parser.add_argument("--random", action="store_true", help="small random model instead, for quick tests")
    parser.add_argument("--vllm", default="", help="URL of a server of the printed checkpoint, or: start")
    parser.add_argument("--vllm-python", default=sys.executable, help="Python that has vLLM")
    parser.add_argument("--vllm-dtype", default="", help="bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--vllm-wait-s", type=float, default=600.0, help="seconds to wait for its start")
    parser.add_argument("--engine-dtype", default="", help="of the embedded engine; as --vllm-dtype")
    parser.add_argument("--rates", default="1e-6,1e-5", help="learning rates, with commas")
    parser.add_argument("--steps", default="1,4,16", help="steps after which is measured")
    parser.add_argument("--kinds", default="whole,lora", help="of whole, lora")
    parser.add_argument("--large", action="store_true", help="sample as much as on a GPU")
    parser.add_argument("--out", type=Path, help="write the result here, too, after every row")
    return parser.parse_args()


async def run(chosen: argparse.Namespace, scratch: Path) -> int:
    cuda = torch.cuda.is_available()
    device, usual = ("cuda", "bfloat16") if cuda else ("cpu", "float32")
    if not cuda:
        torch.set_num_threads(1)
    source = random_model(scratch / "random") if chosen.random else chosen.model
    if not source.is_dir():
        raise SystemExit(f"{source} is not there; make it with examples/smollm/get.py, or give --model DIR")
    start = checkpoint(source, scratch / "checkpoint")
    say(f"checkpoint in bfloat16: {start}")
    marks = [int(word) for word in chosen.steps.split(",")]
    bench = Bench(start, LARGE if cuda or chosen.large else SMALL, device, scratch)
    async with AsyncExitStack() as stack:
        ready = None
        if chosen.vllm:
            dtype = chosen.vllm_dtype or usual
            ready = await stack.enter_async_context(vllm(chosen, start, dtype, scratch))
        slots = max(bench.load.replies, bench.load.measured)
        embedded = TorchEngine(
            start, dtype=chosen.engine_dtype or usual, device=device, max_slots=slots, max_context=256
        )
        await stack.enter_async_context(embedded)
        info = await embedded.info()
        say("embedded engine:", info.dtype, *info.notes)
        engines = [Served("embedded", embedded, info.dtype)]
        steps = await bench.groups(embedded)
        say(f"sampled {sum(len(g.finished) for groups in steps for g in groups)} rollouts to learn from")
        if ready is not None:
            server = await stack.enter_async_context(VllmEngine(await ready()))
            served_dtype = (await server.info()).dtype
            say("vLLM serves in", served_dtype or "a dtype it does not tell")
            engines.append(Served("vllm", server, served_dtype or chosen.vllm_dtype or usual))
        for kind in chosen.kinds.split(","):
            for rate in map(float, chosen.rates.split(",")):
                await bench.run(kind, rate, marks, steps, engines)
                if chosen.out:
                    chosen.out.write_text(json.dumps(bench.result()) + "\n")
    for line in bench.missed:
        say("MISSED:", line)
    print(json.dumps(bench.result()), flush=True)
    return 1 if bench.missed else 0


def main() -> int:
    chosen = arguments()
    with tempfile.TemporaryDirectory(prefix="afield-publish-") as scratch:
        return asyncio.run(run(chosen, Path(scratch)))


if __name__ == "__main__":
    sys.exit(main())
