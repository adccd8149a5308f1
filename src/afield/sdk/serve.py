"""`python -m afield.sdk.serve TARGET`: serves an agent over HTTP.

TARGET is `path/to/file.py:name` or `package.module:name` of an App, a function decorated with
`@afield.agent`, or a plain function. The port is written to `--ready-fd` once `/ping` responds. With
`--watch-stdin` the process and its children end when stdin closes. A target that cannot be served exits with
2 and the reason.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from afield import errors
from afield.errors import UsageError, boundary
from afield.sdk.agent import entry_of
from afield.sdk.app import App, Entrypoints
from afield.sdk.listen import listen
from afield.sdk.parent_watch import end_with_stdin
from afield.sdk.signed_invocations import InvocationKey, in_container, key_for, key_from_descriptor
from afield.types import Failure, FailureKind, Reason
from afield.utils.asgi_server import AsgiServer, server_config


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="python -m afield.sdk.serve")
    arguments.add_argument("target", help="path/to/file.py:name or package.module:name")
    arguments.add_argument("--host", default="127.0.0.1", help="address to listen on")
    arguments.add_argument("--port", type=int, default=0, help="port; 0 picks a free one")
    arguments.add_argument("--ready-fd", type=int, help="file descriptor to write the port to when ready")
    arguments.add_argument(
        "--key-file", type=Path, help="file with the key of signed invocations (mode 0600)"
    )
    arguments.add_argument("--key-fd", type=int, help="file descriptor to read that key from")
    arguments.add_argument("--unsigned", action="store_true", help="accept unsigned invocations")
    arguments.add_argument(
        "--outcome-root",
        type=Path,
        action="append",
        default=[],
        help="directory that file: outcomes may be written below; may be repeated",
    )
    arguments.add_argument("--watch-stdin", action="store_true", help="exit when stdin closes")
    return arguments


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    if options.watch_stdin:
        end_with_stdin()
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("afield").setLevel(logging.INFO)
    try:
        key = _key(options)
        app = load(options.target)
        app.restrict(key, options.outcome_root)
        listener = listen(options.host, options.port)
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    port = listener.getsockname()[1]
    config = server_config(app, timeout_keep_alive=30)
    AsgiServer(config, on_start=lambda: _announce(port, options.ready_fd)).run(sockets=[listener])
    return 0


def _key(options: argparse.Namespace) -> InvocationKey | None:
    if options.key_fd is not None:
        return key_from_descriptor(options.key_fd)
    key_file = os.environ.get("AFIELD_INVOCATION_KEY_FILE")  # noqa: TID251 - agents' images have no config
    file = options.key_file or (Path(key_file) if key_file else None)
    return key_for(options.host, file, unsigned=options.unsigned, container=in_container())


def load_object(target: str) -> Any:
    """The object that a target names."""
    source, colon, name = target.rpartition(":")
    if not colon or not source or not name:
        raise UsageError(f"target {target!r} must be path/to/file.py:name or package.module:name")
    module = _module(source)
    value = getattr(module, name, None)
    if value is None:
        names = sorted(
            n for n, v in vars(module).items() if not n.startswith("_") and _is_servable(v, module)
        )
        raise UsageError(f"{source} has no {name!r}; it has: {', '.join(names) or 'nothing to serve'}")
    return value


def load(target: str) -> Entrypoints:
    """The app that a target names; a function gets an app of its own."""
    value = load_object(target)
    if isinstance(value, Entrypoints):
        if value.runner is None:
            name = target.rpartition(":")[2]
            raise UsageError(f"{target} has no agent; decorate a function with @{name}.rollout_entrypoint")
        return value
    return App(entry_of(value))


def _is_servable(value: object, module: ModuleType) -> bool:
    return isinstance(value, Entrypoints) or (
        callable(value) and getattr(value, "__module__", None) == module.__name__
    )


def _module(source: str) -> ModuleType:
    if not source.endswith(".py"):
        return _imported(source, lambda: importlib.import_module(source))
    path = Path(source).resolve()
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    # As `python file.py` does, so that the agent can import modules beside it.
    sys.path.insert(0, str(path.parent))
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_agent"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    sys.modules[name] = module
    return _imported(source, lambda: (loader.exec_module(module), module)[1])


def _imported(source: str, run: Callable[[], ModuleType]) -> ModuleType:
    failures: list[Failure] = []
    with boundary(FailureKind.TASK, Reason.LAUNCH, failures.append):
        return run()
    failure = failures[0]
    raise UsageError(f"{_own_frames(failure.traceback)}importing {source} raised {failure.message}")


def _own_frames(trace: str) -> str:
    """Frames of the agent's code, without those of Python's and afield's import."""
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
