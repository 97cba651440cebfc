"""The ghost: a bounded memory of what was evicted, so that *evicted* can be told from *never seen*.

It is a second `RadixTree`, of slim nodes that own no blocks: the paths of which blocks were evicted. Every path in it
was cached once; what of it is still cached (or again) does no harm, since whoever asks looks at the resident tree first.

Cheap per leaf, whatever the depth
----------------------------------
To enter a leaf's path from the root would cost its depth, and a conversation of 10,000 turns would take 50 million steps
to evict. So a resident node remembers where the ghost has its path (``node.ghost``), and a leaf is entered below the
nearest place known above it, together with the path between, as one node. The parents are evicted later, and find
themselves there. So do the later trims of a long leaf, which eviction takes block by block: the first one enters all of
the leaf's edge. That holds as long as the ghost has room for the paths that are being evicted; it has by default.

``node.ghost`` is a hint that heals itself. It is a node of the ghost's tree whose path has the resident node's path as
a prefix, hence `covering` finds the place also after splits on either side. When the ghost has forgotten it, `covering`
says so: a node that left has no blocks, and nodes of the ghost are cut from their ends, but never grow. A resident leaf
that grows drops its hint.

What it takes
-------------
Tokens are kept narrow (packing.py): two bytes each until one comes that needs three, as with vocabularies beyond 65,280,
or four; then all that is remembered is widened, at most twice in the ghost's life. A node takes some 250 bytes besides,
whatever its length. So a token costs 2.9 bytes in all on paths with 300 own tokens, but 6.3 on tails of two to six blocks
of 16 tokens. Since that depends on the traffic, what is bounded is the bytes and not the tokens: `num_bytes` charges each
node with at least what CPython allocates for it (a test compares), and never exceeds `max_bytes` after an operation.
Outside that count are the empty nodes that hints of resident nodes still hold, 112 bytes each.

What is forgotten
-----------------
Leaves, those remembered longest ago first; of a leaf that is much longer than what is too much, only its end. A node
whose last child was forgotten counts as remembered just then: it was evicted after that child, and may have been since.

Invariants: those of `RadixTree`; `num_blocks` counts the blocks in it, `num_label_bytes` the labels; the order has its
leaves, no more and no fewer.
"""

from __future__ import annotations

import sys

from sortedcontainers import SortedList

from phloem.radix.ghost_node import GhostNode, LeafOrder
from phloem.radix.namespace import Namespace
from phloem.radix.node import Node, covering
from phloem.radix.packing import narrow_exactly, recode
from phloem.radix.tree import RadixTree

# What CPython takes (3.11, 64 bits) for a node besides its tokens: the object, the headers of its edge and of its key
# in the parent's dictionary, its slot there and in the parent's order, with the slack that these have.
NODE_BYTES = 256
# And for the dictionary of a node that has children, beyond the slots; for a root, its namespace too.
DICT_BYTES = 176
ROOT_BYTES = 512


class Ghost:
    """The paths that a cache has evicted lately. Owned by a `RadixCache`."""

    __slots__ = ("leaves", "max_bytes", "num_blocks", "num_label_bytes", "tree")

    def __init__(self, block_size: int, *, max_bytes: int) -> None:
        """Nothing remembered yet, and never more than fits into `max_bytes`; with few of them, nothing ever."""
        self.tree = RadixTree(block_size, GhostNode.root_of, token_bytes=2)
        self.leaves = LeafOrder()
        self.max_bytes = max_bytes
        self.num_blocks = 0
        self.num_label_bytes = 0  # of each node's label; an upper bound, since nodes share them

    @property
    def num_bytes(self) -> int:
        """The memory that it takes. O(1)."""
        tree, num_roots = self.tree, len(self.tree.roots)
        num_inner = tree.num_nodes + num_roots - len(self.leaves)
        return (
            self.num_blocks * tree.block_bytes
            + tree.num_nodes * (NODE_BYTES + tree.block_bytes)  # which is its key's
            + num_inner * DICT_BYTES
            + num_roots * ROOT_BYTES
            + self.num_label_bytes
        )

    def remember(self, leaf: Node) -> None:
        """Enters the path of a resident leaf, of which blocks are about to be evicted.

        Amortised O(len(leaf.edge)): the nodes above are entered once. Forgets what is too much. A path that is longer
        than all that may be remembered is not.
        """
        place = self._place_of(leaf)
        if place is not None:
            self._refresh(place)
        elif self._bytes_alone(leaf) <= self.max_bytes:
            self._enter(leaf)
            while (excess := self.num_bytes - self.max_bytes) > 0:
                self._forget_oldest(excess)

    def clear(self, namespace: Namespace | None) -> None:
        """Forgets what was evicted from a namespace, or from all. O(nodes forgotten)."""
        roots = [root for name, root in self.tree.roots.items() if namespace is None or name == namespace]
        for root in roots:
            for node in reversed(list(self.tree.below(root))):  # children before their parents
                self._drop(node)

    def _bytes_alone(self, leaf: Node) -> int:
        """The memory for the path of a resident leaf if nothing else is remembered."""
        return (
            (leaf.end + 1) * self.tree.block_bytes + NODE_BYTES + DICT_BYTES + ROOT_BYTES + _label_bytes(leaf)
        )

    def _place_of(self, node: Node) -> GhostNode | None:
        """The ghost's node that has the end of a resident node's path in it, by the hint. O(splits since)."""
        if node.ghost is None:
            return None
        place = node.ghost = covering(node.ghost, node.end)
        return place

    def _enter(self, leaf: Node) -> None:
        """Enters what is missing of a resident leaf's path: one node, however many resident ones it covers."""
        missing = [leaf]
        step = leaf.parent
        assert step is not None
        while (place := self._place_of(step)) is None and step.parent is not None:
            missing.append(step)
            step = step.parent
        if place is None:
            assert step.namespace is not None
            place = self.tree.root(step.namespace)
            self.tree.enter(place)
        edge = self._narrowed(b"".join(node.edge for node in reversed(missing)))
        place = self._add(self._split(place, step.end), edge, label=leaf.label)
        for node in missing:
            node.ghost = place

    def _narrowed(self, packed: bytes) -> bytes:
        """The tokens as the tree has them, which is widened before if that is too narrow."""
        while (edge := narrow_exactly(packed, self.tree.token_bytes)) is None:
            self._widen(self.tree.token_bytes + 1)
        return edge

    def _widen(self, token_bytes: int) -> None:
        """Makes room for larger tokens: the same tree with more bytes for each. O(all that is remembered)."""
        tree, old_bytes = self.tree, self.tree.token_bytes
        tree.token_bytes = token_bytes
        tree.block_bytes = key_bytes = tree.block_size * token_bytes
        nodes = [node for root in tree.roots.values() for node in (root, *tree.below(root))]
        for node in nodes:
            node.edge = recode(node.edge, old_bytes, token_bytes)
        for node in nodes:
            if node.children is not None:
                node.children = {child.edge[:key_bytes]: child for child in node.children.values()}
            if node.order is not None:
                node.order = SortedList(node.children)

    def _add(self, parent: GhostNode, edge: bytes, *, label: str | None) -> GhostNode:
        """The node that ends after `edge` below the end of `parent`; made, if it is not there. May split a node."""
        tree = self.tree
        place = tree.walk(parent, edge)
        end = self._split(place.node, place.num_blocks)
        rest = edge[(place.num_blocks - parent.end) * tree.block_bytes :]
        if not rest:
            self._refresh(end)
            return end
        num_blocks = len(rest) // tree.block_bytes
        leaf = GhostNode(rest, end.end, end.end + num_blocks, label)
        self.leaves.discard(end)
        tree.attach(leaf, end)
        self.leaves.append(leaf)
        self.num_blocks += num_blocks
        self.num_label_bytes += _label_bytes(leaf)
        return leaf

    def _split(self, node: GhostNode, num_blocks: int) -> GhostNode:
        upper = self.tree.split(node, num_blocks)
        if upper is not node:
            self.num_label_bytes += _label_bytes(upper)
        return upper

    def _refresh(self, node: GhostNode) -> None:
        """Makes `node` the leaf remembered last, if it is one."""
        if node.children is None:
            self.leaves.refresh(node)

    def _forget_oldest(self, num_bytes: int) -> None:
        leaf = self.leaves.oldest()
        count = -(-num_bytes // self.tree.block_bytes)  # rounded up
        # To trim what is not long saves little, and leaves a node behind that must be forgotten too.
        if 4 * count <= leaf.end - leaf.start:
            self.num_blocks -= len(self.tree.trim(leaf, count))
        else:
            self._drop(leaf)

    def _drop(self, leaf: GhostNode) -> None:
        parent = leaf.parent
        assert parent is not None
        self.leaves.discard(leaf)
        self.num_blocks -= len(self.tree.detach(leaf))
        self.num_label_bytes -= _label_bytes(leaf)
        leaf.label = None  # for those that hints still hold
        if parent.children is not None:
            return
        if parent.parent is None:
            self.tree.leave(parent)
        else:
            self.leaves.append(parent)


def _label_bytes(node: GhostNode | Node) -> int:
    return 0 if node.label is None else sys.getsizeof(node.label)
