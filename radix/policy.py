"""Which unlocked leaf goes first.

A policy is one function, from a node to a key; the leaf with the lowest key is evicted first. Only leaves that are
unlocked have a place in the order, so a key may depend on anything that changes while a node is locked or hit, and on
nothing else: the cache re-sorts a leaf when it locks, unlocks, or inserts through it.
"""

from __future__ import annotations

from typing import Any, Protocol

from sortedcontainers import SortedList

from phloem.radix.errors import UnknownPolicy
from phloem.radix.node import Node


class EvictionPolicy(Protocol):
    """An order of eviction. `key` must be cheap, pure, and comparable among all nodes."""

    @property
    def name(self) -> str:
        """What users call it, and what stats show."""
        ...

    def key(self, node: Node) -> Any:
        """The lower, the earlier evicted."""
        ...


class LRU:
    """Least recently used first: the one whose last lock, unlock or insert is longest ago."""

    name = "lru"

    def key(self, node: Node) -> int:
        """The tick of last use."""
        return node.last_used


class LFU:
    """Least frequently hit first, then least recently used. Resists scans: what was never hit goes first."""

    name = "lfu"

    def key(self, node: Node) -> tuple[int, int]:
        """Admissions that hit the node, then the tick of last use."""
        return (node.hit_count, node.last_used)


class FIFO:
    """First in, first out: the one whose content came first."""

    name = "fifo"

    def key(self, node: Node) -> int:
        """The tick at which the content came in."""
        return node.created


class Priority:
    """Lowest priority first, then least recently used."""

    name = "priority"

    def key(self, node: Node) -> tuple[int, int]:
        """The priority given by inserts and admissions, then the tick of last use."""
        return (node.priority, node.last_used)


def policy_named(name: str) -> EvictionPolicy:
    """A new policy of the given name.

    >>> policy_named("lfu").name
    'lfu'

    Raises:
        UnknownPolicy: There is none; the message lists those there are.
    """
    policies: tuple[EvictionPolicy, ...] = (LRU(), LFU(), FIFO(), Priority())
    for policy in policies:
        if policy.name == name:
            return policy
    known = ", ".join(policy.name for policy in policies)
    raise UnknownPolicy(f"no eviction policy is called {name!r}; there are {known}")


class EvictionOrder:
    """The eviction candidates, lowest key first. Owned by one `RadixCache`.

    A candidate keeps its entry in `Node.rank`, so that it can be found again after its key has moved on. Entries are
    told apart by `created`: nodes that share it come from splits of one node, hence lie on one path, and only the
    lowest node of a path is a leaf.
    """

    __slots__ = ("_ranks", "policy")

    def __init__(self, policy: EvictionPolicy) -> None:
        """No candidates."""
        self.policy = policy
        self._ranks = SortedList()

    def __len__(self) -> int:
        return len(self._ranks)

    def add(self, node: Node) -> None:
        """Enters a node that is not in. O(log n)."""
        rank = (self.policy.key(node), node.created, node)
        node.rank = rank
        self._ranks.add(rank)

    def discard(self, node: Node) -> None:
        """Removes a node, if it is in. O(log n)."""
        if node.rank is not None:
            self._ranks.remove(node.rank)
            node.rank = None

    def first(self) -> Node:
        """The node to evict from next. O(1).

        Raises:
            IndexError: There is no candidate.
        """
        node: Node = self._ranks[0][2]
        return node

    def ranks(self) -> list[tuple[Any, int, Node]]:
        """All entries in order, for checks. O(n)."""
        return list(self._ranks)
