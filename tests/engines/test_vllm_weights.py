"""How new weights get to a vLLM server: its own transfer, and adapters beside the weights it has."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from msgspec import structs

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.engines.vllm.engine import VllmEngine
from afield.engines.vllm.weight_transfer import VllmTransfer
from afield.errors import Conflict, Unavailable, UsageError
from afield.interfaces.engine import TopLogprobs
from afield.interfaces.shared_weights import (
    SharedTensor,
    SharedWeights,
    read_shared_weights,
    remove_shared_weights,
    this_host,
    write_shared_weights,
)
from afield.types import FinishReason, VersionSpan
from afield.utils.process_tree import start_time
from support.engine_calls import a_call, answer, begin, counting_on, finish, ids, versions
from support.fake_vllm import FakeVllm
from support.vllm_calls import connected, counting

pytestmark = pytest.mark.anyio


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


# --- vLLM's own transfer -------------------------------------------------------------------------


def send(transfer: VllmTransfer, version: int, *names: str) -> None:
    """As vLLM's senders do, in a thread of the trainer's."""
    with transfer.publishing(version):
        transfer.start_weight_update()
        for name in names:
            transfer.update_weights({"names": [name], "dtype_names": ["float32"], "shapes": [[1]]})
        transfer.finish_weight_update()


async def test_weights_are_sent_while_calls_are_paused_and_the_gateway_learns_the_version(
    weights: Path,
) -> None:
    fake = FakeVllm(ScriptedEngine(lambda call: ScriptedReply(token_ids=tuple(range(20, 60)))))
    async with connected(fake) as engine:
        transfer = VllmTransfer(engine.url)
        await asyncio.to_thread(transfer.init_weight_transfer_engine, {"packed": False})
        call = await begin(fake, engine, a_call(max_tokens=40))
        await asyncio.to_thread(send, transfer, 3, "a", "b")
        await engine.load(3, "")
        chunks = await finish(fake, call)
        assert (await engine.info()).version == 3
    assert fake.received == ["a", "b"]
    assert [path.partition("?")[0] for path in fake.asked] == [
        "/init_weight_transfer_engine",
        "/pause",
        "/start_weight_update",
        "/update_weights",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache",
        "/resume",
    ]
    assert ids(chunks) == list(range(20, 60))
    assert [span.low for span in chunks[-1].versions or ()] == [0, 3]


async def test_a_transfer_that_fails_leaves_the_server_paused_until_one_succeeds() -> None:
    fake = FakeVllm(ScriptedEngine(counting))
    async with connected(fake) as engine:
        transfer = VllmTransfer(engine.url)
        with pytest.raises(Unavailable, match=r"answers 500 to /start_weight_update: .*while it is new"):
            await asyncio.to_thread(send, transfer, 1, "a")
        assert fake.moving.is_set()
        await asyncio.to_thread(transfer.init_weight_transfer_engine, {"packed": False})
        with pytest.raises(Unavailable, match=r"answers 500 to /update_weights: .*no such tensor"):
            await asyncio.to_thread(send, transfer, 1, "strange")
        assert not fake.moving.is_set()
        fake.transferring = "new"
        with pytest.raises(Unavailable, match="answers 500 to /start_weight_update"):
            await asyncio.to_thread(send, transfer, 1, "a")
        assert not fake.moving.is_set()
        await asyncio.to_thread(transfer.init_weight_transfer_engine, {"packed": False})
        await asyncio.to_thread(send, transfer, 1, "a")
        assert fake.moving.is_set()
        assert (await answer(engine, a_call()))[-1].versions == (VersionSpan(0, 12, 1, 1),)
        with pytest.raises(UsageError, match="the version of the weights is unknown"):
            await asyncio.to_thread(VllmTransfer(engine.url).start_weight_update)


# --- weights in the trainer's memory ---------------------------------------------------------------


def share(directory: Path, version: int, *names: str) -> Path:
    """A version as a trainer of this process shares it, whose file is not written yet."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text("{}")
    tensors = [
        SharedTensor(name=name, dtype="bfloat16", shape=(2, 3), first=256 * n, size=12)
        for n, name in enumerate(names)
    ]
    write_shared_weights(
        directory,
        SharedWeights(
            version=version,
            host=this_host(),
            pid=os.getpid(),
            started=start_time(os.getpid()),
            token=bytes([version] * 16),
            size=256 * len(names),
            tensors=tuple(tensors),
            vllm_handles="handles",
        ),
    )
    return directory


async def served(engine: VllmEngine) -> set[int]:
    """Versions of a new call's tokens."""
    spans = [(c.low, c.high) for c in await answer(engine, a_call())]
    return {version for span in spans for version in span}


@pytest.mark.parametrize("labels", [True, False])
async def test_weights_in_memory_are_copied_while_calls_are_paused(tmp_path: Path, labels: bool) -> None:
    reply = ScriptedReply(token_ids=tuple(range(20, 60)))
    fake = FakeVllm(ScriptedEngine(lambda call: reply), labels=labels)
    async with connected(fake, shared_weights=True) as engine:
        call = await begin(fake, engine, a_call(max_tokens=40))
        await engine.load(3, str(share(tmp_path / "v3", 3, "a", "b")))
        chunks = await finish(fake, call)
        assert (await engine.info()).version == 3
        assert await served(engine) == {3}
    assert (fake.received, fake.handles) == (["a", "b"], ["handles"])
    assert [path.partition("?")[0] for path in fake.asked] == [
        "/init_weight_transfer_engine",
        "/pause",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        *(["/update_weight_version"] if labels else []),
        "/reset_prefix_cache",
        "/resume",
    ]
    assert ids(chunks) == list(range(20, 60))


async def test_a_server_without_weight_transfer_is_refused_with_its_flags() -> None:
    with pytest.raises(UsageError, match=r"answers 500 .*not configured.*--weight-transfer-config .*ipc"):
        async with connected(FakeVllm(ScriptedEngine(counting), ipc=False), shared_weights=True):
            pass


async def test_weights_that_the_server_cannot_copy_are_loaded_from_their_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = share(tmp_path / "v1", 1, "strange")
    fake = FakeVllm(ScriptedEngine(counting))
    async with connected(fake, shared_weights=True) as engine:
        loading = asyncio.create_task(engine.load(1, str(path)))
        while "/update_weights" not in fake.asked:
            await asyncio.sleep(0)
        (path / "model.safetensors").touch()
        await loading
        assert await served(engine) == {1}
    assert fake.weights == str(path)
    assert "version 1 is loaded from its file" in caplog.text


@pytest.mark.parametrize("successor", [True, False], ids=["next version", "no description"])
async def test_memory_that_is_overwritten_while_it_is_copied_is_noticed(
    tmp_path: Path, successor: bool
) -> None:
    path = share(tmp_path / "v1", 1, "a")

    def overwrite() -> None:
        (path / "model.safetensors").touch()
        remove_shared_weights(path)
        if successor:
            share(path, 2, "a")

    fake = FakeVllm(ScriptedEngine(counting))
    fake.on_update = overwrite
    async with connected(fake, shared_weights=True) as engine:
        await engine.load(1, str(path))
        assert await served(engine) == {1}
    assert (fake.received, fake.weights) == (["a"], str(path))


async def test_a_server_that_reads_files_waits_for_them_before_it_pauses(tmp_path: Path) -> None:
    path = share(tmp_path / "v1", 1, "a")
    fake = FakeVllm(ScriptedEngine(counting))
    async with connected(fake) as engine:
        loading = asyncio.create_task(engine.load(1, str(path)))
        assert await served(engine) == {0}
        assert not fake.asked and not loading.done()
        (path / "model.safetensors").touch()
        await loading
        assert await served(engine) == {1}
    assert (fake.received, fake.weights) == ([], str(path))


async def test_a_trainer_that_died_before_it_wrote_the_file_is_named(tmp_path: Path) -> None:
    path = share(tmp_path / "v1", 1, "a")
    shared = read_shared_weights(path)
    assert shared is not None
    write_shared_weights(path, structs.replace(shared, started="1"))
    async with connected(FakeVllm(ScriptedEngine(counting)), shared_weights=True) as engine:
        with pytest.raises(
            UsageError, match=r"which ended before it wrote model.safetensors; resume the run"
        ):
            await engine.load(1, str(path))
        assert await served(engine) == {0}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_server_that_does_not_name_its_weights_gets_them_and_calls_have_intervals(
    weights: Path, stream: bool
) -> None:
    fake = FakeVllm(ScriptedEngine(counting_on), labels=False)
    async with connected(fake) as engine:
        info = await engine.info()
        assert not info.exact_versions
        assert any("does not name its weights" in note for note in info.notes)
        call = await begin(fake, engine, a_call(max_tokens=30, stream=stream))
        await engine.load(1, str(weights))
        assert (await engine.info()).version == 1
        chunks = await finish(fake, call)
        assert (chunks[-1].low, chunks[-1].high) == (0, 1)
        assert versions(await answer(engine, a_call())) == [1] * 12
        with pytest.raises(Conflict, match="older"):
            await engine.load(0, str(weights))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_server_that_names_likely_tokens_by_their_ids_is_read_like_others(stream: bool) -> None:
    tops: list[list[TopLogprobs]] = []
    for labels in (True, False):
        async with connected(FakeVllm(ScriptedEngine(counting_on), labels=labels)) as engine:
            assert (await engine.info()).max_top_logprobs == 20
            chunks = await answer(engine, a_call(top_logprobs=3, stream=stream))
            tops.append([top for chunk in chunks for top in chunk.top_logprobs])
    assert tops[0] == tops[1]
    assert all(len(top) >= 1 for top in tops[0])


# --- adapters ------------------------------------------------------------------------------------


@pytest.fixture
def adapters(tmp_path: Path) -> list[str]:
    """Directories by version."""
    for version in range(5):
        (tmp_path / str(version)).mkdir()
        (tmp_path / str(version) / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    return [str(tmp_path / str(version)) for version in range(5)]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("scale_out", [True, False], ids=["generate", "completions"])
async def test_a_call_keeps_the_adapter_it_began_with(
    adapters: list[str], stream: bool, scale_out: bool
) -> None:
    fake = FakeVllm(ScriptedEngine(counting_on), loras=4, scale_out=scale_out)
    async with connected(fake) as engine:
        begun = []
        for version in (1, 2, 3):
            await engine.load(version, adapters[version])
            await engine.load(version, adapters[version])
            begun.append(await begin(fake, engine, a_call(max_tokens=30, stream=stream)))
        assert (await engine.info()).version == 3
        with pytest.raises(Conflict, match="version 2 is older"):
            await engine.load(2, adapters[2])
        for version, call in enumerate(begun, 1):
            chunks = await finish(fake, call)
            assert ids(chunks) == list(range(8, 38))
            assert versions(chunks) == [version] * 30
        assert set(fake.adapters) == {"tiny-v1", "tiny-v2", "tiny-v3"}
        await engine.load(4, adapters[4])
        assert set(fake.adapters) == {"tiny-v3", "tiny-v4"}
    assert "/pause" not in " ".join(fake.asked)
    assert fake.served[-3:] == ["tiny-v1", "tiny-v2", "tiny-v3"]


async def test_a_server_that_cannot_tell_its_configuration_is_asked_for_its_metrics(
    adapters: list[str],
) -> None:
    fake = FakeVllm(ScriptedEngine(counting_on), loras=2, no_server_info=True)
    async with connected(fake) as engine:
        await engine.load(1, adapters[1])
        assert versions(await answer(engine, a_call())) == [1] * 12


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("device", "exact"), [("cpu", False), ("cuda", True)])
async def test_a_call_on_base_weights_beside_an_adapter_is_exact_only_where_the_server_keeps_them_apart(
    adapters: list[str], stream: bool, device: str, exact: bool
) -> None:
    fake = FakeVllm(ScriptedEngine(counting_on), loras=2, device=device)
    async with connected(fake) as engine:
        base = await begin(fake, engine, a_call(max_tokens=30, stream=stream))
        await engine.load(1, adapters[1])
        own = await begin(fake, engine, a_call(max_tokens=30, stream=stream))
        chunks = await finish(fake, base)
        spans = {(span.low, span.high) for span in chunks[-1].versions or ()}
        spans |= {(chunk.low, chunk.high) for chunk in chunks if chunks[-1].versions is None}
        assert (spans == {(0, 0)}) == exact
        assert exact or (0, 1) in spans
        assert versions(await finish(fake, own)) == [1] * 30


@pytest.mark.parametrize("stream", [True, False])
async def test_there_are_never_more_versions_in_use_than_the_server_has_room_for(
    adapters: list[str], stream: bool
) -> None:
    """Calls of the oldest go on with the newest, from where they were."""
    fake, others = FakeVllm(ScriptedEngine(counting_on), loras=2), []
    async with connected(fake) as engine:
        await engine.load(1, adapters[1])
        call = await begin(fake, engine, a_call(max_tokens=60, stream=stream))
        for version in (2, 3, 4):
            await engine.load(version, adapters[version])
            others.append(await begin(fake, engine, a_call(max_tokens=40, stream=stream)))
        chunks = await finish(fake, call)
        for other in others:
            assert ids(await finish(fake, other)) == list(range(8, 48))
    assert fake.most_at_once == 2
    assert ids(chunks) == list(range(8, 68))
    told = versions(chunks)
    assert told == sorted(told)
    assert len({*told}) > 1
    assert chunks[-1].finish is FinishReason.LENGTH


async def test_a_version_that_another_process_has_loaded_is_taken_up(adapters: list[str]) -> None:
    fake = FakeVllm(ScriptedEngine(counting_on), loras=2)
    async with connected(fake) as engine, VllmEngine(engine.url) as other:
        await engine.load(1, adapters[1])
        call = await begin(fake, engine, a_call(max_tokens=60))
        for version in (2, 3):
            await other.load(version, adapters[version])
            assert ids(await answer(engine, a_call(max_tokens=2))) == [8, 9]
            await engine.load(version, adapters[version])
        assert versions(await answer(engine, a_call(max_tokens=2))) == [3, 3]
        chunks = await finish(fake, call)
    assert ids(chunks) == list(range(8, 68))
    assert fake.asked.count("+tiny-v2") == fake.asked.count("+tiny-v3") == 1


async def test_whole_weights_after_adapters_take_over_every_call(adapters: list[str], weights: Path) -> None:
    fake = FakeVllm(ScriptedEngine(counting_on), loras=2)
    async with connected(fake) as engine:
        await engine.load(1, adapters[1])
        call = await begin(fake, engine, a_call(max_tokens=30))
        await engine.load(2, str(weights))
        chunks = await finish(fake, call)
        assert fake.served[-2:] == ["tiny-v1", "tiny"]
        assert ids(chunks) == list(range(8, 38))
        assert {chunk.low for chunk in chunks} == {1, 2}
        told = chunks[-1].versions
        assert told is not None
        assert (told[0].start, told[0].low, told[-1].end, told[-1].low) == (0, 1, 30, 2)
        assert (await engine.info()).version == 2


async def test_a_server_that_has_adapters_already_is_taken_as_it_is(adapters: list[str]) -> None:
    fake = FakeVllm(ScriptedEngine(counting), loras=2)
    fake.adapters = {"tiny-v5": "a", "tiny-v6": "b", "tiny-other": "c"}
    async with connected(fake) as engine:
        assert (await engine.info()).version == 6
        assert versions(await answer(engine, a_call())) == [6] * 12
        assert fake.served[-1] == "tiny-v6"


async def test_an_adapter_the_server_refuses_changes_nothing(adapters: list[str], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text('{"r": 16, "lora_alpha": 16}')
    async with connected(FakeVllm(ScriptedEngine(counting), loras=2)) as engine:
        await engine.load(1, adapters[1])
        with pytest.raises(
            UsageError, match=r"did not take the adapter .*rank 16 is greater.*--max-lora-rank"
        ):
            await engine.load(2, str(broken))
        assert (await engine.info()).version == 1
        assert versions(await answer(engine, a_call())) == [1] * 12
    fake_vllm = FakeVllm(ScriptedEngine(counting), no_server_info=True)
    async with connected(fake_vllm) as engine:
        with pytest.raises(
            UsageError, match=r"answers 500 to /server_info \(.*No module named pip.*/metrics"
        ):
            await engine.load(1, adapters[1])
    for loras, told in ((None, "serves no adapters"), (1, "serves 1 adapter at a time")):
        async with connected(FakeVllm(ScriptedEngine(counting), loras=loras)) as engine:
            with pytest.raises(UsageError, match=rf"{told}; start it with --enable-lora --max-loras 2"):
                await engine.load(1, adapters[1])
