"""A witness: what weights answer, written beside them, so that an engine can be asked whether it has them.

The trainer writes `witness.json` into the directory it exports: after so many ids of a fixed prompt, the
log-probability of the likeliest next token. It names the files it was made for by some of their bytes;
beside other files it counts for nothing.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import msgspec
from msgspec import Struct

FILE = "witness.json"
SESSION = "(witness)"  # of the questions a gateway asks for it; no session can have such an id
LOOKS, LOOK = 16, 4096  # places in each file, and bytes at each


class WeightProbe(Struct, frozen=True, kw_only=True):
    """`logprobs` has one number for each of `lengths`: of the likeliest id after so many of `prompt_ids`."""

    prompt_ids: tuple[int, ...]
    lengths: tuple[int, ...]
    logprobs: tuple[float, ...]
    files: str = ""

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.logprobs) or not self.lengths:
            raise ValueError(f"a witness has {len(self.logprobs)} numbers for {len(self.lengths)} lengths")
        if not 1 <= min(self.lengths) <= max(self.lengths) <= len(self.prompt_ids):
            raise ValueError(f"a witness of {len(self.prompt_ids)} ids speaks of lengths {self.lengths}")


def write_weight_probe(directory: Path, witness: WeightProbe) -> None:
    """After the weights."""
    told = msgspec.structs.replace(witness, files=_files(directory))
    (directory / FILE).write_bytes(msgspec.json.encode(told))


def read_weight_probe(directory: Path) -> WeightProbe | None:
    """None where there is none, or it was made for other weights than those beside it."""
    try:
        witness = msgspec.json.decode((directory / FILE).read_bytes(), type=WeightProbe)
        return witness if witness.files == _files(directory) else None
    except (OSError, msgspec.MsgspecError):
        return None


def _files(directory: Path) -> str:
    digest = blake2b(digest_size=16)
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for place in range(LOOKS):
                file.seek(place * max(size - LOOK, 0) // (LOOKS - 1))
                digest.update(file.read(LOOK))
    return digest.hexdigest()
