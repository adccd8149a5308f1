"""Deploys the AgentCore agent runtime and waits until it is ready.

1. With an ARN, the runtime is used unchanged.
2. With a name, it is created from image and role, or updated if its settings differ; other settings are kept.
An image pushed again under the same tag is not detected: use another tag, or a digest.
3. The environment never contains endpoints or keys of a run: they travel in payloads.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from afield.errors import UsageError
from afield.runtimes.agentcore.api import AgentCoreApi, AgentCoreNoAnswer, AgentCoreRefused
from afield.settings.runtimes import AgentCoreOptions

log = logging.getLogger(__name__)

LOOK_S = (0.2, 3.0)  # interval between checks until ready, in seconds: first value and maximum
NAME = re.compile(r"^[a-zA-Z][a-zA-Z0-9_]{0,47}$")
SHORTEST_S, LONGEST_S = 60, 28_800
# Settings that this module does not manage; an update must repeat them, or they are lost.
KEPT = (
    "description",
    "authorizerConfiguration",
    "requestHeaderConfiguration",
    "protocolConfiguration",
    "filesystemConfigurations",
    "metadataConfiguration",
)


class Deployed(Struct, frozen=True):
    """Agent runtime that is ready."""

    arn: str
    """ARN of the agent runtime."""
    lifetime_s: float
    """Maximum lifetime of a session, in seconds."""


def check_options(options: AgentCoreOptions) -> None:
    """Validate options without calling the service; raises UsageError."""
    if options.arn:
        if not options.arn.startswith("arn:") or "/" not in options.arn:
            raise UsageError(
                f"arn {options.arn!r} must be of the form arn:aws:bedrock-agentcore:...:runtime/ID"
            )
        return
    for name in ("agent_name", "container_uri", "role_arn"):
        if not getattr(options, name):
            raise UsageError(
                f"agentcore needs {name}: give arn for a runtime that exists,"
                " or agent_name, container_uri and role_arn to make one"
            )
    if not NAME.match(options.agent_name):
        raise UsageError(
            f"agent_name {options.agent_name!r} must begin with a letter and have letters, digits and _ only,"
            " 48 at most"
        )
    if bool(options.subnets) != bool(options.security_groups):
        raise UsageError("subnets and security_groups go together: give both, or neither")
    for name in ("idle_s", "max_rollout_s"):
        if not SHORTEST_S <= getattr(options, name) <= LONGEST_S:
            value = getattr(options, name)
            raise UsageError(f"{name} = {value} must be from {SHORTEST_S} to {LONGEST_S} seconds")
    if options.idle_s > options.max_rollout_s:
        raise UsageError(f"idle_s = {options.idle_s} is more than max_rollout_s = {options.max_rollout_s}")


async def deploy(api: AgentCoreApi, options: AgentCoreOptions) -> Deployed:
    """Create or update the agent runtime as necessary, and wait until it is ready.

    Raises UsageError if that fails or takes longer than `ready_s` seconds.
    """
    check_options(options)
    try:
        async with asyncio.timeout(options.ready_s):
            return await _deployed(api, options)
    except TimeoutError as error:
        agent_runtime = options.arn or options.agent_name
        raise UsageError(
            f"{agent_runtime} was not READY within ready_s = {options.ready_s:g} seconds"
        ) from error
    except AgentCoreNoAnswer as error:
        where = options.endpoint_url or "AWS"
        raise UsageError(
            f"{where} does not answer ({error}); is endpoint_url right, and is it running?"
        ) from error
    except AgentCoreRefused as error:
        raise UsageError(f"{error}{_remedy(error)}") from error


async def find(api: AgentCoreApi, name: str) -> dict[str, Any] | None:
    """Find an agent runtime by name; None if there is none."""
    page: dict[str, Any] = {}
    while True:
        more = {"nextToken": page["nextToken"]} if page.get("nextToken") else {}
        page = await api.ask("list_agent_runtimes", maxResults=100, **more)
        for summary in page["agentRuntimes"]:
            if summary["agentRuntimeName"] == name:
                return summary
        if not page.get("nextToken"):
            return None


async def _deployed(api: AgentCoreApi, options: AgentCoreOptions) -> Deployed:
    runtime_id = options.arn.rpartition("/")[2]
    if not options.arn:
        runtime_id = await _find_or_create(api, options)
    runtime = await _ready(api, runtime_id)
    if not options.arn and not _same(runtime, _wanted(options)):
        log.info("%s is updated", options.agent_name)
        kept = {name: runtime[name] for name in KEPT if runtime.get(name)}
        await api.ask("update_agent_runtime", agentRuntimeId=runtime_id, **kept, **_wanted(options))
        runtime = await _ready(api, runtime_id)
    await _serving(api, runtime_id, options.qualifier, str(runtime.get("agentRuntimeVersion", "")))
    lifetime = runtime.get("lifecycleConfiguration", {}).get("maxLifetime", LONGEST_S)
    return Deployed(runtime["agentRuntimeArn"], float(lifetime))


async def _find_or_create(api: AgentCoreApi, options: AgentCoreOptions) -> str:
    if runtime := await find(api, options.agent_name):
        return runtime["agentRuntimeId"]
    log.info("%s is created", options.agent_name)
    try:
        created = await api.ask(
            "create_agent_runtime", agentRuntimeName=options.agent_name, **_wanted(options)
        )
    except AgentCoreRefused as error:
        # Another process created it concurrently.
        if error.status != 409 or not (runtime := await find(api, options.agent_name)):
            raise
        return runtime["agentRuntimeId"]
    return created["agentRuntimeId"]


def _wanted(options: AgentCoreOptions) -> dict[str, Any]:
    network: dict[str, Any] = {"networkMode": "PUBLIC"}
    if options.subnets:
        groups = {"subnets": list(options.subnets), "securityGroups": list(options.security_groups)}
        network = {"networkMode": "VPC", "networkModeConfig": groups}
    return {
        "agentRuntimeArtifact": {"containerConfiguration": {"containerUri": options.container_uri}},
        "roleArn": options.role_arn,
        "networkConfiguration": network,
        "lifecycleConfiguration": {
            "idleRuntimeSessionTimeout": options.idle_s,
            "maxLifetime": options.max_rollout_s,
        },
        "environmentVariables": dict(options.env),
    }


def _same(deployed: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether the deployed settings contain the wanted ones. The environment must be equal."""
    if (deployed.get("environmentVariables") or {}) != wanted["environmentVariables"]:
        return False
    return all(
        _covers(deployed.get(name), value) for name, value in wanted.items() if name != "environmentVariables"
    )


def _covers(deployed: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return isinstance(deployed, dict) and all(
            _covers(deployed.get(name), one) for name, one in wanted.items()
        )
    if isinstance(wanted, list):
        return isinstance(deployed, list) and sorted(deployed) == sorted(wanted)
    return deployed == wanted


async def _ready(api: AgentCoreApi, runtime_id: str) -> dict[str, Any]:
    pause_s, longest_s = LOOK_S
    while True:
        runtime = await api.ask("get_agent_runtime", agentRuntimeId=runtime_id)
        status = runtime["status"]
        if status == "READY":
            return runtime
        if "FAILED" in status or status == "DELETING":
            reason = runtime.get("failureReason") or "no reason was given"
            raise UsageError(f"{runtime_id} is {status}: {reason}; correct it, or delete it and try again")
        await asyncio.sleep(pause_s)
        pause_s = min(1.5 * pause_s, longest_s)


async def _serving(api: AgentCoreApi, runtime_id: str, qualifier: str, version: str) -> None:
    """Wait until the endpoint is ready; DEFAULT must also serve the newest version."""
    pause_s, longest_s = LOOK_S
    while True:
        endpoint = await api.ask(
            "get_agent_runtime_endpoint", agentRuntimeId=runtime_id, endpointName=qualifier
        )
        status = endpoint["status"]
        if "FAILED" in status:
            reason = endpoint.get("failureReason") or "no reason was given"
            raise UsageError(f"endpoint {qualifier} of {runtime_id} is {status}: {reason}")
        if status == "READY" and (qualifier != "DEFAULT" or endpoint.get("liveVersion") == version):
            return
        await asyncio.sleep(pause_s)
        pause_s = min(1.5 * pause_s, longest_s)


def _remedy(error: AgentCoreRefused) -> str:
    match error.status:
        case 403:
            return "; allow bedrock-agentcore:*AgentRuntime* and iam:PassRole for these credentials"
        case 404:
            return "; is arn right, and qualifier the name of one of its endpoints?"
    return ""
