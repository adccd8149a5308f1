"""The tutorial, followed literally: files are saved and commands run in the order of the page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from support.pages import DOCS
from support.paths import ROOT

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
PAGE = DOCS / "tutorial.md"
STEPS = re.compile(
    r"[Ss]ave (?:it|this) as `(?P<file>[^`]+)`|```python\n(?P<code>.*?)```|^\$ (?P<command>[^\n]+)$",
    re.S | re.M,
)
INSTALL = "make demo"
"""Installs into a checkout, and trains as tests/real/test_demo_learning.py does."""


def steps() -> list[tuple[str, str]]:
    """Files as (name, content) and commands as ("$", command)."""
    found: list[tuple[str, str]] = []
    name = ""
    text = PAGE.read_text()
    for match in STEPS.finditer(re.sub(r"```console\n(.*?)```", r"\1", text, flags=re.S)):
        if match["file"]:
            name = match["file"]
        elif match["code"]:
            assert name, "a block of code without the name of its file"
            found.append((name, match["code"]))
            name = ""
        else:
            found.append(("$", match["command"].strip()))
    return found


def run(folder: Path, command: str) -> str:
    done = subprocess.run(
        command, shell=True, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def open_pages(folder: Path, command: str) -> None:
    """Start `afield ui`, follow the address that it prints, and end it."""
    process = subprocess.Popen(
        f"exec {command} --port 0", shell=True, cwd=folder, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        address = next(found[0] for line in process.stdout if (found := re.search(r"http://\S+", line)))
        base, _, key = address.partition("/?key=")
        request = urllib.request.Request(f"{base}/api/runs", headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            runs = {one["run"]: one for one in json.load(answer)["runs"]}
        assert {"before", "shop", "after"} <= set(runs)
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def test_the_tutorial_trains_and_explains_an_agent(tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "src").symlink_to(ROOT / "src")
    output = ""
    done: list[str] = []
    for name, content in steps():
        if name != "$":
            (tmp_path / name).write_text(content)
        elif content == ".venv/bin/afield ui":
            open_pages(tmp_path, content)
        elif content != INSTALL:
            if "ROLLOUT" in content:
                content = content.replace("ROLLOUT", output.splitlines()[1].split("\t")[2])
            output = run(tmp_path, content)
        done.append(content)
    assert INSTALL in done
    before, after = (
        json.loads((tmp_path / "runs" / name / "summary.json").read_text())["reward"][0]
        for name in ("before", "after")
    )
    assert before < 0.4 < 0.8 < after
    assert (tmp_path / "runs" / "shop" / "rollouts" / "step-0020.tokens").is_file()
    assert (tmp_path / "shop.html").stat().st_size > 100_000
