"""Constrained replies of the rule-based model, from an xgrammar structural tag.

Where the grammar leaves a choice, the writer follows the reply without a constraint: its tool calls,
reasoning and text. Values of JSON schemas come from the question.
"""

from __future__ import annotations

import json
import re
from collections import deque
from typing import Any

from afield.conformance.foreign.patterns import example
from afield.conformance.foreign.rule_model import PromptConversation, reply_to, uses_of
from afield.conformance.foreign.values import Values
from afield.conformance.scenario import ToolUse

CALL = re.compile(r'"name": ("(?:[^"\\]|\\.)*"), "arguments": $')
SHOWN = re.compile(r"\{\s*\"[^{}]*\}")
Element = dict[str, Any]


def constrained(grammar: str, talk: PromptConversation, vocabulary: Any) -> str:
    """Text that matches the grammar; raises ValueError for elements without a rule, such as EBNF."""
    return _Writer(talk, vocabulary).write(json.loads(grammar)["format"])


class _Writer:
    def __init__(self, talk: PromptConversation, vocabulary: Any) -> None:
        self._talk = talk
        self._vocabulary = vocabulary
        self._plan = reply_to(talk)
        self._uses: deque[ToolUse] = deque(self._plan.uses)
        self._values = Values(talk.question)
        self._calling = ""
        self._thinking = False

    def write(self, element: Element) -> str:
        return getattr(self, f"_{element['type']}", self._unknown)(element)

    def _unknown(self, element: Element) -> str:
        raise ValueError(f"the model has no rule for {element['type']!r} in a constraint")

    def _const_string(self, element: Element) -> str:
        if found := CALL.search(element["value"]):
            self._calling = json.loads(found[1])
        return element["value"]

    def _token(self, element: Element) -> str:
        text = self._vocabulary.decode([element["token"]])
        if text in ("<think>", "</think>"):
            self._thinking = text == "<think>"
        return text

    def _sequence(self, element: Element) -> str:
        return "".join(self.write(one) for one in element["elements"])

    def _or(self, element: Element) -> str:
        options: list[Element] = element["elements"]
        if not any(map(_called, options)):
            return self.write(self._chosen(options))
        others = [one for one in options if not _called(one)]
        fitting = [one for one in options if self._uses and self._uses[0].name in _called(one)]
        return self.write((fitting or others or options)[0])

    def _chosen(self, options: list[Element]) -> Element:
        """Option that the question mentions, else the first."""
        words = [one.get("value") for one in options]
        if not all(isinstance(word, str) for word in words):
            return options[0]
        said = [entry.text for entry in self._talk.entries if entry.role == "assistant"]
        left = [word for word in words if word not in said] if self._again else words
        return options[words.index(self._values.of({"enum": left or words}))]

    @property
    def _again(self) -> bool:
        """Whether the user asks for another reply than before."""
        return bool(re.search(r"\b(?:another|different|disagree)\b", self._talk.question, re.I))

    def _optional(self, element: Element) -> str:
        opening = next(_leaves(element["content"]))
        if opening["type"] == "token" and self._vocabulary.decode([opening["token"]]) == "<think>":
            return self.write(element["content"]) if self._talk.thinks else ""
        return self.write(element["content"]) if self._uses else ""

    def _star(self, element: Element) -> str:
        written = ""
        while self._uses and self._uses[0].name in _called(element["content"]):
            written += self.write(element["content"])
        return written

    def _json_schema(self, element: Element) -> str:
        name, self._calling = self._calling, ""
        schema = element["json_schema"]
        if name:
            return json.dumps(self._arguments(name), ensure_ascii=False)
        if isinstance(schema, dict) and schema.get("type") == "object" and not schema.get("properties"):
            if shown := SHOWN.search(self._talk.question):
                return shown[0]  # an example in the user's message
            return json.dumps({word: f"some {word}" for word in self._values.quoted})
        return json.dumps(self._values.of(schema), ensure_ascii=False)

    def _arguments(self, name: str) -> dict[str, Any]:
        if self._uses and self._uses[0].name == name:
            return self._uses.popleft().arguments
        tool = next(tool for tool in self._talk.tools if tool.name == name)
        return uses_of(tool, self._talk.question)[0].arguments

    def _regex(self, element: Element) -> str:
        pattern = element["pattern"]
        return "\n\n" if pattern == r"\n{0,2}" else example(pattern, 2 if self._again else 0)

    def _any_text(self, element: Element) -> str:
        if self._thinking:
            thought = f"\n{self._plan.reasoning}\n".encode()[: element.get("max_tokens")]
            return thought.decode(errors="ignore")
        return "" if self._uses else self._plan.text

    def _any_tokens(self, element: Element) -> str:
        return "" if self._uses else self._plan.text


def _called(element: Element) -> set[str]:
    """Names of the functions that an element may call."""
    leaves = [leaf["value"] for leaf in _leaves(element) if leaf["type"] == "const_string"]
    return {json.loads(found[1]) for value in leaves if (found := CALL.search(value))}


def _leaves(element: Element) -> Any:
    inner = element.get("elements") or [element[key] for key in ("content",) if key in element]
    if not inner:
        yield element
    for one in inner:
        yield from _leaves(one)
