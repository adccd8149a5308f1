"""Tokenizer vocabulary: text to token ids and back, from `tokenizer.json`.

1. Escaped text never encodes to a control token; see `escape`.
2. Each id has fixed bytes, so that decoding a stream costs the same for every id.
3. Control tokens are the added tokens, special or not (`<tool_call>` is not special). They match literally,
   never in normalised text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from tokenizers import Tokenizer

from afield.chat.escape import BREAK
from afield.errors import UsageError, boundary
from afield.types import Failure, FailureKind, Reason

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """Vocabulary of one `tokenizer.json`; `control` maps the texts of control tokens to ids."""

    def __init__(self, data: bytes, path: Path) -> None:
        """Read `data`, the content of the file at `path`; raises UsageError if it is not a tokenizer."""
        document = _document(data, path)
        self._tokenizer = _tokenizer(document, data, path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.hash = hashlib.sha256(data).hexdigest()
        self.size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added: dict[int, str] = {n: token.content for n, token in added.items()}
        self.longest = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)
        self.special_ids = frozenset(n for n, token in added.items() if token.special)
        # Some tokenizers list runs of blanks as added tokens; those are ordinary text.
        self.control = {text: n for n, text in self._added.items() if text.strip()}
        kinds = set(_decoder_kinds(document.get("decoder")))
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._context = self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._pieces: dict[int, bytes] = {}
        self._segments = Segments(self._tokenizer, added)

    def id_of(self, token: str) -> int | None:
        """Id of a token; None if the vocabulary lacks it."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Token ids of text; control literals that are not escaped become control tokens."""
        ids: list[int] = []
        for piece in text.split(BREAK):
            if piece:
                self._segments.encode(piece, ids)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, with control tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def piece(self, id: int) -> bytes:
        """Bytes of an id in the middle of a text; empty for an unknown id."""
        piece = self._pieces.get(id)
        if piece is None:
            piece = self._pieces[id] = self._spell(id)
        return piece

    def _spell(self, id: int) -> bytes:
        if (added := self._added.get(id)) is not None:
            return added.encode()
        token = self._tokenizer.id_to_token(id)
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes(_BYTES[char] for char in token)
            except KeyError:
                return token.encode()
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte.group(1), 16)])
        before = self.decode(self._context)
        return self.decode([*self._context, id]).removeprefix(before).encode()


def _document(data: bytes, path: Path) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}; save or download it again") from error
    if not isinstance(document, dict):
        raise UsageError(
            f"{path} is not a tokenizer: it holds a {type(document).__name__} instead of an object; save or"
            " download it again"
        )
    return document


def _tokenizer(document: dict[str, Any], data: bytes, path: Path) -> Tokenizer:
    # Matching on normalised text would let escaped content become a control token.
    disguised = [
        token
        for token in document.get("added_tokens", [])
        if token.get("normalized") and token.get("content", "").strip()
    ]
    for token in disguised:
        token["normalized"] = False
    text = json.dumps(document) if disguised else data.decode()
    failures: list[Failure] = []
    tokenizers: list[Tokenizer] = []
    # The library raises plain Exception.
    with boundary(FailureKind.INFRASTRUCTURE, Reason.LAUNCH, failures.append):
        tokenizers.append(Tokenizer.from_str(text))
    if failures:
        raise UsageError(
            f"cannot read the tokenizer {path}: {failures[0].message}; save or download it again"
        )
    return tokenizers[0]


def _decoder_kinds(decoder: Any) -> Iterable[str]:
    if decoder:
        yield decoder["type"]
        for inner in decoder.get("decoders", []):
            yield from _decoder_kinds(inner)


def _byte_alphabet() -> dict[str, int]:
    """Bytes by their character in byte-level BPE: the byte itself if printable, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_alphabet()


# --- segments --------------------------------------------------------------------------------------

REMEMBERED = 4 * 1024 * 1024  # cache size in characters
OVERHEAD = 64  # overhead of a cache entry, in characters
LONG = 256 * 1024  # segments with more characters are not cached
_TRIALS = ("word", " word", "\nword", "word ", "  two  words\n", "Ä", "\n\n", "1234")


class Segments:
    """Encodes text between added tokens separately, with a cache.

    Falls back to encoding in one piece for tokenizers where that gives other ids.
    """

    def __init__(self, tokenizer: Tokenizer, added: Mapping[int, Any]) -> None:
        self._tokenizer = tokenizer
        self._ids = {token.content: n for n, token in added.items()}
        literals = sorted(self._ids, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, literals))})") if literals else None
        self._known: OrderedDict[str, list[int]] = OrderedDict()
        self._held = 0
        self._lock = Lock()
        greedy = any(token.lstrip or token.rstrip or token.single_word for token in added.values())
        if greedy or (self._cut and not self._agrees(literals)):
            self._cut = None

    def encode(self, text: str, into: list[int]) -> None:
        """Append the token ids of `text` to `into`."""
        if self._cut is None:
            into.extend(self._whole(text))
            return
        for n, part in enumerate(self._cut.split(text)):
            if n % 2:
                into.append(self._ids[part])
            elif part:
                into.extend(self._stretch(part))

    def _whole(self, text: str) -> list[int]:
        try:
            # The fast variant computes no character offsets.
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except BaseException as error:
            # The library panics on very long texts; its PanicException is not an Exception.
            if type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"the tokenizer cannot take a text of {len(text)} characters: {error}") from None

    def _stretch(self, text: str) -> list[int]:
        if len(text) > LONG:
            return self._whole(text)
        ids = self._known.get(text)
        if ids is None:
            ids = self._whole(text)
            with self._lock:
                self._remember(text, ids)
        return ids

    def _remember(self, text: str, ids: list[int]) -> None:
        if text not in self._known:
            self._known[text] = ids
            self._held += len(text) + OVERHEAD
        while self._held > REMEMBERED:
            gone, _ = self._known.popitem(last=False)
            self._held -= len(gone) + OVERHEAD

    def _agrees(self, literals: list[str]) -> bool:
        """Whether encoding by segments equals encoding in one piece, tried on added tokens and neighbours."""
        for n, literal in enumerate(literals[:64]):
            before, after = _TRIALS[n % len(_TRIALS)], _TRIALS[(n // 3) % len(_TRIALS)]
            for text in (f"{before}{literal}{after}", f"{literal}{literal}{before}", literal + after):
                cut: list[int] = []
                self.encode(text, cut)
                if cut != self._whole(text):
                    return False
        return True
