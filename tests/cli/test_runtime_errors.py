"""What a user is told of places that cannot be used: the key, the value, the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

import afield
from afield import sandbox
from afield.cli.main import main
from afield.errors import UsageError
from afield.runtimes.kubernetes.runtime import KubernetesRuntime
from afield.runtimes.process import ProcessRuntime
from afield.settings.runtimes import KubernetesOptions
from support.client_gateway import place
from support.gateways import ADMIN, POLICY
from support.processes import AGENTS, write_tasks

pytestmark = pytest.mark.anyio
AGENT = f"{AGENTS / 'slow_agent.py'}:agent"
ROWS = [{"id": "q", "question": "Why?", "seconds": 0}]


@pytest.mark.parametrize(
    ("runtime", "said", "told"),
    [
        (
            "sandbox",
            "sandbox.limits.memory_mb=lots",
            "sandbox.limits.memory_mb = 'lots' must be a whole number",
        ),
        ("sandbox", "sandbox.limits.memory_mb=-5", "sandbox.limits: memory_mb = -5 must be positive"),
        ("sandbox", "sandbox.allow=foo", "sandbox.allow = 'foo' must be a list"),
        ("sandbox", "sandbox.allow=[1]", "sandbox.allow[0] = 1 must be text"),
        ("sandbox", "sandbox=5", "sandbox = 5 must be a table"),
        ("sandbox", "sandbox.without_bubblewrap=maybe", "must be one of: refuse, process"),
        ("container=i", "container.pull=sometimes", "must be one of: missing, always, never"),
        ("sandbox", "sandbox.env={'A=B'='c'}", "sandbox: env: 'A=B' is no name of a variable"),
        ("container=i", "container.env={''='c'}", "container: env: '' is no name of a variable"),
        ("sandbox", "sandbox.limits.memory=5", "did you mean 'sandbox.limits.memory_mb'?"),
        ("sandbox", "container.image=i", "choose --runtime container"),
        ("process", "sandbox.env={A='b'}", "choose --runtime sandbox"),
    ],
)
def test_a_wrong_value_of_a_place_is_told_by_its_key(
    runtime: str,
    said: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", ROWS)
    monkeypatch.setenv("AFIELD_RUNS", str(tmp_path / "runs"))
    words = ["--tasks", str(tasks), "--model", str(POLICY), "--runtime", runtime, "--set", said]
    assert main(["train", AGENT, *words]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_wrong_value_beside_secrets_is_told_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--model",
        str(POLICY),
        "--tasks",
        "t",
        "--runtime",
        "sandbox",
        "--set",
        "sandbox.env={K='hush',N=1}",
    ]
    assert main(["train", AGENT, *words]) == 2
    said = capsys.readouterr().err
    assert "all values of sandbox.env must be text" in said
    assert "hush" not in said


def test_a_misspelt_option_of_a_sandbox_is_told_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown key 'sandbox\.limts'.*did you mean 'sandbox\.limits'"):
        sandbox(options={"limts": {}})


def test_a_gateway_that_passes_no_outcomes_on_is_refused_where_agents_hand_theirs_to_it(
    tmp_path: Path,
) -> None:
    with (
        place(tmp_path) as there,
        pytest.raises(UsageError, match="passes none on: start it with --outcomes"),
    ):
        afield.RolloutClient.open(
            agent=AGENT, gateway=there.url, admin_key=ADMIN, runtime="sandbox", directory=tmp_path / "run"
        )


def test_ps_says_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AFIELD_RUNS", str(tmp_path / "elsewhere"))
    assert main(["ps"]) == 0
    assert f"under {tmp_path / 'elsewhere'}; AFIELD_RUNS" in capsys.readouterr().out


async def test_a_kubeconfig_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.yaml")
    options = KubernetesOptions(image="i", kubeconfig=missing)
    with pytest.raises(UsageError, match=f"there is no kubeconfig {missing}"):
        async with KubernetesRuntime(options, name="run", log_dir=tmp_path) as runtime:
            await runtime.check()


async def test_an_agent_that_cannot_be_imported_is_shown_its_own_lines_only(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("def agent(): ...\n\nimport nosuchlibrary\n")
    target = f"{tmp_path / 'agent.py'}:agent"
    with pytest.raises(UsageError) as refused:
        async with ProcessRuntime(target, workers=1, fresh=True, log_dir=tmp_path, env={}) as runtime:
            await runtime.check()
    said = str(refused.value)
    assert "line 3" in said and "No module named 'nosuchlibrary'" in said
    assert "importlib" not in said and "serve.py" not in said


async def test_what_cannot_be_started_is_named_whatever_its_role(tmp_path: Path) -> None:
    (tmp_path / "verify.py").write_text("def other(): ...\n")
    target = f"{tmp_path / 'verify.py'}:grade"
    with pytest.raises(UsageError, match=f"^{target} cannot be started"):
        async with ProcessRuntime(target, workers=1, fresh=True, log_dir=tmp_path, env={}) as runtime:
            await runtime.check()
