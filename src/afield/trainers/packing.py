"""Packs token sequences into a prefix tree with shared prefixes stored once.

Sequences share prefixes of any origin: a group's prompt, the history of a branch, instructions of
sub-agents. Tokens are in depth-first order, so the descendants of a token follow it directly: token `q`
attends to token `kv` exactly if `kv <= q < end[kv]`. A tree too large for memory is split between
sequences, where they share least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Ids = Sequence[int]


class Segment(NamedTuple):
    """Tokens that one sequence adds to the tree."""

    start: int
    """Index of its first token."""
    end: int
    """Index behind its last token."""
    path: tuple[tuple[int, int], ...]
    """Token ranges of its ancestors, from the root."""


class PackedTokens(NamedTuple):
    """A packed prefix tree, with one entry per token in `ids`, `depth` and `end`."""

    ids: list[int]
    """Token ids, in depth-first order."""
    depth: list[int]
    """Position of the token in its sequence."""
    end: list[int]
    """First index behind the token's descendants."""
    segments: list[Segment]
    """Tokens that each sequence adds; sequences that add none have no segment."""
    paths: list[list[int]]
    """Token indices of each sequence, in the order of the input."""


def pack(sequences: Sequence[Ids]) -> PackedTokens:
    """Pack sequences into one tree."""
    ids: list[int] = []
    depth: list[int] = []
    end: list[int] = []
    segments: list[Segment] = []
    paths: list[list[int]] = [[] for _ in sequences]
    path: list[int] = []  # token indices of the previous sequence
    previous: tuple[int, ...] = ()
    for number, sequence in _sorted(sequences):
        shared = common(previous, sequence)
        for token in path[shared:]:
            end[token] = len(ids)
        fresh = range(len(ids), len(ids) + len(sequence) - shared)
        path = [*path[:shared], *fresh]
        paths[number] = path
        if fresh:
            segments.append(Segment(fresh.start, fresh.stop, ranges(path[:shared])))
        ids.extend(sequence[shared:])
        depth.extend(range(shared, len(sequence)))
        end.extend([0] * len(fresh))
        previous = sequence
    for token in path:
        end[token] = len(ids)
    return PackedTokens(ids, depth, end, segments, paths)


def split(sequences: Sequence[Ids], max_tokens: int) -> list[list[int]]:
    """Indices of the sequences of each tree. Trees have at most `max_tokens`, unless one sequence has more.

    Minimises the number of trees, then the tokens computed twice, then the differences in size.
    """
    ordered = _sorted(sequences)
    whole = [len(sequence) for _, sequence in ordered]
    befores = [(), *(sequence for _, sequence in ordered)]
    fresh = [len(s) - common(before, s) for before, (_, s) in zip(befores, ordered, strict=False)]
    if sum(fresh) <= max_tokens:
        return [[number for number, _ in ordered]] if ordered else []
    # For the first n sequences: trees, tokens, squares of sizes; and where the last tree begins.
    best, begins = [(0, 0, 0)], [0]
    for end in range(1, len(ordered) + 1):
        options: list[tuple[tuple[int, int, int], int]] = []
        after = 0
        for start in range(end - 1, -1, -1):
            size = whole[start] + after  # grows with every sequence
            if options and size > max_tokens:
                break
            trees, tokens, squares = best[start]
            options.append(((trees + 1, tokens + size, squares + size * size), start))
            after += fresh[start]
        cost, begin = min(options)
        best.append(cost)
        begins.append(begin)
    parts: list[list[int]] = []
    end = len(ordered)
    while end:
        parts.append([number for number, _ in ordered[begins[end] : end]])
        end = begins[end]
    return parts[::-1]


def _sorted(sequences: Sequence[Ids]) -> list[tuple[int, tuple[int, ...]]]:
    """Sequences with their indices, sorted by tokens: the depth-first order of the tree."""
    return sorted(enumerate(map(tuple, sequences)), key=lambda item: item[1])


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def ranges(tokens: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ascending numbers as half-open ranges."""
    result: list[tuple[int, int]] = []
    begin = 0
    while begin < len(tokens):
        # Numbers ascend, so a run without gaps is found by bisection.
        low, high = begin, len(tokens) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if tokens[middle] - tokens[begin] == middle - begin:
                low = middle
            else:
                high = middle - 1
        result.append((tokens[begin], tokens[low] + 1))
        begin = low + 1
    return tuple(result)
