"""Claude Code, over the Messages API."""

from __future__ import annotations

import json

from afield.harnesses.base import ClientCommand, ClientExit, ClientReport, Harness, Npm, Stage, read_output


def command(stage: Stage, instruction: str, *options: str) -> ClientCommand:
    argv = (str(stage.programs / "claude"), "-p", instruction, *options, "--model", stage.model)
    environment = {
        "IS_SANDBOX": "1",  # allows root to skip permissions
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "ANTHROPIC_BASE_URL": stage.base_url,
        "ANTHROPIC_API_KEY": stage.api_key,
    }
    return ClientCommand((*argv, "--dangerously-skip-permissions", "--output-format", "json"), environment)


def report(end: ClientExit, stage: Stage) -> ClientReport:
    try:
        result = json.loads(end.output.strip().splitlines()[-1])
        answer = str(result.get("result") or "")
        metrics = {"client_turns": float(result["num_turns"])}
    except (ValueError, LookupError, TypeError, AttributeError):
        return read_output(end)
    if result.get("is_error"):
        return ClientReport(error=answer or str(result.get("subtype")), metrics=metrics)
    return ClientReport(answer=answer, metrics=metrics)


agent = Harness(
    name="claude-code",
    program="claude",
    package=Npm(("@anthropic-ai/claude-code@2.1.325",)),
    protocol="Messages",
    command=command,
    report=report,
)
