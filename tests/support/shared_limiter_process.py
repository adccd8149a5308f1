"""Process that shares a limiter with others and prints its launches, until it is killed or done.

`python shared_limiter_process.py PLACE RATE STARTING SECONDS HOLD_S LEASE_S` prints one JSON line at the
begin and one at the end of each launch. PLACE is a file or the URL of a Redis server.
"""

import asyncio
import json
import sys
import time
from contextlib import closing
from pathlib import Path

from afield.ratelimit import LeasedLimiter, RateLimits, RedisLimiter, SharedLimiter


def shared(place: str, limits: RateLimits, lease_s: float) -> LeasedLimiter:
    if "://" in place:
        return RedisLimiter(limits, place, lease_s=lease_s)
    return SharedLimiter(limits, Path(place), lease_s=lease_s)


async def main(limiter: LeasedLimiter, seconds: float, hold_s: float) -> None:
    end = time.time() + seconds
    with closing(limiter):

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
    place, rate, starting, seconds, hold_s, lease_s = sys.argv[1:]
    limits = RateLimits(rate_per_s=float(rate), starting=int(starting))
    limiter = shared(place, limits, float(lease_s))
    asyncio.run(main(limiter, float(seconds), float(hold_s)))
