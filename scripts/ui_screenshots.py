"""Writes docs/img/ui from two runs of `afield demo`: `.venv/bin/python scripts/ui_screenshots.py [NAME ...]`.

It needs Chromium: `apt-get install chromium-headless-shell`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from afield.engines.scripted import ScriptedEngine, ScriptedReply  # noqa: E402
from afield.orchestrator.state import RunDirectory  # noqa: E402
from support.chromium import Page, browser  # noqa: E402
from support.gateways import ADMIN, Running, running, vocabulary  # noqa: E402
from support.ui import element, serving, show, text  # noqa: E402

IMAGES = ROOT / "docs" / "img" / "ui"
STEPS = 12
RUNS = {"first": 0.0015, "second": 0.0005}
"""Learning rates of the runs, by name."""
SESSIONS = 5
QUALITY = 70


class Picture(NamedTuple):
    """A page as it is photographed; `{a}` and `{b}` are rollouts of one group, `{group}` its id."""

    place: str
    ready: str
    height: int = 800
    dark: bool = False
    width: int = 1280


PICTURES = {
    "run": Picture("#/r/first", element(".chart canvas")),
    "rollouts": Picture("#/r/first/rollouts?sort=-seconds", element(".tbody a")),
    "rollout": Picture("#/r/first/o/{a}?color=entropy", element(".tokens .sampled"), 1000, dark=True),
    "timeline": Picture("#/r/first/timeline", element(".gantt"), 760),
    "diff": Picture("#/r/first/diff?a={a}&b={b}", element(".mark")),
    "excluded": Picture("#/r/first/excluded", element(".tbody .tr"), 700),
    "compare": Picture("#/compare?runs=first,second", f"{element('.chart canvas')} && {text('difference')}"),
    "gateway": Picture("#/gateway?in=500&out=2000", f"{text('rollout-1.1')} && {text('ready')}", 700),
    "phone-group": Picture("#/r/first/g/{group}", element(".card"), 844, dark=True, width=390),
    "phone-run": Picture("#/r/first", element(".chart canvas"), 844, width=390),
}


def make_runs(folder: Path) -> None:
    for name, rate in RUNS.items():
        command = (sys.executable, "-m", "afield", "demo", "--steps", str(STEPS), "--lr", str(rate))
        options = ("--record-training", "--run", name, "--json")
        environment = {**os.environ, "AFIELD_RUNS": str(folder)}
        subprocess.run((*command, *options), env=environment, check=True, stdout=subprocess.DEVNULL)


def places(folder: Path) -> dict[str, str]:
    """Two rollouts of one group with different rewards, of the last step."""
    with RunDirectory(folder / next(iter(RUNS))).index as index:
        index.refresh()
        ((group, a, b),) = index.fetch(
            "SELECT x.group_id, x.id, y.id FROM rollouts x JOIN rollouts y ON x.group_id = y.group_id"
            " WHERE x.reward = 1 AND y.reward = 0 AND x.turns > 1 AND y.turns > 1"
            " ORDER BY x.step DESC, x.seq LIMIT 1"
        )
    return {"group": group, "a": a, "b": b}


async def sessions(up: Running) -> None:
    """Sessions of the gateway with a few calls each."""
    for n in range(1, SESSIONS + 1):
        agent = await up.agent(f"rollout-{n}.1")
        messages: list[Any] = [{"role": "user", "content": "How much is the mug?"}]
        for _ in range(n):
            reply = await agent.chat.completions.create(model="policy", messages=messages)
            messages += [reply.choices[0].message, {"role": "user", "content": "And two?"}]


async def photograph(page: Page, name: str, found: dict[str, str], folder: Path) -> None:
    picture = PICTURES[name]
    await page.size(picture.width, picture.height, dark=picture.dark)
    await show(page, picture.place.format(**found), picture.ready)
    await page.wait_for(f"!{element('[aria-busy]')}")
    path = folder / f"{name}.{'png' if name.startswith('phone-') else 'webp'}"
    await page.screenshot(path, QUALITY)
    print(f"{path} {path.stat().st_size:,} bytes")


def join_phones(folder: Path) -> None:
    """Both phone pages side by side, as one picture."""
    from PIL import Image

    pages = [Image.open(folder / f"{name}.png").convert("RGB") for name in ("phone-group", "phone-run")]
    joined = Image.new("RGB", (sum(page.width for page in pages) + 20, pages[0].height), "white")
    joined.paste(pages[0], (0, 0))
    joined.paste(pages[1], (pages[0].width + 20, 0))
    joined.save(IMAGES / "phone.webp", quality=QUALITY)


async def write(folder: Path, names: list[str]) -> None:
    words = vocabulary()
    engine = ScriptedEngine(
        lambda _: ScriptedReply(token_ids=(*words.encode("It costs 7."), words.id_of("<|im_end|>") or 0))
    )
    with tempfile.TemporaryDirectory() as scratch:
        async with AsyncExitStack() as stack:
            up = await stack.enter_async_context(running(engine, Path(scratch) / "store"))
            await sessions(up)
            options = ("--gateway", up.url)
            url = await stack.enter_async_context(serving(folder, *options, AFIELD_ADMIN_KEY=ADMIN))
            page = await stack.enter_async_context((await stack.enter_async_context(browser())).page())
            await page.open(url)
            await page.wait_for(element(".tbody a"))
            found = places(folder)
            for name in names:
                into = Path(scratch) if name.startswith("phone-") else IMAGES
                await photograph(page, name, found, into)
            if page.errors:
                raise SystemExit("\n".join(page.errors))
        if "phone-run" in names:
            join_phones(Path(scratch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    several = [name for name in PICTURES if not name.startswith("phone-")]
    parser.add_argument("names", nargs="*", choices=[*several, "phone", []], help="default: all pictures")
    parser.add_argument("--runs", type=Path, help="directory of the runs; made there if it has none")
    args = parser.parse_args()
    chosen = args.names or [*several, "phone"]
    names = [name for name in chosen if name != "phone"]
    names += ["phone-group", "phone-run"] if "phone" in chosen else []
    with tempfile.TemporaryDirectory() as folder:
        runs: Path = args.runs or Path(folder) / "runs"
        if not all((runs / name).is_dir() for name in RUNS):
            make_runs(runs)
        asyncio.run(write(runs, names))


if __name__ == "__main__":
    main()
