"""Harnesses end to end: `afield train --agent NAME` on Harbor tasks, checked against the engine.

`python -m bench.harnesses.training NAME [--json]` runs 16 rollouts of one harness. The scripted engine calls
the client's own tools: a rollout draws the right or a wrong command, so the verifier gives 1 or 0. Agents and
verifiers run in sandboxes. Every engine call must be in exactly one trajectory, token by token, or excluded
for a declared reason.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from afield import factory
from afield.conformance.model import hermes, write_model
from afield.conformance.scenario import ModelReply, ToolUse
from afield.engines.recording import read_recording
from afield.orchestrator.state import RunDirectory
from afield.types import RolloutResult

AFIELD = [str(Path(sys.executable).parent / "afield")]
CONTEXT = 400_000
TASKS, ROLLOUTS = 4, 4
TIMEOUT_S = 1200
SOLVED = "[step solved]"
PRINT_SOLVED = "printf '[step %s]\\n' solved"  # prints the marker without containing it
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
TITLES = ("You are a title generator", "Generate a concise title")

Call = Callable[[str], ModelReply]


def _call(name: str, key: str, **more: Any) -> Call:
    return lambda command: ModelReply(text="I run it.", uses=(ToolUse(name, {key: command, **more}),))


def _keystrokes(command: str, *, complete: bool = False) -> ModelReply:
    keys = [{"keystrokes": f"{command}\n", "duration": 1.0}] if command else []
    body = {"analysis": "Clear.", "plan": "Run it.", "commands": keys, "task_complete": complete}
    return ModelReply(text=json.dumps(body))


CALLS: dict[str, Call] = {
    "claude-code": _call("Bash", "command", description="Write the answer"),
    "codex": _call("exec_command", "cmd"),
    "opencode": _call("bash", "command", description="Write the answer"),
    "mini-swe-agent": _call("bash", "command"),
    "terminus-2": _keystrokes,
    "openhands": _call("terminal", "command", security_risk="LOW", summary="write the answer"),
    "qwen-code": _call("run_shell_command", "command", is_background=False),
    "pi": _call("bash", "command"),
}
"""Reply of the model that runs a shell command, for each harness."""
ENDS: dict[str, ModelReply] = {
    "mini-swe-agent": _call("bash", "command")(SUBMIT),
    "terminus-2": _keystrokes("", complete=True),
    "openhands": ModelReply(uses=(ToolUse("finish", {"message": "The answer is written."}),)),
}
"""Reply that ends the run, where text alone does not."""


def instruction(number: int) -> str:
    return f"Add {number} and {number + 25}, and write the sum into answer.txt. Task number {number}."


def script(harness: str, numbers: range) -> str:
    """Rows of the scripted engine: the last stage first, since the first row that matches answers."""
    end = hermes(ENDS.get(harness, ModelReply(text="The answer is written.")))
    rows: list[Mapping[str, Any]] = [{"match": title, "text": "Sums"} for title in TITLES]
    rows.append({"match": SOLVED, "text": end, "chunks": [3]})
    for number in numbers:
        commands = (f"echo {total} > answer.txt; {PRINT_SOLVED}" for total in (2 * number + 25, number))
        replies = [hermes(CALLS[harness](command)) for command in commands]
        rows.append({"match": f"Task number {number}.", "one_of": replies, "chunks": [3]})
    return "".join(f"{json.dumps(row)}\n" for row in rows)


FILES = {
    "task.toml": 'schema_version = "1.4"\n[agent]\ntimeout_sec = 600.0\n[verifier]\ntimeout_sec = 60.0\n',
    "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\nRUN echo numbers > topic.txt\n",
    "solution/solve.sh": "echo {total} > answer.txt\n",
    "tests/test.sh": """\
#!/bin/sh
test "$(cat topic.txt)" = numbers && test "$(cat answer.txt)" = {total}
test $? = 0 && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
""",
}
"""Files of a Harbor task; its verifier gives 1 for the right sum, else 0."""


def write_tasks(folder: Path, numbers: range) -> Path:
    """Write Harbor tasks; returns their directory."""
    for number in numbers:
        for name, text in (FILES | {"instruction.md": instruction(number)}).items():
            file = folder / "tasks" / f"sum-{number}" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("{total}", str(2 * number + 25)))
    return folder / "tasks"


def write_inputs(harness: str, folder: Path, numbers: range) -> tuple[Path, Path]:
    """Write the model and the script of the engine; returns their paths."""
    model = write_model(folder / "model")
    sizes = {"max_position_embeddings": CONTEXT, "vocab_size": factory.vocabulary_of(model).size}
    (model / "config.json").write_text(json.dumps(sizes))
    (folder / "script.jsonl").write_text(script(harness, numbers))
    return model, folder / "script.jsonl"


def train(
    harness: str, folder: Path, *options: str, tasks: int = TASKS, rollouts: int = ROLLOUTS
) -> dict[str, Any]:
    """Run `afield train --agent HARNESS` with frozen weights; returns what was measured."""
    numbers = range(11, 11 + tasks)
    model, scripted = write_inputs(harness, folder, numbers)
    command = [*AFIELD, "train", "--agent", harness, "--tasks", str(write_tasks(folder, numbers))]
    command += ["--model", str(model), "--engine", f"scripted={scripted}", "--freeze-weights"]
    command += ["--steps", "1", "--tasks-per-step", str(tasks), "--rollouts", str(rollouts)]
    command += ["--concurrency", "2", "--record-engine-calls", "--run", harness, "--json", *options]
    began = time.monotonic()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    run = RunDirectory(folder / "runs" / harness)
    finished = [result for step in run.steps() for result in run.read_rollouts(step)]
    return measure(finished, run) | {"harness": harness, "wall_s": round(time.monotonic() - began, 1)}


def measure(finished: list[RolloutResult], run: RunDirectory) -> dict[str, Any]:
    """Rewards and failures of a run, and the comparison of its trajectories with the engine's record."""
    rewards = [result.outcome.reward for result in finished]
    failures = [f"{f.kind}/{f.reason}: {f.message}" for result in finished if (f := result.outcome.failure)]
    calls, problems, tokens = compare(finished, run)
    return {
        "rollouts": len(finished),
        "solved": rewards.count(1.0),
        "missed": rewards.count(0.0),
        "failures": failures,
        "calls": calls,
        "trained_tokens": tokens,
        "excluded": sorted({exclusion.reason for result in finished for exclusion in result.excluded}),
        "problems": problems,
    }


def compare(finished: list[RolloutResult], run: RunDirectory) -> tuple[int, list[str], int]:
    """Engine calls, differences between trajectories and engine calls, and trained tokens."""
    served: dict[tuple[str, str], Any] = {}
    problems: list[str] = []
    for entry in read_recording(run.path / "engine-calls.jsonl"):
        session_id, _, turn_id = entry.call_id.rpartition("/")
        if (session_id, turn_id) in served:
            problems.append(f"{entry.call_id} was sampled twice")
        served[session_id, turn_id] = entry
    calls, tokens = len(served), 0
    for result in finished:
        for row in result.trajectories:
            for turn in row.turns:
                entry = served.pop((result.outcome.session_id, turn.id), None)
                tokens += turn.end - turn.start
                if entry is None or (
                    row.token_ids[: turn.start] != entry.prompt_ids
                    or row.token_ids[turn.start : turn.end] != entry.token_ids
                    or row.logprobs[turn.start : turn.end] != entry.logprobs
                ):
                    problems.append(f"{result.outcome.session_id}/{turn.id} differs from the engine's call")
        for exclusion in result.excluded:
            served.pop((result.outcome.session_id, exclusion.turn), None)
    problems += [f"{'/'.join(key)} is in no trajectory" for key in served]
    return calls, problems, tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("harness", choices=CALLS)
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON")
    parser.add_argument("--tasks", type=int, default=TASKS)
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = train(args.harness, Path(folder), tasks=args.tasks, rollouts=args.rollouts)
    print(json.dumps(result, indent=None if args.json else 2))
    return 0 if not result["problems"] and not result["failures"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
