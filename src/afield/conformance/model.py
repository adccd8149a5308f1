"""Model directory of the conformance suite: tokenizer and chat template, without weights.

The byte-level tokenizer encodes any text and has few merges, so that a text has many tokenizations. The
template accepts any role at any position.
"""

from __future__ import annotations

import json
from pathlib import Path

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
