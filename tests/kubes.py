"""A cluster for a test, whose images are agents of tests/agents."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fake_kube import FakeKube
from fake_kube_nodes import isolation


@contextlib.asynccontextmanager
async def fake_kube(folder: Path) -> AsyncIterator[FakeKube]:
    """Skips where pods cannot be kept apart; where `CI` is set, it fails."""
    try:
        isolation()
    except FileNotFoundError as error:
        pytest.fail(str(error)) if os.environ.get("CI") else pytest.skip(str(error))
    async with FakeKube(folder).running() as kube:
        kube.nodes.env = dict(os.environ)
        yield kube


def image_of(kube: FakeKube, target: str) -> str:
    """The image that serves an agent."""
    image = f"agents/{Path(target).name.replace('.py:', '-')}:1"
    serve = [
        sys.executable,
        "-u",
        "-m",
        "afield.sdk.serve",
        target,
        "--host",
        "127.0.0.1",
        "--port",
        "{port}",
    ]
    kube.nodes.images[image] = serve
    return image
