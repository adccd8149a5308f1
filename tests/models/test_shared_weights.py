"""Weights that a trainer shares in memory are those of the file, or the reader takes the file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file

from afield.engines.torch.weights import parameters, read_model, read_weights
from afield.errors import Unavailable, UsageError
from afield.interfaces.shared_weights import (
    FILE,
    SharedWeights,
    can_be_loaded,
    read_shared_weights,
    wait_for_file,
    write_shared_weights,
)
from afield.interfaces.weight_probe import read_weight_probe
from afield.models.rounding import Rounding
from afield.models.shared_weights import SharedBuffer, SharedMemoryError, buffer_size, lay_out, opened
from afield.settings.trainer import LoraOptions
from afield.trainers.model import PolicyModel
from afield.trainers.shared_publication import SharedPublication
from support.tiny_model import build_tiny_model, reseed

CPU = torch.device("cpu")
KINDS = ("float32", "bfloat16")


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("shared") / "model", tied=request.param)


def moved(path: Path, seed: int = 0, lora: LoraOptions | None = None) -> PolicyModel:
    """A policy after an update."""
    policy = PolicyModel(path, device=CPU, lora=lora)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable:
            parameter.add_(1e-3 * torch.randn(parameter.shape, generator=generator))
    return policy


class Stalled(SharedPublication):
    """A publication whose files are written when the test says so."""

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__(device)
        self.go = threading.Event()
        start = self._writer.start
        self._writer.start = lambda task: start(lambda: (self.go.wait(60), task())[1])


@pytest.fixture
def sharing() -> Iterator[Stalled]:
    sharing = Stalled()
    yield sharing
    sharing.go.set()
    sharing.finish()


def described(directory: Path) -> SharedWeights:
    shared = read_shared_weights(directory)
    assert shared is not None
    return shared


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    with opened(described(directory), CPU) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


# --- the same weights ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("lora", [None, LoraOptions(rank=2, publish="merged")], ids=["whole", "merged"])
def test_memory_and_file_hold_the_bits_that_a_publication_on_disk_writes(
    model: Path, sharing: Stalled, tmp_path: Path, dtype: str, lora: LoraOptions | None
) -> None:
    policy = moved(model, lora=lora)
    rounding = Rounding(dtype=dtype, seed=3, version=7)  # pyright: ignore[reportArgumentType]
    on_disk, shared = tmp_path / "disk", tmp_path / "memory"
    policy.export(on_disk, rounding)
    update = policy.export(shared, rounding, sharing)
    assert (update.kept is None) == (dtype == "float32")
    assert not (shared / "model.safetensors").exists()
    expected = load_file(on_disk / "model.safetensors")
    assert same(tensors_of(shared), expected)
    assert described(shared).probe is not None
    sharing.go.set()
    sharing.finish()
    assert (shared / "model.safetensors").read_bytes() == (on_disk / "model.safetensors").read_bytes()
    names = {path.name for path in shared.iterdir()}
    assert names - {FILE} == {path.name for path in on_disk.iterdir()}
    assert read_weight_probe(shared) == read_weight_probe(on_disk)
    for name in names - {FILE, "model.safetensors"}:
        assert (shared / name).read_bytes() == (on_disk / name).read_bytes()


def test_training_after_a_publication_changes_neither_memory_nor_file(
    model: Path, sharing: Stalled, tmp_path: Path
) -> None:
    policy = moved(model)
    policy.export(tmp_path / "v1", Rounding(version=1), sharing)
    before = tensors_of(tmp_path / "v1")
    with torch.no_grad():
        for parameter in policy.trainable:
            parameter.zero_()
    assert same(tensors_of(tmp_path / "v1"), before)
    sharing.go.set()
    sharing.finish()
    assert same(load_file(tmp_path / "v1" / "model.safetensors"), before)


def test_tied_tensors_take_their_memory_once() -> None:
    tensor, other = torch.ones(300), torch.ones(5, dtype=torch.int64)
    tied = {"a": (tensor, torch.bfloat16), "b": (other, torch.int64), "c": (tensor, torch.bfloat16)}
    placed = lay_out(tied)
    assert [place.first for place in placed] == [0, 768, 0]
    assert buffer_size(placed) == 1024


def test_the_embedded_engine_reads_weights_before_their_file_is_written(
    model: Path, sharing: Stalled, tmp_path: Path
) -> None:
    policy = moved(model)
    policy.export(tmp_path / "disk")
    policy.export(tmp_path / "memory", Rounding(version=1), sharing)
    wanted = parameters(read_model(model, torch.float32, CPU))
    tensors = read_weights(tmp_path / "memory", wanted, model)
    expected = read_weights(tmp_path / "disk", wanted, model)
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


# --- weights that are gone ------------------------------------------------------------------------


def test_a_version_is_on_disk_before_its_memory_is_overwritten(
    model: Path, sharing: Stalled, tmp_path: Path
) -> None:
    policy = moved(model)
    policy.export(tmp_path / "v1", Rounding(version=1), sharing)
    first = described(tmp_path / "v1")
    sharing.go.set()
    moved(model, seed=1).export(tmp_path / "v2", Rounding(version=2), sharing)
    assert read_shared_weights(tmp_path / "v1") is None
    assert (tmp_path / "v1" / "model.safetensors").exists()
    assert described(tmp_path / "v2").version == 2
    write_shared_weights(tmp_path / "v1", first)  # as a reader that read it just before
    with pytest.raises(SharedMemoryError, match="holds other weights"), opened(first, CPU):
        pass
    wanted = parameters(read_model(model, torch.float32, CPU))
    expected = load_file(tmp_path / "v1" / "model.safetensors")
    read = read_weights(tmp_path / "v1", wanted, model)
    assert all(torch.equal(t, expected[p.names[0]]) for p, t in zip(wanted, read, strict=True))


def test_a_buffer_that_is_overwritten_while_it_is_read_is_noticed(
    model: Path, sharing: Stalled, tmp_path: Path
) -> None:
    moved(model).export(tmp_path / "v1", Rounding(version=1), sharing)
    sharing.go.set()
    with (
        pytest.raises(SharedMemoryError, match="holds other weights"),
        opened(described(tmp_path / "v1"), CPU),
    ):
        moved(model, seed=1).export(tmp_path / "v2", Rounding(version=2), sharing)


def other_token(shared: SharedWeights) -> SharedWeights:
    return structs.replace(shared, token=bytes(16))


def other_start(shared: SharedWeights) -> SharedWeights:
    return structs.replace(shared, started="1")


def other_file(shared: SharedWeights) -> SharedWeights:
    return structs.replace(shared, descriptor=0)


def other_size(shared: SharedWeights) -> SharedWeights:
    return structs.replace(shared, size=shared.size + 4096)


@pytest.mark.parametrize("change", [other_token, other_start, other_file, other_size])
def test_a_description_that_does_not_fit_the_memory_is_not_used(
    model: Path, sharing: Stalled, tmp_path: Path, change: Callable[[SharedWeights], SharedWeights]
) -> None:
    moved(model).export(tmp_path / "v1", Rounding(version=1), sharing)
    sharing.go.set()
    sharing.finish()
    forged = change(described(tmp_path / "v1"))
    with pytest.raises(SharedMemoryError), opened(forged, CPU):
        pass
    write_shared_weights(tmp_path / "v1", forged)
    wanted = parameters(read_model(model, torch.float32, CPU))
    expected = load_file(tmp_path / "v1" / "model.safetensors")
    read = read_weights(tmp_path / "v1", wanted, model)
    assert all(torch.equal(t, expected[p.names[0]]) for p, t in zip(wanted, read, strict=True))


def test_a_reader_that_cannot_use_the_memory_waits_for_the_file(
    model: Path, sharing: Stalled, tmp_path: Path
) -> None:
    moved(model).export(tmp_path / "v1", Rounding(version=1), sharing)
    elsewhere = structs.replace(described(tmp_path / "v1"), host="another machine")
    write_shared_weights(tmp_path / "v1", elsewhere)
    with pytest.raises(Unavailable, match=r"has not written model.safetensors for 0 s.*weight_transfer"):
        wait_for_file(tmp_path / "v1", timeout_s=0)
    wanted = parameters(read_model(model, torch.float32, CPU))
    threading.Timer(0.1, sharing.go.set).start()
    assert len(read_weights(tmp_path / "v1", wanted, model)) == len(wanted)


def test_files_that_cannot_be_written_are_an_error_of_the_next_call(
    model: Path, sharing: Stalled, tmp_path: Path
) -> None:
    moved(model).export(tmp_path / "v1", Rounding(version=1), sharing)
    (tmp_path / "v1").rename(tmp_path / "elsewhere")
    sharing.go.set()
    with pytest.raises(Unavailable, match="v1 cannot be written"):
        sharing.finish()
    sharing.finish()


PUBLISHER = """
import sys, threading
from pathlib import Path
import torch
from afield.models.rounding import Rounding
from afield.trainers.model import PolicyModel
from afield.trainers.shared_publication import SharedPublication

torch.set_num_threads(1)
sharing = SharedPublication(torch.device("cpu"))
sharing._writer.start = lambda task: None
PolicyModel(sys.argv[1], device=torch.device("cpu")).export(Path(sys.argv[2]), Rounding(version=1), sharing)
print("published", flush=True)
threading.Event().wait()
"""


def test_the_memory_of_another_process_is_read_until_it_is_killed(model: Path, tmp_path: Path) -> None:
    directory, code = tmp_path / "v1", textwrap.dedent(PUBLISHER)
    reseed(model, tmp_path / "start", 5)
    command = [sys.executable, "-c", code, str(tmp_path / "start"), str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"published\n"
        wanted = parameters(read_model(model, torch.float32, CPU))
        expected = load_file(tmp_path / "start" / "model.safetensors")
        assert can_be_loaded(directory)
        read = read_weights(directory, wanted, model)
        assert all(torch.equal(t, expected[p.names[0]]) for p, t in zip(wanted, read, strict=True))
        os.kill(process.pid, signal.SIGKILL)
    assert not can_be_loaded(directory)
    with pytest.raises(UsageError, match=r"which ended before it wrote model.safetensors; resume the run"):
        read_weights(directory, wanted, model)


# --- buffers that cannot be had -------------------------------------------------------------------


def test_memory_that_cannot_be_had_leaves_the_disk_or_is_an_error_with_the_remedy(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    meta = torch.device("meta")
    policy = moved(model)
    sharing = SharedPublication(meta)
    for version in (1, 2):
        policy.export(tmp_path / "v", Rounding(version=version), sharing)
        assert (tmp_path / "v" / "model.safetensors").exists()
        assert read_shared_weights(tmp_path / "v") is None
        assert not sharing.holds(tmp_path / "v")
    assert caplog.text.count("weights are published on disk: device meta cannot share its memory") == 1
    with pytest.raises(UsageError, match=r"weight_transfer = memory: device meta .*weight_transfer = disk"):
        policy.export(tmp_path / "v", Rounding(version=3), SharedPublication(meta, required=True))


def test_a_buffer_larger_than_memory_is_refused() -> None:
    with pytest.raises(SharedMemoryError, match=r"takes 1,125,899,906,842,640 bytes, [0-9,]+ are free"):
        SharedBuffer(1 << 50, CPU)


def test_a_directory_without_a_description_is_complete(tmp_path: Path) -> None:
    assert not can_be_loaded(tmp_path / "missing")
    assert can_be_loaded(tmp_path)
    (tmp_path / FILE).write_text("{")
    assert read_shared_weights(tmp_path) is None
    wait_for_file(tmp_path)
