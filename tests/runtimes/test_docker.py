"""Docker runtime without a container engine: names, limits, exit states, addresses and refused options."""

from __future__ import annotations

import asyncio
import contextlib
import re
from pathlib import Path

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afield.errors import InfrastructureFailure, Unavailable, UsageError
from afield.interfaces.runtime import Phase
from afield.interfaces.sandbox import OutputBuffer
from afield.runtimes.docker.engine import (
    MAX_NAME,
    container_name,
    describe_exit,
    enforced_limits,
    host_config,
    phase_of,
    status_from_inspect,
    status_from_row,
)
from afield.runtimes.docker.loopback import LoopbackRelays, loopback_ports, rewrite_addresses
from afield.runtimes.docker.runtime import ContainerRuntime
from afield.runtimes.docker.sandbox import ContainerSandbox
from afield.settings.runtimes import ContainerOptions, ResourceLimits
from afield.types import Attempt, Reason
from agents.invoking import invocation, payload

IDS = st.from_regex(r"[A-Za-z0-9._-]{1,126}\.[1-9]", fullmatch=True).filter(lambda s: len(s) <= 128)


def runtime(tmp_path: Path, **options: object) -> ContainerRuntime:
    given = {"image": "an/image:1", "socket": f"unix://{tmp_path}/engine.sock", **options}
    return ContainerRuntime(ContainerOptions(**given), name="run", log_dir=tmp_path / "logs")  # pyright: ignore[reportArgumentType]


# --- names, limits, exit states ----------------------------------------------------------------------


@settings(max_examples=30)
@given(IDS, IDS)
def test_each_session_has_a_container_name_of_its_own(one: str, other: str) -> None:
    name = container_name(one)
    assert len(name) <= MAX_NAME and re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+", name)
    assert (name == container_name(other)) == (one == other)


def test_long_sessions_that_begin_alike_have_names_of_their_own() -> None:
    names = {container_name("x" * 125 + f".{n}") for n in range(1, 10)} | {container_name("x" * 126 + ".1")}
    assert len(names) == 10


def test_only_limits_that_are_set_are_enforced() -> None:
    assert enforced_limits(ResourceLimits()) == {"cpu", "memory", "pids", "disk"}
    assert enforced_limits(ResourceLimits(cpus=None, disk_mb=None)) == {"memory", "pids"}
    config = host_config(
        ContainerOptions(limits=ResourceLimits(cpus=0.5, memory_mb=64, pids=9, disk_mb=3, files=77))
    )
    assert config["nano_cpus"] == 500_000_000
    assert config["mem_limit"] == config["memswap_limit"] == 64 * 2**20
    assert config["pids_limit"] == 9
    assert config["ulimits"] == [{"Name": "nofile", "Soft": 77, "Hard": 77}]
    assert config["read_only"] and config["tmpfs"]["/tmp"] == "size=3m"
    none = ResourceLimits(cpus=None, memory_mb=None, pids=None, disk_mb=None, files=None)
    free = host_config(ContainerOptions(limits=none))
    assert not {"nano_cpus", "mem_limit", "pids_limit", "ulimits", "read_only", "tmpfs"} & free.keys()
    assert free["cap_drop"] == ["ALL"] and free["security_opt"] == ["no-new-privileges"]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"ExitCode": 3}, "exit code 3"),
        ({"ExitCode": 137, "OOMKilled": True}, "ran out of memory (64 MB)"),
        ({"ExitCode": 137}, "signal 9, Killed; too much memory ends so, at 64 MB"),
        ({"ExitCode": 139}, "signal 11, Segmentation fault)"),
        ({"ExitCode": 127, "Error": "no such file"}, "127: no such file"),
        ({"ExitCode": 255}, "signal 127, unknown"),
    ],
)
def test_container_exit_states_are_described_in_words(state: dict[str, object], said: str) -> None:
    assert said in describe_exit(state, ResourceLimits(memory_mb=64))


def test_status_words_of_docker_and_podman_map_to_phases() -> None:
    for word in ("exited", "stopped", "dead", "Removing"):
        assert phase_of(word) is Phase.ENDED
    assert phase_of("created") is Phase.STARTING
    assert phase_of("running") is phase_of("paused") is Phase.RUNNING


def test_list_and_inspect_give_the_same_status() -> None:
    labels = {"afield.session": "r.1"}
    row = {"Id": "ab", "Names": ["/afield-r.1"], "State": "running", "Created": 1794748804, "Labels": labels}
    one = {"Name": "/afield-r.1", "State": {"Status": "running"}, "Created": "2026-11-15T13:20:04.123456789Z"}
    assert status_from_row(row) == status_from_inspect("r.1", one)
    assert status_from_inspect("r.1", {**one, "Created": "2026-11-15T14:20:04.5+01:00"}) == status_from_row(
        row
    )


# --- options ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mount", ["/a", "a:/b", "/a:b", "/a:/b:rw", "/a:/b:ro:z", ""])
def test_a_mount_of_another_form_is_refused(mount: str) -> None:
    with pytest.raises(ValueError, match="mount"):
        ContainerOptions(mounts=(mount,))


def test_port_0_is_refused() -> None:
    with pytest.raises(ValueError, match="port = 0"):
        ContainerOptions(port=0)


# --- addresses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.9.9.9", "[::1]"])
def test_loopback_addresses_get_another_host_and_keep_the_rest(host: str) -> None:
    where = {"base_url": f"http://{host}:8400/s/r.1", "outcome_url": f"http://{host}:8401/o?x=1#y"}
    given = payload({"url": "http://127.0.0.1:1/"}, invocation(**where, hint_url=f"redis://u:p@{host}/0"))
    assert loopback_ports(given) == {8400, 8401, 6379}
    changed = rewrite_addresses(given, "10.88.0.1")
    assert changed["_rollout"]["base_url"] == "http://10.88.0.1:8400/s/r.1"
    assert changed["_rollout"]["outcome_url"] == "http://10.88.0.1:8401/o?x=1#y"
    assert changed["_rollout"]["hint_url"] == "redis://u:p@10.88.0.1/0"
    assert changed["url"] == given["url"]
    assert given["_rollout"]["base_url"] == where["base_url"]


def test_other_addresses_are_unchanged() -> None:
    where = {"base_url": "https://gateway.example:8400/s/r.1", "outcome_url": "file:///store"}
    given = payload({}, invocation(**where))
    assert loopback_ports(given) == set()
    assert rewrite_addresses(given, "host") is given
    for odd in ({}, {"_rollout": None}, {"_rollout": {"base_url": 7, "outcome_url": "http://[::1"}}):
        assert rewrite_addresses(odd, "host") is odd


@pytest.mark.anyio
async def test_a_relay_carries_both_ways_until_both_have_ended() -> None:
    async def upper(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read()).upper())
        writer.close()

    server = await asyncio.start_server(upper, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, LoopbackRelays() as relays:
        assert await relays.open("127.0.0.2", "127.0.0.0/8", {port})
        assert await relays.open("127.0.0.2", "127.0.0.0/8", {port})
        reader, writer = await asyncio.open_connection("127.0.0.2", port)
        writer.write(b"x" * 300_000)
        writer.write_eof()
        with anyio.fail_after(60):
            assert await reader.read() == b"X" * 300_000
        writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.2", port)


@pytest.mark.anyio
async def test_loopback_relay_closes_connections_from_other_addresses() -> None:
    taken: list[object] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.append(writer)
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, LoopbackRelays() as relays:
        await relays.open("127.0.0.2", "10.0.0.0/8", {port})
        reader, writer = await asyncio.open_connection("127.0.0.2", port)
        with anyio.fail_after(60), contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
    assert taken == []


@pytest.mark.anyio
async def test_a_relay_on_a_foreign_address_is_reported() -> None:
    async with LoopbackRelays() as relays:
        assert not await relays.open("192.0.2.1", "192.0.2.0/24", {8400})


# --- checks before the first rollout ------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_missing_engine_is_named_with_the_remedy(tmp_path: Path) -> None:
    async with runtime(tmp_path) as containers:
        with pytest.raises(UsageError, match=rf"unix://{tmp_path}/engine.sock does not answer.*set socket"):
            await containers.check()
        with pytest.raises(Unavailable, match="does not answer"):
            await containers.list()


@pytest.mark.anyio
async def test_a_launch_without_an_engine_is_an_infrastructure_failure(tmp_path: Path) -> None:
    async with runtime(tmp_path) as containers:
        with pytest.raises(InfrastructureFailure, match="does not answer") as caught:
            await containers.launch(Attempt("r", 1), payload({}, invocation()))
        assert caught.value.reason is Reason.LAUNCH
        failure = (await containers.wait(Attempt("r", 1))).failure
        assert failure and failure.message == str(caught.value)


@pytest.mark.anyio
@pytest.mark.parametrize("network", ["host", "none", "container:other", ""])
async def test_networks_without_addresses_are_refused(tmp_path: Path, network: str) -> None:
    async with runtime(tmp_path, network=network) as containers:
        with pytest.raises(UsageError, match=f"network '{network}'.*'bridge'"):
            await containers.check()


@pytest.mark.anyio
async def test_launching_outside_the_runtime_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="async with"):
        await runtime(tmp_path).launch(Attempt("r", 1), {})


@pytest.mark.anyio
async def test_sandbox_without_a_container_engine_raises_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        async with ContainerSandbox("an/image", ContainerOptions(socket=f"unix://{tmp_path}/engine.sock")):
            pass


def test_capabilities(tmp_path: Path) -> None:
    can = runtime(tmp_path).capabilities
    assert can.isolation == "container" and can.limits == {"cpu", "memory", "pids"}
    assert can.exec and can.lists and can.reaches and can.outlives and can.tells_end and can.lingers


# --- output -------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(2, 64))
def test_output_keeps_its_beginning_and_its_end(parts: list[bytes], most: int) -> None:
    output, whole = OutputBuffer(most), b"".join(parts)
    for part in parts:
        output.add(part)
    text = output.text.encode("utf-8", "replace")
    if len(whole) <= most:
        assert output.omitted == 0 and output.text == whole.decode("utf-8", "replace")
    else:
        assert output.omitted == len(whole) - most
        kept = output.bytes
        assert kept == whole[: most // 2] + whole[len(whole) - (most - most // 2) :]
        assert f"{output.omitted} bytes left out".encode() in text
