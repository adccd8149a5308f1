"""Agent that runs a trial of the `harbor` package.

    afield train --agent harbor-trial --tasks DIR --model MODEL

1. Harbor's `Trial` runs in this process with its own agent: terminus-2, or `agent_args.harness`. The agent's
   model is the rollout's session; its commands run in a sandbox with the task's environment.
2. The reward is that of Harbor's trial result. Its verifier is `FreshSandboxVerifier`.
3. A trial that ends with an exception fails by the type of that exception (`failures.TYPES`).

Needs Python 3.12 and `pip install 'afield[harbor]'`. Run it outside of sandboxes: `--runtime process`, or
`--runtime served=URL` if the trainer has another Python.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, field

from afield.datasets.harbor import HarborTask, read_task, task_directory
from afield.errors import TaskFailure, UsageError, VerifierFailure
from afield.harbor.failures import trial_failure
from afield.sdk.agent import Context, agent
from afield.settings.environment import set_environment
from afield.types import Reason

ENVIRONMENT = "afield.harbor.trial_environment:SandboxEnvironment"
VERIFIER = "afield.harbor.trial_environment:FreshSandboxVerifier"


class TrialArguments(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of the agent, `agent_args`."""

    tasks: str = ""
    """Directory of the tasks; a row's own `task_path` comes first."""
    template: str = ""
    """Path of a task's directory with columns of its row, such as /data/{suite}/{id}."""
    harness: str = "terminus-2"
    """Harbor agent: its name, or package.module:Class."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the Harbor agent, such as {"max_turns": 20}; they replace those that afield sets."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of an agent that runs inside the environment."""
    trials: str = ""
    """Directory that keeps the files of trials, in SESSION_ID; empty keeps none."""


@agent
async def trial(task: dict[str, Any], rollout: Context) -> dict[str, Any]:
    """Run one trial and return its rewards."""
    args = read_arguments(rollout.args)
    try:
        path = task_directory(task, root=Path(args.tasks) if args.tasks else None, template=args.template)
        harbor_task = read_task(path)
    except UsageError as error:
        raise TaskFailure(str(error), Reason.LAUNCH) from error
    with ExitStack() as stack:
        folder = args.trials or stack.enter_context(tempfile.TemporaryDirectory(prefix="trial-"))
        return read_result(await run_trial(trial_config(harbor_task, args, rollout, Path(folder))))


def read_arguments(args: Mapping[str, Any]) -> TrialArguments:
    try:
        return msgspec.convert(dict(args), TrialArguments)
    except msgspec.ValidationError as error:
        raise TaskFailure(f"agent_args: {error}", Reason.LAUNCH) from error


async def run_trial(config: Mapping[str, Any]) -> dict[str, Any]:
    """Run a trial of a TrialConfig in this process; returns its TrialResult as JSON."""
    # LiteLLM would fetch prices of models when it is imported.
    set_environment({"LITELLM_LOCAL_MODEL_COST_MAP": "True"})
    try:
        from harbor.models.trial.config import TrialConfig  # pyright: ignore[reportMissingImports]
        from harbor.trial.trial import Trial  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise TaskFailure(
            f"harbor cannot be imported ({error}): pip install 'afield[harbor]' with Python 3.12",
            Reason.LAUNCH,
        ) from error
    result = await (await Trial.create(TrialConfig.model_validate(config))).run()
    return msgspec.json.decode(result.model_dump_json())


def trial_config(task: HarborTask, args: TrialArguments, rollout: Context, folder: Path) -> dict[str, Any]:
    """Harbor's TrialConfig for one attempt."""
    return {
        "task": {"path": str(task.path)},
        "trial_name": rollout.session_id,
        "trials_dir": str(folder),
        "agent": agent_config(args, rollout),
        **environment_config(task, rollout.base_url),
    }


def environment_config(task: HarborTask, model_url: str) -> dict[str, Any]:
    """Environment and verifier of a TrialConfig: sandboxes that reach the model and nothing else."""
    url = urlsplit(model_url)
    port = url.port or (443 if url.scheme == "https" else 80)
    return {
        "environment": {
            "import_path": ENVIRONMENT,
            "kwargs": {"task_path": str(task.path), "allow": [f"{url.hostname}:{port}"]},
        },
        "verifier": {"import_path": VERIFIER},
    }


def agent_config(args: TrialArguments, rollout: Context) -> dict[str, Any]:
    """Harbor's AgentConfig: the agent with the session as its model."""
    own: dict[str, Any] = {}
    if args.harness == "terminus-2":
        own = {
            "api_base": rollout.openai_base_url,
            "llm_kwargs": {"api_key": rollout.api_key},
            "collect_rollout_details": True,
            "record_terminal_session": False,
        }
    name = {"import_path": args.harness} if ":" in args.harness else {"name": args.harness}
    variables = {
        "OPENAI_API_KEY": rollout.api_key,
        "OPENAI_BASE_URL": rollout.openai_base_url,
        "OPENAI_API_BASE": rollout.openai_base_url,
        "ANTHROPIC_API_KEY": rollout.api_key,
        "ANTHROPIC_BASE_URL": rollout.base_url,
    }
    return {
        **name,
        "model_name": f"openai/{rollout.model_id}",
        "kwargs": own | args.kwargs,
        "env": variables | args.env,
    }


def read_result(result: Mapping[str, Any]) -> dict[str, Any]:
    """Rewards of a Harbor trial result; raises the failure of its exception.

    A trial whose agent ran out of time or exited with an error has been verified, and keeps its rewards.
    """
    problem = result.get("exception_info") or {}
    rewards = (result.get("verifier_result") or {}).get("rewards")
    if not rewards:
        if problem:
            raise trial_failure(problem["exception_type"], problem["exception_message"])
        raise VerifierFailure("the Harbor trial has no rewards and no exception", Reason.REWARD)
    if "reward" not in rewards and len(rewards) > 1:
        message = f"none of the rewards {sorted(rewards)} is named 'reward'"
        raise VerifierFailure(f"{message}; tests/test.sh must write one with this name", Reason.REWARD)
    usage = result.get("agent_result") or {}
    tokens = {name: usage.get(f"n_{name}") for name in ("input_tokens", "output_tokens")}
    return {
        "reward": rewards.get("reward", next(iter(rewards.values()))),
        "metrics": {**rewards, **{name: count for name, count in tokens.items() if count is not None}},
        "stop_reason": problem.get("exception_type", ""),
    }
