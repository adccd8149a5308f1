"""OpenHands' command-line agent, over the Chat Completions API."""

from __future__ import annotations

import json

from afield.harnesses.base import ClientCommand, ClientExit, ClientReport, Harness, PyPI, Stage, read_output


def command(stage: Stage, instruction: str) -> ClientCommand:
    environment = {
        "LLM_API_KEY": stage.api_key,
        "LLM_BASE_URL": stage.openai_base_url,
        "LLM_MODEL": f"openai/{stage.model}",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENHANDS_SUPPRESS_BANNER": "1",
    }
    argv = (str(stage.programs / "openhands"), "--headless", "--json", "--override-with-envs")
    return ClientCommand((*argv, "--always-approve", "--task", instruction), environment)


def report(end: ClientExit, stage: Stage) -> ClientReport:
    """Read the events on standard output: the exit code is 0 after an error, too."""
    answer = ""
    for line in end.output.splitlines():
        try:
            event = json.loads(line) if line.startswith("{") else {}
        except ValueError:  # the tail begins within an event
            continue
        if event.get("kind") == "ConversationErrorEvent":
            return ClientReport(error=f"{event.get('code')}: {event.get('detail')}")
        answer = str((event.get("action") or {}).get("message") or answer)
    return ClientReport(answer=answer, error=read_output(end).error)


agent = Harness(
    name="openhands",
    program="openhands",
    package=PyPI(("openhands==1.16.0",), python="3.12"),
    protocol="Chat Completions",
    command=command,
    report=report,
)
