"""One node of the tree, what a tree asks of it, and the handle on a place in it that others may hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from phloem.radix.namespace import Namespace

if TYPE_CHECKING:
    from sortedcontainers import SortedList
    from typing_extensions import Self

    from phloem.radix.ghost_node import GhostNode

# A candidate's place in the order of eviction: the policy's key, `created`, the node. Among the leaves of all trees
# no two have the same `created` (see `EvictionOrder`), so that nodes are never compared.
Rank: TypeAlias = "tuple[Any, int, Node]"


N = TypeVar("N", bound="TreeNode")


class TreeNode(Protocol):
    """What a `RadixTree` asks of its nodes: `Node`, which is resident, and the slim `GhostNode`.

    Depth is counted in blocks from the root: a node covers the half-open interval [start, end) of its path. One that
    has left the tree keeps its parent and its `start`, and has ``end == start``: `covering` depends on that.
    """

    parent: Self | None  # None for a root only
    children: dict[bytes, Self] | None  # by the tokens of their first block; None when there are none
    order: SortedList | None  # the keys of `children`, kept only while they are many (tree.py)

    @property
    def edge(self) -> bytes | bytearray:
        """The tokens of its blocks."""

    @property
    def blocks(self) -> Sequence[int]:
        """One int for each block."""

    @property
    def start(self) -> int:
        """Blocks from the root to its beginning."""

    @property
    def end(self) -> int:
        """Blocks from the root to its end."""

    @property
    def namespace(self) -> Namespace | None:
        """Of a root only."""

    @property
    def label(self) -> str | None:
        """Who put the content here, as the caller named itself."""

    def split_off(self, count: int, num_bytes: int) -> Self:
        """Moves its first `count` blocks, `num_bytes` of its edge, to a new node, which is in no tree yet."""

    def cut(self, count: int, num_bytes: int) -> Sequence[int]:
        """Drops its last `count` blocks, `num_bytes` of its edge, and returns them."""


def covering(node: N, num_blocks: int) -> N | None:
    """The node that has depth `num_blocks` of this node's path in it, or None when that part has left.

    Right whatever was split since this node ended there or below, because the lower part of a split keeps its
    identity. O(splits since).
    """
    while node.parent is not None and node.start >= num_blocks:
        node = node.parent
    return node if node.start <= num_blocks <= node.end else None


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """A run of one or more full blocks on a path; owned by its tree, mutated by `RadixTree` and `RadixCache` only.

    Nodes are compared and hashed by identity. See `TreeNode` for where it begins and ends.
    """

    edge: bytearray  # the packed tokens of `blocks`; len(edge) == len(blocks) * block_bytes
    blocks: list[int]  # their block ids, in path order; the very int objects of the pool, hence 8 bytes each
    end: int  # blocks from the root to the node's end
    parent: Node | None = None  # None for a root only
    children: dict[bytes, Node] | None = (
        None  # by the packed tokens of their first block; None when there are none
    )
    order: SortedList | None = None  # the keys of `children`, kept only while they are many (tree.py)
    namespace: Namespace | None = None  # of a root only
    held: int = 0  # locks taken at this very node, those of leases included
    lock_refs: int = 0  # locks taken at this node or below: held + sum of the children's lock_refs
    pins: int = 0  # leases on the path that ends here; each has one of the locks in `held`
    pin_refs: int = 0  # leases at this node or below: pins + sum of the children's pin_refs
    created: int = 0  # tick of the cache's clock at which its content entered the tree
    last_used: int = 0  # tick of the last lock, unlock or insert of a path through this node
    hit_count: int = 0  # admissions that hit this node
    priority: int = 0  # the highest that an insert or admission gave
    label: str | None = None  # who put the content here, as the caller named itself
    ghost: GhostNode | None = (
        None  # a node of the ghost's tree whose path has this one's as a prefix (ghost.py)
    )
    rank: Rank | None = None  # its entry among the eviction candidates

    @property
    def start(self) -> int:
        """Blocks from the root to the node's beginning."""
        return self.end - len(self.blocks)

    @property
    def is_root(self) -> bool:
        """Whether this is the empty node above a namespace's tree."""
        return self.parent is None

    def ancestors(self) -> Iterator[Node]:
        """This node, its parent, and so on up to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def root(self) -> Node:
        """The root above this node. O(nodes on the path)."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    @classmethod
    def root_of(cls, namespace: Namespace) -> Node:
        """The empty node above a namespace's tree."""
        return cls(bytearray(), [], 0, namespace=namespace)

    def split_off(self, count: int, num_bytes: int) -> Node:
        """Moves its first `count` blocks to a new node, with its locks, pins, recency, worth and label."""
        upper = Node(
            self.edge[:num_bytes],
            self.blocks[:count],
            self.start + count,
            lock_refs=self.lock_refs,
            pin_refs=self.pin_refs,
            created=self.created,
            last_used=self.last_used,
            hit_count=self.hit_count,
            priority=self.priority,
            label=self.label,
            ghost=self.ghost,
        )
        # Slices, not `del edge[:num_bytes]`, which would keep the memory of what was cut off.
        self.edge = self.edge[num_bytes:]
        self.blocks = self.blocks[count:]
        return upper

    def cut(self, count: int, num_bytes: int) -> list[int]:
        """Drops its last `count` blocks and returns them. Amortised O(count)."""
        blocks = self.blocks[-count:]
        del self.blocks[-count:]
        del self.edge[-num_bytes:]
        self.end -= count
        return blocks

    def grow(self, edge: bytes, blocks: list[int]) -> None:
        """Appends full blocks to a leaf in place. Amortised O(len(blocks))."""
        self.edge += edge
        self.blocks += blocks
        self.end += len(blocks)

    def __repr__(self) -> str:
        kind = "root" if self.is_root else "node"
        return (
            f"<{kind} [{self.start}, {self.end}) locks={self.lock_refs} children={len(self.children or ())}>"
        )


@dataclass(frozen=True, slots=True)
class NodeRef:
    """A depth on a cached path: all that the world outside holds of the tree. Opaque but for `num_blocks`.

    It survives splits, since a split leaves the node's identity to the lower part: the place is found by going up
    from `node`. It also finds out when its blocks have left the tree, even if others have taken their place since:
    the last block's id would have to be at the same depth in the same life (`BlockPool.life`), and a block leaves
    the tree after everything below it and before everything above.
    """

    node: Node
    num_blocks: int  # the path's length in blocks
    block: int | None = None  # the last block of the path; None at a root
    life: int = 0  # that block's life at the time

    def resolve(self) -> Node | None:
        """The node that covers depth `num_blocks` now, or None when that part has left. O(splits since)."""
        return covering(self.node, self.num_blocks)
