"""The partly filled last blocks of finished paths, kept for prompts that begin with the same tokens.

The tree holds whole blocks only, so without this a repeated prompt would compute its last, partial block again: up to
`block_size - 1` tokens of each. A tail's KV depends on all that comes before it, so it is filed under the last whole block of its path, by
that block's id and *life* (which changes whenever the block leaves the tree): when that is gone, nobody finds the tail any more.
Tails are the first thing to go when memory is short, the one used longest ago first.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeAlias

from phloem.radix import Namespace
from phloem.radix.packing import common_tokens

Place: TypeAlias = "tuple[Namespace, int | None, int]"
"""Where a tail continues: the namespace, the last whole block of the path (None at its beginning), and that block's life."""


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """The KV of some tokens that follow a place, in the first rows of a private block."""

    place: Place
    tokens: array[int]
    block: int


class TailStore:
    """Owner of the blocks of kept tails, until they are handed back by `keep`, `pop_oldest` and `clear`."""

    def __init__(self, max_tails: int) -> None:
        self.max_tails = max_tails
        self.num_dropped = 0
        """Tails that had to make room."""

        self._by_place: dict[Place, list[Tail]] = {}
        """At each place in the order of their packed tokens, so that those which begin alike are neighbours. None begins
        with another."""
        self._by_age: OrderedDict[Tail, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_age)

    def keep(self, tail: Tail) -> list[int]:
        """File a tail. Return blocks that are not needed for it: of a tail that it makes superfluous, or its own. O(log tails)."""
        for other, common in self._neighbours(tail.place, tail.tokens):
            if common == len(tail.tokens):
                self._by_age.move_to_end(other)
                return [tail.block]
            if common == len(other.tokens):
                self._remove(other)
                self._add(tail)
                return [other.block]
        self._add(tail)
        return [self.pop_oldest()] if len(self) > self.max_tails else []

    def find(self, place: Place, tokens: array[int]) -> tuple[Tail, int] | None:
        """Return the tail that shares most leading tokens with `tokens`, and how many; None when none shares any. Changes nothing.

        O(log tails).
        """
        found = max(self._neighbours(place, tokens), key=lambda neighbour: neighbour[1], default=None)
        return found if found is not None and found[1] else None

    def touch(self, tail: Tail) -> None:
        """Count a tail as used now, if it is still kept."""
        if tail in self._by_age:
            self._by_age.move_to_end(tail)

    def pop_oldest(self) -> int:
        """Forget the tail that was used longest ago, and return its block."""
        tail = next(iter(self._by_age))
        self._remove(tail)
        self.num_dropped += 1
        return tail.block

    def clear(self) -> list[int]:
        """Forget all tails, and return their blocks."""
        blocks = [tail.block for tail in self._by_age]
        self._by_age.clear()
        self._by_place.clear()
        return blocks

    def _add(self, tail: Tail) -> None:
        self._by_age[tail] = None
        insort(self._by_place.setdefault(tail.place, []), tail, key=_packed)

    def _remove(self, tail: Tail) -> None:
        del self._by_age[tail]
        siblings = self._by_place[tail.place]
        del siblings[bisect_left(siblings, _packed(tail), key=_packed)]
        if not siblings:
            del self._by_place[tail.place]

    def _neighbours(self, place: Place, tokens: array[int]) -> list[tuple[Tail, int]]:
        """The one or two tails between which `tokens` would be sorted in, and how many leading tokens they share."""
        tails = self._by_place.get(place)
        if tails is None:
            return []
        packed = tokens.tobytes()
        index = bisect_left(tails, packed, key=_packed)
        near = tails[max(index - 1, 0) : index + 1]
        return [(tail, common_tokens(_packed(tail), packed)) for tail in near]


def _packed(tail: Tail) -> bytes:
    return tail.tokens.tobytes()
