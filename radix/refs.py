"""From the handles that callers hold to the nodes that they stand for, and back. See `NodeRef` for why they last."""

from __future__ import annotations

from phloem.radix.errors import NotLocked, StaleNode
from phloem.radix.node import Node, NodeRef
from phloem.radix.pool import BlockPool
from phloem.radix.residency import Residency


def ref_to(pool: BlockPool, node: Node, num_blocks: int) -> NodeRef:
    """A handle on depth `num_blocks`, which lies in `node`. O(1)."""
    if num_blocks == 0:
        return NodeRef(node, 0)
    block = node.blocks[num_blocks - node.start - 1]
    return NodeRef(node, num_blocks, block, pool.life(block))


def live_node(residency: Residency, ref: NodeRef) -> Node:
    """The node that has the depth of `ref` in it. O(splits since).

    Raises:
        StaleNode: Blocks of the path have left the tree since.
    """
    node = ref.resolve()
    if ref.block is None:
        root = ref.node
        # An empty root holds nothing that could be stale. It is entered (again) if the name is free.
        live = root in residency.cleared or residency.tree.entered(root) in (None, root)
    else:
        live = residency.pool.life(ref.block) == ref.life
    if node is None or not live:
        raise StaleNode(f"the path of {ref.num_blocks} blocks has left the tree since; match again")
    return node


def locked_node(ref: NodeRef) -> Node:
    """The node that ends at `ref` and on which a caller holds a lock, other than by a lease. O(splits since).

    Raises:
        NotLocked: There is no such lock.
    """
    node = ref.resolve()
    if node is None or node.held == node.pins or node.end != ref.num_blocks:
        raise NotLocked(f"no lock is held at the end of the path of {ref.num_blocks} blocks")
    return node
