"""Rollout client and gateway connection of a veRL process.

The gateway is one of:
1. the gateway at `afield.gateway`;
2. the gateway of the rollout backend `afield`;
3. a gateway started here in front of veRL's own vLLM or SGLang servers. These servers do not report the
   version of their weights; veRL does, with every batch. Modes in which veRL puts its servers to sleep while
   agents call them are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from afield.client import RolloutClient, connect
from afield.errors import Unavailable, UsageError
from afield.integrations.verl.settings import VerlRun
from afield.ratelimit import RateLimits
from afield.settings.environment import Environment
from afield.settings.fields import values_of
from afield.settings.rollouts import Deadlines, retries_of
from afield.settings.sessions import policies_of

OWN_BACKEND = "afield"
SERVERS = ("vllm", "sglang")
RAY_TIMEOUT_S = 600.0


class GatewayConnection(Struct, frozen=True):
    """Address and admin key of a gateway."""

    url: str
    """Address for this job's processes."""
    admin_key: str
    """Admin key of the gateway."""
    versioned: bool = True
    """Whether the gateway's versions are veRL's steps."""
    actor: Any = None
    """Ray actor that holds the gateway; None if it does not belong to this job."""

    def when_gone(self, call: Callable[[Unavailable], object]) -> None:
        """Call once when the gateway of this job has ended, in a thread of Ray."""
        if self.actor is None:
            return

        def ended(death: Future[str]) -> None:
            lost = death.exception()
            call(Unavailable(f"the gateway actor is gone: {lost}" if lost else death.result()))

        self.actor.death.remote().future().add_done_callback(ended)


def client(run: VerlRun, gateway: GatewayConnection, part: str = "") -> RolloutClient:
    """A client that is not started. Each process needs its own `part` of the run directory."""
    settings, trainer = run.settings, run.trainer
    limits = RateLimits(
        rate_per_s=settings.launch_rate, cold_start_s=settings.cold_start_s, starting=settings.launching
    )
    folder = Path(trainer.folder).expanduser().absolute()
    client = connect.client(
        gateway=gateway.url,
        admin_key=gateway.admin_key,
        agent=settings.agent or None,
        agent_args=settings.agent_args,
        runtime=settings.runtime,
        verifier=settings.verifier,
        verifier_runtime=settings.verifier_runtime,
        transport=settings.transport,
        exp_id=f"{trainer.name}.{part}" if part else trainer.name,
        directory=folder / part if part else folder,
        python=settings.python,
        workers=settings.workers,
        process_per_rollout=settings.process_per_rollout,
        rate_limits=limits,
        limiter_file=settings.limiter_file or None,
        limiter_url=settings.limiter_url or None,
        options=dict(settings.options) or None,
        rollouts=trainer.rollouts,
        val_rollouts=trainer.val_rollouts,
        quorum=run.quorum,
        concurrency=settings.concurrency,
        retries=retries_of(settings),
        sampling=trainer.sampling,
        budget=trainer.budget,
        **policies_of(settings),
        poll_interval_s=settings.poll_interval_s,
        unavailable_timeout_s=settings.unavailable_timeout_s,
        rewards=tuple(settings.rewards),
        **values_of(settings, Deadlines),
    )
    client.info = structs.replace(client.info, kind="verl", model=trainer.model)
    return client


def connect_gateway(run: VerlRun, llm_client: Any) -> GatewayConnection:
    """Connect to the configured gateway or the backend's, or start one in front of veRL's servers."""
    settings, trainer = run.settings, run.trainer
    if settings.gateway:
        key = Environment.read().admin_key
        if not key:
            raise UsageError(f"the gateway at {settings.gateway} needs an admin key: set AFIELD_ADMIN_KEY")
        return GatewayConnection(settings.gateway, key)
    if trainer.backend == OWN_BACKEND:
        import ray  # pyright: ignore[reportMissingImports]

        from afield.integrations.verl.gateway_actor import gateway_actor

        actor = gateway_actor()
        info = ray.get(actor.gateway.remote(), timeout=RAY_TIMEOUT_S)
        return GatewayConnection(info.local_url, info.admin_key, actor=actor)
    if trainer.backend in SERVERS:
        return _start_in_front(run, addresses(llm_client))
    raise UsageError(
        f"actor_rollout_ref.rollout.name={trainer.backend} cannot be called with token ids by afield;"
        f" choose one of: {OWN_BACKEND}, {', '.join(SERVERS)}, or name a gateway with afield.gateway"
    )


def addresses(llm_client: Any) -> list[str]:
    """HOST:PORT of veRL's rollout servers."""
    import ray  # pyright: ignore[reportMissingImports]

    balancer = llm_client._load_balancer
    servers: list[str] = ray.get(balancer.get_all_servers.remote(), timeout=RAY_TIMEOUT_S)
    if not servers:
        raise UsageError(
            "veRL has launched no rollout server; see actor_rollout_ref.rollout.nnodes and n_gpus_per_node"
        )
    return sorted(servers)


def _start_in_front(run: VerlRun, servers: list[str]) -> GatewayConnection:
    """Start a gateway whose engines are veRL's servers, held by an actor of this job."""
    import ray  # pyright: ignore[reportMissingImports]

    from afield.integrations.verl.gateway_actor import GatewayActor, GatewayOptions

    settings, trainer = run.settings, run.trainer
    if trainer.mode == "colocate_async" or (trainer.mode == "separate_async" and trainer.hybrid):
        raise UsageError(
            f"in mode {trainer.mode} veRL puts {trainer.backend} to sleep under agents that call it; use"
            " separate_async with actor_rollout_ref.hybrid_engine=False, or rollout.name=afield"
        )
    options = GatewayOptions(
        folder=str(Path(trainer.folder).expanduser().absolute() / "gateway"),
        engine=[f"{trainer.backend}=http://{server}" for server in servers],
        host=settings.gateway_host,
        port=settings.gateway_port,
        public_url=settings.gateway_url,
        outcomes=settings.transport if "://" in settings.transport else "",
    )
    job = ray.get_runtime_context().get_job_id()
    actor = GatewayActor.options(  # pyright: ignore[reportAttributeAccessIssue]
        name=f"afield-front-{job}", get_if_exists=True, max_concurrency=64
    ).remote(options, trainer.model)
    info = ray.get(actor.gateway.remote(), timeout=RAY_TIMEOUT_S)
    return GatewayConnection(info.local_url, info.admin_key, versioned=False, actor=actor)
