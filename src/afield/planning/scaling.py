"""Forecasts of a training loop on any number of GPUs.

1. Trainer and engines divide the GPUs, or share them in turns in mode `sync`; only divisions that fit into
   memory are tried.
2. Each division is simulated with a few replicas and their share of the agents. The fastest is simulated as a
   whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from msgspec import Struct, structs

from afield.errors import UsageError
from afield.orchestrator.groups import Mode
from afield.planning.architecture import Architecture
from afield.planning.costs import (
    LoopCosts,
    engine_costs,
    engine_times,
    gateway_times,
    publish_s,
    train_token_s,
)
from afield.planning.memory import EngineShape, engine_memory, trainer_memory
from afield.planning.placement import (
    CACHE_SHARE,
    VLLM_OVERHEAD,
    VLLM_PREFILL,
    Gpus,
    Workload,
    engine_room,
    gib,
    powers_of_two,
    trainer_shapes,
)
from afield.planning.simulation import (
    AgentLoad,
    LoopForecast,
    LoopTimes,
    Spread,
    lasting_rate,
    simulate,
)

PILOT_REPLICAS = 4
"""Replicas of the simulations that compare divisions of the GPUs."""
PILOT_AGENTS = (500, 2000)
"""Least and most agents of such a simulation, where a replica has fewer."""
GATEWAY_LOAD = 0.6
"""Share of a gateway process's event loop that is planned for (`bench/sizing.py`)."""
MAX_SEQUENCES = {"vllm": 256, "torch": 512}
"""Calls at once of a replica, if its memory allows them."""


class LoopCluster(Struct, frozen=True, kw_only=True):
    """GPUs of a loop, and how trainer and engines divide them."""

    gpus: Gpus
    """GPUs."""
    trainer_gpus: int
    """GPUs of the trainer."""
    engine_gpus: int
    """GPUs of the engines."""
    colocated: bool
    """Whether trainer and engines take turns on the same GPUs."""
    tensor_parallel: int
    """GPUs of an engine replica."""
    kv_tokens: int
    """Tokens that a replica's KV cache holds."""
    own_gateway: bool = False
    """Whether each replica has a gateway process of its own."""

    @property
    def replicas(self) -> int:
        return self.engine_gpus // self.tensor_parallel

    def __str__(self) -> str:
        if self.colocated:
            return f"{self.trainer_gpus} shared"
        return f"{self.trainer_gpus} + {self.engine_gpus}"


class LoopPlan(Struct, frozen=True, kw_only=True):
    """Forecast of a loop on one cluster in one mode."""

    cluster: LoopCluster
    """GPUs."""
    mode: Mode
    """Order of collecting and training."""
    staleness: int
    """Largest age of a group in policy versions."""
    times: LoopTimes
    """Times that were simulated."""
    forecast: LoopForecast
    """Result."""
    gateway_processes: int
    """Gateway processes whose event loops are busy for at most 60 % of the collecting."""


class LoopRequest(NamedTuple):
    """Loop to forecast."""

    model: Architecture
    costs: LoopCosts
    load: AgentLoad
    workload: Workload
    steps: int = 2
    seed: int = 0
    trainer_gpus: int | None = None
    """GPUs of the trainer; None looks for the fastest division."""
    gateway_processes: int | None = None
    """Gateway processes; None takes as many as the load needs."""


def plan_loop(request: LoopRequest, gpus: Gpus, mode: Mode, staleness: int) -> LoopPlan:
    """The fastest division of the GPUs in this mode. Raises UsageError if none fits."""
    refused: list[str] = []
    clusters = list(_clusters(request, gpus, mode, refused))
    if not clusters:
        raise UsageError(
            f"gpus = {gpus} hold no loop in mode {mode}: {'; '.join(refused[-2:]) or 'one GPU is too few'};"
            " give more or larger GPUs, another --trainer-gpus, or --lora RANK"
        )
    cluster, pilot = _fastest(request, clusters, mode, staleness)
    processes = request.gateway_processes or _processes(pilot, cluster, request)
    times = loop_times(request, cluster, mode, staleness, processes)
    forecast = simulate(times)
    return LoopPlan(
        cluster=cluster,
        mode=mode,
        staleness=staleness,
        times=times,
        forecast=forecast,
        gateway_processes=cluster.replicas if cluster.own_gateway else processes_for(forecast),
    )


def loop_times(
    request: LoopRequest, cluster: LoopCluster, mode: Mode, staleness: int, processes: int
) -> LoopTimes:
    """Times of the loop on a cluster."""
    costs, model, load, workload = request.costs, request.model, request.load, request.workload
    length = load.prompt.mean + load.turns.mean * (load.reply.mean + load.added.mean)
    share = load.turns.mean * load.reply.mean / length
    return LoopTimes(
        load=structs.replace(
            load,
            launch_s=Spread(costs.launch_s.value),
            launch_work_s=costs.launch_work_s.value,
            finish_s=Spread(costs.finish_s.value),
        ),
        engine=engine_times(
            costs,
            model,
            workload.engine,
            replicas=cluster.replicas,
            tensor_parallel=cluster.tensor_parallel,
            max_sequences=MAX_SEQUENCES[workload.engine],
            kv_tokens=cluster.kv_tokens,
            context=length / 2,
        ),
        gateway=gateway_times(costs, processes),
        train_s=costs.train_s.value,
        train_token_s=train_token_s(
            costs, model, cluster.trainer_gpus, context=length / 2, sampled_share=share
        ),
        publish_s=publish_s(costs, model, workload.rank),
        poll_s=costs.poll_s.value,
        mode=mode,
        staleness=staleness,
        warmup=staleness + 1 if staleness else 0,
        # Groups of staleness + 1 steps begin together, so steps are fast and slow in cycles of that length.
        steps=math.ceil(request.steps / (staleness + 1)) * (staleness + 1),
        seed=request.seed,
    )


# --- divisions of the GPUs ------------------------------------------------------------------------


def trainer_counts(count: int) -> list[int]:
    """Numbers of trainer GPUs that are tried: powers of two, and every eighth of the GPUs."""
    eighths = {count * n // 8 for n in range(1, 8)}
    return sorted(({*powers_of_two(count), *eighths}) - {0})


def _clusters(request: LoopRequest, gpus: Gpus, mode: Mode, refused: list[str]) -> Iterator[LoopCluster]:
    chosen = request.trainer_gpus
    if chosen is not None and chosen > gpus.count:
        raise UsageError(f"trainer_gpus = {chosen} is more than the {gpus.count} GPUs of {gpus}; lower it")
    for trainers in trainer_counts(gpus.count) if chosen is None else [chosen]:
        if trainers < gpus.count:
            yield from _cluster(request, gpus, trainers, refused, colocated=False)
        elif (mode == "sync" and request.workload.engine == "vllm") or gpus.count == 1:
            yield from _cluster(request, gpus, trainers, refused, colocated=True)


def _cluster(
    request: LoopRequest, gpus: Gpus, trainers: int, refused: list[str], *, colocated: bool
) -> Iterator[LoopCluster]:
    model, workload = request.model, request.workload
    peaks = [trainer_memory(model, shape).peak for shape in trainer_shapes(model, gpus, workload, trainers)]
    fitting = [peak for peak in peaks if peak <= gpus.usable]
    if not fitting:
        refused.append(f"the trainer needs {gib(min(peaks))} on each of {trainers} GPUs")
        return
    # A trainer that shares its GPUs takes the most frugal passes.
    room = engine_room(gpus, workload, min(fitting) if colocated else None)
    engines = gpus.count if colocated else gpus.count - trainers
    splits = (
        [1] if workload.engine == "torch" else [n for n in powers_of_two(engines) if model.heads % n == 0]
    )
    for split in splits:
        tokens = cache_tokens(model, workload, room, split)
        if tokens >= 2 * workload.context:
            yield LoopCluster(
                gpus=gpus,
                trainer_gpus=trainers,
                engine_gpus=engines // split * split,
                colocated=colocated,
                tensor_parallel=split,
                kv_tokens=tokens,
                own_gateway=engine_costs(request.costs, workload.engine).own_gateway,
            )
            return
    refused.append(f"no KV cache for two rollouts of {workload.context} tokens on {engines} GPUs")


def cache_tokens(model: Architecture, workload: Workload, room: int, tensor_parallel: int) -> int:
    """Tokens of a replica's KV cache in `room` bytes of each of its GPUs."""
    shape = EngineShape(
        calls=MAX_SEQUENCES[workload.engine],
        context=workload.context,
        tensor_parallel=tensor_parallel,
        prefill=VLLM_PREFILL,
    )
    memory = engine_memory(model, shape)
    free = room - memory.weights
    free = int(free * CACHE_SHARE) if workload.engine == "torch" else free - memory.workspace - VLLM_OVERHEAD
    return max(0, free) // memory.token


# --- simulations of a part ------------------------------------------------------------------------


def _fastest(
    request: LoopRequest, clusters: list[LoopCluster], mode: Mode, staleness: int
) -> tuple[LoopCluster, _Pilot]:
    """The division that samples most tokens per second, and its pilot.

    Divisions are in the order of the trainer's GPUs. From the middle one the search goes on while it finds
    faster ones; shared GPUs are compared in any case.
    """
    pilots: dict[int, _Pilot] = {}

    def rate(index: int) -> float:
        if index not in pilots:
            pilots[index] = _pilot(request, clusters[index], mode, staleness)
        return lasting_rate(pilots[index].forecast) / pilots[index].agents

    apart = [n for n, cluster in enumerate(clusters) if not cluster.colocated]
    best = apart[len(apart) // 2] if apart else 0
    for step in (-1, 1):
        while best + step in apart and rate(best + step) > rate(best):
            best += step
    best = max([best, *(n for n, cluster in enumerate(clusters) if cluster.colocated)], key=rate)
    return clusters[best], pilots[best]


class _Pilot(NamedTuple):
    """A simulation of a part, and the agents that it has."""

    forecast: LoopForecast
    agents: int


def _pilot(request: LoopRequest, cluster: LoopCluster, mode: Mode, staleness: int) -> _Pilot:
    """A few replicas with their share of agents, tasks and trainer."""
    load, replicas = request.load, cluster.replicas
    least, most = (replicas * agents / load.agents for agents in PILOT_AGENTS)
    few = min(replicas, max(1, min(PILOT_REPLICAS, int(most)), math.ceil(least)))
    tasks = max(1, round(load.tasks_per_step * few / replicas))
    share = tasks / load.tasks_per_step
    agents = max(1, round(load.agents * few / replicas))
    times = loop_times(request, cluster, mode, staleness, few if cluster.own_gateway else agents)
    return _Pilot(
        simulate(
            structs.replace(
                times,
                load=structs.replace(times.load, agents=agents, tasks_per_step=tasks),
                engine=structs.replace(times.engine, replicas=few),
                train_token_s=times.train_token_s / share,
            )
        ),
        agents,
    )


def _processes(pilot: _Pilot, cluster: LoopCluster, request: LoopRequest) -> int:
    """Gateway processes for the whole cluster."""
    if cluster.own_gateway:
        return cluster.replicas
    return processes_for(pilot.forecast, request.load.agents / pilot.agents)


def processes_for(forecast: LoopForecast, scale: float = 1.0) -> int:
    """Gateway processes for the load while agents run: none works while agents wait for weights."""
    working = sum(seconds for state, seconds in forecast.agents.items() if state != "idle")
    busy = forecast.gateway_load * forecast.step_s / working if working else 0.0
    return max(1, math.ceil(busy * scale / GATEWAY_LOAD))
