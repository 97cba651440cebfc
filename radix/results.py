"""What the cache answers: plain frozen results.

The lists in them are fresh and the caller's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from phloem.radix.ages import AgeHistogram
from phloem.radix.namespace import Namespace
from phloem.radix.node import NodeRef


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the tree has of a path, seen without touching it."""

    num_tokens: int  # in whole blocks: len(blocks) * block_size
    blocks: list[int]
    node: NodeRef  # for `lock`
    tail_tokens: int  # leading rows of `tail_block` that agree with the path beyond `num_tokens`
    tail_block: int | None  # None exactly when tail_tokens is 0


@dataclass(frozen=True, slots=True)
class Grip:
    """An admitted path: its hit is locked, and the rest of its block table is allocated."""

    num_tokens: int  # hit, in whole blocks
    blocks: list[int]  # of the hit, locked
    node: NodeRef  # the end of the hit; the caller's lock is here, for `extend` and `unlock`
    tail_tokens: int  # rows to copy from `tail_block` into the first new block
    tail_block: int | None  # NOT locked, and possibly among `new_blocks` already: see `RadixCache.acquire`
    new_blocks: list[int]  # private, the caller's


@dataclass(frozen=True, slots=True)
class InsertResult:
    """Where blocks that were handed over ended up."""

    blocks: list[int]  # the tree's blocks for the tokens given; the caller's block table from now on
    node: NodeRef  # the end of the path


@dataclass(frozen=True, slots=True)
class ClearResult:
    """What `clear` could free at once, and what follows as locks end; in blocks."""

    num_freed: int
    num_locked: int


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A lease at the moment when it was asked about."""

    owner: str
    namespace: Namespace
    num_tokens: int  # what it protects, in whole blocks
    ttl: float  # seconds that it lives on after each use
    expires_in_s: float  # if it is not used


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters of one cache. The first six are levels, in blocks; free + evictable + locked + private = num_blocks."""

    num_blocks: int
    free: int
    evictable: int  # in the tree, unlocked
    locked: int  # in the tree, locked
    pinned: int  # of the locked, by leases, each block once
    private: int  # held by callers, not in the tree
    nodes: int  # roots not counted
    namespaces: int  # those that have a node or a lock
    locks: int  # taken and not yet given back, one for each lease included
    leases: int  # pinned and not yet ended
    queries: int  # admissions
    query_tokens: int  # tokens of admitted paths
    hits: int  # admissions that hit one block or more
    hit_tokens: int  # tokens of admitted paths found in whole blocks
    tail_tokens: int  # tokens found beyond that in part of a block
    refusals: int  # admissions and allocations refused for want of blocks
    hit_ages: AgeHistogram  # of `hits`: how long the end of what was hit had not been used
    evictions: int  # blocks evicted
    cleared: int  # blocks freed because their namespace was cleared
    duplicates: int  # blocks handed over that the tree already had
    expired_leases: int  # ended by time
    ghost_tokens: int  # remembered of paths of which blocks were evicted
    ghost_bytes: int  # memory that these take, nodes and labels included
    max_ghost_bytes: int  # and may take
