"""Collection with everything real, in one process: a gateway, agents in threads, outcomes in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.interfaces import PendingAttempt, Runtime, Transport
from afield.orchestrator.config import RolloutConfig
from afield.orchestrator.deadlines import Deadlines
from afield.orchestrator.groups import GroupRunner, GroupSpec
from afield.orchestrator.rollout import RolloutRunner
from afield.orchestrator.state import RolloutStore, RunState
from afield.runtimes.inline import InlineRuntime
from afield.sdk.agent import Context
from afield.transports.stores.memory import MemoryTransport
from afield.types import Attempt, Group, Outcome, Rollout, RolloutResult, Task
from support.gateways import Running, openai_client, running, vocabulary

VOCAB = vocabulary()
YES = ScriptedReply(token_ids=(*VOCAB.encode("Yes."), VOCAB.id_of("<|im_end|>") or 0))


class Seen:
    """Observer that records what it is told."""

    def __init__(self) -> None:
        self.ended: list[tuple[Outcome, bool]] = []
        self.finished: list[RolloutResult] = []

    def attempt_ended(self, rollout: Rollout, outcome: Outcome, will_retry: bool) -> None:
        self.ended.append((outcome, will_retry))

    def rollout_finished(self, result: RolloutResult) -> None:
        self.finished.append(result)


class Collection:
    """Components of rollout collection, real and in one process."""

    def __init__(
        self, place: Path, up: Running, transport: Transport, run_state: RunState, runtime: Runtime
    ) -> None:
        self.rollout_store = RolloutStore(place / "rollout_store")
        self.up = up
        self.transport = transport
        self.run_state = run_state
        self.runtime = runtime
        self.seen = Seen()

    @asynccontextmanager
    async def runner(self, **options: Any) -> AsyncIterator[tuple[RolloutConfig, RolloutRunner]]:
        """Start a runner; `options` are fields of RolloutConfig and Deadlines, and components, by name."""
        names = ("gateway", "runtime", "transport", "limiter", "run_state", "verifiers")
        parts = {k: options.pop(k) for k in names if k in options}
        limits = {k: options.pop(k) for k in list(options) if k in Deadlines.__struct_fields__}
        deadlines = Deadlines(**{"attempt_timeout_s": 30.0, "upload_timeout_s": 0.5, **limits})
        config = RolloutConfig(
            **{"exp_id": "exp", "model_id": "m", "rollouts": 2, "deadlines": deadlines, **options}
        )
        defaults = {"gateway": self.up.client, "runtime": self.runtime, "transport": self.transport}
        defaults |= {"run_state": self.run_state, "observer": self.seen, "rollout_store": self.rollout_store}
        async with asyncio.timeout(60), RolloutRunner(config, **{**defaults, **parts}) as runner:
            yield config, runner

    async def collect(self, tasks: int = 1, **options: Any) -> list[Group]:
        specs = [GroupSpec(f"exp-e0-t{i}", Task(f"t{i}", {"n": i}), 0) for i in range(tasks)]
        async with self.runner(**options) as (config, runner):
            return await GroupRunner(config, runner, self.rollout_store).collect(specs)


@asynccontextmanager
async def collection(
    tmp_path: Path, agent: Callable[..., Any], script: Any = None
) -> AsyncIterator[Collection]:
    engine = ScriptedEngine(script or (lambda _: YES))
    transport = MemoryTransport()
    runtime = InlineRuntime(agent, deliver=transport.deliver)
    async with running(engine, tmp_path / "gateway") as up, transport, runtime:
        with RunState(tmp_path / "run_state.sqlite") as run_state:
            yield Collection(tmp_path, up, transport, run_state, runtime)


def waiting(rollout_id: str, n: int = 1) -> PendingAttempt:
    rollout = Rollout(id=rollout_id, exp_id="exp", group_id="g", task=Task("t0", {}))
    return PendingAttempt(rollout, Attempt(rollout_id, n))


async def ask_model(rollout: Context, word: str = "Hi") -> str:
    async with openai_client(rollout.openai_base_url, rollout.api_key) as client:
        ask: Any = [{"role": "user", "content": word}]
        reply = await client.chat.completions.create(model="m", messages=ask)
        return reply.choices[0].message.content or ""


async def good(task: dict[str, Any], rollout: Context) -> float:
    return float(await ask_model(rollout) == "Yes.") / (1 + task["n"])
