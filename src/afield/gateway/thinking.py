"""Reasoning parameters: parsed from requests, applied to chat templates.

The template's own switch turns reasoning on and off; the trainer's template arguments take precedence.
Parameters that the template does not support are refused, or ignored with a tag.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afield.chat import ChatTokenizer
from afield.gateway.api_error import bad_request
from afield.gateway.model_request import ModelRequest, Reasoning
from afield.gateway.parameters import unsupported

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
KINDS = {"enabled": True, "disabled": False, "adaptive": None, "auto": None, "between_tools": None}


class ReasoningParameters:
    """Collects the reasoning parameters of a request; contradictory ones are refused."""

    def __init__(self) -> None:
        self.enabled: bool | None = None
        self._budget: int | None = None
        self._effort = ""
        self._names: dict[str, str] = {}

    def build(self) -> tuple[Reasoning, dict[str, str]]:
        return Reasoning(enabled=self.enabled, budget=self._budget, effort=self._effort), self._names

    def switch(self, value: Any, name: str) -> None:
        if value is None:
            return
        if not isinstance(value, bool):
            raise bad_request(f"{name} is neither true nor false")
        if self.enabled is not None and self.enabled != value:
            raise bad_request(
                f"{self._names['reasoning']} and {name} contradict each other", "send one of them"
            )
        self.enabled = value
        self._names.setdefault("reasoning", name)

    def kind(self, value: Any, name: str) -> None:
        if value is None:
            return
        if not isinstance(value, str) or value not in KINDS:
            raise bad_request(f"{name} {value!r} is not one of {', '.join(KINDS)}")
        self.switch(KINDS[value], name)

    def effort(self, value: Any, name: str, *, turns_on: bool = True) -> None:
        if value is None:
            return
        if not isinstance(value, str) or value not in EFFORTS:
            raise bad_request(f"{name} {value!r} is not one of {', '.join(EFFORTS)}")
        if value == "none" or turns_on:
            self.switch(value != "none", name)
        if value != "none":
            self._once("effort", name, self._effort in ("", value))
            self._effort = value

    def budget(self, value: Any, name: str) -> None:
        if value is None:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise bad_request(f"{name}={value!r} must be at least 1", "leave it out, or turn thinking off")
        self._once("budget", name, self._budget is None)
        self._budget = value

    def _once(self, field: str, name: str, agrees: bool) -> None:
        if not agrees:
            raise bad_request(
                f"{self._names[field]} and {name} both say how much to think", "send one of them"
            )
        self._names[field] = name

    def kwargs(self, values: Mapping[str, Any] | None) -> None:
        """Reads the reasoning switches of `chat_template_kwargs`."""
        if not values:
            return
        for key in ("enable_thinking", "thinking"):
            self.switch(values.get(key), f"chat_template_kwargs.{key}")
        self.effort(values.get("reasoning_effort"), "chat_template_kwargs.reasoning_effort")


EFFORT = "reasoning_effort"
WORDS = {"minimal": "low", "xhigh": "high", "max": "high"}


def template_arguments(
    tokenizer: ChatTokenizer, request: ModelRequest, *, ignore: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the template arguments of a request and the tags of the turn."""
    reasoning, switches, fixed = request.reasoning, tokenizer.switches, tokenizer.arguments
    arguments: dict[str, Any] = {}
    tags: list[str] = []
    if reasoning.enabled is not None:
        arguments, more = _switched(tokenizer, reasoning.enabled, request.names["reasoning"], ignore)
        tags += more
    if reasoning.effort:
        word = WORDS.get(reasoning.effort, reasoning.effort)
        if switches.effort and EFFORT not in fixed:
            arguments[EFFORT] = word
        if not switches.effort or fixed.get(EFFORT, word) != reasoning.effort or word != reasoning.effort:
            tags.append(f"overridden:{request.names['effort']}")
    if reasoning.budget is not None:
        tags.append(f"overridden:{request.names['budget']}")
    return arguments, tuple(tags)


def _switched(
    tokenizer: ChatTokenizer, enabled: bool, name: str, ignore: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    switches = tokenizer.switches
    if switches.name is not None:
        fixed = tokenizer.arguments.get(switches.name)
        if fixed is not None:
            return {}, () if bool(fixed) == enabled else (f"overridden:{name}",)
        return {} if enabled == switches.default else {switches.name: enabled}, ()
    thinks = tokenizer.profile.reasoning is not None
    if enabled:
        return {}, () if thinks else (f"overridden:{name}",)
    if not thinks:
        return {}, ()
    message = f"{name}: the chat template of {tokenizer.name!r} cannot turn thinking off"
    return {}, unsupported(name, message, "leave it out, or use a model whose template can", ignore=ignore)
