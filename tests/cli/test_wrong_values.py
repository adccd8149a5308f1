"""What a user runs into: values that are wrong, places that are not there, programs that end early."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import afield
from afield import connect
from afield.cli.main import main
from afield.errors import Unavailable, UsageError
from afield.trainers.grpo import GRPO
from support.client_gateway import place
from support.gateways import POLICY
from support.processes import AGENTS, finish, start, train_arguments, unlearned, until, write_tasks
from support.processes import afield as afield_command

ROWS = [{"id": f"q{i}", "question": f"Question {i}?", "seconds": 0} for i in range(4)]
AGENT = f"{AGENTS / 'slow_agent.py'}:agent"


def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    """The exit code of a training that must not begin; it leaves no directory behind."""
    tasks = write_tasks(tmp_path / "tasks.jsonl", ROWS)
    monkeypatch.setenv("AFIELD_RUNS", str(tmp_path / "runs"))
    code = main(["train", AGENT, "--tasks", str(tasks), "--model", str(POLICY), *options])
    assert not list((tmp_path / "runs").glob("*"))
    return code


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--mode", "fast"), "sync, one-step-off, async"),
        (("--on-stale", "keep"), "drop, correct"),
        (("--advantage", "ppo"), "grpo, remax"),
        (("--run", "good", "--deliver", "mail"), "store, gateway"),
        (("--run", "../up"), "run name '../up'"),
        (("--run", ""), "run name ''"),
        (("--epochs", "2", "--steps", "3"), "give one of them"),
        (("--gateway", "localhost:8400"), "must be an address"),
        (("--gateway", "http://127.0.0.1:1"), "AFIELD_ADMIN_KEY"),
        (("--role", "collect"), "--gateway URL"),
        (("--runtime", "served=http://"), "served=http://HOST:PORT"),
        (("--runtime", "served=http://127.0.0.1:1,elsewhere"), "served=http://HOST:PORT"),
    ],
)
def test_a_wrong_value_is_named_with_its_remedy_and_leaves_nothing(
    options: tuple[str, ...],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("AFIELD_ADMIN_KEY", raising=False)
    assert refused(tmp_path, monkeypatch, *options) == 2
    assert told in capsys.readouterr().err


def test_a_gateway_that_is_not_there_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AFIELD_ADMIN_KEY", "k")
    (tmp_path / "c.toml").write_text("[train]\nunavailable_timeout_s = 0.5\n")
    where = ("--config", str(tmp_path / "c.toml"), "--gateway", "http://127.0.0.1:1")
    assert refused(tmp_path, monkeypatch, *where) == 1
    assert "the gateway at http://127.0.0.1:1 does not answer" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["/proc/runs", "/dev/null/runs"])
def test_a_place_where_no_run_can_be_kept_is_named(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", ROWS)
    monkeypatch.setenv("AFIELD_RUNS", place)
    assert main(["train", AGENT, "--tasks", str(tasks), "--model", str(POLICY)]) == 2
    assert f"a run cannot be kept in {place}" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["retries_task = -1", "retries_infrastructure = -5", 'mode = "fast"'])
def test_a_wrong_line_of_the_configuration_is_named(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.toml").write_text(f"[train]\n{line}\n")
    assert refused(tmp_path, monkeypatch, "--config", str(tmp_path / "c.toml")) == 2
    assert line.partition(" ")[0] in capsys.readouterr().err


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
def test_a_client_refuses_wrong_values_before_it_starts(values: dict[str, Any], tmp_path: Path) -> None:
    named = {"agent": lambda task: 1.0, "gateway": "http://127.0.0.1:1", "admin_key": "k"}
    with pytest.raises(UsageError):
        afield.RolloutClient.open(directory=tmp_path / "run", **(named | values))
    assert not (tmp_path / "run").exists()


def open_client(place: Path, **names: Any) -> afield.RolloutClient:
    """Nothing is started: what is wrong is said by whoever is asked."""
    values = {"agent": lambda task: 1.0, "gateway": "http://127.0.0.1:1", "admin_key": "k"}
    return connect.client(directory=place, **(values | names))


def test_a_client_says_where_its_directory_or_its_limiter_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a run cannot be kept in /proc/run"):
        open_client(Path("/proc/run")).start()
    with pytest.raises(UsageError, match=r"cannot use the limiter.s file /proc/limiter"):
        open_client(tmp_path / "run", limiter_file="/proc/limiter").start()


@pytest.mark.parametrize(
    "wish", [{"rollout_id": "a b"}, {"rollout_id": ""}, {"split": "test"}, {"sampling": {"top_p": 0.9}}]
)
def test_a_wish_that_makes_no_sense_is_refused(wish: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=next(iter(wish)).replace("_", " ")):
        open_client(tmp_path / "run").submit({"question": "2+2"}, **wish)


def test_the_command_that_goes_on_with_a_stopped_run_is_one_that_works(tmp_path: Path) -> None:
    rows = [{"id": "q", "question": "Well?", "seconds": 0.2}]
    more = ("--run", "mine", "--steps", 1000, "--tasks-per-step", 1, "--rollouts", 2)
    more = (*more, *unlearned(tmp_path))
    process = start(tmp_path, *train_arguments(tmp_path, "slow_agent.py", rows, *more))
    with process:
        until((tmp_path / "runs" / "mine" / "metrics.jsonl").exists, "the run begins")
        process.send_signal(signal.SIGTERM)
        code, _, err = finish(process, 60)
    assert code == 143, err
    assert "afield train --resume mine" in err
    kept = (tmp_path / "runs" / "mine" / "run.json").read_bytes()
    for wrong in (("--runtime", "cloud"), ("--runtime", "served=http://127.0.0.1:1"), ("--workers", "0")):
        code, _, err = afield_command(tmp_path, "train", "--resume", "mine", *wrong)
        assert code == 2, err
        assert (tmp_path / "runs" / "mine" / "run.json").read_bytes() == kept  # what is wrong is not kept


def test_a_client_may_be_closed_by_the_callback_of_a_future(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with place(tmp_path) as there, there.client() as client:
        future = client.submit({"question": "2+2"})
        future.add_done_callback(lambda _: client.close())
        assert future.result(20).outcome.reward == 1.0
    assert not caplog.records


def test_what_a_closed_client_left_behind_says_nothing_about_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    going = threading.Event()
    ended = threading.Event()

    def agent(task: dict[str, Any]) -> float:
        going.set()
        ended.wait(20)
        return 1.0

    with place(tmp_path) as there, there.client(agent) as client:
        client.submit({"question": "2+2"})
        assert going.wait(20)
    ended.set()
    until(lambda: not [t for t in threading.enumerate() if "(run)" in t.name], "the agent ends")
    assert not [record.message for record in caplog.records if record.name.startswith("afield.sdk")]


@contextmanager
def little_room(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size`: nearly a full disk, without being root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_without_room_for_weights_is_said_in_one_line_and_leaves_no_half(tmp_path: Path) -> None:
    trainer = GRPO(POLICY, lr=1e-3)
    for where, write in ((tmp_path / "saved", trainer.save), (tmp_path / "weights", trainer.export)):
        with little_room(100_000), pytest.raises(Unavailable, match=f"{where} cannot be written"):
            write(where)
        assert not list(tmp_path.iterdir())
