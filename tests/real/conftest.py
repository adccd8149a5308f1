"""Real servers for the tests of this folder, each started once, when it is first asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from afield.errors import Unavailable
from support import servers

Get = Callable[[str], servers.Server]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Get]:
    """One that cannot be had here skips with the reason; where `CI` is set it fails."""
    running: dict[str, servers.Server] = {}
    with ExitStack() as stack:

        def get(name: str) -> servers.Server:
            if name not in running:
                try:
                    running[name] = stack.enter_context(getattr(servers, name)(tmp_path_factory.mktemp(name)))
                except Unavailable as error:
                    pytest.fail(str(error)) if os.environ.get("CI") else pytest.skip(str(error))
            running[name].ensure_running()
            return running[name]

        yield get
