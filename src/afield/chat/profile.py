"""Finding out, by rendering, what a chat template does; nothing about it is taken on trust.

Deltas: for each pattern of new messages, realistic conversations are rendered whole, and what stands
after the last assistant turn has to be, id by id, what `delta` gives. What stands before has to stay
as it was without the new messages, except for reasoning: under `preserve` sampled ids are never
rendered again, so stripping is noted, not held against the pattern. Templates that raise, drop a
message or move anything else are not certified. `probes` finds out the rest.
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


class TemplateProfile(Struct, frozen=True, kw_only=True):
    """What was found out about a model directory's template and tokenizer."""

    template_hash: str
    tokenizer_hash: str
    end_of_turn: str | None
    """The token that ends an assistant turn."""
    end_of_call: str | None
    """The token that ends a turn of calls."""
    appends: dict[str, str | None]
    """For each pattern of new messages, the tier that renders only them; None where none can."""
    truncated: bool
    """Whether they may also follow a turn that was cut off before its end."""
    named: bool
    """Whether results are appended only when they say which tool they come from (`Message.name`)."""
    strips: tuple[str, ...]
    """Patterns before which the template takes reasoning out of earlier turns."""
    family: str | None
    """The family whose bridge serves as tier T1."""
    bridges: dict[str, tuple[int, ...]]
    """For each pattern it serves, the stop ids behind which it does as the template does."""
    reasoning: str | None
    """The format of reasoning."""
    keeps_reasoning: bool
    opens_thinking: bool
    """Whether the generation prompt begins a block of reasoning."""
    tool_format: str | None
    parallel_calls: bool
    call_ids: str
    """`free`, `rendered` or `nine`; see `template_probes.call_ids`."""
    prints_date: bool
    rules: tuple[str, ...]
    """What becomes of conversations that the template would refuse; see `rules.RULES`."""
    unsafe: tuple[str, ...]
    """Control tokens that content can spell although it is escaped."""
    notes: tuple[str, ...]


def profile_template(
    template: ChatTemplate, vocab: Vocabulary, stop_ids: Sequence[int], arguments: Mapping[str, Any]
) -> TemplateProfile:
    ends = find_ends(template, vocab, stop_ids)
    checks = [Check(template, vocab, ends, pattern) for pattern in PATTERNS]
    passed = {check.pattern: check.passes() for check in checks}
    tags = template_probes.find_reasoning(template, vocab)
    tool_format, parallel = template_probes.find_tool_format(template)
    certificate = TemplateProfile(
        template_hash=template.hash,
        tokenizer_hash=vocab.hash,
        end_of_turn=ends.said.text if ends.said else None,
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
    notes = [*_notes(certificate, vocab)]
    if not (passed["tool"] or passed["user"]):
        bridged, why = find_bridge(template, vocab, stop_ids, arguments)
        notes.append(why)
        certificate = _bridged(certificate, bridged)
    return msgspec.structs.replace(certificate, notes=tuple(notes))


def _bridged(certificate: TemplateProfile, found: Bridged | None) -> TemplateProfile:
    if found is None:
        return certificate
    appends = {p: tier or ("bridge" if p in found.stops else None) for p, tier in certificate.appends.items()}
    return msgspec.structs.replace(
        certificate, appends=appends, family=found.family, bridges=found.stops, strips=found.strips
    )


def _notes(found: TemplateProfile, vocab: Vocabulary) -> Iterator[str]:
    if found.end_of_turn is None:
        yield "the template has no token that ends an assistant turn: tier T2 appends nothing"
    if found.strips:
        yield f"the template strips earlier reasoning before {', '.join(found.strips)}; it is preserved here"
    for literal in found.unsafe:
        yield f"content can spell the control token {literal!r}: one character cannot be escaped"
    if literal := template_probes.changed_by_escape(vocab):
        yield f"escaped content is encoded piece by piece, which changes its text ({literal!r} for one)"
    if found.named:
        yield "the template names the tool a result comes from: results without a name are not appended"
    if found.prints_date:
        yield "the template prints the date; it is that of the start of this process"
    if found.tool_format and not found.parallel_calls:
        yield "the template renders one call per turn: a turn with several is followed by a new row"
    if "fold-tools" in found.rules:
        yield "the template has no calls of tools that can be read: tools, calls and results are text"


class Check:
    """One pattern against every conversation it can follow."""

    def __init__(self, template: ChatTemplate, vocab: Vocabulary, ends: Ends, pattern: str) -> None:
        self.pattern = pattern
        self.strips = False
        self.truncated = True
        self.named = False
        self._template = template
        self._vocab = vocab
        self._ends = ends

    def passes(self) -> bool:
        if self._holds(named=False):
            return True
        self.named = "tool" in self.pattern and self._holds(named=True)
        return self.named

    def _holds(self, *, named: bool) -> bool:
        checked = 0
        for history, new in conversations(self.pattern, named=named):
            for tools in ((), (TOOL,)):
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
        head, known = whole[:cut], before[:kept]
        self.strips |= self._strips(whole, history, tools, moved=head != known)
        if unthought(head) != unthought(known):
            return False
        ids, added = self._vocab.encode(whole), self._vocab.encode(delta)
        self.truncated &= end.direct and self._vocab.encode(head) + added == ids
        return added[:1] == [end.id] and self._vocab.encode(head + end.text) + added[1:] == ids

    def _strips(self, whole: str, history: Sequence[Message], tools: Sequence[Tool], *, moved: bool) -> bool:
        """Whether the last turn and its prompt do not stand in the whole as they stood then."""
        try:
            prompt = self._template.render(history[:-1], tools, generation=True)
        except TemplateRefusal:
            return True
        if not history[-1].reasoning:
            return not whole.startswith(prompt)
        # Where the prompt has closed the block of reasoning already, no turn has any.
        closed = prompt.rstrip().endswith(tuple(tags.closing for tags in REASONING))
        return not closed and (moved or not whole.startswith(prompt))


# --- cache -----------------------------------------------------------------------------------------


def remembered(
    folder: Path | None, known: Sequence[Any], make: Callable[[], TemplateProfile]
) -> TemplateProfile:
    """The certificate for what is `known`, from the folder where it is there."""
    if folder is None:
        return make()
    inputs = json.dumps([*known, _certifier()], sort_keys=True, default=str)
    path = folder / f"certificate-{hashlib.blake2b(inputs.encode(), digest_size=16).hexdigest()}.json"
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(path.read_bytes(), type=TemplateProfile)
    certificate = make()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(certificate), indent=1))
        draft.replace(path)
    return certificate


@cache
def _certifier() -> list[str]:
    """Who certifies: the version is not enough where the code is edited in place."""
    code = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        code.update(path.read_bytes())
    families = importlib.metadata.version("renderers") if available() else "none"
    return [importlib.metadata.version("afield"), code.hexdigest(), families]
