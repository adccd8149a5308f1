"""Kubernetes manifests: API schemas, references between objects, settings, Pod Security, rights."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.docs.test_reference import routes

from afield.cli.main import parser
from afield.factory.gateway import start_timeout
from afield.runtimes.kubernetes.objects import job_for
from afield.runtimes.kubernetes.preflight import NEEDED
from afield.settings.gateway import GatewaySettings
from afield.settings.relay import RelaySettings
from afield.settings.runtimes import KubernetesOptions
from afield.settings.train import TrainConfig
from afield.settings.values import check_keys, converted
from support.manifests import (
    KUBERNETES,
    OVERLAYS,
    Manifest,
    arguments,
    config,
    container,
    mount_paths,
    nested,
    of_kind,
    pod,
    rendered,
    volumes,
    workload,
)
from support.pages import DOCS, SOURCE, blocks
from support.paths import ROOT

VERSIONS = ("1.30", "1.37")
"""Oldest Kubernetes version that the manifests are for, and the newest with a schema."""
GATEWAYS = [overlay for overlay in OVERLAYS if overlay != "relay"]
SETTINGS: dict[str, Any] = {"gateway": GatewaySettings, "relay": RelaySettings}


def invalid(manifest: Manifest, version: str) -> str:
    """Why the API server's schema refuses an object, unknown fields included; empty if it does not."""
    import kubernetes_validate

    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{manifest['kind']} {manifest['metadata']['name']}: {error.message} at {[*error.path]}"
    return ""


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_valid_for_the_api(version: str) -> None:
    objects = {str(one): one for overlay in OVERLAYS for one in rendered(overlay)}
    assert len(objects) > 15
    assert [problem for one in objects.values() if (problem := invalid(one, version))] == []


def test_unknown_field_and_wrong_type_are_refused() -> None:
    gateway = workload("overlays/cluster")
    assert "replica" in invalid({**gateway, "spec": {**gateway["spec"], "replica": 1}}, VERSIONS[1])
    assert "one" in invalid({**gateway, "spec": {**gateway["spec"], "replicas": "one"}}, VERSIONS[1])


# --- references ----------------------------------------------------------------------------------


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_and_targets_name_the_workload(overlay: str) -> None:
    target, labels = workload(overlay), pod(overlay)["metadata"]["labels"]
    namespace = target["metadata"]["namespace"]
    selectors = [one["spec"]["selector"] for one in of_kind(overlay, "Service")]
    budgets = of_kind(overlay, "PodDisruptionBudget")
    selectors += [one["spec"]["selector"]["matchLabels"] for one in [target, *budgets]]
    policies = [p for p in of_kind(overlay, "NetworkPolicy") if p["metadata"]["namespace"] == namespace]
    selectors += [policy["spec"]["podSelector"]["matchLabels"] for policy in policies]
    assert len(selectors) >= 4
    assert all(selector and selects(selector, labels) for selector in selectors)
    for scaler in of_kind(overlay, "HorizontalPodAutoscaler"):
        reference = scaler["spec"]["scaleTargetRef"]
        assert (reference["kind"], reference["name"]) == (target["kind"], target["metadata"]["name"])
        assert "replicas" not in target["spec"]
        assert scaler["spec"]["behavior"]["scaleDown"]["selectPolicy"] == "Disabled"
    namespaces = {one["metadata"]["name"] for one in of_kind(overlay, "Namespace")}
    assert {one["metadata"].get("namespace") for one in rendered(overlay)} - {None} == namespaces


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ports_volumes_and_accounts_exist(overlay: str) -> None:
    ports = {port["name"]: port["containerPort"] for port in container(overlay)["ports"]}
    name, values = config(overlay)
    settings = converted(values[name.removesuffix(".toml")], SETTINGS[name.removesuffix(".toml")], name)
    assert list(ports.values()) == [settings.port]
    for service in of_kind(overlay, "Service"):
        assert {port["targetPort"] for port in service["spec"]["ports"]} == set(ports)
    probes = [container(overlay)[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert {probe["port"] for probe in probes} == set(ports)
    claims = [one["metadata"]["name"] for one in workload(overlay)["spec"].get("volumeClaimTemplates", [])]
    assert {*mount_paths(overlay)} == {*claims, *(volume["name"] for volume in volumes(overlay))}
    accounts = {one["metadata"]["name"] for one in of_kind(overlay, "ServiceAccount")}
    assert pod(overlay)["spec"]["serviceAccountName"] in accounts
    assert pod(overlay)["spec"]["automountServiceAccountToken"] is False


def test_network_policies_open_the_ports_that_are_used() -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind("overlays/cluster", "NetworkPolicy")}
    gateway, agents = policies["afield-gateway"], policies["afield-agents"]
    assert agents["podSelector"] == {} and {*agents["policyTypes"]} == {"Ingress", "Egress"}
    _, to_gateway = agents["egress"]
    (peer,) = to_gateway["to"]
    assert selects(peer["podSelector"]["matchLabels"], pod("overlays/cluster")["metadata"]["labels"])
    assert [port["port"] for port in to_gateway["ports"]] == [GatewaySettings(model="m").port]
    assert agents["ingress"][0]["ports"][0]["port"] == KubernetesOptions(image="i").port
    from_agents = gateway["ingress"][0]["from"][0]["namespaceSelector"]["matchLabels"]
    assert from_agents == {"kubernetes.io/metadata.name": "afield-agents"}
    engines = {
        int(engine.rpartition(":")[2]) for engine in config("overlays/cluster")[1]["gateway"]["engine"]
    }
    assert {port["port"] for port in gateway["egress"][1]["ports"]} == engines
    (relay,) = of_kind("relay", "NetworkPolicy")
    assert "egress" not in relay["spec"] and "Egress" in relay["spec"]["policyTypes"]


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_arguments_and_settings_are_those_of_the_command(overlay: str) -> None:
    name, values = config(overlay)
    command = name.removesuffix(".toml")
    words = arguments(overlay, POD_NAME="afield-gateway-0", POD_NAMESPACE="afield")
    parsed = parser().parse_args(words)
    assert not any("$(" in word for word in words)
    assert (parsed.command, parsed.config) == (command, f"{mount_paths(overlay)['config']}/{name}")
    assert [*values] == [command]
    settings = converted(values[command], SETTINGS[command], name)
    mounts = tuple(f"{path}/" for path in mount_paths(overlay).values())
    paths = [value for value in nested_strings(values[command]) if value.startswith("/")]
    assert paths and all(path.startswith(mounts) for path in paths)
    assert settings.host == "0.0.0.0"


def nested_strings(values: dict[str, Any]) -> list[str]:
    texts = [text for value in values.values() for text in (value if isinstance(value, list) else [value])]
    return [text.partition("=")[2] or text for text in texts if isinstance(text, str)]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_environment_variables_are_used(overlay: str) -> None:
    read = set(re.findall(r"AFIELD_\w+", (SOURCE / "settings" / "environment.py").read_text()))
    for variable in container(overlay).get("env", []):
        used = f"$({variable['name']})" in " ".join(container(overlay)["args"])
        assert used or variable["name"] in read, variable


@pytest.mark.parametrize("overlay", GATEWAYS)
def test_probes_of_a_gateway_ask_its_routes_and_wait_for_its_engine(overlay: str) -> None:
    spec = container(overlay)
    paths = {kind: spec[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/live", "readiness": "/health", "liveness": "/live"}
    assert {f"GET {path}" for path in paths.values()} <= routes()
    settings = converted(config(overlay)[1]["gateway"], GatewaySettings, overlay)
    probe = spec["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= start_timeout(settings)


def test_a_gateway_that_dials_out_gives_agents_the_relays_address() -> None:
    overlay = "overlays/dial-out"
    values = config(overlay)[1]["gateway"]
    assert not any("public-url" in word for word in arguments(overlay))
    assert values["relay"].startswith("https://")
    direct = config("overlays/cluster")[1]["gateway"]
    assert {key: value for key, value in values.items() if not key.startswith("relay")} == direct
    assert values["relay_cluster"] in {
        entry.partition("=")[0] for entry in config("relay")[1]["relay"]["cluster"]
    }
    (policy,) = of_kind(overlay, "NetworkPolicy")
    assert policy["spec"]["egress"][-1]["ports"] == [{"protocol": "TCP", "port": 443}]
    assert "afield-agents" not in str(policy["spec"]["ingress"])


# --- secrets, Pod Security, rights ---------------------------------------------------------------


def test_secrets_are_references_and_the_documentation_creates_them() -> None:
    page = (DOCS / "deploy" / "kubernetes.md").read_text()
    for overlay in OVERLAYS:
        assert not of_kind(overlay, "Secret")
        namespace = workload(overlay)["metadata"]["namespace"]
        for name in nested(volumes(overlay), "secretName"):
            assert re.search(rf"create secret \w+ {name} -n {namespace}\b", page), name
    for key in ("admin-key", "session-secret", "relay-secret", "lab"):
        assert f"--from-file={key}=" in page, key


def violations(spec: Manifest) -> list[str]:
    """Fields in which a pod breaks the restricted Pod Security Standard."""
    security = spec.get("securityContext", {})
    found = [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    kinds = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    found += [str(volume) for volume in spec.get("volumes", []) if not {*volume} - {"name"} <= kinds]
    for one in spec["containers"]:
        own = {**security, **one.get("securityContext", {})}
        rules = {
            "runAsNonRoot": own.get("runAsNonRoot") is True,
            "runAsUser": own.get("runAsUser") != 0,
            "seccompProfile": own.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost"),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "capabilities": own.get("capabilities", {}).get("drop") == ["ALL"]
            and {*own.get("capabilities", {}).get("add", [])} <= {"NET_BIND_SERVICE"},
            "privileged": not own.get("privileged"),
            "hostPort": not any(nested(one.get("ports", []), "hostPort")),
        }
        found += [name for name, kept in rules.items() if not kept]
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_keep_the_restricted_pod_security_standard(overlay: str) -> None:
    spec = pod(overlay)["spec"]
    assert violations(spec) == []
    assert container(overlay)["securityContext"]["readOnlyRootFilesystem"] is True
    assert container(overlay)["resources"]["requests"].keys() == {"cpu", "memory"}
    for namespace in of_kind(overlay, "Namespace"):
        assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_documented_training_runs_agents_that_the_namespace_admits() -> None:
    (text,) = [block for block in blocks(DOCS / "deploy" / "kubernetes.md", "toml") if "[train" in block]
    values = tomllib.loads(text)["train"]
    check_keys(values, TrainConfig, "the page")
    options = converted(values["kubernetes"], KubernetesOptions, "the page")
    assert options.namespace in {one["metadata"]["name"] for one in of_kind("overlays/cluster", "Namespace")}
    assert violations(job_for(options, "run", "r.1", options.image)["spec"]["template"]["spec"]) == []
    assert violations(job_for(KubernetesOptions(image="i"), "run", "r.1", "i")["spec"]["template"]["spec"])


def role_rules(role: Manifest) -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_role_has_the_rights_that_the_runtime_checks_for() -> None:
    needed = {(group, "/".join(filter(None, (kind, sub))), verb) for group, kind, sub, verb in NEEDED}
    (role,) = of_kind("overlays/cluster", "Role")
    assert role_rules(role) == needed | {("", "events", "list")}
    (binding,) = of_kind("overlays/cluster", "RoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    accounts = {one["metadata"]["name"] for one in of_kind("overlays/cluster", "ServiceAccount")}
    assert {subject["name"] for subject in binding["subjects"]} <= accounts
    (documented, _) = yaml.safe_load_all(blocks(DOCS / "how-to" / "kubernetes.md", "yaml")[0])
    assert role_rules(documented) == role_rules(role)


def test_every_manifest_is_part_of_an_overlay() -> None:
    listed: set[Path] = set()
    for file in KUBERNETES.rglob("kustomization.yaml"):
        listed |= {(file.parent / name).resolve() for name in yaml.safe_load(file.read_text())["resources"]}
    for manifest in [*KUBERNETES.rglob("*.yaml")]:
        if manifest.name != "kustomization.yaml":
            assert manifest in listed, manifest.relative_to(ROOT)
