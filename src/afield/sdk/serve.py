"""`python -m afield.sdk.serve TARGET`: serves an agent on the `/invocations` contract.

TARGET is `path/to/file.py:name` or `package.module:name` and names an App, a function decorated with
`@afield.agent`, or a plain function. Once `/ping` works the port goes to `--ready-fd`. With
`--watch-stdin` the process and all it started end at once when stdin does: its parent is gone.
What cannot be served ends with exit code 2 and a message that says what is missing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import uvicorn

from afield import errors
from afield.errors import UsageError, boundary
from afield.sdk.agent import entry_of
from afield.sdk.app import App, Entrypoints
from afield.sdk.listen import listen
from afield.sdk.parent_watch import end_with_stdin
from afield.sdk.signed_invocations import InvocationKey, in_container, key_for, key_from_descriptor
from afield.types import Failure, FailureKind, Reason


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m afield.sdk.serve")
    made.add_argument("target", help="path/to/file.py:name or package.module:name")
    made.add_argument("--host", default="127.0.0.1")
    made.add_argument("--port", type=int, default=0, help="0 picks a free one")
    made.add_argument("--ready-fd", type=int, help="descriptor that gets the port once /ping works")
    made.add_argument("--key-file", type=Path, help="key that invocations are signed with (mode 0600)")
    made.add_argument("--key-fd", type=int, help="descriptor to read that key from")
    made.add_argument("--unsigned", action="store_true", help="take invocations that nobody signed")
    made.add_argument(
        "--outcome-root",
        type=Path,
        action="append",
        default=[],
        help="directory below which file: outcomes may be written; may be repeated",
    )
    made.add_argument("--watch-stdin", action="store_true", help="end when stdin does")
    return made


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    if options.watch_stdin:
        end_with_stdin()
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("afield").setLevel(logging.INFO)
    try:
        key = _key(options)
        app = load(options.target)
        app.guard(key, options.outcome_root)
        listener = listen(options.host, options.port)
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    port = listener.getsockname()[1]
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=30)  # pyright: ignore[reportArgumentType]
    _Server(config, lambda: _announce(port, options.ready_fd)).run(sockets=[listener])
    return 0


def _key(options: argparse.Namespace) -> InvocationKey | None:
    if options.key_fd is not None:
        return key_from_descriptor(options.key_fd)
    given = os.environ.get("AFIELD_INVOCATION_KEY_FILE")  # noqa: TID251 - agents' images have no config
    file = options.key_file or (Path(given) if given else None)
    return key_for(options.host, file, unsigned=options.unsigned, container=in_container())


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._announce()


def load_object(target: str) -> Any:
    """What a target names, whatever it is."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(f"target {target!r} must be path/to/file.py:name or package.module:name")
    module = _module(place)
    found = getattr(module, name, None)
    if found is None:
        has = sorted(n for n, v in vars(module).items() if not n.startswith("_") and _ours(v, module))
        raise UsageError(f"{place} has no {name!r}; it has: {', '.join(has) or 'nothing to serve'}")
    return found


def load(target: str) -> Entrypoints:
    """The app a target names; a function is put into one."""
    found = load_object(target)
    if isinstance(found, Entrypoints):
        if found.runner is None:
            name = target.rpartition(":")[2]
            raise UsageError(f"{target}: decorate a function with @{name}.rollout_entrypoint; it has none")
        return found
    return App(entry_of(found))


def _ours(value: object, module: ModuleType) -> bool:
    return isinstance(value, Entrypoints) or (
        callable(value) and getattr(value, "__module__", None) == module.__name__
    )


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return _imported(place, lambda: importlib.import_module(place))
    path = Path(place).resolve()
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    # What `python file.py` does, so that the agent's own modules are found.
    sys.path.insert(0, str(path.parent))
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_agent"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    sys.modules[name] = module
    return _imported(place, lambda: (loader.exec_module(module), module)[1])


def _imported(place: str, run: Callable[[], ModuleType]) -> ModuleType:
    failures: list[Failure] = []
    with boundary(FailureKind.TASK, Reason.LAUNCH, failures.append):
        return run()
    failure = failures[0]
    raise UsageError(f"{_own_frames(failure.traceback)}importing {place} raised {failure.message}")


def _own_frames(trace: str) -> str:
    """Where in the agent's code; how we and Python came to import it is of no use to its author."""
    machinery = ("<frozen importlib", str(importlib.__file__), errors.__file__, __file__)
    lines = trace.splitlines(keepends=True)
    frames = (n for n, line in enumerate(lines) if line.startswith('  File "'))
    first = next((n for n in frames if not lines[n][8:].startswith(machinery)), len(lines))
    return "\n" + "".join(lines[first:]) if first < len(lines) else ""


def _announce(port: int, ready_fd: int | None) -> None:
    if ready_fd is None:
        sys.stdout.write(f"{port}\n")
        sys.stdout.flush()
        return
    os.write(ready_fd, f"{port}\n".encode())
    os.close(ready_fd)


if __name__ == "__main__":
    sys.exit(main())
