"""Conformance suite: runs real clients against gateway and scripted engine.

Each client gets its own gateway, session and directories, and no network access. `judge` and `oracle` check
the session record. A client that cannot be installed fails with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from afield import factory
from afield.conformance.clients.base import Client, run
from afield.conformance.judge import Verdict, judge
from afield.conformance.model import CHATML, TEMPLATE, TemplateFamily, write_model
from afield.conformance.oracle import Oracle, Renderer
from afield.conformance.proxy import FaultPlan, fault_proxy
from afield.conformance.scenario import Scenario
from afield.conformance.script import Script
from afield.errors import Unavailable
from afield.harnesses.base import Stage
from afield.interfaces import Gateway, SessionRecord, SessionSpec
from afield.types import Sampling
from afield.wire import encode

MAX_CONTEXT = 400_000
SETTLE_S = 60.0
FEWEST_TURNS = 8


class GatewayUnderTest(Struct, frozen=True):
    """Running gateway with its scripted engine and fault-injecting proxy."""

    gateway: Gateway
    """Admin client of the gateway."""
    engine_calls: list[Any]
    """Recorded engine calls (`RecordedCall`)."""
    script: Script
    """Script of the engine."""
    faults: FaultPlan
    """Faults of the proxy and captured requests."""
    port: int
    """Loopback port of the proxy."""
    renderer: Renderer
    """Renderer of expected prompts."""


async def check(
    client: Client, cache: Path, folder: Path, path: str, family: TemplateFamily = CHATML
) -> Verdict:
    """Install and run one client on one template family; all its output stays in `folder`.

    `path` is the PATH of the client's processes.
    """
    try:
        programs = await asyncio.to_thread(client.install, cache)
        template = await asyncio.to_thread(family.source, cache)
    except Unavailable as error:
        return Verdict(problems=(f"skipped: {error}",))
    scenario = client.scenario
    async with gateway_under_test(scenario, folder, family, template) as up:
        ticket = await up.gateway.open(SessionSpec(id=client.name, sampling=Sampling(max_tokens=8192)))
        stage = Stage(
            home=folder / "home",
            work=folder / "work",
            programs=programs,
            base_url=f"http://127.0.0.1:{up.port}/s/{ticket.id}",
            api_key=ticket.api_key,
            model="m",
            path=path,
        )
        stage.home.mkdir(parents=True)
        stage.work.mkdir()
        problems = await _run_commands(client, stage, path, folder / "client.log")
        await _wait_for_calls(up, ticket.id)
        record = await up.gateway.finalize(ticket.id)
        (folder / "record.json").write_bytes(encode(record))
        (folder / "engine_calls.json").write_bytes(encode(up.engine_calls))
        (folder / "requests.json").write_bytes(encode(up.faults.requests))
        verdict = judge(up.engine_calls, record, scenario.branches, scenario.excluded, up.script.places)
        problems += _scenario_problems(scenario, up, record)
        problems += await asyncio.to_thread(prompt_problems, up)
        problems += client.inspect(stage, up.engine_calls)
        return structs.replace(verdict, problems=(*problems, *verdict.problems))


def prompt_problems(up: GatewayUnderTest) -> list[str]:
    """Differences between the engine's prompts and the client's requests."""
    return Oracle(up.renderer, up.faults.requests, up.engine_calls, up.script.replies).problems


@asynccontextmanager
async def gateway_under_test(
    scenario: Scenario, folder: Path, family: TemplateFamily = CHATML, template: str = TEMPLATE
) -> AsyncIterator[GatewayUnderTest]:
    """Run a gateway, its scripted engine and the proxy for one scenario."""
    model = write_model(folder / "model", template)
    script = Script(scenario, factory.vocabulary_of(model), family)
    engine = factory.load("engine", "scripted", factory.ENGINES)(script, max_context=MAX_CONTEXT)
    faults = FaultPlan(scenario.faults, clean=scenario.clean)
    async with run_gateway(engine, model, folder) as up, fault_proxy(up.address, faults) as port:
        yield GatewayUnderTest(up.gateway, engine.recorded, script, faults, port, Renderer(model, family))


class RunningGateway(Struct, frozen=True):
    """Running gateway on loopback."""

    gateway: Gateway
    """Admin client of the gateway."""
    address: tuple[str, int]
    """Host and port."""
    admin_key: str
    """Key of the admin API."""

    @property
    def url(self) -> str:
        """Base URL of the gateway."""
        return f"http://{self.address[0]}:{self.address[1]}"


@asynccontextmanager
async def run_gateway(engine: Any, model: Path, folder: Path) -> AsyncIterator[RunningGateway]:
    """Run a gateway for one engine on a free port; its store is in `folder`."""
    async with factory.gateway_for(engine, model, folder / "store") as (client, address, admin_key):
        yield RunningGateway(client, address, admin_key)


async def _run_commands(client: Client, stage: Stage, path: str, log: Path) -> list[str]:
    for command in client.commands(stage):
        if problem := await run(command, stage, path, log, client.timeout_s):
            return [problem]
    return []


async def _wait_for_calls(up: GatewayUnderTest, session_id: str) -> None:
    """Wait up to `SETTLE_S` seconds until the calls of disconnected clients have ended."""
    for _ in range(int(SETTLE_S / 0.1)):
        if not (await up.gateway.state(session_id)).dangling:
            return
        await asyncio.sleep(0.1)


def _scenario_problems(scenario: Scenario, up: GatewayUnderTest, record: SessionRecord) -> list[str]:
    """Problems of the run itself: unexpected prompts, unused replies or faults, too few turns."""
    problems = [f"unexpected prompt: {prompt}" for prompt in up.script.unexpected_prompts]
    problems += [f"no request at marker {where!r}" for where in up.script.unused_replies()]
    problems += [
        f"the fault at marker {at!r} was not injected"
        for at in scenario.faults
        if at not in up.faults.injected
    ]
    if (turns := len(record.turns)) < FEWEST_TURNS:
        problems.append(f"{turns} turns, expected at least {FEWEST_TURNS}")
    return problems
