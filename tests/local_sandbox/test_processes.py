"""The life of cells: how they start, what runs in them, how they end, and that nothing of them is left."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import anyio
import pytest

from afield.errors import InfrastructureFailure, NotFound, UsageError
from afield.local_sandbox.bwrap import WORK
from afield.local_sandbox.messages import Program
from afield.settings.runtimes import ResourceLimits
from agents.places import until
from support.sandboxes import (
    all_command_lines,
    fork_server,
    leftover_groups,
    needs_bubblewrap,
    supervisor_of,
    write_program,
)

pytestmark = [pytest.mark.anyio, needs_bubblewrap]

SERVES = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"served by " + __name__.encode())
http.server.HTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
"""
CONTROLLER = """
import asyncio, sys
from pathlib import Path
from afield.local_sandbox.fork_server import ForkServer
from afield.local_sandbox.messages import Program
from afield.settings.runtimes import ResourceLimits

async def main():
    directory, logs, mark = sys.argv[1:]
    server = ForkServer(Program(), ResourceLimits(), directory=Path(directory), log_dir=Path(logs))
    async with server:
        for n in range(3):
            sandbox = await server.start(f"s{n}")
            await sandbox.exec(f"sleep {mark} & setsid sleep {mark} & echo started")
        print("started", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""
CHECK = """
import asyncio, sys
from pathlib import Path
from afield.local_sandbox.fork_server import ForkServer
from afield.local_sandbox.messages import Program
from afield.errors import UsageError
from afield.settings.runtimes import ResourceLimits

async def main():
    async with ForkServer(Program(), ResourceLimits(), directory=Path({directory!r}), log_dir=Path({logs!r})):
        pass

try:
    asyncio.run(main())
except UsageError as error:
    print(error)
    sys.exit(3)
"""


def running(mark: str) -> int:
    return sum(mark.encode() in arguments for arguments in all_command_lines())


# --- starting ------------------------------------------------------------------------------------


async def test_a_script_that_serves_is_reached_from_outside(tmp_path: Path) -> None:
    program = Program(script=str(write_program(tmp_path / "program", SERVES)))
    async with fork_server(tmp_path, program) as server:
        sandbox = await server.start("s")
        reader, writer = await sandbox.connect()
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        assert (await reader.read()).endswith(b"served by __main__")
        writer.close()


async def test_any_command_can_be_the_program(tmp_path: Path) -> None:
    async with fork_server(tmp_path, Program(argv=("sh", "-c", "echo $HELLO; exit 7"), port=0)) as server:
        sandbox = await server.start("s", env={"HELLO": "good morning"})
        ended = await sandbox.ended()
        assert (ended.code, ended.log) == (7, "good morning")


@pytest.mark.parametrize(
    ("source", "said"),
    [("raise SystemExit(9)", "exit code 9"), ("import no_such_module", "no_such_module")],
)
async def test_a_program_that_ends_before_it_serves_says_why(tmp_path: Path, source: str, said: str) -> None:
    async with fork_server(
        tmp_path, Program(script=str(write_program(tmp_path / "program", source)))
    ) as server:
        with pytest.raises(InfrastructureFailure, match=said):
            await server.start("s")


async def test_a_program_that_never_serves_is_abandoned(tmp_path: Path) -> None:
    program = Program(script=str(write_program(tmp_path / "program", "import time\ntime.sleep(600)")))
    async with fork_server(tmp_path, program) as server:
        with pytest.raises(InfrastructureFailure, match=r"not ready within 0\.5 s"):
            await server.start("s", timeout_s=0.5)
        await until(lambda: not list(Path(tmp_path).glob("*.sock")))


async def test_many_start_at_once(tmp_path: Path) -> None:
    async with fork_server(tmp_path, Program()) as server:
        sandboxes = []

        async def start(n: int) -> None:
            sandboxes.append(await server.start(f"s{n}"))

        async with anyio.create_task_group() as group:
            for n in range(40):
                group.start_soon(start, n)
        assert len({sandbox.pid for sandbox in sandboxes}) == 40
        assert all(sandbox.alive for sandbox in sandboxes)


# --- what cannot work ----------------------------------------------------------------------------


async def test_without_bubblewrap_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"apt-get install bubblewrap.*without_bubblewrap"):
        async with fork_server(tmp_path, Program()):
            pass


async def test_a_machine_without_user_namespaces_is_reported(tmp_path: Path) -> None:
    """In a user namespace of its own, so that only the command that is tested has none."""
    check = CHECK.format(directory=str(tmp_path / "d"), logs=str(tmp_path / "logs"))
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = ["unshare", "-Ur", "sh", "-c", forbid, "sh", sys.executable, "-c", check]
    done = await anyio.run_process(command, check=False)
    assert done.returncode == 3, done.stderr.decode()
    assert b"does not allow user namespaces" in done.stdout
    assert b"max_user_namespaces" in done.stdout


async def test_a_message_that_is_too_large_is_refused_and_the_sandbox_continues(tmp_path: Path) -> None:
    async with fork_server(tmp_path, Program()) as server:
        sandbox = await server.start("s")
        with pytest.raises(UsageError, match="send large data as a file"):
            await sandbox.exec(["echo", "x" * 200_000])
        assert (await sandbox.exec("echo on")).stdout == "on\n"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (Program(target="/no/such/file.py:agent"), "there is no file /no/such/file.py"),
        (Program(script="/no/such/file.py"), "there is no file /no/such/file.py"),
        (Program(target="no_such_package.module:agent"), "no_such_package"),
        (Program(warm=("no_such_module",)), "no_such_module"),
        (Program(mounts=("/no/such/place",)), "mount /no/such/place does not exist"),
        (Program(root="/no/such/image"), "/no/such/image"),
    ],
)
async def test_what_cannot_be_run_is_refused_with_its_name(
    tmp_path: Path, program: Program, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        async with fork_server(tmp_path, program):
            pass


async def test_an_agent_that_fails_to_import_is_refused_with_what_it_printed(tmp_path: Path) -> None:
    script = write_program(tmp_path / "program", "print('about to fail')\nraise ValueError('what a pity')\n")
    with pytest.raises(UsageError, match=r"(?s)what a pity.*about to fail"):
        async with fork_server(tmp_path, Program(target=f"{script}:agent")):
            pass


async def test_sandboxed_script_sees_its_own_file_and_imports_but_not_the_folder(tmp_path: Path) -> None:
    script = write_program(tmp_path, "import time, helper\ntime.sleep(600)\n")
    write_program(tmp_path, "", "helper.py")
    write_program(tmp_path, "x", "diary.txt")
    async with fork_server(tmp_path, Program(script=str(script), port=0)) as server:
        shown = await (await server.start("s")).exec(["find", str(tmp_path), "-type", "f"])
    assert sorted(shown.stdout.split()) == [str(script), str(tmp_path / "helper.py")]


async def test_a_script_may_not_reach_the_port_that_it_serves(tmp_path: Path) -> None:
    async with fork_server(
        tmp_path, Program(script=str(write_program(tmp_path / "program", SERVES)))
    ) as server:
        with pytest.raises(UsageError, match="port 8080"):
            await server.start("s", allow=[("127.0.0.1", 8080)])


# --- commands ------------------------------------------------------------------------------------


async def test_commands_tell_their_end_and_their_output(tmp_path: Path) -> None:
    async with fork_server(tmp_path, Program()) as server:
        sandbox = await server.start("s")
        result = await sandbox.exec(
            "cat; echo err >&2; pwd; echo $X; exit 3", stdin=b"in ", env={"X": "y"}, cwd="/tmp"
        )
        assert (result.exit_code, result.stdout, result.stderr) == (3, "in /tmp\ny\n", "err\n")
        assert (await sandbox.exec(["sh", "-c", "kill -9 $$"])).exit_code == 137
        missing = await sandbox.exec(["no-such-program"])
        assert missing.exit_code == 127 and "no-such-program" in missing.stderr
        assert (await sandbox.exec("pwd", cwd="/no/such")).exit_code == 127
        long = await sandbox.exec("echo begin; yes | head -c 5000000; echo end")
        assert long.truncated and long.stdout.startswith("begin") and long.stdout.endswith("end\n")
        assert len(long.stdout) < 1_100_000


async def test_a_command_that_takes_too_long_is_killed_with_all_it_started(tmp_path: Path) -> None:
    async with fork_server(tmp_path, Program()) as server:
        sandbox = await server.start("s")
        mark = f"77{os.getpid()}"
        assert (await sandbox.exec(f"sleep 1{mark} & echo on")).ok
        daemon = f"(setsid sh -c 'sleep 2{mark}; sleep 2{mark}' &); sleep 2{mark}"
        result = await sandbox.exec(daemon, timeout=0.5)
        assert result.timed_out and result.exit_code is None
        assert running(f"sleep\x002{mark}") == 0
        assert running(f"sleep\x001{mark}") == 1  # an earlier command's, which was left on purpose


async def test_a_command_that_kills_everything_it_can_is_only_its_own_end(tmp_path: Path) -> None:
    async with fork_server(tmp_path, Program()) as server:
        sandbox = await server.start("s")
        result = await sandbox.exec("kill -9 -1", timeout=20)
        assert result.exit_code == 137
        assert (await sandbox.exec("echo still here")).stdout == "still here\n"


async def test_uploaded_files_are_downloaded_unchanged(tmp_path: Path) -> None:
    async with fork_server(tmp_path, Program()) as server:
        sandbox = await server.start("s")
        data = os.urandom(3_000_000)
        await sandbox.upload("a/b", data)
        assert await sandbox.download(f"{WORK}/a/b") == data
        await sandbox.upload("a/b", b"less")
        assert await sandbox.download("a/b") == b"less"
        await sandbox.exec("mkfifo pipe; ln -s /etc/shadow link")
        for missing in ("nothing", "a", "pipe", "link", "a/b/c"):
            with pytest.raises(NotFound, match=missing):
                await sandbox.download(missing)
        with pytest.raises(InfrastructureFailure, match="Read-only"):
            await sandbox.upload("/usr/x", b"")


async def test_an_image_is_a_root_of_its_own_that_a_sandbox_may_change_for_itself(tmp_path: Path) -> None:
    image = _image(tmp_path / "image")
    async with fork_server(tmp_path, Program(root=str(image))) as server:
        one, other = await server.start("one"), await server.start("other")
        assert (await one.exec("echo changed > /etc/motd; cat /etc/motd")).stdout == "changed\n"
        assert (await other.exec("cat /etc/motd")).stdout == "the image's\n"
        assert not (await one.exec("test -e /usr/lib/python3 || test -e /.image/etc")).ok
        assert (await one.exec("pwd")).stdout == "/work\n"
    assert (image / "etc" / "motd").read_text() == "the image's\n"


def _image(folder: Path) -> Path:
    """As little of a system as a shell needs."""
    import re
    import shutil
    import subprocess

    for program in ("/bin/sh", "/bin/cat"):
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for part in (program, *re.findall(r"(/\S+)", listed)):
            copied = folder / part.lstrip("/")
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(part, copied)
    (folder / "etc").mkdir()
    (folder / "etc" / "motd").write_text("the image's\n")
    return folder


# --- the end -------------------------------------------------------------------------------------


async def test_a_killed_sandbox_is_gone_with_its_daemons_and_its_groups(tmp_path: Path) -> None:
    mark = f"66{os.getpid()}"
    async with fork_server(tmp_path, Program()) as server:
        sandbox = await server.start("s")
        supervisor = supervisor_of(os.getpid())
        await sandbox.exec(f"setsid sh -c 'sleep {mark} & sleep {mark}' & echo started")
        await until(lambda: running(f"sleep\x00{mark}") == 2)
        sandbox.kill()
        sandbox.kill()
        ended = await sandbox.ended()
        assert (ended.code, ended.signal) == (None, None)
        assert running(f"sleep\x00{mark}") == 0
        assert not sandbox.socket.exists()
        with pytest.raises(InfrastructureFailure, match="ended"):
            await sandbox.exec("true")
        assert (await server.start("next")).alive
    assert leftover_groups(supervisor) == []


async def test_a_log_stays_within_its_bound_and_keeps_both_ends(tmp_path: Path) -> None:
    source = "print('begin')\nfor i in range(100_000):\n    print(i, 'x' * 100)\nprint('the end')\n"
    async with fork_server(
        tmp_path, Program(script=str(write_program(tmp_path / "p", source)), port=0)
    ) as server:
        sandbox = await server.start("s")
        ended = await sandbox.ended()
        text = sandbox.log.read_text()
    assert len(text) < 1_200_000
    assert text.startswith("begin") and text.endswith("the end\n")
    assert "bytes left out" in text and ended.log.endswith("the end")


@pytest.mark.parametrize("victim", ["controller", "supervisor"])
async def test_nothing_is_left_when_the_controller_or_the_supervisor_is_killed(
    tmp_path: Path, victim: str
) -> None:
    mark = f"55{os.getpid()}"
    directory = tmp_path / "sockets"
    command = [sys.executable, "-c", CONTROLLER, str(directory), str(tmp_path / "logs"), mark]
    async with await anyio.open_process(command, stdin=None, stderr=None) as controller:
        try:
            assert controller.stdout is not None
            with anyio.fail_after(60):
                assert (await controller.stdout.receive()).startswith(b"started")
            assert running(f"sleep\x00{mark}") == 6
            supervisor = supervisor_of(controller.pid)
            made = leftover_groups(supervisor)
            os.kill(controller.pid if victim == "controller" else supervisor, signal.SIGKILL)
            await until(lambda: running(f"sleep\x00{mark}") == 0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                controller.kill()
    if victim == "supervisor":  # Nobody was left to clean up: the next one does it.
        async with fork_server(tmp_path, Program(), ResourceLimits()):
            pass
    await until(lambda: not any(group.exists() for group in made))
    if victim == "controller":
        await until(lambda: not directory.exists())
