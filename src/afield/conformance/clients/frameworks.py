"""Conformance clients: agents on Python frameworks, mini-swe-agent and Terminus 2."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import msgspec

from afield.conformance.clients.base import AGENT_SCRIPTS, TASK, Client, from_pypi
from afield.conformance.judge import ServedCall
from afield.conformance.scenario import (
    ABORTED,
    FAULTS,
    LEFT_OUT,
    LONG,
    Answer,
    ModelReply,
    NetworkFault,
    Scenario,
    ToolUse,
    marker,
    shell,
    steps,
)
from afield.harnesses import mini_swe_agent, terminus_2
from afield.harnesses.base import ClientCommand, Stage

# --- mini-swe-agent ------------------------------------------------------------------------------


def _bash(thread: str, step: int) -> ToolUse:
    return ToolUse("bash", {"command": shell(thread, step)})


SUBMIT = ModelReply(
    text="That was the last step.",
    uses=(ToolUse("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),),
)
MINI = Client(
    name="mini-swe-agent",
    install=mini_swe_agent.agent.install,
    commands=lambda stage: [mini_swe_agent.command(stage, TASK)],
    scenario=steps(_bash, instead={"main-9": SUBMIT}),
)


# --- Python frameworks ---------------------------------------------------------------------------

GO_ON = f"Go on from where you were. {marker('main', 8)}"


def _script(name: str, *more: str) -> Callable[[Stage], list[ClientCommand]]:
    def commands(stage: Stage) -> list[ClientCommand]:
        session = (stage.openai_base_url, stage.api_key, stage.model)
        return [
            ClientCommand(
                (str(stage.programs / "python"), str(AGENT_SCRIPTS / name), *session, TASK, GO_ON, *more)
            )
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
        argv = (str(stage.programs / "python"), str(AGENT_SCRIPTS / "litellm_agent.py"))
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
    argv = (
        str(stage.programs / "python"),
        str(AGENT_SCRIPTS / "google_adk_agent.py"),
        stage.model,
        TASK,
        GO_ON,
    )
    return [ClientCommand(argv, environment)]


ADK = Client(
    name="google-adk",
    install=from_pypi("google-adk"),
    commands=_adk,
    scenario=steps(_look, instead=_helped("request"), branches=2),
)


# --- Terminus 2 ----------------------------------------------------------------------------------

# In tokens as the client counts them: seven steps fit, the output of MUCH does not.
LIMITS = {"max_input_tokens": 7000, "max_output_tokens": 2000}
THRESHOLD = 1000
MUCH = "seq -s ' ' 1000 3000"


def _commands(stage: Stage) -> list[ClientCommand]:
    options = {
        "collect_rollout_details": "true",
        "proactive_summarization_threshold": str(THRESHOLD),
        "model_info": json.dumps(LIMITS),
    }
    return [terminus_2.command(stage, TASK, options)]


def _typed(analysis: str, *commands: str, complete: bool = False) -> ModelReply:
    keys = [{"keystrokes": f"{command}\n", "duration": 0.4} for command in commands]
    body = {"analysis": analysis, "plan": "Weiter – 次へ.", "commands": keys, "task_complete": complete}
    return ModelReply(text=json.dumps(body, ensure_ascii=False))


def _scenario() -> Scenario:
    replies: dict[str, Answer] = {}
    for n in range(9):
        message = LONG if n == 5 else f"Step {n} is done, naïvely ☂."
        before = ["true"] if n == 0 else [MUCH] if n == 6 else []
        replies[f"main-{n}"] = _typed(message, *before, shell("main", n + 1))
    replies["main-9"] = _typed("All steps are done. ✓", complete=True)
    # The summary loses the last keystrokes, so the answers name the step to continue from.
    asides: dict[str, Answer] = {
        "The next agent has a few questions": ModelReply(text=f"1. Go on from {marker('main', 8)}."),
        "You are about to hand off your work": ModelReply(text="* Steps one to seven – 七つ."),
        "You are picking up work from a previous": ModelReply(text="1. Where do I go on?"),
    }
    # Branches: the thread with its summary and answers, the questions, the thread after the handover.
    return Scenario(replies=replies, faults=FAULTS, asides=asides, branches=3, excluded=LEFT_OUT)


def _kept(stage: Stage, engine_calls: Sequence[ServedCall]) -> list[str]:
    served = {(entry.prompt_ids, entry.token_ids, entry.logprobs) for entry in engine_calls}
    turns: list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = []
    for path in (stage.home / "jobs").glob("*/*/result.json"):
        result = msgspec.json.decode(path.read_bytes())
        for detail in (result.get("agent_result") or {}).get("rollout_details") or []:
            columns = (detail["prompt_token_ids"], detail["completion_token_ids"], detail["logprobs"])
            turns += [(tuple(p), tuple(c), tuple(s)) for p, c, s in zip(*columns, strict=True)]
    strange = sum(turn not in served for turn in turns)
    problems = [f"{strange} of {len(turns)} turns terminus-2 kept are not what the engine served"]
    whole = sum(1 for entry in engine_calls if entry.token_ids)
    # The client never saw the responses that the proxy lost; its retries got them again.
    lost = sum(fault is NetworkFault.LOSE for fault in FAULTS.values())
    missing = [f"terminus-2 kept {len(set(turns))} turns, the engine served {whole}"]
    return problems * bool(strange) + missing * (not whole - lost <= len(set(turns)) <= whole)


TERMINUS = Client(
    name="terminus-2",
    install=terminus_2.agent.install,
    commands=_commands,
    scenario=_scenario(),
    inspect=_kept,
)
