"""Agents on Python frameworks, and mini-swe-agent."""

from __future__ import annotations

from collections.abc import Callable

from afield.conformance.client import SCRIPTS, TASK, Client, Command, Stage, from_pypi
from afield.conformance.scenario import Answer, Reply, Use, marker, shell, steps

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
    install=from_pypi("mini-swe-agent"),
    commands=_mini,
    scenario=steps(_bash, instead={"main-9": SUBMIT}),
)


# --- Python frameworks ---------------------------------------------------------------------------

GO_ON = f"Go on from where you were. {marker('main', 8)}"


def _script(name: str, *more: str) -> Callable[[Stage], list[Command]]:
    def commands(stage: Stage) -> list[Command]:
        session = (stage.openai_base_url, stage.api_key, stage.model)
        return [Command((str(stage.programs / "python"), str(SCRIPTS / name), *session, TASK, GO_ON, *more))]

    return commands


def _look(thread: str, step: int) -> Use:
    return Use("look", {"thread": thread, "step": step})


def _helped(argument: str) -> dict[str, Answer]:
    """A sub-agent at the second step, asked by this argument of a tool; and a stop at the seventh."""
    return {
        "main-2": Reply(uses=(Use("ask", {argument: f"Walk a little – 少し. {marker('sub', 0)}"}),)),
        "sub-0": Reply(text="I look twice.", uses=(_look("sub", 1), _look("sub", 1))),
        "sub-1": Reply(text=f"The helper is done; go on. {marker('main', 3)}"),
        "main-7": Reply(text="This is halfway."),
    }


SUMMARY = Reply(text="* Steps one to seven were done. ✓")

STRANDS = Client(
    name="strands",
    install=from_pypi("strands"),
    commands=_script("strands_agent.py"),
    scenario=steps(
        _look, instead=_helped("question"), asides={"Please summarize this conversation": SUMMARY}, branches=4
    ),
)
LANGGRAPH = Client(
    name="langgraph",
    install=from_pypi("langgraph"),
    commands=_script("langgraph_agent.py"),
    scenario=steps(_look, instead=_helped("question"), asides={"Please summarise this": SUMMARY}, branches=4),
)
AGENTS = Client(
    name="openai-agents",
    install=from_pypi("openai-agents"),
    commands=_script("openai_agents_agent.py", "responses"),
    scenario=steps(_look, instead=_helped("input"), branches=2),
)
AGENTS_CHAT = Client(
    name="openai-agents-chat",
    install=from_pypi("openai-agents"),
    commands=_script("openai_agents_agent.py", "chat"),
    scenario=steps(_look, instead=_helped("input"), branches=2),
)
