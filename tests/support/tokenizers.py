"""Chat tokenizers of test models, loaded once per process."""

from __future__ import annotations

import functools
from pathlib import Path

from afield.chat import ChatTokenizer
from support.paths import ROOT

POLICY = ROOT / "src" / "afield" / "demo" / "policy"


@functools.cache
def load_tokenizer(model: Path = POLICY) -> ChatTokenizer:
    """Tokenizer of a model directory whose files no longer change."""
    return ChatTokenizer.load(model)


def encode_text(tokens: ChatTokenizer, text: str) -> list[int]:
    """Token ids of plain text; control tokens in it follow the `escape` policy."""
    return tokens._vocab.encode(tokens._escape(text))
