"""Qwen Code, over the Chat Completions API."""

from __future__ import annotations

import json

from afield.harnesses.base import ClientCommand, Harness, Npm, Stage

SETTINGS = {"security": {"auth": {"selectedType": "openai"}}, "general": {"disableAutoUpdate": True}}


def command(stage: Stage, instruction: str) -> ClientCommand:
    environment = {
        "PATH": f"{stage.programs}:{stage.path}",  # its node is newer than that of most machines
        "OPENAI_API_KEY": stage.api_key,
        "OPENAI_BASE_URL": stage.openai_base_url,
        "OPENAI_MODEL": stage.model,
    }
    stage.write(".qwen/settings.json", json.dumps(SETTINGS))
    return ClientCommand((str(stage.programs / "qwen"), "--yolo", "-p", instruction), environment)


agent = Harness(
    name="qwen-code",
    program="qwen",
    package=Npm(("@qwen-code/qwen-code@0.24.4", "node@22.22.0")),
    protocol="Chat Completions",
    command=command,
)
