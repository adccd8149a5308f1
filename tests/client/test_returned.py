"""What an agent returns besides its reward comes back to the caller, bounded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import run_command

import afield
from afield import wire
from afield.transports.stores.files import FilesTransport
from afield.ui.app import Runs, data
from afield.ui.run_list import RunList
from support.client_gateway import ThreadedGateway, threaded_gateway
from support.gateways import ADMIN
from support.processes import AGENTS

__all__ = ["run_command"]
AGENT = f"{AGENTS / 'returning.py'}:agent"
VALUES = {
    "conversation": [{"role": "user", "content": "Wo? \u6c34 \U0001f600"}],
    "artifacts": {"n": 2**63, "share": 0.1, "none": None, "nested": [[[]]]},
    "text": "</script><b>\u202e\u0000",
}


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ThreadedGateway]:
    with threaded_gateway(tmp_path) as gateway:
        yield gateway


def opened(gateway: ThreadedGateway, **values: Any) -> afield.RolloutClient:
    return afield.RolloutClient.open(
        gateway=gateway.url,
        admin_key=ADMIN,
        exp_id="exp",
        directory=gateway.root / "runs" / "exp",
        agent=AGENT,
        **values,
    )


@pytest.mark.parametrize(
    ("runtime", "transport"), [("inline", "memory"), ("inline", "files"), ("process", "files")]
)
def test_returned_values_come_back_through_every_transport(
    gateway: ThreadedGateway, runtime: str, transport: str
) -> None:
    with opened(gateway, runtime=runtime, transport=transport) as client:
        result = client.submit({"id": "q", "returns": VALUES}).result(60)
    assert (result.returned, result.returned_left_out) == (VALUES, {})
    assert (result.outcome.reward, result.outcome.metrics) == (1.0, {"score": 2.0})


def test_returned_values_come_back_through_the_gateway(tmp_path: Path) -> None:
    outcomes = tmp_path / "outcomes"
    with threaded_gateway(tmp_path, outlet=FilesTransport(outcomes)) as gateway:
        with opened(gateway, runtime="process", transport=f"files://{outcomes}", deliver="gateway") as client:
            result = client.submit({"id": "q", "returns": VALUES}).result(60)
        assert client.info.kind == "client" and client.config.deliver == "gateway"
    assert (result.returned, result.returned_left_out) == (VALUES, {})


def test_values_beyond_the_limit_are_left_out_by_name(gateway: ThreadedGateway) -> None:
    row = {"id": "q", "returns": VALUES, "blob": wire.MAX_RETURNED_BYTES}
    with opened(gateway) as client:
        result = client.submit(row).result(60)
    assert result.returned == VALUES
    assert list(result.returned_left_out) == ["blob"]
    assert result.returned_left_out["blob"] > wire.MAX_RETURNED_BYTES


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def test_values_that_no_file_of_rollouts_can_hold_are_left_out() -> None:
    values = {"large": 10**40, "infinite": float("inf"), "deep": nested(5_000), "fine": 1}
    assert wire.bounded(values) == ({"fine": 1}, {"large": 0, "infinite": 0, "deep": 0})
    assert wire.bounded({"a": "x" * 10, "b": 1}, limit=12) == ({"b": 1}, {"a": len('{"a":"xxxxxxxxxx"}')})


def test_returned_values_are_shown_and_survive_the_program(
    gateway: ThreadedGateway, run_command: Any
) -> None:
    row = {"id": "q", "returns": {**VALUES, "log": "y" * 20_000}, "blob": wire.MAX_RETURNED_BYTES}
    with opened(gateway) as client:
        first = client.submit(row, rollout_id="mine").result(60)
    with opened(gateway) as client:
        assert client.submit(row, rollout_id="mine").result(60).returned == first.returned
    code, out, err = run_command("show", "exp", "mine")
    assert code == 0, err
    assert "returned conversation: [{" in out and "\u202e" not in out and "\x00" not in out
    assert "returned log: " in out and "(20002 characters; --json prints all)" in out
    assert "returned blob: left out, " in out
    assert json.loads(run_command("show", "exp", "mine", "--json")[1])["returned"] == first.returned

    runs = RunList([], gateway.root / "runs")
    page = json.loads(data(Runs(runs.current), "/api/runs/exp/rollouts/mine", {}).body)
    assert page["returned"]["length"] > 20_000 and len(page["returned"]["text"]) < 20_000
    assert list(page["returned_left_out"]) == ["blob"]
    whole = json.loads(data(Runs(runs.current), "/api/runs/exp/values/mine", {}).body)
    assert json.loads(whole["returned"]) == first.returned
    assert json.loads(whole["task"]) == {"returns": row["returns"], "blob": row["blob"], "id": "q"}
    for run in runs.current():
        run.close()
