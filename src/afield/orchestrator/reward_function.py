"""Rewards that the caller gives after the rollouts have ended.

1. `rewarded_outcomes` checks the values of a caller or a reward function and builds the outcomes.
2. `give_rewards` records them in the run state and writes them to the rollout store; the first ones count.
3. `GroupRewards` calls a reward function for each group whose rollouts have ended. A function that raises,
   hangs or returns something else is called again; after the last call its rollouts have verifier failures.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar

from msgspec import structs

from afield.batches.rewards import check_rewards
from afield.errors import NotFound, RolloutFailure, UsageError, VerifierFailure, boundary
from afield.orchestrator.availability import retry_unavailable
from afield.orchestrator.config import RolloutConfig
from afield.orchestrator.state import RolloutStore, RunState
from afield.sdk.classify import attributed, storable
from afield.sdk.results import AgentResult, number, read_result
from afield.types import Failure, FailureKind, Outcome, Reason, RolloutResult, Split
from afield.utils.loop_thread import LoopThread

T = TypeVar("T")
log = logging.getLogger(__name__)

RewardFunction = Callable[[list[RolloutResult]], Any]
"""Function, async or not, from the rollouts of one group to one reward per rollout: a number, or a dict as
agents return it, with `reward` or `rewards`, and `turn_rewards`, `named_turn_rewards` and `metrics`."""


# --- values --------------------------------------------------------------------------------------


def rewarded_outcomes(
    results: Sequence[RolloutResult], values: object, config: RolloutConfig
) -> list[Outcome]:
    """Outcomes with these rewards, one per rollout; raises VerifierFailure for wrong values."""
    rewards = _as_list(values)
    if len(rewards) != len(results):
        message = (
            f"{len(rewards)} rewards for {len(results)} rollouts; return one reward per rollout, in order"
        )
        raise VerifierFailure(message, Reason.REWARD)
    return [_rewarded(result, value, config) for result, value in zip(results, rewards, strict=True)]


def _as_list(values: object) -> list[Any]:
    if isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping):
        return list(values)
    message = f"the rewards are a {type(values).__name__}; return a list with one reward per rollout"
    raise VerifierFailure(message, Reason.REWARD)


def _rewarded(result: RolloutResult, value: object, config: RolloutConfig) -> Outcome:
    outcome = result.outcome
    try:
        agent_result = _read_reward(value)
        by_name = {
            name: {**outcome.named_turn_rewards.get(name, {}), **rewards}
            for name, rewards in agent_result.named_turn_rewards.items()
        }
        outcome = structs.replace(
            outcome,
            reward=agent_result.reward,
            reward_pending=False,
            rewards={**outcome.rewards, **agent_result.rewards},
            turn_rewards={**outcome.turn_rewards, **agent_result.turn_rewards},
            named_turn_rewards={**outcome.named_turn_rewards, **by_name},
            metrics={**outcome.metrics, **agent_result.metrics},
        )
        names = config.rewards if result.rollout.split is Split.TRAIN else ()
        check_rewards(structs.replace(result, outcome=outcome), names, config.max_reward)
    except (RolloutFailure, UsageError) as error:
        raise VerifierFailure(f"reward of {result.rollout.id}: {error}", Reason.REWARD) from error
    return outcome


def _read_reward(value: object) -> AgentResult:
    if not isinstance(value, Mapping):
        return AgentResult(reward=number(value, "it"))
    if "reward" not in value and "rewards" not in value:
        message = f"its keys are {list(value)!r:.200}; add 'reward' or 'rewards'"
        raise VerifierFailure(message, Reason.REWARD)
    agent_result = read_result(value)
    if agent_result.extra:
        message = f"unknown keys {list(agent_result.extra)!r:.200}; return numbers to keep as 'metrics'"
        raise VerifierFailure(message, Reason.REWARD)
    return agent_result


# --- records -------------------------------------------------------------------------------------


def give_rewards(
    run_state: RunState, rollout_store: RolloutStore, outcomes: Sequence[Outcome]
) -> list[Outcome]:
    """Record outcomes of rollouts whose reward is pending, all or none; returns those that count."""
    counted = run_state.give_rewards(outcomes)
    write_rewards(run_state, rollout_store, [outcome.rollout_id for outcome in outcomes])
    return counted


def write_rewards(
    run_state: RunState, rollout_store: RolloutStore, rollout_ids: Iterable[str] | None = None
) -> None:
    """Write recorded rewards to the rollout store, also those of a process that died before it could."""
    unwritten = run_state.unwritten_rewards()
    for rollout_id in sorted(unwritten if rollout_ids is None else unwritten.intersection(rollout_ids)):
        summary = run_state.rollout_summary(rollout_id)
        try:
            result = rollout_store.get(rollout_id)
        except NotFound:  # read from the gateway again with the outcome of the run state, or trained
            result = None
        if summary is not None and result is not None:
            rollout_store.put(structs.replace(result, outcome=summary.outcome))
        run_state.mark_reward_written(rollout_id)


# --- groups --------------------------------------------------------------------------------------


class GroupRewards:
    """Gives the rewards of groups by a reward function, within the retries of verifiers.

    Functions run in threads of their own, their coroutines in one event loop. A function that does not return
    within the timeout keeps its thread.
    """

    def __init__(
        self,
        function: RewardFunction,
        config: RolloutConfig,
        *,
        run_state: RunState,
        rollout_store: RolloutStore,
    ) -> None:
        self._function = function
        self._config = config
        self._run_state = run_state
        self._rollout_store = rollout_store
        self._loop = LoopThread("reward-loop")
        """Event loop of all calls, so that clients of the function keep their connections."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._loop.stop()  # its coroutines are of the caller, and may block the thread

    @property
    def timeout_s(self) -> float:
        deadlines = self._config.deadlines
        return deadlines.verifier_timeout_s or deadlines.attempt_timeout_s

    async def reward(self, group_id: str, rollout_ids: Sequence[str]) -> list[Outcome]:
        """Give the pending rewards of a group; returns the outcomes of all its rollouts.

        Repeating does not call the function again once the rewards are recorded.
        """
        await self._stored(write_rewards, rollout_ids)
        results = await asyncio.to_thread(lambda: [self._rollout_store.get(one) for one in rollout_ids])
        pending = [result for result in results if result.outcome.reward_pending]
        if not pending:
            return [result.outcome for result in results]
        outcomes = await self._rewarded(group_id, pending)
        counted = await self._stored(give_rewards, outcomes)
        by_id = {outcome.rollout_id: outcome for outcome in counted}
        return [by_id.get(result.rollout.id, result.outcome) for result in results]

    async def _stored(self, call: Callable[[RunState, RolloutStore, Any], T], values: Any) -> T:
        """Call with run state and rollout store, again while one of them is not available."""
        stores = self._run_state, self._rollout_store
        timeout_s = self._config.unavailable_timeout_s
        return await retry_unavailable(lambda: asyncio.to_thread(call, *stores, values), timeout_s)

    async def _rewarded(self, group_id: str, pending: Sequence[RolloutResult]) -> list[Outcome]:
        """Outcomes with rewards, or with the failure of the last call."""
        calls = 1 + self._config.retries.get(FailureKind.VERIFIER, 0)
        failure: Failure | None = None
        for n in range(1, calls + 1):
            answer = await self._call(pending)
            if not isinstance(answer, Failure):
                return answer
            failure = storable(answer)
            log.warning(
                "group %s: call %d of %d of the reward function failed: %s",
                group_id,
                n,
                calls,
                failure.message,
            )
        assert failure is not None
        return [_failed(result.outcome, failure) for result in pending]

    async def _call(self, pending: Sequence[RolloutResult]) -> list[Outcome] | Failure:
        done: Future[list[Outcome] | Failure] = Future()
        coroutines: list[Future[Any]] = []

        def call() -> None:
            failures: list[Failure] = []
            outcomes: list[Outcome] = []
            with boundary(FailureKind.VERIFIER, Reason.RAISED, failures.append), attributed(VerifierFailure):
                values = self._function(list(pending))
                if inspect.isawaitable(values):
                    coroutines.append(self._loop.start().submit(_awaited(values)))
                    values = coroutines[0].result()
                outcomes = rewarded_outcomes(pending, values, self._config)
            answer = failures[0] if failures else outcomes
            if done.set_running_or_notify_cancel():
                done.set_result(answer)

        # A daemon thread, so that a function that never returns does not keep the process alive.
        threading.Thread(target=call, name="reward-function", daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(done), self.timeout_s)
        except TimeoutError:
            message = f"the reward function did not return in {self.timeout_s:g} s (verifier_timeout_s)"
            return Failure(FailureKind.VERIFIER, Reason.TIMEOUT, message)
        finally:
            for coroutine in coroutines:
                coroutine.cancel()


async def _awaited(values: Awaitable[Any]) -> Any:
    # Attributed here too, so that a SystemExit does not leave the task.
    with attributed(VerifierFailure):
        return await values


def _failed(outcome: Outcome, failure: Failure) -> Outcome:
    nothing: dict[str, Any] = {"rewards": {}, "turn_rewards": {}, "named_turn_rewards": {}}
    return structs.replace(outcome, reward_pending=False, failure=failure, **nothing)
