"""Codex, over the Responses API."""

from __future__ import annotations

import json

from afield.harnesses.base import ClientCommand, Harness, Npm, Stage

CONFIG = """\
model = {model}
model_provider = "afield"
{limit}features = {{ plugins = false }}

[model_providers.afield]
name = "afield"
base_url = {base_url}
env_key = "AFIELD_SESSION_KEY"
wire_api = "responses"

[analytics]
enabled = false
"""


def command(stage: Stage, instruction: str) -> ClientCommand:
    limit = f"model_auto_compact_token_limit = {stage.context_tokens}\n" if stage.context_tokens else ""
    values = {"model": json.dumps(stage.model), "base_url": json.dumps(stage.openai_base_url)}
    stage.write("config.toml", CONFIG.format(**values, limit=limit))
    argv = (str(stage.programs / "codex"), "exec", "--skip-git-repo-check")
    environment = {"CODEX_HOME": str(stage.home), "AFIELD_SESSION_KEY": stage.api_key}
    return ClientCommand((*argv, "--dangerously-bypass-approvals-and-sandbox", instruction), environment)


agent = Harness(
    name="codex",
    program="codex",
    package=Npm(("@openai/codex@0.166.0",)),
    protocol="Responses",
    command=command,
)
