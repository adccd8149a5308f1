"""Runtimes that cannot start an agent: the error names the file and the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from afield.errors import UsageError
from afield.runtimes.kubernetes.runtime import KubernetesRuntime
from afield.runtimes.process import ProcessRuntime
from afield.settings.runtimes import KubernetesOptions

pytestmark = pytest.mark.anyio


async def test_a_missing_kubeconfig_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.yaml")
    options = KubernetesOptions(image="i", kubeconfig=missing)
    with pytest.raises(UsageError, match=f"there is no kubeconfig {missing}"):
        async with KubernetesRuntime(options, name="run", log_dir=tmp_path) as runtime:
            await runtime.check()


async def test_an_import_error_shows_only_lines_of_the_agent(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("def agent(): ...\n\nimport nosuchlibrary\n")
    target = f"{tmp_path / 'agent.py'}:agent"
    with pytest.raises(UsageError) as refused:
        async with ProcessRuntime(target, workers=1, fresh=True, log_dir=tmp_path, env={}) as runtime:
            await runtime.check()
    message = str(refused.value)
    assert "line 3" in message and "No module named 'nosuchlibrary'" in message
    assert "importlib" not in message and "serve.py" not in message


async def test_a_verifier_that_its_file_does_not_define_is_named(tmp_path: Path) -> None:
    (tmp_path / "verify.py").write_text("def other(): ...\n")
    target = f"{tmp_path / 'verify.py'}:grade"
    with pytest.raises(UsageError, match=f"^{target} cannot be started"):
        async with ProcessRuntime(target, workers=1, fresh=True, log_dir=tmp_path, env={}) as runtime:
            await runtime.check()
