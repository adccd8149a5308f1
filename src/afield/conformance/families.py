"""Template families of the conformance suite: chat template and reply format.

1. `chatml` accepts a system message anywhere, writes Hermes tool calls, and reasons optionally.
2. `qwen3.5` is the template of that name in the package trl: it refuses a system message that is not the
   first, writes tool calls in XML, opens every turn with reasoning, and strips earlier reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from afield.conformance.environments import wheel_files
from afield.conformance.model import TEMPLATE
from afield.conformance.pins import TEMPLATES
from afield.conformance.scenario import ModelReply, ToolUse
from afield.errors import UsageError

THINK = "<think>\n"
CLOSE = "\n</think>\n\n"


class TemplateFamily(Struct, frozen=True, kw_only=True):
    """Chat template and reply format of a model family."""

    name: str
    """Name on the command line and in results."""
    source: Callable[[Path], str]
    """Function from the cache directory to the Jinja source."""
    spell: Callable[[ModelReply], str]
    """Function from a reply to the text that the model samples, without the stop token."""
    opening: str = ""
    """Text of the generation prompt after the assistant header."""
    system_first: bool = False
    """Whether the template refuses a system message that is not the first message."""


def hermes(reply: ModelReply) -> str:
    """Reply text with Hermes tool calls and optional reasoning."""
    parts = [reply.text] if reply.text else []
    for use in reply.uses:
        call = json.dumps({"name": use.name, "arguments": use.arguments}, ensure_ascii=False)
        parts.append(f"<tool_call>\n{call}\n</tool_call>")
    thought = f"{THINK}{reply.reasoning}{CLOSE}" if reply.reasoning else ""
    return thought + "\n".join(parts)


def qwen_xml(reply: ModelReply) -> str:
    """Reply text with XML tool calls, after reasoning that the prompt opened."""
    calls = "\n".join(_xml_call(use) for use in reply.uses)
    between = "\n\n" if reply.text and calls else ""
    return f"{reply.reasoning}{CLOSE}{reply.text}{between}{calls}"


def _xml_call(use: ToolUse) -> str:
    values = "".join(
        f"<parameter={name}>\n{_xml_value(value)}\n</parameter>\n" for name, value in use.arguments.items()
    )
    return f"<tool_call>\n<function={use.name}>\n{values}</function>\n</tool_call>"


def _xml_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _qwen(cache: Path) -> str:
    folder = wheel_files(cache, TEMPLATES, "trl/chat_templates/")
    return (folder / "trl" / "chat_templates" / "qwen3_5_think.jinja").read_text(encoding="utf-8")


CHATML = TemplateFamily(name="chatml", source=lambda cache: TEMPLATE, spell=hermes)
QWEN = TemplateFamily(name="qwen3.5", source=_qwen, spell=qwen_xml, opening=THINK, system_first=True)
FAMILIES: dict[str, TemplateFamily] = {family.name: family for family in (CHATML, QWEN)}


def families(names: list[str]) -> list[TemplateFamily]:
    """Families with these names; all for an empty list."""
    for name in names:
        if name not in FAMILIES:
            raise UsageError(f"unknown template family {name!r}; choose from: {', '.join(FAMILIES)}")
    return [FAMILIES[name] for name in names] if names else list(FAMILIES.values())
