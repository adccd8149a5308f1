"""Finds the rules a chat template needs, by rendering conversations with and without them.

A conversation counts as rendered when the template does not raise and shows every message, and, where
tools are given, every call. From all rules those are dropped, one after the other, without which no
conversation is lost; the most invasive first. So a template that renders everything gets no rules, and
what it renders is what it always was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from afield.chat import template_probes
from afield.chat.escape import BREAK
from afield.chat.message_rules import RULES, SAME_ROLE, Folded, fold
from afield.chat.sample_conversations import ARGUMENTS, QUESTION, TOOL, call
from afield.chat.template import ChatTemplate, TemplateRefusal, Tool
from afield.types import Message, Role, ToolCall

# Rules for tools are chosen by whether calls can be read; the others in this order, unless they are needed.
_DROPPED = (
    "fold-first-system",
    "add-user-between",
    "add-first-user",
    "user-in-result",
    "split-calls",
    "fold-results",
    "merge-users",
    "fold-system",
    "merge-system",
    "reasoning-in-text",
    "wrap-arguments",
    "call-ids",
    SAME_ROLE,
)
# Each letter is a message: System, Developer, User, Assistant, Call, Parallel calls, Tool result.
_SHAPES = """
    SU SSU SSUU SUU UU UAUU US SUS UAS UASU SUAUS USAU SAU AU S A UA SUA UAAU DU SDU DUU UAD UADU UD
    UCT SUCT UCTU UCTS UCTD UCTAU UCTUU UCTUS UCTCT UCUT UPTT UPTTU UPTTAU SCT CT UT UAT TU UCTTA
"""
_ROLES: dict[str, Role] = {
    "S": "system",
    "D": "developer",
    "U": "user",
    "A": "assistant",
    "C": "assistant",
    "P": "assistant",
    "T": "tool",
}


def as_taken(template: ChatTemplate) -> ChatTemplate:
    """The template, given content and the arguments of calls in the form in which it takes them."""
    plain = template_probes.rendered(template, [QUESTION])
    if plain is None or QUESTION.content not in plain:
        parts = template.with_content_parts()
        if QUESTION.content in (template_probes.rendered(parts, [QUESTION]) or ""):
            template = parts
    turn = Message(role="assistant", tool_calls=(call("call00001", ARGUMENTS),))
    other = template.with_text_arguments()
    refused = template_probes.rendered(template, [QUESTION, turn]) is None
    return other if refused and template_probes.rendered(other, [QUESTION, turn]) is not None else template


def unchanged(template: ChatTemplate) -> ChatTemplate:
    """The template with no rule but another name for a role that it does not know."""
    return template.with_rules(() if "developer" in template.source else (SAME_ROLE,))


def with_rules(template: ChatTemplate) -> ChatTemplate:
    """The template with the rules it needs."""
    for tools in (_tool_rules(template), frozenset[str]()):
        made = template.with_rules(_needed(template, tools))
        if not tools or template_probes.find_tool_format(made)[0]:
            return made
    raise AssertionError("the last candidate has no rules for tools")


def _tool_rules(template: ChatTemplate) -> frozenset[str]:
    """What has to be done for tools to be announced, and called in a format that can be read."""
    for rules in ((), ("add-system",)):
        if template_probes.find_tool_format(template.with_rules(rules))[0]:
            return frozenset(rules)
    return frozenset({"fold-tools"})


def _needed(template: ChatTemplate, tools: frozenset[str]) -> frozenset[str]:
    tries = _Tries(template.with_rules(()))
    fewest = tools | unchanged(template).rules
    if tries.rendered(fewest) == tries.all:
        return fewest
    rules = tools | frozenset(_DROPPED)
    rendered = tries.rendered(rules)
    for rule in _DROPPED:
        if rule in fewest:
            continue
        without = tries.rendered(rules - {rule})
        if without >= rendered:
            rules, rendered = rules - {rule}, without
    return rules


class _Tries:
    """Which conversations a template renders under some rules; equal ones are rendered once."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._cases = list(_conversations())
        self._known: dict[tuple[tuple[Message, ...], bool, bool], bool] = {}
        self.all = frozenset(range(len(self._cases)))

    def rendered(self, rules: frozenset[str]) -> frozenset[int]:
        return frozenset(n for n, case in enumerate(self._cases) if self._renders(*case, rules))

    def _renders(self, messages: list[Message], tools: Sequence[Tool], rules: frozenset[str]) -> bool:
        folded = fold(messages, tools, rules, generation=True)
        key = (tuple(folded.messages), bool(folded.tools), bool(tools))
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self._shows(messages, tools, folded)
        return known

    def _shows(self, messages: list[Message], tools: Sequence[Tool], folded: Folded) -> bool:
        announced = tools if folded.tools else ()
        try:
            text = self._template.render(folded.messages, announced, generation=True)
        except TemplateRefusal:
            return False
        text = text.replace(BREAK, "")
        words = [message.content for message in messages]
        if tools:
            words += [c.name for m in messages for c in m.tool_calls] + [TOOL.name]
        return all(word in text for word in words)


def _conversations() -> Iterator[tuple[list[Message], Sequence[Tool]]]:
    for shape in _SHAPES.split():
        yield _conversation(shape), ()
        if set(shape) & set("CPT") or shape in ("S", "SU", "AU", "SSUU"):
            yield _conversation(shape), (TOOL,)
    result = Message(role="tool", content="Rain 1.", tool_call_id="call00001")
    odd = ToolCall("call00001", TOOL.name, "no JSON at all")
    foreign = call("toolu_01AbCd", {"city": "Bern"})
    fine = call("call00001", {"city": "Bern"})
    told = Message(role="tool", content="Rain 2.", tool_call_id=foreign.id)
    for turn, answer in (
        (Message(role="assistant", tool_calls=(odd,)), result),
        (Message(role="assistant", tool_calls=(foreign,)), told),
        (Message(role="assistant", content="So.", reasoning="Hm.", tool_calls=(fine,)), result),
        (Message(role="assistant", tool_calls=(fine,)), Message(role="tool", tool_call_id="call00001")),
    ):
        yield [QUESTION, turn, answer], (TOOL,)
    yield [Message(role="user"), Message(role="assistant", content="Yes?"), QUESTION], ()


def _conversation(shape: str) -> list[Message]:
    """Messages with words of their own; results belong to the calls before them."""
    messages: list[Message] = []
    waiting: list[str] = []
    for n, letter in enumerate(shape):
        role = _ROLES[letter]
        if letter in "CP":
            waiting = [f"call{n}000{k}" for k in range(2 if letter == "P" else 1)]
            calls = tuple(call(call_id, {"city": f"Place {call_id}"}) for call_id in waiting)
            messages.append(Message(role=role, tool_calls=calls))
        elif letter == "T":
            answered = waiting.pop(0) if waiting else "call99999"
            messages.append(Message(role=role, content=f"Result {n} of it.", tool_call_id=answered))
        else:
            messages.append(Message(role=role, content=f"Word {n} of {role}."))
    return messages


assert set(_DROPPED) | {"fold-tools", "add-system"} == set(RULES)
