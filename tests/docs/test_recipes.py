"""Recipes of CONTRIBUTING.md work: each is followed literally on a copy of the sources."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

RECIPES = (ROOT / "CONTRIBUTING.md").read_text().partition("## Recipes\n")[2]
SECTIONS = dict(re.findall(r"^### ([^\n]+)\n(.*?)(?=^### |\Z)", RECIPES, re.S | re.M))
SUBJECTS = {
    "a dialect",
    "a tool-call format",
    "a runtime",
    "an engine",
    "a transport",
    "a loss",
    "an advantage estimator",
    "a setting",
    "a metric",
    "a docs page",
}
CREATE = r"^Create `(?P<file>[^`]+)`:\n\n```\w+\n(?P<new>.*?)```"
INSERT = (
    r"^In `(?P<at>[^`]+)`, (?P<where>after|before) the line `(?P<line>[^\n]+)`:\n\n```\w+\n(?P<block>.*?)```"
)
REPLACE = r"^In `(?P<within>[^`]+)`, replace `(?P<old>[^`]+)` by `(?P<by>[^`]+)`\."
CHECK = r"^Check:\n\n```python\n(?P<check>.*?)```"


def test_every_subject_has_a_recipe() -> None:
    assert {title.removeprefix("Add ") for title in SECTIONS} == SUBJECTS


def insert(path: Path, line: str, block: str, where: str) -> None:
    """Inserts a block before or after the only line with this text, blanks at its ends aside."""
    lines = path.read_text().splitlines(keepends=True)
    matches = [number for number, text in enumerate(lines) if text.strip() == line]
    assert len(matches) == 1, f"{path.name} has {len(matches)} lines {line!r}"
    lines.insert(matches[0] + (where == "after"), block)
    path.write_text("".join(lines))


def apply(step: re.Match[str], folder: Path) -> str:
    """Applies one step of a recipe; returns the code of its check, if it is one."""
    if step["file"]:
        (folder / step["file"]).write_text(step["new"])
    elif step["at"]:
        insert(folder / step["at"], step["line"], step["block"], step["where"])
    elif step["within"]:
        path = folder / step["within"]
        assert path.read_text().count(step["old"]) == 1, step["old"]
        path.write_text(path.read_text().replace(step["old"], step["by"]))
    return step["check"] or ""


@pytest.mark.parametrize("title", SECTIONS)
def test_recipe_works_when_followed_literally(title: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src")
    if "mkdocs.yml" in SECTIONS[title]:
        shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("img"))
        shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
        shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    steps = re.finditer("|".join((CREATE, INSERT, REPLACE, CHECK)), SECTIONS[title], re.S | re.M)
    checks = [check for step in steps if (check := apply(step, tmp_path))]
    assert len(checks) == 1
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "src")}
    done = subprocess.run(
        [sys.executable, "-c", checks[0]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
