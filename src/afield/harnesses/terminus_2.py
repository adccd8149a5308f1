"""Terminus 2, Harbor's own agent, over the Chat Completions API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from afield.harnesses.base import ClientCommand, ClientExit, ClientReport, Harness, PyPI, Stage, read_output

DAY_S = 86_400.0  # the rollout's own limits end it earlier
TASK = f"""\
schema_version = "1.4"
[agent]
timeout_sec = {DAY_S}
[verifier]
timeout_sec = {DAY_S}
"""
OUTPUT_TOKENS = 4096


def command(stage: Stage, instruction: str, options: Mapping[str, str] | None = None) -> ClientCommand:
    """Command of `harbor run` on a task with the instruction, in the directory where it is started."""
    stage.write("task/task.toml", TASK)
    stage.write("task/instruction.md", instruction)
    stage.write("task/environment/Dockerfile", "FROM scratch\n")
    stage.write("task/tests/test.sh", "exit 0\n")
    values = {"api_base": stage.openai_base_url, "record_terminal_session": "false", **(options or {})}
    if stage.context_tokens:
        sizes = {"max_input_tokens": stage.context_tokens, "max_output_tokens": OUTPUT_TOKENS}
        values["model_info"] = json.dumps(sizes)
    argv = [str(stage.programs / "harbor"), "run", "-p", str(stage.home / "task"), "-a", "terminus-2"]
    argv += ["-n", "1", "--yes", "-m", f"openai/{stage.model}", "-e", "harbor_environment:LocalEnvironment"]
    argv += ["-o", str(stage.home / "jobs"), "--disable-verification"]
    argv += [word for name, value in values.items() for word in ("--ak", f"{name}={value}")]
    environment = {
        "OPENAI_API_KEY": stage.api_key,
        "PYTHONPATH": str(Path(__file__).parent),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    return ClientCommand(tuple(argv), environment)


def report(end: ClientExit, stage: Stage) -> ClientReport:
    for file in (stage.home / "jobs").glob("*/*/result.json"):
        problem = json.loads(file.read_bytes()).get("exception_info")
        if problem:
            return ClientReport(error=f"{problem.get('exception_type')}: {problem.get('exception_message')}")
        return ClientReport()
    return read_output(end)


agent = Harness(
    name="terminus-2",
    program="harbor",
    package=PyPI(("harbor==0.24.0", "litellm==1.106.2", "openai==2.54.0"), python="3.12"),
    protocol="Chat Completions",
    command=command,
    report=report,
)
