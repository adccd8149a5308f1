"""Starts stock veRL on this machine's processor, by the example's own script, and reads what veRL logged."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from afield.demo import shop
from support.verl_env import ROOT, verl_environment

PR_SET_PDEATHSIG = 1
SCRIPT = ROOT / "examples" / "verl" / "run.sh"
BRANCHING = ROOT / "tests" / "verl_cpu" / "branching_agent.py"
MODULES = "verl_on_cpu,afield.integrations.verl.plugin"
PAGE = ROOT / "docs" / "how-to" / "verl.md"
# What a machine without GPUs needs, and nothing of the algorithm.
CPU = (
    *("trainer.device=cpu", "trainer.resume_mode=disable", "trainer.val_before_train=False"),
    *("trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.logger=[console,file]"),
    # TransferQueue hangs where Ray counts two processors; the GPUs are not there, see verl_on_cpu.
    *("ray_kwargs.ray_init.num_cpus=32", "+ray_kwargs.ray_init.num_gpus=4"),
    "+ray_kwargs.ray_init.include_dashboard=False",
    f'ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES="{MODULES}"',
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "data.dataloader_num_workers=0",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.model.use_remove_padding=False",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    *("actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32"),
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
)

# Beside `CPU`, for configurations of real GPUs: their number, and what needs their kernels.
ONE_DEVICE = (
    *(
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    ),
    *("actor_rollout_ref.actor.ulysses_sequence_parallel_size=1", "actor_rollout_ref.rollout.dtype=float32"),
)


def write_tasks(python: Path, folder: Path, number: int, seed: int = 0) -> None:
    """`train.parquet` with the demo's tasks, by the converter a user has."""
    rows = (json.dumps(task) + "\n" for task in shop.tasks(seed, number))
    (folder / "tasks.jsonl").write_text("".join(rows))
    command = [python, "-m", "afield.integrations.verl.dataset", "tasks.jsonl", "train.parquet"]
    subprocess.run(command, cwd=folder, env=verl_environment(), check=True, capture_output=True)


def page_commands() -> list[list[str]]:
    """Commands of the page on veRL that start Python, word by word."""
    text = "".join(re.findall(r"^```(?:bash|console)\n(.*?)^```", PAGE.read_text(), re.M | re.S))
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [shlex.split(line.removeprefix("$ ")) for line in lines if "python -m " in line]


def page_command(name: str) -> list[str]:
    """The page's command that trains with a configuration."""
    [found] = [words for words in page_commands() if "--config-name" in words and name in words]
    return found


def command(mode: str, name: str, steps: int, more: Iterable[str]) -> list[str]:
    return [str(SCRIPT), mode, *CPU, *named(name, steps), *more]


def named(name: str, steps: int) -> tuple[str, ...]:
    return (
        f"trainer.total_training_steps={steps}",
        f"trainer.experiment_name={name}",
        "trainer.project_name=on",
    )


def environment(python: Path) -> dict[str, str]:
    return verl_environment(
        PYTHON=str(python),
        VERL_USE_EXTERNAL_MODULES="verl_on_cpu",  # in the driver: the workers' come with the configuration
        VERL_PLATFORM="cpu",
        VERL_ENGINE_DEVICE="cuda",
        HYDRA_FULL_ERROR="1",
    )


def train(
    python: Path, folder: Path, mode: str, name: str, steps: int, *more: str, timeout_s: float
) -> list[dict[str, Any]]:
    """Run the example's script to the end; what veRL logged, step by step."""
    return run(python, folder, command(mode, name, steps, more), name, timeout_s=timeout_s)


def run(
    python: Path, folder: Path, words: Sequence[str], name: str, *, timeout_s: float
) -> list[dict[str, Any]]:
    """Run a command that trains to the end; what veRL logged, step by step."""
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment(python),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code != 0:
        raise AssertionError(f"veRL ended with {code}:\n{log.read_text(errors='replace')[-6000:]}")
    return logged(folder, name)


def end_with_parent() -> None:
    """Also when that is killed: in a session of its own nobody else would end it. Ray's end with theirs."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def logged(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "on" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["data"] for line in lines]
