"""Weight probe: expected log-probabilities that show whether an engine has new weights.

The trainer writes `weight_probe.json` into the directory of exported weights: for prefixes of a fixed prompt,
the log-probability of the likeliest next token. A digest of parts of the weight files binds them together.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import msgspec
from msgspec import Struct

FILE = "weight_probe.json"
SESSION = "(weight probe)"
"""Session id of the gateway's probe calls; the parentheses keep it distinct from real session ids."""
LOOKS, LOOK = 16, 4096  # number of samples per file, and bytes per sample


class WeightProbe(Struct, frozen=True, kw_only=True):
    """Expected log-probabilities of one set of weights."""

    prompt_ids: tuple[int, ...]
    """Token ids of the fixed prompt."""
    lengths: tuple[int, ...]
    """Lengths of the prefixes of `prompt_ids`."""
    logprobs: tuple[float, ...]
    """For each prefix, the log-probability of the likeliest next token."""
    files: str = ""
    """Digest of parts of the weight files."""

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.logprobs) or not self.lengths:
            raise ValueError(
                f"weight probe has {len(self.logprobs)} log-probabilities for {len(self.lengths)} lengths"
            )
        if not 1 <= min(self.lengths) <= max(self.lengths) <= len(self.prompt_ids):
            raise ValueError(
                f"weight probe lengths {self.lengths} must be from 1 to its {len(self.prompt_ids)} token ids"
            )


def write_weight_probe(directory: Path, probe: WeightProbe) -> None:
    """Write the probe; the weights must be written before."""
    probe = msgspec.structs.replace(probe, files=_files(directory))
    (directory / FILE).write_bytes(msgspec.json.encode(probe))


def read_weight_probe(directory: Path) -> WeightProbe | None:
    """Read the probe; None if it is missing or belongs to other weights."""
    try:
        probe = msgspec.json.decode((directory / FILE).read_bytes(), type=WeightProbe)
        return probe if probe.files == _files(directory) else None
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
