"""The prefix cache as a data structure: token paths, blocks, locks and eviction; no tensors, no requests.

>>> pool = BlockPool(64)
>>> cache = RadixCache(pool, block_size=4, policy="lru")
>>> ns = Namespace(salt="tenant-a", adapter="fr@2")
>>> done = cache.insert(ns, [1, 2, 3, 4, 5, 6, 7, 8], cache.allocate(2))
>>> cache.match(ns, [1, 2, 3, 4, 5, 6, 0, 0]).num_tokens
4

Start reading at `phloem.radix.tree`, which explains the structure; then `phloem.radix.cache`, which is what users
call. Of other packages it needs sortedcontainers only.
"""

from phloem.radix.ages import AgeHistogram
from phloem.radix.cache import RadixCache
from phloem.radix.errors import (
    InvalidBlocks,
    InvalidLabel,
    InvalidLease,
    InvalidNamespace,
    InvalidTokens,
    InvariantError,
    LeaseEnded,
    NothingToPin,
    NotLocked,
    OutOfBlocks,
    PinRefused,
    PinShortage,
    RadixError,
    Shortage,
    StaleNode,
    UnknownPolicy,
)
from phloem.radix.explain import Explanation, Miss, MissReason
from phloem.radix.leases import Lease
from phloem.radix.namespace import Namespace
from phloem.radix.node import NodeRef
from phloem.radix.packing import Tokens, pack, unpack
from phloem.radix.policy import FIFO, LFU, LRU, EvictionPolicy, Priority
from phloem.radix.pool import BlockPool, Owner
from phloem.radix.results import CacheStats, ClearResult, Grip, InsertResult, LeaseInfo, PrefixMatch

__all__ = [
    "FIFO",
    "LFU",
    "LRU",
    "AgeHistogram",
    "BlockPool",
    "CacheStats",
    "ClearResult",
    "EvictionPolicy",
    "Explanation",
    "Grip",
    "InsertResult",
    "InvalidBlocks",
    "InvalidLabel",
    "InvalidLease",
    "InvalidNamespace",
    "InvalidTokens",
    "InvariantError",
    "Lease",
    "LeaseEnded",
    "LeaseInfo",
    "Miss",
    "MissReason",
    "Namespace",
    "NodeRef",
    "NotLocked",
    "NothingToPin",
    "OutOfBlocks",
    "Owner",
    "PinRefused",
    "PinShortage",
    "PrefixMatch",
    "Priority",
    "RadixCache",
    "RadixError",
    "Shortage",
    "StaleNode",
    "Tokens",
    "UnknownPolicy",
    "pack",
    "unpack",
]
