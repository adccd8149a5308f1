"""The contract of runtimes on what needs nothing but processes; and what is theirs alone."""

import contextlib
import os
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.contracts.runtime_contract import RuntimeContract

from afield.errors import InfrastructureFailure, RolloutFailure
from afield.interfaces.runtime import Exit, Runtime
from afield.runtimes.inline import InlineRuntime
from afield.runtimes.process import ProcessRuntime
from afield.runtimes.registry import SessionRegistry, TrackedRuntime
from afield.runtimes.remote import RemoteRuntime
from afield.sdk.serve import load_object
from afield.transports.stores.files import FilesTransport
from afield.transports.stores.memory import MemoryTransport
from afield.types import Attempt, Reason
from agents.acting import act, nap
from agents.invoking import EXP, invocation, payload
from agents.places import ACTING, BOUND_S, Place, Spec, alive, pids, serving, until, waiting_for
from agents.sink import Sink
from support.paths import TESTS

pytestmark = pytest.mark.anyio


def process(tmp_path: Path, target: str = f"{ACTING}:act", **options: Any) -> ProcessRuntime:
    return ProcessRuntime(target, log_dir=tmp_path / "logs", **{"workers": 1, "poll_s": 0.05, **options})


def make_runtime(how: str, target: str, folder: str) -> Runtime:
    """Runtime of the contract; its controller process calls this, too."""
    if how == "inline":
        return InlineRuntime(load_object(target))
    runtime = process(Path(folder), target, fresh=how == "fresh")
    if how == "fresh":
        return runtime
    return TrackedRuntime(runtime, SessionRegistry(Path(folder) / "sessions.sqlite"), "process")


def served_at(url: str) -> RemoteRuntime:
    return RemoteRuntime([url], poll_s=0.05)


class TestInline(RuntimeContract):
    how = "inline"

    def spec(self, folder: Path, target: str = f"{ACTING}:act") -> Spec:
        return Spec.of(make_runtime, {"how": self.how, "target": target, "folder": str(folder)})


class TestTrackedWarmProcesses(TestInline):
    """Reused workers, through the wrapper that records sessions."""

    how = "warm"


class TestFreshProcesses(TestInline):
    how = "fresh"

    async def test_a_daemon_ends_with_the_attempt_whose_process_it_left(
        self, place: Place, sink: Sink
    ) -> None:
        attempt = await place.launch({"do": "daemon"})
        await sink.until_seen("daemon")
        assert (await place.wait(attempt)).failure is None
        await sink.until_quiet("daemon")


class TestServed(RuntimeContract):
    url = ""

    def spec(self, folder: Path, target: str = f"{ACTING}:act") -> Spec:
        return Spec.of(served_at, {"url": self.url})

    @pytest.fixture
    async def place(self, sink: Sink, tmp_path: Path) -> AsyncIterator[Place]:
        async with serving() as server:
            self.url = server.url
            async with self.spec(tmp_path).build() as runtime:
                yield Place(runtime, sink.transport, sink)


async def test_stopping_cancels_an_async_agent_of_this_process(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    async with FilesTransport(tmp_path / "store") as transport, InlineRuntime(nap) as runtime:
        place = Place(runtime, transport)
        attempt = await place.launch({"seconds": 600, "mark": str(mark)})
        await until(mark.exists)
        await runtime.stop(attempt)
        await until(lambda: mark.read_text() == "cancelled")
        assert await place.decision(attempt) is None


async def test_an_inline_agent_can_deliver_to_memory() -> None:
    attempt = Attempt("r", 1)
    async with MemoryTransport() as transport, InlineRuntime(act, transport.deliver) as runtime:
        one = invocation(**transport.address(EXP))
        await runtime.launch(attempt, payload({"do": "reward"}, one))
        with anyio.fail_after(BOUND_S):
            assert await runtime.wait(attempt) == Exit()
        assert await transport.sweep([waiting_for(attempt)]) == [attempt]


# --- agents apart from us ------------------------------------------------------------------------


@pytest.mark.parametrize("fresh", [False, True])
async def test_closing_the_runtime_kills_an_agent_that_holds_the_interpreter_lock(
    tmp_path: Path, fresh: bool
) -> None:
    mark = tmp_path / "mark"
    async with FilesTransport(tmp_path / "store") as transport:
        async with process(tmp_path, fresh=fresh) as runtime:
            place = Place(runtime, transport)
            attempt = await place.launch({"do": "lock", "mark": str(mark)})
            await until(lambda: bool(pids(mark)))
        ended = await runtime.wait(attempt)
        assert ended.failure and ended.failure.reason is Reason.CANCELLED
    await until(lambda: not any(map(alive, pids(mark))))


async def test_a_crash_takes_only_the_attempts_of_its_worker(tmp_path: Path) -> None:
    async with FilesTransport(tmp_path / "store") as transport, process(tmp_path, workers=2) as runtime:
        place = Place(runtime, transport)
        # Both workers are up before the first attempt, so that the two attempts are in different ones.
        await until(lambda: sum(w.ready for w in runtime.workers) == 2)
        released = tmp_path / "released"
        survivor = await place.launch({"do": "sleep", "until": str(released)}, "survivor")
        with contextlib.suppress(InfrastructureFailure):
            await place.launch({"do": "kill"}, "victim")
        assert (await place.wait(Attempt("victim", 1))).failure
        released.touch()
        assert await place.wait(survivor) == Exit()
        assert await place.reward(survivor) == 1.0


async def test_a_retired_worker_lets_its_other_attempts_finish(tmp_path: Path) -> None:
    async with FilesTransport(tmp_path / "store") as transport, process(tmp_path) as runtime:
        place = Place(runtime, transport)
        mark = tmp_path / "mark"
        hanging = await place.launch({"do": "hang", "mark": str(mark)}, "hanging")
        working = await place.launch({"do": "sleep", "seconds": 0.5}, "working")
        await until(lambda: bool(pids(mark)))
        await runtime.stop(hanging)
        assert await place.wait(working) == Exit()
        assert await place.reward(working) == 1.0
        await until(lambda: not alive(pids(mark)[0]))


async def test_a_worker_takes_no_more_than_its_concurrency(tmp_path: Path) -> None:
    async with FilesTransport(tmp_path / "store") as transport, process(tmp_path, concurrency=1) as runtime:
        place = Place(runtime, transport)
        first = await place.launch({"do": "hang"}, "first")
        with pytest.raises(TimeoutError), anyio.fail_after(0.3):
            await runtime.launch(
                Attempt("second", 1),
                payload({"do": "reward"}, invocation("second", **transport.address(EXP))),
            )
        await runtime.stop(first)
        second = await place.launch({"do": "reward"}, "second")
        assert await place.wait(second) == Exit()


@pytest.mark.parametrize("fresh", [False, True])
async def test_a_target_that_cannot_start_fails_the_launch_with_what_it_printed(
    tmp_path: Path, fresh: bool
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module\n")
    async with FilesTransport(tmp_path / "store") as transport:
        async with process(tmp_path, f"{broken}:agent", fresh=fresh, workers=2) as runtime:
            place = Place(runtime, transport)
            for n in (1, 2):
                with pytest.raises(InfrastructureFailure, match="no_such_module") as caught:
                    await place.launch({"do": "reward"}, n=n)
                assert caught.value.reason is Reason.LAUNCH
        assert len(list((tmp_path / "logs").iterdir())) <= 6


async def test_a_target_that_keeps_dying_does_not_spin(tmp_path: Path) -> None:
    dying = tmp_path / "dying.py"
    dying.write_text(
        "import os, threading\nprint('born')\nthreading.Timer(0.1, os._exit, (7,)).start()\nagent = len\n"
    )
    async with process(tmp_path, f"{dying}:agent", workers=2) as runtime:
        for n in range(1, 4):
            with anyio.fail_after(BOUND_S), contextlib.suppress(InfrastructureFailure):
                await runtime.launch(Attempt("r", n), payload({}, invocation(n=n)))
            ended = await runtime.wait(Attempt("r", n))
            assert ended.failure and "exit code 7" in ended.failure.message
        assert len(list((tmp_path / "logs").iterdir())) <= 12


async def test_a_target_that_is_never_ready_fails_the_launch(tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text("import time\nprint('thinking', flush=True)\ntime.sleep(600)\n")
    async with (
        FilesTransport(tmp_path / "store") as transport,
        process(tmp_path, f"{slow}:agent", start_timeout_s=0.5) as runtime,
    ):
        with pytest.raises(InfrastructureFailure, match=r"not ready within 0\.5 s"):
            await Place(runtime, transport).launch({"do": "reward"})


@pytest.mark.parametrize("fresh", [False, True])
async def test_an_attempt_can_be_stopped_while_its_process_starts(tmp_path: Path, fresh: bool) -> None:
    slow = tmp_path / "slow.py"
    mark = tmp_path / "mark"
    slow.write_text(
        f"import os, time\nopen({str(mark)!r}, 'a').write(f'{{os.getpid()}} ')\ntime.sleep(600)\n"
    )
    refused: list[RolloutFailure] = []
    async with process(tmp_path, f"{slow}:agent", fresh=fresh) as runtime:

        async def launch() -> None:
            try:
                await runtime.launch(Attempt("r", 1), payload({}, invocation()))
            except RolloutFailure as failure:
                refused.append(failure)

        with anyio.fail_after(BOUND_S):
            async with anyio.create_task_group() as group:
                group.start_soon(launch)
                await until(lambda: bool(pids(mark)))
                await runtime.stop(Attempt("r", 1))
        assert [f.reason for f in refused] == [Reason.CANCELLED]
        if fresh:
            await until(lambda: not any(map(alive, pids(mark))))
    await until(lambda: not any(map(alive, pids(mark))))


@pytest.mark.parametrize("given", [False, True])
async def test_a_dropped_variable_does_not_reach_the_agent(
    tmp_path: Path, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AFIELD_ADMIN_KEY", "1")
    monkeypatch.setenv("HANDED_ON", "2")
    env = dict(os.environ) if given else None
    async with FilesTransport(tmp_path / "store") as transport, process(tmp_path, env=env) as runtime:
        place = Place(runtime, transport)
        for name, value in (("AFIELD_ADMIN_KEY", -1.0), ("HANDED_ON", 2.0)):
            attempt = await place.launch({"do": "environment", "name": name}, name)
            await place.wait(attempt)
            assert await place.reward(attempt) == value


async def test_launching_outside_the_runtime_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="async with"):
        await process(tmp_path).launch(Attempt("r", 1), {})


async def test_killing_the_controller_kills_an_agent_that_holds_the_interpreter_lock(tmp_path: Path) -> None:
    controller = tmp_path / "controller.py"
    controller.write_text(
        textwrap.dedent(f"""
        import asyncio, sys
        from pathlib import Path
        sys.path.insert(0, {str(TESTS)!r})
        from agents.invoking import invocation, payload
        from afield.runtimes.process import ProcessRuntime
        from afield.types import Attempt

        async def main():
            here = Path({str(tmp_path)!r})
            async with ProcessRuntime({ACTING + ":act"!r}, log_dir=here / "logs", workers=2) as runtime:
                row = {{"do": "lock", "mark": str(here / "mark")}}
                await runtime.launch(Attempt("r", 1), payload(row, invocation()))
                await asyncio.sleep(600)

        asyncio.run(main())
        """)
    )
    running = await anyio.open_process(
        [sys.executable, str(controller)], stdin=None, stdout=None, stderr=None
    )
    async with running:
        try:
            await until(lambda: bool(pids(tmp_path / "mark")))
            workers = [p for p in _group_leaders(running.pid) if p != running.pid]
            assert workers
        finally:
            running.kill()
    await until(lambda: not any(map(alive, workers + pids(tmp_path / "mark"))))


def _group_leaders(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task").glob("*/children")
    return [int(pid) for path in children for pid in path.read_text().split()]


async def test_failures_of_a_launch_are_rollout_failures(tmp_path: Path) -> None:
    async with process(tmp_path, f"{tmp_path}/missing.py:agent") as runtime:
        with (
            pytest.raises(RolloutFailure, match=r"there is no file .*missing\.py"),
            anyio.fail_after(BOUND_S),
        ):
            await runtime.launch(Attempt("r", 1), payload({}, invocation()))
