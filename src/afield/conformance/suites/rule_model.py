"""Rule-based model: deterministic replies in the template's own format.

The model decodes the prompt's tokens and behaves like a small competent model on simple requests:

1. It calls the tools that the user's message names or is about, with arguments from the message: in parallel,
   or one after another if the message says "then".
2. It replies with the tool results when they are present.
3. It counts, repeats, recalls names, computes sums; otherwise it writes fixed sentences.
4. It satisfies constraints, given as an xgrammar structural tag: a JSON document, one of several choices, a
   forced tool call. Where the grammar leaves a choice, it follows its reply without a constraint.
5. It reasons first, unless the prompt turns reasoning off.
"""

from __future__ import annotations

import json
import random
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct, structs

from afield import factory
from afield.conformance.model import CONTROL, IMAGE, NO_THOUGHT, TOOLS, hermes
from afield.conformance.scenario import ModelReply, ToolUse
from afield.conformance.script import RandomTokenizer
from afield.conformance.suites.values import QUOTED, SUM, Values, computed, example, places
from afield.interfaces import GenerateRequest

COMMON = frozenset(
    (
        *("get", "my", "a", "an", "the", "tool", "tools", "function", "of", "for", "and", "to", "in", "with"),
        *("is", "are", "call", "use", "using", "run", "do", "what", "value", "from", "any", "it", "this"),
        *(
            "that",
            "on",
            "you",
            "your",
            "returns",
            "return",
            "takes",
            "given",
            "current",
            "new",
            "user",
            "some",
        ),
    )
)
LINES = (
    "Here is what can be said about that, in a few words and without haste.",
    "The first thing to know is that you are asking a model which only follows rules.",
    "The second is that every one of its words is sampled token by token, and that is all there is to it.",
)
HELLO = "Hello! It is good to hear from you. How can I help you today?"
COUNT = re.compile(r"\bcount\b.*?\b(?:from\s+)?(\d+)\s*(?:to|up to|through|-)\s*(\d+)", re.I | re.S)
REPEAT = re.compile(
    r"\b(?:say|repeat|reply with|respond with|answer with|output|write)\b[^.:\"']*?[:\s]+"
    r"(?:exactly |only |just |the words? |the phrase |the text )*[\"'“]([^\"'”]+)[\"'”]",
    re.I,
)
NAME = re.compile(r"\bmy name is (\w+)", re.I)
ONLY = re.compile(r"without any other text|only the (?:number|result|answer)", re.I)


class ToolSpec(Struct, frozen=True, kw_only=True):
    """Tool in a prompt."""

    name: str
    """Name of the tool."""
    description: str = ""
    """Description; empty if the client sent none."""
    parameters: Mapping[str, Any] = {}
    """JSON schema of the arguments."""


class PromptMessage(Struct, frozen=True, kw_only=True):
    """Message in a prompt."""

    role: str
    """Role in the prompt: system, user or assistant."""
    text: str = ""
    """Text; empty for tool results."""
    uses: tuple[str, ...] = ()
    """Names of the tools that an assistant message calls."""
    results: tuple[str, ...] = ()
    """Tool results of a user message."""


class PromptConversation(Struct, frozen=True, kw_only=True):
    """Conversation decoded from a prompt."""

    entries: tuple[PromptMessage, ...]
    """Messages in order, without the generation prompt."""
    tools: tuple[ToolSpec, ...] = ()
    """Tools in the system message."""
    thinks: bool = True
    """Whether the prompt leaves reasoning on."""
    prefix: str = ""
    """Beginning of the reply that the prompt already contains."""

    @property
    def question(self) -> str:
        """Text of the last user message."""
        return next((e.text for e in reversed(self.entries) if e.role == "user" and not e.results), "")

    @property
    def results(self) -> tuple[str, ...]:
        """Tool results since the last user message."""
        results: list[str] = []
        for entry in reversed(self.entries):
            if entry.role == "user" and not entry.results:
                break
            results[:0] = entry.results
        return tuple(results)

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the tools called since the last user message."""
        names: list[str] = []
        for entry in reversed(self.entries):
            if entry.role == "user" and not entry.results:
                break
            names[:0] = entry.uses
        return tuple(names)


# --- prompt --------------------------------------------------------------------------------------

_CALL = re.compile(r"<tool_call>\n?(.*?)\n?</tool_call>", re.S)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.S)
_THOUGHT = re.compile(r"^<think>\n(.*?)\n?</think>\n*", re.S)


def read_prompt(vocabulary: Any, ids: Sequence[int]) -> PromptConversation:
    """Decode a prompt; control tokens are recognised by id, so that text may contain their literals."""
    start, end = vocabulary.id_of("<|im_start|>"), vocabulary.id_of("<|im_end|>")
    blocks: list[list[int]] = []
    for token in ids:
        if token == start:
            blocks.append([])
        elif blocks and token != end:
            blocks[-1].append(token)
    if not blocks:
        return PromptConversation(entries=(PromptMessage(role="user", text=vocabulary.decode(ids)),))
    texts = [vocabulary.decode(block).partition("\n") for block in blocks]
    tools: tuple[ToolSpec, ...] = ()
    entries: list[PromptMessage] = []
    for n, (role, _, text) in enumerate(texts[:-1]):
        body = text.removesuffix("\n")
        if role == "system" and not n and TOOLS in body:
            body, _, listed = body.partition(TOOLS)
            tools = tuple(_tools(listed.partition("\n</tools>")[0]))
        entries.append(_entry(role, body))
    last = texts[-1][2]
    thinks = not last.startswith(NO_THOUGHT)
    return PromptConversation(
        entries=tuple(entries), tools=tools, thinks=thinks, prefix=last.removeprefix(NO_THOUGHT)
    )


def _tools(listed: str) -> Iterable[ToolSpec]:
    for line in listed.strip().splitlines():
        tool = json.loads(line)
        function = tool.get("function", tool)
        yield ToolSpec(
            name=function["name"],
            description=function.get("description") or "",
            parameters=function.get("parameters") or {},
        )


def _entry(role: str, text: str) -> PromptMessage:
    if role == "user" and "<tool_response>" in text:
        return PromptMessage(role=role, results=tuple(_RESULT.findall(text)))
    if role != "assistant":
        return PromptMessage(role=role, text=text)
    text = _THOUGHT.sub("", text)
    uses: list[str] = []
    for call in _CALL.findall(text):
        try:
            uses.append(json.loads(call)["name"])
        except (ValueError, KeyError, TypeError):
            continue
    return PromptMessage(role=role, text=_CALL.sub("", text).strip(), uses=tuple(uses))


# --- reply ---------------------------------------------------------------------------------------


def reply_to(talk: PromptConversation) -> ModelReply:
    """Reply without a constraint."""
    question = talk.question
    thought = f"The user says: {question[:60].strip()!r}. I answer by the rules."
    wanted = _wanted(question, talk.tools)
    if not wanted and not talk.results:  # a tool for the final answer
        wanted = [tool for tool in talk.tools if tool.description.lower().startswith("respond with")]
    open_calls = [tool for tool in wanted if tool.name not in talk.called]
    if open_calls and (not talk.called or _in_turn(question)):
        first = open_calls[:1] if _in_turn(question) else open_calls
        uses = tuple(use for tool in first for use in uses_of(tool, question, len(wanted) > 1))
        return ModelReply(reasoning=thought, uses=uses)
    if talk.results:
        return ModelReply(reasoning=thought, text="The result is: " + "; ".join(talk.results))
    return ModelReply(reasoning=thought, text=words(talk))


def uses_of(tool: ToolSpec, question: str, several: bool = False) -> list[ToolUse]:
    """Calls of one tool: one for each place that the question names, else one call."""
    parameters = tool.parameters
    takes_place = any(
        place in name.lower() for name in parameters.get("properties", {}) for place in ("location", "city")
    )
    named = places(question) if takes_place else []
    if several or len(named) < 2:
        named = named[:1] or [""]
    schema = {"type": "object", **parameters}
    return [ToolUse(tool.name, dict(Values(question, place).of(schema))) for place in named]


def _in_turn(question: str) -> bool:
    return bool(re.search(r"\bthen\b|\bafter that\b|\bone (?:at a time|after another)\b", question, re.I))


def _wanted(question: str, tools: Sequence[ToolSpec]) -> list[ToolSpec]:
    """Tools that the question names, else tools whose names share a word with it."""
    named = [tool for tool in tools if re.search(rf"(?<!\w){re.escape(tool.name)}(?!\w)", question)]
    if named:
        return sorted(named, key=lambda tool: question.index(tool.name))
    stems = {_stem(word) for word in re.findall(r"[^\W_]+", question.lower())} - COMMON
    return [tool for tool in tools if stems & _subject(tool)]


def _subject(tool: ToolSpec) -> set[str]:
    spelled = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", tool.name)
    return {_stem(word) for word in re.findall(r"[^\W_]+", spelled.lower())} - COMMON


def _stem(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") else word


def words(talk: PromptConversation) -> str:
    """Text reply: count, repetition, recalled name, sum, greeting or fixed sentences."""
    question = talk.question
    if match := COUNT.search(question):
        first, last = int(match[1]), int(match[2])
        return ", ".join(str(n) for n in range(first, min(last, first + 500) + 1))
    if match := REPEAT.search(question):
        return match[1]
    if re.search(r"\bmy name\b", question, re.I):
        names = [match[1] for e in talk.entries if (match := NAME.search(e.text))]
        if names:
            return f"Your name is {names[-1]}."
    if match := SUM.search(question):
        value = computed(question)
        return str(value) if ONLY.search(question) else f"{match[1]} {match[2]} {match[3]} = {value}"
    if re.fullmatch(r"\W*(?:hi|hey|hello)\b.{0,20}", question.strip(), re.I | re.S):
        return HELLO
    if quoted := QUOTED.search(question):
        return f"About {''.join(g or '' for g in quoted.groups())}: " + " ".join(LINES)
    return " ".join(LINES)


class RuleModel:
    """Script of the rule-based model for the scripted engine; the same prompt gets the same tokens.

    Args:
        vocabulary: vocabulary of the model.
        without_reasoning: ids of sessions without reasoning.
    """

    def __init__(self, vocabulary: Any, without_reasoning: frozenset[str] = frozenset()) -> None:
        self._vocabulary = vocabulary
        self._without_reasoning = without_reasoning
        self._sampler = RandomTokenizer(vocabulary)
        self._scripted: Callable[..., Any] = factory.scripted_reply()

    def __call__(self, call: GenerateRequest) -> Any:
        talk = read_prompt(self._vocabulary, call.prompt_ids)
        if call.session_id in self._without_reasoning:
            talk = structs.replace(talk, thinks=False)
        chance = random.Random(str(call.prompt_ids))
        text = self._free(talk) if call.constraint is None else self._held(talk, call.constraint.grammar)
        for control in (*CONTROL, IMAGE):  # quoted user text must not become control tokens
            text = text.replace(control, control.strip("<|>"))
        return self._scripted(
            token_ids=(*self._sampler.sample(text, chance), *call.stop_ids[:1]),
            chunks=tuple(chance.randint(1, 4) for _ in range(12)),
        )

    def _free(self, talk: PromptConversation) -> str:
        reply = reply_to(talk)
        return hermes(reply if talk.thinks else ModelReply(text=reply.text, uses=reply.uses))

    def _held(self, talk: PromptConversation, grammar: str) -> str:
        return constrained(grammar, talk, self._vocabulary)


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
        if match := CALL.search(element["value"]):
            self._calling = json.loads(match[1])
        return element["value"]

    def _token(self, element: Element) -> str:
        text = self._vocabulary.decode([element["token"]])
        if text in ("<think>", "</think>"):
            self._thinking = text == "<think>"
        return text

    def _sequence(self, element: Element) -> str:
        return "".join(self.write(inner) for inner in element["elements"])

    def _or(self, element: Element) -> str:
        options: list[Element] = element["elements"]
        if not any(map(_called, options)):
            return self.write(self._chosen(options))
        others = [option for option in options if not _called(option)]
        fitting = [option for option in options if self._uses and self._uses[0].name in _called(option)]
        return self.write((fitting or others or options)[0])

    def _chosen(self, options: list[Element]) -> Element:
        """Option that the question mentions, else the first."""
        words = [option.get("value") for option in options]
        if not all(isinstance(word, str) for word in words):
            return options[0]
        message = [entry.text for entry in self._talk.entries if entry.role == "assistant"]
        left = [word for word in words if word not in message] if self._again else words
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
            if match := SHOWN.search(self._talk.question):
                return match[0]  # an example in the user's message
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
    return {json.loads(match[1]) for value in leaves if (match := CALL.search(value))}


def _leaves(element: Element) -> Any:
    children = element.get("elements") or [element[key] for key in ("content",) if key in element]
    if not children:
        yield element
    for child in children:
        yield from _leaves(child)
