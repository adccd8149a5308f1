"""veRL agent loop that runs an afield rollout, for veRL's own workers.

    # agents.yaml, named by actor_rollout_ref.rollout.agent.agent_loop_config_path
    - name: afield
      _target_: afield.integrations.verl.AgentLoop

veRL builds one loop per rollout; loops share one client per worker process. A rollout with a task,
verifier or infrastructure failure has no output. A loop does not see its group, so there is no quorum: veRL
trains a group of one rollout without a baseline. `Manager` has a quorum.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from concurrent import futures
from typing import Any

from msgspec import structs
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

log = logging.getLogger(__name__)


class _SharedClient:
    """The client of all loops in a process, created by the first of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.opened: tuple[settings.VerlRun, RolloutClient, clients.GatewayConnection] | None = None
        self.gone: Unavailable | None = None

    def get(
        self, config: Any, llm_client: Any
    ) -> tuple[settings.VerlRun, RolloutClient, clients.GatewayConnection]:
        with self._lock:
            if self.opened is None:
                run = settings.read(config)
                if run.trainer.estimator == REMAX:
                    raise UsageError(
                        "remax needs a greedy rollout beside each group, which veRL's own manager does not"
                        " run: set agent_loop_manager_class=afield.integrations.verl.Manager"
                    )
                if run.settings.credit == "turns":
                    raise UsageError(
                        "afield.credit=turns does not work with veRL's own agent loop, which takes one"
                        " reward per row: set agent_loop_manager_class=afield.integrations.verl.Manager"
                    )
                gateway = clients.connect_gateway(run, llm_client)
                client = clients.client(run, gateway, part=f"worker-{os.getpid()}").start()
                self.opened = run, client, gateway
                gateway.when_gone(self._give_up)
            return self.opened

    def _give_up(self, error: Unavailable) -> None:
        """Close the client: its rollouts cannot end any more."""
        self.gone = error
        assert self.opened is not None
        # Closing waits for agents to end, which must not block a thread of Ray.
        threading.Thread(
            target=_closed, args=(self.opened[1],), name="afield-verl-closing", daemon=True
        ).start()


def _closed(client: RolloutClient) -> None:
    with contextlib.suppress(Unavailable):
        client.close()


SHARED = _SharedClient()


class AgentLoop(AgentLoopBase):
    """Runs one rollout per call."""

    async def run(self, sampling_params: dict[str, Any], **prompt: Any) -> list[AgentLoopOutput]:
        run, client, gateway = SHARED.opened or await self.loop.run_in_executor(
            None, SHARED.get, self.config, self.server_manager
        )
        rollout = Rollout(
            id=f"{prompt['uid']}-{prompt['session_id']}",
            exp_id=client.config.exp_id,
            group_id=str(prompt["uid"]),
            task=task_of(prompt),
            sampling=_sampling(sampling_params, run.trainer.sampling),
        )
        try:
            session = await _session(client, rollout, run, int(prompt["session_id"]))
        except (asyncio.CancelledError, futures.CancelledError, UsageError) as error:
            if SHARED.gone is None:
                raise
            raise SHARED.gone from error
        if isinstance(session, str):
            log.warning("rollout %s is left out: %s", rollout.id, session)
            return []
        step = int(prompt["global_steps"])
        if not gateway.versioned:
            session = structs.replace(session, versions=(max(0, step - 1),) * 2)
        return outputs(session)


async def _session(
    client: RolloutClient, rollout: Rollout, run: settings.VerlRun, number: int
) -> rows.RolloutRows | str:
    try:
        finished = await client.begin(rollout)
    except RolloutFailure as error:
        return f"{error.kind}/{error.reason}: {error}"
    vision = rows.vision_of(run.trainer.model)
    return rows.rollout_rows(
        finished,
        number,
        floor=run.settings.floor,
        branches=run.branches,
        image_id=vision.image_id if vision else None,
        credit=run.credit,
    )


def outputs(session: rows.RolloutRows) -> list[AgentLoopOutput]:
    return [
        AgentLoopOutput(
            prompt_ids=list(row.prompt_ids),
            response_ids=list(row.response_ids),
            response_mask=list(row.response_mask),
            response_logprobs=list(row.response_logprobs),
            reward_score=session.score,
            num_turns=rows.num_turns(session.result, row),
            metrics=AgentLoopMetrics(**session.metrics),
            **({"multi_modal_data": {"images": rows.decoded_images(row)}} if row.images else {}),
            extra_fields={
                "min_global_steps": session.row_versions(row)[0],
                "max_global_steps": session.row_versions(row)[1],
                "reward_extra_info": dict(session.info),
            },
        )
        for row in session.rows
    ]


def _sampling(params: dict[str, Any], default: Sampling) -> Sampling:
    return Sampling(
        temperature=float(params["temperature"]),
        top_p=float(params["top_p"]),
        top_k=max(0, int(params["top_k"])),
        max_tokens=default.max_tokens,
    )
