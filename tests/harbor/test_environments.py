"""Environments: built once, kept as layers, mounted in sandboxes that cannot change them."""

from __future__ import annotations

from pathlib import Path

import pytest

from afield.datasets.harbor import read_task
from afield.errors import TaskFailure
from afield.harbor.environments import Environments, resolve
from afield.local_sandbox.local_sandbox import LocalSandbox
from afield.local_sandbox.messages import Layer
from afield.types import Task
from support.sandboxes import needs_bubblewrap

pytestmark = pytest.mark.anyio


def make_task(folder: Path, dockerfile: str, **files: str) -> Task:
    for name, text in {
        "task.toml": "",
        "instruction.md": "Do it.",
        "tests/test.sh": "",
        "environment/Dockerfile": dockerfile,
        **{f"environment/{name}": text for name, text in files.items()},
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_task(folder).to_task()


def read(layer: Layer, name: str) -> str | None:
    path = Path(layer.path, name)
    return path.read_text() if path.exists() else None


@needs_bubblewrap
async def test_environment_is_built_once_and_stays_as_it_was_built(tmp_path):
    dockerfile = """FROM ubuntu:24.04
ENV COLOUR=blue
RUN cat /proc/sys/kernel/random/uuid > /built && rm /usr/bin/yes && mkdir -m 750 /tmp/kept
COPY data.txt sub/
WORKDIR /srv/place
RUN echo $COLOUR > colour && ln -s /built link && chmod 400 colour
"""
    task = make_task(tmp_path / "task", dockerfile, **{"data.txt": "data"})
    environments = Environments(tmp_path / "cache", {})
    layer = await environments.layer(task)
    content = read(layer, "built")
    async with LocalSandbox(layer=layer) as sandbox:
        check = (
            "test $(pwd) = /srv/place && test $COLOUR = blue && cat /built && test ! -e /usr/bin/yes"
            " && test -d /tmp/kept && cat link colour /sub/data.txt && echo x > /built && rm -r /sub"
            " && touch /usr/local/bin/new && ! ls /.layers /.changes 2>/dev/null"
        )
        result = await sandbox.exec(check)
    assert result.ok, result.stderr
    assert result.stdout.split() == [*content.split(), *content.split(), "blue", "data"]
    # Another process finds it, and nothing of the first sandbox is in it.
    again = await Environments(tmp_path / "cache", {}).layer(task)
    assert again == layer
    assert (read(again, "built"), read(again, "sub/data.txt")) == (content, "data")
    assert read(again, "usr/local/bin/new") is None


@needs_bubblewrap
async def test_step_that_fails_is_named_with_file_line_and_output(tmp_path):
    dockerfile = "FROM ubuntu\nWORKDIR /app\n\nRUN echo before && \\\n  echo no such package >&2 && exit 7\n"
    task = make_task(tmp_path / "task", dockerfile)
    environments = Environments(tmp_path / "cache", {})
    with pytest.raises(TaskFailure, match=r"Dockerfile:4: RUN echo before .*exit code 7.*no such package"):
        await environments.layer(task)
    assert list(environments.layers.iterdir()) == []


async def test_missing_source_and_changed_environment_are_refused(tmp_path):
    task = make_task(tmp_path / "a", "FROM x\nFROM y\n")
    environments = Environments(tmp_path / "cache", {})
    with pytest.raises(TaskFailure, match=r"a/environment/Dockerfile:2: builds with several stages"):
        await environments.layer(task)
    task = make_task(tmp_path / "b", "FROM x\n")
    (tmp_path / "b" / "environment" / "new").write_text("")
    with pytest.raises(TaskFailure, match=r"b/environment changed since its task was read"):
        await environments.layer(task)
    task = make_task(tmp_path / "c", "FROM x\n")
    (tmp_path / "c" / "environment" / "compose.yaml").write_text("")
    with pytest.raises(TaskFailure, match=r"compose.yaml: environments of several containers"):
        await environments.layer(task)
    image = {**task.input, "environment": {**task.input["environment"], "digest": ""}}
    with pytest.raises(TaskFailure, match="has an image and no environment/Dockerfile"):
        await environments.layer(Task("d", image))


def test_variables_of_the_collector_replace_templates(tmp_path):
    env = {"A": "plain", "B": "${SET}", "C": "${UNSET:-default}", "D": "${UNSET:-}"}
    resolved = resolve(env, {"SET": "value"}, tmp_path)
    assert resolved == {"A": "plain", "B": "value", "C": "default", "D": ""}
    with pytest.raises(Exception, match=r"the variable E needs UNSET in the environment"):
        resolve({"E": "${UNSET}"}, {}, tmp_path)
