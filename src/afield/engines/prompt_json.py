"""Prompts as JSON, each written from where the one before it in its session ended.

A conversation's prompt is the last one and some ids more. `Call.base_ids` is that last prompt, the same
object; when it is the one that was written last, only the ids behind it are written. Old prompts are
dropped when they take too much room, and then written anew.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from afield.interfaces.engine import GenerateRequest

ROOM = 64 * 1024 * 1024  # bytes
SHORT = 1024  # ids of a prompt that are written faster than they are remembered
_encode = msgspec.json.Encoder().encode


class Encoded:
    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[tuple[int, ...], bytes]] = OrderedDict()
        self._held = 0

    def ids(self, call: GenerateRequest) -> msgspec.Raw:
        if len(call.prompt_ids) < SHORT:
            return msgspec.Raw(_encode(call.prompt_ids))
        ids, text = self._known.pop(call.session_id, ((), b""))
        self._held -= len(text)
        if ids and ids is call.base_ids:
            text = text[:-1] + b"," + _encode(call.prompt_ids[len(ids) :])[1:]
        else:
            text = _encode(call.prompt_ids)
        self._known[call.session_id] = (call.prompt_ids, text)
        self._held += len(text)
        while self._held > ROOM:
            _, (_, gone) = self._known.popitem(last=False)
            self._held -= len(gone)
        return msgspec.Raw(text)
