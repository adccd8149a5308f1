"""`afield ui` as a process, and its pages in Chromium."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import unquote

from support.chromium import Page

START_S = 60.0


@asynccontextmanager
async def serving(runs: Path, *arguments: str, **environment: str) -> AsyncIterator[str]:
    """Serve the runs below a directory; yields the address with its key."""
    command = (sys.executable, "-m", "afield", "ui", *arguments, "--port", "0", "--json")
    variables = {**os.environ, "AFIELD_RUNS": str(runs), **environment}
    process = await asyncio.create_subprocess_exec(*command, env=variables, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), START_S)
        yield json.loads(line)["url"]
    finally:
        process.terminate()
        await process.wait()


async def show(page: Page, place: str, ready: str) -> None:
    """Go to a page by its fragment, and wait until an expression is true."""
    await page.evaluate(f"location.hash = {json.dumps(place)}")
    parts = [unquote(part) for part in place.partition("?")[0].strip("#/").split("/")]
    title = " · ".join([*parts[1:], "afield"])  # set once the page has changed
    await page.wait_for(f"document.title === {json.dumps(title)} && {ready}")


def text(words: str) -> str:
    """Expression: the page shows these words."""
    return f"document.body.innerText.includes({json.dumps(words)})"


def element(selector: str) -> str:
    """Expression: the page has such an element."""
    return f"document.querySelector({json.dumps(selector)})"
