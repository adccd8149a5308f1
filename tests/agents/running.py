"""One attempt of an agent, in this process."""

from collections.abc import Callable
from typing import Any

import anyio

from afield.runtimes.inline import InlineRuntime
from afield.transports.stores.memory import MemoryTransport
from afield.types import Attempt
from afield.wire import OutcomeRecord
from agents.invoking import invocation, payload
from agents.places import waiting_for


async def run_inline(agent: Callable[..., Any], row: dict[str, Any] | None = None) -> OutcomeRecord:
    """What comes of one attempt of this agent."""
    attempt = Attempt("r", 1)
    async with MemoryTransport() as transport:
        async with InlineRuntime(agent, transport.deliver) as runtime:
            with anyio.fail_after(60):
                await runtime.launch(attempt, payload(row or {}, invocation()))
                await runtime.wait(attempt)
        record = await transport.decision(waiting_for(attempt))
    assert isinstance(record, OutcomeRecord)
    return record
