"""Proof that a cache is consistent: rules 1, 10, 11, 12 and 16 of the tree, from its raw structure alone.

It recomputes every counter that `RadixCache` keeps, and trusts none. Iterative, as everything here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from phloem.radix.errors import InvariantError
from phloem.radix.node import Node
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


def check_residency(residency: Residency) -> None:
    """Proves the invariants of a cache. O(blocks + nodes).

    Raises:
        InvariantError: One does not hold.
    """
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
    _equal("cached blocks", pool.num_cached, len(census.blocks))
    _equal("nodes", tree.num_nodes, census.nodes)
    _equal("locks", residency.num_locks, census.held)
    _equal("evictable blocks", residency.evictable, census.evictable)
    _check_order(residency.order, census)


def _check_tree(tree: RadixTree, pool: BlockPool, root: Node, census: _Census) -> None:
    _require(root.parent is None and not root.blocks and root.end == 0, f"{root} is no root")
    _check_locks_and_children(tree, root)
    census.held += root.held
    for node in tree.below(root):
        _check_node(tree, pool, node)
        _check_locks_and_children(tree, node)
        _require(
            census.blocks.isdisjoint(node.blocks), f"{node} has a block that another node has too (rule 10)"
        )
        census.blocks.update(node.blocks)
        census.nodes += 1
        census.held += node.held
        if node.lock_refs == 0:
            census.evictable += len(node.blocks)
            if node.children is None:
                census.candidates.add(node)


def _check_node(tree: RadixTree, pool: BlockPool, node: Node) -> None:
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
    _require(len(set(node.blocks)) == num_blocks, f"{node} has a block twice (rule 10)")
    for block in node.blocks:
        _require(
            pool.owner(block) is Owner.CACHED,
            f"block {block} is in {node} but {pool.owner(block).name.lower()} (rule 10)",
        )


def _check_locks_and_children(tree: RadixTree, node: Node) -> None:
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
    below = sum(child.lock_refs for child in children.values())
    _require(
        node.held >= 0 and node.lock_refs == node.held + below,
        f"{node}: {node.held} locks held here and {below} below do not make {node.lock_refs} (rule 11)",
    )


def _check_order(order: EvictionOrder, census: _Census) -> None:
    ranks = order.ranks()
    nodes = {rank[2] for rank in ranks}
    _require(
        nodes == census.candidates and len(nodes) == len(ranks),
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
