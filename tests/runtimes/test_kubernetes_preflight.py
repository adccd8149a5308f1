"""What is wrong with a cluster, or with what is asked of it, is said before the first rollout."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from afield.errors import UsageError
from afield.runtimes.kubernetes.preflight import NEEDED
from afield.runtimes.kubernetes.runtime import KubernetesRuntime
from afield.settings.runtimes import KubernetesOptions
from support.fake_kube import NAMESPACE, FakeKube
from support.kubernetes import asked, fake_kube, jobs, runtime_on
from support.paths import ROOT

pytestmark = pytest.mark.anyio


@pytest.fixture
async def kube(tmp_path: Path) -> AsyncIterator[FakeKube]:
    async with fake_kube(tmp_path / "kube") as kube:
        yield kube


def _certify(certificate: Path, key: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=fake", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-addext", "keyUsage=critical,digitalSignature,keyCertSign"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)


async def refused(runtime: KubernetesRuntime) -> str:
    async with runtime:
        with pytest.raises(UsageError) as caught:
            await runtime.check()
    return str(caught.value)


async def test_a_cluster_that_will_do_passes_and_nothing_is_made(kube: FakeKube) -> None:
    kube.named = {"serviceaccounts": {"agents"}, "secrets": {"tools", "pull"}, "runtimeclasses": {"gvisor"}}
    more = {"service_account": "agents", "secret": "tools", "pull_secret": "pull", "runtime_class": "gvisor"}
    async with runtime_on(kube, **more) as runtime:
        await runtime.check()
    assert asked(kube, "POST", "/jobs", dryRun="All") == 1
    assert jobs(kube) == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"image": ""}, "no image"),
        ({"service_account": "nobody"}, "no service account 'nobody' in namespace 'agents'"),
        ({"secret": "nothing"}, "no secret 'nothing'"),
        ({"pull_secret": "closed"}, "no pull secret 'closed'"),
        ({"runtime_class": "gvisor"}, "no runtime class 'gvisor'"),
        ({"labels": {"team": "not a label!"}}, "'not a label!'"),
    ],
)
async def test_what_is_missing_is_named(kube: FakeKube, more: dict[str, Any], said: str) -> None:
    assert said in await refused(runtime_on(kube, **more))


async def test_a_namespace_that_does_not_exist_is_named(kube: FakeKube, tmp_path: Path) -> None:
    options = KubernetesOptions(image="a:1", namespace="nowhere", kubeconfig=str(kube.kubeconfig))
    assert "no namespace 'nowhere'" in await refused(KubernetesRuntime(options, name="r", log_dir=tmp_path))


async def test_what_we_may_not_do_is_listed_with_the_remedy(kube: FakeKube) -> None:
    kube.denied = {("create", "jobs"), ("create", "pods/proxy"), ("watch", "pods")}
    said = await refused(runtime_on(kube))
    for one in ("create jobs", "create pods/proxy", "watch pods", "docs/how-to/kubernetes.md"):
        assert one in said
    assert "delete jobs" not in said


async def test_what_we_may_not_look_at_is_not_judged(kube: FakeKube) -> None:
    kube.denied = {("get", "secrets"), ("get", "serviceaccounts")}
    async with runtime_on(kube, secret="hidden", service_account="hidden") as runtime:
        await runtime.check()


async def test_a_full_quota_is_no_mistake(kube: FakeKube) -> None:
    kube.quota_jobs = 0
    async with runtime_on(kube) as runtime:
        await runtime.check()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there is no kubeconfig"),
        ("", "cannot be used"),
        ("not: [yaml", "cannot be used"),
        ("just words", "cannot be used"),
        ("{}", "cannot be used"),
    ],
)
async def test_an_invalid_kubeconfig_is_named_in_the_error(
    tmp_path: Path, text: str | None, said: str
) -> None:
    path = tmp_path / "no-config"
    if text is not None:
        path.write_text(text)
    options = KubernetesOptions(image="a:1", kubeconfig=str(path))
    summary = await refused(KubernetesRuntime(options, name="r", log_dir=tmp_path))
    assert said in summary and str(path) in summary


async def test_a_context_that_does_not_exist_is_named(kube: FakeKube) -> None:
    assert "'elsewhere'" in await refused(runtime_on(kube, context="elsewhere"))


async def test_a_token_that_is_not_known_is_reported(kube: FakeKube) -> None:
    config = json.loads(kube.kubeconfig.read_text())
    config["users"][0]["user"]["token"] = "stale"
    kube.kubeconfig.write_text(json.dumps(config))
    assert "log in again" in await refused(runtime_on(kube))


async def test_a_server_that_does_not_exist_is_reported(kube: FakeKube) -> None:
    config = json.loads(kube.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:9"
    kube.kubeconfig.write_text(json.dumps(config))
    assert "http://127.0.0.1:9 does not answer" in await refused(runtime_on(kube))


async def test_a_server_is_spoken_to_in_secret_and_only_if_it_is_the_right_one(tmp_path: Path) -> None:
    for who in ("right", "wrong"):
        _certify(tmp_path / f"{who}.pem", tmp_path / f"{who}.key")
    async with fake_kube(tmp_path / "kube", (tmp_path / "right.pem", tmp_path / "right.key")) as kube:
        async with runtime_on(kube) as runtime:
            await runtime.check()
        config = json.loads(kube.kubeconfig.read_text())
        other = base64.b64encode((tmp_path / "wrong.pem").read_bytes()).decode()
        config["clusters"][0]["cluster"]["certificate-authority-data"] = other
        kube.kubeconfig.write_text(json.dumps(config))
        assert "certificate verify failed" in await refused(runtime_on(kube))


async def test_a_token_is_read_again_when_it_has_changed(kube: FakeKube, tmp_path: Path) -> None:
    """As clusters rotate them under a process that runs for days."""
    config = json.loads(kube.kubeconfig.read_text())
    token = tmp_path / "token"
    token.write_text("stale")
    config["users"][0]["user"] = {"tokenFile": str(token)}
    kube.kubeconfig.write_text(json.dumps(config))
    options = KubernetesOptions(image="a:1", namespace=NAMESPACE, kubeconfig=str(kube.kubeconfig))
    async with KubernetesRuntime(options, name="r", log_dir=tmp_path, token_s=0.0) as runtime:
        with pytest.raises(UsageError, match="log in again"):
            await runtime.check()
        token.write_text("not-a-secret")
        await runtime.check()


@pytest.mark.parametrize(("name", "value"), [("port", 0), ("ttl_s", -1), ("job_deadline_s", 0)])
def test_numbers_that_make_no_sense_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        KubernetesOptions(**{name: value})


def test_the_role_in_the_docs_is_what_is_needed() -> None:
    page = ROOT / "docs" / "how-to" / "kubernetes.md"
    [manifest] = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.S)
    role, binding = yaml.safe_load_all(manifest)
    given = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    needed = {(group, f"{kind}/{sub}".rstrip("/"), verb) for group, kind, sub, verb in NEEDED}
    assert given == needed | {("", "events", "list")}
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
