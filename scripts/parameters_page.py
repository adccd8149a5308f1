"""Writes docs/reference/parameters.md from the table of parameters: `.venv/bin/python scripts/parameters_page.py`."""

# ruff: noqa: E501  (rows of tables)
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from afield.gateway.parameters import TABLE, Parameter

PAGE = Path(__file__).parent.parent / "docs" / "parameters.md"
HEAD = """\
# Parameters of requests

What becomes of every parameter that a client can send, dialect by dialect: those of the `openai`, `anthropic`
and `google-genai` packages and the extra ones of vLLM. Nothing is ignored silently.

| fate | what it means |
| --- | --- |
| honoured | it does what the provider says, or what the table says |
| overridden | sampling belongs to the trainer; a request that asks for something else goes on, and its turn has a tag `overridden:NAME` |
| refused | 400 with the parameter's name and what to do instead; values that ask for nothing are accepted: null, empty ones (but for `web_search_options`), and those in the table |

A parameter that is in no table is refused too. A session that is opened with
[`unsupported = "ignore"`](config.md#sampling) goes on without what would be refused, and the turn has a tag
`ignored:NAME`. A parameter that the engine or the chat template at hand cannot honour is refused, or ignored, in the
same way: the message names it.

Tools that a provider would run itself (`web_search`, `code_execution`, `googleSearch`, ...) are never offered to the
model: a request that offers one goes on, and its turn has a tag `overridden:tools.NAME`; one that forces it gets 400.
`strict` in the definition of a tool is not enforced: the turn has a tag `overridden:tools.strict`.

## Thinking

| asked for | chat | responses | anthropic | gemini |
| --- | --- | --- | --- | --- |
| off | `reasoning_effort: "none"`, `enable_thinking: false` (also in `chat_template_kwargs`), `reasoning: {"enabled": false}`, `thinking: {"type": "disabled"}` | `reasoning: {"effort": "none"}` | `thinking: {"type": "disabled"}` | `thinkingBudget: 0` |
| thoughts in the answer | unless `include_reasoning: false` or `reasoning: {"exclude": true}` | with `reasoning.summary` (as the summary) or `include_reasoning: true` (as the content) | with `thinking` of type `enabled` or `adaptive`; only a signature with `display: "omitted"` | with `includeThoughts: true` |

Thinking is turned on and off by the chat template's own switch (`enable_thinking` or `thinking`), which is found by
rendering the template; each setting has a root of its own in the session's forest. A template that cannot turn thinking
off answers 400; for a model that never thinks, off is what it does. A request that says nothing leaves it to the
template, in every dialect. Arguments that the trainer gave the template come before a request's, and the turn has a tag.

Hidden thoughts are sampled, counted in the usage, recorded and trained like others. A client sends its conversation back
without them; it is recognised, and goes on from the tokens that were sampled.
"""
TITLES = {
    "chat": "Chat Completions",
    "completions": "Completions",
    "responses": "Responses",
    "anthropic": "Messages",
    "gemini": "generateContent",
}


def page() -> str:
    return HEAD + "".join(line for dialect in TABLE for line in _section(dialect))


def _section(dialect: str) -> Iterator[str]:
    yield f"\n## {TITLES[dialect]}\n\n| parameter | fate | what it does, or what to do instead | accepted |\n"
    yield "| --- | --- | --- | --- |\n"
    groups: dict[tuple[str, str, str], list[str]] = {}
    for entry in TABLE[dialect].values():
        groups.setdefault((entry.fate, entry.effect, _accepted(entry)), []).append(f"`{entry.name}`")
    for (fate, effect, accepted), names in groups.items():
        yield f"| {', '.join(names)} | {fate} | {effect} | {accepted} |\n"


def _accepted(entry: Parameter) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in entry.off)


if __name__ == "__main__":
    PAGE.write_text(page())
