"""Builds the prompt of a request: parent turn, new token ids, links.

1. The parent is the deepest turn on the same root whose conversation is a prefix of the request's messages.
2. The messages after it are rendered as new token ids, in the first tier that applies: `bridge` or `append`
   behind the parent, `splice` by rendering the whole conversation. Assistant messages that were not sampled
   need `splice`.
3. Otherwise the prompt is a new root with the tier `full`; its turn is in a separate training row.
4. Links name the origin of a request that does not continue the end of a branch: retry, edit, fork,
   compaction or sub-agent.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, ParamSpec, TypeVar

import msgspec
from msgspec import Struct, structs

from afield.chat import ChatTokenizer, Tool
from afield.gateway.api_error import ApiError, bad_request, context_exceeded
from afield.gateway.model_request import ModelRequest
from afield.gateway.request_cache import ConversationCache
from afield.gateway.sessions import Session
from afield.runs.turn_facts import has_empty_schema
from afield.turn_tree import TurnTree, chain
from afield.types import Link, Message, Turn, TurnStatus

RAW = "raw"
_LATEST = 16
"""Latest turns that are searched for links."""
_QUOTED = 24
"""Characters of a quotation that identify a reply."""


class Match(Struct, frozen=True, kw_only=True):
    """Position of a request in the turn tree, before rendering."""

    root: str
    """Digest of model, template and tools."""
    messages: tuple[Message, ...]
    """Conversation with recognised replies."""
    tools_digest: str
    """Digest of the tools; empty without tools."""
    empty_tools: tuple[str, ...] = ()
    """Names of the tools whose schema allows no argument."""
    digests: Sequence[str]
    """Digest per prefix of the messages."""
    parent: Turn | None = None
    """Turn that the request continues; None for a new root."""
    depth: int = 0
    """Messages that the parent covers."""

    @property
    def new(self) -> tuple[Message, ...]:
        return self.messages[self.depth :]

    @property
    def request_digest(self) -> str:
        return self.digests[-1]


class Prompt(Struct, frozen=True, kw_only=True):
    """A rendered prompt."""

    root: str
    """Digest of model, template and tools."""
    parent: str | None
    """Id of the turn that the prompt continues; None for a new root."""
    delta_ids: tuple[int, ...]
    """New token ids."""
    prompt_ids: tuple[int, ...]
    """All token ids."""
    base_ids: tuple[int, ...] = ()
    """Cached prefix of the prompt, for engines that keep it."""
    sent_ids: tuple[int, ...] = ()
    """Token ids as sent, if images are expanded by the engine."""
    new: tuple[Message, ...]
    """New messages."""
    request_digest: str
    """Digest of the conversation."""
    tools_digest: str
    """Digest of the tools."""
    empty_tools: tuple[str, ...] = ()
    """Names of the tools whose schema allows no argument."""
    tier: str
    """Rendering tier: bridge, append, splice, full or raw."""
    links: tuple[Link, ...] = ()
    """Origin of a request that does not continue a turn."""
    rules: tuple[str, ...] = ()
    """Message rules that the chat template needed."""


class MatchContext(Struct, frozen=True, kw_only=True):
    """Facts of the session that distinguish turns with the same text."""

    cache: ConversationCache
    """Session's cache of recognised conversations."""
    missed: frozenset[str] = frozenset()
    """Turns that were not delivered, which a request cannot continue."""
    again: frozenset[str] = frozenset()
    """Turns that may answer a repeated request."""
    thread_of: Callable[[str], str] = lambda _: ""
    """Returns the client's thread name of a turn."""


def find_parent(
    tree: TurnTree, tokenizer: ChatTokenizer, request: ModelRequest, context: MatchContext
) -> Match:
    match = _match(tree, tokenizer, request, None, context)
    if len(rest := _without_empty(match.new)) < len(match.new):
        # Some clients insert an empty assistant message that was not sampled. It stays if
        # leaving it out matches no other turn.
        messages = _without_empty(match.messages)
        without = _match(tree, tokenizer, request, messages, context) if messages else match
        return without if len(without.new) < len(rest) else match
    return match


def _match(
    tree: TurnTree,
    tokenizer: ChatTokenizer,
    request: ModelRequest,
    messages: tuple[Message, ...] | None,
    context: MatchContext,
) -> Match:
    head = _heads.of(tokenizer, request.tools)
    root = head.root
    if messages is None:
        messages, digests = context.cache.read(tree, root, request.messages)
    else:
        digests = chain(root, messages)
    named_turns = hints(tree, request, messages)
    other_thread = _apart(request.thread, context)
    depth, parent = tree.find(
        digests, named_turns, context.missed, messages, other_thread, context.again
    ) or (0, None)
    return Match(
        root=root,
        messages=messages,
        tools_digest=head.tools_digest,
        empty_tools=head.empty_tools,
        digests=digests,
        parent=parent,
        depth=depth,
    )


def _apart(thread: str, context: MatchContext) -> Callable[[str], bool]:
    return lambda turn_id: context.thread_of(turn_id) != thread


def _without_empty(messages: Sequence[Message]) -> tuple[Message, ...]:
    return tuple(m for m in messages if m.role != "assistant" or _says_anything(m))


def _says_anything(message: Message) -> bool:
    return bool(message.content or message.reasoning or message.tool_calls or message.images)


class _Head(NamedTuple):
    """Properties that all requests with the same tokenizer and tools object share."""

    tokenizer: ChatTokenizer
    """Held with the tools, so that the ids of both are not reused."""
    tools: Sequence[Tool]
    """Tools of the request."""
    root: str
    """Digest of model, template and tools."""
    tools_digest: str
    """Digest of the tools; empty without tools."""
    empty_tools: tuple[str, ...]
    """Names of the tools whose schema allows no argument."""


class _Heads:
    """Cache of heads per tokenizer and tools object."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: OrderedDict[tuple[int, int], _Head] = OrderedDict()

    def of(self, tokenizer: ChatTokenizer, tools: Sequence[Tool]) -> _Head:
        key = (id(tokenizer), id(tools))
        if (cached := self._known.get(key)) is None:
            empty = tuple(tool.name for tool in tools if has_empty_schema(tool.parameters))
            head = _Head(tokenizer, tools, tokenizer.root_key(tools), digest_of(tools), empty)
            cached = self._known[key] = head
            if len(self._known) > self._size:
                self._known.popitem(last=False)
        return cached


_heads = _Heads(256)


def hints(tree: TurnTree, request: ModelRequest, messages: Sequence[Message]) -> Iterator[str]:
    """Yields turns that the client names by echoed ids or tool-call ids."""
    yield from (hint for hint in request.hints if hint in tree)
    for message in messages:
        for call_id in (*(call.id for call in message.tool_calls), message.tool_call_id):
            if call_id and (turn := tree.caller(call_id)):
                yield turn.id


class Rendered(Struct, frozen=True):
    """New token ids: behind the parent's, or the whole prompt with tier `full`."""

    tier: str
    """Rendering tier."""
    ids: tuple[int, ...]
    """New token ids."""
    rules: tuple[str, ...] = ()
    """Message rules that the chat template needed."""


def render(tokenizer: ChatTokenizer, match: Match, tools: Sequence[Tool]) -> Rendered:
    """Renders the new messages, or all of them for `splice` and `full`. Thread-safe."""
    if match.parent is not None and match.new:
        followed = _follow(tokenizer, match, tools)
        if followed is not None:
            tier, delta = followed
            return Rendered(tier, tuple(delta), tokenizer.rules_applied(match.new))
    ids, rules = tokenizer.render_by_rules(match.messages, tools)
    return Rendered("full", tuple(ids), rules)


def build_prompt(tree: TurnTree, match: Match, rendered: Rendered, request: ModelRequest) -> Prompt:
    links = _links(tree, match, request)
    if rendered.tier == "full":
        if match.parent is not None and not links:
            links = (Link("fork", match.parent.id),)
        return _prompt(match, None, rendered, rendered.ids, match.messages, links)
    assert match.parent is not None
    parent = match.parent.id
    prompt_ids = tree.ids(parent, rendered.ids)
    built = _prompt(match, parent, rendered, prompt_ids, match.new, links)
    if request.images or tree.pictured:
        return structs.replace(built, sent_ids=(*tree.sent(parent), *rendered.ids))
    return structs.replace(built, base_ids=tree.kept(parent))


def _prompt(
    match: Match,
    parent: str | None,
    rendered: Rendered,
    prompt: tuple[int, ...],
    new: tuple[Message, ...],
    links: tuple[Link, ...],
) -> Prompt:
    return Prompt(
        root=match.root,
        parent=parent,
        delta_ids=rendered.ids,
        prompt_ids=prompt,
        new=new,
        request_digest=match.request_digest,
        tools_digest=match.tools_digest,
        empty_tools=match.empty_tools,
        tier=rendered.tier,
        links=links,
        rules=rendered.rules,
    )


def _follow(tokenizer: ChatTokenizer, match: Match, tools: Sequence[Tool]) -> tuple[str, list[int]] | None:
    """Renders the new messages behind the parent's turn, and returns the tier."""
    assert match.parent is not None
    sampled = match.parent.token_ids
    truncated = not sampled or sampled[-1] not in tokenizer.turn_ends
    if all(message.role != "assistant" for message in match.new):
        stop = None if truncated else sampled[-1]
        new = _named(match) if tokenizer.profile.named else match.new
        appended = tokenizer.append(new, truncated=truncated, tools=tools, stop=stop)
        if appended is not None:
            return appended
    history = match.messages[: match.depth]
    spliced = tokenizer.splice(history, match.new, truncated=truncated, tools=tools)
    return ("splice", spliced) if spliced is not None else None


def _named(match: Match) -> list[Message]:
    """Adds tool names to results, for templates that need them."""
    names = {call.id: call.name for message in match.messages for call in message.tool_calls}
    return [
        structs.replace(message, name=message.name or names.get(message.tool_call_id, ""))
        if message.role == "tool"
        else message
        for message in match.new
    ]


# --- links ---


def _links(tree: TurnTree, match: Match, request: ModelRequest) -> tuple[Link, ...]:
    if not len(tree):
        return ()
    if aborted := [t for t in tree.turns_of_request(match.request_digest) if t.status is TurnStatus.ABORTED]:
        return (Link("retry", aborted[-1].id),)
    if edited := _edited(tree, match):
        return (Link("edit", edited.id),)
    if match.parent is not None:
        return (Link("fork", match.parent.id),) if tree.has_children(match.parent.id) else ()
    if summary := _compacted(tree, match):
        return (Link("compaction", summary.id),)
    if repeated := _repeated(tree, match):
        return (Link("fork", repeated.id),)
    caller = _waiting(tree, match)
    if caller is not None and (request.thread or _other_head(tree, match)):
        return (Link("sub-agent", caller.id),)
    return ()


def _edited(tree: TurnTree, match: Match) -> Turn | None:
    """Returns the turn that an edited assistant message replaces."""
    for index in range(len(match.messages) - 1, max(match.depth, 1) - 1, -1):
        if match.messages[index].role == "assistant":
            answered = [
                t for t in tree.turns_of_request(match.digests[index - 1]) if t.status is TurnStatus.COMMITTED
            ]
            if answered:
                return answered[-1]
    return None


def _compacted(tree: TurnTree, match: Match) -> Turn | None:
    """Returns the turn whose reply a user or tool message quotes, usually a summary."""
    texts = [message.content for message in match.messages if message.role in ("user", "tool", "developer")]
    return next((turn for turn, reply in _replies(tree) if any(reply in text for text in texts)), None)


def _repeated(tree: TurnTree, match: Match) -> Turn | None:
    """Returns the turn whose reply appears in a conversation with other tools or another beginning."""
    texts = {message.content.strip() for message in match.messages if message.role == "assistant"}
    return next((turn for turn, reply in _replies(tree) if reply in texts), None)


def _replies(tree: TurnTree) -> Iterator[tuple[Turn, str]]:
    """Yields the latest replies that are long enough to identify."""
    for turn in tree.latest(_LATEST):
        if turn.status is TurnStatus.COMMITTED and turn.messages:
            reply = turn.messages[-1].content.strip()
            if len(reply) >= _QUOTED:
                yield turn, reply


def _waiting(tree: TurnTree, match: Match) -> Turn | None:
    """Returns the latest turn with pending tool calls: a sub-agent runs inside one of them."""
    answered = {message.tool_call_id for message in match.messages}
    for turn in tree.latest(_LATEST):
        if turn.messages and answered & {call.id for call in turn.messages[-1].tool_calls}:
            continue
        committed = turn.status is TurnStatus.COMMITTED and turn.messages
        if committed and turn.messages[-1].tool_calls and not tree.has_children(turn.id):
            return turn
    return None


def _other_head(tree: TurnTree, match: Match) -> bool:
    """Returns whether tools or system message differ from all conversations so far."""
    head = _system(match.messages)
    return all(turn.root != match.root or _system(turn.messages) != head for turn in tree.roots)


def _system(messages: Sequence[Message]) -> str:
    return messages[0].content if messages and messages[0].role == "system" else ""


# --- raw prompts ---


class RawMatch(Struct, frozen=True):
    """Position of a raw prompt: the turn that it continues, and the rest."""

    root: str
    """Digest of the model for raw prompts."""
    parent: Turn | None
    """Turn that the prompt continues; None for a new root."""
    rest: str | tuple[int, ...]
    """Text or ids after that turn."""


def find_raw_parent(tree: TurnTree, tokenizer: ChatTokenizer, prompt: str | tuple[int, ...]) -> RawMatch:
    root = hashlib.blake2b(f"{RAW}/{tokenizer.root_key(())}".encode(), digest_size=16).hexdigest()
    turns = [t for t in tree.turns if t.root == root and t.status is TurnStatus.COMMITTED]
    turns.sort(key=lambda turn: tree.length(turn.id), reverse=True)
    for turn in turns:
        turn_prompt = tree.ids(turn.id) if isinstance(prompt, tuple) else _raw_text(tree, tokenizer, turn)
        if len(turn_prompt) < len(prompt) and prompt[: len(turn_prompt)] == turn_prompt:
            rest = prompt[len(turn_prompt) :]
            if isinstance(rest, tuple) or _spells_the_end(tokenizer, turn, rest):
                return RawMatch(root, turn, rest)
    return RawMatch(root, None, prompt)


def _spells_the_end(tokenizer: ChatTokenizer, turn: Turn, rest: str) -> bool:
    """Returns whether a prompt continues after the turn's end token.

    Clients do not see the end token. A prompt without it continues another text.
    """
    last = turn.token_ids[-1:]
    return not last or last[0] not in tokenizer.stop_ids or rest.startswith(tokenizer.decode(last))


def render_raw(tokenizer: ChatTokenizer, match: RawMatch) -> tuple[str, tuple[int, ...]]:
    """Returns the new part as text and as ids."""
    if isinstance(match.rest, str):
        ids = tuple(tokenizer.encode_raw(match.rest))
        # The end token in the prompt is the sampled one.
        last = match.parent.token_ids[-1:] if match.parent else ()
        spelled = bool(last) and last[0] in tokenizer.stop_ids and ids[:1] == last
        return match.rest, ids[1:] if spelled else ids
    return tokenizer.decode(match.rest), match.rest


def build_raw_prompt(tree: TurnTree, match: RawMatch, text: str, delta: tuple[int, ...]) -> Prompt:
    prompt_ids = tree.ids(match.parent.id, delta) if match.parent else delta
    return Prompt(
        root=match.root,
        parent=match.parent.id if match.parent else None,
        delta_ids=delta,
        prompt_ids=prompt_ids,
        new=(Message(role="user", content=text),),
        request_digest=hashlib.blake2b(
            array("q", prompt_ids).tobytes(), digest_size=16, key=RAW.encode()
        ).hexdigest(),
        tools_digest="",
        tier=RAW,
    )


def _raw_text(tree: TurnTree, tokenizer: ChatTokenizer, turn: Turn) -> str:
    path = tree.path(turn.id)
    return "".join(t.messages[0].content + _text_of(tokenizer, t.token_ids) for t in path)


@lru_cache(maxsize=4096)
def _text_of(tokenizer: ChatTokenizer, ids: tuple[int, ...]) -> str:
    """Returns the whole text of a reply, including text after a stop string."""
    parser = tokenizer.plain_parser()
    parser.feed(ids)
    parser.finish()
    return parser.reply.content


def digest_of(tools: Sequence[Tool]) -> str:
    if not tools:
        return ""
    body = json.dumps([tool.raw for tool in tools], sort_keys=True)
    return hashlib.blake2b(body.encode(), digest_size=8).hexdigest()


INLINE_CHARACTERS = 8_000
"""Characters that are rendered on the event loop; more are rendered in a thread."""
P = ParamSpec("P")
R = TypeVar("R")


async def build_limited_prompt(
    session: Session, tokenizer: ChatTokenizer, request: ModelRequest, max_context: int
) -> Prompt:
    """Finds the parent and renders the prompt. `max_context` is the engine's context length in tokens."""
    tree = session.tree
    try:
        if request.prompt is not None:
            raw = find_raw_parent(tree, tokenizer, request.prompt)
            if isinstance(raw.rest, str):
                _check_size(_context(session, max_context), tokenizer, len(raw.rest))
            text, delta = await off_loop(len(raw.rest), render_raw, tokenizer, raw)
            return build_raw_prompt(tree, raw, text, delta)
        if request.after is not None:
            request = _with_history(session, request)
        missed = frozenset(session.undelivered)
        repeatable = missed | session.maybe_undelivered | session.keyed(request.idempotency_key)
        context = MatchContext(
            cache=session.conversation_cache, missed=missed, again=repeatable, thread_of=session.thread_of
        )
        match = find_parent(tree, tokenizer, request, context)
        size = sum(map(_size, match.new if match.parent else match.messages))
        if not match.parent:
            size += sum(len(msgspec.json.encode(tool.raw)) for tool in request.tools)
        _check_size(_context(session, max_context), tokenizer, size)
        rendered = await off_loop(size, render, tokenizer, match, request.tools)
        return build_prompt(tree, match, rendered, request)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the chat template refuses these messages: {error}") from error


def token_limit(session: Session, request: ModelRequest, prompt: Prompt, max_context: int) -> int:
    """Returns the token limit of a call from context, session and request."""
    spec = session.row.spec
    context = _context(session, max_context)
    room = context - len(prompt.prompt_ids)
    if room < 1:
        raise context_exceeded(len(prompt.prompt_ids), context)
    bounds = (room, request.max_tokens, spec.sampling.max_tokens)
    return min(bound for bound in bounds if bound is not None)


async def off_loop(size: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Runs work in a thread if its size exceeds `INLINE_CHARACTERS`."""
    return (
        await asyncio.to_thread(work, *args, **kwargs) if size > INLINE_CHARACTERS else work(*args, **kwargs)
    )


def _with_history(session: Session, request: ModelRequest) -> ModelRequest:
    """Prepends the stored conversation of the previous response."""
    after = request.after
    turn = session.tree[after] if after is not None and after in session.tree else None
    if turn is None or turn.status is not TurnStatus.COMMITTED or after in session.row.deleted_responses:
        name = f"previous response of turn {after!r}"
        raise ApiError(400, "previous_response_not_found", f"{name} is not one of this session")
    history = [m for step in session.tree.path(turn.id) for m in step.messages]
    new = request.messages
    if new and new[0].role == "system":  # instructions are not inherited
        history = [m for m in history[:1] if m.role != "system"] + history[1:]
        return structs.replace(request, messages=(new[0], *history, *new[1:]), hints=request.hints | {after})
    return structs.replace(request, messages=(*history, *new), hints=request.hints | {turn.id})


def _context(session: Session, max_context: int) -> int:
    return min(max_context, session.row.spec.budget.context or max_context)


def _check_size(context: int, tokenizer: ChatTokenizer, characters: int) -> None:
    """Raises an error for text that cannot fit, without tokenising it."""
    at_least = characters // tokenizer.longest_token
    if at_least > context:
        raise context_exceeded(at_least, context)


def _size(message: Message) -> int:
    return len(message.content) + len(message.reasoning) + sum(len(c.arguments) for c in message.tool_calls)
