"""Token sequences to one forest, in which everything they have in common stands once.

Sequences that begin alike share those tokens, whoever they come from: a group's prompt, the history of
a branch, what sub-agents were told. Tokens stand in depth-first order, so what descends from a token
follows it directly: token `kv` is seen by token `q` exactly if `kv <= q < end[kv]`. A forest too large for
memory is split between sequences, where they share least; that is then computed once in each part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Ids = Sequence[int]


class Segment(NamedTuple):
    """What one sequence adds: tokens [start, end), after those of `path`, which are ranges from a root on."""

    start: int
    end: int
    path: tuple[tuple[int, int], ...]


class PackedTokens(NamedTuple):
    """`ids`, `depth` and `end` have one entry per token; `paths` are the tokens of each sequence given."""

    ids: list[int]
    depth: list[int]
    end: list[int]
    segments: list[Segment]
    paths: list[list[int]]


def pack(sequences: Sequence[Ids]) -> PackedTokens:
    ids: list[int] = []
    depth: list[int] = []
    end: list[int] = []
    segments: list[Segment] = []
    paths: list[list[int]] = [[] for _ in sequences]
    path: list[int] = []  # the tokens of the sequence before
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
    """Which sequences to pack together so that no forest has more than `max_tokens`, unless one alone has.

    They are as few as that takes, computing as little as possible twice; then, as even as possible.
    """
    ordered = _sorted(sequences)
    whole = [len(sequence) for _, sequence in ordered]
    befores = [(), *(sequence for _, sequence in ordered)]
    fresh = [len(s) - common(before, s) for before, (_, s) in zip(befores, ordered, strict=False)]
    if sum(fresh) <= max_tokens:
        return [[number for number, _ in ordered]] if ordered else []
    # Of the first so many sequences: forests, tokens, squares of their sizes; and where the last one begins.
    best, begins = [(0, 0, 0)], [0]
    for end in range(1, len(ordered) + 1):
        found: list[tuple[tuple[int, int, int], int]] = []
        after = 0
        for start in range(end - 1, -1, -1):
            size = whole[start] + after  # grows with every sequence more
            if found and size > max_tokens:
                break
            forests, tokens, squares = best[start]
            found.append(((forests + 1, tokens + size, squares + size * size), start))
            after += fresh[start]
        least, begin = min(found)
        best.append(least)
        begins.append(begin)
    parts: list[list[int]] = []
    end = len(ordered)
    while end:
        parts.append([number for number, _ in ordered[begins[end] : end]])
        end = begins[end]
    return parts[::-1]


def _sorted(sequences: Sequence[Ids]) -> list[tuple[int, tuple[int, ...]]]:
    """In the order of their tokens: depth first, each next to those it has most in common with."""
    return sorted(enumerate(map(tuple, sequences)), key=lambda item: item[1])


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many tokens two sequences have in common from the start."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def ranges(tokens: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ascending numbers as ranges."""
    found: list[tuple[int, int]] = []
    begin = 0
    while begin < len(tokens):
        # From one token on numbers only grow, so a run without gaps is found by halving.
        low, high = begin, len(tokens) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if tokens[middle] - tokens[begin] == middle - begin:
                low = middle
            else:
                high = middle - 1
        found.append((tokens[begin], tokens[low] + 1))
        begin = low + 1
    return tuple(found)
