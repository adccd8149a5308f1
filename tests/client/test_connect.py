"""A client by names: what can be named, what is refused, and that its page is true."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import afield
from afield import connect, factory
from afield.client import RolloutFuture
from afield.errors import UsageError
from afield.ratelimit import LocalLimiter, RateLimits
from afield.settings.train import TrainConfig
from afield.settings.values import converted
from support.client_gateway import Place, place, yes
from support.gateways import ADMIN
from support.paths import ROOT
from support.processes import AGENTS

PAGE = ROOT / "docs" / "how-to" / "rollout-client.md"
EXAMPLE = ROOT / "examples" / "client" / "best_of.py"
AGENT = f"{AGENTS / 'leaving_marks.py'}:agent"


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path) as made:
        yield made


def opened(there: Place, **names: Any) -> afield.RolloutClient:
    values = {"gateway": there.url, "admin_key": ADMIN, "exp_id": "exp", "directory": there.root / "run"}
    return afield.RolloutClient.open(**{**values, **names})


def test_a_named_agent_runs_in_processes_and_a_function_in_threads(there: Place) -> None:
    row = {"marks": str(there.root / "marks")}
    outcomes = there.root / "elsewhere"
    with opened(
        there, agent=AGENT, workers=1, transport=f"files://{outcomes}", attempt_timeout_s=60
    ) as client:
        assert client.config.deadlines.attempt_timeout_s == 60
        assert client.submit(row, input_id="a").result(60).outcome.reward == 1.0
    assert (outcomes / "exp" / "commits" / "exp-a-r0.1.json").exists()
    with opened(
        there, agent=yes, pace=RateLimits(rate_per_s=100), limiter_file=there.root / "limiter"
    ) as client:
        assert len(client.submit(row, input_id="b").result(60).turns) == 1
        assert client.submit(row, input_id="a").result(60).rollout.id == "exp-a-r0"  # from before
    assert (there.root / "marks").read_text().split() == ["exp-a-r0.1"]


def test_agents_that_others_serve_need_no_name(there: Place) -> None:
    reading, writing = os.pipe()
    serve = [sys.executable, "-m", "afield.sdk.serve", AGENT, "--ready-fd", str(writing)]
    serve += ["--outcome-root", str(there.root)]
    process = subprocess.Popen(serve, pass_fds=(writing,))
    os.close(writing)
    try:
        with os.fdopen(reading) as ready:
            url = f"http://127.0.0.1:{int(ready.readline())}"
        with opened(there, runtime=f"served={url}") as client:
            row = {"marks": str(there.root / "marks"), "reward": 0.5}
            assert [item.outcome.reward for item in client.run_batch([row], rollouts=3)] == [0.5] * 3
        assert process.poll() is None  # it is not ours to end
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ({"agent": yes, "concurency": 3}, "unknown value 'concurency'; did you mean 'concurrency'"),
        ({"agent": yes, "zzz": 3}, "unknown value 'zzz'; known: "),
        ({"agent": yes, "attempt_timeout_s": -1}, "attempt_timeout_s = -1 must be positive"),
        ({"agent": yes, "runtime": "process"}, "a function runs inline only"),
        ({"agent": AGENT, "runtime": "cloud"}, "unknown runtime 'cloud'; choose one of: agentcore"),
        ({"agent": AGENT, "transport": "pigeon"}, "unknown transport 'pigeon'; choose one of: files"),
        ({"agent": AGENT, "transport": "memory"}, "'memory' works with runtime 'inline' only"),
        ({"agent": "agent.py"}, "must be path/to/file.py:name"),
        ({"agent": f"{AGENT}s"}, "the agent; did you mean"),
        ({}, "runtime 'process' needs an agent"),
        ({"agent": yes, "gateway": "127.0.0.1:8400"}, "must be its address"),
        ({"agent": yes, "admin_key": ""}, "no admin key"),
    ],
)
def test_names_that_cannot_work_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: dict[str, Any], told: str
) -> None:
    monkeypatch.delenv("AFIELD_ADMIN_KEY", raising=False)
    values = {"gateway": "http://127.0.0.1:9", "admin_key": ADMIN, "directory": tmp_path / "run"}
    with pytest.raises(UsageError, match=re.escape(told)):
        afield.RolloutClient.open(**{**values, **names})
    assert not (tmp_path / "run").exists()


def test_the_code_of_the_page_runs(there: Place) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S))
    environment = os.environ | {"AFIELD_ADMIN_KEY": ADMIN, "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", code.replace("http://127.0.0.1:8400", there.url)],
        env=environment,
        cwd=there.root,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^[01] (?:lamp|chair) [01] \S+ s 0\.0 1$", done.stdout, re.M)) == 4


def test_the_example_runs_and_goes_on_where_it_was(there: Place) -> None:
    command = [sys.executable, EXAMPLE, there.url, "--rollouts"]
    environment = os.environ | {"AFIELD_ADMIN_KEY": ADMIN, "NO_PROXY": "127.0.0.1"}
    for rollouts in ("2", "3"):
        done = subprocess.run(
            [*command, rollouts], env=environment, cwd=there.root, capture_output=True, text=True, timeout=400
        )
        told = f": mean 0.00, best 0.00; {rollouts} of {rollouts} rollouts"
        assert done.returncode == 0 and done.stdout.count(told) == 2, done.stdout + done.stderr
    for name in ("lamp", "chair"):
        phases = [there.phase(f"best-of-{name}-r{k}.{n}") for n in (1, 2) for k in range(4)]
        assert phases == ["finalized"] * 3 + [None] * 5


def test_the_page_lists_what_open_takes_and_what_a_future_has() -> None:
    text = PAGE.read_text()
    _, _, told = text.partition("## Arguments of `open`\n")
    rows = re.findall(r"^\| (`.*?) \|", told, re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    takes = inspect.signature(connect.client).parameters
    assert named == set(takes) - {"values"}
    rest = told.partition("Further arguments are the fields of [`RolloutConfig`]")[2]
    further = set(re.findall(r"`(\w+)`", rest))
    assert further <= {*connect.VALUES, *connect.TIMEOUTS} and further >= set(connect.TIMEOUTS)
    futures = text.partition("## Futures\n")[2].partition("`result` raises")[0]
    has = {name for row in re.findall(r"^\| (`.*?) \|", futures, re.M) for name in re.findall(r"`(\w+)", row)}
    public = {name for name in dir(RolloutFuture) if not name.startswith("_")}
    assert has == {*public, "rollout", "await"} - {"settle", "fail", "expire"}


@pytest.mark.parametrize(
    ("pace", "wanted"),
    [
        (None, RateLimits(rate_per_s=5.0, stop_per_s=7.0, cold_start_s=3.0)),
        # As the veRL integration gives it, when nothing is set there.
        (RateLimits(), RateLimits(rate_per_s=5.0, stop_per_s=7.0, cold_start_s=3.0)),
        (
            RateLimits(rate_per_s=2.0, starting=4),
            RateLimits(rate_per_s=2.0, stop_per_s=7.0, cold_start_s=3.0, starting=4),
        ),
    ],
)
def test_a_place_with_quotas_is_asked_at_its_own_rate(
    tmp_path: Path, pace: RateLimits | None, wanted: RateLimits
) -> None:
    quotas = {"rate": 5.0, "stop_rate": 7.0, "cold_start_s": 3.0}
    arn = "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/math-0123456789"
    client = connect.client(
        gateway="http://127.0.0.1:9",
        admin_key=ADMIN,
        directory=tmp_path / "run",
        runtime="agentcore",
        options={"arn": arn, **quotas},
        transport="s3://bucket",
        pace=pace,
    )
    train = converted(
        {"model": "", "runtime": "agentcore", "agentcore": {"arn": arn, **quotas}}, TrainConfig, "test"
    )
    assert isinstance(client.limiter, LocalLimiter)
    assert client.limiter.pace == wanted
    assert factory.limiter(train, pace).pace == wanted
