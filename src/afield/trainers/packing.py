"""Token sequences to one forest, in which everything they have in common stands once.

Sequences that begin alike share those tokens, whoever they come from: a group's prompt, the history of
a branch, what sub-agents were told. Tokens stand in depth-first order, so what descends from a token
follows it directly: token `kv` is seen by token `q` exactly if `kv <= q < end[kv]`. A forest too large for
memory is split between sequences; what its parts share is then computed once in each.
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


class Packed(NamedTuple):
    """`ids`, `depth` and `end` have one entry per token; `paths` are the tokens of each sequence given."""

    ids: list[int]
    depth: list[int]
    end: list[int]
    segments: list[Segment]
    paths: list[list[int]]


def pack(sequences: Sequence[Ids]) -> Packed:
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
    return Packed(ids, depth, end, segments, paths)


def split(sequences: Sequence[Ids], max_tokens: int) -> list[list[int]]:
    """Which sequences to pack together so that no forest has more than `max_tokens`, unless one alone has."""
    parts: list[list[int]] = []
    used = 0
    previous: tuple[int, ...] = ()
    for number, sequence in _sorted(sequences):
        fresh = len(sequence) - common(previous, sequence)
        if not parts or used + fresh > max_tokens:
            parts.append([])
            used, fresh = 0, len(sequence)
        parts[-1].append(number)
        used += fresh
        previous = sequence
    return parts


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
