"""What reading alone can tell is wrong with a model's directory, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from afield.errors import UsageError
from afield.settings import TrainConfig
from afield.training_run import RunRole

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def check(config: TrainConfig, part: str) -> None:
    learns = part != RunRole.COLLECT
    model = Path(config.model)
    if not config.gateway:
        check_engine(config.engine, model)
    if learns:
        check_config(model)
    if learns and not config.freeze_weights:
        check_weights(model, pickled=True)


def check_engine(spec: str, model: Path) -> None:
    """What the embedded engine will read; a server has a model of its own."""
    if spec.partition("=")[0] == "torch":
        check_config(model)
        check_weights(model)


def check_config(model: Path) -> None:
    if not model.is_dir():
        raise UsageError(f"{model} is not a directory; give the path of a model directory")
    path = model / "config.json"
    if not path.is_file():
        raise UsageError(f"{model} is not a whole model directory: it has no config.json")
    try:
        json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}; save the model there again") from error


def check_weights(model: Path, *, pickled: bool = False) -> None:
    """Whether all files are there and none was cut off. `pickled`: weights of the older kind will do."""
    if (model / ONE_FILE).is_file():
        files = [ONE_FILE]
    elif (model / INDEX).is_file():
        files = _parts(model / INDEX)
    elif pickled and any((model / name).is_file() for name in PICKLED):
        return
    else:
        raise UsageError(f"{model} has no weights: no {ONE_FILE}, and no {INDEX}; save the whole model there")
    for name in files:
        if not (model / name).is_file():
            raise UsageError(f"{model} lacks {name}, which its {INDEX} names; save or download it again")
        if not _whole(model / name):
            raise UsageError(f"{model / name} is cut off, or no such file at all; save or download it again")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _parts(index: Path) -> list[str]:
    try:
        return sorted(set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()))
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{index} cannot be read: {error}; save the model there again") from error


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int] = (0, 0)


def _whole(path: Path) -> bool:
    """A safetensors file says in its first bytes how long it is."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            return False
        try:
            header = msgspec.json.decode(file.read(length), type=dict[str, _Tensor])
        except msgspec.MsgspecError:
            return False
    return 8 + length + max((one.data_offsets[1] for one in header.values()), default=0) == size
