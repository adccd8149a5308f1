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
from support.sandboxes import arguments_of_all, groups_left, keeper_of, needs_bubblewrap, nest_of, written

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
    nest = ForkServer(Program(), ResourceLimits(), directory=Path(directory), log_dir=Path(logs))
    async with nest:
        for n in range(3):
            cell = await nest.start(f"s{n}")
            await cell.exec(f"sleep {mark} & setsid sleep {mark} & echo started")
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
    return sum(mark.encode() in arguments for arguments in arguments_of_all())


# --- starting ------------------------------------------------------------------------------------


async def test_a_script_that_serves_is_reached_from_outside(tmp_path: Path) -> None:
    program = Program(script=str(written(tmp_path / "program", SERVES)))
    async with nest_of(tmp_path, program) as nest:
        cell = await nest.start("s")
        reader, writer = await cell.connect()
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        assert (await reader.read()).endswith(b"served by __main__")
        writer.close()


async def test_any_command_can_be_the_program(tmp_path: Path) -> None:
    async with nest_of(tmp_path, Program(argv=("sh", "-c", "echo $HELLO; exit 7"), port=0)) as nest:
        cell = await nest.start("s", env={"HELLO": "good morning"})
        ended = await cell.ended()
        assert (ended.code, ended.said) == (7, "good morning")


@pytest.mark.parametrize(
    ("source", "said"),
    [("raise SystemExit(9)", "exit code 9"), ("import no_such_module", "no_such_module")],
)
async def test_a_program_that_ends_before_it_serves_says_why(tmp_path: Path, source: str, said: str) -> None:
    async with nest_of(tmp_path, Program(script=str(written(tmp_path / "program", source)))) as nest:
        with pytest.raises(InfrastructureFailure, match=said):
            await nest.start("s")


async def test_a_program_that_never_serves_is_given_up(tmp_path: Path) -> None:
    program = Program(script=str(written(tmp_path / "program", "import time\ntime.sleep(600)")))
    async with nest_of(tmp_path, program) as nest:
        with pytest.raises(InfrastructureFailure, match=r"not ready within 0\.5 s"):
            await nest.start("s", timeout_s=0.5)
        await until(lambda: not list(Path(tmp_path).glob("*.sock")))


async def test_many_start_at_once(tmp_path: Path) -> None:
    async with nest_of(tmp_path, Program()) as nest:
        cells = []

        async def start(n: int) -> None:
            cells.append(await nest.start(f"s{n}"))

        async with anyio.create_task_group() as group:
            for n in range(40):
                group.start_soon(start, n)
        assert len({cell.pid for cell in cells}) == 40
        assert all(cell.alive for cell in cells)


# --- what cannot work ----------------------------------------------------------------------------


async def test_without_bubblewrap_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"apt-get install bubblewrap.*without_bubblewrap"):
        async with nest_of(tmp_path, Program()):
            pass


async def test_a_machine_without_user_namespaces_is_told_so(tmp_path: Path) -> None:
    """In a user namespace of its own, so that only the command that is tested has none."""
    check = CHECK.format(directory=str(tmp_path / "d"), logs=str(tmp_path / "logs"))
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = ["unshare", "-Ur", "sh", "-c", forbid, "sh", sys.executable, "-c", check]
    done = await anyio.run_process(command, check=False)
    assert done.returncode == 3, done.stderr.decode()
    assert b"does not let us make user namespaces" in done.stdout
    assert b"max_user_namespaces" in done.stdout


async def test_a_message_that_is_too_large_is_refused_and_the_cell_goes_on(tmp_path: Path) -> None:
    async with nest_of(tmp_path, Program()) as nest:
        cell = await nest.start("s")
        with pytest.raises(UsageError, match="send large data as a file"):
            await cell.exec(["echo", "x" * 200_000])
        assert (await cell.exec("echo on")).stdout == "on\n"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (Program(target="/no/such/file.py:agent"), "there is no file /no/such/file.py"),
        (Program(script="/no/such/file.py"), "there is no file /no/such/file.py"),
        (Program(target="no_such_package.module:agent"), "no_such_package"),
        (Program(warm=("no_such_module",)), "no_such_module"),
        (Program(mounts=("/no/such/place",)), "there is no /no/such/place"),
        (Program(root="/no/such/image"), "/no/such/image"),
    ],
)
async def test_what_cannot_be_run_is_refused_with_its_name(
    tmp_path: Path, program: Program, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        async with nest_of(tmp_path, program):
            pass


async def test_an_agent_that_fails_to_import_is_refused_with_what_it_printed(tmp_path: Path) -> None:
    script = written(tmp_path / "program", "print('about to fail')\nraise ValueError('what a pity')\n")
    with pytest.raises(UsageError, match=r"(?s)what a pity.*about to fail"):
        async with nest_of(tmp_path, Program(target=f"{script}:agent")):
            pass


async def test_an_agent_that_lives_where_everything_lives_sees_its_own_file_alone(tmp_path: Path) -> None:
    script = written(tmp_path, "import time, helper\ntime.sleep(600)\n")
    written(tmp_path, "", "helper.py")
    written(tmp_path, "x", "diary.txt")
    async with nest_of(tmp_path, Program(script=str(script), port=0)) as nest:
        shown = await (await nest.start("s")).exec(["find", str(tmp_path), "-type", "f"])
    assert sorted(shown.stdout.split()) == [str(script), str(tmp_path / "helper.py")]


async def test_a_script_may_not_reach_the_port_that_it_serves(tmp_path: Path) -> None:
    async with nest_of(tmp_path, Program(script=str(written(tmp_path / "program", SERVES)))) as nest:
        with pytest.raises(UsageError, match="port 8080"):
            await nest.start("s", allow=[("127.0.0.1", 8080)])


# --- commands ------------------------------------------------------------------------------------


async def test_commands_tell_their_end_and_their_output(tmp_path: Path) -> None:
    async with nest_of(tmp_path, Program()) as nest:
        cell = await nest.start("s")
        result = await cell.exec(
            "cat; echo err >&2; pwd; echo $X; exit 3", stdin=b"in ", env={"X": "y"}, cwd="/tmp"
        )
        assert (result.exit_code, result.stdout, result.stderr) == (3, "in /tmp\ny\n", "err\n")
        assert (await cell.exec(["sh", "-c", "kill -9 $$"])).exit_code == 137
        missing = await cell.exec(["no-such-program"])
        assert missing.exit_code == 127 and "no-such-program" in missing.stderr
        assert (await cell.exec("pwd", cwd="/no/such")).exit_code == 127
        long = await cell.exec("echo begin; yes | head -c 5000000; echo end")
        assert long.truncated and long.stdout.startswith("begin") and long.stdout.endswith("end\n")
        assert len(long.stdout) < 1_100_000


async def test_a_command_that_takes_too_long_is_killed_with_all_it_started(tmp_path: Path) -> None:
    async with nest_of(tmp_path, Program()) as nest:
        cell = await nest.start("s")
        mark = f"77{os.getpid()}"
        assert (await cell.exec(f"sleep 1{mark} & echo on")).ok
        daemon = f"(setsid sh -c 'sleep 2{mark}; sleep 2{mark}' &); sleep 2{mark}"
        result = await cell.exec(daemon, timeout=0.5)
        assert result.timed_out and result.exit_code is None
        assert running(f"sleep\x002{mark}") == 0
        assert running(f"sleep\x001{mark}") == 1  # an earlier command's, which was left on purpose


async def test_a_command_that_kills_everything_it_can_is_only_its_own_end(tmp_path: Path) -> None:
    async with nest_of(tmp_path, Program()) as nest:
        cell = await nest.start("s")
        result = await cell.exec("kill -9 -1", timeout=20)
        assert result.exit_code == 137
        assert (await cell.exec("echo still here")).stdout == "still here\n"


async def test_files_go_in_and_out(tmp_path: Path) -> None:
    async with nest_of(tmp_path, Program()) as nest:
        cell = await nest.start("s")
        data = os.urandom(3_000_000)
        await cell.upload("a/b", data)
        assert await cell.download(f"{WORK}/a/b") == data
        await cell.upload("a/b", b"less")
        assert await cell.download("a/b") == b"less"
        await cell.exec("mkfifo pipe; ln -s /etc/shadow link")
        for missing in ("nothing", "a", "pipe", "link", "a/b/c"):
            with pytest.raises(NotFound, match=missing):
                await cell.download(missing)
        with pytest.raises(InfrastructureFailure, match="Read-only"):
            await cell.upload("/usr/x", b"")


async def test_an_image_is_a_root_of_its_own_that_a_cell_may_change_for_itself(tmp_path: Path) -> None:
    image = _image(tmp_path / "image")
    async with nest_of(tmp_path, Program(root=str(image))) as nest:
        one, other = await nest.start("one"), await nest.start("other")
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


async def test_a_killed_cell_is_gone_with_its_daemons_and_its_groups(tmp_path: Path) -> None:
    mark = f"66{os.getpid()}"
    async with nest_of(tmp_path, Program()) as nest:
        cell = await nest.start("s")
        keeper = keeper_of(os.getpid())
        await cell.exec(f"setsid sh -c 'sleep {mark} & sleep {mark}' & echo started")
        await until(lambda: running(f"sleep\x00{mark}") == 2)
        cell.kill()
        cell.kill()
        ended = await cell.ended()
        assert (ended.code, ended.signal) == (None, None)
        assert running(f"sleep\x00{mark}") == 0
        assert not cell.socket.exists()
        with pytest.raises(InfrastructureFailure, match="ended"):
            await cell.exec("true")
        assert (await nest.start("next")).alive
    assert groups_left(keeper) == []


async def test_a_log_stays_within_its_bound_and_keeps_both_ends(tmp_path: Path) -> None:
    source = "print('begin')\nfor i in range(100_000):\n    print(i, 'x' * 100)\nprint('the end')\n"
    async with nest_of(tmp_path, Program(script=str(written(tmp_path / "p", source)), port=0)) as nest:
        cell = await nest.start("s")
        ended = await cell.ended()
        text = cell.log.read_text()
    assert len(text) < 1_200_000
    assert text.startswith("begin") and text.endswith("the end\n")
    assert "bytes left out" in text and ended.said.endswith("the end")


@pytest.mark.parametrize("victim", ["controller", "keeper"])
async def test_nothing_is_left_when_the_controller_or_the_keeper_is_killed(
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
            keeper = keeper_of(controller.pid)
            made = groups_left(keeper)
            os.kill(controller.pid if victim == "controller" else keeper, signal.SIGKILL)
            await until(lambda: running(f"sleep\x00{mark}") == 0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                controller.kill()
    if victim == "keeper":  # Nobody was left to clean up: the next one does it.
        async with nest_of(tmp_path, Program(), ResourceLimits()):
            pass
    await until(lambda: not any(group.exists() for group in made))
    if victim == "controller":
        await until(lambda: not directory.exists())
