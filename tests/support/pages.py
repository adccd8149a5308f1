"""Reads README and docs for tests: pages, code blocks, sections and tables."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from support.paths import ROOT

SOURCE = ROOT / "src" / "afield"
DOCS = ROOT / "docs"
README = ROOT / "README.md"
GUIDES = [README, ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md"]
PAGES = [*GUIDES, *sorted(DOCS.rglob("*.md"))]


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """Code blocks of a language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


def shell_commands(page: Path) -> list[list[str]]:
    """Words of the commands in shell blocks and console lines, without the variables set before them."""
    typed = [re.findall(r"^\$ (.*)$", _joined(block), re.M) for block in blocks(page, "console")]
    scripts = [_joined(block) for language in ("bash", "sh") for block in blocks(page, language)]
    commands: list[list[str]] = []
    for line in [*(line for lines in typed for line in lines), *scripts]:
        words = shlex.shlex(line, posix=True, punctuation_chars=";|&\n")
        words.whitespace, words.whitespace_split = " \t", True
        commands.append([])
        for word in words:
            if not set(word) - set(";|&\n"):
                commands.append([])
            elif commands[-1] or not re.match(r"\w+=", word):
                commands[-1].append(word)
    return [words for words in commands if words]


def _joined(block: str) -> str:
    """Text of a block with each continued line in one."""
    return re.sub(r"\\\n *", "", block)


def section(page: Path, heading: str) -> str:
    """Text under a heading, up to the next heading."""
    _, heading_line, rest = page.read_text().partition(f"# {heading}\n")
    assert heading_line, f"{page.name} has no heading {heading!r}"
    return re.split(r"^#+ ", rest, maxsplit=1, flags=re.M)[0]


def table(page: Path, heading: str) -> list[list[str]]:
    """Cells of all tables under a heading, without their header rows."""
    rows: list[list[str]] = []
    for text in re.findall(r"(?:^\|.*\|\n)+", section(page, heading), re.M):
        rows += [[cell.strip() for cell in row.strip("|").split(" | ")] for row in text.splitlines()[2:]]
    assert rows, f"{page.name} has no table under {heading!r}"
    return rows


def names(page: Path, heading: str, column: int = 0) -> list[str]:
    """Words in backticks in a column of the tables under a heading."""
    return [name for row in table(page, heading) for name in re.findall(r"`([^`]+)`", row[column])]
