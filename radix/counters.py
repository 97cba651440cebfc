"""The statistics of a cache: what it counts itself, and the levels that its parts keep."""

from __future__ import annotations

from dataclasses import dataclass

from phloem.radix.ages import HitAges
from phloem.radix.ghost import Ghost
from phloem.radix.leases import LeaseBook
from phloem.radix.residency import Residency
from phloem.radix.results import CacheStats, Grip


@dataclass(slots=True)
class Counters:
    """What only ever grows; see `CacheStats` for the meanings. Owned by one `RadixCache`."""

    queries: int = 0
    query_tokens: int = 0
    hits: int = 0
    hit_tokens: int = 0
    tail_tokens: int = 0
    refusals: int = 0
    evictions: int = 0
    duplicates: int = 0

    def count_admission(self, num_tokens: int, grip: Grip) -> None:
        """Counts the admission of a path of `num_tokens` tokens."""
        self.queries += 1
        self.query_tokens += num_tokens
        self.hits += grip.num_tokens > 0
        self.hit_tokens += grip.num_tokens
        self.tail_tokens += grip.tail_tokens

    def snapshot(self, residency: Residency, leases: LeaseBook, ghost: Ghost, ages: HitAges) -> CacheStats:
        """All counters and levels as they are now. O(1)."""
        pool, tree = residency.pool, residency.tree
        return CacheStats(
            num_blocks=pool.num_blocks,
            free=pool.num_free,
            evictable=residency.evictable,
            locked=residency.locked,
            pinned=residency.pinned,
            private=pool.num_private,
            nodes=tree.num_nodes,
            namespaces=len(tree.roots),
            locks=residency.num_locks,
            leases=len(leases),
            queries=self.queries,
            query_tokens=self.query_tokens,
            hits=self.hits,
            hit_tokens=self.hit_tokens,
            tail_tokens=self.tail_tokens,
            refusals=self.refusals,
            hit_ages=ages.histogram(),
            evictions=self.evictions,
            cleared=residency.num_cleared,
            duplicates=self.duplicates,
            expired_leases=leases.num_expired,
            ghost_tokens=ghost.num_blocks * tree.block_size,
            ghost_bytes=ghost.num_bytes,
            max_ghost_bytes=ghost.max_bytes,
        )
