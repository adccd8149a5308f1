"""Tier `bridge`: next-turn bridges of model families, from the package `renderers`.

1. Serves templates that tier `append` cannot, such as those that end a turn only by beginning the next one.
2. A family fits a template if it renders every sample conversation to the template's token ids. It serves a
   pattern after a stop id if its bridge gives the template's ids.
3. The family gets escaped content and afield's vocabulary, so that content cannot become control tokens.
4. Truncated turns are not bridged: the family would add a stop that the template does not have.
5. Replies are parsed by `parsers`, because `renderers` drops malformed calls, which have to stay text here.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from afield.chat.escape import BREAK
from afield.chat.sample_conversations import PATTERNS, TOOL, conversations
from afield.chat.template import ChatTemplate, TemplateRefusal, Tool
from afield.chat.turn_suffix import ANCHORED, CALLING, QUESTION, unthought
from afield.chat.vocabulary import Vocabulary
from afield.errors import boundary
from afield.types import Failure, FailureKind, Message, Reason

# "default" renders any template and never bridges; "gpt-oss" downloads a vocabulary.
_NOT_TRIED = {"default", "gpt-oss"}
T = TypeVar("T")


class Bridged(Struct, frozen=True):
    """Patterns that a family's bridge serves for one template."""

    family: str
    """Name of the renderer in the package `renderers`."""
    stops: dict[str, tuple[int, ...]]
    """Stop ids after which the bridge is exact, by pattern of new messages."""
    strips: tuple[str, ...]
    """Patterns before which the template strips reasoning."""


class Bridge:
    """Bridge of one family for one model."""

    def __init__(self, family: str, renderer: Any, template: ChatTemplate, vocab: Vocabulary) -> None:
        self.family = family
        self._renderer = renderer
        prompt = template.render([QUESTION], (), generation=True)
        self._prompt = vocab.encode(prompt)
        self._turns = {
            calls: vocab.encode(template.render([QUESTION, turn], (), generation=False).removeprefix(prompt))
            for calls, turn in ((False, ANCHORED), (True, CALLING))
        }

    def delta(
        self, template: ChatTemplate, new: Sequence[Message], stop: int, tools: Sequence[Tool]
    ) -> list[int] | None:
        """Token ids of new messages after a turn that ended with `stop`; None if the family cannot bridge."""
        turn = [*self._turns[any(message.role == "tool" for message in new)], stop]
        messages, tool_specs = template.inputs(new, tools, begins=False)
        bridged = _foreign(
            lambda: self._renderer.bridge_to_next_turn(self._prompt, turn, messages, tools=tool_specs)
        )
        if bridged is None:
            return None
        ids, before = list(bridged.token_ids), self._prompt + turn
        return ids[len(before) :] if ids[: len(before)] == before else None

    def render(
        self, template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int] | None:
        """Token ids of a whole prompt; None if the family raises."""
        escaped, tool_specs = template.inputs(messages, tools)
        whole = _foreign(lambda: self._renderer.render(escaped, tools=tool_specs, add_generation_prompt=True))
        return None if whole is None else list(whole.token_ids)


def available() -> bool:
    """Whether the package `renderers` is installed."""
    return importlib.util.find_spec("renderers") is not None


def find_bridge(
    template: ChatTemplate, vocab: Vocabulary, stop_ids: Sequence[int], arguments: Mapping[str, Any]
) -> tuple[Bridged | None, str]:
    """Find the family that serves the template; the note names it or explains why there is none."""
    if not available():
        return None, "no tier bridge: install afield[renderers] to try the bridges of model families"
    for family in _families():
        bridge = make_bridge(family, template, vocab, arguments)
        if bridge is None or not _agrees(bridge, template, vocab):
            continue
        checks = [_PatternCheck(bridge, template, vocab, pattern, stop_ids) for pattern in PATTERNS]
        stops = {check.pattern: check.stops for check in checks if check.stops}
        strips = tuple(check.pattern for check in checks if check.stops and check.strips)
        if stops:
            return Bridged(family, stops, strips), f"tier bridge: appended by the family {family}"
        return None, (
            f"no tier bridge: the family {family} renders as this template does, but none of the stop ids"
            " begins a message; list them in generation_config.json (eos_token_id)"
        )
    return None, "no tier bridge: no family of the package renderers renders exactly as this template does"


def make_bridge(
    family: str, template: ChatTemplate, vocab: Vocabulary, arguments: Mapping[str, Any]
) -> Bridge | None:
    """Create the bridge of a family; None if it does not support the vocabulary or template arguments."""

    def make() -> Bridge:
        renderers: Any = importlib.import_module("renderers")
        config = renderers.config_from_name(family).model_copy(update={"thinking_retention": "all"})
        config = renderers.merge_chat_template_kwargs(config, dict(arguments))
        return Bridge(family, renderers.create_renderer(_Tokenizer(vocab), config), template, vocab)

    return _foreign(make)


def _families() -> list[str]:
    def names() -> list[str]:
        base: Any = importlib.import_module("renderers.base")
        return sorted({*base.MODEL_RENDERER_MAP.values()} - _NOT_TRIED)

    return _foreign(names) or []


def _foreign(work: Callable[[], T]) -> T | None:
    """Result of third-party code; None if it raises."""
    failures: list[Failure] = []
    with boundary(FailureKind.INFRASTRUCTURE, Reason.LAUNCH, failures.append):
        return work()
    return None


class _Tokenizer:
    """Tokenizer interface of `renderers` for a `Vocabulary`, which honours escaped content."""

    unk_token_id = None
    eos_token_id = None
    name_or_path = ""

    def __init__(self, vocab: Vocabulary) -> None:
        self._vocab = vocab

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._vocab.encode(text)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._vocab.decode(token_ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self._vocab.id_of(tokens) if isinstance(tokens, str) else list(map(self._vocab.id_of, tokens))


def _cases(
    template: ChatTemplate, pattern: str
) -> Iterator[tuple[list[Message], list[Message], tuple[Tool, ...], str]]:
    for history, new in conversations(pattern):
        for tools in ((), (TOOL,)):
            try:
                yield history, new, tools, template.render([*history, *new], tools, generation=True)
            except TemplateRefusal:
                continue


def _agrees(bridge: Bridge, template: ChatTemplate, vocab: Vocabulary) -> bool:
    return all(
        bridge.render(template, [*history, *new], tools) == vocab.encode(whole)
        for pattern in PATTERNS
        for history, new, tools, whole in _cases(template, pattern)
    )


class _PatternCheck:
    """Finds the stop ids after which the bridge equals the template, for one pattern."""

    def __init__(
        self, bridge: Bridge, template: ChatTemplate, vocab: Vocabulary, pattern: str, stop_ids: Sequence[int]
    ) -> None:
        self.pattern = pattern
        self.strips = False
        self._bridge = bridge
        self._template = template
        self._vocab = vocab
        cases = list(_cases(template, pattern))
        self.stops = tuple(
            stop
            for stop in dict.fromkeys(stop_ids)
            if cases and all(self._holds(stop, *case) for case in cases)
        )

    def _holds(
        self, stop: int, history: list[Message], new: list[Message], tools: tuple[Tool, ...], whole: str
    ) -> bool:
        ids = self._vocab.encode(whole)
        delta = self._bridge.delta(self._template, new, stop, tools)
        if delta is None or ids[-len(delta) - 1 :] != [stop, *delta]:
            return False
        head = self._vocab.decode(ids[: -len(delta) - 1])
        original = self._template.render(history, tools, generation=False).replace(BREAK, "")
        self.strips |= head != original
        return unthought(head) == unthought(original)
