"""What afield keeps on disk is read by its owner alone, and the secret behind session keys by no agent."""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from afield.engines.scripted import ScriptedEngine
from afield.errors import UsageError
from afield.gateway.session_keys import SecretPlace, signing_secret
from afield.gateway.store import GatewayStore
from afield.interfaces import SessionSpec
from afield.orchestrator.state import RunDirectory, RunState
from afield.utils.private_files import private_directory, private_file, read_private
from support.gateways import running
from support.other_user import GID, UID, needs_other_user, open_folder, readable_files

pytestmark = pytest.mark.anyio


@pytest.fixture
def shared_place() -> Iterator[Path]:
    folder = open_folder()
    yield folder
    shutil.rmtree(folder)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_store_and_its_directory_are_private(shared_place: Path) -> None:
    async with GatewayStore(shared_place / "gateway-store" / "gateway.sqlite"):
        assert mode(shared_place / "gateway-store") == 0o700
        for path in (shared_place / "gateway-store").iterdir():
            assert mode(path) == 0o600, path


async def test_readable_store_is_made_private_and_logged(
    shared_place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = shared_place / "store" / "gateway.sqlite"
    async with GatewayStore(path):
        pass
    path.parent.chmod(0o755)
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        async with GatewayStore(path):
            assert (mode(path.parent), mode(path)) == (0o700, 0o600)
    assert [record for record in caplog.messages if "0644" in record and "private now" in record]


def test_a_folder_that_others_can_write_is_refused(shared_place: Path) -> None:
    (shared_place / "something-else").touch()
    shared_place.chmod(0o777)
    with pytest.raises(UsageError, match="can be written by other users"):
        private_directory(shared_place, ("gateway.sqlite",))


def test_a_folder_of_other_things_keeps_its_mode(shared_place: Path) -> None:
    (shared_place / "something-else").touch()
    private_directory(shared_place, ("gateway.sqlite",))
    assert mode(shared_place) == 0o755
    assert mode(private_file(shared_place / "gateway.sqlite")) == 0o600


@needs_other_user
async def test_other_users_cannot_read_gateway_or_run_files(shared_place: Path) -> None:
    run = RunDirectory(shared_place / "runs" / "one")
    async with GatewayStore(shared_place / "store" / "gateway.sqlite"):
        with run.locked("collect"), RunState(run.run_state):
            (shared_place / "shared.txt").write_text("for all")
            assert readable_files(shared_place) == [str(shared_place / "shared.txt")]


async def test_store_does_not_contain_the_signing_secret(tmp_path: Path) -> None:
    async with running(ScriptedEngine([]), tmp_path / "store") as place:
        ticket = await place.client.open(SessionSpec(id="r1.1"))
        secret = next((tmp_path / "store-secrets").glob("*.key"))
        files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
        held = b"".join(path.read_bytes() for path in files)
    assert mode(secret) == 0o600
    assert mode(secret.parent) == 0o700
    assert secret.read_bytes() not in held
    assert ticket.api_key.rpartition("~")[2].encode() not in held


async def test_session_keys_work_after_a_restart_and_after_the_store_was_moved(tmp_path: Path) -> None:
    place = SecretPlace(directory=tmp_path / "secrets")
    async with GatewayStore(tmp_path / "a" / "gateway.sqlite") as store:
        first = signing_secret(place, store.id, tmp_path / "a", sessions=False)
    (tmp_path / "a").rename(tmp_path / "b")
    async with GatewayStore(tmp_path / "b" / "gateway.sqlite") as store:
        assert signing_secret(place, store.id, tmp_path / "b", sessions=True) == first
    async with GatewayStore(tmp_path / "c" / "gateway.sqlite") as store:
        assert signing_secret(place, store.id, tmp_path / "c", sessions=False) != first


async def test_lost_secret_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = SecretPlace(directory=tmp_path / "secrets")
    signing_secret(place, "a" * 32, tmp_path / "store", sessions=True)
    assert any("keys of earlier sessions are invalid" in line for line in caplog.messages)


async def test_a_secret_inside_the_store_or_open_to_others_is_refused(tmp_path: Path) -> None:
    inside = SecretPlace(file=tmp_path / "store" / "secret")
    with pytest.raises(UsageError, match="is inside the store"):
        signing_secret(inside, "a" * 32, tmp_path / "store", sessions=False)
    shown = tmp_path / "secret"
    shown.write_bytes(bytes(32))
    shown.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        signing_secret(SecretPlace(file=shown), "a" * 32, tmp_path / "store", sessions=False)


@needs_other_user
@pytest.mark.parametrize(("bits", "accepted"), [(0o440, True), (0o640, True), (0o460, False), (0o444, False)])
def test_a_secret_of_root_may_be_readable_by_a_group(shared_place: Path, bits: int, accepted: bool) -> None:
    """Kubernetes mounts secrets like this for users other than root."""
    secret = shared_place / "secret"
    secret.write_bytes(bytes(32))
    os.chown(secret, 0, GID)
    secret.chmod(bits)
    os.setegid(GID)
    os.seteuid(UID)
    try:
        if accepted:
            assert read_private(secret) == bytes(32)
        else:
            with pytest.raises(UsageError, match="chmod 600"):
                read_private(secret)
    finally:
        os.seteuid(0)
        os.setegid(0)
    if accepted:
        with pytest.raises(UsageError, match="chmod 600"):  # root itself needs no group
            read_private(secret)
