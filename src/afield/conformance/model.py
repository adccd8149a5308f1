"""Model directory and template families of the conformance suite, without weights.

1. The byte-level tokenizer encodes any text and has few merges, so that a text has many tokenizations.
2. The family `chatml` accepts a system message anywhere, writes Hermes tool calls, and reasons optionally.
3. The family `qwen3.5` is the template of that name in the package trl: it refuses a system message that is
   not the first, writes tool calls in XML, opens every turn with reasoning, and strips earlier reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from afield.conformance.pins import TEMPLATES
from afield.conformance.scenario import ModelReply, ToolUse
from afield.errors import UsageError
from afield.utils.installations import wheel_files

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
VOCABULARY = 1200
CORPUS = (
    "the model answers, calls a tool with its arguments, reads what came back, and goes on from there",
    "You are an agent that works on a computer. Use the tools that are available to finish the task.",
    '{"type": "function", "function": {"name": "run", "description": "", "parameters": {"type": "object"}}}',
    '{"properties": {"command": {"type": "string", "description": "what to run"}}, "required": ["command"]}',
    "for name in names: print(name); return value; if not value: raise ValueError(message)",
    "This is not the way that these things should be done; they would have been here before there was any.",
)

IMAGE = "<|image|>"
NO_THOUGHT = "<think>\n\n</think>\n\n"
TOOLS = "\n\n# Functions\n<tools>"
THINKING_SWITCH = """\
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
"""
SWITCHABLE_TEMPLATE = """\
{%- macro show(content) -%}
{%- if content is string %}{{- content }}
{%- elif content is iterable %}
{%- for part in content %}
{%- if part.type == 'image' %}{{- '<|image|>' }}{% else %}{{- part.text }}{% endif %}
{%- endfor %}
{%- endif %}
{%- endmacro %}
{%- set has_system = messages and messages[0].role == 'system' %}
{%- if tools or has_system %}
{{- '<|im_start|>system\\n' }}
{%- if has_system %}{{- show(messages[0].content) }}{% endif %}
{%- if tools %}
{{- '\\n\\n# Functions\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{% endfor %}
{{- '\\n</tools>\\nA call is written as <tool_call>{"name": ..., "arguments": {...}}</tool_call>.' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' }}{{- show(message.content) }}{{- '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- show(message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": ' }}{{- call.function.name | tojson }}{{- ', "arguments": ' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}
{%- else %}{{- call.function.arguments | tojson }}{% endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif not (loop.first and has_system) %}
{{- '<|im_start|>' + message.role + '\\n' }}{{- show(message.content) }}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""
"""ChatML with hermes tool calls, reasoning, images, and thinking that `enable_thinking` turns off."""
TEMPLATE = SWITCHABLE_TEMPLATE.replace(THINKING_SWITCH, "")
"""`SWITCHABLE_TEMPLATE` without the switch, for clients whose requests turn thinking off and on."""


def write_model(directory: Path, template: str = TEMPLATE, control: tuple[str, ...] = CONTROL) -> Path:
    """Write the files that a gateway reads; deterministic."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in control],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return directory


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


def select_families(names: list[str]) -> list[TemplateFamily]:
    """Families with these names; all for an empty list."""
    for name in names:
        if name not in FAMILIES:
            raise UsageError(f"unknown template family {name!r}; choose from: {', '.join(FAMILIES)}")
    return [FAMILIES[name] for name in names] if names else list(FAMILIES.values())
