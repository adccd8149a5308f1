"""The tutorial, followed literally: files are saved and commands run in the order of the page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from afield.utils.columns import unpack
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

        def get(path: str) -> bytes:
            headers = {"Authorization": f"Bearer {key}"}
            with urllib.request.urlopen(
                urllib.request.Request(f"{base}/api/runs{path}", headers=headers), timeout=60
            ) as answer:
                return answer.read()

        assert {"before", "shop", "after"} <= {one["run"] for one in json.loads(get(""))["runs"]}
        shop = json.loads(get("/shop"))
        assert [line["step"] for line in shop["metrics"]] == list(range(1, 21))
        assert shop["exactness"]["logprob_diff_max"]["all"] < 1e-3
        rollouts = json.loads(get("/shop/rollouts?limit=5000"))["rollouts"]
        assert len(rollouts) == 20 * 8 * 16
        lowest = next(row for row in rollouts if row["reward"] == 0)
        page = json.loads(get(f"/shop/rollouts/{lowest['id']}"))
        assert (page["reward"], page["recorded"]) == (0.0, True) and page["turns"]
        header, columns = unpack(get(f"/shop/tokens/{lowest['id']}"))
        assert header["total"] == page["tokens"] == len(columns["logprob"]) and "entropy" in columns
        group = json.loads(get(f"/shop/groups/{lowest['group_id']}"))
        assert len(group["attempts"]) == 16
        assert any(0 < one["shared"] < one["tokens"] for one in group["attempts"])
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def check_output(command: str, output: str) -> None:
    """What the page says about wrong answers."""
    if command.endswith("--limit 5"):
        header, *rows = (line.split("\t") for line in output.splitlines())
        assert [float(row[header.index("reward")]) for row in rows] == [0.0] * 5
    elif " show before " in command:  # with a rollout: the list is above
        assert "\nreward   0.0" in output and "    calls get_" in output and "[tool]" in output
    elif command.endswith("why before"):
        assert "nothing found; checked:" in output
        for stage in ("infrastructure", "generation", "logprobs", "advantage", "reward"):
            assert stage in output


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
                assert done[-1].endswith("--limit 5")
                content = content.replace("ROLLOUT", output.splitlines()[1].split("\t")[2])
            output = run(tmp_path, content)
            check_output(content, output)
        done.append(content)
    assert INSTALL in done
    before, after = (
        json.loads((tmp_path / "runs" / name / "summary.json").read_text())["reward"][0]
        for name in ("before", "after")
    )
    assert before < 0.4 < 0.8 < after
    assert (tmp_path / "runs" / "shop" / "rollouts" / "step-0020.tokens").is_file()
    assert (tmp_path / "shop.html").stat().st_size > 100_000
