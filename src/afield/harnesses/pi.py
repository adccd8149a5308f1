"""pi, over the Chat Completions API."""

from __future__ import annotations

import json

from afield.harnesses.base import ClientCommand, Harness, Npm, Stage


def command(stage: Stage, instruction: str) -> ClientCommand:
    model: dict[str, object] = {"id": stage.model}
    if stage.context_tokens:
        model["contextWindow"] = stage.context_tokens
    provider = {
        "baseUrl": stage.openai_base_url,
        "api": "openai-completions",
        "apiKey": "AFIELD_SESSION_KEY",  # the variable's name
        "models": [model],
    }
    stage.write(".pi/agent/models.json", json.dumps({"providers": {"afield": provider}}))
    environment = {"AFIELD_SESSION_KEY": stage.api_key, "PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1"}
    argv = (str(stage.programs / "pi"), "--provider", "afield", "--model", stage.model)
    return ClientCommand((*argv, "--no-session", "--print", instruction), environment)


agent = Harness(
    name="pi",
    program="pi",
    package=Npm(("@mariozechner/pi-coding-agent@0.73.1",)),
    protocol="Chat Completions",
    command=command,
)
