"""`afield` entry point: argument parser, dispatch, exit codes.

Exit codes: 0 success, 1 failure, 2 invalid input, 130 Ctrl-C, 141 closed output pipe, 143 SIGTERM
(servers exit with 0).
"""

from __future__ import annotations

import argparse
import asyncio
import io
import sys

from afield import __version__
from afield.cli import (
    agentcore_local,
    cleanup,
    compare,
    conformance,
    demo,
    doctor,
    evaluate,
    export,
    gateway,
    inspect_template,
    kill,
    logs,
    plan,
    ps,
    relay,
    runs,
    show,
    tail,
    tasks,
    train,
    ui,
    why,
)
from afield.cli.flags import CommandParser
from afield.errors import AfieldError, UsageError, root_cause
from afield.utils.malloc import share_arena


def parser() -> argparse.ArgumentParser:
    top = CommandParser(
        prog="afield",
        description="Rollouts from any agent, anywhere. Train the agent you have, where it already runs.",
    )
    top.add_argument("--version", action="version", version=f"afield {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (
        demo,
        doctor,
        plan,
        evaluate,
        train,
        gateway,
        relay,
        runs,
        show,
        why,
        ui,
        tail,
        compare,
        tasks,
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
    replace_unknown_characters()
    share_arena()
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


def replace_unknown_characters() -> None:
    """Print another character where the output's encoding lacks one, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def print_error(error: AfieldError) -> int:
    """Print an error; returns the exit code."""
    print(f"afield: {error}", file=sys.stderr)
    return 2 if isinstance(error, UsageError) else 1
