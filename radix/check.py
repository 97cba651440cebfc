"""Proof that a cache is consistent: rules 1, 10, 11, 12, 13 and 16 of the tree, from its raw structure alone.

It recomputes every counter that `RadixCache` keeps, and trusts none. Iterative, as everything here.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from phloem.radix.errors import InvariantError
from phloem.radix.ghost import Ghost
from phloem.radix.leases import LeaseBook
from phloem.radix.node import N, Node
from phloem.radix.policy import EvictionOrder
from phloem.radix.pool import BlockPool, Owner
from phloem.radix.residency import Residency
from phloem.radix.tree import RadixTree


@dataclass(slots=True)
class _Census:
    """What a walk over all trees counts."""

    blocks: set[int] = field(default_factory=set)
    candidates: set[Node] = field(default_factory=set)
    nodes: int = 0
    held: int = 0
    evictable: int = 0
    pins: int = 0
    pinned: int = 0


def check_cache(residency: Residency, leases: LeaseBook, ghost: Ghost) -> None:
    """Proves the invariants of a cache. O(blocks + nodes + leases).

    Raises:
        InvariantError: One does not hold.
    """
    _check_residency(residency, leases)
    _check_leases(residency, leases)
    _check_ghost(ghost)


def _check_residency(residency: Residency, leases: LeaseBook) -> None:
    tree, pool, cleared = residency.tree, residency.pool, residency.cleared
    pool.check()
    census = _Census()
    for namespace, root in tree.roots.items():
        _require(root.namespace == namespace, f"the root under {namespace} carries {root.namespace}")
        _require(root not in cleared, f"the root of {namespace} is entered and cleared")
        _require(
            root.lock_refs > 0 or root.children is not None, f"{namespace} is entered but empty and idle"
        )
        _check_tree(tree, pool, root, census)
    for root in cleared:
        _require(root.lock_refs > 0, f"{root} is cleared, unlocked, and still here")
        _check_tree(tree, pool, root, census)
        for node in tree.below(root):
            _require(node.lock_refs > 0, f"{node} of a cleared tree is unlocked and still here")
            _require(node.pin_refs == 0, f"{node} of a cleared tree is pinned (rule 13)")
    _equal("cached blocks", pool.num_cached, len(census.blocks))
    _equal("nodes", tree.num_nodes, census.nodes)
    _equal("locks", residency.num_locks, census.held)
    _equal("evictable blocks", residency.evictable, census.evictable)
    _equal("pinned blocks", residency.pinned, census.pinned)
    _equal("leases", len(leases), census.pins)
    _check_order(residency.order, census.candidates)


def _check_leases(residency: Residency, leases: LeaseBook) -> None:
    pins = Counter(lease._node for lease in leases.all())
    for lease in leases.all():
        node = lease._node
        _equal(f"leases on {node}", node.pins, pins[node])
        _equal(f"tokens of {lease}", lease.num_tokens, node.end * residency.tree.block_size)
        _require(lease.ended is None, f"{lease} has ended, but is in the book")
        _require(
            residency.tree.roots.get(lease.namespace) is node.root(),
            f"{lease} is not on a path of its namespace",
        )
    _require(
        residency.pinned <= leases.max_pinned_blocks,
        f"{residency.pinned} blocks are pinned, more than {leases.max_pinned_blocks} (rule 13)",
    )


def _check_ghost(ghost: Ghost) -> None:
    blocks = nodes = label_bytes = 0
    leaves = set()
    for root in ghost.tree.roots.values():
        _require(root.children is not None, f"the ghost keeps {root}, which is empty")
        _check_links(ghost.tree, root)
        for node in ghost.tree.below(root):
            _check_shape(ghost.tree, node)
            _check_links(ghost.tree, node)
            blocks += len(node.blocks)
            nodes += 1
            label_bytes += 0 if node.label is None else sys.getsizeof(node.label)
            if node.children is None:
                leaves.add(node)
    _equal("blocks of the ghost", ghost.num_blocks, blocks)
    _equal("nodes of the ghost", ghost.tree.num_nodes, nodes)
    _equal("bytes of the ghost's labels", ghost.num_label_bytes, label_bytes)
    _require(
        ghost.num_bytes <= ghost.max_bytes,
        f"the ghost takes {ghost.num_bytes} bytes, more than {ghost.max_bytes}",
    )
    ordered = list(ghost.leaves)
    _require(set(ordered) == leaves, "the ghost's order is not of its leaves")
    _equal("leaves of the ghost", len(ghost.leaves), len(ordered))
    _require(ordered[::-1] == list(reversed(ghost.leaves)), "the ghost's order differs backwards")


def _check_tree(tree: RadixTree[Node], pool: BlockPool, root: Node, census: _Census) -> None:
    _require(root.parent is None and not root.blocks and root.end == 0, f"{root} is no root")
    _check_links(tree, root)
    _check_locks(root)
    census.held += root.held
    census.pins += root.pins
    for node in tree.below(root):
        _check_shape(tree, node)
        _check_blocks(pool, node)
        _check_links(tree, node)
        _check_locks(node)
        _require(
            census.blocks.isdisjoint(node.blocks), f"{node} has a block that another node has too (rule 10)"
        )
        census.blocks.update(node.blocks)
        census.nodes += 1
        census.held += node.held
        census.pins += node.pins
        if node.pin_refs:
            census.pinned += len(node.blocks)
        if node.lock_refs == 0:
            census.evictable += len(node.blocks)
            if node.children is None:
                census.candidates.add(node)


def _check_shape(tree: RadixTree[N], node: N) -> None:
    num_blocks = len(node.blocks)
    _require(num_blocks > 0, f"{node} has no block (rule 1)")
    _require(
        len(node.edge) == num_blocks * tree.block_bytes,
        f"{node} has {num_blocks} blocks but an edge of {len(node.edge)} bytes (rule 1)",
    )
    parent = node.parent
    if parent is None:
        raise InvariantError(f"{node} has no parent but is no root")
    _equal(f"start of {node}", node.start, parent.end)
    _require(node.namespace is None, f"{node} carries a namespace")


def _check_blocks(pool: BlockPool, node: Node) -> None:
    _require(len(set(node.blocks)) == len(node.blocks), f"{node} has a block twice (rule 10)")
    for block in node.blocks:
        _require(
            pool.owner(block) is Owner.CACHED,
            f"block {block} is in {node} but {pool.owner(block).name.lower()} (rule 10)",
        )


def _check_links(tree: RadixTree[N], node: N) -> None:
    children = node.children or {}
    _require(node.children is None or bool(children), f"{node} keeps an empty dictionary of children")
    for key, child in children.items():
        _require(child.parent is node, f"{child} is a child of {node}, but has another parent")
        _require(
            len(key) == tree.block_bytes and child.edge.startswith(key),
            f"{child} is filed under another block than its first (rule 1)",
        )
    if node.order is not None:
        _require(list(node.order) == sorted(children), f"the sorted keys of {node} are not its children's")


def _check_locks(node: Node) -> None:
    children = node.children or {}
    below = sum(child.lock_refs for child in children.values())
    _require(
        node.held >= 0 and node.lock_refs == node.held + below,
        f"{node}: {node.held} locks held here and {below} below do not make {node.lock_refs} (rule 11)",
    )
    below = sum(child.pin_refs for child in children.values())
    _require(
        0 <= node.pins <= node.held and node.pin_refs == node.pins + below,
        f"{node}: {node.pins} pins of {node.held} locks here and {below} below do not make {node.pin_refs} (rule 13)",
    )


def _check_order(order: EvictionOrder, leaves: set[Node]) -> None:
    ranks = order.ranks()
    nodes = {rank[2] for rank in ranks}
    _require(
        nodes == leaves and len(nodes) == len(ranks),
        "candidates are not the unlocked leaves (rule 12)",
    )
    keys = [rank[:2] for rank in ranks]
    _require(all(a < b for a, b in pairwise(keys)), "candidates are out of order (rule 12)")
    for key, created, node in ranks:
        _require(
            (key, created) == (order.policy.key(node), node.created) and node.rank is not None,
            f"{node} is sorted in under a key that it no longer has (rule 12)",
        )


def _equal(what: str, kept: int, counted: int) -> None:
    _require(kept == counted, f"{what}: {kept} are on the books, {counted} are there")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantError(message)
