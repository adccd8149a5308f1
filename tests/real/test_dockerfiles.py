"""The examples' Dockerfiles, built and run by Podman, on a base that stands for python:3.12-slim.

Another base, the arm64 image and ECR are not tried here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.images import ImageBuilder, image_builder
from support.paths import ROOT
from support.processes import afield, summary

pytestmark = [pytest.mark.real, pytest.mark.timeout(2400)]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageBuilder]:
    with image_builder(tmp_path_factory.mktemp("examples")) as builder:
        yield builder


@pytest.mark.parametrize("name", ["strands-math", "coding"])
def test_an_examples_image_is_built_and_trained_in_containers(
    name: str, builder: ImageBuilder, tmp_path: Path
) -> None:
    example = EXAMPLES / name
    image = builder.build(example, f"localhost/{name}", "--build-context", f"afield={ROOT}")
    assert builder.podman("image", "inspect", "--format", "{{.Config.User}}", image).strip() == "10001:10001"
    given = ("train", "--config", example / "train.toml", "--engine", f"scripted={example / 'script.jsonl'}")
    where = ("--runtime", f"container={image}", "--set", f"container.socket={builder.socket}")
    apart = () if name != "coding" else ("--set", "verifier_runtime=process")
    small = ("--steps", 1, "--rollouts", 3, "--concurrency", 3, "--freeze-weights", "--json")
    code, out, err = afield(
        tmp_path, *given, *where, "--set", "container.pull=never", *apart, *small, timeout=900
    )
    assert code == 0, err
    told = summary(out)
    assert told["failed"] == 0 and told["rollouts"] in (6, 12) and told["first"] > 0, told
