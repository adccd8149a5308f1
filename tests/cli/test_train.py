"""`afield train` and `show`: invalid settings, agents and models; runs, resumption and exit codes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import RunCommand

from afield import factory
from afield.chat import identify
from afield.errors import Unavailable, UsageError
from afield.orchestrator.state import RunDirectory
from afield.settings.train import train_config
from afield.utils.gateway_process import GatewayProcess
from support.client_gateway import threaded_gateway
from support.gateways import ADMIN, POLICY
from support.processes import AGENTS, command, finish, start, summary, train_arguments, unlearned, write_tasks
from support.processes import until as wait_until

AGENT = f"{AGENTS / 'slow_agent.py'}:agent"
ROWS = [{"id": f"q{i}", "question": f"Question {i}?", "seconds": 0} for i in range(4)]
SOURCE = "def agent(task):\n    return 1.0\n"


# --- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--mode", "fast"), "sync, one-step-off, async"),
        (("--on-stale", "keep"), "drop, correct"),
        (("--advantage", "ppo"), "grpo, remax"),
        (("--run", "good", "--deliver", "mail"), "store, gateway"),
        (("--top-p", "0.9"), "top_p = 0.9 truncates the distribution, which the trainer cannot reproduce"),
        (("--top-k", "5"), "sample without training: `afield eval`, or --freeze-weights"),
        (("--top-p", "1.5"), "must be above 0 and at most 1"),
        (("--run", "../up"), "run name '../up'"),
        (("--run", ""), "run name ''"),
        (("--epochs", "2", "--steps", "3"), "give one of them"),
        (("--gateway", "localhost:8400"), "must be an address"),
        (("--gateway", "http://127.0.0.1:1"), "AFIELD_ADMIN_KEY"),
        (("--role", "collect"), "--gateway URL"),
        (("--runtime", "served=http://"), "served=http://HOST:PORT"),
        (("--runtime", "served=http://127.0.0.1:1,elsewhere"), "served=http://HOST:PORT"),
        (("--config", "retries_task = -1"), "retries_task"),
        (("--config", "retries_infrastructure = -5"), "retries_infrastructure"),
        (("--config", 'mode = "fast"'), "mode"),
    ],
)
def test_an_invalid_setting_is_refused_and_leaves_no_run(
    options: tuple[str, ...],
    message: str,
    tmp_path: Path,
    run_command: RunCommand,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AFIELD_ADMIN_KEY", raising=False)
    if options[0] == "--config":
        (tmp_path / "c.toml").write_text(f"[train]\n{options[1]}\n")
        options = ("--config", "c.toml")
    tasks = write_tasks(tmp_path / "tasks.jsonl", ROWS)
    code, _, err = run_command("train", AGENT, "--tasks", tasks, "--model", POLICY, *options)
    assert code == 2 and message in err
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.parametrize(
    ("runtime", "assignment", "message"),
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
        ("sandbox", "sandbox.env={'A=B'='c'}", "sandbox: env: 'A=B' is not a variable name"),
        ("container=i", "container.env={''='c'}", "container: env: '' is not a variable name"),
        ("sandbox", "sandbox.limits.memory=5", "did you mean 'sandbox.limits.memory_mb'?"),
        ("sandbox", "container.image=i", "choose --runtime container"),
        ("process", "sandbox.env={A='b'}", "choose --runtime sandbox"),
    ],
)
def test_an_invalid_runtime_option_is_refused_with_its_key(
    runtime: str, assignment: str, message: str, tmp_path: Path, run_command: RunCommand
) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", ROWS)
    options = ("--tasks", tasks, "--model", POLICY, "--runtime", runtime, "--set", assignment)
    code, _, err = run_command("train", AGENT, *options)
    assert code == 2 and message in err
    assert not (tmp_path / "runs").exists()


def test_an_invalid_environment_is_refused_without_its_secrets(run_command: RunCommand) -> None:
    options = ("--model", POLICY, "--tasks", "t", "--runtime", "sandbox")
    code, _, err = run_command("train", AGENT, *options, "--set", "sandbox.env={K='hush',N=1}")
    assert code == 2 and "all values of sandbox.env must be text" in err
    assert "hush" not in err


def test_an_unreachable_gateway_is_named_at_the_start(
    tmp_path: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AFIELD_ADMIN_KEY", "k")
    (tmp_path / "c.toml").write_text("[train]\nunavailable_timeout_s = 0.5\n")
    arguments = train_arguments(tmp_path, "slow_agent.py", ROWS, *unlearned(tmp_path))
    code, _, err = run_command(*arguments, "--config", "c.toml", "--gateway", "http://127.0.0.1:1")
    assert code == 1 and "the gateway at http://127.0.0.1:1 does not answer" in err
    assert not list((tmp_path / "runs").glob("*"))


def change_template(model: Path) -> None:
    path = model / "chat_template.jinja"
    path.write_text(path.read_text() + "{# changed #}")


def change_sizes(model: Path) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 7}))


def change_weights(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000] + bytes(1000))


@pytest.mark.parametrize(
    ("change", "part", "freeze"),
    [
        (change_template, "tokenizer", True),
        (change_sizes, "architecture", True),
        (change_weights, "weights", True),
        (change_weights, "weights", False),
    ],
)
def test_a_gateway_that_serves_another_model_is_refused_at_the_start(
    tmp_path: Path,
    run_command: RunCommand,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    part: str,
    freeze: bool,
) -> None:
    monkeypatch.setenv("AFIELD_ADMIN_KEY", ADMIN)
    other = Path(shutil.copytree(POLICY, tmp_path / "other"))
    change(other)
    arguments = train_arguments(tmp_path, "slow_agent.py", ROWS, "--steps", 1)
    options = ("--freeze-weights",) if freeze else ()
    with threaded_gateway(tmp_path / "served", other) as gateway:
        code, _, err = run_command(*arguments, "--gateway", gateway.url, *options)
    assert code == 2 and f"model {POLICY} ({POLICY.name}), but the gateway at {gateway.url}" in err
    assert f"serves 'other', whose {part}" in err and f"start the gateway with --model {POLICY}" in err
    assert not list((tmp_path / "runs").glob("*"))


def test_the_same_model_under_another_name_and_published_weights_are_accepted(tmp_path: Path) -> None:
    other = Path(shutil.copytree(POLICY, tmp_path / "other"))
    factory.check_served_model(POLICY, identify(other), 0, "http://gateway")
    change_weights(other)
    factory.check_served_model(POLICY, identify(other), 3, "http://gateway")
    factory.check_served_model(POLICY, None, 0, "http://gateway")
    with pytest.raises(UsageError, match="weights are different"):
        factory.check_served_model(POLICY, identify(other), 0, "http://gateway")


@pytest.mark.parametrize("directory", ["/proc/runs", "/dev/null/runs"])
def test_an_unwritable_runs_directory_is_named(
    directory: str, tmp_path: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AFIELD_RUNS", directory)
    code, _, err = run_command(*train_arguments(tmp_path, "slow_agent.py", ROWS))
    assert code == 2 and f"run directory {directory}" in err


@pytest.mark.anyio
async def test_a_gateway_that_starts_too_slowly_is_reported_with_the_setting(tmp_path: Path) -> None:
    process = GatewayProcess(["sleep", "60"], os.environ, tmp_path / "gateway.log", start_timeout_s=0.1)
    await process.start(b"")
    try:
        with pytest.raises(Unavailable, match=r"within 0.1 s; see .*, or raise engine_start_timeout_s"):
            await process.ready()
    finally:
        await process.stop()


# --- agents and models ------------------------------------------------------------------------


def refusal(run_command: RunCommand, *arguments: object) -> str:
    """The error of a run that must not start."""
    tasks = write_tasks(Path("tasks.jsonl"), [{"id": "a"}])
    code, _, err = run_command("train", *arguments, "--tasks", tasks)
    assert code == 2 and not list(Path("runs").glob("*"))
    return err


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (SOURCE.replace("agent", "agnet"), "agent.py has no 'agent', the agent; did you mean 'agnet'?"),
        ("def one(task): ...\n\n\ndef two(task): ...\n", "it has: one, two"),
        ("import os\n", "it has: nothing to run"),
        ("x = 1\ndef agent(task:\n", "agent.py, line 2 cannot be read as Python"),
        (b"# \xff\n", "agent.py cannot be read as Python"),
    ],
)
def test_an_agent_that_its_file_does_not_define_is_refused_without_importing_it(
    run_command: RunCommand, source: str | bytes, message: str
) -> None:
    Path("agent.py").write_bytes(source if isinstance(source, bytes) else source.encode())
    assert message in refusal(run_command, "agent.py:agent", "--model", POLICY)
    Path("good.py").write_text(SOURCE)
    verified = ("good.py:agent", "--verifier", "agent.py:agent", "--model", POLICY)
    assert message.replace("the agent;", "the verifier;") in refusal(run_command, *verified)


def test_a_name_that_a_file_may_define_when_imported_is_accepted(
    tmp_path: Path, run_command: RunCommand
) -> None:
    no_weights = tmp_path / "bare"
    shutil.copytree(POLICY, no_weights)
    (no_weights / "model.safetensors").unlink()
    for source in (
        "from helpers import agent\n",
        "from helpers import *\n",
        "agent = print\n",
        "if True:\n    class agent: ...\n",
        "globals()['agent'] = print\n",
        "def __getattr__(name): ...\n",
    ):
        Path("agent.py").write_text(source)
        # The model is checked after the agent.
        assert "bare has no weights" in refusal(run_command, "agent.py:agent", "--model", no_weights)


def test_a_name_on_the_hub_is_refused_with_the_command_that_fetches_it(run_command: RunCommand) -> None:
    Path("agent.py").write_text(SOURCE)
    err = refusal(run_command, "agent.py:agent", "--model", "Qwen/Qwen3-0.6B")
    there = Path.cwd() / "Qwen" / "Qwen3-0.6B"
    assert f"hf download Qwen/Qwen3-0.6B --local-dir {there}" in err
    assert "hf download" not in refusal(run_command, "agent.py:agent", "--model", "nowhere")


def test_an_incomplete_model_is_refused_with_the_missing_part(
    tmp_path: Path, run_command: RunCommand
) -> None:
    Path("agent.py").write_text(SOURCE)
    model = tmp_path / "model"
    shutil.copytree(POLICY, model)
    asked = ("agent.py:agent", "--model", model)
    weights, index = model / "model.safetensors", model / "model.safetensors.index.json"
    whole = weights.read_bytes()
    for damaged in (whole[:-1], whole[:100], b"", b"version https://git-lfs.github.com/spec/v1\n"):
        weights.write_bytes(damaged)
        assert "model.safetensors is cut off" in refusal(run_command, *asked)
    weights.rename(model / "part-1.safetensors")
    (model / "part-1.safetensors").write_bytes(whole)
    index.write_text(json.dumps({"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}))
    assert "lacks part-2.safetensors" in refusal(run_command, *asked)
    index.write_text("[")
    assert "index.json cannot be read" in refusal(run_command, *asked)
    code, _, err = run_command("gateway", "--model", model, "--port", 0)
    assert code == 2 and "index.json cannot be read" in err
    (model / "config.json").unlink()
    assert "it has no config.json" in refusal(run_command, *asked)


def test_an_agent_that_cannot_be_imported_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(f"import no_such_library\n{SOURCE}")
    tasks = write_tasks(tmp_path / "tasks.jsonl", [{"id": "a"}])
    words = command("train", "agent.py:agent", "--tasks", tasks, "--model", POLICY)
    words[1:1] = ["-X", "importtime"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and "No module named 'no_such_library'" in ended.stderr
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "afield.jobs.training" in imported and "torch" not in imported
    assert not list((tmp_path / "runs").glob("*"))


# --- runs -------------------------------------------------------------------------------------


def test_a_run_is_trained_shown_and_resumed(tmp_path: Path, run_command: RunCommand) -> None:
    sizes = ("--steps", 2, "--tasks-per-step", 2, "--rollouts", 2)
    arguments = train_arguments(tmp_path, "slow_agent.py", ROWS, *sizes, *unlearned(tmp_path))
    code, out, err = run_command(*arguments)
    assert code == 0, err
    assert len(out.strip().splitlines()) == 1
    printed = summary(out)
    run = Path(printed["run"])
    assert printed["steps"] == 2 and printed["rollouts"] == 8 and printed["turns_per_rollout"] == 2.0
    for name in ("rewards.png", "metrics.jsonl", "summary.json", "run.json", "rollouts/step-0002.jsonl"):
        assert (run / name).stat().st_size > 0
    assert json.loads((run / "summary.json").read_text()) == printed

    code, out, _ = run_command("show")
    assert code == 0 and run.name in out
    rollout = out.strip().rpartition(" ")[2]
    code, out, err = run_command("show", run.name, rollout, "--tokens")
    assert code == 0, err
    assert "[user] Are you sure?" in out and "append" in out
    assert json.loads(run_command("show", run.name, rollout, "--json")[1])["rollout"]["id"] == rollout
    assert len(json.loads(run_command("show", run.name, "--json")[1])["metrics"]) == 2
    code, _, err = run_command("show", run.name, "nobody")
    assert code == 2 and "nobody" in err

    code, out, err = run_command("train", "--resume", run.name, "--steps", 3, "--json")
    assert code == 0 and summary(out)["steps"] == 3, err
    assert "3 of 3" in run_command("show", run.name)[1]
    code, _, err = run_command("train", "--resume", run.name, "--lr", 0.5)
    assert code == 2 and "lr" in err

    shown = start(tmp_path, "show", run.name, rollout, "--tokens")
    assert shown.stdout and shown.stderr
    shown.stdout.close()  # as `| head` does
    assert "Traceback" not in shown.stderr.read()
    shown.stderr.close()
    shown.wait(20)


def test_the_printed_resume_command_works_after_sigterm(tmp_path: Path, run_command: RunCommand) -> None:
    rows = [{"id": "q", "question": "Well?", "seconds": 0.2}]
    sizes = ("--run", "mine", "--steps", 1000, "--tasks-per-step", 1, "--rollouts", 2)
    process = start(tmp_path, *train_arguments(tmp_path, "slow_agent.py", rows, *sizes, *unlearned(tmp_path)))
    with process:
        wait_until((tmp_path / "runs" / "mine" / "metrics.jsonl").exists, "the run has a step")
        process.send_signal(signal.SIGTERM)
        code, _, err = finish(process, 60)
    assert code == 143, err
    assert "afield train --resume mine" in err
    kept = (tmp_path / "runs" / "mine" / "run.json").read_bytes()
    for wrong in (("--runtime", "cloud"), ("--runtime", "served=http://127.0.0.1:1"), ("--workers", "0")):
        code, _, err = run_command("train", "--resume", "mine", *wrong)
        assert code == 2, err
        assert (tmp_path / "runs" / "mine" / "run.json").read_bytes() == kept  # refused values are not saved


def test_runs_that_share_a_store_have_separate_outcomes(tmp_path: Path, run_command: RunCommand) -> None:
    shared = tmp_path / "shared"
    sizes = ("--steps", 1, "--tasks-per-step", 2, "--rollouts", 2, "--runtime", "inline")
    for name in ("one", "two"):
        more = ("--transport", f"files://{shared}", "--run", name, *sizes, *unlearned(tmp_path))
        code, out, err = run_command(*train_arguments(tmp_path, "slow_agent.py", ROWS, *more))
        assert code == 0, err
        assert (summary(out)["late"], summary(out)["failed"]) == (0, 0)
    commits = {name: len(list((shared / name / "commits").iterdir())) for name in ("one", "two")}
    assert commits["one"] == commits["two"] > 0


def run_failing(run_command: RunCommand, cwd: Path, how: str, *more: object) -> tuple[int, str, str]:
    tasks = write_tasks(cwd / "tasks.jsonl", [{"id": f"t{n}", "how": how} for n in range(2)])
    sizes = ("--tasks", tasks, "--model", POLICY, "--tasks-per-step", 1, "--rollouts", 2, "--json")
    agent = f"{AGENTS / 'failing_agents.py'}:agent"
    return run_command("train", agent, *sizes, "--runtime", "inline", *unlearned(cwd), *more)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_that_trained_nothing_fails_however_short_it_is(
    tmp_path: Path, run_command: RunCommand, steps: int
) -> None:
    code, out, err = run_failing(run_command, tmp_path, "raises", "--steps", steps)
    assert code == 1 and summary(out)["steps"] == steps
    run = Path(summary(out)["run"]).name
    assert f"nothing was trained: of {2 * steps} rollouts {2 * steps} have no reward" in err
    assert f"show {run}" in err
    assert steps == 1 or run_command("train", "--resume", run, "--json")[0] == 1


def test_a_run_with_equal_rewards_succeeds(tmp_path: Path, run_command: RunCommand) -> None:
    code, out, err = run_failing(run_command, tmp_path, "posts_garbage", "--steps", 1)
    assert code == 0 and summary(out)["trained"] == 2, err
    assert "nothing was trained" not in err


def test_the_start_timeout_of_the_gateway_comes_from_the_run() -> None:
    config = train_config(None, {"agent": "a.py:agent", "model": "m", "engine_start_timeout_s": 1000.0})
    settings = factory.gateway_settings(config, RunDirectory(Path("run")))
    assert settings.engine_start_timeout_s == 1000.0 < factory.start_timeout(settings)


# --- gateway pool -----------------------------------------------------------------------------


def test_a_run_with_a_pool_survives_a_killed_gateway(tmp_path: Path, run_command: RunCommand) -> None:
    (tmp_path / "marks").mkdir()
    killed = tmp_path / "marks" / "killed"
    row = {"seconds": 0, "until": str(killed)}
    rows = [{"id": f"q{i}", "question": f"Question {i}?", **row} for i in range(2)]
    options = ("--gateways", 2, "--rollouts", 2, "--tasks-per-step", 2, "--steps", 1, "--run", "pool")
    arguments = train_arguments(tmp_path, "slow_agent.py", rows, *unlearned(tmp_path), *options)
    training = start(tmp_path, *arguments)
    try:
        wait_until(lambda: len(list(killed.parent.iterdir())) == 4, "four agents wait")
        listed = json.loads(run_command("ps", "pool", "--json")[1])["sessions"]
        gateways = [row["session"] for row in listed if row["role"] == "gateway"]
        assert sorted(gateways) == ["gateway-0", "gateway-1"]
        code, out, _ = run_command("kill", "gateway-0", "--run", "pool")
        assert code == 0 and "has ended" in out
    finally:
        killed.touch()
        code, out, err = finish(training)
    assert code == 0, err
    result = summary(out)
    assert (result["rollouts"], result["failed"], result["trained"]) == (4, 0, 4)
    assert "gateway-0: lost, starting a replacement" in err
    assert json.loads(run_command("ps", "pool", "--json")[1])["sessions"] == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--gateway", "http://127.0.0.1:1"), "is a running one; leave out gateways and on"),
        (("--gateway-url", "http://x:1", "--gateway-port", 1), "is the address of one gateway"),
    ],
)
def test_a_pool_with_the_address_of_one_gateway_is_refused(
    options: tuple[object, ...], error: str, tmp_path: Path, run_command: RunCommand
) -> None:
    arguments = train_arguments(tmp_path, "slow_agent.py", ROWS, "--gateways", 2, *options)
    code, _, err = run_command(*arguments)
    assert code == 2 and error in err


# --- weights to engines -----------------------------------------------------------------------


DEMO = ("--steps", 3, "--tasks-per-step", 2, "--rollouts", 8, "--keep-weights", 9, "--run", "demo")


def test_weights_in_memory_train_the_same_run_as_weights_on_disk(
    tmp_path: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call at a time: the company of a call changes the last bits of its log-probabilities."""
    runs: list[RunDirectory] = []
    for way in ("memory", "disk"):
        (tmp_path / way).mkdir()
        monkeypatch.chdir(tmp_path / way)
        code, out, err = run_command(
            "demo", *DEMO, "--weight-transfer", way, "--concurrency", 1, "--async-checkpoints", "--json"
        )
        assert code == 0, err
        assert ("weights go to engines through shared memory" in err) == (way == "memory")
        runs.append(RunDirectory(Path(summary(out)["run"])))
    shared, on_disk = runs
    assert [line["trainer"]["shared_weights"] for line in shared.read_metrics()] == [1.0] * 3
    assert [line["trainer"]["shared_weights"] for line in on_disk.read_metrics()] == [0.0] * 3
    assert any("grad_norm" in line["trainer"] for line in shared.read_metrics())
    for version in range(4):
        files = {path.name for path in shared.weights(version).iterdir()}
        assert files == {path.name for path in on_disk.weights(version).iterdir()}
        for name in files:
            written = (shared.weights(version) / name).read_bytes()
            assert written == (on_disk.weights(version) / name).read_bytes(), (version, name)
    for step in (1, 2, 3):
        sampled = [
            {f.rollout.id: [t.token_ids for t in f.trajectories] for f in run.read_rollouts(step)}
            for run in runs
        ]
        assert sampled[0] == sampled[1]


KILLED = """
import os, signal, sys, time
from afield.cli.main import main
from afield.trainers import shared_publication

write = shared_publication._write

def killed(directory, *rest):
    if directory.name == sys.argv[1]:
        published = f'"kind":"published","value":{sys.argv[1][1:]}'
        events = directory.parents[1] / "events.jsonl"
        while not events.exists() or published not in events.read_text().replace(" ", ""):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    write(directory, *rest)

shared_publication._write = killed
raise SystemExit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_a_run_that_is_killed_before_published_weights_are_on_disk_is_resumed(
    tmp_path: Path, version: str
) -> None:
    sizes = ("demo", *DEMO, "--weight-transfer", "memory", "--checkpoint-every", 2, "--json")
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, version, *map(str, sizes)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert finish(process)[0] == -signal.SIGKILL
    run = RunDirectory(tmp_path / "runs" / "demo")
    weights = run.weights(int(version[1:]))
    assert (weights / "shared_weights.json").exists() and not (weights / "model.safetensors").exists()
    code, out, err = finish(start(tmp_path, "demo", "--resume", "demo", "--json"))
    assert code == 0, err
    assert summary(out)["steps"] == 3
    assert [line["step"] for line in run.read_metrics()] == [1, 2, 3]
    for number in range(4):
        assert (run.weights(number) / "model.safetensors").exists()
        assert (run.weights(number) / "weight_probe.json").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--engine", "scripted=s.jsonl"), "engine scripted loads weights from files"),
        (("--engine", "sglang=http://127.0.0.1:1"), "engine sglang loads weights from files"),
        (("--engine", "vllm"), "vLLM shares the memory of GPUs alone, and the trainer has none"),
        (("--set", "learn.lora.rank=4"), "learn.lora.publish = adapter publishes small files"),
    ],
)
def test_memory_that_trainer_and_engine_cannot_share_is_refused_with_the_remedy(
    run_command: RunCommand, options: tuple[object, ...], reason: str
) -> None:
    message = refusal(run_command, AGENT, "--model", POLICY, "--weight-transfer", "memory", *options)
    assert f"weight_transfer = memory is impossible: {reason}; set weight_transfer = disk or auto" in message
