"""The slim nodes of the ghost's tree, and the order in which its leaves were remembered.

A `Node` has eighteen fields, most of them about blocks, locks and worth. The ghost has hundreds of thousands of nodes
and none of these, so its nodes have what a tree asks for (`TreeNode`), and two links. Their blocks are ``range`` objects
made when asked for: there is one for each, but they stand for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phloem.radix.namespace import Namespace

if TYPE_CHECKING:
    from sortedcontainers import SortedList


@dataclass(slots=True, eq=False, repr=False)
class GhostNode:
    """A run of blocks that were evicted; owned by the ghost's tree. See `TreeNode`."""

    edge: bytes  # narrow tokens (packing.py), as many bytes each as the tree's `token_bytes`
    start: int  # blocks from the root to its beginning
    end: int  # blocks from the root to its end
    label: str | None = None
    namespace: Namespace | None = None
    parent: GhostNode | None = None
    children: dict[bytes, GhostNode] | None = None
    order: SortedList | None = None
    older: GhostNode | None = None  # its neighbours in `LeafOrder`; None for what is not in it
    newer: GhostNode | None = None

    @property
    def blocks(self) -> range:
        """As many ints as blocks."""
        return range(self.end - self.start)

    @classmethod
    def root_of(cls, namespace: Namespace) -> GhostNode:
        """The empty node above what is remembered of a namespace."""
        return cls(b"", 0, 0, namespace=namespace)

    def split_off(self, count: int, num_bytes: int) -> GhostNode:
        """Moves its first `count` blocks to a new node, which is in no order. O(len(edge))."""
        upper = GhostNode(self.edge[:num_bytes], self.start, self.start + count, self.label)
        self.edge = self.edge[num_bytes:]
        self.start += count
        return upper

    def cut(self, count: int, num_bytes: int) -> range:
        """Drops its last `count` blocks. O(len(edge))."""
        self.edge = self.edge[:-num_bytes]
        self.end -= count
        return range(count)

    def __repr__(self) -> str:
        return f"<ghost [{self.start}, {self.end}) children={len(self.children or ())}>"


class LeafOrder:
    """The leaves, from the one remembered longest ago to the one remembered last: a ring of links. All O(1)."""

    __slots__ = ("_ends", "_num_leaves")

    def __init__(self) -> None:
        """No leaves."""
        self._ends = GhostNode(b"", 0, 0)  # older: the newest leaf; newer: the oldest
        self._ends.older = self._ends.newer = self._ends
        self._num_leaves = 0

    def __len__(self) -> int:
        return self._num_leaves

    def __iter__(self) -> Iterator[GhostNode]:
        """From the oldest to the newest."""
        node = self._ends.newer
        while node is not self._ends and node is not None:
            yield node
            node = node.newer

    def __reversed__(self) -> Iterator[GhostNode]:
        """From the newest to the oldest."""
        node = self._ends.older
        while node is not self._ends and node is not None:
            yield node
            node = node.older

    def oldest(self) -> GhostNode:
        """The leaf remembered longest ago; there must be one."""
        oldest = self._ends.newer
        assert oldest is not None
        assert oldest is not self._ends, "no leaf is left"
        return oldest

    def append(self, leaf: GhostNode) -> None:
        """Enters, as the newest, a node that is not in."""
        newest, ends = self._ends.older, self._ends
        assert newest is not None
        leaf.older, leaf.newer = newest, ends
        newest.newer = ends.older = leaf
        self._num_leaves += 1

    def refresh(self, leaf: GhostNode) -> None:
        """Makes a leaf that is in the newest."""
        if leaf.newer is not self._ends:  # as it is when a resident leaf is trimmed again and again
            self.discard(leaf)
            self.append(leaf)

    def discard(self, node: GhostNode) -> None:
        """Takes a node out, if it is in."""
        older, newer = node.older, node.newer
        if older is None or newer is None:
            return
        older.newer, newer.older = newer, older
        node.older = node.newer = None
        self._num_leaves -= 1
