"""A server that speaks as the vLLM does that veRL launches (no management, no scale-out), in a process of its
own: what a rollout server of veRL's is to the gateway. Prints its address; ends with its standard input."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from afield.engines.torch.engine import TorchEngine
from support.fake_vllm import FakeVllm, serving


async def main(model: Path) -> None:
    async with serving(FakeVllm(TorchEngine(model, max_slots=8, seed=0), scale_out=False, dev=False)) as url:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
