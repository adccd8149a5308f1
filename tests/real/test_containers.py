"""The container runtime against a real engine: Podman, started here, with an image built here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio
import msgspec
import pytest
from tests.contracts.runtime_contract import RuntimeContract, controller

from afield.errors import InfrastructureFailure, NotFound, Unavailable, UsageError
from afield.interfaces.runtime import Phase
from afield.interfaces.sandbox import MAX_DOWNLOAD_BYTES
from afield.runtimes.docker.engine import container_name
from afield.runtimes.docker.runtime import ContainerRuntime
from afield.runtimes.docker.sandbox import ContainerSandbox
from afield.settings.runtimes import ResourceLimits
from afield.transports.stores.files import FilesTransport
from afield.types import Attempt, Reason
from agents.places import BOUND_S, Place, Spec
from agents.sink import Sink
from support import podman as containers

pytestmark = [pytest.mark.real, pytest.mark.anyio]
# Out of the group, out of the session, nobody's child.
DAEMON = """python3 -c 'import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execlp("sleep", "sleep", "77")'; sleep 77"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[containers.Podman]:
    try:
        with containers.podman(tmp_path_factory.mktemp("podman")) as podman:
            yield podman
    except Unavailable as error:
        pytest.fail(str(error)) if os.environ.get("CI") else pytest.skip(str(error))


@pytest.fixture
def run(engine: containers.Podman) -> Iterator[str]:
    """The name of a run; nothing of it is left after the test, however that went."""
    name = f"test-{uuid4().hex[:8]}"
    yield name
    engine.remove_all(name)


class TestContainer(RuntimeContract):
    @pytest.fixture(autouse=True)
    def _engine(self, engine: containers.Podman, run: str) -> None:
        self.engine, self.run = engine, run

    def spec(self, folder: Path, target: str = "acting.py:act") -> Spec:
        given = {"socket": self.engine.socket, "image": self.engine.image}
        where = {"folder": str(folder), "run": self.run, "target": Path(target).name}
        return Spec.of(containers.runtime, {**given, **where})

    @pytest.fixture
    async def sink(self, tmp_path: Path) -> AsyncIterator[Sink]:
        """At an address that containers reach also when nobody relays to our loopback."""
        async with (
            FilesTransport(tmp_path / "store") as transport,
            Sink(transport).running("0.0.0.0", "host.containers.internal") as sink,
        ):
            yield sink


@pytest.fixture
async def sink(tmp_path: Path) -> AsyncIterator[Sink]:
    """On our loopback, as a gateway is that nobody told otherwise."""
    async with FilesTransport(tmp_path / "store") as transport, Sink(transport).running() as sink:
        yield sink


class Here:
    """Makes runtimes of one run at the engine."""

    def __init__(self, engine: containers.Podman, run: str, folder: Path) -> None:
        self.engine = engine
        self.run = run
        self.folder = folder

    def runtime(self, run: str = "", start_timeout_s: float = 60.0, **changes: Any) -> ContainerRuntime:
        return ContainerRuntime(
            self.engine.options(**changes),
            name=run or self.run,
            log_dir=self.folder / "logs",
            start_timeout_s=start_timeout_s,
            poll_s=0.1,
        )

    def sandbox(self, most_bytes: int = MAX_DOWNLOAD_BYTES, **changes: Any) -> ContainerSandbox:
        options = self.engine.options(**changes)
        return ContainerSandbox(options=options, name=self.run, most_bytes=most_bytes)


@pytest.fixture
def here(engine: containers.Podman, run: str, tmp_path: Path) -> Here:
    return Here(engine, run, tmp_path)


# --- reaching this machine -------------------------------------------------------------------------


async def test_an_agent_reaches_a_gateway_on_our_loopback(here: Here, sink: Sink) -> None:
    async with here.runtime() as runtime:
        place = Place(runtime, sink.transport, sink)
        attempt = await place.launch({"do": "reward", "value": 0.5})
        assert (await place.wait(attempt)).failure is None
        assert await place.reward(attempt) == 0.5
        # The task's row is the task's: what it says about 127.0.0.1 was not touched.
        assert sink.told("began") == []


async def test_a_relay_is_for_containers_alone(here: Here, sink: Sink) -> None:
    async with here.runtime() as runtime:
        place = Place(runtime, sink.transport, sink)
        await place.wait(await place.launch({"do": "reward"}))
        port = sink.port
        with contextlib.closing(here.engine.api()) as api:
            bridge = api.inspect_container(container_name("r.1"))["NetworkSettings"]["Gateway"]
        # We come from an address of the bridge too; so do not other machines.
        reader, writer = await asyncio.open_connection(bridge, port, local_addr=("127.0.0.1", 0))
        with contextlib.closing(writer):
            with anyio.fail_after(60):
                assert await reader.read() == b""


async def test_a_server_on_all_addresses_needs_no_relay(here: Here, tmp_path: Path) -> None:
    async with (
        FilesTransport(tmp_path / "store") as transport,
        Sink(transport).running("0.0.0.0") as sink,
        here.runtime() as runtime,
    ):
        place = Place(runtime, transport, sink)
        attempt = await place.launch({"do": "reward", "value": 0.25})
        assert (await place.wait(attempt)).failure is None
        assert await place.reward(attempt) == 0.25


async def test_an_app_made_for_agentcore_runs_unchanged(here: Here, sink: Sink, tmp_path: Path) -> None:
    """The library's own server: it does not tell its sessions apart, and picks the address it listens on."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the image has Python 3.11, and borrows this environment's packages")
    packages = Path(msgspec.__file__).parent.parent
    (tmp_path / "app.py").write_text(AGENTCORE_APP)
    changes = {
        "command": ("python3", "/app/app.py"),
        "mounts": (f"{packages}:/packages:ro", f"{tmp_path}:/app:ro"),
        "env": {"PYTHONPATH": "/packages", "PYTHONDONTWRITEBYTECODE": "1"},
    }
    async with here.runtime(**changes) as runtime:
        place = Place(runtime, sink.transport, sink)
        started = anyio.current_time()
        attempt = await place.launch({"seconds": 2.0})
        assert await runtime.adopt(attempt) is True
        assert (await place.wait(attempt)).failure is None
        assert anyio.current_time() - started > 2.0


AGENTCORE_APP = """
import threading, time
from bedrock_agentcore import BedrockAgentCoreApp

app = BedrockAgentCoreApp()

@app.entrypoint
def invoke(payload):
    working = app.add_async_task("work")
    def work():
        time.sleep(payload["seconds"])
        app.complete_async_task(working)
    threading.Thread(target=work).start()
    return {"status": "processing"}

app.run()
"""


# --- containers that do not come up, or do not stay ------------------------------------------------


async def test_one_that_never_answers_fails_the_launch_with_what_it_printed(here: Here, sink: Sink) -> None:
    command = ("python3", "-c", "import time; print('thinking', flush=True); time.sleep(600)")
    async with here.runtime(command=command, start_timeout_s=10.0) as runtime:
        with pytest.raises(InfrastructureFailure, match=r"within 10 s.*thinking") as caught:
            await Place(runtime, sink.transport, sink).launch({"do": "reward"})
        assert caught.value.reason is Reason.LAUNCH
        assert await runtime.list() == []
        assert "thinking" in await runtime.logs(Attempt("r", 1))


@pytest.mark.parametrize(
    ("command", "said"),
    [(("python3", "-c", "raise SystemExit('no luck')"), "exit code 1.*no luck"), (("nosuch",), "nosuch")],
)
async def test_one_that_cannot_start_fails_the_launch(
    here: Here, sink: Sink, command: tuple[str, ...], said: str
) -> None:
    async with here.runtime(command=command) as runtime:
        with pytest.raises(InfrastructureFailure, match=f"(?s){said}"):
            await Place(runtime, sink.transport, sink).launch({"do": "reward"})
        assert await runtime.list() == []


async def test_one_can_be_stopped_while_it_starts(here: Here, sink: Sink) -> None:
    refused: list[InfrastructureFailure] = []
    async with here.runtime(command=("sleep", "600")) as runtime:

        async def launch() -> None:
            try:
                await Place(runtime, sink.transport, sink).launch({"do": "reward"})
            except InfrastructureFailure as failure:
                refused.append(failure)

        with anyio.fail_after(BOUND_S):
            async with anyio.create_task_group() as group:
                group.start_soon(launch)
                while not await runtime.list():
                    await anyio.sleep(0.05)
                await runtime.stop(Attempt("r", 1))
        assert [failure.reason for failure in refused] == [Reason.CANCELLED]
        assert await runtime.list() == []


async def test_removed_container_fails_the_attempt_as_died(here: Here, sink: Sink) -> None:
    async with here.runtime() as runtime:
        place = Place(runtime, sink.transport, sink)
        attempt = await place.launch({"do": "hang"})
        here.engine.remove_all(here.run)
        failure = (await place.wait(attempt)).failure
        assert failure and failure.reason is Reason.DIED
        assert "removed" in failure.message


async def test_attempts_outlast_a_restart_of_the_engine(here: Here, sink: Sink) -> None:
    async with here.runtime() as runtime:
        place = Place(runtime, sink.transport, sink)
        attempt = await place.launch({"do": "sleep", "seconds": 3.0, "value": 0.5})
        here.engine.restart()  # not in a thread: the engine would end with it
        assert (await place.wait(attempt)).failure is None
        assert await place.reward(attempt) == 0.5


# --- runs beside each other ------------------------------------------------------------------------


async def test_a_run_neither_sees_nor_stops_what_another_run_started(here: Here, sink: Sink) -> None:
    async with here.runtime() as runtime, here.runtime(run=f"{here.run}-other") as other:
        place = Place(runtime, sink.transport, sink)
        attempt = await place.launch({"do": "hang"})
        assert await other.list() == []
        await other.stop(attempt)
        with pytest.raises(InfrastructureFailure, match=f"belongs to run '{here.run}'"):
            await Place(other, sink.transport, sink).launch({"do": "reward"})
        assert (await runtime.status(attempt)).phase is Phase.RUNNING


async def test_orphans_are_found_by_their_label_and_ended(here: Here, sink: Sink, tmp_path: Path) -> None:
    where = {"socket": here.engine.socket, "image": here.engine.image}
    spec = Spec.of(containers.runtime, {**where, "folder": str(tmp_path), "run": here.run})
    async with here.runtime() as runtime:
        place = Place(runtime, sink.transport, sink)
        for name in ("one", "two"):
            async with controller(spec, place, {"do": "hang"}, Attempt(name, 1)):
                pass
        orphans = await runtime.list()
        assert sorted(live.session_id for live in orphans) == ["one.1", "two.1"]
        assert {live.phase for live in orphans} == {Phase.RUNNING}
        for live in orphans:
            await runtime.stop(Attempt.from_session_id(live.session_id))
        assert await runtime.list() == []


# --- what is checked before the first rollout -------------------------------------------------------


async def test_an_image_that_does_not_exist_is_not_pulled_where_that_is_forbidden(here: Here) -> None:
    async with here.runtime(image="localhost/no-such:1") as runtime:
        with pytest.raises(UsageError, match=r"'localhost/no-such:1'.*pull = 'never'.*pull = 'missing'"):
            await runtime.check()


@pytest.mark.parametrize("pull", ["missing", "always"])
async def test_an_image_that_cannot_be_pulled_is_named(here: Here, pull: str) -> None:
    # Nobody listens there.
    async with here.runtime(image="127.0.0.1:1/no-such:1", pull=pull) as runtime:
        with pytest.raises(UsageError, match=r"cannot pull image '127.0.0.1:1/no-such:1'.*refused"):
            await runtime.check()


async def test_an_image_that_is_there_is_pulled_only_where_that_is_asked_for(here: Here) -> None:
    async with here.runtime(pull="missing") as runtime:
        await runtime.check()
    async with here.runtime(pull="always") as runtime:
        with pytest.raises(UsageError, match="cannot pull image"):
            await runtime.check()


async def test_a_mount_that_does_not_exist_is_named(here: Here) -> None:
    async with here.runtime(mounts=("/no/such/folder:/data",)) as runtime:
        with pytest.raises(UsageError, match="/no/such/folder"):
            await runtime.check()


# --- commands in a container of their own -----------------------------------------------------------


async def test_what_came_of_a_command_is_data(here: Here) -> None:
    async with here.sandbox() as sandbox:
        ran = await sandbox.exec("echo out; echo err >&2; exit 3")
        assert (ran.exit_code, ran.stdout, ran.stderr, ran.timed_out) == (3, "out\n", "err\n", False)
        assert not ran.ok
        ran = await sandbox.exec(["sh", "-c", "pwd; echo $A; cat"], cwd="/usr", env={"A": "b c"}, stdin=b"in")
        assert ran.stdout == "/usr\nb c\nin"
        # Podman says 127, as shells do; Docker says 126.
        assert (await sandbox.exec(["no-such-program"])).exit_code in (126, 127)


async def test_input_and_output_larger_than_any_buffer_pass(here: Here) -> None:
    async with here.sandbox() as sandbox:
        assert (await sandbox.exec("cat", stdin=b"x" * 3_000_000)).stdout == "x" * 3_000_000
        ran = await sandbox.exec("head -c 20000000 /dev/zero | tr '\\0' y; echo end")
        assert ran.ok and ran.truncated and ran.stdout.endswith("yend\n")
        assert len(ran.stdout) < 5_000_000


@pytest.mark.parametrize(
    "command",
    ["sleep 77", "trap '' TERM INT HUP; sleep 77", "(sleep 77 &) ; sleep 77", DAEMON],
    ids=["plain", "deaf", "child", "daemon"],
)
async def test_a_command_is_killed_after_its_timeout_with_all_it_started(here: Here, command: str) -> None:
    async with here.sandbox() as sandbox:
        ran = await sandbox.exec(f"echo begun; {command}", timeout=6)
        assert (ran.exit_code, ran.timed_out, ran.stdout) == (None, True, "begun\n")
        assert "77" not in (await sandbox.exec("ps axo args")).stdout.replace("ps axo args", "")
        assert (await sandbox.exec("true")).ok


async def test_a_timeout_does_not_end_the_commands_beside_it(here: Here) -> None:
    async with here.sandbox() as sandbox:
        async with asyncio.TaskGroup() as group:
            beside = group.create_task(sandbox.exec("sleep 8; echo rested"))
            late = group.create_task(sandbox.exec(f"{DAEMON}; sleep 77", timeout=4))
        assert late.result().timed_out
        assert beside.result().stdout == "rested\n"
        assert "77" not in (await sandbox.exec("ps axo args")).stdout


async def test_a_command_that_leaves_a_child_behind_has_ended(here: Here) -> None:
    async with here.sandbox() as sandbox:
        with anyio.fail_after(60):
            assert (await sandbox.exec("sleep 77 & echo left")).stdout == "left\n"


async def test_a_command_that_closes_its_output_is_waited_for(here: Here) -> None:
    async with here.sandbox() as sandbox:
        assert (await sandbox.exec("exec >&- 2>&-; sleep 1; exit 5")).exit_code == 5


async def test_uploaded_files_are_downloaded_unchanged(here: Here) -> None:
    data = bytes(range(256)) * 10_000
    async with here.sandbox() as sandbox:
        await sandbox.upload("/tmp/a/b/c.bin", b"old and longer" * 200_000)
        await sandbox.upload("/tmp/a/b/c.bin", data)
        assert await sandbox.download("/tmp/a/b/c.bin") == data
        await sandbox.upload("/tmp/empty", b"")
        assert await sandbox.download("/tmp/empty") == b""
        with pytest.raises(NotFound, match="/tmp/none"):
            await sandbox.download("/tmp/none")


async def test_what_is_no_plain_file_or_has_no_end_is_not_waited_for(here: Here) -> None:
    async with here.sandbox(most_bytes=1_000_000) as sandbox:
        assert (await sandbox.exec("mkfifo /tmp/pipe; truncate -s 1G /tmp/holes")).ok
        for path in ("/tmp/pipe", "/tmp"):
            with pytest.raises(InfrastructureFailure, match="not a plain file"):
                await sandbox.upload(path, b"x" * 100_000)
            with pytest.raises(NotFound):
                await sandbox.download(path)
        with pytest.raises(InfrastructureFailure, match="holes in the sandbox has more than 1000000 bytes"):
            await sandbox.download("/tmp/holes")
        with pytest.raises(UsageError, match="NUL"):
            await sandbox.exec("echo a\0b")
        assert (await sandbox.exec("echo on")).stdout == "on\n"


async def test_a_sandbox_has_no_rights_no_network_and_its_limits(here: Here) -> None:
    limits = ResourceLimits(memory_mb=128, pids=20, disk_mb=8, files=None)
    async with here.sandbox(limits=limits) as sandbox:
        status = (await sandbox.exec("cat /proc/self/status")).stdout
        assert "CapEff:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status
        assert (await sandbox.exec("ls /sys/class/net")).stdout.split() in (["lo"], [])
        assert not (await sandbox.exec("head -c 20000000 /dev/zero > /tmp/big")).ok
        assert not (await sandbox.exec("echo x > /etc/written")).ok
        await sandbox.exec("rm /tmp/big")
        eaten = await sandbox.exec(["python3", "-c", "x = [b'1' * 2**20 for _ in range(500)]"])
        assert eaten.exit_code == 137


async def test_what_forks_without_end_is_ended(here: Here) -> None:
    bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    async with here.sandbox(
        limits=ResourceLimits(memory_mb=512, pids=30, disk_mb=None, files=None)
    ) as sandbox:
        ran = await sandbox.exec(["python3", "-c", bomb], timeout=3)
        assert ran.timed_out
        assert (await sandbox.exec("echo still here; ps axo args")).stdout.startswith("still here\n")
        assert "fork" not in (await sandbox.exec("ps axo args")).stdout


async def test_nothing_is_left_of_a_sandbox_and_a_forgotten_one_is_listed_and_stopped(here: Here) -> None:
    async with here.runtime() as runtime:
        async with here.sandbox():
            [live] = await runtime.list()
        assert await runtime.list() == []
        async with here.sandbox() as sandbox:
            [live] = await runtime.list()
            await runtime.stop(Attempt.from_session_id(live.session_id))
            with pytest.raises(InfrastructureFailure, match="gone"):
                await sandbox.exec("true")


async def test_sandbox_with_a_missing_image_raises_usage_error(here: Here) -> None:
    async with here.runtime() as runtime:
        with pytest.raises(UsageError, match="no-such"):
            async with here.sandbox(image="localhost/no-such:2"):
                pass
        assert await runtime.list() == []
