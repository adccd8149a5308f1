"""Which turn does a request extend, and with which ids?

The deepest turn on the same root whose conversation is a prefix of the request's messages becomes the
parent; what follows it is rendered as a delta (tier T2). A pattern the template is not certified for,
an assistant message nobody sampled, or no match at all gives a fresh root (T4): always right, at the
price of another row. A fresh root that leaves a known conversation carries a link to where it left.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence

from msgspec import Struct

from afield.forest import Forest, chain
from afield.tokens import ChatTokens, Tool
from afield.types import Link, Message, Turn

CALL_ID = re.compile(r"call_(t\d+)_\d+")


class Place(Struct, frozen=True, kw_only=True):
    """Where a request stands in the forest."""

    root: str
    parent: str | None
    delta_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    new: tuple[Message, ...]
    digest: str
    tools_digest: str
    tier: str
    links: tuple[Link, ...] = ()


def call_id(turn_id: str, index: int) -> str:
    """The id of a tool call: it names its turn, so that an echo of it does too."""
    return f"call_{turn_id}_{index}"


def hints(messages: Sequence[Message]) -> set[str]:
    ids = [call.id for message in messages for call in message.tool_calls]
    ids += [message.tool_call_id for message in messages]
    return {found[1] for i in ids if (found := CALL_ID.fullmatch(i))}


def place(
    forest: Forest,
    tokens: ChatTokens,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    missed: frozenset[str],
) -> Place:
    """`missed` are turns whose client never got their end: nothing continues one of them by chance."""
    root = tokens.root_key(tools)
    digests = chain(root, messages)
    match = forest.find(digests, hints(messages), missed)
    tools_digest = digest_of(tools)
    links: tuple[Link, ...] = ()
    if match is not None:
        depth, parent = match
        new = tuple(messages[depth:])
        delta = _delta(tokens, parent, new)
        if delta is not None:
            return Place(
                root=root,
                parent=parent.id,
                delta_ids=tuple(delta),
                prompt_ids=(*forest.ids(parent.id), *delta),
                new=new,
                digest=digests[-1],
                tools_digest=tools_digest,
                tier="T2",
            )
        edited = any(m.role == "assistant" for m in new)
        links = (Link("edit" if edited else "fork", parent.id),)
    ids = tuple(tokens.render(messages, tools))
    return Place(
        root=root,
        parent=None,
        delta_ids=ids,
        prompt_ids=ids,
        new=tuple(messages),
        digest=digests[-1],
        tools_digest=tools_digest,
        tier="T4",
        links=links,
    )


def digest_of(tools: Sequence[Tool]) -> str:
    if not tools:
        return ""
    body = json.dumps([tool.raw for tool in tools], sort_keys=True)
    return hashlib.blake2b(body.encode(), digest_size=8).hexdigest()


def _delta(tokens: ChatTokens, parent: Turn, new: tuple[Message, ...]) -> list[int] | None:
    if not new or any(message.role == "assistant" for message in new):
        return None
    truncated = not parent.token_ids or parent.token_ids[-1] not in tokens.stop_ids
    appended = tokens.append(new, truncated=truncated)
    return appended[1] if appended else None
