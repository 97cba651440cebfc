"""The errors of the cache, one family.

::

    RadixError
    ├── OutOfBlocks         the pool cannot give what was asked; nothing was changed
    ├── StaleNode           a node reference outlived its blocks (evicted or cleared): match again
    ├── InvariantError      the cache found itself inconsistent: a bug here, or in a caller's bookkeeping
    ├── NotLocked           unlock or extend through a reference that holds no lock      (also ValueError)
    ├── InvalidBlocks       block ids that are unknown, repeated, or not the caller's    (also ValueError)
    ├── InvalidTokens       token ids that cannot be packed                              (also ValueError)
    ├── InvalidNamespace    a field of a namespace is of a wrong type or too long        (also ValueError)
    └── UnknownPolicy       no eviction policy has this name                             (also ValueError)

Whoever raises one of these has changed nothing, ``InvariantError`` excepted.
"""

from __future__ import annotations

from dataclasses import dataclass


class RadixError(Exception):
    """Base of everything that `phloem.radix` raises on its own account."""


class StaleNode(RadixError):
    """The blocks behind a node reference have left the tree since; match again."""


class InvariantError(RadixError):
    """A rule of the tree is broken; the message names the rule, the place and the numbers."""


class NotLocked(RadixError, ValueError):
    """Unlock or extend through a node reference on which no lock is held."""


class InvalidBlocks(RadixError, ValueError):
    """Block ids that are unknown, repeated, too few, too many, or owned by somebody else."""


class InvalidTokens(RadixError, ValueError):
    """Token ids that are no integers of 0 to 2**31 - 1, or a buffer that does not hold int32."""


class InvalidNamespace(RadixError, ValueError):
    """A namespace field of the wrong type, empty, or too long."""


class UnknownPolicy(RadixError, ValueError):
    """No eviction policy is registered under the given name."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """The numbers at the moment when an allocation was refused; all in blocks but `num_locks`."""

    needed: int
    free: int
    evictable: int  # unlocked blocks in the tree, those of the hit included
    reserved: int  # of these, the ones that the request itself hits: they cannot be evicted for it
    locked: int
    private: int
    num_locks: int
    num_blocks: int


class OutOfBlocks(RadixError):
    """Fewer blocks are free or evictable than were asked for. Nothing was changed."""

    def __init__(self, shortage: Shortage) -> None:
        """Word the message from `shortage`, which stays readable as an attribute."""
        self.shortage = shortage
        s = shortage
        own = f" ({s.reserved} of them the hit itself)" if s.reserved else ""
        super().__init__(
            f"need {s.needed} blocks, have {s.free} free and {s.evictable} evictable{own} of {s.num_blocks} "
            f"({s.locked} locked by {s.num_locks} locks, {s.private} private); "
            "raise num_blocks or lower max_running"
        )
