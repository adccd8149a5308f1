"""A harness as an agent: its client's environment, submission, failures and end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec import structs

from afield import harnesses
from afield.cli.main import main, parser
from afield.errors import InfrastructureFailure, PolicyFailure, RolloutFailure, TaskFailure, UsageError
from afield.harnesses.base import ClientCommand, Harness, Npm, Stage, instruction_of
from afield.sdk.agent import Context, entry_of
from afield.types import Reason
from support.processes import alive

pytestmark = pytest.mark.anyio

TASK = {"id": "t", "instruction": "Write the answer."}


def context(**more: Any) -> Context:
    values = {
        "base_url": "http://127.0.0.1:9/s/r.1",
        "openai_base_url": "http://127.0.0.1:9/s/r.1/v1",
        "api_key": "the-key",
        "model_id": "m",
        "session_id": "r.1",
        "rollout_id": "r",
        "attempt": 1,
        "group_id": "g",
        "input_id": "t",
        "exp_id": "e",
    }
    return Context(**values | more)


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFIELD_PROGRAMS", str(tmp_path))


def harness(script: str) -> Harness:
    """A harness whose client is a shell script; `$1` is the instruction."""

    def command(stage: Stage, instruction: str) -> ClientCommand:
        return ClientCommand(("/bin/sh", "-c", script, "client", instruction), {"KEY": stage.api_key})

    return Harness(name="shell", program="sh", package=Npm(("shell@1",)), protocol="none", command=command)


# --- work ------------------------------------------------------------------------------------------------


async def test_changed_files_and_the_last_message_are_submitted() -> None:
    task = {**TASK, "files": {"kept.txt": "same", "src/changed.txt": "old", "gone.txt": "x"}}
    script = "echo new > src/changed.txt; rm gone.txt; printf '\\377' > raw; printf 'did: %s' \"$1\""
    work = await harness(script)(task, context())
    assert work["files"] == {"src/changed.txt": "new\n", "raw": {"base64": "/w=="}}
    assert (work["deleted"], work["omitted"]) == (["gone.txt"], [])
    assert work["answer"] == "did: Write the answer."


async def test_client_gets_a_fresh_home_its_workspace_and_no_settings_of_other_clients(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "mine")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/somewhere")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:1")
    work = await harness("env; ls -A $HOME | wc -l; pwd -P")(TASK, context())
    *lines, entries, directory = work["answer"].splitlines()
    variables = dict(line.partition("=")[::2] for line in lines)
    assert entries == "0"
    assert directory == variables["PWD"]
    assert variables["PATH"].startswith(f"{tmp_path}:")
    assert variables["KEY"] == "the-key"
    assert variables["NO_PROXY"].endswith("127.0.0.1")
    assert not {"ANTHROPIC_AUTH_TOKEN", "XDG_CONFIG_HOME", "AFIELD_PROGRAMS"} & variables.keys()
    assert not await anyio.Path(variables["HOME"]).exists()


@pytest.mark.parametrize(
    ("script", "version", "warning"),
    [
        ("echo 'shell-client v1.2.3 (Node 22.1)'", "1.2.3", ""),
        ("echo 1.2.30", "1.2.30", "has version 1.2.30, but the harness is written for 1.2.3:"),
        ("echo no such option >&2; exit 2", "unknown", "has version unknown"),
    ],
)
async def test_version_of_a_client_on_the_path_is_compared_with_the_pinned_one_and_submitted(
    script: str,
    version: str,
    warning: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = tmp_path / "shell-client"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.delenv("AFIELD_PROGRAMS")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = structs.replace(harness("true"), program="shell-client", package=Npm(("shell@1.2.3", "other@4")))
    for _ in range(2):
        assert (await found(TASK, context()))["client"] == f"shell {version}"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (1 if warning else 0)
    assert all(warning in text and str(program) in text for text in warnings)


async def test_client_of_an_installation_has_the_pinned_version() -> None:
    assert (await harness("true")(TASK, context()))["client"] == "shell 1"


async def test_large_files_are_named_instead_of_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("afield.harnesses.workspace.SUBMITTED_BYTES", 8)
    work = await harness("echo 0123456789 > large; echo small > tiny")(TASK, context())
    assert (work["files"], work["omitted"]) == ({"tiny": "small\n"}, ["large"])


def test_instruction_is_text_or_the_user_messages_of_a_prompt() -> None:
    assert instruction_of(TASK) == "Write the answer."
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}]
    assert instruction_of({"prompt": messages}) == "Go."
    with pytest.raises(TaskFailure, match="its keys are 'question'"):
        instruction_of({"question": "?"})
    with pytest.raises(TaskFailure, match="200000 bytes"):
        instruction_of({"prompt": "x" * 200_000})


@pytest.mark.parametrize("name", harnesses.TARGETS)
@pytest.mark.parametrize(
    "text", ["- Fix the bug.", "--version", "---\ntitle: a\n---\n", "/help me", "@main.py crashes"]
)
def test_instruction_is_no_option_of_a_client(name: str, text: str, tmp_path: Path) -> None:
    found = harnesses.find(name)
    assert found is not None
    stage = Stage(
        home=tmp_path, work=tmp_path, programs=tmp_path, base_url="http://g/s/1", api_key="k", model="m"
    )
    words = found.command(stage, instruction_of({"instruction": text})).argv
    assert text not in words
    assert f"\n{text}" in words or (tmp_path / "task/instruction.md").read_text() == f"\n{text}"


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", ""])
async def test_files_outside_the_workspace_are_refused(name: str) -> None:
    with pytest.raises(TaskFailure, match="relative path"):
        await harness("true")({**TASK, "files": {name: "x"}}, context())


# --- failures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "kind", "reason", "text"),
    [
        ("echo broken >&2; exit 3", TaskFailure, Reason.RAISED, "code 3: broken"),
        ("exit 1", TaskFailure, Reason.RAISED, "it printed nothing"),
        (
            "echo 'API error 400: the session takes no more model calls'; exit 1",
            PolicyFailure,
            Reason.BUDGET,
            "",
        ),
        ("echo 'maximum context length is 9 tokens' >&2; exit 1", PolicyFailure, Reason.CONTEXT, ""),
        ('echo \'{"code": "engine_unavailable"}\'; exit 1', InfrastructureFailure, Reason.ENGINE, ""),
        ("kill -KILL $$", InfrastructureFailure, Reason.DIED, "SIGKILL"),
        ("exec /no/such/program", TaskFailure, Reason.RAISED, "127"),
    ],
)
async def test_exit_of_the_client_becomes_a_failure_of_the_right_kind(
    script: str, kind: type[RolloutFailure], reason: Reason, text: str
) -> None:
    with pytest.raises(kind) as caught:
        await harness(script)(TASK, context())
    assert caught.value.reason is reason
    assert text in str(caught.value)


DAEMON = "setsid sleep 600 & echo $! > {file}; sleep 600"


def written(file: Path) -> str:
    return file.read_text().strip() if file.exists() else ""


async def daemon_of(file: Path) -> int:
    with anyio.fail_after(30):
        while not (pid := written(file)):
            await anyio.sleep(0.02)
    return int(pid)


async def wait_gone(pid: int) -> None:
    with anyio.fail_after(30):
        while alive(pid):
            await anyio.sleep(0.02)


async def test_client_and_its_daemons_end_at_the_time_limit(tmp_path: Path) -> None:
    script = DAEMON.format(file=tmp_path / "pid")
    with pytest.raises(PolicyFailure, match="time limit of 1 s") as caught:
        await harness(script)({**TASK, "agent_timeout_s": 900}, context(args={"agent_timeout_s": 1}))
    assert caught.value.reason is Reason.TIMEOUT
    await wait_gone(await daemon_of(tmp_path / "pid"))


async def test_client_and_its_daemons_end_when_the_rollout_is_stopped(tmp_path: Path) -> None:
    rollout = asyncio.create_task(harness(DAEMON.format(file=tmp_path / "pid"))(TASK, context()))
    daemon = await daemon_of(tmp_path / "pid")
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    await wait_gone(daemon)


async def test_invalid_agent_argument_is_named() -> None:
    with pytest.raises(TaskFailure, match="agent_timeout_s = 'long'"):
        await harness("true")(TASK, context(args={"agent_timeout_s": "long"}))


# --- names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", harnesses.TARGETS)
def test_every_harness_is_an_agent_with_pinned_packages_and_no_key_in_its_arguments(
    name: str, tmp_path: Path
) -> None:
    found = harnesses.find(name)
    assert found is not None
    assert found.name == name
    assert entry_of(found).takes_context
    assert all("@" in package[1:] or "==" in package for package in found.package.packages)
    stage = Stage(
        home=tmp_path, work=tmp_path, programs=tmp_path, base_url="http://g/s/1", api_key="the-key", model="m"
    )
    command = found.command(stage, "Do it.")
    assert command.argv[0] == str(tmp_path / found.program)
    assert not any("the-key" in word for word in command.argv)
    assert any("Do it." in word for word in command.argv) or (tmp_path / "task/instruction.md").is_file()


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="unknown agent 'emacs'; choose a harness \\(claude-code, codex"):
        harnesses.resolve("emacs")
    assert harnesses.find("my_agent.py:agent") is None


def test_agent_is_given_once_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "my_agent.py:agent", "--agent", "codex", "--model", "m"]) == 2
    assert "two agents: 'my_agent.py:agent' and --agent 'codex'" in capsys.readouterr().err


def test_harness_needs_a_verifier(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps(TASK))
    assert main(["train", "--agent", "pi", "--tasks", str(tasks), "--model", "m"]) == 2
    assert "harness pi gives no reward: name a verifier" in capsys.readouterr().err


def test_agent_arguments_are_repeated_flags() -> None:
    flags = ["train", "--agent-arg", "agent_timeout_s=60", "--agent-arg", "mode=fast"]
    assert parser().parse_args(flags).agent_args == ["agent_timeout_s=60", "mode=fast"]
