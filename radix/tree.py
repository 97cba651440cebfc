"""The radix tree: where token paths are kept, and nothing else.

A tree of token ids, one token an edge, would be a trie with 30 million nodes. This one is compressed twice. First, its
alphabet is blocks, not tokens: KV memory is handed out in blocks, so a path can only be shared up to a block's end.
Second, a chain of blocks in which nobody branches is a single node, whose edge is the chain's tokens as one piece of
memory; comparing a prompt with it is one ``memcmp``, and a prompt of 128,000 tokens takes as long as comparing
512 kilobytes. What is left over per node is one dictionary look-up, keyed by the packed tokens of a whole block: exact,
since the dictionary compares the tokens after their hash, and without a scan over the children.

A split
-------
Blocks are written as letters here. ``ABCDE`` is cached, with a lock held at its end, and ``ABX`` is inserted::

    before                         after

    root                           root
     └─ A: [ABCDE]  lock_refs 1     └─ A: [AB]  lock_refs 1, held 0     ← the new node
            held 1                         ├─ C: [CDE]  lock_refs 1     ← the old node, cut short
                                           │      held 1
                                           └─ X: [X]  lock_refs 0

The *lower* part keeps the node's identity and the upper one is new. Whoever holds a lock holds it at a node's end, and
that is the lower part's: handles and leases stay right without being told. Both parts keep lock refs, pin refs,
priority, hit count, recency and label (`Node.split_off`). The parent's dictionary changes no key, as the upper part begins with the same block as the old node.

Where a walk can end
--------------------
`walk` goes down from a node along a query; every operation begins with it. With ``[ABC]`` as the only child of the
root:

1. *At a node's end, with nothing left of the query*: ``ABC``.
2. *At a node's end, with a rest that no child begins with*: ``ABCX``, or ``X`` (that end is the root's).
3. *Inside an edge, because the query ends*: ``AB``.
4. *Inside an edge, because the query differs*: ``ABX``.

In cases 2 to 4 the rest of the query may still agree with the beginning of a next block, token by token: in case 2 with
the first block of any child, in cases 3 and 4 with the edge's next block. `tail` finds the longest such agreement.
Among children, the keys sorted as bytes put it right beside the place where the rest of the query would be sorted in,
so two comparisons are enough whatever their number.

Invariants
----------
- A node that is no root has one block or more, and an edge of exactly that many blocks (rule 1).
- No two children of a node share their first block; their key is that block's tokens.
- ``end`` counts the blocks from the root: ``node.start == node.parent.end``.
- ``children`` is None instead of empty; ``order`` exists only where children are many.

The tree knows no locks, no eviction, no pool, and not even the kind of its nodes (`TreeNode`; the ghost of ghost.py has a tree of slim ones); it asks
nobody whether a block may go. It never recurses: depth is bounded by memory, not by the interpreter's stack.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic

from sortedcontainers import SortedList

from phloem.radix.errors import InvalidNamespace
from phloem.radix.namespace import Namespace
from phloem.radix.node import N
from phloem.radix.packing import TOKEN_BYTES, common_tokens

# Sorting the keys of up to this many children on demand is cheaper than keeping them sorted (measured: 64 keys of
# 64 bytes take 4 µs). A node loses its order at half as many, lest it be made and unmade in turns.
MAX_UNORDERED_CHILDREN = 32


@dataclass(slots=True)
class Place(Generic[N]):
    """Where a walk ended: at depth `num_blocks`, which lies in (node.start, node.end] unless node is a root."""

    node: N
    num_blocks: int
    blocks: list[int]  # of the part walked over, a fresh list


@dataclass(frozen=True, slots=True)
class Tail(Generic[N]):
    """The known block that goes on from a walk's end most like the query does: `num_tokens` of its rows agree with it."""

    num_tokens: int
    block: int | None  # None exactly when num_tokens is 0
    node: (
        N | None
    )  # which has the block, as its first unless the walk ended inside this node; None: nothing goes on
    tokens: bytes  # all tokens of the block, packed; empty when nothing goes on


class RadixTree(Generic[N]):
    """The trees of all namespaces of one cache, as structure.

    `roots` holds a root for each namespace that has nodes or locks; `RadixCache` enters and removes them.
    """

    __slots__ = ("_new_root", "block_bytes", "block_size", "num_nodes", "roots", "token_bytes")

    def __init__(
        self, block_size: int, new_root: Callable[[Namespace], N], *, token_bytes: int = TOKEN_BYTES
    ) -> None:
        """An empty forest for blocks of `block_size` tokens, of `token_bytes` bytes each in edges and queries."""
        self._new_root = new_root
        self.block_size = block_size
        self.token_bytes = token_bytes
        self.block_bytes = block_size * token_bytes
        self.roots: dict[Namespace, N] = {}
        self.num_nodes = 0  # roots not counted

    def root(self, namespace: Namespace) -> N:
        """The namespace's root, or a fresh one that is not entered yet. O(1).

        Raises:
            InvalidNamespace: `namespace` is not a `Namespace`.
        """
        root = self.roots.get(namespace)
        if root is None:
            if not isinstance(namespace, Namespace):
                raise InvalidNamespace(f"expected a Namespace, not {type(namespace).__name__}")
            root = self._new_root(namespace)
        return root

    def entered(self, root: N) -> N | None:
        """The root that is entered under the namespace of `root`: itself, another one, or None. O(1)."""
        return None if root.namespace is None else self.roots.get(root.namespace)

    def enter(self, root: N) -> None:
        """Makes `root` its namespace's, unless it is already. O(1)."""
        if root.namespace is not None:
            self.roots[root.namespace] = root

    def leave(self, root: N) -> None:
        """Takes `root` out, if it is in: nothing below it is matched from now on. O(1)."""
        if root.namespace is not None and self.roots.get(root.namespace) is root:
            del self.roots[root.namespace]

    def walk(self, node: N, query: bytes) -> Place[N]:
        """Goes down from the end of `node` along the full blocks of `query`. Changes nothing.

        O(len(query)) as a memory compare, plus O(1) for each node and O(1) for each block of the result.
        """
        size = self.block_bytes
        position = 0
        blocks: list[int] = []
        begins = query.startswith  # bound once: this loop is what a match of many nodes costs
        # A rest shorter than a block is no key of any dictionary, so the end of the query needs no case of its own.
        while (children := node.children) is not None:
            child = children.get(query[position : position + size])
            if child is None:
                break
            edge = child.edge
            if not begins(edge, position):
                count = self._common_blocks(edge, query, position)
                blocks += child.blocks[:count]
                return Place(child, node.end + count, blocks)
            blocks += child.blocks
            position += len(edge)
            node = child
        return Place(node, node.end, blocks)

    def tail(self, place: Place[N], rest: bytes) -> Tail[N]:
        """The cached block beyond `place` that shares most leading tokens with `rest`, be it none. Changes nothing.

        O(block_size), plus O(log children) where they are many.

        Args:
            place: Where the walk along a query ended.
            rest: What follows there, up to one block; with nothing left, nothing is sought.
        """
        best: Tail[N] = Tail(0, None, None, b"")
        if len(rest) < self.token_bytes:
            return best
        node = place.node
        if place.num_blocks < node.end:
            index = place.num_blocks - node.start
            return self._tail_of(node, index, self._key(node.edge, index * self.block_bytes), rest)
        children = node.children
        if children is None:
            return best
        for key in self._neighbours(node, rest):
            tail = self._tail_of(children[key], 0, key, rest)
            if best.node is None or tail.num_tokens > best.num_tokens:
                best = tail
        return best

    def split(self, node: N, num_blocks: int) -> N:
        """Makes depth `num_blocks` a node's end, and returns that node. O(len(node.edge)).

        The lower part stays `node`; see the picture above. Changes nothing when `node` ends there.
        """
        if num_blocks == node.end:
            return node
        count = num_blocks - node.start
        cut = count * self.block_bytes
        parent = node.parent
        if parent is None or parent.children is None or not 0 < count < len(node.blocks):
            raise AssertionError(f"depth {num_blocks} is not inside {node!r}")
        upper = node.split_off(count, cut)
        upper.parent = parent
        upper.children = {self._key(node.edge, 0): node}
        parent.children[self._key(upper.edge, 0)] = upper
        node.parent = upper
        self.num_nodes += 1
        return upper

    def attach(self, node: N, parent: N) -> None:
        """Makes `node` a child of `parent`, which must end where it starts. O(1); O(log n) with n children, if many."""
        key = self._key(node.edge, 0)
        node.parent = parent
        if parent.children is None:
            parent.children = {}
        parent.children[key] = node
        self.num_nodes += 1
        if parent.order is not None:
            parent.order.add(key)
        elif len(parent.children) > MAX_UNORDERED_CHILDREN:
            parent.order = SortedList(parent.children)

    def trim(self, leaf: N, count: int) -> Sequence[int]:
        """Cuts `count` blocks off a leaf's end, but not all of them, and returns them. O(count), see `cut`."""
        return leaf.cut(count, count * self.block_bytes)

    def detach(self, leaf: N) -> Sequence[int]:
        """Takes a leaf out of the tree and returns its blocks. O(1); O(log n) with n siblings, if many.

        The leaf keeps its parent and its start, so that references to it still resolve.
        """
        parent = leaf.parent
        if parent is None or parent.children is None or leaf.children is not None:
            raise AssertionError(f"{leaf!r} is not a leaf in a tree")
        key = self._key(leaf.edge, 0)
        del parent.children[key]
        if parent.order is not None:
            parent.order.remove(key)
            if len(parent.children) <= MAX_UNORDERED_CHILDREN // 2:
                parent.order = None
        if not parent.children:
            parent.children = None
        self.num_nodes -= 1
        return leaf.cut(len(leaf.blocks), len(leaf.edge))

    def below(self, root: N) -> Iterator[N]:
        """All nodes below `root`, each before its children. Do not change the tree while iterating."""
        stack = [root]
        while stack:
            node = stack.pop()
            if node is not root:
                yield node
            if node.children is not None:
                stack.extend(node.children.values())

    def _tail_of(self, node: N, index: int, tokens: bytes, rest: bytes) -> Tail[N]:
        num_tokens = common_tokens(tokens, rest, token_bytes=self.token_bytes)
        return Tail(num_tokens, node.blocks[index] if num_tokens else None, node, tokens)

    def _key(self, edge: bytes | bytearray, offset: int) -> bytes:
        return bytes(edge[offset : offset + self.block_bytes])

    def _common_blocks(self, edge: bytes | bytearray, query: bytes, position: int) -> int:
        """How many blocks of `edge` the query continues with at `position`, given that the first does.

        A bisection over memory compares: each reads up to the first difference, about 2 len(edge) bytes in sum.
        """
        size = self.block_bytes
        view = memoryview(query)
        low = 1
        high = probe = min(len(edge), len(query) - position) // size
        while low < high:
            if edge.startswith(view[position + low * size : position + probe * size], low * size):
                low = probe
            else:
                high = probe - 1
            probe = (low + high + 1) // 2
        return low

    def _neighbours(self, node: N, rest: bytes) -> list[bytes]:
        """The one or two keys of children between which `rest` would be sorted in."""
        if node.order is None:
            keys = sorted(node.children or ())
            index = bisect_left(keys, rest)
        else:
            keys = node.order
            index = keys.bisect_left(rest)
        return list(keys[max(index - 1, 0) : index + 1])
