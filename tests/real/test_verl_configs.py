"""The page's configurations for GPUs: stock veRL accepts them, and they train on this machine's processor.

Such a run changes keys of the device only (`launching.CPU`, `ONE_DEVICE`), and the sizes of a step. Its vLLM
is a real one, which afield starts for each of veRL's replicas.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from afield.conformance import pins
from afield.demo import shop
from afield.errors import Unavailable
from afield.settings.environment import Environment
from afield.utils.installations import python_environment
from support.gateways import POLICY
from support.verl_env import ROOT, verl_environment, verl_python
from verl_cpu import launching

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
HERE = Path(__file__).parent
RUN_S = 900
LEFT_S = 60.0
TASKS, ROLLOUTS = 4, 4
SIZES = (
    *(f"data.train_batch_size={TASKS}", f"actor_rollout_ref.actor.ppo_mini_batch_size={TASKS}"),
    *(f"actor_rollout_ref.rollout.n={ROLLOUTS}", "actor_rollout_ref.rollout.max_num_seqs=16"),
    *("data.max_prompt_length=512", "data.max_response_length=512", "afield.max_tokens=16"),
    *("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",),
    *("afield.concurrency=16", "afield.workers=2"),
    *("actor_rollout_ref.actor.optim.lr=1e-3", "actor_rollout_ref.actor.optim.lr_warmup_steps=0"),
)
SERVERS = {"gpus_1": 0, "gpus_8": 2, "gpus_64": 1}
"""GPUs of standalone servers, in place of the configuration's; 0 for servers on the trainer's."""


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return verl_python()
    except Unavailable as error:
        pytest.fail(str(error)) if os.environ.get("CI") else pytest.skip(str(error))


@pytest.fixture(scope="module")
def vllm_python() -> Path:
    envs = Environment.read().envs
    return python_environment(envs, "vllm", pins.VLLM, without=pins.VLLM_WITHOUT)


@pytest.mark.parametrize(("suite", "least"), [("verl_config_suite.py", 20), ("verl_servers_suite.py", 1)])
def test_stock_veRL_accepts_each_configuration_and_its_servers(
    python: Path, suite: str, least: int, tmp_path: Path
) -> None:
    command = [python, "-m", "pytest", HERE / suite, "-m", "real", "-q", "--timeout", "400"]
    command += ["-o", "filterwarnings=default", "-p", "no:cacheprovider", "--basetemp", tmp_path / "made"]
    done = subprocess.run(
        command, cwd=ROOT, env=verl_environment(), capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= least, done.stdout[-2000:]


def write_data(python: Path, folder: Path) -> None:
    """The page's files, by its commands."""
    for name, seed in (("tasks", 0), ("heldout", 1)):
        rows = (json.dumps(task) + "\n" for task in shop.tasks(seed, 16))
        (folder / f"{name}.jsonl").write_text("".join(rows))
    (folder / "agent.py").write_text(launching.BRANCHING.read_text())
    made = [words for words in launching.page_commands() if words[2] == "afield.integrations.verl.dataset"]
    assert len(made) == 2
    for words in made:
        subprocess.run(
            [python, *words[1:]], cwd=folder, env=verl_environment(), check=True, capture_output=True
        )


def train(python: Path, vllm: Path, folder: Path, name: str, steps: int) -> list[dict[str, Any]]:
    """The page's command with `name`, on the CPU."""
    page = [word.replace("=MODEL", f"={POLICY}") for word in launching.page_command(name)[1:]]
    started = (f"+actor_rollout_ref.rollout.engine_kwargs.afield.vllm_python='{vllm}'",)
    rollout = "actor_rollout_ref.rollout"
    servers = (f"{rollout}.nnodes=1", f"{rollout}.n_gpus_per_node={SERVERS[name]}") if SERVERS[name] else ()
    changed = (*launching.CPU, *launching.ONE_DEVICE, *started, *servers, *SIZES)
    words = [str(python), *page, *changed, *launching.named(name, steps)]
    return launching.run(python, folder, words, name, timeout_s=RUN_S)


@pytest.mark.parametrize("name", SERVERS)
def test_the_pages_command_trains_with_vllm_on_the_cpu(
    name: str, python: Path, vllm_python: Path, tmp_path: Path
) -> None:
    write_data(python, tmp_path)
    log = train(python, vllm_python, tmp_path, name, 2)
    assert [step["training/global_step"] for step in log] == [1, 2]
    for step in log:
        assert step["actor/grad_norm"] > 0
        assert step["num_turns/max"] > 2, "agents have more than one turn"
    fresh = [step for step in log if step["training/off_policy/trajectory_staleness_worst/max"] == 0]
    assert fresh
    for step in fresh:
        assert step["training/rollout_probs_diff_valid"] == 1
        assert step["training/rollout_probs_diff_max"] < 1e-5
    gateway = tmp_path / "checkpoints" / "on" / name / "afield" / "gateway"
    logs = sorted((gateway / "logs").iterdir())
    assert len(logs) == (SERVERS[name] or 1)
    assert all("--enable-scale-out" in one.read_text() for one in logs)
    assert sorted(path.name for path in (gateway / "weights").iterdir()) == ["v1", "v2"]
    end = time.monotonic() + LEFT_S
    while found := vllm_processes(tmp_path):
        assert time.monotonic() < end, f"left by the job: {found}"
        time.sleep(0.2)


def vllm_processes(folder: Path) -> list[int]:
    """Processes of vLLM that were started in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (
                b"vllm" in (process / "cmdline").read_bytes().lower()
                and (process / "cwd").readlink() == folder
            ):
                found.append(int(process.name))
    return found
