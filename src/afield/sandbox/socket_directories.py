"""Short-lived directories for sockets. Their names say whose they are; those of processes that are gone are
removed by the next one that makes its own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from afield.sandbox.cgroups import born

PREFIX = "afield-cells-"


def fresh() -> Path:
    """A new one, for us alone."""
    top = Path(tempfile.gettempdir())
    for left in top.glob(f"{PREFIX}*"):
        pid, _, rest = left.name.removeprefix(PREFIX).partition("-")
        if pid.isdigit() and born(int(pid)) != rest.partition("-")[0]:
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-{born(os.getpid())}-"))
