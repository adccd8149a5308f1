"""Conformance clients: agents on Python frameworks, and mini-swe-agent."""

from __future__ import annotations

from collections.abc import Callable

from afield.conformance.client import SCRIPTS, TASK, Client, ClientCommand, Stage, from_pypi
from afield.conformance.scenario import ABORTED, Answer, ModelReply, ToolUse, marker, shell, steps

# --- mini-swe-agent ------------------------------------------------------------------------------


def _mini(stage: Stage) -> list[ClientCommand]:
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
    return [ClientCommand(argv, environment)]


def _bash(thread: str, step: int) -> ToolUse:
    return ToolUse("bash", {"command": shell(thread, step)})


SUBMIT = ModelReply(
    text="That was the last step.",
    uses=(ToolUse("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),),
)
MINI = Client(
    name="mini-swe-agent",
    install=from_pypi("mini-swe-agent"),
    commands=_mini,
    scenario=steps(_bash, instead={"main-9": SUBMIT}),
)


# --- Python frameworks ---------------------------------------------------------------------------

GO_ON = f"Go on from where you were. {marker('main', 8)}"


def _script(name: str, *more: str) -> Callable[[Stage], list[ClientCommand]]:
    def commands(stage: Stage) -> list[ClientCommand]:
        session = (stage.openai_base_url, stage.api_key, stage.model)
        return [
            ClientCommand((str(stage.programs / "python"), str(SCRIPTS / name), *session, TASK, GO_ON, *more))
        ]

    return commands


def _look(thread: str, step: int) -> ToolUse:
    return ToolUse("look", {"thread": thread, "step": step})


def _helped(argument: str) -> dict[str, Answer]:
    """Replies that call a sub-agent at step 2, by this tool argument, and end the first run at step 7."""
    return {
        "main-2": ModelReply(uses=(ToolUse("ask", {argument: f"Walk a little – 少し. {marker('sub', 0)}"}),)),
        "sub-0": ModelReply(text="I look twice.", uses=(_look("sub", 1), _look("sub", 1))),
        "sub-1": ModelReply(text=f"The helper is done; go on. {marker('main', 3)}"),
        "main-7": ModelReply(text="This is halfway."),
    }


SUMMARY = ModelReply(text="* Steps one to seven were done. ✓")

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

# --- Pydantic AI, smolagents, LiteLLM, Google ADK ------------------------------------------------

PYDANTIC = Client(
    name="pydantic-ai",
    install=from_pypi("pydantic-ai"),
    commands=_script("pydantic_ai_agent.py"),
    scenario=steps(_look, instead=_helped("question"), branches=2),
)


def _final(text: str) -> ModelReply:
    return ModelReply(text="Done.", uses=(ToolUse("final_answer", {"answer": text}),))


SMOLAGENTS = Client(
    name="smolagents",
    install=from_pypi("smolagents"),
    commands=_script("smolagents_agent.py"),
    scenario=steps(
        _look,
        instead=_helped("task")
        | {
            "sub-1": _final(f"The helper is done; go on. {marker('main', 3)}"),
            "main-7": _final("This is halfway."),
            "main-9": _final("All steps are done."),
        },
        branches=12,  # smolagents rewrites its history as prose, so no turn continues another
    ),
)


def _litellm(provider: str) -> Callable[[Stage], list[ClientCommand]]:
    """Commands for a LiteLLM provider; the Gemini API is at the session's base URL, OpenAI's at `/v1`."""

    def commands(stage: Stage) -> list[ClientCommand]:
        base_url = stage.base_url if provider == "gemini" else stage.openai_base_url
        argv = (str(stage.programs / "python"), str(SCRIPTS / "litellm_agent.py"))
        session = (base_url, stage.api_key, f"{provider}/{stage.model}")
        words = (TASK, GO_ON, "plain" if provider == "gemini" else "keys")
        return [ClientCommand((*argv, *session, *words), {"LITELLM_LOCAL_MODEL_COST_MAP": "True"})]

    return commands


LITELLM = Client(
    name="litellm",
    install=from_pypi("litellm"),
    commands=_litellm("openai"),
    # With idempotency keys, the gateway repeats a lost response without sampling again.
    scenario=steps(_look, instead=_helped("question"), branches=2, excluded={ABORTED: ("main-5",)}),
)
LITELLM_GEMINI = Client(
    name="litellm-gemini",
    install=from_pypi("litellm"),
    commands=_litellm("gemini"),
    scenario=steps(_look, instead=_helped("question"), branches=2),
)


def _adk(stage: Stage) -> list[ClientCommand]:
    environment = {"GOOGLE_API_KEY": stage.api_key, "GOOGLE_GEMINI_BASE_URL": stage.base_url}
    argv = (str(stage.programs / "python"), str(SCRIPTS / "google_adk_agent.py"), stage.model, TASK, GO_ON)
    return [ClientCommand(argv, environment)]


ADK = Client(
    name="google-adk",
    install=from_pypi("google-adk"),
    commands=_adk,
    scenario=steps(_look, instead=_helped("request"), branches=2),
)
