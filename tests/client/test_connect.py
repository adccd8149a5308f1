"""RolloutClient.open: its arguments, their errors, and the how-to page."""

from __future__ import annotations

import ast
import inspect
import os
import pydoc
import re
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import afield
from afield import factory
from afield.client import OpenArguments, RolloutFuture, connect
from afield.errors import UsageError
from afield.orchestrator.config import RolloutConfig
from afield.ratelimit import LocalLimiter, RateLimits
from afield.settings.rollouts import Deadlines
from afield.settings.train import TrainConfig
from afield.settings.values import converted
from support.client_gateway import ThreadedGateway, threaded_gateway, yes_agent
from support.gateways import ADMIN
from support.paths import ROOT
from support.processes import AGENTS

PAGE = ROOT / "docs" / "how-to" / "rollout-client.md"
EXAMPLE = ROOT / "examples" / "client" / "best_of.py"
AGENT = f"{AGENTS / 'leaving_marks.py'}:agent"


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ThreadedGateway]:
    with threaded_gateway(tmp_path) as gateway:
        yield gateway


def opened(gateway: ThreadedGateway, **names: Any) -> afield.RolloutClient:
    values = {"gateway": gateway.url, "admin_key": ADMIN, "exp_id": "exp", "directory": gateway.root / "run"}
    return afield.RolloutClient.open(**{**values, **names})


def test_a_named_agent_runs_in_processes_and_a_function_in_threads(gateway: ThreadedGateway) -> None:
    row = {"marks": str(gateway.root / "marks")}
    outcomes = gateway.root / "elsewhere"
    with opened(
        gateway, agent=AGENT, workers=1, transport=f"files://{outcomes}", attempt_timeout_s=60
    ) as client:
        assert client.config.deadlines.attempt_timeout_s == 60
        assert client.submit(row, input_id="a").result(60).outcome.reward == 1.0
    assert (outcomes / "exp" / "commits" / "exp-a-r0.1.json").exists()
    with opened(
        gateway,
        agent=yes_agent,
        rate_limits=RateLimits(rate_per_s=100),
        limiter_file=gateway.root / "limiter",
    ) as client:
        assert len(client.submit(row, input_id="b").result(60).turns) == 1
        assert client.submit(row, input_id="a").result(60).rollout.id == "exp-a-r0"  # from before
    assert (gateway.root / "marks").read_text().split() == ["exp-a-r0.1"]


def test_agents_that_others_serve_need_no_name(gateway: ThreadedGateway) -> None:
    reading, writing = os.pipe()
    serve = [sys.executable, "-m", "afield.sdk.serve", AGENT, "--ready-fd", str(writing)]
    serve += ["--outcome-root", str(gateway.root)]
    process = subprocess.Popen(serve, pass_fds=(writing,))
    os.close(writing)
    try:
        with os.fdopen(reading) as ready:
            url = f"http://127.0.0.1:{int(ready.readline())}"
        with opened(gateway, runtime=f"served={url}") as client:
            row = {"marks": str(gateway.root / "marks"), "reward": 0.5}
            assert [item.outcome.reward for item in client.run_batch([row], rollouts=3)] == [0.5] * 3
        assert process.poll() is None  # it is not ours to end
    finally:
        process.terminate()
        process.wait(20)


def test_agents_run_at_any_endpoint_without_gateway_and_admin_key(
    gateway: ThreadedGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("AFIELD_ADMIN_KEY", raising=False)
    session = gateway.open("endpoint.1")  # plays the provider
    names: dict[str, Any] = {"endpoint": session.openai_base_url, "endpoint_key": session.api_key}
    names |= {"agent": yes_agent, "model_id": "some-model", "directory": gateway.root / "run"}
    with afield.RolloutClient.open(**names) as client:
        items = list(client.run_batch([{"question": "?"}], rollouts=2))
    assert [item.outcome.reward for item in items] == [1.0, 1.0]
    assert gateway.state("endpoint.1").calls == 2
    assert "no model call" not in caplog.text
    with pytest.raises(UsageError, match="refuses the key"):
        afield.RolloutClient.open(**{**names, "endpoint_key": "wrong"})


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ({"agent": yes_agent, "concurency": 3}, "unknown value 'concurency'; did you mean 'concurrency'"),
        (
            {"agent": yes_agent, "gatway": "http://127.0.0.1:9"},
            "unknown value 'gatway'; did you mean 'gateway'",
        ),
        ({"agent": yes_agent, "agnet": 3}, "unknown value 'agnet'; did you mean 'agent'"),
        ({"agent": yes_agent, "zzz": 3}, "unknown value 'zzz'; known: "),
        ({"agent": yes_agent, "attempt_timeout_s": -1}, "attempt_timeout_s = -1 must be positive"),
        ({"agent": yes_agent, "runtime": "process"}, "a function runs inline only"),
        ({"agent": AGENT, "runtime": "cloud"}, "unknown runtime 'cloud'; choose one of: agentcore"),
        ({"agent": AGENT, "transport": "pigeon"}, "unknown transport 'pigeon'; choose one of: memory, files"),
        ({"agent": AGENT, "transport": "memory"}, "'memory' works with runtime 'inline' only"),
        ({"agent": "agent.py"}, "name your own agent as path/to/file.py:name"),
        ({"agent": f"{AGENT}s"}, "the agent; did you mean"),
        ({}, "runtime 'process' needs an agent"),
        ({"agent": yes_agent, "gateway": "127.0.0.1:8400"}, "must be its address"),
        ({"agent": yes_agent, "admin_key": ""}, "no admin key"),
        ({"agent": yes_agent, "endpoint": "http://127.0.0.1:9"}, "give one of them"),
        ({"agent": yes_agent, "endpoint": "host", "gateway": None}, "must be an address"),
        ({"agent": yes_agent, "endpoint": "http://host", "gateway": None}, "give model_id"),
        (
            {"agent": AGENT, "endpoint": "http://h", "gateway": None, "model_id": "m", "runtime": "sandbox"},
            "sends outcomes to a gateway, and an endpoint is none",
        ),
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


def test_a_missing_gateway_is_named_with_the_command_that_starts_one() -> None:
    with pytest.raises(UsageError, match=r"no gateway: give gateway, .* `afield gateway` prints"):
        afield.RolloutClient.open(agent=yes_agent)
    with pytest.raises(UsageError, match="unknown value 'gatway'; did you mean 'gateway'"):
        afield.RolloutClient.open(agent=yes_agent, gatway="http://127.0.0.1:9")


def test_the_signature_of_open_agrees_with_the_factory_and_the_settings() -> None:
    shown = inspect.signature(afield.RolloutClient.open).parameters
    takes = dict(inspect.signature(connect.client).parameters)
    del takes["values"]
    assert set(shown) == {*takes, *connect.VALUES, *connect.TIMEOUTS}
    hints = get_type_hints(RolloutConfig) | get_type_hints(Deadlines) | get_type_hints(connect.client)
    config = RolloutConfig(exp_id="e", model_id="m")
    for name, parameter in shown.items():
        assert parameter.annotation == hints[name], name
        owner = config if name in connect.VALUES else Deadlines()
        default = takes[name].default if name in takes else getattr(owner, name)
        assert parameter.default == default, name
    assert "attempt_timeout_s: float = 300.0" in pydoc.render_doc(afield.RolloutClient.open)


def test_every_argument_of_open_has_a_docstring() -> None:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(OpenArguments))).body
    assert isinstance(tree, ast.ClassDef)
    body = tree.body[1:]
    assert [type(node) for node in body] == [ast.AnnAssign, ast.Expr] * len(OpenArguments.__annotations__)


@pytest.fixture
def workdir(gateway: ThreadedGateway, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory of code that reads the admin key from its environment."""
    monkeypatch.chdir(gateway.root)
    monkeypatch.setenv("AFIELD_ADMIN_KEY", ADMIN)
    return gateway.root


def test_the_code_of_the_page_runs(
    gateway: ThreadedGateway, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S))
    script = workdir / "page.py"
    script.write_text(code.replace("http://127.0.0.1:8400", gateway.url))
    runpy.run_path(str(script))
    assert len(re.findall(r"^[01] (?:lamp|chair) [01] \S+ s 0\.0 1$", capsys.readouterr().out, re.M)) == 4


@pytest.mark.usefixtures("workdir")
def test_the_example_resumes_with_more_rollouts(
    gateway: ThreadedGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rollouts in ("2", "3"):
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), gateway.url, "--rollouts", rollouts])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        summary = f": mean 0.00, best 0.00; {rollouts} of {rollouts} rollouts"
        assert capsys.readouterr().out.count(summary) == 2
    for name in ("lamp", "chair"):
        phases = [gateway.phase(f"best-of-{name}-r{k}.{n}") for n in (1, 2) for k in range(4)]
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
    assert has == {*public, "rollout", "await"} - {"set_summary", "fail", "expire"}


@pytest.mark.parametrize(
    ("limits", "wanted"),
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
def test_a_runtime_with_quotas_is_asked_at_its_own_rate(
    tmp_path: Path, limits: RateLimits | None, wanted: RateLimits
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
        rate_limits=limits,
    )
    train = converted(
        {"model": "", "runtime": "agentcore", "agentcore": {"arn": arn, **quotas}}, TrainConfig, "test"
    )
    assert isinstance(client.limiter, LocalLimiter)
    assert client.limiter.limits == wanted
    assert factory.limiter(train, limits).limits == wanted
