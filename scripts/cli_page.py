"""Writes docs/reference/cli.md from the argument parsers: `.venv/bin/python scripts/cli_page.py`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from afield.cli.main import parser
from afield.sdk import serve

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "cli.md"
HEAD = """\
# Command line

This page lists every command and option.
`scripts/cli_page.py` writes this page from the parsers.

`afield --help` lists the commands, and `afield COMMAND --help` the options of one.
"""


def page() -> str:
    """Returns the whole page."""
    commands = next(a.choices for a in parser()._actions if isinstance(a.choices, dict))
    texts = {
        action.dest: action.help for a in parser()._actions for action in getattr(a, "_choices_actions", [])
    }
    sections = [
        section(name, command, texts.get(name)) for name, command in commands.items() if name in texts
    ]
    return HEAD + "".join(line for lines in sections for line in lines) + "".join(_serve())


def _serve() -> Iterator[str]:
    yield from section("python -m afield.sdk.serve", serve.parser(), None)


def section(name: str, command: argparse.ArgumentParser, summary: str | None) -> Iterator[str]:
    """Yields the section of one command: its purpose and a table of its options."""
    purpose = " ".join((command.description or summary or "").split())
    yield f"\n## {name}\n\n{purpose}\n\n| argument | default | meaning |\n| --- | --- | --- |\n"
    for action in command._actions:
        if action.help != argparse.SUPPRESS and action.dest != "help":
            yield f"| {_name(action)} | {_default(action)} | {_cell(action.help or '')} |\n"


def _name(action: argparse.Action) -> str:
    value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if action.choices:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if not action.option_strings:
        return f"`{value if action.metavar or action.choices else action.dest}`"
    takes = "" if action.nargs == 0 else f" [{value}]" if action.nargs == "?" else f" {value}"
    return ", ".join(f"`{_cell(option + takes)}`" for option in action.option_strings)


def _default(action: argparse.Action) -> str:
    if action.required:
        return "required"
    if action.default in (None, False, argparse.SUPPRESS, "") or action.default == []:
        return ""
    return f"`{_cell(str(action.default))}`"


def _cell(text: str) -> str:
    return " ".join(text.replace("%%", "%").split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
