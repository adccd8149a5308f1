"""Turn-tree oracle at length: random agents against an independent model.

    python -m bench.gateway.turn_tree_oracle [--sessions 5000] [--seed 100000]

Agents and checks are those of the tests (tests/support). The last line is JSON: counts of what happened, and
whether every check passed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support.random_sessions import world  # pyright: ignore[reportMissingImports]

BATCH = 250


async def run(sessions: int, seed: int) -> dict[str, Any]:
    counts: dict[str, int] = {}
    wrong: list[str] = []
    for first in range(seed, seed + sessions, BATCH):
        with tempfile.TemporaryDirectory() as store:
            async with world(Path(store)) as w:
                try:
                    await w.populate(range(first, min(first + BATCH, seed + sessions)))
                except AssertionError as error:
                    wrong.append(str(error))
                for what, n in w.counts.items():
                    counts[what] = counts.get(what, 0) + n
    return {"sessions": sessions, "seed": seed, "counts": counts, "wrong": wrong, "ok": not wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=100_000)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    began = time.process_time()
    result = asyncio.run(run(args.sessions, args.seed))
    print(json.dumps(result | {"cpu_s": round(time.process_time() - began, 1)}))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
