"""`afield eval`: results, what is left out, continuation, comparison and exit codes."""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import RunCommand

from afield.cli import evaluate
from afield.cli.main import parser
from afield.cli.show import find_rollout
from afield.orchestrator.state import RunDirectory
from afield.settings.train import TrainConfig
from afield.utils.statistics import clustered_mean, pass_at_k
from support.gateways import POLICY
from support.paths import TESTS
from support.processes import AGENTS, start, train_arguments, unlearned, write_tasks
from support.processes import until as wait_until
from support.sandboxes import needs_bubblewrap

AGENT = f"{AGENTS / 'skilled_agent.py'}:agent"
HARBOR = str(TESTS / "harbor/tasks")
SKILLS = (0.0, 0.3, 0.6, 1.0)
ROWS = [{"id": f"q{n}", "question": f"Question {n}?", "skill": skill} for n, skill in enumerate(SKILLS)]


def arguments(
    cwd: Path, *more: object, rows: list[dict[str, Any]] = ROWS, runtime: str = "inline"
) -> list[object]:
    engine = [word for word in unlearned(cwd) if word != "--freeze-weights"]
    tasks = write_tasks(cwd / "tasks.jsonl", rows)
    return ["eval", AGENT, "--tasks", tasks, "--model", POLICY, "--runtime", runtime, *engine, *more]


def rewards(run: Path) -> dict[str, list[float | None]]:
    found: dict[str, list[float | None]] = {}
    for row in RunDirectory(run).index.rollouts(order="id"):
        found.setdefault(row.task_id, []).append(row.reward)
    return found


def test_an_evaluation_is_summarized_shown_compared_and_continued(
    tmp_path: Path, run_command: RunCommand
) -> None:
    code, out, err = run_command(*arguments(tmp_path, "-k", 4, "--run", "before", "--json", "--min", 0.99))
    assert code == 1, err
    assert "below --min 0.99" in err
    result = json.loads(out)
    by_task = {
        task: [r for r in values if r is not None]
        for task, values in rewards(tmp_path / "runs/before").items()
    }
    assert {task: len(values) for task, values in by_task.items()} == {f"q{n}": 4 for n in range(4)}
    expected = clustered_mean(by_task, share=True)
    assert result["reward"]["mean"] == pytest.approx(expected.mean)
    assert result["reward"]["standard_error"] == pytest.approx(expected.standard_error)
    assert list(result["pass_at"]) == ["1", "2", "4"]
    passes = [pass_at_k(4, int(sum(values)), 2) for values in by_task.values()]
    assert result["pass_at"]["2"]["mean"] == pytest.approx(sum(passes) / 4)
    assert (result["attempts"], result["requested"], result["left_out"]) == (16, 16, {})

    # Continued with more attempts: the first ones are not run again.
    code, out, err = run_command("eval", "--run", "before", "-k", 6, "--json")
    assert code == 0, err
    again = {
        task: [r for r in values if r is not None]
        for task, values in rewards(tmp_path / "runs/before").items()
    }
    assert all(again[task][:4] == by_task[task] and len(again[task]) == 6 for task in again)
    code, _, err = run_command("eval", "--run", "before", "--temperature", 0.5)
    assert code == 2 and "val_temperature cannot change" in err

    code, out, err = run_command(
        *arguments(tmp_path, "-k", 2, "--run", "after", "--exp-id", "other", "--compare", "before")
    )
    assert code == 0, err
    assert "paired t-test by task" in err
    table = [line.split("\t") for line in out.splitlines()]
    assert table[0][:4] == ["task", "attempts", "passed", "reward"]
    assert [row[0] for row in table[1:]] == ["q0", "q1", "q2", "q3"]

    code, out, _ = run_command("runs", "--json")
    assert [(json.loads(line)["run"], json.loads(line)["kind"]) for line in out.splitlines()] == [
        ("before", "eval"),
        ("after", "eval"),
    ]
    code, out, _ = run_command("compare", "after", "before", "--json")
    assert json.loads(out)["common_tasks"] == 4
    code, out, _ = run_command("show", "after")
    assert "kind     eval, finished" in out and "val      rollouts 8  tasks 4" in out
    code, out, _ = run_command("show", "after", "--reward", "=0", "--sort", "seconds", "--limit", 3)
    lines = [line.split("\t") for line in out.splitlines()]
    assert lines[0][0] == "step" and len(lines) == 4
    assert {line[lines[0].index("reward")] for line in lines[1:]} == {"0.000"}


def test_attempts_without_a_reward_are_left_out_and_never_zeros(
    tmp_path: Path, run_command: RunCommand
) -> None:
    rows = [
        {"id": "good", "question": "?", "skill": 1.0},
        {"id": "flaky", "question": "?", "skill": 1.0, "fails": "infrastructure", "fails_at": [1]},
        {"id": "gone", "question": "?", "skill": 1.0, "fails": "infrastructure"},
    ]
    more = ("-k", 2, "--json", "--set", "retries_infrastructure=0")
    code, out, err = run_command(*arguments(tmp_path, *more, rows=rows))
    assert code == 0, err
    result = json.loads(out)
    assert result["reward"]["mean"] == 1.0 and result["reward"]["low"] < 1.0
    assert (result["attempts"], result["requested"]) == (3, 6)
    assert result["left_out"] == {"infrastructure/raised": 3}
    assert result["pass_at"]["2"]["tasks"] == 1
    assert "the tool's server is gone" in err
    none = [row for row in rows if row["id"] == "gone"]
    code, _, err = run_command(*arguments(tmp_path, *more, rows=none))
    assert code == 1 and "no attempt has a reward" in err


def test_a_continued_evaluation_repeats_what_infrastructure_failures_left_out(
    tmp_path: Path, run_command: RunCommand, caplog: pytest.LogCaptureFixture
) -> None:
    marks, repaired = tmp_path / "marks", tmp_path / "repaired"
    row = {"question": "?", "skill": 1.0, "marks": str(marks)}
    fails = {"fails": "infrastructure", "fails_at": [1], "until": str(repaired)}
    rows = [{**row, "id": "good"}, {**row, **fails, "id": "flaky"}, {**row, "id": "wrong", "skill": 0.0}]
    more = ("-k", 2, "--json", "--run", "e", "--set", "retries_infrastructure=1")
    code, out, err = run_command(*arguments(tmp_path, *more, rows=rows))
    assert code == 0, err
    first = json.loads(out)
    assert (first["attempts"], first["left_out"]) == (5, {"infrastructure/raised": 1})
    assert "they run again" not in caplog.text
    sessions = marks.read_text().split()
    left_out = [session for session in sessions if "flaky-r1" in session]
    assert [session.rpartition(".")[2] for session in left_out] == ["1", "2"]

    code, out, err = run_command("eval", "--run", "e", "--json")  # it fails again, with all its retries
    assert code == 0, err
    assert "infrastructure failures left out 1 attempts; they run again" in caplog.text
    assert json.loads(out)["left_out"] == {"infrastructure/raised": 1}
    again = marks.read_text().split()[len(sessions) :]
    assert [session.rpartition(".")[2] for session in again] == ["3", "4"]

    repaired.touch()
    code, out, err = run_command("eval", "--run", "e", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert (result["attempts"], result["left_out"]) == (6, {})
    assert result["reward"]["mean"] == pytest.approx(4 / 6)
    third = marks.read_text().split()[len(sessions) + len(again) :]
    assert len(third) == 1 and third[0].endswith("flaky-r1.5")

    caplog.clear()
    code, out, err = run_command("eval", "--run", "e", "--json")
    assert json.loads(out)["attempts"] == 6 and "they run again" not in caplog.text
    assert len(marks.read_text().split()) == len(sessions) + 3


def test_an_evaluation_samples_as_the_validation_of_a_training_run(
    tmp_path: Path, run_command: RunCommand
) -> None:
    rows = [{"id": f"q{n}", "question": f"Question {n}?", "by_reply": True} for n in range(4)]
    val = write_tasks(tmp_path / "val.jsonl", rows)
    sizes = ("--steps", 1, "--tasks-per-step", 1, "--rollouts", 2, "--runtime", "inline", "--run", "trained")
    validation = ("--val-tasks", val, "--val-rollouts", 3, "--val-temperature", 1.0)
    words = train_arguments(tmp_path, "skilled_agent.py", rows, *sizes, *validation, *unlearned(tmp_path))
    code, _, err = run_command(*words)
    assert code == 0, err
    assert err.count("validation before training: reward") == 1  # frozen weights are validated once
    assert "validation before training" in run_command("show", "trained")[1]
    code, _, err = run_command(*arguments(tmp_path, "-k", 3, "--temperature", 1.0, "--run", "e", rows=rows))
    assert code == 0, err
    index = RunDirectory(tmp_path / "runs/trained").index
    validated = {row.id: (row.reward, row.sampled_tokens) for row in index.rollouts("split='val'")}
    evaluated = RunDirectory(tmp_path / "runs/e").index.rollouts()
    assert {row.id: (row.reward, row.sampled_tokens) for row in evaluated} == validated
    assert len(validated) == 12 and len({reward for reward, _ in validated.values()}) == 2


def test_truncated_sampling_reaches_the_turns_of_evaluations_and_frozen_runs(
    tmp_path: Path, run_command: RunCommand
) -> None:
    truncated = ("--top-p", 0.9, "--top-k", 5, "--temperature", 1.0)
    rows = [{"id": "q", "question": "Question?", "by_reply": True}]
    code, out, err = run_command(*arguments(tmp_path, *truncated, "--run", "e", "--json", rows=rows))
    assert code == 0, err
    assert (json.loads(out)["sampling"]["top_p"], json.loads(out)["sampling"]["top_k"]) == (0.9, 5)
    sizes = ("--steps", 1, "--tasks-per-step", 1, "--rollouts", 2, "--runtime", "inline", "--run", "t")
    words = train_arguments(tmp_path, "skilled_agent.py", rows, *sizes, *truncated, *unlearned(tmp_path))
    code, _, err = run_command(*words)
    assert code == 0, err
    for name in ("e", "t"):
        run = RunDirectory(tmp_path / "runs" / name)
        (row, *_) = run.index.rollouts()
        (turn, *_) = find_rollout(run, row.id)[1].turns
        assert (turn.sampling.temperature, turn.sampling.top_p, turn.sampling.top_k) == (1.0, 0.9, 5)


def test_a_killed_evaluation_continues_and_each_attempt_counts_once(
    tmp_path: Path, run_command: RunCommand
) -> None:
    rows = [{"id": f"q{n}", "question": "?", "skill": 0.5} for n in range(4)]
    process = start(tmp_path, *arguments(tmp_path, "-k", 20, "--run", "killed", rows=rows))
    with process:
        store = tmp_path / "runs/killed/rollout_store"
        wait_until(lambda: store.exists() and len(list(store.iterdir())) > 20, "some attempts have ended")
        process.send_signal(signal.SIGKILL)
    ended = rewards(tmp_path / "runs/killed")
    code, out, err = run_command("eval", "--run", "killed", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert (result["attempts"], result["requested"]) == (80, 80)
    assert {task["attempts"] for task in result["by_task"]} == {20}
    finished = rewards(tmp_path / "runs/killed")
    for task, values in ended.items():
        assert not Counter(values) - Counter(finished[task])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--endpoint", "http://127.0.0.1:1"), "--endpoint needs the name of the model"),
        (("--endpoint", "127.0.0.1:1", "--model", "m"), "must be an address"),
        (
            ("--endpoint", "http://127.0.0.1:1", "--model", "m", "--gateway", "http://127.0.0.1:1"),
            "give one of",
        ),
        (
            ("--endpoint", "http://127.0.0.1:1", "--model", "m", "--runtime", "sandbox"),
            "no gateway to deliver",
        ),
        (("--model", "nowhere"), "nowhere"),
        (("--model", POLICY, "-k", "0"), "--attempts 0"),
        (("--model", POLICY, "--compare", "nobody"), "unknown run 'nobody'"),
    ],
)
def test_invalid_options_are_refused_and_leave_no_run(
    options: tuple[object, ...], message: str, tmp_path: Path, run_command: RunCommand
) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", ROWS)
    code, _, err = run_command("eval", AGENT, "--tasks", tasks, *options)
    assert code == 2, err
    assert message in err
    assert not list(tmp_path.glob("runs/*"))


def test_more_attempts_than_asked_for_all_count(tmp_path: Path, run_command: RunCommand) -> None:
    code, _, err = run_command(*arguments(tmp_path, "-k", 3, "--run", "e", "--json"))
    assert code == 0, err
    code, out, err = run_command("eval", "--run", "e", "-k", 2, "--prompt-price", 3e6, "--json")
    result = json.loads(out)
    assert result["cost"]["total"] == 3 * result["cost"]["prompt_tokens"] > 0
    assert (code, result["attempts"], result["requested"]) == (0, 12, 12), err
    assert list(result["pass_at"]) == ["1", "2", "3"]
    err = run_command("eval", "--run", "e", "-k", 1)[2]
    assert "12 of 12 attempts of 4 tasks count; left out 0" in err and "cost " in err
    assert "this run is finished: its saved attempts count again" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--min", "nan"), "--min nan must be a finite number"),
        (("--pass-reward", "nan"), "--pass-reward nan must be a finite number"),
        (("--compare", "others"), "its 1 tasks with rewards have other ids than these 4, such as 'q0'"),
        (("--compare", "failed"), "run failed has no rollout with a reward"),
    ],
)
def test_comparisons_and_limits_are_checked_before_the_first_attempt(
    options: tuple[str, ...], message: str, tmp_path: Path, run_command: RunCommand
) -> None:
    others = [{"id": "z", "question": "?", "skill": 1.0}]
    failed = [{"id": "q0", "question": "?", "skill": 1.0, "fails": "infrastructure"}]
    never = ("--set", "retries_infrastructure=0")
    if "others" in options:
        assert run_command(*arguments(tmp_path, "--run", "others", rows=others))[0] == 0
    if "failed" in options:
        assert run_command(*arguments(tmp_path, "--run", "failed", *never, rows=failed))[0] == 1
    code, _, err = run_command(*arguments(tmp_path, "--run", "e", *options))
    assert code == 2 and message in err, err
    assert not (tmp_path / "runs/e").exists()


def test_an_evaluation_without_rewards_at_common_tasks_is_reported_all_the_same(
    tmp_path: Path, run_command: RunCommand
) -> None:
    never = ("--set", "retries_infrastructure=0")
    assert run_command(*arguments(tmp_path, "--run", "before"))[0] == 0
    rows = [{**ROWS[0], "fails": "infrastructure"}, {"id": "new", "question": "?", "skill": 1.0}]
    words = arguments(tmp_path, "--run", "some", "--compare", "before", *never, rows=rows)
    code, _, err = run_command(*words)
    assert code == 0, err
    assert "mean reward 1.000" in err and "not compared with before" in err
    words = arguments(tmp_path, "--run", "none", "--compare", "before", *never, rows=rows[:1])
    code, _, err = run_command(*words)
    assert code == 1 and "no attempt has a reward" in err
    assert "0 of 1 attempts of 0 tasks count" in err


def test_an_evaluation_is_not_continued_with_other_tasks(tmp_path: Path, run_command: RunCommand) -> None:
    assert run_command(*arguments(tmp_path, "--run", "e"))[0] == 0
    code, _, err = run_command(*arguments(tmp_path, "--run", "e", rows=ROWS[:2]))
    assert code == 2 and "tasks.jsonl has changed since evaluation e began" in err
    assert run_command("eval", "--run", "e")[0] == 0
    assert run_command(*arguments(tmp_path, "--run", "e"))[0] == 0


@pytest.mark.parametrize("words", [("codex",), ("--agent", "codex")])
def test_a_harness_on_harbor_tasks_gets_the_defaults_of_training(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    task = tmp_path / "tasks/shell-script"
    shutil.copytree(Path(HARBOR) / "shell-script", task)
    limits = (task / "task.toml").read_text().replace("timeout_sec = 60", "timeout_sec = 600")
    (task / "task.toml").write_text(limits)
    options = (*words, "--tasks", str(task.parent), "--model", str(POLICY))
    config = settings(*options)
    assert (config.agent, config.verifier) == ("codex", "afield.harbor.verifier:verify")
    assert (config.runtime, config.verifier_runtime, config.max_tokens) == ("sandbox", "process", 4096)
    assert config.attempt_timeout_s == 600 + 600 + 120
    config = settings(*options, "--attempt-timeout", "5", "--max-tokens", "8")
    assert (config.attempt_timeout_s, config.max_tokens) == (5.0, 8)


def settings(*options: str) -> TrainConfig:
    """Settings of a new evaluation with these options."""
    args = parser().parse_args(["eval", *options])
    evaluate.choose_agent(args)
    return evaluate.new_config(args, evaluate.settings_given(args))[0]


def test_an_evaluation_of_two_agents_is_refused(tmp_path: Path, run_command: RunCommand) -> None:
    code, _, err = run_command("eval", AGENT, "--agent", "codex", "--tasks", HARBOR, "--model", POLICY)
    assert code == 2 and "two agents" in err


@needs_bubblewrap
def test_an_agent_that_checks_harbor_tasks_is_evaluated_with_their_verifier(
    tmp_path: Path, run_command: RunCommand
) -> None:
    shutil.copytree(Path(HARBOR) / "shell-script", tmp_path / "tasks/shell-script")
    engine = [word for word in unlearned(tmp_path) if word != "--freeze-weights"]
    code, out, err = run_command(
        *("eval", "oracle", "--tasks", tmp_path / "tasks", "--model", POLICY, *engine, "--json")
    )
    assert code == 0, err
    result = json.loads(out)
    assert (result["agent"], result["attempts"], result["reward"]["mean"]) == ("oracle", 1, 1.0)


def test_rollouts_of_an_evaluation_are_exported(tmp_path: Path, run_command: RunCommand) -> None:
    words = arguments(tmp_path, "-k", 3, "--temperature", 1.0, "--run", "e")
    assert run_command(*words)[0] == 0
    best = {task for task, values in rewards(tmp_path / "runs/e").items() if 1.0 in values}
    code, out, err = run_command(
        *("export", "e", "--format", "sft", "--min-reward", 1, "--out", "pairs.jsonl", "--json")
    )
    assert code == 0, err
    pairs = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert {pair["task_id"] for pair in pairs} == best and best
    for name in ("jsonl", "parquet", "atif"):
        code, out, err = run_command("export", "e", "--format", name, "--out", f"all.{name}", "--json")
        assert (code, json.loads(out)["groups"]) == (0, 4), err
