"""Workers take invocations from their own controller alone, and write outcomes where they were told to."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import anyio
import pytest

from afield.errors import InfrastructureFailure, UsageError
from afield.runtimes.process import ProcessRuntime
from afield.runtimes.remote import RemoteRuntime
from afield.sdk.signed_invocations import (
    HEADER,
    InvocationKey,
    default_host,
    fresh_key,
    in_container,
    key_for,
    key_from_file,
    user_key,
)
from afield.transports.stores.files import FilesTransport
from agents.invoking import invocation, payload
from agents.places import ACTING, Place, serving
from agents.sink import Sink
from support.other_user import needs_other_user, open_folder, python_as_other_user

pytestmark = pytest.mark.anyio
POST = """
import sys, urllib.error, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
try:
    print(urllib.request.urlopen(request, timeout=20).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


@pytest.fixture
def shared_place() -> Iterator[Path]:
    folder = open_folder()
    yield folder
    shutil.rmtree(folder)


def status(url: str, body: bytes, headers: dict[str, str] | None = None, method: str = "POST") -> int:
    try:
        request = Request(url, body, {"Content-Type": "application/json", **(headers or {})}, method=method)
        with urlopen(request, timeout=20) as response:
            return response.status
    except HTTPError as error:
        with error:
            return error.code


async def worker_address(runtime: ProcessRuntime) -> str:
    """As another user of the machine finds it: the port that a process listens on."""
    await runtime.check()
    return runtime.workers[0].url


@needs_other_user
async def test_another_user_cannot_start_an_attempt_in_a_worker(shared_place: Path) -> None:
    outcomes = shared_place / "outcomes"
    async with ProcessRuntime(f"{ACTING}:act", log_dir=shared_place / "logs", workers=1) as runtime:
        url = await worker_address(runtime)
        forged = payload({"do": "reward", "value": 1.0}, invocation(outcome_url=outcomes.as_uri()))
        said = await asyncio.to_thread(python_as_other_user, POST, f"{url}/invocations", json.dumps(forged))
        assert said.stdout.strip() == "401", said
        await anyio.sleep(0.5)
    assert not outcomes.exists()


async def test_what_was_signed_is_taken_and_what_was_changed_is_not(tmp_path: Path) -> None:
    async with FilesTransport(tmp_path / "store") as transport, Sink(transport).running() as sink:
        async with serving() as server:
            body = json.dumps(payload({"do": "reward", "value": 1.0}, invocation(**transport.address("e"))))
            key, url = user_key(), f"{server.url}/invocations"
            good = key.sign("POST", "/invocations", body.encode())
            elsewhere = key.sign("DELETE", "/invocations/r.1")
            old = InvocationKey(key.value, clock=lambda: 1_000_000.0).sign(
                "POST", "/invocations", body.encode()
            )
            other = fresh_key().sign("POST", "/invocations", body.encode())
            tries = [
                (body.encode(), {}),
                (body.replace("1.0", "9.0").encode(), good),
                (body.encode(), elsewhere),
                (body.encode(), old),
                (body.encode(), other),
                (body.encode(), {HEADER: "now.never"}),
            ]
            for data, headers in tries:
                assert await asyncio.to_thread(status, url, data, headers) == 401, headers
            assert await asyncio.to_thread(status, f"{url}/r.1", b"", {}, "DELETE") == 401
            assert await asyncio.to_thread(status, url, body.encode(), good) == 200
        async with serving() as server, RemoteRuntime([server.url]) as runtime:
            place = Place(runtime, transport, sink)
            attempt = await place.launch({"do": "reward", "value": 0.5}, "signed")
            assert (await place.wait(attempt)).failure is None
            assert await place.reward(attempt) == 0.5


async def test_a_controller_with_another_key_is_reported(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(fresh_key().value)
    (tmp_path / "key").chmod(0o600)
    async with (
        FilesTransport(tmp_path / "store") as transport,
        Sink(transport).running() as sink,
        serving() as server,
        RemoteRuntime([server.url], key_file=tmp_path / "key") as runtime,
    ):
        with pytest.raises(InfrastructureFailure, match=r"401.*another key"):
            await Place(runtime, transport, sink).launch({"do": "reward"}, "r")


async def test_outcomes_are_written_below_the_root_that_was_given_alone(tmp_path: Path) -> None:
    root = tmp_path / "outcomes"
    command = {"target": f"{ACTING}:act", "log_dir": tmp_path / "logs", "outcome_root": root, "workers": 1}
    async with ProcessRuntime(**command) as runtime:
        url, key = await worker_address(runtime), runtime._command.key
        for place, expected in [(tmp_path, 400), (root / ".." / "x", 400), (root, 200), (root / "in", 200)]:
            told = invocation(f"r{place.name}-{expected}", outcome_url=f"file://{place}")
            body = json.dumps(payload({"do": "reward"}, told)).encode()
            signed = key.sign("POST", "/invocations", body)
            assert await asyncio.to_thread(status, f"{url}/invocations", body, signed) == expected, place
    assert not (tmp_path / "x").exists()


def test_a_server_listens_on_loopback_unless_it_has_a_container_to_itself(tmp_path: Path) -> None:
    assert default_host(in_container(tmp_path, {}, pid=7)) == "127.0.0.1"
    assert default_host(in_container(tmp_path, {"DOCKER_CONTAINER": "1"}, pid=7)) == "0.0.0.0"
    assert in_container(tmp_path, {}, pid=1)
    (tmp_path / ".dockerenv").touch()
    assert in_container(tmp_path, {}, pid=7)


def test_only_a_container_with_all_its_addresses_takes_unsigned_invocations(tmp_path: Path) -> None:
    def asked(host: str, container: bool, unsigned: bool = False) -> bool:
        return key_for(host, None, unsigned=unsigned, container=container) is not None

    assert asked("127.0.0.1", container=True)
    assert asked("0.0.0.0", container=False)
    assert not asked("0.0.0.0", container=True)
    assert not asked("127.0.0.1", container=False, unsigned=True)
    key = tmp_path / "key"
    key.write_bytes(fresh_key().value)
    key.chmod(0o600)
    assert key_for("0.0.0.0", key, unsigned=False, container=True) is not None
    key.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        key_from_file(key)
