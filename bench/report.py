"""Benchmark reports: results as JSON with their commit, Markdown tables and plots."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import ROOT

RESULTS = ROOT / "bench" / "results"
WRITTEN_BY_RUNS = (":!bench/results", ":!docs/benchmarks.md", ":!docs/img")
COLOURS = {"blue": "#2563eb", "orange": "#d97706", "purple": "#9333ea", "grey": "#6b7280"}


def commit() -> str:
    """Short hash of HEAD, with `-dirty` when tracked files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *WRITTEN_BY_RUNS)
    return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")


def machine() -> dict[str, Any]:
    return {"cores": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine()}


def save(name: str, result: dict[str, Any], started_at: str) -> Path:
    """Write `bench/results/NAME-COMMIT.json`.

    `started_at` is the commit at the start of the run; a commit made during the run marks the result dirty.
    """
    tree = started_at if commit() == started_at else f"{started_at.removesuffix('-dirty')}-dirty"
    ended = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{tree}.json"
    head = {"commit": tree, "ended": ended, "machine": machine()}
    path.write_text(json.dumps(head | result, indent=1) + "\n")
    return path


def newest(name: str) -> dict[str, Any] | None:
    """The result of this name with the latest `ended`; None if there is none."""
    pattern = re.compile(rf"{name}-[0-9a-f]+(-dirty)?")
    paths = [path for path in sorted(RESULTS.glob("*.json")) if pattern.fullmatch(path.stem)]
    results = [json.loads(path.read_text()) for path in paths]
    return max(results, key=lambda result: result.get("ended", ""), default=None)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("".join(f"| {cell} " if cell != "" else "| " for cell in line) + "|" for line in lines)


def verdict(ok: bool) -> str:
    return "met" if ok else "**missed**"


def figure(rows: int = 1, size: tuple[float, float] = (8, 4.5), *, share_x: bool = True) -> tuple[Any, Any]:
    """A matplotlib figure and its axes, without a display."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "afield"  # equal numbers give an equal file
    from matplotlib import pyplot

    return pyplot.subplots(rows, 1, sharex=share_x, figsize=size, dpi=110)


def save_figure(drawing: Any, path: Path) -> None:
    """Write a figure as PNG or SVG, without a date, and free it."""
    from matplotlib import pyplot

    for axes in drawing.axes:
        axes.spines[["top", "right"]].set_visible(False)
    drawing.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(drawing)
