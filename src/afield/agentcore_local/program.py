"""Runs a session's program: `python -m afield.agentcore_local.program`.

1. `--script FILE` runs a file like `python FILE`. Its uvicorn serves the socket passed as `--listener`
instead of port 8080, since many programs run on one machine.
2. `--target` serves a function with afield's SDK.
3. `--command` runs any command, which finds its port in PORT.

The program ends when its standard input closes.
"""

from __future__ import annotations

import argparse
import os
import runpy
import socket
import sys
from pathlib import Path

from afield.sdk.parent_watch import end_with_stdin


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m afield.agentcore_local.program")
    parser.add_argument("--listener", type=int)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--script")
    kind.add_argument("--target")
    kind.add_argument("--command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    end_with_stdin()
    if options.command:
        os.execvp(options.command[0], options.command)
    import uvicorn

    from afield.sdk.serve import load

    listener = socket.socket(fileno=options.listener)
    serve_on(listener)
    if options.target:
        uvicorn.run(load(options.target), log_level="warning", access_log=False)  # pyright: ignore[reportArgumentType]
        return
    sys.argv = [options.script]
    sys.path[0] = str(Path(options.script).parent)
    runpy.run_path(options.script, run_name="__main__")


def serve_on(listener: socket.socket) -> None:
    """Make all uvicorn servers of this process serve `listener` instead of the port they ask for."""
    import uvicorn

    plain = uvicorn.Server.startup

    async def startup(self: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        await plain(self, sockets=[listener])

    uvicorn.Server.startup = startup  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    main()
