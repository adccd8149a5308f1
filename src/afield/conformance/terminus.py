"""Conformance client terminus-2 (harbor), which types into a terminal.

Terminus-2 calls no tools: replies are JSON with keystrokes. The rollout details that it stores (prompt ids,
sampled ids, log-probabilities) must equal the engine's calls.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from afield.conformance.client import SCRIPTS, TASK, Client, ClientCommand, Stage, from_pypi
from afield.conformance.judge import ServedCall
from afield.conformance.scenario import (
    FAULTS,
    LEFT_OUT,
    LONG,
    Answer,
    ModelReply,
    NetworkFault,
    Scenario,
    marker,
    shell,
)

TASK_TOML = """\
schema_version = "1.4"
[metadata]
[verifier]
timeout_sec = 360.0
[agent]
timeout_sec = 360.0
[environment]
build_timeout_sec = 360.0
"""
# In tokens as the client counts them: seven steps fit, the output of MUCH does not.
LIMITS = {"max_input_tokens": 7000, "max_output_tokens": 2000}
THRESHOLD = 1000
MUCH = "seq -s ' ' 1000 3000"


def _commands(stage: Stage) -> list[ClientCommand]:
    task = stage.work / "task"
    (task / "environment").mkdir(parents=True)
    (task / "tests").mkdir()
    (task / "task.toml").write_text(TASK_TOML)
    (task / "instruction.md").write_text(TASK)
    (task / "environment" / "Dockerfile").write_text("FROM scratch\n")
    (task / "tests" / "test.sh").write_text("exit 0\n")
    options = {
        "api_base": stage.openai_base_url,
        "collect_rollout_details": "true",
        "record_terminal_session": "false",
        "proactive_summarization_threshold": str(THRESHOLD),
        "model_info": json.dumps(LIMITS),
    }
    argv = [str(stage.programs / "harbor"), "run", "-p", str(task), "-a", "terminus-2", "-n", "1", "--yes"]
    argv += ["-m", f"openai/{stage.model}", "-e", "local_environment:LocalEnvironment"]
    argv += ["-o", str(stage.work / "jobs"), "--disable-verification"]
    argv += [word for name, value in options.items() for word in ("--ak", f"{name}={value}")]
    environment = {
        "OPENAI_API_KEY": stage.api_key,
        "PYTHONPATH": str(SCRIPTS),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    return [ClientCommand(tuple(argv), environment)]


def _typed(said: str, *commands: str, complete: bool = False) -> ModelReply:
    keys = [{"keystrokes": f"{command}\n", "duration": 0.4} for command in commands]
    body = {"analysis": said, "plan": "Weiter – 次へ.", "commands": keys, "task_complete": complete}
    return ModelReply(text=json.dumps(body, ensure_ascii=False))


def _scenario() -> Scenario:
    replies: dict[str, Answer] = {}
    for n in range(9):
        said = LONG if n == 5 else f"Step {n} is done, naïvely ☂."
        before = ["true"] if n == 0 else [MUCH] if n == 6 else []
        replies[f"main-{n}"] = _typed(said, *before, shell("main", n + 1))
    replies["main-9"] = _typed("All steps are done. ✓", complete=True)
    # The summary loses the last keystrokes, so the answers name the step to continue from.
    asides: dict[str, Answer] = {
        "The next agent has a few questions": ModelReply(text=f"1. Go on from {marker('main', 8)}."),
        "You are about to hand off your work": ModelReply(text="* Steps one to seven – 七つ."),
        "You are picking up work from a previous": ModelReply(text="1. Where do I go on?"),
    }
    # Branches: the thread with its summary and answers, the questions, the thread after the handover.
    return Scenario(replies=replies, faults=FAULTS, asides=asides, branches=3, excluded=LEFT_OUT)


def _kept(stage: Stage, ledger: Sequence[ServedCall]) -> list[str]:
    served = {(entry.prompt_ids, entry.token_ids, entry.logprobs) for entry in ledger}
    turns: list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = []
    for path in (stage.work / "jobs").glob("*/*/result.json"):
        result = msgspec.json.decode(path.read_bytes())
        for detail in (result.get("agent_result") or {}).get("rollout_details") or []:
            columns = (detail["prompt_token_ids"], detail["completion_token_ids"], detail["logprobs"])
            turns += [(tuple(p), tuple(c), tuple(s)) for p, c, s in zip(*columns, strict=True)]
    strange = sum(turn not in served for turn in turns)
    problems = [f"{strange} of {len(turns)} turns terminus-2 kept are not what the engine served"]
    whole = sum(1 for entry in ledger if entry.token_ids)
    # The client never saw the responses that the proxy lost; its retries got them again.
    lost = sum(fault is NetworkFault.LOSE for fault in FAULTS.values())
    missing = [f"terminus-2 kept {len(set(turns))} turns, the engine served {whole}"]
    return problems * bool(strange) + missing * (not whole - lost <= len(set(turns)) <= whole)


TERMINUS = Client(
    name="terminus-2",
    install=from_pypi("terminus-2", "3.12"),
    commands=_commands,
    scenario=_scenario(),
    inspect=_kept,
)
