"""Chat tokenizer: renders prompts to token ids and parses replies.

`ChatTokenizer.load` reads a model directory: `tokenizer.json`, a chat template, and where present
`tokenizer_config.json`, `config.json` and `generation_config.json`. The tokenizer is immutable and safe to
use from several threads. It renders a prompt in one of four tiers:

1. `bridge`: the new messages by the model family's bridge of the package `renderers`.
2. `append`: the new messages behind a dummy conversation, without the conversation itself.
3. `splice`: the whole conversation, of which the part after the last sampled turn is taken.
4. `full`: the whole conversation, as a new root.

`TemplateProfile.appends` lists the patterns of new messages that `bridge` and `append` render exactly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from afield.chat import model_files
from afield.chat.escape import POLICIES, policy
from afield.chat.model_files import ModelFiles, ModelIdentity, identify
from afield.chat.parsers.formats import FORMATS, HARMONY, REASONING
from afield.chat.parsers.harmony import MARKERS, HarmonyReader
from afield.chat.parsers.reply import Reader, ReplyParser, ReplyReader, Spellings
from afield.chat.profile import TemplateProfile, cached_profile, profile_template
from afield.chat.renderers_bridge import make_bridge
from afield.chat.reply_grammar import ReplyForm
from afield.chat.template import ChatTemplate, TemplateRefusal, Tool
from afield.chat.template_probes import Switches, as_taken, find_switches, unchanged, with_rules
from afield.chat.turn_suffix import Ends, TurnEnd, delta_text, pattern_of, splice_text
from afield.errors import UsageError
from afield.types import Message

THINKING = ("preserve", "template", "per_turn")
RENDER = ("fold", "strict")


def _key(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, sort_keys=True)


class ChatTokenizer:
    """Renders and parses the chat format of one model; create it with `load`."""

    def __init__(
        self,
        *,
        name: str,
        files: ModelFiles,
        template: ChatTemplate,
        arguments: Mapping[str, Any],
        profile: TemplateProfile,
        directory: Path,
    ) -> None:
        self.name = name
        self._directory = directory
        self.vocab_size = files.vocab_size
        self.longest_token = files.vocab.longest
        self.profile = profile
        self._vocab = vocab = files.vocab
        self._template = template
        self._escape = policy("escape", vocab.control)
        self._arguments = dict(arguments)
        message, called = (
            TurnEnd(text, vocab.control[text]) if text else None
            for text in (self.profile.end_of_turn, self.profile.end_of_call)
        )
        self._ends = Ends(message, called)
        ends = [end.id for end in (message, called) if end]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys((*files.stop_ids, *ends)))
        self.image_id = files.image_id
        self.turn_ends = frozenset(ends or self.stop_ids)  # a turn with another last token is truncated
        family = self.profile.family
        self._bridge = make_bridge(family, template, vocab, arguments) if family else None
        self._format = next((f for f in FORMATS if f.name == self.profile.tool_format), None)
        self._tags = next((tags for tags in REASONING if tags.name == self.profile.reasoning), None)
        self.thinking, self.escape, self.render_policy = THINKING[0], POLICIES[0], RENDER[0]
        self._others = {(self.thinking, self.escape, self.render_policy): self}
        self._variants: dict[str, ChatTokenizer] = {}
        self._make: Callable[[Mapping[str, Any]], ChatTokenizer] | None = None
        markers = {vocab.control.get(text) for text in self._markers()}
        hidden = frozenset(vocab.special_ids - markers) | frozenset(self.stop_ids)
        self._spellings = Spellings(vocab, hidden)
        self._verbatim = Spellings(vocab, frozenset(self.stop_ids))

    @classmethod
    def load(
        cls,
        model_dir: Path,
        *,
        name: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        now: datetime | None = None,
        cache: Path | None = None,
        rules: bool = True,
    ) -> ChatTokenizer:
        """Load a model directory; raises UsageError when its tokenizer or chat template is missing.

        Args:
            model_dir: directory with tokenizer.json and a chat template.
            name: model name; None uses the name of the directory.
            arguments: variables for the template, such as `enable_thinking`.
            now: date that the template prints; None uses the current time.
            cache: directory that keeps template profiles between starts; None for none.
            rules: whether message rules may change conversations that the template refuses.
        """
        model_dir = Path(model_dir)
        files = model_files.read(model_dir)
        printed = now or datetime.now()

        def make(template_arguments: Mapping[str, Any]) -> ChatTokenizer:
            variables = {**files.special, **template_arguments}
            template = ChatTemplate(files.sources, variables, printed, files.vocab.control)
            template = as_taken(template)
            inputs = [template.hash, files.vocab.hash, files.stop_ids, variables, rules]

            def make_profile() -> TemplateProfile:
                prepared = with_rules(template) if rules else unchanged(template)
                return profile_template(prepared, files.vocab, files.stop_ids, template_arguments)

            profile = cached_profile(cache, inputs, make_profile)
            tokenizer = cls(
                name=name or model_dir.resolve().name,
                files=files,
                template=template.with_rules(profile.rules, last_resort=rules),
                arguments=template_arguments,
                profile=profile,
                directory=model_dir,
            )
            tokenizer._make = make
            return tokenizer

        return make(dict(arguments or {}))

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Arguments of the chat template besides the conversation."""
        return self._arguments

    @cached_property
    def identity(self) -> ModelIdentity:
        """Digests of the model directory, as it is when they are first asked for."""
        return identify(self._directory)

    @cached_property
    def switches(self) -> Switches:
        """Template variables that turn thinking on and off."""
        return find_switches(self._template, self._arguments)

    def variant(self, arguments: Mapping[str, Any]) -> ChatTokenizer | None:
        """Tokenizer with additional template arguments; None until `make_variant` has created it."""
        return self._variants.get(_key(arguments)) if arguments else self

    def make_variant(self, arguments: Mapping[str, Any]) -> ChatTokenizer:
        """Create a tokenizer with additional template arguments; profiles the template the first time."""
        if (variant := self.variant(arguments)) is not None:
            return variant
        if self._make is None:
            raise UsageError("this tokenizer has no variants; load it with ChatTokenizer.load")
        return self._variants.setdefault(_key(arguments), self._make({**self._arguments, **arguments}))

    def _markers(self) -> set[str]:
        """Literals that structure a reply; parsed rather than hidden, even if they are special tokens."""
        tags = (self._tags.opening, self._tags.closing) if self._tags else ()
        calls = self._format.markers if self._format else ()
        return {*tags, *calls, *(MARKERS if self.profile.reasoning == HARMONY else ())}

    def under(
        self, *, thinking: str = "preserve", escape: str = "escape", render: str = "fold"
    ) -> ChatTokenizer:
        """Tokenizer of the same model with other policies.

        Args:
            thinking: `preserve` keeps sampled reasoning; `template` follows the template, and starts a new
                branch where it strips reasoning; `per_turn` never appends.
            escape: policy for control tokens in content, see `escape.POLICIES`.
            render: `fold` applies message rules to conversations that the template refuses; `strict`
                refuses them.
        """
        policies = (thinking, escape, render)
        if (tokenizer := self._others.get(policies)) is not None:
            return tokenizer
        for setting, value, choices in (
            ("thinking", thinking, THINKING),
            ("escape", escape, POLICIES),
            ("render", render, RENDER),
        ):
            if value not in choices:
                raise UsageError(f"unknown {setting} policy {value!r}; choose one of: {', '.join(choices)}")
        changed = copy(self)
        changed.thinking, changed.escape, changed.render_policy = policies
        changed._template = self._template.under(escape, strict=render == "strict")
        changed._escape = policy(escape, self._vocab.control)
        return self._others.setdefault(policies, changed)

    def root_key(self, tools: Sequence[Tool]) -> str:
        """Key of prompts that may share a root: same tokenizer, template, arguments, tools and policies."""
        parts = [
            self.name,
            self._vocab.hash,
            self._template.hash,
            [tool.raw for tool in tools],
            self._arguments,
            self.thinking,
            self.escape,
        ]
        try:
            canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"))
        except RecursionError as error:
            raise TemplateRefusal("the tools are nested too deeply to be rendered") from error
        return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Token ids of the whole prompt, with the generation prompt (tier `full`)."""
        return self.render_by_rules(messages, tools)[0]

    def render_by_rules(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[int], tuple[str, ...]]:
        """Token ids of `render`, and the rules that changed the conversation."""
        text, applied = self._template.render_any(messages, tools)
        return self._vocab.encode(text), applied

    def rules_applied(self, new: Sequence[Message]) -> tuple[str, ...]:
        """Rules that change new messages after a sampled turn (`append`, `splice`)."""
        return self._template.applied(new)

    def append(
        self,
        new: Sequence[Message],
        *,
        truncated: bool,
        tools: Sequence[Tool] = (),
        stop: int | None = None,
    ) -> tuple[str, list[int]] | None:
        """Tier and token ids of new messages after a sampled turn; None if the profile does not allow it.

        The cost does not depend on the length of the conversation.

        Args:
            new: messages after the turn.
            truncated: whether the turn lacks its stop id; the result then begins with it.
            tools: tools of the conversation.
            stop: id that ended the turn, required by tier `bridge`.
        """
        pattern, end = pattern_of(new), self._ends.before(new)
        tier = self.profile.appends.get(pattern)
        if tier is None or not self._may_append(truncated):
            return None
        if self.thinking == "template" and pattern in self.profile.strips:
            return None
        if self.profile.named and any(m.role == "tool" and not m.name for m in new):
            return None
        try:
            if tier == "bridge":
                ids = self._bridged(pattern, new, None if truncated else stop, tools)
                return None if ids is None else (tier, ids)
            text = delta_text(self._template, end, new) if end else None
        except TemplateRefusal:
            return None
        return None if text is None else (tier, self._behind_stop(text, truncated))

    def _bridged(
        self, pattern: str, new: Sequence[Message], stop: int | None, tools: Sequence[Tool]
    ) -> list[int] | None:
        if self._bridge is None or stop not in self.profile.bridges[pattern]:
            return None
        return self._bridge.delta(self._template, new, stop, tools)

    def splice(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        *,
        truncated: bool,
        tools: Sequence[Tool] = (),
    ) -> list[int] | None:
        """Token ids of new messages after a sampled turn, the last of `history` (tier `splice`).

        Renders the whole conversation. `new` may contain assistant messages that were not sampled. Returns
        None if the new messages change the text before them.
        """
        end = self._ends.of(history[-1]) if history else None
        if end is None or not new or not self._may_append(truncated):
            return None
        if len(history[-1].tool_calls) > 1 and "split-calls" in self._template.rules:
            return None  # a sampled turn cannot be split
        strict = self.thinking == "template"
        try:
            text = splice_text(self._template, end, history, new, tools, strict=strict)
        except TemplateRefusal:
            return None
        return None if text is None else self._behind_stop(text, truncated)

    def _may_append(self, truncated: bool) -> bool:
        return self.thinking != "per_turn" and (not truncated or self.profile.truncated)

    def _behind_stop(self, text: str, truncated: bool) -> list[int]:
        ids = self._vocab.encode(text)
        return ids if truncated else ids[1:]

    def parser(self, *, tools: Sequence[Tool], verbatim: bool = False) -> ReplyParser:
        """Create a parser for one reply, which reports a tool call when it is complete.

        Args:
            tools: tools of the call; without tools, nothing is parsed as a tool call.
            verbatim: show control tokens inside a reply as text, as constraints do.
        """
        return ReplyParser(self._verbatim if verbatim else self._spellings, self._reader(tools))

    def reply_form(self) -> ReplyForm:
        """Format of the model's replies, for `reply_grammar`."""
        return ReplyForm(
            tool_format=self._format,
            reasoning=self._tags,
            opened=self.profile.opens_thinking,
            harmony=self.profile.reasoning == HARMONY,
        )

    def _reader(self, tools: Sequence[Tool]) -> Reader:
        if self.profile.reasoning == HARMONY:
            return HarmonyReader(tools=bool(tools))
        return ReplyReader(
            reasoning=self._tags,
            thinking=self.profile.opens_thinking,
            tool_format=self._format if tools else None,
            tools=tools,
        )

    def plain_parser(self, *, verbatim: bool = False) -> ReplyParser:
        """Create a parser for a reply of plain text, without reasoning and calls."""
        reader = ReplyReader(reasoning=None, thinking=False, tool_format=None)
        return ReplyParser(self._verbatim if verbatim else self._spellings, reader)

    def encode_raw(self, text: str) -> list[int]:
        """Token ids of a prompt that the client rendered; control tokens are recognised."""
        return self._vocab.encode(text.encode("utf-8", "replace").decode())

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, for people to read."""
        return self._vocab.decode(ids)

    def piece(self, token: int) -> bytes:
        """Bytes of a token, also of control tokens; may be part of a character."""
        return self._vocab.piece(token)

    def reply_bytes(self, token: int) -> bytes:
        """Bytes of a token in a reply: empty for stop ids and hidden control tokens."""
        return self._spellings[token]
