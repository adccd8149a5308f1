"""`afield` entry point: argument parser, dispatch, exit codes.

Exit codes: 0 success, 1 failure, 2 invalid input, 130 Ctrl-C, 141 closed output pipe, 143 SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from afield import __version__
from afield.cli import (
    agentcore_local,
    cleanup,
    conformance,
    demo,
    export,
    gateway,
    inspect_template,
    kill,
    logs,
    ps,
    relay,
    show,
    train,
)
from afield.cli.flags import CommandParser
from afield.errors import AfieldError, UsageError, root_cause


def parser() -> argparse.ArgumentParser:
    top = CommandParser(
        prog="afield",
        description="Rollouts from any agent, anywhere. Train the agent you have, where it already runs.",
    )
    top.add_argument("--version", action="version", version=f"afield {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (
        demo,
        train,
        gateway,
        relay,
        show,
        export,
        ps,
        logs,
        kill,
        cleanup,
        agentcore_local,
        conformance,
        inspect_template,
    ):
        module.add(commands)
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return top


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if not words:
        parser().print_help(sys.stderr)
        return 2
    args, extra = parser().parse_known_args(words)
    if extra:
        args.parser.refuse(extra)
    try:
        return args.run(args)
    except BaseExceptionGroup as errors:
        cause = root_cause(errors)
        if isinstance(cause, AfieldError):
            return print_error(cause)
        raise
    except AfieldError as error:
        return print_error(error)
    except KeyboardInterrupt:
        return 130
    except asyncio.CancelledError:
        return 143
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the output is gone; suppress further errors
        return 141


def print_error(error: AfieldError) -> int:
    """Print an error; returns the exit code."""
    print(f"afield: {error}", file=sys.stderr)
    return 2 if isinstance(error, UsageError) else 1
