"""Writes docs/benchmarks.md from saved results: `python -m bench.benchmarks_page`."""

from __future__ import annotations

from typing import Any

from bench import ROOT
from bench.collect import tables as collect
from bench.gateway import tables as gateway
from bench.gateway.charts import draw
from bench.report import newest
from bench.runtimes import tables as runtimes
from bench.training import tables as training

PAGE = ROOT / "docs" / "benchmarks.md"


def write() -> None:
    if cost := newest("gateway-cost"):
        draw(cost, ROOT / "docs" / "img")
    PAGE.write_text(text())


def text() -> str:
    """The page: each part's template (`bench/PART/page.md`) with the tables of its newest results."""
    return (
        _filled("gateway", gateway.sections(newest("gateway-cost")))
        + _filled("collect", collect.sections(newest("collect")))
        + _filled("runtimes", runtimes.sections(newest("runtimes"), newest("crowd")))
        + _filled(
            "training",
            training.sections(*map(newest, ("trainers", "tree", "engine", "publish", "smollm"))),
        )
    )


def _filled(part: str, sections: dict[str, Any]) -> str:
    return (ROOT / "bench" / part / "page.md").read_text().format(**sections)


if __name__ == "__main__":
    write()
