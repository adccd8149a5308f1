"""RolloutClient with agents in processes: delivery, cleanup, and resuming after a crash."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from afield.client import RolloutClient
from afield.errors import Unavailable, UsageError
from afield.gateway.client import HttpGateway
from afield.interfaces import Exit
from afield.orchestrator.config import RolloutConfig
from afield.orchestrator.state import RunDirectory
from afield.runtimes.inline import InlineRuntime
from afield.runtimes.process import ProcessRuntime
from afield.transports.stores.files import FilesTransport
from afield.transports.stores.memory import MemoryTransport
from afield.types import Attempt
from support.client_gateway import BlockingAgent, ThreadedGateway, threaded_gateway, yes_agent
from support.gateways import ADMIN
from support.processes import AGENTS, alive, children, until

AGENT = f"{AGENTS / 'leaving_marks.py'}:agent"


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ThreadedGateway]:
    with threaded_gateway(tmp_path) as gateway:
        yield gateway


class SilentRuntime(ProcessRuntime):
    """Reports the end of attempts only after `report` is set."""

    report = threading.Event()

    async def wait(self, attempt: Attempt) -> Exit:
        while not self.report.is_set():
            await asyncio.sleep(0.02)
        return await super().wait(attempt)


class HintlessTransport(FilesTransport):
    """Returns no hints."""

    async def hints(self, exp_id: str, wait_s: float) -> list[Attempt]:
        await asyncio.sleep(wait_s)
        return []


def processes(
    gateway: ThreadedGateway, make: Callable[..., ProcessRuntime] = ProcessRuntime
) -> ProcessRuntime:
    return make(AGENT, log_dir=gateway.root / "logs", workers=2)


def marked(gateway: ThreadedGateway) -> list[str]:
    marks = gateway.root / "marks"
    return marks.read_text().split() if marks.exists() else []


def row(gateway: ThreadedGateway, **values: Any) -> dict[str, Any]:
    return {"marks": str(gateway.root / "marks"), **values}


def run_rows(gateway: ThreadedGateway, transport: FilesTransport, **config: Any) -> None:
    SilentRuntime.report.clear()
    runtime = processes(gateway, SilentRuntime)
    with gateway.client(runtime=runtime, transport=transport, **config) as client:
        futures = [client.submit(row(gateway, seconds=0.05 * n), input_id=f"q{n}") for n in range(6)]
        assert [future.result(150).outcome.reward for future in futures] == [1.0] * 6
        SilentRuntime.report.set()


def test_hints_deliver_results_when_neither_the_runtime_nor_polling_reports_the_end(
    gateway: ThreadedGateway,
) -> None:
    run_rows(gateway, FilesTransport(gateway.root / "outcomes"), poll_interval_s=3600.0)


def test_polling_delivers_results_when_every_hint_is_lost(gateway: ThreadedGateway) -> None:
    run_rows(gateway, HintlessTransport(gateway.root / "outcomes"), poll_interval_s=0.2)


def test_closing_ends_sessions_processes_and_threads(gateway: ThreadedGateway) -> None:
    before = set(threading.enumerate())
    client = gateway.client(runtime=processes(gateway), transport=FilesTransport(gateway.root / "outcomes"))
    with client:
        futures = [client.submit(row(gateway, seconds=60), input_id=f"q{n}") for n in range(3)]
        until(lambda: len(marked(gateway)) == 3, "three agents work")
        workers = [pid for pid, line in children(os.getpid()).items() if "leaving_marks" in line]
        assert workers
    assert all(future.cancelled() for future in futures)
    assert not [pid for pid in workers if alive(pid)]
    left = lambda: {t for t in set(threading.enumerate()) - before if "asyncio" not in t.name}  # noqa: E731
    until(lambda: not left(), "no thread is left")
    for session_id in marked(gateway):
        assert gateway.state(session_id).phase != "open"
    with pytest.raises(UsageError, match="the client is closed"):
        client.submit({})
    client.close()


def test_the_same_program_started_again_takes_up_what_was_finished(gateway: ThreadedGateway) -> None:
    rows = [row(gateway, id=f"q{n}", reward=n) for n in range(3)]

    def program(take: int) -> dict[str, float | None]:
        outcomes = FilesTransport(gateway.root / "outcomes")
        got: dict[str, float | None] = {}
        with gateway.client(runtime=processes(gateway), transport=outcomes, concurrency=1) as client:
            for item in client.run_batch(rows, rollouts=2, timeout=60):
                got[item.finished.rollout.id] = item.outcome.reward
                if len(got) == take:
                    break
        return got

    first, second = program(2), program(6)
    assert second == {f"exp-q{n}-r{k}": float(n) for n in range(3) for k in (0, 1)}
    assert first == {key: second[key] for key in ("exp-q0-r0", "exp-q0-r1")}
    assert {marked(gateway).count(f"{rollout_id}.1") for rollout_id in first} == {1}
    assert not [mark for mark in marked(gateway) if mark.startswith("exp-q0") and not mark.endswith(".1")]


def test_a_second_client_on_the_same_directory_is_refused_while_the_first_lives(
    gateway: ThreadedGateway,
) -> None:
    with gateway.client(), pytest.raises(UsageError, match="another process is working on"):
        gateway.client().start()


def test_obstacles_are_reported_at_the_start_and_nothing_is_left(gateway: ThreadedGateway) -> None:
    before = threading.active_count()
    missing = ProcessRuntime(f"{gateway.root / 'no.py'}:agent", log_dir=gateway.root / "logs", workers=1)
    with pytest.raises(UsageError, match=r"no\.py"):
        gateway.client(runtime=missing, transport=FilesTransport(gateway.root / "outcomes")).start()
    for url, key, error in ((gateway.url, "wrong", UsageError), ("http://127.0.0.1:9", ADMIN, Unavailable)):
        client = RolloutClient(
            RolloutConfig(exp_id="exp", model_id="m"),
            gateway=HttpGateway(url, key, unavailable_timeout_s=0.3),
            runtime=InlineRuntime(yes_agent),
            transport=MemoryTransport(),
            run=RunDirectory(gateway.root / "run"),
        )
        with pytest.raises(error):
            client.start()
    assert threading.active_count() == before


def test_client_that_was_not_started_raises_usage_error(gateway: ThreadedGateway) -> None:
    with pytest.raises(UsageError, match="was not started"):
        gateway.client().submit({})


PROGRAM = """
import sys
from pathlib import Path
from afield.client import RolloutClient
from afield.gateway.client import HttpGateway
from afield.orchestrator.config import RolloutConfig
from afield.orchestrator.state import RunDirectory
from afield.runtimes.process import ProcessRuntime
from afield.transports.stores.files import FilesTransport

agent, url, key, root = sys.argv[1:]
root = Path(root)
client = RolloutClient(
    RolloutConfig(exp_id="exp", model_id="m"),
    gateway=HttpGateway(url, key),
    runtime=ProcessRuntime(agent, log_dir=root / "logs", workers=1),
    transport=FilesTransport(root / "outcomes"),
    run=RunDirectory(root / "run"),
)
with client:
    futures = [client.submit({"marks": str(root / "marks"), "seconds": 60}, input_id=f"q{n}") for n in (1, 2)]
    futures[0].result()
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_program_that_is_stopped_leaves_no_process(gateway: ThreadedGateway, how: signal.Signals) -> None:
    arguments = [sys.executable, "-c", PROGRAM, AGENT, gateway.url, ADMIN, str(gateway.root)]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    until(lambda: len(marked(gateway)) == 2, "two agents work")
    workers = list(children(process.pid))
    process.send_signal(how)
    _, err = process.communicate(timeout=90)
    until(lambda: not any(map(alive, workers)), "the workers are gone", 60)
    if how is signal.SIGINT:
        assert "KeyboardInterrupt" in err
        assert {gateway.state(session_id).phase for session_id in marked(gateway)}.isdisjoint({"open"})
    else:  # nobody could say good-bye; whoever comes next ends it and tries again
        (gateway.root / "marks").unlink()
        outcomes = FilesTransport(gateway.root / "outcomes")
        with gateway.client(runtime=processes(gateway), transport=outcomes) as client:
            future = client.submit(row(gateway, seconds=60), input_id="q1")
            until(lambda: marked(gateway) == ["exp-q1-r0.2"], "it is tried again")
            assert gateway.state("exp-q1-r0.1").phase != "open"
            future.cancel()


def test_a_client_whose_gateway_becomes_unavailable_fails_its_futures_and_can_be_closed(
    tmp_path: Path,
) -> None:
    blocking = BlockingAgent()
    with threaded_gateway(tmp_path) as gateway:
        client = gateway.client(blocking, unavailable_timeout_s=0.5)
        client.start()
        future = client.submit({})
        blocking.wait_started(1)
    blocking.release.set()
    with pytest.raises(Unavailable, match="did not answer"):
        future.result(60)
    with pytest.raises(Unavailable, match="did not answer"):
        client.close()


def test_a_client_that_breaks_says_why_to_every_future_and_when_it_is_closed(
    gateway: ThreadedGateway,
) -> None:
    class Deleted(MemoryTransport):
        def __getattribute__(self, name: str) -> Any:
            gone = name in ("decision", "sweep", "fence", "late")
            return _deleted if gone else super().__getattribute__(name)

    blocking = BlockingAgent()
    client = gateway.client(blocking, transport=Deleted(), unavailable_timeout_s=0.5).start()
    future = client.submit({})
    blocking.release.set()
    with pytest.raises(Unavailable, match="the bucket was deleted"):
        future.result(60)
    until(lambda: refuses(client), "the client to take no more")
    with pytest.raises(Unavailable, match="the bucket was deleted"):
        client.close()
    client.close()


def refuses(client: RolloutClient) -> bool:
    try:
        client.submit({})
    except UsageError as error:
        return "the client is closed" in str(error)
    return False


async def _deleted(*_: object) -> Any:
    raise Unavailable("the bucket was deleted")


def test_the_base_install_has_the_client_without_what_it_needs_to_run() -> None:
    code = "import afield, sys; afield.RolloutClient, afield.RolloutFuture; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert not {"aiohttp", "torch", "boto3", "openai"} & set(done.stdout.split())
