"""Writes docs/benchmarks.md and docs/results.md from saved results: `python -m bench.benchmarks_page`."""

from __future__ import annotations

import re
from typing import Any

from bench import ROOT
from bench.collect import tables as collect
from bench.gateway import tables as gateway
from bench.gateway.charts import draw
from bench.report import newest
from bench.runtimes import tables as runtimes
from bench.training import result_page
from bench.training import tables as training

PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS_PAGE = ROOT / "docs" / "results.md"


def write() -> None:
    if cost := newest("gateway-cost"):
        draw(cost, ROOT / "docs" / "img")
    if result := newest("result"):
        result_page.draw(result, ROOT / "docs" / "img")
    PAGE.write_text(text())
    RESULTS_PAGE.write_text(results_text())


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


def results_text() -> str:
    """The page of the pretrained model that learns; without a result it has the command alone."""
    text = _filled("training", result_page.sections(newest("result")), "results_page.md")
    return re.sub("\n{3,}", "\n\n", text)


def _filled(part: str, sections: dict[str, Any], page: str = "page.md") -> str:
    return (ROOT / "bench" / part / page).read_text().format(**sections)


if __name__ == "__main__":
    write()
