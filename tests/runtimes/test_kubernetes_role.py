"""The Role of deploy/kubernetes grants what the runtime asks of the API server, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import anyio
import pytest
from tests.deploy.test_manifests import role_rules

from afield.errors import RateLimited
from afield.transports.stores.files import FilesTransport
from agents.sink import Sink
from support.fake_kube import FakeKube
from support.kubernetes import fake_kube, placed, runtime_on
from support.manifests import of_kind

pytestmark = pytest.mark.anyio
NAMESPACED = re.compile(
    r"/apis?/(?:(?P<group>[a-z.]+)/)?v1/namespaces/[^/]+/(?P<kind>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+))?"
)
VERBS = {"POST": "create", "DELETE": "delete"}


def rights(kube: FakeKube) -> set[tuple[str, str, str]]:
    """Rights that the recorded requests need, as the API server derives them."""
    needed: set[tuple[str, str, str]] = set()
    for method, path, query in kube.requests:
        if match := NAMESPACED.match(path):
            kind = match["kind"] + (f"/{match['sub']}" if match["sub"] else "")
            read = "get" if match["name"] else "watch" if "watch" in query else "list"
            needed.add((match["group"] or "", kind, VERBS.get(method, read)))
    return needed


async def test_role_grants_the_requests_of_the_runtime_and_no_others(tmp_path: Path) -> None:
    async with (
        fake_kube(tmp_path / "kube") as kube,
        FilesTransport(tmp_path / "store") as transport,
        Sink(transport).running() as sink,
        placed(kube, sink) as place,
    ):
        attempt = await place.launch({"do": "beat"}, "first")
        async with runtime_on(kube) as resumed:  # as after a restart of the trainer
            assert await resumed.adopt(attempt)
        await place.runtime.list()
        await place.runtime.logs(attempt)
        await place.runtime.stop(attempt)
        kube.nodes.quota_pods = 0  # the reason is in the Job's events
        with pytest.raises(RateLimited, match="exceeded quota"), anyio.fail_after(60):
            await place.launch({"do": "reward"}, "second")
    (role,) = of_kind("overlays/cluster", "Role")
    assert rights(kube) == role_rules(role)
