"""Token masks of constraints (structured outputs), compiled by xgrammar.

The torch engine samples, and the trainer computes log-probabilities, under the same masks. vLLM and SGLang
compile the same grammar with the same library. A mask is a row of 32-bit words, one bit per token.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from afield.errors import UsageError
from afield.types import Constraint

if TYPE_CHECKING:
    import xgrammar

CACHE_BYTES = 512 << 20  # size of the cache of compiled grammars
INSTALL = "pip install 'afield[structured]'"


class ConstraintMatcher:
    """Masks along one reply: read `mask`, sample a token, `accept` it."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, words: int) -> None:
        self._matcher = matcher
        self._words = words

    @property
    def mask(self) -> Tensor:
        """Mask of the next token, as 32-bit words; all zero once the reply has ended."""
        words = torch.zeros(1, self._words, dtype=torch.int32)
        if not self._matcher.is_terminated():
            words.fill_(-1)
            self._matcher.fill_next_token_bitmask(words)
        return words[0]

    def accept(self, token: int) -> bool:
        """Advance by a token; False if the constraint does not allow it."""
        return not self._matcher.is_terminated() and self._matcher.accept_token(token)


class ConstraintMasks:
    """Compiler of constraints for one model, with a cache. Thread-safe.

    Loads xgrammar and the tokenizer with the first constraint.
    """

    def __init__(self, model: str | Path, vocabulary: int) -> None:
        """Create a compiler for a model directory; `vocabulary` is the number of logits of the model."""
        self.path, self.vocabulary = Path(model), vocabulary
        self._words = -(-vocabulary // 32)
        self._lock = threading.Lock()
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._kept: dict[str, xgrammar.CompiledGrammar] = {}  # least recently used first

    @cached_property
    def missing(self) -> str:
        """Missing requirement and its remedy; empty if constraints can be compiled."""
        if find_spec("xgrammar") is None:
            return f"constraints need xgrammar; {INSTALL}"
        if not any((self.path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            return f"constraints need the model's tokenizer, which {self.path} does not have"
        return ""

    def _loaded(self) -> xgrammar.GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                self._compiler = self._load()
            return self._compiler

    def _load(self) -> xgrammar.GrammarCompiler:
        if self.missing:
            raise UsageError(self.missing)
        import xgrammar
        from transformers import AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(self.path)
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.path} has no tokenizer that transformers loads: {error}") from error
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=self.vocabulary)
        threads = min(4, os.cpu_count() or 1)
        # xgrammar's own cache confuses grammars that differ only in token ids (0.2.8).
        return xgrammar.GrammarCompiler(info, max_threads=threads, cache_enabled=False)

    def _compiled(self, grammar: str) -> xgrammar.CompiledGrammar:
        compiler = self._loaded()
        with self._lock:
            if (cached := self._kept.pop(grammar, None)) is not None:
                self._kept[grammar] = cached
                return cached
        try:
            compiled = compiler.compile_structural_tag(grammar)
        except (RuntimeError, ValueError, TypeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(f"the constraint cannot be compiled: {reason}") from error
        with self._lock:
            self._kept[grammar] = compiled
            while len(self._kept) > 1 and self._size() > CACHE_BYTES:
                del self._kept[next(iter(self._kept))]
        return compiled

    def _size(self) -> int:
        return sum(compiled.memory_size_bytes for compiled in self._kept.values())

    def walk(self, constraint: Constraint) -> ConstraintMatcher:
        """Matcher at the beginning of a reply; raises ValueError if the grammar does not compile."""
        compiled = self._compiled(constraint.grammar)
        import xgrammar

        stops = list(constraint.stop_ids) or None
        return ConstraintMatcher(xgrammar.GrammarMatcher(compiled, override_stop_tokens=stops), self._words)

    def along(self, constraint: Constraint, ids: Sequence[int]) -> Tensor:
        """Masks `[ids, words]` under which a reply was sampled; raises ValueError for a forbidden id."""
        walker = self.walk(constraint)
        masks: list[Tensor] = []
        for position, token in enumerate(ids):
            masks.append(walker.mask)
            if not walker.accept(token):
                raise ValueError(
                    f"the constraint does not allow token {token} at position {position} of the reply"
                )
        return torch.stack(masks) if masks else torch.zeros(0, self._words, dtype=torch.int32)
