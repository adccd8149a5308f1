"""A controller to be killed: `python controller.py MAKER OPTIONS ROLLOUT_ID PAYLOAD`.

It builds a runtime (MAKER is `package.module:function`, called with the JSON object OPTIONS),
launches the first attempt of a rollout with PAYLOAD, says so on stdout, and waits to be killed.
"""

import asyncio
import json
import sys
from pathlib import Path

for parent in Path(__file__).parents[1:3]:
    sys.path.insert(0, str(parent))

from afield.types import Attempt  # noqa: E402
from agents.places import Spec  # noqa: E402


async def main(maker: str, options: str, rollout_id: str, payload: str) -> None:
    async with Spec(maker, json.loads(options)).build() as runtime:
        await runtime.launch(Attempt(rollout_id, 1), json.loads(payload))
        sys.stdout.write("launched\n")
        sys.stdout.flush()
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:5]))
