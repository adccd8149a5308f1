"""opencode, over the Chat Completions API."""

from __future__ import annotations

import json

from afield.harnesses.base import ClientCommand, Harness, Npm, Stage

REPLY_TOKENS = 4096
OFF = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD")


def command(stage: Stage, instruction: str) -> ClientCommand:
    model: dict[str, object] = {"name": stage.model}
    if stage.context_tokens:
        output = min(REPLY_TOKENS, stage.context_tokens // 2)
        model["limit"] = {"context": stage.context_tokens, "output": output}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "afield",
        "options": {"baseURL": stage.openai_base_url, "apiKey": stage.api_key},
        "models": {stage.model: model},
    }
    named = f"afield/{stage.model}"
    config = {
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
        "provider": {"afield": provider},
        "model": named,
        "small_model": named,
    }
    stage.write(".config/opencode/opencode.json", json.dumps(config))
    argv = (str(stage.programs / "opencode"), "run", "--model", named, instruction)
    return ClientCommand(argv, {f"OPENCODE_DISABLE_{name}": "1" for name in OFF})


agent = Harness(
    name="opencode",
    program="opencode",
    package=Npm(("opencode-ai@1.18.33",)),
    protocol="Chat Completions",
    command=command,
)
