"""Harbor tasks that ask for what sandboxes of this machine do not have."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from msgspec import structs
from tests.datasets.test_datasets import harbor_task

from afield import factory
from afield.cli.main import main
from afield.datasets import read_tasks
from afield.errors import UsageError, VerifierFailure
from afield.harbor.verifier import verify
from afield.settings.train import TrainConfig
from support.paths import TESTS

pytestmark = pytest.mark.anyio
IMAGE = 'docker_image = "ubuntu"\n'
NATIVE = TrainConfig(
    model="DIR",
    agent="agent.py:agent",
    runtime="sandbox",
    verifier="afield.harbor.verifier:verify",
    verifier_runtime="process",
)
REFUSED = {
    "GPUs": ("gpus = 1\n", r"task.toml:3: environment.gpus: the sandbox has no GPUs; remove the key"),
    "internet": (
        'network_mode = "public"\n',
        r"task.toml:3: environment.network_mode: 'public' is a network",
    ),
    "some hosts": (
        'network_mode = "allowlist"\nallowed_hosts = ["pypi.org"]\n',
        r"task.toml:3: environment.network_mode: 'allowlist' is a network",
    ),
    "hosts for the agent": (
        'network_mode = "no-network"\n[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["pypi.org"]\n',
        r"task.toml:5: agent.network_mode: 'allowlist'",
    ),
    "internet for the verifier": (
        '[verifier]\nnetwork_mode = "public"\n',
        r"task.toml:4: verifier.network_mode: 'public'",
    ),
    "MCP servers": (
        '[[environment.mcp_servers]]\nname = "db"\nurl = "http://db:1"\n',
        r"task.toml:3: environment.mcp_servers: MCP servers are not started",
    ),
    "TPU": ('tpu = {type = "v6e", topology = "2x2"}\n', r"task.toml:3: environment.tpu: the sandbox has no"),
    "image of the verifier": (
        '[verifier.environment]\ndocker_image = "grader"\n',
        r"task.toml:3: verifier.environment: the verifier runs in the task's",
    ),
    "verifier with its own environment": (
        '[verifier]\nenvironment_mode = "separate"\n',
        r"task.toml:4: verifier.environment_mode: the verifier runs in the task's",
    ),
}


def write(folder: Path, environment: str) -> Path:
    return harbor_task(folder, f"[environment]\n{IMAGE}{environment}")


@pytest.mark.parametrize("case", REFUSED)
def test_task_that_needs_what_sandboxes_lack_is_refused_with_file_and_line(tmp_path: Path, case: str) -> None:
    text, message = REFUSED[case]
    write(tmp_path / "a", text)
    write(tmp_path / "b", "gpus = 0\n")
    tasks = read_tasks(tmp_path)
    with pytest.raises(UsageError, match=f"a/{message}") as caught:
        factory.check_harbor_tasks(NATIVE, tasks)
    assert "--agent harbor-server" in str(caught.value)
    assert "b/task.toml" not in str(caught.value)


@pytest.mark.parametrize("case", REFUSED)
def test_runs_without_sandboxes_of_this_machine_honour_the_keys_themselves(tmp_path: Path, case: str) -> None:
    write(tmp_path, REFUSED[case][0])
    tasks = read_tasks(tmp_path)
    own = structs.replace(NATIVE, runtime="container=image", verifier="mine.py:grade")
    factory.check_harbor_tasks(own, tasks)
    for agent in ("harbor-trial", "harbor-server"):
        factory.check_harbor_tasks(structs.replace(NATIVE, agent=agent), tasks)


def test_keys_of_the_agent_concern_no_verifier_of_agents_in_images(tmp_path: Path) -> None:
    write(tmp_path / "a", REFUSED["MCP servers"][0])
    in_images = structs.replace(NATIVE, runtime="container=image")
    factory.check_harbor_tasks(in_images, read_tasks(tmp_path))
    write(tmp_path / "b", REFUSED["GPUs"][0])
    with pytest.raises(UsageError, match=r"b/task.toml:3: environment.gpus"):
        factory.check_harbor_tasks(in_images, read_tasks(tmp_path))


def test_keys_without_effect_are_warned_about_once_with_file_and_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = 'skills_dir = "/skills"\nallow_internet = true\n[agent]\nuser = "me"\n[healthchecks]\na = 1\n'
    for name in ("a", "b", "c"):
        write(tmp_path / name, text)
    factory.check_harbor_tasks(NATIVE, read_tasks(tmp_path))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    for line, key in ((3, "environment.skills_dir"), (6, "agent.user"), (7, "healthchecks")):
        start = f"{tmp_path / 'a' / 'task.toml'}:{line}: {key} (and 2 more) has no effect"
        assert any(text.startswith(start) for text in warnings), (start, warnings)
    assert sum("environment.network_mode (and 2 more) is not set: Harbor" in text for text in warnings) == 1
    assert len(warnings) == 4


def test_listing_of_tasks_says_what_sandboxes_cannot_honour(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a", 'gpus = 1\nnetwork_mode = "no-network"\n[extra]\nx = 1\n')
    assert main(["tasks", str(tmp_path)]) == 0
    written = capsys.readouterr()
    assert written.out.startswith("a  ")
    assert "task.toml:3: environment.gpus: the sandbox has no GPUs" in written.err
    assert "task.toml:5: extra has no effect" in written.err
    assert main(["tasks", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [line.split(": ")[1] for line in printed["refused_in_sandboxes"]] == ["environment.gpus"]


def test_task_without_a_network_gives_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "a", 'network_mode = "no-network"\nmemory = "1G"\n[metadata]\nmine = 1\n')
    write(tmp_path / "b", "allow_internet = false\n[task]\nname = 'org/b'\n")
    factory.check_harbor_tasks(NATIVE, read_tasks(tmp_path))
    assert caplog.records == []


def test_task_above_the_limits_of_sandboxes_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, memory in (("a", 2048), ("b", 3072), ("c", 512)):
        write(tmp_path / name, f'network_mode = "no-network"\ncpus = 1\nmemory_mb = {memory}\n')
    tasks = read_tasks(tmp_path)
    factory.check_harbor_tasks(NATIVE, tasks)
    [line] = [record.getMessage() for record in caplog.records]
    file = tmp_path / "b" / "task.toml"
    assert line.startswith(f"{file}:5: environment.memory_mb = 3072 (the largest of 2 tasks), but")
    assert line.endswith("have 1024: set sandbox.limits.memory_mb")
    caplog.clear()
    factory.check_harbor_tasks(structs.replace(NATIVE, agent="codex"), tasks)  # a harness has 4096 MiB
    assert caplog.records == []


def test_tasks_of_the_tests_are_accepted() -> None:
    factory.check_trust(NATIVE, read_tasks(TESTS / "harbor" / "tasks"))


def test_rows_whose_task_directory_is_elsewhere_are_left_to_their_verifier(tmp_path: Path) -> None:
    write(tmp_path / "a", "gpus = 1\n")
    tasks = read_tasks(tmp_path)
    (tmp_path / "a").rename(tmp_path / "moved")
    factory.check_harbor_tasks(NATIVE, tasks)


async def test_verifier_refuses_such_a_task_of_other_trainers(tmp_path: Path) -> None:
    row = read_tasks(write(tmp_path / "a", "gpus = 1\n"))[0].input
    task = {"id": "a", **row, **row["hidden"], "submission": {}}
    with pytest.raises(VerifierFailure, match=r"a/task.toml:3: environment.gpus"):
        await verify(task)
