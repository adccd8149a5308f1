"""Reads the manifests of deploy/kubernetes as `kubectl kustomize` renders them."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from support.paths import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("overlays/cluster", "overlays/dial-out", "overlays/autoscale", "relay")
Manifest = dict[str, Any]


@functools.cache
def rendered(overlay: str) -> tuple[Manifest, ...]:
    """Objects of an overlay. Skips without kubectl or kustomize; where `CI` is set, it fails."""
    commands = {"kustomize": ["kustomize", "build"], "kubectl": ["kubectl", "kustomize"]}
    command = next((words for name, words in commands.items() if shutil.which(name)), None)
    if command is None:
        reason = "neither kustomize nor kubectl is installed"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    done = subprocess.run([*command, str(KUBERNETES / overlay)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr.lower(), done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(overlay: str, *kinds: str) -> list[Manifest]:
    return [one for one in rendered(overlay) if one["kind"] in kinds]


def workload(overlay: str) -> Manifest:
    """The gateway or relay of an overlay."""
    (found,) = of_kind(overlay, "StatefulSet", "Deployment")
    return found


def pod(overlay: str) -> Manifest:
    return workload(overlay)["spec"]["template"]


def container(overlay: str) -> Manifest:
    (found,) = pod(overlay)["spec"]["containers"]
    return found


def arguments(overlay: str, **variables: str) -> list[str]:
    """Arguments of the container, with `$(NAME)` replaced as the kubelet does."""
    words = list(container(overlay)["args"])
    for name, value in variables.items():
        words = [word.replace(f"$({name})", value) for word in words]
    return words


def config(overlay: str) -> tuple[str, dict[str, Any]]:
    """Name and content of the TOML file that the workload reads."""
    (reference,) = [volume["configMap"]["name"] for volume in volumes(overlay) if "configMap" in volume]
    (found,) = [one for one in of_kind(overlay, "ConfigMap") if one["metadata"]["name"] == reference]
    ((name, text),) = found["data"].items()
    return name, tomllib.loads(text)


def volumes(overlay: str) -> list[Manifest]:
    return pod(overlay)["spec"]["volumes"]


def mount_paths(overlay: str) -> dict[str, str]:
    return {mount["name"]: mount["mountPath"] for mount in container(overlay)["volumeMounts"]}


def nested(value: Any, key: str) -> Iterator[Any]:
    """Values of a key at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key:
                yield inner
            yield from nested(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from nested(inner, key)
