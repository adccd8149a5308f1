"""Agents that check Harbor tasks: `oracle` and `nop`.

A sound task gives the oracle a reward of 1 and `nop` a reward of 0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from afield.datasets.harbor import read_task, task_directory
from afield.errors import TaskFailure
from afield.harbor.environments import Environments, resolve
from afield.harbor.verifier import sandbox_options, upload_directory
from afield.local_sandbox.local_sandbox import LocalSandbox
from afield.sdk.agent import Context, agent
from afield.settings.environment import Environment, agent_environment
from afield.types import Task

SUBMISSION = "/dev/shm/submission.json"
SOLVE = "chmod +x /solution/solve.sh && exec /solution/solve.sh"


@agent
async def oracle(task: dict[str, Any], rollout: Context) -> dict[str, Any]:
    """Run `solution/solve.sh` in a sandbox and submit the changes, as an agent would.

    It runs outside of sandboxes and needs the argument `tasks`, the directory of the tasks.
    """
    if "tasks" not in rollout.args:
        raise TaskFailure("the oracle needs the directory of the tasks: --set agent_args.tasks=DIR")
    path = task_directory(task, root=Path(rollout.args["tasks"]))
    harbor_task = read_task(path)
    if not (path / "solution" / "solve.sh").is_file():
        raise TaskFailure(f"{path} has no solution/solve.sh")
    environments = Environments(Environment.read().environments, agent_environment())
    layer = await environments.layer(Task(str(task["id"]), {**task, "task_path": str(path)}))
    env = resolve(harbor_task.config.solution.env, agent_environment(), path / "task.toml")
    async with LocalSandbox(options=sandbox_options(harbor_task), layer=layer) as sandbox:
        await upload_directory(sandbox, path / "solution", "/solution", fresh="mkdir -p /logs/agent")
        result = await sandbox.exec(
            [sys.executable, "-P", "-m", "afield.sdk.workspace", SUBMISSION, "sh", "-c", SOLVE],
            env={"DEBIAN_FRONTEND": "noninteractive", **env},
            stdin=json.dumps(task).encode(),
            timeout=harbor_task.config.agent.timeout_sec or 600.0,
        )
        if not result.ok:
            output = (result.stderr or result.stdout)[-2000:]
            raise TaskFailure(f"{path}/solution/solve.sh: exit code {result.exit_code}: {output}")
        return {**json.loads(await sandbox.download(SUBMISSION)), "stop_reason": "solved"}


@agent
def nop(task: dict[str, Any]) -> dict[str, Any]:
    """Submit nothing."""
    return {"stop_reason": "nothing to do"}
