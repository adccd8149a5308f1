"""One process of several that share a limiter: it launches and says when, until it is killed or done.

`python sharing.py FILE RATE PLACES SECONDS HOLD_S`: one JSON line per launch, with its begin and end.
"""

import asyncio
import json
import sys
import time
from contextlib import closing
from pathlib import Path

from afield.ratelimit import RateLimits, SharedLimiter


async def main(path: Path, pace: RateLimits, seconds: float, hold_s: float) -> None:
    end = time.time() + seconds
    with closing(SharedLimiter(pace, path)) as limiter:

        async def launching() -> None:
            while time.time() < end:
                async with limiter.launch_slot():
                    began = time.time()
                    sys.stdout.write(json.dumps([began, None]) + "\n")
                    sys.stdout.flush()
                    await asyncio.sleep(hold_s)
                    ended = time.time()
                sys.stdout.write(json.dumps([began, ended]) + "\n")
                sys.stdout.flush()

        async with asyncio.TaskGroup() as group:
            for _ in range(10):
                group.create_task(launching())


if __name__ == "__main__":
    file, rate, places, seconds, hold_s = sys.argv[1:]
    pace = RateLimits(rate_per_s=float(rate), starting=int(places))
    asyncio.run(main(Path(file), pace, float(seconds), float(hold_s)))
