"""The command `afield agentcore-local`: its options, its page, sandboxes, and no leftovers."""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import anyio
import pytest

from afield.agentcore_local.faults import KINDS
from afield.agentcore_local.images import AgentImage
from afield.agentcore_local.sessions import Timings
from afield.cli.agentcore_local import add
from afield.cli.main import main
from support.agentcore_server import PROGRAM, AgentCoreClient, agentcore_server, session_id, wait_gone
from support.paths import ROOT
from support.processes import children, command, kill

pytestmark = pytest.mark.anyio
BWRAP = shutil.which("bwrap") is not None
needs_bwrap = pytest.mark.skipif(not BWRAP and not os.environ.get("CI"), reason="bubblewrap is not installed")
both = pytest.mark.parametrize("isolation", ["none", pytest.param("sandbox", marks=needs_bwrap)])


@contextmanager
def started(cwd: Path, *args: object) -> Generator[tuple[subprocess.Popen[str], AgentCoreClient]]:
    words = command(
        "agentcore-local", "--json", "--port", 0, "--image", f"math={PROGRAM}", "--ready-s", 0, *args
    )
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, cwd=cwd, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise AssertionError(process.communicate()[1])
        yield process, AgentCoreClient(json.loads(line)["url"])
    finally:
        process.kill()
        process.communicate()


@both
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "stdin"])
async def test_nothing_is_left_behind_however_it_ends(tmp_path: Path, isolation: str, how: str) -> None:
    with started(tmp_path, "--isolation", isolation, "--exit-with-parent") as (process, caller):
        assert await caller.ready() == "READY"
        session = session_id()
        child = (await caller.invoke({"do": "child"}, session))["pid"]
        below = children(process.pid)
        assert isolation == "sandbox" or child in below
        if how == "stdin":
            assert process.stdin is not None
            process.stdin.close()
            process.stdin = None
        else:
            process.send_signal(getattr(signal, how))
        await wait_gone(process.pid, *below)
        assert [path for path in sorted((tmp_path / "acr-logs").iterdir()) if session in path.name]
        with anyio.fail_after(60):
            while list(Path(tempfile.gettempdir()).glob(f"afield-agentcore-{process.pid}-*")):  # noqa: ASYNC240
                await anyio.sleep(0.05)


@contextmanager
def some_server() -> Generator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"reached")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@needs_bwrap
async def test_a_sandboxed_program_reaches_what_is_allowed_and_nothing_else() -> None:
    with some_server() as open_port, some_server() as closed_port:
        async with agentcore_server(isolation="sandbox", allow=(("127.0.0.1", open_port),)) as caller:
            assert await caller.ready() == "READY"
            reached = await caller.invoke({"do": "reach", "url": f"http://127.0.0.1:{open_port}/"})
            assert reached == {"status": 200, "body": "reached"}
            refused = await caller.invoke({"do": "reach", "url": f"http://127.0.0.1:{closed_port}/"})
            assert "refused" in refused["error"]
            assert "error" in await caller.invoke({"do": "reach", "url": f"{caller.url}/_acr/stats"})


@needs_bwrap
async def test_sandboxed_sessions_behave_like_sessions_without_isolation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("A_SECRET_OF_THE_SERVER", "hush")
    async with agentcore_server(isolation="sandbox") as caller:
        assert await caller.ready(environmentVariables={"FLAVOUR": "plum"}) == "READY"
        session = session_id()
        assert (await caller.invoke({}, session))["count"] == 1
        assert (await caller.invoke({}, session))["count"] == 2
        assert (await caller.invoke({}))["count"] == 1
        env = await caller.invoke({"do": "env"}, session)
        assert env["FLAVOUR"] == "plum"
        assert "A_SECRET_OF_THE_SERVER" not in env
        streamed = await caller.raw({"do": "stream", "n": 2}, session)
        assert streamed["body"] == b'data: {"n": 0}\n\ndata: {"n": 1}\n\n'
        with pytest.raises(caller.data.exceptions.RuntimeClientError, match=session):
            await caller.invoke({"do": "die"}, session)
        assert (await caller.invoke({}, session))["count"] == 1
        await caller.stop(session)
        with pytest.raises(caller.data.exceptions.ResourceNotFoundException):
            await caller.stop(session)


@needs_bwrap
async def test_a_fork_server_that_died_is_replaced_and_its_directory_removed() -> None:
    def directories() -> list[Path]:
        return list(Path(tempfile.gettempdir()).glob(f"afield-agentcore-{os.getpid()}-*"))

    async with agentcore_server(isolation="sandbox") as caller:
        assert await caller.ready() == "READY"
        [supervisor] = [
            pid for pid, line in children(os.getpid()).items() if "local_sandbox.supervisor" in line
        ]
        [directory] = directories()
        kill(supervisor)
        with pytest.raises(caller.data.exceptions.RuntimeClientError, match="cannot be started"):
            await caller.invoke({})
        with anyio.fail_after(60):
            # Calls are refused until the death is noticed.
            while True:
                with suppress(caller.data.exceptions.RuntimeClientError):
                    assert (await caller.invoke({}))["count"] == 1
                    break
            while directory.exists():
                await anyio.sleep(0.05)
        assert len(directories()) == 1
    assert directories() == []


@needs_bwrap
async def test_a_command_runs_inside_the_sandbox_of_its_session() -> None:
    async with agentcore_server(isolation="sandbox") as caller:
        await caller.ready()
        session = session_id()
        pid = (await caller.invoke({}, session))["pid"]
        look = f"kill -0 {pid} && echo same; ls {ROOT / 'docs'} >&2"
        answer = await caller.call(
            caller.data.invoke_agent_runtime_command,
            agentRuntimeArn=caller.arn,
            runtimeSessionId=session,
            body={"command": look, "timeout": 30},
        )
        events = [event["chunk"] for event in await caller.call(lambda: list(answer["stream"]))]
        assert events[1] == {"contentDelta": {"stdout": "same\n"}}
        assert "No such file" in events[2]["contentDelta"]["stderr"]
        assert events[-1]["contentStop"]["exitCode"] != 0


@needs_bwrap
async def test_a_target_that_cannot_be_imported_ends_in_create_failed(tmp_path: Path) -> None:
    target = tmp_path / "agent.py"
    target.write_text("import nothing_of_that_name\n")
    async with agentcore_server(
        isolation="sandbox", images={"math": AgentImage(target=f"{target}:agent")}
    ) as caller:
        assert await caller.ready() == "CREATE_FAILED"
        runtime = caller.arn.rpartition("/")[2]
        got = await caller.call(caller.control.get_agent_runtime, agentRuntimeId=runtime)
        assert "nothing_of_that_name" in got["failureReason"]


@needs_bwrap
async def test_a_sandboxed_program_that_never_serves_is_424_after_the_time_it_has(tmp_path: Path) -> None:
    program = tmp_path / "asleep.py"
    program.write_text("import time\ntime.sleep(600)\n")
    images = {"math": AgentImage(script=str(program))}
    async with agentcore_server(isolation="sandbox", images=images, pace=Timings(init_s=1.0)) as caller:
        assert await caller.ready() == "READY"
        with pytest.raises(caller.data.exceptions.RuntimeClientError, match="not ready within 1 s"):
            await caller.invoke({})
        assert await caller.sessions() == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "give --image"),
        (("--image", "math=nowhere.py"), "there is no file nowhere.py"),
        (("--image", f"math={PROGRAM}", "--fault", "typo=1"), "--fault 'typo=1'"),
        (("--image", f"math={PROGRAM}", "--allow", "8400"), "--allow '8400'"),
        (("--image", f"math={PROGRAM}", "--starts-per-s", "0"), "start_rate = 0.0"),
        (("--image", f"math={PROGRAM}", "--speed", "0"), "speed = 0"),
        (("--image", f"math={PROGRAM}", "--account", "me"), "account 'me'"),
        (("--code-root", "nowhere"), "--code-root nowhere"),
    ],
)
def test_invalid_options_exit_with_2_and_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["agentcore-local", *args]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert len(errors.strip().splitlines()) == 1


def test_without_bubblewrap_the_error_names_the_package_and_the_other_isolation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert main(["agentcore-local", "--image", f"math={PROGRAM}"]) == 2
    errors = capsys.readouterr().err
    assert "apt-get install bubblewrap" in errors
    assert "--isolation none" in errors


# --- the page about it ---------------------------------------------------------------------------

PAGE = ROOT / "docs" / "reference" / "agentcore-local.md"


@both
def test_the_programs_of_the_page_run(
    tmp_path: Path, isolation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program, client = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.S)
    (tmp_path / "app.py").write_text(program)
    with started(tmp_path, "--isolation", isolation, "--image", "hello=app.py") as (_, caller):
        script = tmp_path / "client.py"
        script.write_text(client.replace("http://127.0.0.1:8480", caller.url))
        runpy.run_path(str(script))
    assert "'hello': 'world'" in capsys.readouterr().out


def test_the_page_lists_every_option_and_fault() -> None:
    commands = argparse.ArgumentParser().add_subparsers()
    add(commands)
    there = {
        word for action in commands.choices["agentcore-local"]._actions for word in action.option_strings
    }
    options, faults = (
        PAGE.read_text().split(f"## {name}\n")[1].split("\n## ")[0] for name in ("Options", "Faults")
    )
    assert set(re.findall(r"`(--[\w-]+)`", options)) == there - {"-h", "--help"}
    kinds = [
        kind for row in re.findall(r"^\| (`.*?) \|", faults, re.M) for kind in re.findall(r"`(\w+)`", row)
    ]
    assert set(kinds) == set(KINDS)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.invalid"])
def test_an_address_other_than_loopback_needs_a_secret_key(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["agentcore-local", "--image", f"math={PROGRAM}", "--host", host, "--port", "0"]) == 2
    errors = capsys.readouterr().err
    assert f"other machines can reach {host}" in errors and "--secret-key" in errors
