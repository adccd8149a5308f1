"""A collector that dies between any two of its calls, and is started again, counts every rollout once."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from afield.interfaces import PendingAttempt
from afield.orchestrator.groups import GroupRunner, GroupSpec
from afield.runtimes.inline import InlineRuntime
from afield.sdk.agent import Context
from afield.types import Attempt, Group, Rollout, Task
from afield.wire import OutcomeRecord
from support.in_process_collection import Collection, ask_model, collection

pytestmark = pytest.mark.anyio


class Killed(Exception):
    pass


class Done(Exception):
    def __init__(self, group: Group) -> None:
        self.group = group


class Life:
    """So many calls, and none after them."""

    def __init__(self, calls: float) -> None:
        self.left = calls

    def tick(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed


class Mortal:
    """A part as a collector sees it that dies before one of its calls."""

    def __init__(self, part: Any, life: Life) -> None:
        self._part = part
        self._life = life

    def __getattr__(self, name: str) -> Any:
        real, life = getattr(self._part, name), self._life
        if not callable(real):
            return real

        async def asked(*given: Any, **named: Any) -> Any:
            life.tick()
            return await real(*given, **named)

        def called(*given: Any, **named: Any) -> Any:
            life.tick()
            return real(*given, **named)

        return asked if inspect.iscoroutinefunction(real) else called


async def agent(task: dict[str, Any], context: Context) -> float:
    """One of two breaks at first."""
    await ask_model(context)
    if context.session_id.endswith("r0.1"):
        raise OSError("no space left")
    return 1.0


async def collect(b: Collection, spec: GroupSpec, life: Life, **plan: Any) -> Group:
    """By a process of its own: its agents end with it."""
    parts = {
        "gateway": b.up.client,
        "transport": b.transport,
        "run_state": b.run_state,
        "rollout_store": b.rollout_store,
    }
    mortal = {name: Mortal(part, life) for name, part in parts.items()}
    rollout_store = mortal.pop("rollout_store")
    async with InlineRuntime(agent, b.transport.deliver) as runtime:
        b.rollout_store, real = rollout_store, b.rollout_store  # type: ignore[assignment]
        try:
            async with b.runner(runtime=Mortal(runtime, life), **mortal, **plan) as (values, runner):
                (group,) = await GroupRunner(values, runner, rollout_store).collect([spec])  # type: ignore[arg-type]
                raise Done(group)  # without waiting for hints that the dead may hold
        except Done as done:
            return done.group
        finally:
            b.rollout_store = real


async def standing(b: Collection, rollout: Rollout, attempts: int) -> list[int]:
    """Attempts whose reward is in the store."""
    tries = [Attempt(rollout.id, n) for n in range(1, attempts + 2)]
    decided = [await b.transport.decision(PendingAttempt(rollout, attempt)) for attempt in tries]
    pairs = zip(tries, decided, strict=True)
    return [t.n for t, d in pairs if isinstance(d, OutcomeRecord) and d.outcome.reward is not None]


async def test_dying_between_any_two_calls_loses_and_doubles_nothing(tmp_path: Path) -> None:
    calls = 0
    async with collection(tmp_path, agent) as b:
        while True:
            calls += 1
            spec = GroupSpec(f"exp-e0-k{calls}", Task("t", {"n": 0}), 0)
            life = Life(calls)
            try:
                group = await collect(b, spec, life)
                died = False
            except Killed:
                died = True
                group = await collect(b, spec, Life(float("inf")))
            for finished in group.finished:
                where = f"killed after {calls} calls: {finished.rollout.id}"
                assert finished.outcome.reward == 1.0, where
                counted = await standing(b, finished.rollout, finished.attempts)
                assert counted == [finished.outcome.attempt], where
                assert finished.trajectories, where
                summary = b.run_state.rollout_summary(finished.rollout.id)
                assert summary and summary.outcome == finished.outcome, where
                assert len(b.run_state.attempts(finished.rollout.id)) == finished.attempts, where
                b.rollout_store.remove(finished.rollout.id)
            if not died:
                break
        assert calls > 30
        assert len(b.rollout_store) == 0
