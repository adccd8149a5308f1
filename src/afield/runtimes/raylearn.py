"""What sessions import late, and the warm parent may as well import once: libraries load much at first use.

Only modules of installed libraries and of Python itself are learned; the agent's own stay each session's.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import sysconfig
import threading
from collections.abc import Iterable
from pathlib import Path

from afield.errors import boundary
from afield.types import FailureKind, Reason

LIBRARIES = tuple({str(Path(sysconfig.get_path(kind))) for kind in ("stdlib", "purelib", "platlib")})


def imported_since(known: set[str]) -> list[str]:
    """Library modules that were not known, in the order in which they came."""
    return [name for name in list(sys.modules) if name not in known and _of_library(name)]


def learn(names: Iterable[str]) -> bool:
    """Import them here; whether there may be more. One that cannot be imported here is left to the sessions.

    A module that starts a thread is the last one: forks do not take threads along.
    """
    threads = threading.active_count()
    for name in names:
        # Whatever it raises, a session that needs it will tell.
        with contextlib.suppress(SystemExit), boundary(FailureKind.TASK, Reason.LAUNCH, lambda _: None):
            importlib.import_module(name)
        if threading.active_count() > threads:
            sys.stderr.write(
                f"{name} started a thread when it was imported; nothing more is imported early\n"
            )
            return False
    gc.freeze()
    return True


def _of_library(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    origin = getattr(spec, "origin", None)
    return spec is not None and spec.name == name and isinstance(origin, str) and origin.startswith(LIBRARIES)
