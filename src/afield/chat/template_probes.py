"""Chat template probes: tool-call format, reasoning, call ids, date, message rules.

1. A template has a tool-call format if the format's reader returns the calls that were rendered.
2. A conversation counts as rendered if the template does not raise and shows every message and, with tools,
   every call.
3. `with_rules` starts from all message rules and drops each one, the most invasive first, whose removal loses
   no conversation. A template that renders everything gets no rules.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from afield.chat.escape import BREAK, Escape
from afield.chat.message_rules import RULES, SAME_ROLE, Folded, fold
from afield.chat.parsers.formats import FORMATS, HARMONY, REASONING, ReasoningFormat, ToolFormat
from afield.chat.parsers.harmony import CHANNEL, MESSAGE, HarmonyReader
from afield.chat.parsers.reply import Reader, ReplyReader
from afield.chat.sample_conversations import ARGUMENTS, QUESTION, TOOL, call
from afield.chat.template import ChatTemplate, TemplateRefusal, Tool
from afield.chat.vocabulary import Vocabulary
from afield.types import Message, Role, ToolCall

# Template variables that turn thinking on and off.
SWITCHES = ("enable_thinking", "thinking")
# Call ids: of the gateway, of nine characters, with the function's name.
_IDS = ("call_{n}_abcd", "call0000{n}", "functions.forecast:{n}")


def rendered(
    template: ChatTemplate, messages: Sequence[Message], *, tools: bool = False, generation: bool = False
) -> str | None:
    """Rendered text; None if the template refuses the messages."""
    try:
        return template.render(messages, (TOOL,) if tools else (), generation=generation)
    except TemplateRefusal:
        return None


def speaks_harmony(template: ChatTemplate) -> bool:
    """Whether the template writes the harmony format (gpt-oss)."""
    return CHANNEL in template.source and MESSAGE in template.source


def find_tool_format(template: ChatTemplate) -> tuple[str | None, bool]:
    """Name of the tool-call format, and whether a turn may have several calls.

    None also if the template does not show the tools, with or without a system message.
    """
    template = template.with_rules(template.rules - {"split-calls"})
    plain, headed = (
        rendered(template, messages, tools=True, generation=True)
        for messages in ([QUESTION], [Message(role="system", content="Be brief."), QUESTION])
    )
    if plain is None or TOOL.name not in plain or (headed is not None and TOOL.name not in headed):
        return None, False
    for count in (2, 1):
        for ids in _IDS:
            if name := _format_of(template, ids, count):
                return name, count == 2
    return None, False


def _format_of(template: ChatTemplate, ids: str, count: int) -> str | None:
    calls = tuple(call(ids.format(n=n), ({}, ARGUMENTS)[n]) for n in range(2))[-count:]
    text = rendered(template, [QUESTION, Message(role="assistant", tool_calls=calls)], tools=True)
    if text is None:
        return None
    expected = [(call.name, json.loads(call.arguments)) for call in calls]
    text = text.replace(BREAK, "")
    tail = text[text.index(QUESTION.content) + len(QUESTION.content) :]
    if speaks_harmony(template):
        reader = HarmonyReader(tools=True)
        return HARMONY if _parse_calls(reader, tail) == expected else None
    return next((f.name for f in FORMATS if _parse_calls(_reader(f), _begin(f, tail)) == expected), None)


def _reader(tool_format: ToolFormat) -> Reader:
    return ReplyReader(reasoning=None, thinking=False, tool_format=tool_format, tools=(TOOL,))


def _begin(tool_format: ToolFormat, tail: str) -> str:
    """Text from a bare call on; the template writes the role before it."""
    return tail[tail.find("{") :] if tool_format.bare and tool_format.opening not in tail else tail


def _parse_calls(reader: Reader, text: str) -> list[tuple[str, Any]]:
    reader.feed(text)
    reader.finish()
    return [(call.name, json.loads(call.arguments)) for call in reader.reply.tool_calls]


def find_reasoning(template: ChatTemplate, vocab: Vocabulary) -> ReasoningFormat | None:
    """Reasoning tags that the template writes or reads, else those in the vocabulary."""
    thought = Message(role="assistant", content="Yes.", reasoning="It is cloudy.")
    text = rendered(template, [QUESTION, thought]) or ""
    for source in (text, template.source, vocab.control):
        for tags in REASONING:
            if tags.closing in source:
                return tags
    return None


def starts_thinking(template: ChatTemplate, tags: ReasoningFormat | None) -> bool:
    """Whether the generation prompt opens a block of reasoning and leaves it open."""
    prompt = rendered(template, [QUESTION], generation=True)
    if prompt is None or tags is None:
        return False
    tail = prompt[prompt.rfind(QUESTION.content) :]
    return tail.rfind(tags.opening) > tail.rfind(tags.closing)


class Switches(Struct, frozen=True):
    """Template variables that control thinking."""

    name: str | None
    """Variable that turns thinking on and off; None if there is none."""
    default: bool
    """Whether thinking is on if the variable is not set."""
    effort: bool
    """Whether the template uses `reasoning_effort`."""


def find_switches(template: ChatTemplate, arguments: Mapping[str, Any]) -> Switches:
    """Find the variables of `SWITCHES` and `reasoning_effort` that change the generation prompt."""

    def prompt(**more: Any) -> str | None:
        return rendered(template.with_variables(more), [QUESTION], generation=True)

    fixed = {name for name in SWITCHES if name in arguments}
    plain = rendered(template.without_variables(fixed), [QUESTION], generation=True)
    low, high = prompt(reasoning_effort="low"), prompt(reasoning_effort="high")
    effort = low is not None and high is not None and low != high
    for name in SWITCHES:
        on, off = prompt(**{name: True}), prompt(**{name: False})
        if on is not None and off is not None and on != off:
            return Switches(name, off != plain, effort)
    return Switches(None, True, effort)


def call_ids(template: ChatTemplate) -> str:
    """How the template renders call ids.

    `free`: not at all; `rendered`: unchanged; `nine`: only ids of nine letters or digits.
    """
    template = template.with_rules(template.rules - {"call-ids"})
    own_ids, nine_letters, other_nine_letters = (
        _with_ids(template, ids) for ids in ("call_{n}_abcd", "call0000{n}", "cccc0000{n}")
    )
    if nine_letters is None or nine_letters == other_nine_letters:
        return "free"
    return "nine" if own_ids is None else "rendered"


def _with_ids(template: ChatTemplate, ids: str) -> str | None:
    result = Message(role="tool", content="Rain.", tool_call_id=ids.format(n=1))
    turn = Message(role="assistant", tool_calls=(call(result.tool_call_id, {"city": "Bern"}),))
    return rendered(template, [QUESTION, turn, result], tools=True)


def keeps_reasoning(template: ChatTemplate) -> bool:
    """Whether the template renders the reasoning of the last turn."""
    text = rendered(
        template, [QUESTION, Message(role="assistant", content="Yes.", reasoning="Cloudy, I think.")]
    )
    return text is not None and "Cloudy, I think." in text


def prints_date(template: ChatTemplate) -> bool:
    """Whether the template uses the current date."""
    return "strftime_now" in template.source


def unsafe_literals(vocab: Vocabulary) -> Iterator[str]:
    """Control tokens that escaped content can still produce."""
    escape = Escape(vocab.control)
    for literal, control in sorted(vocab.control.items()):
        if control in vocab.encode(escape(f"a{literal}b")):
            yield literal


def changed_by_escape(vocab: Vocabulary) -> str | None:
    """First control literal whose text changes when it is escaped, encoded and decoded; None if none does."""
    escape = Escape(vocab.control)
    for literal, control in sorted(vocab.control.items()):
        ids = vocab.encode(escape(f"a{literal}b"))
        if control not in ids and vocab.decode(ids) != f"a{literal}b":
            return literal
    return None


# --- message rules ---------------------------------------------------------------------------------

# Order in which rules are tried for removal; `_tool_rules` chooses the rules for tools.
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
    """Template that gets message content and call arguments in the form it accepts."""
    plain = rendered(template, [QUESTION])
    if plain is None or QUESTION.content not in plain:
        parts = template.with_content_parts()
        if QUESTION.content in (rendered(parts, [QUESTION]) or ""):
            template = parts
    turn = Message(role="assistant", tool_calls=(call("call00001", ARGUMENTS),))
    with_text = template.with_text_arguments()
    refused = rendered(template, [QUESTION, turn]) is None
    return with_text if refused and rendered(with_text, [QUESTION, turn]) is not None else template


def unchanged(template: ChatTemplate) -> ChatTemplate:
    """Template without rules, except `SAME_ROLE` if it does not know the developer role."""
    return template.with_rules(() if "developer" in template.source else (SAME_ROLE,))


def with_rules(template: ChatTemplate) -> ChatTemplate:
    """Template with the message rules it needs."""
    for tools in (_tool_rules(template), frozenset[str]()):
        candidate = template.with_rules(_needed(template, tools))
        if not tools or find_tool_format(candidate)[0]:
            return candidate
    raise AssertionError("the last candidate has no rules for tools")


def _tool_rules(template: ChatTemplate) -> frozenset[str]:
    """Rules that the template needs to show tools and to write calls in a known format."""
    for rules in ((), ("add-system",)):
        if find_tool_format(template.with_rules(rules))[0]:
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
    """Renders the test conversations under given rules, with a cache."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._cases = list(_conversations())
        self._results: dict[tuple[tuple[Message, ...], bool, bool], bool] = {}
        self.all = frozenset(range(len(self._cases)))

    def rendered(self, rules: frozenset[str]) -> frozenset[int]:
        """Indices of the conversations that the template renders completely under these rules."""
        return frozenset(n for n, case in enumerate(self._cases) if self._renders(*case, rules))

    def _renders(self, messages: list[Message], tools: Sequence[Tool], rules: frozenset[str]) -> bool:
        folded = fold(messages, tools, rules, generation=True)
        key = (tuple(folded.messages), bool(folded.tools), bool(tools))
        if (result := self._results.get(key)) is None:
            result = self._results[key] = self._shows(messages, tools, folded)
        return result

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
    foreign_result = Message(role="tool", content="Rain 2.", tool_call_id=foreign.id)
    for turn, answer in (
        (Message(role="assistant", tool_calls=(odd,)), result),
        (Message(role="assistant", tool_calls=(foreign,)), foreign_result),
        (Message(role="assistant", content="So.", reasoning="Hm.", tool_calls=(fine,)), result),
        (Message(role="assistant", tool_calls=(fine,)), Message(role="tool", tool_call_id="call00001")),
    ):
        yield [QUESTION, turn, answer], (TOOL,)
    yield [Message(role="user"), Message(role="assistant", content="Yes?"), QUESTION], ()


def _conversation(shape: str) -> list[Message]:
    """Conversation of a shape from `_SHAPES`; every message has distinct text."""
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
