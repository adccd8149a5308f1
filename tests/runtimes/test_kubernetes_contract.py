"""The kubernetes runtime keeps what every runtime promises; its pods here are real processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.contracts.runtime_contract import RuntimeContract

from afield.runtimes.kubernetes.runtime import KubernetesRuntime
from afield.settings.runtimes import KubernetesOptions, ResourceLimits
from agents.places import ACTING, Place, Spec
from agents.sink import Sink
from support.fake_kube import NAMESPACE
from support.kubernetes import fake_kube, image_of

pytestmark = pytest.mark.anyio


def made(kubeconfig: str, image: str, log_dir: str, **more: Any) -> KubernetesRuntime:
    options = KubernetesOptions(
        image=image,
        namespace=NAMESPACE,
        kubeconfig=kubeconfig,
        limits=ResourceLimits(cpus=0.5, memory_mb=300),
        **more,
    )
    return KubernetesRuntime(options, name="the run", log_dir=Path(log_dir), poll_s=0.1)


class TestKubernetes(RuntimeContract):
    def spec(self, folder: Path, target: str = f"{ACTING}:act") -> Spec:
        image = image_of(self.kube, target)
        where = {"kubeconfig": str(self.kube.kubeconfig), "image": image, "log_dir": str(folder / "logs")}
        return Spec.of(made, where)

    @pytest.fixture
    async def place(self, sink: Sink, tmp_path: Path) -> AsyncIterator[Place]:
        async with fake_kube(tmp_path / "kube") as self.kube, self.spec(tmp_path).build() as runtime:
            yield Place(runtime, sink.transport, sink)
