"""Encodes log-probabilities: token text, bytes and top alternatives.

The sampled token always has the recorded value, among the alternatives too. A token that is part of a
character has its own bytes and the replacement character as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from afield.chat import ChatTokenizer
from afield.gateway.api_error import bad_request
from afield.gateway.dialects.base import ResponseOptions
from afield.interfaces.engine import TopLogprobs

MOST = 20
Json = dict[str, Any]
encode = msgspec.json.Encoder().encode
# Encoded parts of each token's entry, with texts and with ids.
ENCODED: WeakKeyDictionary[ChatTokenizer, tuple[dict[int, tuple[bytes, bytes]], ...]] = WeakKeyDictionary()


def check_count(count: int | None, name: str, maximum: int = MOST) -> int:
    if count is not None and not 0 <= count <= maximum:
        raise bad_request(f"{name}={count} must be between 0 and {maximum}", parameter=name)
    return count or 0


class TokenText:
    """Writes tokens as text or ids."""

    def __init__(self, tokenizer: ChatTokenizer, options: ResponseOptions) -> None:
        self._tokenizer = tokenizer
        self._as_ids = options.tokens_as_ids
        self._encoded = ENCODED.setdefault(tokenizer, ({}, {}))[self._as_ids]

    def text(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.piece(token).decode(errors="replace")

    def entries(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        tops: Sequence[TopLogprobs] = (),
        count: int = MOST,
    ) -> list[msgspec.Raw]:
        """Encodes tokens with at most `count` top alternatives each, for Chat and Responses."""
        entries: list[msgspec.Raw] = []
        for token, logprob, top in zip(ids, logprobs, tops or repeat(()), strict=False):
            alternatives = b""
            if count and top:
                pairs = recorded(top[:count], token, logprob)
                alternatives = b",".join([self._entry(*pair) + b"}" for pair in pairs])
            entry = self._entry(token, logprob) + b',"top_logprobs":[' + alternatives + b"]}"
            entries.append(msgspec.Raw(entry))
        return entries

    def _entry(self, token: int, logprob: float) -> bytes:
        around = self._encoded.get(token)
        if around is None:
            around = self._encoded[token] = self._around(token)
        return around[0] + encode(logprob) + around[1]

    def _around(self, token: int) -> tuple[bytes, bytes]:
        """Encodes an entry's parts before and after the log-probability, without its end."""
        piece = self._tokenizer.piece(token)
        return b'{"token":' + encode(self.text(token)) + b',"logprob":', b',"bytes":' + encode(list(piece))

    def prompt(self, scored: Sequence[TopLogprobs]) -> list[Json | None]:
        """Encodes prompt log-probabilities as vLLM does: by token id, None for the first token."""
        return [self._ranked(top) if top else None for top in scored]

    def _ranked(self, top: TopLogprobs) -> Json:
        """Encodes one prompt token; ranks count the requested top tokens only."""
        ordered = sorted(top, key=lambda pair: -pair[1])
        ranks = {token: rank for rank, (token, _) in enumerate(ordered, 1)}
        if ranks[top[0][0]] == len(top) > 1:
            del ranks[top[0][0]]
        return {
            str(token): {
                "logprob": logprob,
                "rank": ranks.get(token) if len(top) > 1 else None,
                "decoded_token": self._tokenizer.piece(token).decode(errors="replace"),
            }
            for token, logprob in top
        }


def recorded(top: TopLogprobs, token: int, logprob: float) -> TopLogprobs:
    """Returns the top tokens with the recorded value for the sampled one."""
    return tuple((other, logprob if other == token else p) for other, p in top)
