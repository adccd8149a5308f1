"""Template profile: what a chat template does, measured by rendering sample conversations.

1. For each pattern of new messages, sample conversations are rendered in full. A pattern may be appended if
   the token ids after the last assistant turn equal those of `delta_text`, and the new messages do not change
   the ids before it. Stripped reasoning is only recorded: sampled ids are never rendered again.
2. `template_probes` measures reasoning, tool-call formats, call ids and message rules.
3. `cached_profile` keeps a profile in a JSON file named by a digest of its inputs, the code of afield and the
   version of `renderers`. An unreadable file is replaced; an unwritable directory is ignored.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from afield.chat import template_probes
from afield.chat.message_rules import RULES
from afield.chat.parsers.formats import HARMONY, REASONING
from afield.chat.renderers_bridge import Bridged, available, find_bridge
from afield.chat.sample_conversations import MARK, PATTERNS, TOOL, conversations
from afield.chat.template import ChatTemplate, TemplateRefusal, Tool
from afield.chat.turn_suffix import Ends, after_turn, delta_text, find_ends, unthought
from afield.chat.vocabulary import Vocabulary
from afield.types import Message

TOOLSETS: tuple[tuple[Tool, ...], ...] = ((), (TOOL,))
"""Tools of sample conversations."""


class TemplateProfile(Struct, frozen=True, kw_only=True):
    """Properties of a model directory's chat template and tokenizer, measured by rendering."""

    template_hash: str
    """SHA-256 of the template sources."""
    tokenizer_hash: str
    """SHA-256 of tokenizer.json."""
    end_of_turn: str | None
    """Token that ends an assistant turn of text; None if there is none."""
    end_of_call: str | None
    """Token that ends an assistant turn of tool calls; None if there is none."""
    appends: dict[str, str | None]
    """Tier that renders new messages alone (`bridge` or `append`), by pattern; None if none is exact."""
    truncated: bool
    """Whether new messages may also be appended to a truncated turn."""
    named: bool
    """Whether tool results are appended only if they name their tool (`Message.name`)."""
    strips: tuple[str, ...]
    """Patterns before which the template strips the reasoning of earlier turns."""
    family: str | None
    """Model family of tier `bridge`; None without it."""
    bridges: dict[str, tuple[int, ...]]
    """Stop ids after which tier `bridge` is exact, by pattern."""
    reasoning: str | None
    """Name of the reasoning format, see `parsers.formats.REASONING`; None without reasoning."""
    keeps_reasoning: bool
    """Whether the template renders the reasoning of the last turn."""
    opens_thinking: bool
    """Whether the generation prompt begins a block of reasoning."""
    tool_format: str | None
    """Name of the tool-call format, see `parsers.formats.FORMATS`; None if no format fits."""
    parallel_calls: bool
    """Whether a turn may have several calls."""
    call_ids: str
    """`free`, `rendered` or `nine`; see `template_probes.call_ids`."""
    prints_date: bool
    """Whether the template prints the date."""
    rules: tuple[str, ...]
    """Message rules that the template needs; see `message_rules.RULES`."""
    unsafe: tuple[str, ...]
    """Control tokens that escaped content can still produce."""
    notes: tuple[str, ...]
    """Limitations, as sentences for the user."""


def profile_template(
    template: ChatTemplate, vocab: Vocabulary, stop_ids: Sequence[int], arguments: Mapping[str, Any]
) -> TemplateProfile:
    """Measure a chat template by rendering sample conversations."""
    ends = find_ends(template, vocab, stop_ids)
    renderings = RenderCache(template)
    checks = [PatternCheck(renderings, vocab, ends, pattern) for pattern in PATTERNS]
    passed = {check.pattern: check.passes() for check in checks}
    tags = template_probes.find_reasoning(template, vocab)
    tool_format, parallel = template_probes.find_tool_format(template)
    profile = TemplateProfile(
        template_hash=template.hash,
        tokenizer_hash=vocab.hash,
        end_of_turn=ends.text.text if ends.text else None,
        end_of_call=ends.called.text if ends.called else None,
        appends={pattern: "append" if passed[pattern] else None for pattern in PATTERNS},
        truncated=any(passed.values()) and all(check.truncated for check in checks if passed[check.pattern]),
        named=any(check.named for check in checks),
        strips=tuple(check.pattern for check in checks if passed[check.pattern] and check.strips),
        family=None,
        bridges={},
        reasoning=HARMONY if template_probes.speaks_harmony(template) else tags.name if tags else None,
        keeps_reasoning=template_probes.keeps_reasoning(template),
        opens_thinking=template_probes.starts_thinking(template, tags),
        tool_format=tool_format,
        parallel_calls=parallel,
        call_ids=template_probes.call_ids(template),
        prints_date=template_probes.prints_date(template),
        rules=tuple(rule for rule in RULES if rule in template.rules),
        unsafe=tuple(template_probes.unsafe_literals(vocab)),
        notes=(),
    )
    notes = [*_notes(profile, vocab)]
    if not (passed["tool"] or passed["user"]):
        bridged, why = find_bridge(template, vocab, stop_ids, arguments)
        notes.append(why)
        profile = _bridged(profile, bridged)
    return msgspec.structs.replace(profile, notes=tuple(notes))


def _bridged(profile: TemplateProfile, bridge: Bridged | None) -> TemplateProfile:
    if bridge is None:
        return profile
    appends = {p: tier or ("bridge" if p in bridge.stops else None) for p, tier in profile.appends.items()}
    return msgspec.structs.replace(
        profile, appends=appends, family=bridge.family, bridges=bridge.stops, strips=bridge.strips
    )


def _notes(profile: TemplateProfile, vocab: Vocabulary) -> Iterator[str]:
    if profile.end_of_turn is None:
        yield "the template has no token that ends an assistant turn: tier append serves no pattern"
    if profile.strips:
        yield f"the template strips earlier reasoning before {', '.join(profile.strips)}; afield keeps it"
    for literal in profile.unsafe:
        yield f"content can spell the control token {literal!r}: one character cannot be escaped"
    if literal := template_probes.changed_by_escape(vocab):
        yield f"escaped content is encoded piece by piece, which changes its text ({literal!r} for one)"
    if profile.named:
        yield "the template names the tool a result comes from: results without a name are not appended"
    if profile.prints_date:
        yield "the template prints the date; it is that of the start of this process"
    if profile.tool_format and not profile.parallel_calls:
        yield "the template renders one call per turn: a turn with several is followed by a new row"
    if "fold-tools" in profile.rules:
        yield "the template has no calls of tools that can be read: tools, calls and results are text"


class RenderCache:
    """Renders each conversation once; the sample conversations of the patterns overlap."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._texts: dict[tuple[tuple[Message, ...], bool, bool], str | TemplateRefusal] = {}

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], *, generation: bool) -> str:
        """Render as `ChatTemplate.render` does; `tools` is empty or the sample tool."""
        key = (tuple(messages), bool(tools), generation)
        if (text := self._texts.get(key)) is None:
            try:
                text = self._template.render(messages, tools, generation=generation)
            except TemplateRefusal as refusal:
                text = refusal
            self._texts[key] = text
        if isinstance(text, TemplateRefusal):
            raise text
        return text


class PatternCheck:
    """Checks whether one pattern of new messages may be appended to every sample conversation."""

    def __init__(self, template: RenderCache, vocab: Vocabulary, ends: Ends, pattern: str) -> None:
        self.pattern = pattern
        self.strips = False
        self.truncated = True
        self.named = False
        self._template = template
        self._vocab = vocab
        self._ends = ends

    def passes(self) -> bool:
        """Run the check; sets `strips`, `truncated` and `named`."""
        if self._holds(named=False):
            return True
        self.named = "tool" in self.pattern and self._holds(named=True)
        return self.named

    def _holds(self, *, named: bool) -> bool:
        checked = 0
        for history, new in conversations(self.pattern, named=named):
            for tools in TOOLSETS:
                try:
                    before = self._template.render(history, tools, generation=False)
                except TemplateRefusal:
                    continue
                if MARK not in before:
                    continue
                checked += 1
                if not self._appends(before, history, new, tools):
                    return False
        return checked > 0

    def _appends(
        self, before: str, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]
    ) -> bool:
        end = self._ends.of(history[-1])
        if end is None:
            return False
        try:
            whole = self._template.render([*history, *new], tools, generation=True)
            delta = delta_text(self._template, end, new)
        except TemplateRefusal:
            return False
        cut = after_turn(whole, MARK, end)
        kept = after_turn(before, MARK, end)
        if delta is None or cut is None or kept is None:
            return False
        if not all(message.content in whole[cut:] for message in new):
            return False
        head, original = whole[:cut], before[:kept]
        self.strips |= self._strips(whole, history, tools, moved=head != original)
        if unthought(head) != unthought(original):
            return False
        ids, added = self._vocab.encode(whole), self._vocab.encode(delta)
        self.truncated &= end.direct and self._vocab.encode(head) + added == ids
        return added[:1] == [end.id] and self._vocab.encode(head + end.text) + added[1:] == ids

    def _strips(self, whole: str, history: Sequence[Message], tools: Sequence[Tool], *, moved: bool) -> bool:
        """Whether the full rendering changes the last turn or its prompt."""
        try:
            prompt = self._template.render(history[:-1], tools, generation=True)
        except TemplateRefusal:
            return True
        if not history[-1].reasoning:
            return not whole.startswith(prompt)
        # If the prompt closes the reasoning block itself, turns have no reasoning to strip.
        closed = prompt.rstrip().endswith(tuple(tags.closing for tags in REASONING))
        return not closed and (moved or not whole.startswith(prompt))


# --- cache -----------------------------------------------------------------------------------------


def cached_profile(
    folder: Path | None, key: Sequence[Any], make: Callable[[], TemplateProfile]
) -> TemplateProfile:
    """Read the profile with these inputs from the cache folder, or make and store it."""
    if folder is None:
        return make()
    inputs = json.dumps([*key, _code_version()], sort_keys=True, default=str)
    path = folder / f"profile-{hashlib.blake2b(inputs.encode(), digest_size=16).hexdigest()}.json"
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(path.read_bytes(), type=TemplateProfile)
    profile = make()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1))
        draft.replace(path)
    return profile


@cache
def _code_version() -> list[str]:
    """Version and digest of the code that makes profiles; the version alone misses local edits."""
    code = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        code.update(path.read_bytes())
    families = importlib.metadata.version("renderers") if available() else "none"
    return [importlib.metadata.version("afield"), code.hexdigest(), families]
