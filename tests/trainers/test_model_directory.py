"""Model directories are replaced as a whole, and a failed write names its cause."""

import errno
import os
from pathlib import Path

import pytest

from afield.errors import Unavailable
from afield.trainers.model_directory import replaced


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "is there room on the disk"),
        (errno.ENOTEMPTY, "another process wrote it at the same time"),
        (errno.EACCES, "check the path and its permissions"),
    ],
)
def test_a_failed_write_keeps_the_old_directory_and_says_what_to_do(
    tmp_path: Path, code: int, remedy: str
) -> None:
    target = tmp_path / "weights"
    target.mkdir()
    (target / "old").touch()
    message = f"cannot be written: .*{os.strerror(code)}.*{remedy}"
    with pytest.raises(Unavailable, match=message), replaced(target) as fresh:
        (fresh / "new").touch()
        raise OSError(code, os.strerror(code))
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    assert [path.name for path in target.iterdir()] == ["old"]
