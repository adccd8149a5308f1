"""RolloutClient: invalid values, unusable directories, and closing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import afield
from afield import sandbox
from afield.client import connect
from afield.errors import UsageError
from support.client_gateway import threaded_gateway
from support.gateways import ADMIN
from support.processes import AGENTS, until

AGENT = f"{AGENTS / 'slow_agent.py'}:agent"


@pytest.mark.parametrize(
    "values",
    [
        {"concurrency": 0},
        {"concurrency": "4"},
        {"rollouts": 0},
        {"retries": 3},
        {"retries": {"tusk": 1}},
        {"retries": {"task": -1}},
        {"sampling": {"temperatur": "hot"}},
        {"deliver": "mail"},
        {"attempt_timeout_s": "5"},
        {"poll_interval_s": 0},
        {"exp_id": "a b"},
        {"gateway": None},
        {"workers": 0},
    ],
)
def test_an_invalid_value_is_refused_before_the_client_starts(values: dict[str, Any], tmp_path: Path) -> None:
    required = {"agent": lambda task: 1.0, "gateway": "http://127.0.0.1:1", "admin_key": "k"}
    with pytest.raises(UsageError):
        afield.RolloutClient.open(directory=tmp_path / "run", **(required | values))
    assert not (tmp_path / "run").exists()


def unstarted_client(directory: Path, **options: Any) -> afield.RolloutClient:
    """A client that is not started."""
    values = {"agent": lambda task: 1.0, "gateway": "http://127.0.0.1:1", "admin_key": "k"}
    return connect.client(directory=directory, **(values | options))


def test_an_unwritable_directory_or_limiter_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run directory /proc/run cannot be used"):
        unstarted_client(Path("/proc/run")).start()
    with pytest.raises(UsageError, match=r"cannot use the limiter.s file /proc/limiter"):
        unstarted_client(tmp_path / "run", limiter_file="/proc/limiter").start()


@pytest.mark.parametrize(
    "arguments", [{"rollout_id": "a b"}, {"rollout_id": ""}, {"split": "test"}, {"sampling": {"top_p": 0.9}}]
)
def test_an_invalid_argument_of_submit_is_refused(arguments: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=next(iter(arguments)).replace("_", " ")):
        unstarted_client(tmp_path / "run").submit({"question": "2+2"}, **arguments)


def test_a_callback_of_a_future_may_close_the_client(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with threaded_gateway(tmp_path) as gateway, gateway.client() as client:
        future = client.submit({"question": "2+2"})
        future.add_done_callback(lambda _: client.close())
        assert future.result(20).outcome.reward == 1.0
    assert not caplog.records


def test_an_agent_that_outlives_the_client_logs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    started = threading.Event()
    released = threading.Event()

    def agent(task: dict[str, Any]) -> float:
        started.set()
        released.wait(20)
        return 1.0

    with threaded_gateway(tmp_path) as gateway, gateway.client(agent) as client:
        client.submit({"question": "2+2"})
        assert started.wait(20)
    released.set()
    until(lambda: not [t for t in threading.enumerate() if "(run)" in t.name], "the agent ends")
    assert not [record.message for record in caplog.records if record.name.startswith("afield.sdk")]


def test_an_unknown_sandbox_option_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UsageError, match=r"unknown key 'sandbox\.limts'.*did you mean 'sandbox\.limits'"):
        sandbox(options={"limts": {}})


def test_a_gateway_without_outcomes_is_refused_for_sandboxed_agents(
    tmp_path: Path,
) -> None:
    with (
        threaded_gateway(tmp_path) as gateway,
        pytest.raises(UsageError, match="does not forward outcomes: start it with --outcomes"),
    ):
        afield.RolloutClient.open(
            agent=AGENT, gateway=gateway.url, admin_key=ADMIN, runtime="sandbox", directory=tmp_path / "run"
        )
