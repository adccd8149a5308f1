"""Thinking as a request asks for it, in terms of the model's chat template.

The template's own switch turns thinking on and off; the trainer's arguments for the template come before a
request's. What the template cannot do is refused, or has no effect and is in the tags of the turn.
"""

from __future__ import annotations

from typing import Any

from afield.chat import ChatTokenizer
from afield.gateway.model_request import ModelRequest
from afield.gateway.parameters import unsupported

EFFORT = "reasoning_effort"
WORDS = {"minimal": "low", "xhigh": "high", "max": "high"}


def template_arguments(
    tokens: ChatTokenizer, request: ModelRequest, *, ignore: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the template is told beside the trainer's arguments, and the tags of the turn."""
    asked, switches, fixed = request.reasoning, tokens.switches, tokens.arguments
    arguments: dict[str, Any] = {}
    tags: list[str] = []
    if asked.enabled is not None:
        arguments, more = _switched(tokens, asked.enabled, request.names["reasoning"], ignore)
        tags += more
    if asked.effort:
        word = WORDS.get(asked.effort, asked.effort)
        if switches.effort and EFFORT not in fixed:
            arguments[EFFORT] = word
        if not switches.effort or fixed.get(EFFORT, word) != asked.effort or word != asked.effort:
            tags.append(f"overridden:{request.names['effort']}")
    if asked.budget is not None:
        tags.append(f"overridden:{request.names['budget']}")
    return arguments, tuple(tags)


def _switched(
    tokens: ChatTokenizer, enabled: bool, name: str, ignore: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    switches = tokens.switches
    if switches.name is not None:
        fixed = tokens.arguments.get(switches.name)
        if fixed is not None:
            return {}, () if bool(fixed) == enabled else (f"overridden:{name}",)
        return {} if enabled == switches.default else {switches.name: enabled}, ()
    thinks = tokens.certificate.reasoning is not None
    if enabled:
        return {}, () if thinks else (f"overridden:{name}",)
    if not thinks:
        return {}, ()
    message = f"{name}: the chat template of {tokens.name!r} cannot turn thinking off"
    return {}, unsupported(name, message, "leave it out, or use a model whose template can", ignore=ignore)
