"""Who owns which block.

A block id is an int; which memory it stands for is the KV store's business. Each block is owned by exactly one of
three: the free list, a caller (*private*), or the tree (*cached*). The pool knows which, and refuses every hand-over
that its present owner did not make::

            allocate              adopt
    FREE ─────────────▶ PRIVATE ─────────▶ CACHED
      ▲                   │                  │
      └────── free ───────┘                  │
      └────────────────── drop ──────────────┘

It does not know nodes, locks or eviction.

Invariants: the three counts add up to `num_blocks`; the free list holds each free block once.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import IntEnum

from phloem.radix.errors import InvalidBlocks, InvariantError, OutOfBlocks, Shortage


class Owner(IntEnum):
    """Who owns a block."""

    FREE = 0
    PRIVATE = 1
    CACHED = 2


class BlockPool:
    """The blocks 0 to `num_blocks` - 1 and their owners; owned by one `RadixCache`.

    Free blocks are handed out last in, first out, so that memory still warm in the caches is used again first.

    >>> pool = BlockPool(4)
    >>> pool.allocate(2), pool.num_free
    ([0, 1], 2)
    >>> pool.free([1])
    >>> pool.allocate(1)
    [1]
    """

    __slots__ = ("_free", "_lives", "_num_cached", "_owners")

    def __init__(self, num_blocks: int) -> None:
        """Makes `num_blocks` free blocks. O(num_blocks).

        Raises:
            ValueError: `num_blocks` is not positive.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be 1 or more, not {num_blocks}")
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owners = bytearray(num_blocks)
        # How many times a block has left the tree. An id and its life name one stay of a block in the tree, which
        # lets a reference to a node find out whether what it saw is still there.
        self._lives = array("I", bytes(4 * num_blocks))
        self._num_cached = 0

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return len(self._owners)

    @property
    def num_free(self) -> int:
        """Blocks on the free list."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks in the tree."""
        return self._num_cached

    @property
    def num_private(self) -> int:
        """Blocks that callers hold."""
        return len(self._owners) - len(self._free) - self._num_cached

    def owner(self, block: int) -> Owner:
        """Who owns `block` now. O(1)."""
        return Owner(self._owners[block])

    def life(self, block: int) -> int:
        """How many times `block` has left the tree so far. O(1)."""
        return self._lives[block]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks off the free list for a caller. O(count).

        Raises:
            ValueError: `count` is negative.
            OutOfBlocks: Fewer are free. (`RadixCache.allocate` evicts; this does not.)
        """
        if count < 0:
            raise ValueError(f"cannot allocate {count} blocks")
        split = len(self._free) - count
        if split < 0:
            raise OutOfBlocks(
                Shortage(
                    needed=count,
                    free=self.num_free,
                    evictable=0,
                    reserved=0,
                    locked=self.num_cached,
                    private=self.num_private,
                    num_locks=0,
                    num_blocks=self.num_blocks,
                )
            )
        taken = self._free[split:]
        del self._free[split:]
        taken.reverse()
        self._move(taken, Owner.PRIVATE)
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Gives private blocks back. O(len(blocks)).

        Raises:
            InvalidBlocks: One of them is not private, unknown, or named twice; nothing was given back.
        """
        self.require(blocks, Owner.PRIVATE)
        self._give_back(blocks)

    def adopt(self, blocks: Sequence[int]) -> None:
        """Hands private blocks over to the tree. O(len(blocks)).

        Raises:
            InvalidBlocks: One of them is not private, unknown, or named twice; nothing was handed over.
        """
        self.require(blocks, Owner.PRIVATE)
        self._move(blocks, Owner.CACHED)
        self._num_cached += len(blocks)

    def drop(self, blocks: Sequence[int]) -> None:
        """Frees blocks that leave the tree, and ends this life of theirs. O(len(blocks)).

        Raises:
            InvalidBlocks: One of them is not in the tree, unknown, or named twice; nothing was freed.
        """
        self.require(blocks, Owner.CACHED)
        lives = self._lives
        for block in blocks:
            lives[block] += 1
        self._num_cached -= len(blocks)
        self._give_back(blocks)

    def require(self, blocks: Sequence[int], owner: Owner) -> None:
        """Checks that all `blocks` are distinct and belong to `owner`. O(len(blocks)), at C speed.

        Raises:
            InvalidBlocks: They don't; the message names the first that does not.
        """
        try:
            owners = set(map(self._owners.__getitem__, blocks))
        except (IndexError, TypeError):
            owners = None
        distinct = owners is not None and len(set(blocks)) == len(blocks)
        if not distinct or (blocks and (owners != {owner} or min(blocks) < 0)):
            raise InvalidBlocks(self._complaint(blocks, owner))

    def check(self) -> None:
        """Proves the invariants. O(num_blocks).

        Raises:
            InvariantError: One does not hold.
        """
        free = self._free
        if len(set(free)) != len(free):
            raise InvariantError(f"the free list of {len(free)} blocks names some twice")
        if any(self._owners[block] != Owner.FREE for block in free):
            raise InvariantError("a block on the free list has another owner")
        counts = (self._owners.count(Owner.FREE), self._owners.count(Owner.CACHED))
        if counts != (len(free), self._num_cached):
            raise InvariantError(
                f"{counts[0]} blocks are marked free and {counts[1]} cached, "
                f"but the counts are {len(free)} and {self._num_cached}"
            )

    def _give_back(self, blocks: Sequence[int]) -> None:
        self._move(blocks, Owner.FREE)
        self._free.extend(reversed(blocks))

    def _move(self, blocks: Sequence[int], owner: Owner) -> None:
        owners = self._owners
        value = int(owner)
        for block in blocks:
            owners[block] = value

    def _complaint(self, blocks: Sequence[int], owner: Owner) -> str:
        seen: set[int] = set()
        for block in blocks:
            if not isinstance(block, int) or not 0 <= block < self.num_blocks:
                return f"block {block!r} is not one of this pool's 0 to {self.num_blocks - 1}"
            if block in seen:
                return f"block {block} is named twice"
            seen.add(block)
            if self._owners[block] != owner:
                return f"block {block} is {self.owner(block).name.lower()}, not {owner.name.lower()}"
        raise InvariantError(f"no complaint about the blocks {blocks!r}")
