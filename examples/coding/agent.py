"""A coding agent with one tool, a shell in its own copy of the repository. It hands in a patch, no reward."""

import json
import subprocess
from typing import Any

import openai
from repository import Repository

import afield

SYSTEM = "You fix code with the bash tool. The tests are run by: python -m unittest. Say DONE when they pass."
COMMAND = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
BASH: Any = {"name": "bash", "description": "Run a command in the repository.", "parameters": COMMAND}
CALLS, SHOWN = 8, 2000

# One connection pool for all rollouts of this process; `with_options` gives each its own URL and key.
CLIENT = openai.OpenAI(base_url="http://unset", api_key="unset")


@afield.agent
def agent(task: dict[str, Any], rollout: afield.Context) -> dict[str, Any]:
    client = CLIENT.with_options(base_url=rollout.openai_base_url, api_key=rollout.api_key)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["issue"]}]
    with Repository(task["files"]) as repository:
        for _ in range(CALLS):
            reply = client.chat.completions.create(
                model=rollout.model_id, messages=messages, tools=[{"type": "function", "function": BASH}]
            )
            message = reply.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = bash(repository, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result[-SHOWN:]})
        return {"patch": repository.patch()}


def bash(repository: Repository, arguments: str) -> str:
    try:
        done = repository.run("bash", "-c", json.loads(arguments)["command"])
    except (KeyError, TypeError, ValueError, OSError) as error:
        return f"This call does not work: {error!r}"
    except subprocess.TimeoutExpired as error:
        return f"stopped after {error.timeout} s"
    return f"{done.stdout}{done.stderr}exit code {done.returncode}"
