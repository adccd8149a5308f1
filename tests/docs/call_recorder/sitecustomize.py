"""Records calls of listed functions in every Python process that has this folder on its PYTHONPATH.

`RECORD_CALLS` names a folder. Its file `functions.json` lists `module:qualified.name`. Each process appends
a line `monotonic_ns module:qualified.name` per call to the file `PID.txt` there.
"""

from __future__ import annotations

import functools
import importlib.machinery
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(os.environ["RECORD_CALLS"]) if "RECORD_CALLS" in os.environ else None


class RecordingFinder:
    """Wraps the listed functions of a module when the module has been executed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._functions: dict[str, list[str]] = {}
        for name in json.loads((folder / "functions.json").read_text()):
            module, _, qualified = name.partition(":")
            self._functions.setdefault(module, []).append(qualified)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._functions:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                for qualified in self._functions[name]:
                    self._wrap(module, qualified)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _wrap(self, module: ModuleType, qualified: str) -> None:
        *holders, last = qualified.split(".")
        holder: Any = module
        for part in holders:
            holder = getattr(holder, part)
        function = holder.__dict__[last]
        plain = function.__func__ if isinstance(function, (staticmethod, classmethod)) else function
        label = f"{module.__name__}:{qualified}"

        @functools.wraps(plain)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            with (self._folder / f"{os.getpid()}.txt").open("a") as file:
                file.write(f"{time.monotonic_ns()} {label}\n")
            return plain(*args, **kwargs)

        kind = type(function) if isinstance(function, (staticmethod, classmethod)) else (lambda f: f)
        setattr(holder, last, kind(recorded))


if FOLDER is not None:
    sys.meta_path.insert(0, RecordingFinder(FOLDER))
