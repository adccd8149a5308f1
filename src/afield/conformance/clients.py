"""The clients, each with its installation, its command line and its scenario."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from afield.conformance.client import TASK, Client, Command, Stage
from afield.conformance.environments import interpreter, npm_environment, python_environment
from afield.conformance.pins import NPM, PYTHON
from afield.conformance.scenario import Reply, Use, shell, steps


def _python(name: str, version: str | None = None) -> Callable[[Path], Path]:
    def install(cache: Path) -> Path:
        python = interpreter(version) if version else "python3"
        return python_environment(cache, name, PYTHON[name], python=python).parent

    return install


def _npm(name: str) -> Callable[[Path], Path]:
    return lambda cache: npm_environment(cache, name, NPM[name])


# --- mini-swe-agent ------------------------------------------------------------------------------


def _mini(stage: Stage) -> list[Command]:
    argv = (
        str(stage.programs / "mini"),
        "-y",
        "--exit-immediately",
        "-t",
        TASK,
        "-m",
        f"openai/{stage.model}",
    )
    environment = {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_API_KEY": stage.api_key,
        "OPENAI_API_BASE": stage.openai_base_url,
    }
    return [Command(argv, environment)]


def _bash(thread: str, step: int) -> Use:
    return Use("bash", {"command": shell(thread, step)})


SUBMIT = Reply(
    text="That was the last step.",
    uses=(Use("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),),
)
MINI = Client(
    name="mini-swe-agent",
    install=_python("mini-swe-agent"),
    commands=_mini,
    scenario=steps(_bash, instead={"main-9": SUBMIT}),
)

CLIENTS = {client.name: client for client in (MINI,)}
