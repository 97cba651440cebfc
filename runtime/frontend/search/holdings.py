"""Which nodes of a tree have a live branch, and how many KV blocks these can hold.

A node without one is *parked*: its tokens are all that there is of it, and its KV is in the cache, or is computed again when it is
used. Blocks are counted from the lengths of the paths alone: whole blocks of a common path once, the partly filled block at the
end of a live branch once per branch. Where two siblings begin with the same tokens the cache needs less.
"""

from __future__ import annotations

from collections.abc import Callable

from phloem.runtime.branch import Branch
from phloem.runtime.frontend.search.node import Node


class Holdings:
    """Owner of the branches of a tree's nodes."""

    def __init__(
        self, reopen: Callable[[Node], Branch], *, block_size: int, max_blocks: int | None = None
    ) -> None:
        """Hold nothing yet; `reopen` makes the branch of a parked node."""
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.num_blocks = 0
        """That live branches, and families under way, can hold."""

        self._reopen = reopen
        self._branches: dict[Node, Branch] = {}
        """Used longest ago first."""
        self._busy: set[Node] = set()
        self._live: dict[Node, int] = {}
        """Live branches at a node or under it, where there are any."""

    def __contains__(self, node: Node) -> bool:
        return node in self._branches

    def put(self, node: Node, branch: Branch) -> None:
        """Take over the branch of a node. O(depth)."""
        self._branches[node] = branch
        self._count(node, 1)

    def branch(self, node: Node) -> Branch:
        """Return the branch of a node, opening it if it is parked; it is now the one used last."""
        branch = self._branches.pop(node, None)
        if branch is None:
            self.put(node, self._reopen(node))
        else:
            self._branches[node] = branch
        return self._branches[node]

    def start(self, node: Node, num_blocks: int) -> Branch:
        """Return the branch of a node that grows: it is not parked meanwhile, and `num_blocks` are set aside."""
        branch = self.branch(node)
        self._busy.add(node)
        self.num_blocks += num_blocks
        return branch

    def finish(self, node: Node, num_blocks: int) -> None:
        """Note that a node has grown, or failed to."""
        self._busy.discard(node)
        self.num_blocks -= num_blocks

    def park(self, node: Node) -> None:
        """Let go of a node's branch, if it has one: its blocks can be evicted at once. O(depth)."""
        branch = self._branches.pop(node, None)
        if branch is not None:
            branch.release()
            self._count(node, -1)

    def make_room(self, num_blocks: int, *, keep: Node) -> bool:
        """Park what was used longest ago, but not `keep`, until so many blocks can be held besides. False if that is not enough."""
        if self.max_blocks is None or self.num_blocks + num_blocks <= self.max_blocks:
            return True
        cold = [node for node in self._branches if node not in self._busy and node is not keep]
        for node in cold:
            if self.num_blocks + num_blocks <= self.max_blocks:
                break
            self.park(node)
        return self.num_blocks + num_blocks <= self.max_blocks

    def blocks_to_open(self, node: Node) -> int:
        """Return how many blocks more a node's branch can hold when it is live. O(depth)."""
        if node in self._branches:
            return 0
        return self._tail_of(node) + sum(
            self._whole_of(each) for each in node.line() if each not in self._live
        )

    def blocks_beyond(self, node: Node, num_tokens: int) -> int:
        """Return how many blocks a child of so many tokens can hold, besides those that it shares with the node."""
        return -(-(node.end + num_tokens) // self.block_size) - node.end // self.block_size

    def close(self) -> None:
        """Let go of everything."""
        for branch in self._branches.values():
            branch.release()
        self._branches.clear()
        self._busy.clear()
        self._live.clear()
        self.num_blocks = 0

    def _count(self, node: Node, change: int) -> None:
        self.num_blocks += change * self._tail_of(node)
        for each in node.line():
            before = self._live.get(each, 0)
            if before + change:
                self._live[each] = before + change
            else:
                del self._live[each]
            if 0 in (before, before + change):
                self.num_blocks += change * self._whole_of(each)

    def _tail_of(self, node: Node) -> int:
        return int(node.end % self.block_size > 0)

    def _whole_of(self, node: Node) -> int:
        return node.end // self.block_size - node.start // self.block_size
