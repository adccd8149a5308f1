"""Speed, memory and safety of `afield ui` in Chromium, on generated runs.

`python bench/ui/run.py --json` ends with one line: first paint and memory on a run of 100,000 rollouts,
opening a rollout of 1,000,000 tokens, what scripts of agents did, errors on the pages of a run of veRL, and
an exported file under file://.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from bench.ui.runs import HOSTILE, write_hostile, write_long, write_many, write_verl  # noqa: E402
from support.chromium import Browser, Page, browser  # noqa: E402
from support.ui import element, serving, show, text  # noqa: E402

REPEATS = 5
MODEL = ROOT / "src" / "afield" / "demo" / "policy"
PAINT = "performance.getEntriesByType('paint').find((e) => e.name === 'first-contentful-paint')?.startTime"


async def first_paint(browser: Browser, url: str) -> dict[str, float]:
    """Seconds from the request to the first paint, and to the run's chart, on a fresh tab."""
    paints, charts = [], []
    for _ in range(REPEATS):
        async with browser.page() as page:
            await page.open(url)
            await page.wait_for(text("Runs"))
            await page.open(url.partition("?")[0] + "#/r/many")
            await page.open("about:blank")
            await page.open(url.partition("?")[0] + "#/r/many")
            await page.wait_for(element(".chart canvas"))
            charts.append(await page.evaluate("performance.now()") / 1000)
            paints.append(await page.wait_for(PAINT) / 1000)
    return {"first_paint_s": statistics.median(paints), "run_page_s": statistics.median(charts)}


async def open_long(page: Page) -> float:
    """Seconds from a click on the rollout to its tokens and messages."""
    link = element("a[href='#/r/long/o/long']")
    await show(page, "#/r/long/rollouts", link)
    began = await page.evaluate("performance.now()")
    await page.evaluate(f"{link}.click()")
    await page.wait_for(f"{element('canvas.strip')} && {element('.tokens span')} && {element('.turn')}")
    return (await page.evaluate("performance.now()") - began) / 1000


async def hostile(page: Page) -> list[str]:
    """What hostile strings achieved on all pages of their run; empty if nothing."""
    errors = len(page.errors)
    for place, ready in (
        ("#/r/hostile", element(".chart canvas")),
        ("#/r/hostile/rollouts", element(".tbody a")),
        ("#/r/hostile/g/hostile-g", element(".card")),
        ("#/r/hostile/excluded", element(".table")),
        ("#/r/hostile/timeline", element(".gantt")),
        ("#/r/hostile/diff?a=hostile-r0&b=hostile-r1", element(".tokens span")),
        *(
            (f"#/r/hostile/o/hostile-r{k}", f"{element('.tokens span')} && {text(f'hostile-r{k}')}")
            for k in range(len(HOSTILE))
        ),
        (f"#/r/hostile/rollouts?q={'%3Cscript%3E'}", element("input[type=search]")),
        ("#/%3Cimg%20src%3Dx%20onerror%3D%22globalThis.hacked%3D1%22%3E", text("Runs")),
    ):
        await show(page, place, ready)
    problems = page.errors[errors:] + page.dialogs
    if await page.evaluate("globalThis.hacked"):
        problems.append("a script of an agent ran")
    problems += [url for url in page.requests if "hacked" in url or "evil" in url]
    inserted = "document.querySelectorAll('main script, main iframe, main img, main base, main style').length"
    if await page.evaluate(inserted):
        problems.append("HTML of an agent became elements")
    return problems


async def other_trainer(page: Page) -> list[str]:
    """Errors on the pages of a run that veRL's manager wrote; empty if there are none."""
    errors = len(page.errors)
    for place, ready in (
        ("#/r/verl", f"{element('.chart canvas')} && {text('Validation')}"),
        ("#/r/verl/rollouts", element(".tbody a")),
        ("#/r/verl/o/s1g0-1", element(".tokens span")),
        ("#/r/verl/g/s1g0", element(".card")),
        ("#/r/verl/excluded", element(".table")),
        ("#/r/verl/timeline", element(".gantt")),
        ("#/r/verl/diff?a=s1g0-0&b=s1g0-1", element(".tokens span")),
        ("#/compare?runs=verl,many", f"{element('.chart canvas')} && {text('Tasks of both runs')}"),
    ):
        await show(page, place, ready)
        if await page.evaluate(text("NaN")):
            page.errors.append(f"{place} shows NaN")
    return page.errors[errors:]


async def exported(browser: Browser, runs: Path, file: Path) -> dict[str, Any]:
    """An exported file, opened without a server."""
    command = [
        sys.executable,
        "-m",
        "afield",
        "ui",
        str(runs / "small"),
        str(runs / "hostile"),
        "--export",
        str(file),
        "--json",
    ]
    done = await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True, text=True)
    async with browser.page() as page:
        await page.open(file.as_uri())
        await page.wait_for(text("small"))
        await show(page, "#/r/small", element(".chart canvas"))
        await show(page, "#/r/small/rollouts", element(".tbody a"))
        await show(page, "#/r/small/o/s1-g0-r1?color=fate", element(".tokens span"))
        await show(page, "#/r/small/g/s1-g0", element(".card"))
        await show(page, "#/r/small/diff?a=s1-g0-r0&b=s1-g0-r1", element(".tokens span"))
        await show(page, "#/r/small/timeline", element(".gantt"))
        problems = await hostile(page)
        outside = [url for url in page.requests if not url.startswith(("file:", "data:"))]
        return {"export": json.loads(done.stdout), "export_problems": problems + outside + page.errors}


async def measure(runs: Path) -> dict[str, Any]:
    result: dict[str, Any] = {}
    async with browser() as chromium:
        async with serving(runs) as url:
            result |= await first_paint(chromium, url)
            async with chromium.page() as page:
                await page.open(url)
                await page.wait_for(text("Runs"))
                await show(page, "#/r/many/rollouts", element(".tbody a"))
                result["table_mb"] = round(chromium.renderer_mb(), 1)
                began = time.monotonic()
                await show(page, "#/r/many/rollouts?sort=-seconds&kind=failed&q=r5", text("rollouts ·"))
                result["filter_s"] = round(time.monotonic() - began, 3)
            opened = []
            for _ in range(REPEATS):
                async with chromium.page() as page:
                    await page.open(url)
                    await page.wait_for(text("Runs"))
                    opened.append(await open_long(page))
                    result["tokens_mb"] = round(chromium.renderer_mb(), 1)
            result |= {
                "open_long_first_s": round(opened[0], 3),
                "open_long_s": round(statistics.median(opened), 3),
            }
            async with chromium.page() as page:
                await page.open(url)
                await page.wait_for(text("Runs"))
                result["hostile_problems"] = await hostile(page)
                result["verl_problems"] = await other_trainer(page)
        result |= await exported(chromium, runs, runs / "export.html")
    result["tab_mb"] = max(result["table_mb"], result["tokens_mb"])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print only the last line")
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="afield-ui-") as folder:
        runs = Path(folder)
        write_many(runs / "many", args.rollouts, model=str(MODEL))
        write_many(runs / "small", 64, steps=4, model=str(MODEL))
        write_long(runs / "long", args.tokens, model=str(MODEL))
        write_hostile(runs / "hostile", model=str(MODEL))
        write_verl(runs / "verl", model=str(MODEL))
        result = {"rollouts": args.rollouts, "tokens": args.tokens, **asyncio.run(measure(runs))}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
