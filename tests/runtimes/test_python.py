"""Agents with a virtualenv of their own: `python` names its interpreter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import afield
from afield.errors import UsageError
from afield.factory import check_runtime
from afield.runtimes.sandbox import SandboxRuntime
from afield.settings.runtimes import SandboxOptions
from afield.settings.train import TrainConfig
from afield.transports.stores.files import FilesTransport
from afield.utils.interpreter import check_interpreter
from agents.places import Place
from agents.sink import Sink
from support.client_gateway import threaded_gateway
from support.gateways import ADMIN
from support.sandboxes import needs_bubblewrap, write_program
from support.virtualenvs import make_virtualenv

AGENT = """
import only_here
import afield

@afield.agent
def agent(task):
    return only_here.REWARD
"""


def test_an_agent_imports_from_the_virtualenv_whose_python_is_named(tmp_path: Path) -> None:
    python = make_virtualenv(tmp_path / "agent-env")
    target = f"{write_program(tmp_path / 'agent', AGENT)}:agent"
    with threaded_gateway(tmp_path) as gateway:
        names: dict[str, Any] = {"gateway": gateway.url, "admin_key": ADMIN, "directory": tmp_path / "run"}
        with afield.RolloutClient.open(agent=target, python=python, workers=1, **names) as client:
            assert client.submit({}).result(60).outcome.reward == 0.25


@needs_bubblewrap
@pytest.mark.anyio
async def test_a_sandboxed_agent_imports_from_the_virtualenv_whose_python_is_named(tmp_path: Path) -> None:
    python = make_virtualenv(tmp_path / "agent-env")
    target = f"{write_program(tmp_path / 'agent', AGENT)}:agent"
    runtime = SandboxRuntime(target, SandboxOptions(), log_dir=tmp_path / "logs", python=str(python))
    async with FilesTransport(tmp_path / "store") as transport, Sink(transport).running() as sink, runtime:
        place = Place(runtime, transport, sink)
        attempt = await place.launch({})
        assert (await place.wait(attempt)).failure is None
        assert await place.reward(attempt) == 0.25


def config(folder: Path, python: Path, **settings: Any) -> TrainConfig:
    target = f"{write_program(folder / 'agent', AGENT)}:agent"
    return TrainConfig(model="", agent=target, python=str(python), **settings)


def test_a_virtualenv_without_afield_is_refused_at_the_start_with_the_command_that_installs_it(
    tmp_path: Path,
) -> None:
    python = make_virtualenv(tmp_path / "agent-env", afield=False)
    with pytest.raises(UsageError) as refused:
        check_runtime(config(tmp_path, python))
    assert "cannot import afield: ModuleNotFoundError" in str(refused.value)
    assert f"{python} -m pip install 'afield=={afield.__version__}'" in str(refused.value)


def test_a_virtualenv_with_another_version_of_afield_is_refused(tmp_path: Path) -> None:
    python = make_virtualenv(tmp_path / "agent-env")
    with pytest.raises(UsageError, match=rf"has afield {afield.__version__}, not 9\.9; .* 'afield==9\.9'"):
        check_interpreter(str(python), "9.9", dict(os.environ))


@pytest.mark.parametrize("name", ["missing", "program"])
def test_a_file_that_is_no_interpreter_is_refused_at_the_start(name: str, tmp_path: Path) -> None:
    write_program(tmp_path, "#!/bin/sh\necho hello >&2\n", "program").chmod(0o755)
    with pytest.raises(UsageError, match=rf"/{name} (cannot be run: |is no Python .*: hello).*; name the "):
        check_runtime(config(tmp_path, tmp_path / name))


def test_a_runtime_that_starts_no_interpreter_takes_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"python = .* is for the runtimes process and sandbox, not inline"):
        config(tmp_path, tmp_path / "python", runtime="inline")
