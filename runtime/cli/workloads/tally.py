"""Counting tokens that token paths have in common, by a trie."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from phloem.radix.bench.alternatives import TokenTrie


def num_distinct(paths: Iterable[Sequence[int]]) -> int:
    """Return the size of the tree that token paths make, in tokens."""
    places: dict[tuple[int, int], int] = {}
    for path in paths:
        place = 0
        for token in path:
            place = places.setdefault((place, token), len(places) + 1)
    return len(places)


def exact_hits(paths: Iterable[tuple[Sequence[int], Sequence[int]]]) -> list[int]:
    """Return how many tokens of each prompt an exact cache without limits would have.

    Args:
        paths: (prompt, output), each after those that its prompt builds on.
    """
    known, hits = TokenTrie(), []
    for prompt, output in paths:
        packed = array("i", prompt).tobytes()
        # The last token of a prompt must run to give logits; that of an output never ran.
        hits.append(min(known.match(packed), len(prompt) - 1))
        known.insert(packed + array("i", output[:-1]).tobytes())
    return hits
