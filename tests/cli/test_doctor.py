"""`afield doctor`: a healthy run, and every check on a run that is really broken there."""

from __future__ import annotations

import json
import resource
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import RunCommand

from afield.diagnosis.doctor import CheckResult, clocks, judge, too_old
from afield.settings.train import train_config
from afield.types import Outcome, Rollout, RolloutResult, RolloutTimes, Task
from support.client_gateway import threaded_gateway
from support.gateways import ADMIN, POLICY
from support.processes import AGENTS, write_tasks

ROWS = [{"id": "q", "question": "Question?", "seconds": 0}]


@pytest.fixture
def arguments(tmp_path: Path) -> list[object]:
    """A run whose engine has prepared answers."""
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps({"match": "", "one_of": ["Yes.", "Never!!"]}) + "\n")
    tasks = write_tasks(tmp_path / "tasks.jsonl", ROWS)
    agent = f"{AGENTS / 'slow_agent.py'}:agent"
    return [agent, "--tasks", tasks, "--model", POLICY, "--engine", f"scripted={script}", "--freeze-weights"]


def diagnosed(
    run_command: RunCommand, arguments: list[object], *more: object
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and the worst result of each check."""
    code, out, err = run_command("doctor", *arguments, *more, "--json")
    assert code in (0, 1), err
    order = ("ok", "skipped", "warning", "failed")
    results: dict[str, dict[str, Any]] = {}
    for result in map(json.loads, out.splitlines()):
        known = results.get(result["check"])
        if known is None or order.index(result["status"]) > order.index(known["status"]):
            results[result["check"]] = result
    return code, results


def bad(results: dict[str, dict[str, Any]]) -> list[str]:
    return [name for name, result in results.items() if result["status"] == "failed"]


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Limit the size of files of this process, which acts like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_healthy_run_passes_every_check(
    tmp_path: Path, run_command: RunCommand, arguments: list[object]
) -> None:
    values = dict(zip(arguments[1::2], arguments[2::2], strict=False))
    lines = [f'agent = "{arguments[0]}"', "freeze_weights = true"]
    lines += [f'{str(flag)[2:]} = "{value}"' for flag, value in values.items()]
    (tmp_path / "run.toml").write_text("[train]\n" + "\n".join(lines) + "\n")
    code, out, err = run_command("doctor", "run.toml")
    assert code == 0, out + err
    assert "ready to run" in out and "FAILED" not in out
    assert "a probe in process made 1 model calls, its outcome arrived" in out
    for check in ("template", "tools", "store", "queue", "clocks", "log-probabilities", "versions", "disk"):
        assert f"\nok       {check}" in f"\n{out}"
    assert not list((tmp_path / "runs").iterdir())  # nothing is left behind


def test_a_setting_that_does_not_exist_is_refused(run_command: RunCommand, arguments: list[object]) -> None:
    code, _, err = run_command("doctor", *arguments, "--set", "rollout=3")
    assert code == 2 and "did you mean 'rollouts'?" in err


@pytest.mark.parametrize(
    ("options", "check", "evidence"),
    [
        (("--engine", "vllm=http://127.0.0.1:1"), "engine", "127.0.0.1:1"),
        (("--engine", "scripted=missing.jsonl"), "reach", "missing.jsonl"),
        (("--track", "wandb"), "settings", "pip install 'afield[wandb]'"),
        (("--tasks", "missing.jsonl"), "tasks", "missing.jsonl"),
        (("--transport", "files:///proc/afield"), "store", "/proc/afield"),
        (("--transport", "files://{}/out?notify=redis://127.0.0.1:1"), "queue", "start redis-server there"),
        (("--runtime", "served=http://127.0.0.1:1"), "runtime", "no agent answers"),
    ],
)
def test_a_broken_part_fails_its_check(
    options: tuple[str, ...],
    check: str,
    evidence: str,
    tmp_path: Path,
    run_command: RunCommand,
    arguments: list[object],
) -> None:
    words = [option.format(tmp_path) for option in options]
    code, results = diagnosed(run_command, arguments, *words, "--timeout", 30)
    assert code == 1 and bad(results) == [check], results
    assert evidence in results[check]["evidence"]
    assert check == "reach" or results["reach"]["status"] == "skipped"


def test_an_agent_that_cannot_be_imported_fails_the_runtime(
    tmp_path: Path, run_command: RunCommand, arguments: list[object]
) -> None:
    (tmp_path / "bad.py").write_text("import not_there\n\ndef agent(task):\n    return 1.0\n")
    code, results = diagnosed(run_command, [f"{tmp_path / 'bad.py'}:agent", *arguments[1:]])
    assert code == 1 and bad(results) == ["runtime"]
    assert "not_there" in results["runtime"]["evidence"]


def test_an_unreachable_gateway_fails(
    run_command: RunCommand, arguments: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AFIELD_ADMIN_KEY", "k")
    code, results = diagnosed(run_command, arguments, "--gateway", "http://127.0.0.1:1", "--timeout", 2)
    assert code == 1 and bad(results) == ["gateway"]
    assert "does not answer" in results["gateway"]["evidence"] and results["gateway"]["remedy"]


def test_a_gateway_with_another_model_fails(
    tmp_path: Path, run_command: RunCommand, arguments: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AFIELD_ADMIN_KEY", ADMIN)
    other = Path(shutil.copytree(POLICY, tmp_path / "other"))
    with (other / "chat_template.jinja").open("a") as file:
        file.write("{# changed #}")
    with threaded_gateway(tmp_path / "served", other) as gateway:
        code, results = diagnosed(run_command, arguments, "--gateway", gateway.url)
    assert code == 1 and bad(results) == ["gateway"]
    assert "serves 'other'" in results["gateway"]["evidence"]


def test_a_gateway_that_agents_do_not_reach_fails(run_command: RunCommand, arguments: list[object]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = ("--gateway-port", port, "--gateway-url", "http://127.0.0.1:1")
    code, results = diagnosed(run_command, arguments, *address)
    assert code == 1 and bad(results) == ["reach"]
    assert "no model call came through" in results["reach"]["evidence"]
    assert "http://127.0.0.1:1" in results["reach"]["remedy"] or results["reach"]["remedy"]


@pytest.mark.parametrize("directory", ["/proc/runs", "/dev/null/runs"])
def test_a_directory_that_cannot_be_written_fails(
    directory: str, run_command: RunCommand, arguments: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AFIELD_RUNS", directory)
    code, results = diagnosed(run_command, arguments)
    assert code == 1 and bad(results) == ["run directory"]
    assert results["disk"]["status"] == results["reach"]["status"] == "skipped"


def test_a_full_disk_fails(run_command: RunCommand, arguments: list[object]) -> None:
    with file_size_limit(100_000):
        code, results = diagnosed(run_command, arguments)
    assert code == 1 and "run directory" in bad(results)
    assert "File too large" in results["run directory"]["evidence"]


def test_a_missing_bubblewrap_fails_the_runtime(
    tmp_path: Path, run_command: RunCommand, arguments: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, results = diagnosed(run_command, arguments, "--runtime", "sandbox")
    assert code == 1 and bad(results) == ["runtime"]
    assert "apt-get install bubblewrap" in results["runtime"]["evidence"] + results["runtime"]["remedy"]


def test_a_template_that_is_not_prefix_stable_and_has_no_tools_is_a_warning(
    tmp_path: Path, run_command: RunCommand, arguments: list[object]
) -> None:
    other = Path(shutil.copytree(POLICY, tmp_path / "other"))
    (other / "chat_template.jinja").write_text(
        "<|im_start|>system\n{{ messages | length }} messages<|im_end|>\n"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    code, results = diagnosed(run_command, [*arguments, "--model", other])
    assert results["template"]["status"] == "warning", results["template"]
    assert "not prefix-stable" in results["template"]["evidence"]
    assert code == 0 and results["reach"]["status"] == "ok"


# --- results of an attempt -----------------------------------------------------------------------


def result_at(clock: float) -> RolloutResult:
    now = time.time()
    return RolloutResult(
        rollout=Rollout(id="r", exp_id="e", group_id="g", task=Task("t", {})),
        outcome=Outcome(rollout_id="r", attempt=1, reward=1.0, metrics={"clock": clock}),
        times=RolloutTimes(attempted=now - 1, ended=now),
    )


def found(results: Iterator[CheckResult], check: str) -> CheckResult:
    return next(result for result in results if result.check == check)


def test_a_package_older_than_the_oldest_supported_version_is_found() -> None:
    installed = {
        "torch": "2.5.1+cpu",
        "transformers": "5.0.0rc1",
        "ray": "2.40",
        "numpy": "1.26.4",
        "moto": "4",
    }
    required = [
        "torch>=2.6",
        "torch>=2.6",
        "transformers>=5.0",
        "ray>=2.40.0",
        "moto[s3,sqs]>=5.1",
        "docker>=7",
    ]
    found = list(too_old([*required, "afield[train]"], lambda name: installed.get(name, "")))
    assert found == [("moto", "4", "5.1"), ("torch", "2.5.1+cpu", "2.6")]


def test_a_wrong_clock_is_a_warning() -> None:
    [skewed] = clocks(result_at(time.time() + 90))
    assert skewed.status == "warning" and "agent +90 s" in skewed.evidence
    [right] = clocks(result_at(time.time() - 0.5))
    assert right.status == "ok"


def test_an_attempt_without_tokens_fails_the_log_probabilities() -> None:
    config = train_config(None, {"model": str(POLICY)})
    results = judge(result_at(time.time()), config, probed=True)
    assert found(results, "log-probabilities").status == "failed"
