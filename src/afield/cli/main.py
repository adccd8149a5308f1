"""`afield COMMAND`: parse, dispatch, and turn errors into a message and an exit code.

0 done, 1 something failed, 2 bad input, 130 stopped by Ctrl-C, 143 by SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from afield import __version__
from afield.cli import acr, certify, conformance, demo, export, gateway, sessions, show, train
from afield.errors import AfieldError, UsageError, first_cause


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="afield",
        description="Rollouts from any agent, anywhere. Train the agent you have, where it already runs.",
    )
    top.add_argument("--version", action="version", version=f"afield {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (demo, train, gateway, show, export, sessions, acr, conformance, certify):
        module.add(commands)
    return top


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return args.run(args)
    except BaseExceptionGroup as errors:
        cause = first_cause(errors)
        if isinstance(cause, AfieldError):
            return complain(cause)
        raise
    except AfieldError as error:
        return complain(error)
    except KeyboardInterrupt:
        return 130
    except asyncio.CancelledError:
        return 143
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; say nothing more
        return 141


def complain(error: AfieldError) -> int:
    print(f"afield: {error}", file=sys.stderr)
    return 2 if isinstance(error, UsageError) else 1
