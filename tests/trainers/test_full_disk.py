"""Weights on a full disk."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from afield.errors import Unavailable
from afield.trainers.grpo import GRPO
from support.gateways import POLICY


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Limit the size of files of this process, which acts like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_weights_that_do_not_fit_are_refused_and_leave_no_file(tmp_path: Path) -> None:
    trainer = GRPO(POLICY, lr=1e-3)
    for path, write in ((tmp_path / "saved", trainer.save), (tmp_path / "weights", trainer.export)):
        with file_size_limit(100_000), pytest.raises(Unavailable, match=f"{path} cannot be written"):
            write(path)
        assert not list(tmp_path.iterdir())
