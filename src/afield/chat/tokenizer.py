"""`ChatTokenizer`: everything the gateway knows about one model's tokens.

Loaded once from a model directory (`tokenizer.json`, a chat template, and where present
`tokenizer_config.json`, `config.json`, `generation_config.json`); immutable afterwards and safe to use
from several threads. It renders prompts whole (tier T4) or as what follows a sampled turn (T1 to T3),
and reads replies. Refuses a directory without a tokenizer or a template, naming what is missing, and
patterns of messages for which the template was not certified.
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
from afield.chat.escape import POLICIES, Spelled, policy
from afield.chat.model_files import ModelFiles
from afield.chat.parsers.formats import FORMATS, HARMONY, REASONING
from afield.chat.parsers.harmony import MARKERS, HarmonyReader
from afield.chat.parsers.reply import Reader, ReplyParser, ReplyReader, Spellings
from afield.chat.profile import TemplateProfile, profile_template, remembered
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
    """See `load`."""

    def __init__(
        self,
        *,
        name: str,
        files: ModelFiles,
        template: ChatTemplate,
        arguments: Mapping[str, Any],
        certificate: TemplateProfile,
    ) -> None:
        self.name = name
        self.vocab_size = files.vocab_size
        self.longest_token = files.vocab.longest
        self.certificate = certificate
        self._vocab = vocab = files.vocab
        self._template = template
        self._escape = policy("escape", vocab.control)
        self._arguments = dict(arguments)
        said, called = (
            TurnEnd(text, vocab.control[text]) if text else None
            for text in (self.certificate.end_of_turn, self.certificate.end_of_call)
        )
        self._ends = Ends(said, called)
        ends = [end.id for end in (said, called) if end]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys((*files.stop_ids, *ends)))
        self.image_id = files.image_id
        self.turn_ends = frozenset(ends or self.stop_ids)  # a turn that stopped otherwise lacks its end
        family = self.certificate.family
        self._bridge = make_bridge(family, template, vocab, arguments) if family else None
        self._format = next((f for f in FORMATS if f.name == self.certificate.tool_format), None)
        self._tags = next((tags for tags in REASONING if tags.name == self.certificate.reasoning), None)
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
        """`arguments` go to the template (`enable_thinking`); `now` is the date it prints, today if None.

        Without `rules` the template stays as it is, whatever it refuses. What certification finds
        out is remembered under `cache`, so that the next start need not.
        """
        model_dir = Path(model_dir)
        files = model_files.read(model_dir)
        printed = now or datetime.now()

        def made(given: Mapping[str, Any]) -> ChatTokenizer:
            variables = {**files.special, **given}
            template = ChatTemplate(files.sources, variables, printed, files.vocab.control)
            template = as_taken(template)
            known = [template.hash, files.vocab.hash, files.stop_ids, variables, rules]

            def found() -> TemplateProfile:
                prepared = with_rules(template) if rules else unchanged(template)
                return profile_template(prepared, files.vocab, files.stop_ids, given)

            certificate = remembered(cache, known, found)
            tokens = cls(
                name=name or model_dir.resolve().name,
                files=files,
                template=template.with_rules(certificate.rules, last_resort=rules),
                arguments=given,
                certificate=certificate,
            )
            tokens._make = made
            return tokens

        return made(dict(arguments or {}))

    @property
    def arguments(self) -> Mapping[str, Any]:
        """What the chat template is told beside the conversation."""
        return self._arguments

    @cached_property
    def switches(self) -> Switches:
        """How the chat template turns thinking on and off, found out by rendering."""
        return find_switches(self._template, self._arguments)

    def variant(self, arguments: Mapping[str, Any]) -> ChatTokenizer | None:
        """The same model with more arguments for its template; None while it has not been made."""
        return self._variants.get(_key(arguments)) if arguments else self

    def make_variant(self, arguments: Mapping[str, Any]) -> ChatTokenizer:
        """Certifies the template with these arguments, which takes a while; made once for each."""
        if (known := self.variant(arguments)) is not None:
            return known
        if self._make is None:
            raise UsageError("only a model that was loaded from its directory has variants")
        return self._variants.setdefault(_key(arguments), self._make({**self._arguments, **arguments}))

    def _markers(self) -> set[str]:
        """What structures a reply: read, not hidden, even where the tokenizer calls it special."""
        tags = (self._tags.opening, self._tags.closing) if self._tags else ()
        calls = self._format.markers if self._format else ()
        return {*tags, *calls, *(MARKERS if self.certificate.reasoning == HARMONY else ())}

    def under(
        self, *, thinking: str = "preserve", escape: str = "escape", render: str = "fold"
    ) -> ChatTokenizer:
        """The same model under other policies; made once for each.

        `thinking`: `preserve` sampled reasoning for good, do as the `template` does (and branch where
        it strips), or `per_turn` never append. `escape`: what becomes of control tokens in content.
        `render`: `fold` conversations that the template would refuse by its rules, or be `strict` and
        refuse them. A conversation that needs no rule is rendered alike under both.
        """
        policies = (thinking, escape, render)
        if (known := self._others.get(policies)) is not None:
            return known
        for what, value, choices in (
            ("thinking", thinking, THINKING),
            ("escape", escape, POLICIES),
            ("render", render, RENDER),
        ):
            if value not in choices:
                raise UsageError(f"unknown {what} policy {value!r}; choose one of: {', '.join(choices)}")
        other = copy(self)
        other.thinking, other.escape, other.render_policy = policies
        other._template = self._template.under(escape, strict=render == "strict")
        other._escape = policy(escape, self._vocab.control)
        return self._others.setdefault(policies, other)

    def root_key(self, tools: Sequence[Tool]) -> str:
        """Sessions' trees with this key may share their heads: same policy, tokenizer, template and tools."""
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
        """The whole prompt, ready for the model to go on (tier T4)."""
        return self.render_by_rules(messages, tools)[0]

    def render_by_rules(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[int], tuple[str, ...]]:
        """The same, and the rules by which the conversation was changed; mostly none."""
        text, applied = self._template.render_any(messages, tools)
        return self._vocab.encode(text), applied

    def rules_applied(self, new: Sequence[Message]) -> tuple[str, ...]:
        """The rules by which messages are changed that follow a turn (`append`, `splice`)."""
        return self._template.applied(new)

    def append(
        self,
        new: Sequence[Message],
        *,
        truncated: bool,
        tools: Sequence[Tool] = (),
        stop: int | None = None,
    ) -> tuple[str, list[int]] | None:
        """What follows a sampled assistant turn, and the tier; None where that is not certified.

        The turn ended with a stop id, unless it was truncated: then the missing stop comes first.
        Where the stop is the beginning of the next message (tier T1), `stop` has to say which it was.
        Costs what the new messages cost, whatever the length of the conversation.
        """
        pattern, end = pattern_of(new), self._ends.before(new)
        tier = self.certificate.appends.get(pattern)
        if tier is None or not self._may_append(truncated):
            return None
        if self.thinking == "template" and pattern in self.certificate.strips:
            return None
        if self.certificate.named and any(m.role == "tool" and not m.name for m in new):
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
        if self._bridge is None or stop not in self.certificate.bridges[pattern]:
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
        """What follows a sampled turn, the last of `history`, in this conversation (tier T3).

        `new` may be anything, also assistant messages nobody sampled. None where the new messages
        would change what the template writes before them. Costs a rendering of the conversation.
        """
        end = self._ends.of(history[-1]) if history else None
        if end is None or not new or not self._may_append(truncated):
            return None
        if len(history[-1].tool_calls) > 1 and "split-calls" in self._template.rules:
            return None  # the turn was sampled in one piece, and cannot be split any more
        strict = self.thinking == "template"
        try:
            text = splice_text(self._template, end, history, new, tools, strict=strict)
        except TemplateRefusal:
            return None
        return None if text is None else self._behind_stop(text, truncated)

    def _may_append(self, truncated: bool) -> bool:
        return self.thinking != "per_turn" and (not truncated or self.certificate.truncated)

    def _behind_stop(self, text: str, truncated: bool) -> list[int]:
        ids = self._vocab.encode(text)
        return ids if truncated else ids[1:]

    def parser(
        self, *, tools: Sequence[Tool], hold_calls: bool = False, verbatim: bool = False
    ) -> ReplyParser:
        """A fresh parser for one reply.

        A call is reported as it is sampled, and withdrawn should it turn out malformed; with
        `hold_calls` it is reported when it is closed, all at once, and nothing is ever withdrawn.
        `verbatim` shows control tokens in the middle of a reply as they are spelled, which is how a
        constraint has read them.
        """
        return ReplyParser(self._verbatim if verbatim else self._spellings, self._reader(tools, hold_calls))

    def reply_form(self) -> ReplyForm:
        """How the model spells a reply to the prompts that are rendered here."""
        return ReplyForm(
            tool_format=self._format,
            reasoning=self._tags,
            opened=self.certificate.opens_thinking,
            harmony=self.certificate.reasoning == HARMONY,
        )

    def _reader(self, tools: Sequence[Tool], hold_calls: bool) -> Reader:
        if self.certificate.reasoning == HARMONY:
            return HarmonyReader(tools=bool(tools), hold_calls=hold_calls)
        return ReplyReader(
            reasoning=self._tags,
            thinking=self.certificate.opens_thinking,
            tool_format=self._format if tools else None,
            hold_calls=hold_calls,
            tools=tools,
        )

    def plain_parser(self, *, verbatim: bool = False) -> ReplyParser:
        """For a reply that is nothing but text: no reasoning, no calls."""
        reader = ReplyReader(reasoning=None, thinking=False, tool_format=None, hold_calls=True)
        return ReplyParser(self._verbatim if verbatim else self._spellings, reader)

    def encode_raw(self, text: str) -> list[int]:
        """A prompt that a client wrote itself: control tokens that it spells are meant."""
        return self._vocab.encode(text.encode("utf-8", "replace").decode())

    def decode(self, ids: Sequence[int]) -> str:
        """For reading."""
        return self._vocab.decode(ids)

    def piece(self, token: int) -> bytes:
        """What a token spells, control tokens too; a part of a character for a token that is one."""
        return self._vocab.piece(token)

    def shown(self, token: int) -> bytes:
        """The same as it is shown in a reply: nothing for control tokens that end it or belong to nobody."""
        return self._spellings[token]

    def encode_text(self, text: str) -> list[int]:
        """Plain text: whatever it spells, no control ids come of it (unless the policy says otherwise)."""
        try:
            return self._vocab.encode(self._escape(text))
        except Spelled as spelled:
            raise TemplateRefusal(
                f"the text spells the control token {spelled.literal!r}; remove it"
            ) from spelled
