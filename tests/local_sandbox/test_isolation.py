"""What a cell keeps apart: processes, files, environment, network, and its share of the machine."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from afield.local_sandbox.bwrap import WORK
from afield.local_sandbox.messages import ProcessExit, Program
from afield.local_sandbox.process import SandboxProcess
from afield.settings.runtimes import ResourceLimits
from support.sandboxes import all_command_lines, fork_server, needs_bubblewrap, write_program

pytestmark = [pytest.mark.anyio, needs_bubblewrap]

CANARY = f"canary-{secrets.token_hex(4)}"  # another per process: tests look at the arguments of all processes
IDLE = "import threading\nthreading.Event().wait()\n"


async def ran(
    tmp_path: Path, source: str, *, limits: ResourceLimits | None = None, **start: object
) -> tuple[ProcessExit, str]:
    """A script to its end: how it ended, and what it printed."""
    program = Program(script=str(write_program(tmp_path / "program", source)), port=0)
    async with fork_server(tmp_path, program, limits) as server:
        sandbox = await server.start("s", **start)  # pyright: ignore[reportArgumentType]
        with anyio.fail_after(60):
            ended = await sandbox.ended()
        return ended, sandbox.log.read_text()


@asynccontextmanager
async def commands(tmp_path: Path, limits: ResourceLimits | None = None) -> AsyncIterator[SandboxProcess]:
    async with fork_server(tmp_path, Program(), limits) as server:
        yield await server.start("s")


async def said(sandbox: SandboxProcess, command: str) -> str:
    result = await sandbox.exec(command, timeout=30)
    return result.stdout + result.stderr


# --- processes -----------------------------------------------------------------------------------


async def test_a_sandbox_sees_no_process_but_its_own(tmp_path: Path) -> None:
    async with fork_server(tmp_path, Program()) as server:
        one, other = await server.start("one"), await server.start("other")
        assert (await other.exec("sleep 98765 & echo started")).ok
        listed = await said(one, "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done")
        assert "98765" not in listed and "pytest" not in listed
        assert not (await one.exec(f"kill -0 {os.getpid()}")).ok


async def test_the_first_process_of_a_sandbox_cannot_be_read_signalled_or_traced(tmp_path: Path) -> None:
    source = """
        import ctypes, os, signal
        for name in ("environ", "mem", "maps", "fd/3"):
            try:
                open(f"/proc/1/{name}", "rb").read(1)
                print("READ", name)
            except OSError:
                pass
        for number in set(signal.Signals) - {signal.SIGCHLD}:
            os.kill(1, number)
        print("traced", ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0)
    """
    ended, printed = await ran(tmp_path, source.replace("\n        ", "\n"))
    assert ended.clean, printed
    assert "READ" not in printed
    assert "traced False" in printed


async def test_nothing_of_ours_is_in_the_environment_or_in_an_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AFIELD_SECRET", CANARY)
    program = Program(script=str(write_program(tmp_path / "program", IDLE)), port=0, env={"GIVEN": "given"})
    async with fork_server(tmp_path, program) as server:
        sandbox = await server.start("s", env={"MINE": CANARY})
        assert (await said(sandbox, "echo $AFIELD_SECRET-$MINE-$GIVEN")).strip() == f"-{CANARY}-given"
        shown = all_command_lines()
        assert not any(CANARY.encode() in arguments for arguments in shown)


async def test_a_sandbox_has_no_privilege_and_cannot_get_any(tmp_path: Path) -> None:
    async with commands(tmp_path) as sandbox:
        status = await said(sandbox, "cat /proc/self/status")
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        for name in ("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb"):
            assert int(fields[name], 16) == 0
        assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
        assert (await said(sandbox, "id -u")).strip() == "1000"


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("libc.unshare(0x10000000)", "unshare"),
        ("libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)", "mount"),
        ("libc.umount2(b'/tmp', 2)", "umount"),
        ("libc.ptrace(0, 0, 0, 0)", "ptrace"),
        ("libc.syscall(250, 0, -3, 0, 0, 0) if machine == 'x86_64' else libc.syscall(219, 0, -3)", "keyctl"),
        ("libc.setns(3, 0)", "setns"),
    ],
)
async def test_a_call_around_the_walls_fails_and_is_in_the_log(tmp_path: Path, call: str, name: str) -> None:
    source = (
        f"import ctypes, os\nmachine = os.uname().machine\nlibc = ctypes.CDLL(None)\nprint('got', {call})\n"
    )
    _, printed = await ran(tmp_path, source)
    assert "got -1" in printed
    assert f"[sandbox] {name} (call " in printed


# --- files ---------------------------------------------------------------------------------------


async def test_sandbox_sees_no_files_of_this_machine_except_its_mounts(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(CANARY)
    home = Path.home()
    async with commands(tmp_path) as sandbox:
        for place in (
            tmp_path / "secret",
            "/etc/shadow",
            "/etc/passwd-",
            f"{home}/.ssh",
            "/sys/kernel",
            "/boot",
        ):
            assert not (await sandbox.exec(["test", "-e", str(place)])).ok, place
        assert CANARY not in await said(sandbox, f"grep -rs {CANARY} /tmp /work /run /var /etc")


async def test_an_agent_reads_its_code_and_what_was_mounted_and_writes_neither(tmp_path: Path) -> None:
    extra = write_program(tmp_path / "extra", "more", "more.txt")
    script = write_program(tmp_path / "program", IDLE)
    write_program(tmp_path / "program" / "runs", CANARY, "key")
    program = Program(
        script=str(script), port=0, mounts=(str(extra),), hidden=(str(tmp_path / "program" / "runs"),)
    )
    async with fork_server(tmp_path, program) as server:
        sandbox = await server.start("s")
        assert (await said(sandbox, f"cat {extra}")) == "more"
        assert (await said(sandbox, f"cat {script}")) == IDLE
        assert CANARY not in await said(sandbox, f"cat {script.parent}/runs/key")
        for place in (script, extra, script.parent / "new", "/usr/new", "/etc/new", "/dev/new", "/new"):
            assert not (await sandbox.exec(f"echo x > {place}")).ok, place
    assert script.read_text() == IDLE


async def test_what_one_sandbox_writes_no_other_sees(tmp_path: Path) -> None:
    async with fork_server(tmp_path, Program()) as server:
        one, other = await server.start("one"), await server.start("other")
        for place in ("/tmp", "/var/tmp", "/run", "/work", "/dev/shm"):
            assert (await one.exec(f"echo {CANARY} > {place}/x")).ok, place
            assert not (await other.exec(["test", "-e", f"{place}/x"])).ok, place


async def test_the_kernels_settings_cannot_be_written(tmp_path: Path) -> None:
    """Files there belong to root, who may be whom a cell's user is outside."""
    async with commands(tmp_path) as sandbox:
        for name in ("sys/kernel/core_pattern", "sys/vm/drop_caches", "sysrq-trigger"):
            assert not (await sandbox.exec(f"echo x > /proc/{name}")).ok, name
        assert (await sandbox.exec("test -r /proc/meminfo")).ok


async def test_files_that_were_open_at_import_are_not_shared_between_sandboxes(tmp_path: Path) -> None:
    source = """
import os, socket, afield
data = open(__file__)
ours, theirs = socket.socketpair()

@afield.agent
def agent(task):
    return 1.0
"""
    write_program(tmp_path / "program", source)
    program = Program(target=f"{tmp_path / 'program' / 'agent.py'}:agent")
    async with fork_server(tmp_path, program) as server:
        sandbox = await server.start("s")
        links = ""
        with anyio.fail_after(60):
            while "->" not in links:  # its links can be read once it has dropped its privileges
                links = await said(sandbox, "ls -l /proc/2/fd")
        assert links.count("agent.py") == 1  # its own, to be read on
        assert links.count("/dev/null") >= 3  # stdin, and both ends of the pair


# --- network -------------------------------------------------------------------------------------


@asynccontextmanager
async def answering(host: str = "127.0.0.1") -> AsyncIterator[int]:
    """A server that hears all there is, then answers in two pieces."""

    async def answer(stream: SocketStream) -> None:
        async with stream:
            heard = b""
            try:
                while True:
                    heard += await stream.receive()
            except anyio.EndOfStream:
                pass
            await stream.send(b"heard ")
            await anyio.sleep(0.05)
            await stream.send(str(len(heard)).encode())

    listener = await anyio.create_tcp_listener(local_host=host)
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, answer)
        yield listener.extra(SocketAttribute.local_port)
        group.cancel_scope.cancel()


ASK = """
import socket, sys
def ask(host, port):
    try:
        with socket.create_connection((host, port), timeout=10) as link:
            link.sendall(b"x" * 1_000_000)
            link.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := link.recv(100):
                answer += piece
            return answer.decode()
    except OSError as error:
        return f"{type(error).__name__}"
"""


async def test_a_sandbox_reaches_what_it_was_allowed_by_the_same_name_and_nothing_else(
    tmp_path: Path,
) -> None:
    async with answering() as allowed, answering("127.0.0.2") as second, answering() as other:
        source = f"""{ASK}
print("allowed:", ask("127.0.0.1", {allowed}))
print("named:", ask("localhost", {allowed}))
print("second:", ask("127.0.0.2", {second}))
print("other:", ask("127.0.0.1", {other}))
print("far:", ask("192.0.2.1", 80))
"""
        doors = [("localhost", allowed), ("127.0.0.2", second)]
        ended, printed = await ran(tmp_path, source, allow=doors)
    assert ended.clean, printed
    assert "allowed: heard 1000000" in printed
    assert "named: heard 1000000" in printed
    assert "second: heard 1000000" in printed
    assert "other: ConnectionRefusedError" in printed
    assert "far: OSError" in printed
    assert f"[sandbox] 127.0.0.1:{other} is not an allowed address" in printed
    assert "[sandbox] 192.0.2.1:80 is not an allowed address" in printed
    assert f":{allowed} cannot be reached" not in printed


async def test_an_address_of_another_machine_is_reached_under_its_own_number(tmp_path: Path) -> None:
    """The door has that address in the cell; outside, nobody answers there, and the log says so."""
    ended, _ = await ran(tmp_path, f"{ASK}\nask('203.0.113.7', 81)\n", allow=[("203.0.113.7", 81)])
    assert ended.clean
    assert "not an allowed" not in ended.log


async def test_sockets_of_this_machine_are_out_of_reach(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{CANARY}")
        abstract.listen()
        source = f"""
import socket
for family, address in ((socket.AF_UNIX, "\\0{CANARY}"), (40, (2, 1024))):
    try:
        socket.socket(family).connect(address)
        print("REACHED", address)
    except OSError as error:
        print(error)
"""
        ended, printed = await ran(tmp_path, source)
    assert ended.clean and "REACHED" not in printed, printed


# --- limits --------------------------------------------------------------------------------------


async def test_too_much_memory_is_an_end_that_names_it(tmp_path: Path) -> None:
    source = "eaten = [b'x' * 2**20 for _ in range(2000)]\n"
    ended, _ = await ran(tmp_path, source, limits=ResourceLimits(memory_mb=128))
    assert not ended.clean
    assert "memory" in f"{ended} {ended.log}".lower()


async def test_a_fork_bomb_meets_its_limit_and_the_sandbox_continues(tmp_path: Path) -> None:
    source = """
import os, time
born = 0
try:
    while born < 1000:
        if os.fork() == 0:
            time.sleep(600)
        born += 1
except OSError as error:
    print("stopped", born, error, flush=True)
"""
    ended, printed = await ran(tmp_path, source, limits=ResourceLimits(pids=40))
    assert ended.clean, printed
    assert 20 <= int(printed.split("stopped ")[1].split()[0]) <= 42


async def test_the_disk_is_full_at_its_limit_in_bytes_and_in_files(tmp_path: Path) -> None:
    async with commands(tmp_path, ResourceLimits(disk_mb=16)) as sandbox:
        fill_work = f"head -c 7000000 /dev/zero > {WORK}/x"
        fill = "for i in 1 2 3; do head -c 7000000 /dev/zero > {}/$i || exit 1; done"
        assert not (await sandbox.exec(fill.format("/tmp"))).ok
        assert not (await sandbox.exec(fill_work)).ok, "one limit for all places"
        assert (await sandbox.exec("rm /tmp/*; head -c 7000000 /dev/zero > /dev/shm/x")).ok
        many = "import sys\nfor i in range(100_000):\n    open(f'/tmp/f{i}', 'w').close()\n"
        result = await sandbox.exec([sys.executable, "-c", many])
        assert "No space left" in result.stderr


async def test_open_files_meet_their_limit(tmp_path: Path) -> None:
    source = "held = [open('/dev/null') for _ in range(500)]\n"
    ended, printed = await ran(tmp_path, source, limits=ResourceLimits(files=100))
    assert not ended.clean
    assert "Too many open files" in printed


async def test_a_busy_sandbox_gets_its_share_of_the_processor(tmp_path: Path) -> None:
    source = """
import json, os, time
began = time.monotonic()
while time.monotonic() - began < 1.0:
    pass
used = os.times()
print(json.dumps({"share": (used.user + used.system) / (time.monotonic() - began)}))
"""
    program = Program(script=str(write_program(tmp_path / "program", source)), port=0)
    async with fork_server(tmp_path, program, ResourceLimits(cpus=0.25)) as server:
        if "cpu" not in server.limited:
            pytest.skip("no control group for processors can be made here")
        sandbox = await server.start("s")
        await sandbox.ended()
        assert json.loads(sandbox.log.read_text())["share"] < 0.5
