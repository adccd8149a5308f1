"""mini-swe-agent, over the Chat Completions API."""

from __future__ import annotations

from afield.harnesses.base import ClientCommand, Harness, PyPI, Stage


def command(stage: Stage, instruction: str) -> ClientCommand:
    argv = (str(stage.programs / "mini"), "-y", "--exit-immediately", "-t", instruction)
    environment = {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",  # it also repeats calls that the gateway refuses
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_API_KEY": stage.api_key,
        "OPENAI_API_BASE": stage.openai_base_url,
    }
    return ClientCommand((*argv, "-m", f"openai/{stage.model}"), environment)


agent = Harness(
    name="mini-swe-agent",
    program="mini",
    package=PyPI(("mini-swe-agent==2.4.6", "litellm==1.106.2", "openai==2.54.0", "mcp==2.3.0")),
    protocol="Chat Completions",
    command=command,
)
