"""Conformance clients: command-line coding agents."""

from __future__ import annotations

import json
import re

from msgspec import structs

from afield.conformance.clients.base import TASK, Client, from_npm
from afield.conformance.scenario import (
    ABANDONED,
    ABORTED,
    BESIDE,
    LEFT_OUT,
    LONG,
    Answer,
    ModelReply,
    NetworkFault,
    Scenario,
    ToolUse,
    bracketed,
    last_marker,
    marker,
    shell,
    steps,
)
from afield.harnesses import claude_code, codex, opencode, qwen_code
from afield.harnesses.base import ClientCommand, Stage

GO_ON = f"Go on from where you were. {marker('main', 8)}"


def _so_far(prompt: str) -> ModelReply:
    """Summary that contains the last marker of the prompt."""
    return ModelReply(
        text=f"* Everything was done up to here – そこまで: {bracketed(last_marker(prompt) or '')}"
    )


# --- Claude Code ---------------------------------------------------------------------------------


def _claude(stage: Stage) -> list[ClientCommand]:
    words = ((TASK,), ("/compact", "--continue"), (GO_ON, "--continue"))
    return [claude_code.command(stage, *more) for more in words]


def _claude_bash(thread: str, step: int) -> ToolUse:
    return ToolUse("Bash", {"command": shell(thread, step), "description": f"Step {step} – 歩"})


def _claude_scenario() -> Scenario:
    ask = {
        "subagent_type": "general-purpose",
        "description": "Walk a little",
        "prompt": f"Walk a little on your own. {marker('sub', 0)}",
        "run_in_background": False,
    }
    instead: dict[str, Answer] = {
        "main-2": ModelReply(text="Somebody else can do this.", uses=(ToolUse("Agent", ask),)),
        "sub-0": ModelReply(text="I walk.", uses=(_claude_bash("sub", 1), _claude_bash("sub", 1))),
        "sub-1": ModelReply(text=f"The helper is done; go on. {marker('main', 3)}"),
        "main-7": ModelReply(text="This is halfway."),
    }
    summary = ModelReply(
        text="<analysis>\nShort – 短い.\n</analysis>\n<summary>\nSteps one to seven.\n</summary>"
    )
    # Branches: the main thread, its sub-agent, the summary (without the last turn), the new context.
    return steps(_claude_bash, instead=instead, asides={"Respond with TEXT ONLY": summary}, branches=4)


CLAUDE_CODE = Client(
    name="claude-code",
    install=claude_code.agent.install,
    commands=_claude,
    scenario=_claude_scenario(),
)


# --- Codex ---------------------------------------------------------------------------------------

COMPACT_AT = 30_000  # tokens of the suite's tokenizer: more than the first prompt, less than MUCH prints
MUCH = "seq 10000 16000"


def _codex(stage: Stage) -> list[ClientCommand]:
    return [codex.command(structs.replace(stage, context_tokens=COMPACT_AT), TASK)]


def _codex_exec(thread: str, step: int) -> ToolUse:
    return ToolUse("exec_command", {"cmd": shell(thread, step)})


def _codex_sub(prompt: str) -> ModelReply:
    """First step of the sub-agent or, in the thread that spawned it, a call that waits for it."""
    if spawned := re.findall(r'"agent_id":\s*"([^"]+)"', prompt):
        return ModelReply(uses=(ToolUse("wait_agent", {"targets": spawned[-1:], "timeout_ms": 60_000}),))
    return ModelReply(text="I walk.", uses=(_codex_exec("sub", 1), _codex_exec("sub", 1)))


def _codex_scenario() -> Scenario:
    ask = {"message": f"Walk a little on your own. {marker('sub', 0)}"}
    much = ToolUse("exec_command", {"cmd": f"{MUCH}; {shell('main', 7)}", "max_output_tokens": 20000})
    instead: dict[str, Answer] = {
        "main-2": ModelReply(text="Somebody else can do this.", uses=(ToolUse("spawn_agent", ask),)),
        "sub-0": _codex_sub,
        "sub-1": ModelReply(text=f"The helper is done; go on. {marker('main', 3)}"),
        "main-6": ModelReply(text="Now for a lot of text.", uses=(much,)),
    }
    asides: dict[str, Answer] = {"CONTEXT CHECKPOINT COMPACTION": _so_far}
    # Branches: before the compaction, the sub-agent, the summary (requested without tools), after it.
    return steps(_codex_exec, instead=instead, asides=asides, branches=4)


CODEX = Client(name="codex", install=codex.agent.install, commands=_codex, scenario=_codex_scenario())


# --- opencode ------------------------------------------------------------------------------------


OPENCODE_CONTEXT = 32_000  # the first prompt fits, the output of MUCH does not


def _opencode(stage: Stage) -> list[ClientCommand]:
    return [opencode.command(structs.replace(stage, context_tokens=OPENCODE_CONTEXT), TASK)]


def _opencode_bash(thread: str, step: int) -> ToolUse:
    return ToolUse("bash", {"command": shell(thread, step), "description": f"Step {step} – 歩"})


def _opencode_scenario() -> Scenario:
    ask = {
        "description": "Walk a little",
        "prompt": f"Walk a little on your own. {marker('sub', 0)}",
        "subagent_type": "general",
    }
    instead: dict[str, Answer] = {
        "main-2": ModelReply(text="Somebody else can do this.", uses=(ToolUse("task", ask),)),
        "sub-0": ModelReply(text="I walk.", uses=(_opencode_bash("sub", 1), _opencode_bash("sub", 1))),
        "sub-1": ModelReply(text=f"The helper is done; go on. {marker('main', 3)}"),
        "main-6": ModelReply(
            text="Now for a lot of text.",
            uses=(ToolUse("bash", {"command": f"{MUCH}; {shell('main', 7)}", "description": "Much"}),),
        ),
    }
    asides: dict[str, Answer] = {
        "You are a title generator": ModelReply(text="Steps, one by one"),
        "You are a context summarization agent": _so_far,
    }
    # Branches: the title, before the compaction, the sub-agent, the summary, after it.
    excluded = {**LEFT_OUT, "side:opencode/title": ("You are a title generator",)}
    return steps(_opencode_bash, instead=instead, asides=asides, branches=5, excluded=excluded)


OPENCODE = Client(
    name="opencode", install=opencode.agent.install, commands=_opencode, scenario=_opencode_scenario()
)


# --- Qwen Code and Gemini CLI --------------------------------------------------------------------


def _shell_command(thread: str, step: int) -> ToolUse:
    # The sleep is needed because Qwen Code may miss the output of a command that ends at once.
    return ToolUse(
        "run_shell_command", {"command": f"{shell(thread, step)}; sleep 0.3", "is_background": False}
    )


QWEN_CODE = Client(
    name="qwen-code",
    install=qwen_code.agent.install,
    commands=lambda stage: [qwen_code.command(stage, TASK)],
    # After the cut, Qwen Code requests a continuation and stores both parts as one message.
    scenario=steps(_shell_command, branches=2),
)


def _gemini_cli(stage: Stage) -> list[ClientCommand]:
    environment = {
        "GEMINI_API_KEY": stage.api_key,
        "GOOGLE_GEMINI_BASE_URL": stage.base_url,
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
    }
    settings = {
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
    }
    (stage.home / ".gemini").mkdir()
    (stage.home / ".gemini" / "settings.json").write_text(json.dumps(settings))
    argv = (str(stage.programs / "gemini"), "--yolo", "-m", stage.model)
    words = (("-p", TASK), ("--resume", "latest", "-p", GO_ON))
    return [ClientCommand((*argv, *more), environment) for more in words]


def _gemini_shell(thread: str, step: int) -> ToolUse:
    return ToolUse("run_shell_command", {"command": shell(thread, step), "description": f"Step {step} – 歩"})


def _gemini_scenario() -> Scenario:
    """Scenario with other faults: Gemini CLI exits when its connection is reset.

    It also takes a broken stream for the whole reply, except after a user message.
    """
    instead: dict[str, Answer] = {
        "main-0": ModelReply(text=LONG, uses=(_gemini_shell(BESIDE, 1), _gemini_shell("main", 1))),
        "main-5": ModelReply(text="Step 5 is done.", uses=(_gemini_shell("main", 6),)),
        "main-7": ModelReply(text="This is halfway."),
        "main-8": ModelReply(text=LONG, uses=(_gemini_shell("main", 9),)),
    }
    faults = {"main-3": NetworkFault.REFUSE, "main-0": NetworkFault.CUT, "main-8": NetworkFault.LOSE}
    excluded = {ABORTED: ("main-0",), ABANDONED: ("main-8",)}
    # A resumed session begins with another context, so it is a second branch.
    return steps(_gemini_shell, instead=instead, faults=faults, excluded=excluded, clean=True, branches=2)


GEMINI_CLI = Client(
    name="gemini-cli",
    install=from_npm("gemini-cli"),
    commands=_gemini_cli,
    scenario=_gemini_scenario(),
)
