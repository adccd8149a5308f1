"""Chat template of the rule-following model: ChatML with hermes tool calls, optional thinking, images."""

from __future__ import annotations

IMAGE = "<|image|>"
NO_THOUGHT = "<think>\n\n</think>\n\n"
TOOLS = "\n\n# Functions\n<tools>"

TEMPLATE = """\
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
