"""Writes docs/reference/parameters.md from the table of parameters: `.venv/bin/python scripts/parameters_page.py`."""

# ruff: noqa: E501  (rows of tables)
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from afield.gateway.parameters import TABLE, RequestParameter

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "parameters.md"
HEAD = """\
# Request parameters

After this page you know what the gateway does with every parameter that a client can send: those of the `openai`, `anthropic` and `google-genai`
packages and the extra ones of vLLM. The gateway ignores nothing silently. `scripts/parameters_page.py` writes this page.

| fate | meaning |
| --- | --- |
| honoured | the gateway supports it as the provider describes, or as the table says |
| overridden | the trainer owns sampling; the request continues without it, and its turn gets a tag `overridden:NAME` |
| refused | 400 with the parameter's name and the alternative; values without effect are accepted: null, empty ones (except `web_search_options`), and those in the column "accepted" |

A parameter in no table is refused too. A session with [`unsupported = "ignore"`](http-api.md#open-a-session) continues without the refused parameter, and the turn gets a tag
`ignored:NAME`. The same holds for a parameter that the engine or the chat template cannot support.

The gateway never offers tools that a provider runs itself (`web_search`, `code_execution`, `googleSearch`, ...). A request with such a tool continues, and its turn gets a tag
`overridden:tools.NAME`; a request that forces it gets 400. `strict` in a tool definition is not enforced: the turn gets a tag `overridden:tools.strict`.

## Thinking

| request | chat | responses | anthropic | gemini |
| --- | --- | --- | --- | --- |
| off | `reasoning_effort: "none"`, `enable_thinking: false` (also in `chat_template_kwargs`), `reasoning: {"enabled": false}`, `thinking: {"type": "disabled"}` | `reasoning: {"effort": "none"}` | `thinking: {"type": "disabled"}` | `thinkingBudget: 0` |
| thinking in the answer | unless `include_reasoning: false` or `reasoning: {"exclude": true}` | with `reasoning.summary` (as the summary) or `include_reasoning: true` (as the content) | with `thinking` of type `enabled` or `adaptive`; only a signature with `display: "omitted"` | with `includeThoughts: true` |

The chat template's own switch (`enable_thinking` or `thinking`) turns thinking on and off; the gateway finds it by rendering the template. Each setting has its own root in the
session's tree. If a template cannot turn thinking off, the request gets 400, unless the model never thinks. A request without the parameter leaves it to the template. Template
arguments of the trainer override a request's, and the turn gets a tag.

Hidden thinking is sampled, counted in the usage, recorded and trained. A client sends its conversation back without it; the gateway recognises the conversation and continues from
the sampled tokens.
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
    yield f"\n## {TITLES[dialect]}\n\n| parameter | fate | effect or alternative | accepted |\n"
    yield "| --- | --- | --- | --- |\n"
    groups: dict[tuple[str, str, str], list[str]] = {}
    for entry in TABLE[dialect].values():
        groups.setdefault((entry.handling, entry.effect, _accepted(entry)), []).append(f"`{entry.name}`")
    for (fate, effect, accepted), names in groups.items():
        yield f"| {', '.join(names)} | {fate} | {effect} | {accepted} |\n"


def _accepted(entry: RequestParameter) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in entry.off)


if __name__ == "__main__":
    PAGE.write_text(page())
