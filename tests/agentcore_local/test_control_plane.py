"""The control plane of the local AgentCore server: what can be made, changed, and what is refused."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import anyio
import pytest

from afield.agentcore_local.control_plane import Account
from afield.agentcore_local.faults import InjectedFault
from afield.agentcore_local.images import AgentImage, parse
from afield.errors import UsageError
from support.agentcore_server import ROLE, URI, agentcore_server, session_id

pytestmark = pytest.mark.anyio
ARTIFACT = {"containerConfiguration": {"containerUri": URI}}


async def test_a_runtime_is_creating_then_ready_and_shows_what_it_was_made_of() -> None:
    async with agentcore_server(
        account=Account(ready_s=0.3, region="eu-west-1", account="999999999999")
    ) as caller:
        made = await caller.create(
            description="adds", environmentVariables={"A": "1"}, tags={"team": "seven"}
        )
        runtime = made["agentRuntimeId"]
        assert made["status"] == "CREATING"
        assert (
            made["agentRuntimeArn"] == f"arn:aws:bedrock-agentcore:eu-west-1:999999999999:runtime/{runtime}"
        )
        with pytest.raises(caller.data.exceptions.ResourceNotFoundException, match="DEFAULT"):
            await caller.invoke({})
        assert await caller.wait_created(runtime) == "READY"
        got = await caller.call(caller.control.get_agent_runtime, agentRuntimeId=runtime)
        assert got["agentRuntimeName"] == "math"
        assert got["agentRuntimeVersion"] == "1"
        assert got["roleArn"] == ROLE
        assert got["agentRuntimeArtifact"] == ARTIFACT
        assert got["networkConfiguration"] == {"networkMode": "PUBLIC"}
        assert got["lifecycleConfiguration"] == {"idleRuntimeSessionTimeout": 900, "maxLifetime": 28800}
        assert got["environmentVariables"] == {"A": "1"}
        assert got["description"] == "adds"
        tags = await caller.call(caller.control.list_tags_for_resource, resourceArn=caller.arn)
        assert tags["tags"] == {"team": "seven"}


async def test_tags_come_and_go() -> None:
    async with agentcore_server() as caller:
        await caller.ready()
        control = caller.control
        await caller.call(control.tag_resource, resourceArn=caller.arn, tags={"a": "1", "b": "2", "c": "3"})
        await caller.call(control.untag_resource, resourceArn=caller.arn, tagKeys=["a", "b"])
        assert (await caller.call(control.list_tags_for_resource, resourceArn=caller.arn))["tags"] == {
            "c": "3"
        }


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("agentRuntimeName", {"agentRuntimeName": "1st-agent"}),
    ("roleArn", {"roleArn": "me"}),
    ("containerUri", {"agentRuntimeArtifact": {"containerConfiguration": {"containerUri": "nowhere"}}}),
    (
        "does not exist here",
        {"agentRuntimeArtifact": {"containerConfiguration": {"containerUri": URI.replace("math", "other")}}},
    ),
    ("agentRuntimeArtifact", {"agentRuntimeArtifact": {}}),
    (
        "--code-root",
        {
            "agentRuntimeArtifact": {
                "codeConfiguration": {
                    "code": {"s3": {"bucket": "bucket", "prefix": "x"}},
                    "runtime": "PYTHON_3_11",
                    "entryPoint": ["a.py"],
                }
            }
        },
    ),
    ("networkMode", {"networkConfiguration": {"networkMode": "MOON"}}),
    ("networkModeConfig", {"networkConfiguration": {"networkMode": "VPC"}}),
    (
        "subnets",
        {
            "networkConfiguration": {
                "networkMode": "VPC",
                "networkModeConfig": {"subnets": ["net"], "securityGroups": ["sg-12345678"]},
            }
        },
    ),
    ("idleRuntimeSessionTimeout", {"lifecycleConfiguration": {"idleRuntimeSessionTimeout": 59}}),
    ("maxLifetime", {"lifecycleConfiguration": {"maxLifetime": 28801}}),
    (
        "more than maxLifetime",
        {"lifecycleConfiguration": {"idleRuntimeSessionTimeout": 200, "maxLifetime": 100}},
    ),
    ("serverProtocol", {"protocolConfiguration": {"serverProtocol": "MCP"}}),
    (
        "does not model file systems",
        {"filesystemConfigurations": [{"sessionStorage": {"mountPath": "/mnt/a"}}]},
    ),
    ("environmentVariables", {"environmentVariables": {str(i): "x" for i in range(51)}}),
    ("environmentVariables[...]", {"environmentVariables": {"A": "x\0"}}),
    ("environmentVariables: Expected", {"environmentVariables": {"A=B": "x"}}),
    ("containerUri: is required", {"agentRuntimeArtifact": {"containerConfiguration": {}}}),
]


@pytest.mark.parametrize(("named", "change"), WRONG, ids=[name for name, _ in WRONG])
async def test_wrong_values_are_refused_by_name(named: str, change: dict[str, Any]) -> None:
    async with agentcore_server() as caller:
        with pytest.raises(caller.control.exceptions.ValidationException) as caught:
            await caller.create(**change)
        said = caught.value.response
        assert named in said["Error"]["Message"]
        assert said["reason"] == "FieldValidationFailed"
        assert said["fieldList"]
        listed = await caller.call(caller.control.list_agent_runtimes)
        assert listed["agentRuntimes"] == []


async def test_a_vpc_with_its_parts_is_taken() -> None:
    vpc = {"subnets": ["subnet-12345678"], "securityGroups": ["sg-12345678"]}
    network = {"networkMode": "VPC", "networkModeConfig": vpc}
    async with agentcore_server() as caller:
        made = await caller.create(networkConfiguration=network)
        got = await caller.call(caller.control.get_agent_runtime, agentRuntimeId=made["agentRuntimeId"])
        assert got["networkConfiguration"] == network


async def test_a_name_is_taken_once_and_a_repeated_request_is_one() -> None:
    token = str(uuid.uuid4())
    async with agentcore_server() as caller:
        first = await caller.create(clientToken=token)
        assert (await caller.create(clientToken=token))["agentRuntimeId"] == first["agentRuntimeId"]
        with pytest.raises(caller.control.exceptions.ValidationException) as caught:
            await caller.create("other", clientToken=token)
        assert caught.value.response["reason"] == "IdempotentParameterMismatchException"
        with pytest.raises(caller.control.exceptions.ConflictException, match="math exists"):
            await caller.create()


async def test_updates_and_endpoints_that_are_repeated_are_one_each() -> None:
    async with agentcore_server() as caller:
        await caller.ready()
        runtime, control = caller.arn.rpartition("/")[2], caller.control
        wish = {"agentRuntimeId": runtime, "agentRuntimeArtifact": ARTIFACT, "roleArn": ROLE}
        tokens = [str(uuid.uuid4()) for _ in range(3)]
        for _ in range(2):
            updated = await caller.call(control.update_agent_runtime, clientToken=tokens[0], **wish)
            assert updated["agentRuntimeVersion"] == "2"
            await caller.wait_created(runtime)
        named = {"agentRuntimeId": runtime, "name": "prod", "clientToken": tokens[1]}
        made = [await caller.call(control.create_agent_runtime_endpoint, **named) for _ in range(2)]
        assert made[0]["createdAt"] == made[1]["createdAt"]
        with pytest.raises(control.exceptions.ValidationException, match="another request"):
            await caller.call(control.create_agent_runtime_endpoint, **{**named, "name": "test"})
        with pytest.raises(control.exceptions.ConflictException, match="prod already"):
            await caller.call(
                control.create_agent_runtime_endpoint, **{**named, "clientToken": str(uuid.uuid4())}
            )
        with pytest.raises(control.exceptions.ValidationException, match="name: is required"):
            await caller.call(
                control.create_agent_runtime_endpoint, agentRuntimeId=runtime, tags={"name": "x"}
            )
        moved = {"agentRuntimeId": runtime, "endpointName": "prod", "agentRuntimeVersion": "1"}
        for _ in range(2):
            await caller.call(control.update_agent_runtime_endpoint, clientToken=tokens[2], **moved)
        del moved["agentRuntimeVersion"]
        told = await caller.call(control.update_agent_runtime_endpoint, description="stays", **moved)
        assert (told["targetVersion"], told["liveVersion"]) == ("1", "1")


async def test_a_token_is_free_again_when_its_runtime_is_gone() -> None:
    token = str(uuid.uuid4())
    async with agentcore_server() as caller:
        first = (await caller.create(clientToken=token))["agentRuntimeId"]
        await caller.wait_created(first)
        await caller.call(caller.control.delete_agent_runtime, agentRuntimeId=first)
        with anyio.fail_after(10):
            while (await caller.call(caller.control.list_agent_runtimes))["agentRuntimes"]:
                await anyio.sleep(0.02)
        assert (await caller.create(clientToken=token))["agentRuntimeId"] != first


async def test_an_endpoint_has_tags_of_its_own() -> None:
    async with agentcore_server() as caller:
        await caller.ready(tags={"of": "runtime"})
        runtime, control = caller.arn.rpartition("/")[2], caller.control
        made = await caller.call(
            control.create_agent_runtime_endpoint, agentRuntimeId=runtime, name="prod", tags={"of": "prod"}
        )
        arn = made["agentRuntimeEndpointArn"]
        await caller.call(control.tag_resource, resourceArn=arn, tags={"more": "1"})
        tags = await caller.call(control.list_tags_for_resource, resourceArn=arn)
        assert tags["tags"] == {"of": "prod", "more": "1"}
        with pytest.raises(control.exceptions.ServiceQuotaExceededException, match="50 tags"):
            await caller.call(control.tag_resource, resourceArn=arn, tags={str(n): "" for n in range(49)})
        await caller.call(control.untag_resource, resourceArn=arn, tagKeys=["of", "more"])
        assert (await caller.call(control.list_tags_for_resource, resourceArn=arn))["tags"] == {}
        assert (await caller.call(control.list_tags_for_resource, resourceArn=caller.arn))["tags"]
        with pytest.raises(control.exceptions.ResourceNotFoundException, match="nope"):
            await caller.call(control.list_tags_for_resource, resourceArn=arn.replace("prod", "nope"))


async def test_an_update_makes_a_version_and_running_sessions_keep_theirs() -> None:
    async with agentcore_server(account=Account(ready_s=0.2)) as caller:
        await caller.ready(environmentVariables={"FLAVOUR": "plum"})
        runtime = caller.arn.rpartition("/")[2]
        control, old, new = caller.control, session_id(), session_id()
        assert (await caller.invoke({"do": "env"}, old))["FLAVOUR"] == "plum"
        wish = {
            "agentRuntimeArtifact": ARTIFACT,
            "roleArn": ROLE,
            "environmentVariables": {"FLAVOUR": "pear"},
        }
        updated = await caller.call(control.update_agent_runtime, agentRuntimeId=runtime, **wish)
        assert (updated["agentRuntimeVersion"], updated["status"]) == ("2", "UPDATING")
        with pytest.raises(control.exceptions.ConflictException, match="UPDATING"):
            await caller.call(control.update_agent_runtime, agentRuntimeId=runtime, **wish)
        assert await caller.wait_created(runtime) == "READY"
        assert (await caller.invoke({"do": "env"}, old))["FLAVOUR"] == "plum"
        assert (await caller.invoke({"do": "env"}, new))["FLAVOUR"] == "pear"
        versions = await caller.call(control.list_agent_runtime_versions, agentRuntimeId=runtime)
        assert [one["agentRuntimeVersion"] for one in versions["agentRuntimes"]] == ["2", "1"]
        first = await caller.call(control.get_agent_runtime, agentRuntimeId=runtime, agentRuntimeVersion="1")
        assert first["environmentVariables"] == {"FLAVOUR": "plum"}


async def test_an_endpoint_stays_at_its_version_while_default_moves_on() -> None:
    async with agentcore_server() as caller:
        await caller.ready(environmentVariables={"FLAVOUR": "plum"})
        runtime, control = caller.arn.rpartition("/")[2], caller.control
        made = await caller.call(
            control.create_agent_runtime_endpoint,
            agentRuntimeId=runtime,
            name="prod",
            agentRuntimeVersion="1",
        )
        assert (made["targetVersion"], made["endpointName"]) == ("1", "prod")
        wish = {
            "agentRuntimeArtifact": ARTIFACT,
            "roleArn": ROLE,
            "environmentVariables": {"FLAVOUR": "pear"},
        }
        await caller.call(control.update_agent_runtime, agentRuntimeId=runtime, **wish)
        await caller.wait_created(runtime)
        session = session_id()
        assert (await caller.invoke({"do": "env"}, session, qualifier="prod"))["FLAVOUR"] == "plum"
        assert (await caller.invoke({"do": "env"}, session))["FLAVOUR"] == "pear"
        named = {"agentRuntimeId": runtime, "endpointName": "prod"}
        await caller.call(control.update_agent_runtime_endpoint, agentRuntimeVersion="2", **named)
        shown = await caller.call(control.get_agent_runtime_endpoint, **named)
        assert (shown["liveVersion"], shown["status"]) == ("2", "READY")
        listed = await caller.call(control.list_agent_runtime_endpoints, agentRuntimeId=runtime)
        assert [one["name"] for one in listed["runtimeEndpoints"]] == ["DEFAULT", "prod"]
        await caller.call(control.delete_agent_runtime_endpoint, **named)
        with pytest.raises(caller.data.exceptions.ResourceNotFoundException, match="prod"):
            await caller.invoke({}, qualifier="prod")
        with pytest.raises(control.exceptions.ConflictException, match="DEFAULT"):
            named = {"agentRuntimeId": runtime, "endpointName": "DEFAULT"}
            await caller.call(control.delete_agent_runtime_endpoint, **named)


async def test_a_deleted_runtime_is_gone_with_its_sessions() -> None:
    async with agentcore_server() as caller:
        await caller.ready()
        await caller.invoke({})
        runtime = caller.arn.rpartition("/")[2]
        deleted = await caller.call(caller.control.delete_agent_runtime, agentRuntimeId=runtime)
        assert deleted["status"] == "DELETING"
        await caller.wait_sessions(0)
        with anyio.fail_after(60), pytest.raises(caller.control.exceptions.ResourceNotFoundException):
            while True:
                await caller.call(caller.control.get_agent_runtime, agentRuntimeId=runtime)
        with pytest.raises(caller.data.exceptions.ResourceNotFoundException):
            await caller.invoke({})


async def test_long_lists_come_in_pages() -> None:
    def names(control: Any) -> list[str]:
        pages = control.get_paginator("list_agent_runtimes").paginate(PaginationConfig={"PageSize": 2})
        return [one["agentRuntimeName"] for page in pages for one in page["agentRuntimes"]]

    async with agentcore_server() as caller:
        wanted = [f"agent{i}" for i in range(5)]
        for name in wanted:
            await caller.create(name)
        assert await caller.call(names, control=caller.control) == wanted


async def test_a_program_that_does_not_exist_ends_in_create_failed_with_the_reason(tmp_path: Path) -> None:
    gone = tmp_path / "gone.py"
    async with agentcore_server(images={"math": AgentImage(script=str(gone))}) as caller:
        assert await caller.ready() == "CREATE_FAILED"
        runtime = caller.arn.rpartition("/")[2]
        got = await caller.call(caller.control.get_agent_runtime, agentRuntimeId=runtime)
        assert "gone.py" in got["failureReason"]
        with pytest.raises(caller.data.exceptions.ResourceNotFoundException):
            await caller.invoke({})


async def test_injected_create_fault_ends_in_create_failed() -> None:
    async with agentcore_server(faults={"create": InjectedFault(1.0)}) as caller:
        assert await caller.ready() == "CREATE_FAILED"


@pytest.mark.parametrize("spec", ["math", "=app.py", "math=", "math=nowhere.py", "math=nowhere.py:agent"])
def test_images_that_stand_for_nothing_are_refused(spec: str) -> None:
    with pytest.raises(UsageError, match="--image"):
        parse(spec)
