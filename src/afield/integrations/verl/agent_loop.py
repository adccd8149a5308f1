"""An agent loop of veRL's that runs an afield rollout: the lighter form, for veRL's own workers.

    # agents.yaml, named by actor_rollout_ref.rollout.agent.agent_loop_config_path
    - name: afield
      _target_: afield.integrations.verl.AgentLoop

veRL builds one per rollout; the client behind it is one per worker process. A rollout that failed by no
doing of the policy has no output. Nobody sees a whole group here, so there is no quorum: a group of which
one rollout is left is trained as veRL does, without a baseline. The manager has one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from concurrent import futures
from typing import Any

from verl.experimental.agent_loop.agent_loop import (  # pyright: ignore[reportMissingImports]
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
)

from afield.client import RolloutClient
from afield.errors import RolloutFailure, Unavailable, UsageError
from afield.integrations.verl import clients, rows, settings
from afield.integrations.verl.baselines import REMAX
from afield.integrations.verl.dataset import task_of
from afield.types import Rollout, Sampling

log = logging.getLogger("afield.verl")


class _Shared:
    """What all loops of a process have in common, made by the first of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.made: tuple[settings.Given, RolloutClient, clients.GatewayConnection] | None = None
        self.gone: Unavailable | None = None

    def get(
        self, config: Any, llm_client: Any
    ) -> tuple[settings.Given, RolloutClient, clients.GatewayConnection]:
        with self._lock:
            if self.made is None:
                given = settings.read(config)
                if given.trainer.estimator == REMAX:
                    raise UsageError(
                        "remax needs a greedy rollout beside each group, which veRL's own manager does not"
                        " run: set agent_loop_manager_class=afield.integrations.verl.Manager"
                    )
                if given.settings.credit == "turns":
                    raise UsageError(
                        "afield.credit=turns cannot be had with veRL's own agent loop, which takes one reward"
                        " for a row: set agent_loop_manager_class=afield.integrations.verl.Manager"
                    )
                door = clients.connect_gateway(given, llm_client)
                made = clients.client(given, door, part=f"worker-{os.getpid()}")
                self.made = given, made, door
                door.when_gone(self._give_up)
            return self.made

    def _give_up(self, error: Unavailable) -> None:
        """Nobody waits any more for rollouts that cannot end."""
        self.gone = error
        assert self.made is not None
        # Closing waits for agents to be ended, which is nothing for a thread of Ray's.
        threading.Thread(
            target=_closed, args=(self.made[1],), name="afield-verl-closing", daemon=True
        ).start()


def _closed(client: RolloutClient) -> None:
    with contextlib.suppress(Unavailable):  # which is known
        client.close()


SHARED = _Shared()


class AgentLoop(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **prompt: Any) -> list[AgentLoopOutput]:
        given, client, door = SHARED.made or await self.loop.run_in_executor(
            None, SHARED.get, self.config, self.server_manager
        )
        rollout = Rollout(
            id=f"{prompt['uid']}-{prompt['session_id']}",
            exp_id=client.config.exp_id,
            group_id=str(prompt["uid"]),
            task=task_of(prompt),
            sampling=_sampling(sampling_params, given.trainer.sampling),
        )
        try:
            made = await _session(client, rollout, given, int(prompt["session_id"]))
        except (asyncio.CancelledError, futures.CancelledError, UsageError) as error:
            if SHARED.gone is None:
                raise
            raise SHARED.gone from error
        if isinstance(made, str):
            log.warning("rollout %s is left out: %s", rollout.id, made)
            return []
        step = int(prompt["global_steps"])
        return outputs(
            made if door.versioned else rows.with_versions(made, max(0, step - 1), max(0, step - 1))
        )


async def _session(
    client: RolloutClient, rollout: Rollout, given: settings.Given, number: int
) -> rows.RolloutRows | str:
    try:
        finished = await client.begin(rollout)
    except RolloutFailure as error:
        return f"{error.kind}/{error.reason}: {error}"
    vision = rows.vision_of(given.trainer.model)
    return rows.rollout_rows(
        finished,
        number,
        floor=given.settings.floor,
        branches=given.branches,
        image_id=vision.image_id if vision else None,
        credit=given.credit,
    )


def outputs(made: rows.RolloutRows) -> list[AgentLoopOutput]:
    return [
        AgentLoopOutput(
            prompt_ids=list(row.prompt_ids),
            response_ids=list(row.response_ids),
            response_mask=list(row.response_mask),
            response_logprobs=list(row.logprobs),
            reward_score=made.score,
            num_turns=row.turns,
            metrics=AgentLoopMetrics(**made.metrics),
            **({"multi_modal_data": {"images": rows.images_of(made, row)}} if row.images else {}),
            extra_fields={
                "min_global_steps": row.low,
                "max_global_steps": row.high,
                "reward_extra_info": dict(made.info),
            },
        )
        for row in made.rows
    ]


def _sampling(told: dict[str, Any], usual: Sampling) -> Sampling:
    return Sampling(
        temperature=float(told["temperature"]),
        top_p=float(told["top_p"]),
        top_k=max(0, int(told["top_k"])),
        max_tokens=usual.max_tokens,
    )
