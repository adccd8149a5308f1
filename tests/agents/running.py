"""One attempt of an agent, in this process."""

from collections.abc import Callable
from typing import Any

import anyio

from afield.runtimes.inline import InlineRuntime
from afield.transports.memory import MemoryTransport
from afield.types import Attempt
from afield.wire import OutcomeRecord
from agents.invoking import EXP, invocation, payload


async def run_inline(agent: Callable[..., Any], row: dict[str, Any] | None = None) -> OutcomeRecord:
    """What comes of one attempt of this agent."""
    transport = MemoryTransport()
    async with InlineRuntime(agent, transport.deliver) as runtime:
        with anyio.fail_after(30):
            await runtime.launch(Attempt("r", 1), payload(row or {}, invocation()))
            await runtime.wait(Attempt("r", 1))
    record = await transport.decision(EXP, Attempt("r", 1))
    assert isinstance(record, OutcomeRecord)
    return record
