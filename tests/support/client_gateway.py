"""A gateway in a thread of its own, with rollout clients and agents for tests that block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import openai
from anyio.from_thread import BlockingPortal, start_blocking_portal

from afield.client import RolloutClient
from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.gateway.client import HttpGateway
from afield.interfaces import Runtime, SessionCredentials, SessionSpec, SessionState, Transport
from afield.orchestrator.config import RolloutConfig
from afield.orchestrator.deadlines import Deadlines
from afield.orchestrator.state import RunDirectory
from afield.runtimes.inline import InlineRuntime
from afield.sdk.agent import Context
from afield.transports.stores.memory import MemoryTransport
from support.gateways import ADMIN, POLICY, Running, running, vocabulary
from support.processes import until

VOCAB = vocabulary()
YES = ScriptedReply(token_ids=(*VOCAB.encode("Yes."), VOCAB.id_of("<|im_end|>") or 0))


class ThreadedGateway:
    """Gateway with a scripted engine that answers "Yes."; creates clients for it."""

    def __init__(self, portal: BlockingPortal, up: Running, root: Path) -> None:
        self._portal = portal
        self._up = up
        self.url = up.url
        self.admin_key = ADMIN
        self.root = root

    def client(
        self,
        agent: Callable[..., Any] | None = None,
        *,
        runtime: Runtime | None = None,
        transport: Transport | None = None,
        run: str = "run",
        **config: Any,
    ) -> RolloutClient:
        """Create a client; by default its agents run in threads and deliver through memory."""
        transport = transport or MemoryTransport()
        deadlines = Deadlines(attempt_timeout_s=config.pop("attempt_timeout_s", 60.0), teardown_timeout_s=5.0)
        values = {"exp_id": "exp", "model_id": "m", "retries": {}, "deadlines": deadlines, **config}
        return RolloutClient(
            RolloutConfig(**values),
            gateway=HttpGateway(self.url, ADMIN, unavailable_timeout_s=1.0),
            runtime=runtime or InlineRuntime(agent or yes_agent, deliver=transport.deliver),
            transport=transport,
            run=RunDirectory(self.root / run),
        )

    def open(self, session_id: str) -> SessionCredentials:
        return self._portal.call(self._up.client.open, SessionSpec(id=session_id))

    def spec(self, session_id: str) -> SessionSpec:
        """Return the spec that a session was opened with."""
        return self._up.gateway.sessions.get(session_id).row.spec

    def state(self, session_id: str) -> SessionState:
        return self._portal.call(self._up.client.state, session_id)

    def phase(self, session_id: str) -> str | None:
        states = self._portal.call(self._up.client.states, [session_id])
        return states[session_id].phase if session_id in states else None

    def wait_closed(self, session_id: str) -> None:
        """Wait until the gateway accepts no more calls in a session."""
        until(lambda: self.state(session_id).phase != "open", f"{session_id} is closed", 60)


@contextmanager
def threaded_gateway(
    root: Path, model: Path = POLICY, *, path_keys: bool = False, outlet: Transport | None = None
) -> Iterator[ThreadedGateway]:
    """Serve a gateway in a thread; it forwards outcomes to `outlet`."""
    engine = ScriptedEngine(lambda _: YES)
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(outlet) if outlet else nullcontext(),
        portal.wrap_async_context_manager(
            running(engine, root / "gateway", model, path_keys=path_keys, outlet=outlet)
        ) as up,
    ):
        yield ThreadedGateway(portal, up, root)


class BlockingAgent:
    """Agent that calls the model, records its session in `started`, and waits for `release`."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.release = threading.Event()

    def __call__(self, task: dict[str, Any], rollout: Context) -> float:
        yes_agent(task, rollout)
        self.started.append(rollout.session_id)
        self.release.wait(60)
        return 1.0

    def wait_started(self, count: int) -> None:
        until(lambda: len(self.started) >= count, f"{count} agents have started", 60)


def yes_agent(task: dict[str, Any], rollout: Context) -> float:
    """Ask the task's question; the reward is 1 if the answer is "Yes."."""
    with openai.OpenAI(base_url=rollout.openai_base_url, api_key=rollout.api_key) as client:
        messages: Any = [{"role": "user", "content": str(task.get("question", "Hi"))}]
        reply = client.chat.completions.create(model="m", messages=messages)
    return float(reply.choices[0].message.content == "Yes.")
