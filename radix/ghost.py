"""The ghost: a bounded memory of what was evicted, so that *evicted* can be told from *never seen*.

It is a second `RadixTree`, whose blocks stand for nothing: the paths of which blocks were evicted, four bytes a token.
Every path in it was cached once; what of it is still cached (or again) does no harm, since whoever asks looks at the
resident tree first.

Cheap per leaf, whatever the depth
----------------------------------
To enter a leaf's path from the root would cost its depth, and a conversation of 10,000 turns would take 50 million steps
to evict. So a resident node remembers where the ghost has its path (``node.ghost``), and a leaf is entered below the
nearest place known above it, together with the path between, as one node. The parents are evicted later, and find
themselves there. So do the later trims of a long leaf, which eviction takes block by block: the first one enters all of
the leaf's edge. That holds as long as the ghost has room for the paths that are being evicted; it has by default.

``node.ghost`` is a hint that heals itself. It is a node of the ghost's tree whose path has the resident node's path as
a prefix, hence `Node.covering` finds the place also after splits on either side. When the ghost has forgotten it,
`covering` says so: a node that left has no blocks, and nodes of the ghost are cut from their ends, but never grow.
A resident leaf that grows drops its hint.

What is forgotten
-----------------
Whole leaves and ends of leaves, those remembered longest ago first, as soon as there are more than `max_blocks` blocks
or `max_nodes` nodes. The second bound is for paths that branch at every block: a node costs 600 bytes.

Invariants: those of `RadixTree`; `num_blocks` counts the blocks in it; the order has its leaves, no more and no fewer.
"""

from __future__ import annotations

from phloem.radix.namespace import Namespace
from phloem.radix.node import Node
from phloem.radix.policy import LRU, EvictionOrder
from phloem.radix.tree import RadixTree

# A node takes about 600 bytes besides its tokens. With a node for 128 tokens they double what the tokens take (of the
# benchmark's paths, with 290 tokens to a node, a token takes 7 bytes in all); small ghosts may have some more.
TOKENS_PER_NODE = 128
MIN_NODES = 1_024


class Ghost:
    """The paths that a cache has evicted lately. Owned by a `RadixCache`."""

    __slots__ = ("_clock", "max_blocks", "max_nodes", "num_blocks", "order", "tree")

    def __init__(self, block_size: int, *, max_tokens: int) -> None:
        """Nothing remembered yet, and never more than `max_tokens` tokens; with less than a block's, nothing ever."""
        self.tree = RadixTree(block_size)
        self.order = EvictionOrder(LRU())
        self.max_blocks = max_tokens // block_size
        self.max_nodes = max(MIN_NODES, max_tokens // TOKENS_PER_NODE)
        self.num_blocks = 0
        self._clock = 0  # ticks per node entered or seen again

    def remember(self, leaf: Node) -> None:
        """Enters the path of a resident leaf, of which blocks are about to be evicted.

        Amortised O(len(leaf.edge)) and O(log leaves): the nodes above are entered once. Forgets what is too much. A
        path that is longer than all that may be remembered is not.
        """
        if leaf.end > self.max_blocks:
            return
        self._refresh(self._place_of(leaf) or self._enter(leaf))
        while self.num_blocks > self.max_blocks or self.tree.num_nodes > self.max_nodes:
            self._forget_oldest()

    def clear(self, namespace: Namespace | None) -> None:
        """Forgets what was evicted from a namespace, or from all. O(nodes forgotten)."""
        roots = [root for name, root in self.tree.roots.items() if namespace is None or name == namespace]
        for root in roots:
            for node in reversed(list(self.tree.below(root))):  # children before their parents
                self._drop(node)

    def _place_of(self, node: Node) -> Node | None:
        """The ghost's node that has the end of a resident node's path in it, by the hint. O(splits since)."""
        if node.ghost is None:
            return None
        place = node.ghost = node.ghost.covering(node.end)
        return place

    def _enter(self, leaf: Node) -> Node:
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
        edge = b"".join(node.edge for node in reversed(missing))
        place = self._add(self.tree.split(place, step.end), edge, label=leaf.label)
        for node in missing:
            node.ghost = place
        return place

    def _add(self, parent: Node, edge: bytes, *, label: str | None) -> Node:
        """The node that ends after `edge` below the end of `parent`; made, if it is not there. May split a node."""
        tree = self.tree
        place = tree.walk(parent, edge)
        end = tree.split(place.node, place.num_blocks)
        rest = edge[(place.num_blocks - parent.end) * tree.block_bytes :]
        if not rest:
            return end
        num_blocks = len(rest) // tree.block_bytes
        self._clock += 1
        leaf = Node(bytearray(rest), [0] * num_blocks, end.end + num_blocks, label=label)
        leaf.created = leaf.last_used = self._clock
        self.order.discard(end)
        tree.attach(leaf, end)
        self.order.add(leaf)
        self.num_blocks += num_blocks
        return leaf

    def _refresh(self, node: Node) -> None:
        """Makes `node` the one remembered last."""
        if node.last_used == self._clock:  # as it is when a leaf is trimmed again and again
            return
        self._clock += 1
        node.last_used = self._clock
        if node.children is None:
            self.order.discard(node)
            self.order.add(node)

    def _forget_oldest(self) -> None:
        leaf = self.order.first()
        excess = self.num_blocks - self.max_blocks
        if 0 < excess < len(leaf.blocks):
            self.num_blocks -= len(self.tree.trim(leaf, excess))
        else:
            self._drop(leaf)

    def _drop(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        self.order.discard(leaf)
        self.num_blocks -= len(self.tree.detach(leaf))
        if parent.children is not None:
            return
        if parent.parent is None:
            self.tree.leave(parent)
        else:
            self.order.add(parent)
