"""Stock veRL trains on this machine's processor, by the example's script: manager, gateway and agents in
processes of their own. What is asserted comes from veRL's own log and from the gateway's store.

Probabilities of sampler and trainer differ by less than 1e-6 on average. Single ones may by some more: veRL
takes a log-probability as the difference of two float32 numbers of the size of the logits, which at 16 to 32
is exact to no better than 2e-6.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from afield.engines.torch.engine import TorchEngine
from afield.errors import Unavailable
from support.chromium import browser
from support.gateways import POLICY, Running, running
from support.ui import element, serving, show, text
from support.verl_env import ROOT, verl_environment, verl_python
from verl_cpu import launching

pytestmark = [pytest.mark.real, pytest.mark.anyio, pytest.mark.timeout(1800)]
RUN_S = 1700
ROLLOUTS, TASKS = 4, 4
SMALL = (
    f"data.train_batch_size={TASKS}",
    f"actor_rollout_ref.rollout.n={ROLLOUTS}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={TASKS}",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    f"afield.agent={launching.BRANCHING}:agent",
    "+afield.max_tokens=16",
    "+afield.abandoned_answers=train",  # the agent samples twice from one prompt on purpose
)


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return verl_python()
    except Unavailable as error:
        pytest.fail(str(error)) if os.environ.get("CI") else pytest.skip(str(error))


def store_of(folder: Path, name: str) -> Path:
    (store,) = (folder / "checkpoints" / "on" / name / "afield" / "gateway").glob("store-*")
    return store


async def sessions(up: Running) -> list[dict[str, Any]]:
    _, listed = await up.ask("GET", "/sessions?limit=1000")
    return [(await up.ask("GET", f"/sessions/{one['id']}/trajectories"))[1] for one in listed["sessions"]]


def largest_difference(trajectory: dict[str, Any], weights: Path) -> float:
    """Between what was sampled and what transformers says of it with these weights."""
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
    ids = torch.tensor(trajectory["token_ids"])
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1]
    rescored = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
    mask = torch.tensor(trajectory["loss_mask"][1:], dtype=torch.bool)
    return float((rescored - torch.tensor(trajectory["logprobs"][1:]))[mask].abs().max())


async def check_store(folder: Path, name: str, steps: int) -> set[int]:
    """The versions that sampled. Rows of sessions that branched are there, the last version is the last step,
    and the tokens of each version that is still on disk score with it."""
    store = store_of(folder, name)
    weights = store.parent / "weights"
    assert sorted(path.name for path in weights.iterdir()) == [f"v{steps - 1}", f"v{steps}"]
    seen: set[int] = set()
    rescored = 0
    async with running(TorchEngine(POLICY), store) as up:
        assert await up.client.version() == steps
        for made in await sessions(up):
            rows = made["trajectories"]
            assert len(rows) == 2, "the agent asks twice from one prompt"
            for row in rows:
                (low, high) = (min(s[2] for s in row["versions"]), max(s[3] for s in row["versions"]))
                seen |= set(range(low, high + 1))
                if low == high and (weights / f"v{low}").is_dir():
                    assert largest_difference(row, weights / f"v{low}") < 1e-5
                    rescored += 1
    assert rescored >= 4
    return seen


async def check_pages(run: Path) -> None:
    """The browser shows rewards by step, and the tokens of a rollout with two branches."""
    async with browser() as chromium, serving(run.parent, str(run)) as url, chromium.page() as page:
        await page.open(url)
        await page.wait_for(element(".tbody a"))
        await show(page, "#/r/afield", f"{element('.chart canvas')} && {text('verl')}")
        bars = "[...document.querySelectorAll('.steps a i')].map((i) => parseFloat(i.style.height))"
        assert len(await page.evaluate(bars)) == 3 and any(await page.evaluate(bars))
        await show(page, "#/r/afield/rollouts", text(f"of {3 * ROLLOUTS * TASKS} rollouts"))
        await page.press("Enter")
        await page.wait_for(f"{element('.tokens .sampled')} && {text('2 branches')}")
        assert page.errors == []


async def test_veRL_trains_synchronously(python: Path, tmp_path: Path) -> None:
    steps = 3
    launching.write_tasks(python, tmp_path, 16)
    log = launching.train(python, tmp_path, "sync", "sync", steps, *SMALL, timeout_s=RUN_S)
    assert [step["training/global_step"] for step in log] == [1, 2, 3]
    for step in log:
        assert step["training/rollout_probs_diff_valid"] == 1
        assert step["training/rollout_probs_diff_mean"] < 1e-6
        assert step["training/rollout_probs_diff_max"] < 1e-5
        assert step["rollout_corr/log_ppl_abs_diff"] < 1e-5
        assert step["training/off_policy/trajectory_staleness_worst/max"] == 0
        assert step["actor/grad_norm"] > 0
        # A row of its own for the second branch, which has one call.
        assert step["num_turns/min"] == 2 < step["num_turns/max"]
    assert await check_store(tmp_path, "sync", steps) == {0, 1, 2}
    await check_pages(tmp_path / "checkpoints" / "on" / "sync" / "afield")


async def test_veRL_trains_asynchronously(python: Path, tmp_path: Path) -> None:
    steps = 4
    launching.write_tasks(python, tmp_path, 32)
    log = launching.train(python, tmp_path, "separate_async", "async", steps, *SMALL, timeout_s=RUN_S)
    assert [step["training/global_step"] for step in log] == [1, 2, 3, 4]
    fresh = [s for s in log if s["training/off_policy/trajectory_staleness_worst/max"] == 0]
    assert fresh, "the first step trains what its own weights sampled"
    for step in fresh:
        assert step["training/rollout_probs_diff_mean"] < 1e-6
        assert step["training/rollout_probs_diff_max"] < 1e-5
        assert step["rollout_corr/log_ppl_abs_diff"] < 1e-5
    assert max(step["training/off_policy/trajectory_staleness_worst/max"] for step in log) >= 1
    for step in log:
        assert step["actor/grad_norm"] > 0 and step["afield/weights_bytes"] > 1e6
        assert step["num_turns/min"] == 2 < step["num_turns/max"]
    seen = await check_store(tmp_path, "async", steps)
    assert {0, 1, 2} <= seen


@pytest.fixture
def job(python: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    script = ROOT / "tests" / "verl_cpu" / "keeping.py"
    with (tmp_path / "job.log").open("w") as log:
        process = subprocess.Popen(
            [python, script, POLICY],
            cwd=tmp_path,
            env=verl_environment(),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    yield process
    process.kill()
    process.wait()
    assert process.stdout
    process.stdout.close()


def test_weights_arrive_under_calls_or_raise_and_the_gateway_ends_with_its_job(
    job: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert job.stdout

    def told() -> dict[str, Any]:
        line = job.stdout.readline() if job.stdout else ""
        assert line, (tmp_path / "job.log").read_text()[-4000:]
        return json.loads(line)

    assert "the trainer starts with another" in told()["other_start"]
    assert told()["same_start"] == ""
    published = told()
    assert (published["served"], published["failed"], published["kept"]) == (5, 0, ["v4", "v5"])
    assert {1, 2, 3, 4, 5} <= set(published["seen"])
    others = told()
    assert "serve version 5, which this job did not publish, and its trainer is at step 4" in others["older"]
    assert "serve version 5, which this job did not publish, and its trainer is at step 5" in others["taken"]
    assert "lack the tensor" in told()["lacking"]
    url = told()["url"]
    assert answers(url)
    job.kill()
    until = time.monotonic() + 120
    while answers(url) and time.monotonic() < until:
        time.sleep(0.2)
    assert not answers(url)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
