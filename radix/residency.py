"""Which nodes are resident and which of them may go: locks, pins, the order of eviction, and the counters of these.

This is the part of the cache that deals in nodes. It keeps the tree, the pool and the order of eviction in step, so
that each of its methods leaves all invariants of `RadixCache` standing. It knows no tokens but as bytes to store, no
references, no statistics of admission.

Seen from eviction, a node is in one of three states::

                 lock                                       graft below
    LOCKED ◀──────────────  CANDIDATE (unlocked leaf)  ──────────────────▶  INNER (unlocked, has children)
           ──────────────▶                             ◀──────────────────
                unlock                                   last child goes

An inner node is locked and unlocked too, by locks on it or below it; it never leaves before its children.

Time is a counter that ticks once per operation that moves recency, so that no two paths are used at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence

from phloem.radix.ages import HitAges
from phloem.radix.errors import Shortage
from phloem.radix.ghost import Ghost
from phloem.radix.node import Node
from phloem.radix.policy import EvictionOrder
from phloem.radix.pool import BlockPool
from phloem.radix.tree import Place, RadixTree


class Residency:
    """The nodes of all trees, live and cleared, with their locks. Owned by one `RadixCache`."""

    __slots__ = (
        "_ages",
        "_clock",
        "cleared",
        "evictable",
        "ghost",
        "num_cleared",
        "num_locks",
        "order",
        "pinned",
        "pool",
        "tree",
    )

    def __init__(
        self, tree: RadixTree[Node], pool: BlockPool, order: EvictionOrder, ghost: Ghost, ages: HitAges
    ) -> None:
        """Nothing resident; `tree`, `order` and `ghost` must be empty, and no block of `pool` cached."""
        self.tree = tree
        self.pool = pool
        self.order = order
        self.ghost = ghost  # told of each leaf before blocks of it are evicted
        self.cleared: set[Node] = set()  # roots of cleared trees in which locks are left
        self.evictable = 0  # blocks in nodes with lock_refs == 0
        self.num_locks = 0  # locks taken and not given back: the sum of `held`
        self.pinned = 0  # blocks in nodes with pin_refs > 0
        self.num_cleared = 0  # blocks freed since their tree was cleared
        self._ages = ages  # told of each tick
        self._clock = 0

    def _advance(self) -> None:
        """Begins an operation that moves recency."""
        self._clock += 1
        self._ages.sample(self._clock)

    @property
    def locked(self) -> int:
        """Cached blocks in nodes with locks."""
        return self.pool.num_cached - self.evictable

    def shortage(self, needed: int, *, reserved: int) -> Shortage:
        """The numbers of a refusal of `needed` blocks to one that hits `reserved` evictable ones itself. O(1)."""
        return Shortage(
            needed=needed,
            free=self.pool.num_free,
            evictable=self.evictable,
            reserved=reserved,
            locked=self.locked,
            private=self.pool.num_private,
            num_locks=self.num_locks,
            num_blocks=self.pool.num_blocks,
            pinned=self.pinned,
        )

    def lock(self, node: Node) -> None:
        """Takes a lock at the end of `node`, and marks its path as used now. O(nodes on the path)."""
        self._advance()
        self.num_locks += 1
        node.held += 1
        self.order.discard(node)  # the nodes above have children, so are no candidates
        root = node
        step: Node | None = node
        while step is not None:
            if step.lock_refs == 0:
                self.evictable -= len(step.blocks)
            step.lock_refs += 1
            step.last_used = self._clock
            root, step = step, step.parent
        if root.lock_refs == 1:  # with more it is entered already, or cleared
            self.tree.enter(root)

    def unlock(self, node: Node) -> None:
        """Gives back a lock held at the end of `node`, and marks its path as used now. O(nodes on the path)."""
        self._advance()
        self.num_locks -= 1
        node.held -= 1
        root = node
        step: Node | None = node
        while step is not None:
            step.lock_refs -= 1
            step.last_used = self._clock
            if step.lock_refs == 0:
                self.evictable += len(step.blocks)
            root, step = step, step.parent
        if root in self.cleared:
            self._free_unlocked(node)
        else:
            self._settle(node)

    def pin(self, node: Node) -> None:
        """Takes a lock for a lease at the end of `node`, which is no root. O(nodes on the path)."""
        self.lock(node)
        node.pins += 1
        for step in node.ancestors():
            if step.pin_refs == 0:
                self.pinned += len(step.blocks)
            step.pin_refs += 1

    def unpin(self, node: Node) -> None:
        """Takes back one `pin`, and leaves the path as old as it is. O(nodes on the path), O(log candidates)."""
        self.num_locks -= 1
        node.held -= 1
        node.pins -= 1
        for step in node.ancestors():
            step.lock_refs -= 1
            step.pin_refs -= 1
            if step.lock_refs == 0:
                self.evictable += len(step.blocks)
            if step.pin_refs == 0:
                self.pinned -= len(step.blocks)
        self._settle(node)

    def move_lock(self, start: Node, end: Node) -> None:
        """Moves one lock from `start` down to `end`, which is below it or the same. O(nodes between)."""
        start.held -= 1
        end.held += 1
        self.order.discard(end)
        for step in end.ancestors():
            if step is start:
                return
            if step.lock_refs == 0:
                self.evictable -= len(step.blocks)
            step.lock_refs += 1
            step.last_used = self._clock

    def hit(self, node: Node, *, priority: int) -> None:
        """Counts an admission that hit the path of `node`, which must be locked. O(nodes on the path)."""
        step: Node | None = node
        while step is not None:
            step.hit_count += 1
            if step.priority < priority:
                step.priority = priority
            step = step.parent

    def touch(self, node: Node, *, priority: int) -> None:
        """Marks the path of `node` as used by the `graft` just done. O(nodes on the path), O(log candidates)."""
        self.order.discard(node)
        step: Node | None = node
        while step is not None:
            step.last_used = self._clock
            if step.priority < priority:
                step.priority = priority
            step = step.parent
        self._settle(node)

    def graft(
        self,
        place: Place[Node],
        query: bytes,
        blocks: list[int],
        *,
        priority: int,
        label: str | None,
        own_locks: int,
    ) -> Node:
        """Adopts private `blocks`, whose tokens `query` ends with, at `place`. May split a node.

        The caller must `touch` or lock the node that is returned: it may be a candidate that is not sorted in yet.

        Args:
            place: Where the blocks go.
            query: Packed tokens that end with those of `blocks`.
            blocks: What the tree does not have there; may be empty.
            priority: The priority of the new blocks.
            label: Who puts them there.
            own_locks: How many locks the caller itself holds at `place.node`.

        Returns:
            The node that ends with the last of the blocks, or at `place` if there are none.
        """
        self._advance()
        node = self.tree.split(place.node, place.num_blocks)
        if not blocks:
            return node
        edge = query[-len(blocks) * self.tree.block_bytes :]
        self.order.discard(node)
        self.pool.adopt(blocks)
        if _can_grow(node, priority=priority, label=label, own_locks=own_locks):
            node.grow(edge, blocks)
            node.ghost = None  # which knows another continuation, if any
            leaf = node
        else:
            leaf = Node(bytearray(edge), blocks, node.end + len(blocks))
            leaf.created = leaf.last_used = self._clock
            leaf.priority, leaf.label = priority, label
            self.tree.attach(leaf, node)
        if leaf.lock_refs == 0:
            self.evictable += len(blocks)
        return leaf

    def evict(self, count: int) -> int:
        """Evicts `count` blocks in order, or all that can be; returns how many. O(log candidates) per node."""
        wanted = short = min(count, self.evictable)
        while short:
            leaf = self.order.first()
            self.ghost.remember(leaf)
            if short < len(leaf.blocks):
                blocks = self.tree.trim(leaf, short)
                self.evictable -= len(blocks)
                self.pool.drop(blocks)
            else:
                parent = leaf.parent
                blocks = self._drop(leaf)
                if parent is not None:
                    self._settle(parent)
            short -= len(blocks)
        return wanted

    def clear(self, root: Node) -> int:
        """Makes all below `root` unmatchable, frees what is unlocked, and returns how many blocks are locked."""
        self.tree.leave(root)
        locked = 0
        for node in reversed(list(self.tree.below(root))):  # children before their parents
            if node.lock_refs:
                locked += len(node.blocks)
            else:
                self.num_cleared += len(self._drop(node))
        if root.lock_refs:
            self.cleared.add(root)
        return locked

    def _settle(self, node: Node) -> None:
        """Makes a node that may have become an unlocked leaf a candidate; an idle empty root is forgotten instead."""
        if node.lock_refs == 0 and node.children is None:
            if node.parent is None:
                self.tree.leave(node)
            else:
                self.order.add(node)

    def _free_unlocked(self, node: Node) -> None:
        """In a cleared tree, frees `node` and those above it that no lock protects any more."""
        step = node
        while step.lock_refs == 0:
            parent = step.parent
            if parent is None:
                self.cleared.discard(step)
                return
            self.num_cleared += len(self._drop(step))
            step = parent

    def _drop(self, leaf: Node) -> Sequence[int]:
        """Frees a whole unlocked leaf."""
        self.order.discard(leaf)
        blocks = self.tree.detach(leaf)
        self.evictable -= len(blocks)
        self.pool.drop(blocks)
        return blocks


def unlocked_blocks(place: Place[Node]) -> int:
    """How many blocks of the walked path nobody has locked. O(unlocked nodes on it)."""
    node = place.node
    while node.lock_refs == 0 and node.parent is not None:
        node = node.parent
    return max(0, place.num_blocks - node.end) if node.lock_refs else place.num_blocks


def _can_grow(node: Node, *, priority: int, label: str | None, own_locks: int) -> bool:
    """Whether a caller that holds `own_locks` there may append to `node` instead of giving it a child.

    Not if somebody else has locked it: that lock would then hold blocks that its owner does not use. Nor if it was hit,
    or has another priority: what follows would inherit a worth that it has not earned. Nor under another label.
    """
    return (
        node.parent is not None
        and node.children is None
        and node.lock_refs == own_locks
        and node.hit_count == 0
        and node.priority == priority
        and node.label == label
    )
