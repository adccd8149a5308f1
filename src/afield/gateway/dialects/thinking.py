"""Thinking as a request asks for it, put together from the parameters that a dialect has for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afield.gateway.api_error import bad_request
from afield.gateway.model_request import Reasoning

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
KINDS = {"enabled": True, "disabled": False, "adaptive": None, "auto": None, "between_tools": None}


class AskedReasoning:
    """Parameters that contradict each other are refused; `names` says which one asked for what."""

    def __init__(self) -> None:
        self.enabled: bool | None = None
        self._budget: int | None = None
        self._effort = ""
        self._names: dict[str, str] = {}

    def made(self) -> tuple[Reasoning, dict[str, str]]:
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

    def _once(self, what: str, name: str, agrees: bool) -> None:
        if not agrees:
            raise bad_request(
                f"{self._names[what]} and {name} both say how much to think", "send one of them"
            )
        self._names[what] = name

    def kwargs(self, given: Mapping[str, Any] | None) -> None:
        """`chat_template_kwargs`: those by which templates turn thinking on and off."""
        if not given:
            return
        for key in ("enable_thinking", "thinking"):
            self.switch(given.get(key), f"chat_template_kwargs.{key}")
        self.effort(given.get("reasoning_effort"), "chat_template_kwargs.reasoning_effort")
