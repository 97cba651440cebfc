"""The errors of the cache, one family.

::

    RadixError
    ├── OutOfBlocks         the pool cannot give what was asked; nothing was changed
    ├── PinRefused          more blocks would be pinned than may be; nothing was changed
    ├── LeaseEnded          renewal of a lease that was released, expired or cleared
    ├── StaleNode           a node reference outlived its blocks (evicted or cleared): match again
    ├── InvariantError      the cache found itself inconsistent: a bug here, or in a caller's bookkeeping
    ├── NotLocked           unlock or extend through a reference that holds no lock      (also ValueError)
    ├── InvalidBlocks       block ids that are unknown, repeated, or not the caller's    (also ValueError)
    ├── InvalidTokens       token ids that cannot be packed                              (also ValueError)
    ├── InvalidNamespace    a field of a namespace is of a wrong type or too long        (also ValueError)
    ├── InvalidLease        a lifetime or an owner that makes no sense                   (also ValueError)
    ├── InvalidLabel        a label that is no text, or too long                         (also ValueError)
    ├── NothingToPin        not one whole block of the path is cached                    (also ValueError)
    └── UnknownPolicy       no eviction policy has this name                             (also ValueError)

Whoever raises one of these has changed nothing, ``InvariantError`` excepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phloem.radix.results import LeaseInfo

# How many leases the message of a refusal lists.
MAX_LISTED = 8


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


class InvalidLease(RadixError, ValueError):
    """A lifetime that is no positive finite number, or an owner that is no text of some characters."""


class InvalidLabel(RadixError, ValueError):
    """A label that is neither None nor a text of up to 256 characters."""


class NothingToPin(RadixError, ValueError):
    """Not one whole block of the path is cached. Blocks are cached when they have been computed."""


class LeaseEnded(RadixError):
    """The lease was released, has expired, or was cleared; pin again."""


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
    pinned: int = 0  # of the locked, by leases


class OutOfBlocks(RadixError):
    """Fewer blocks are free or evictable than were asked for. Nothing was changed."""

    def __init__(self, shortage: Shortage) -> None:
        """Word the message from `shortage`, which stays readable as an attribute."""
        self.shortage = shortage
        s = shortage
        own = f" ({s.reserved} of them the hit itself)" if s.reserved else ""
        pins = f", {s.pinned} of them pinned by leases" if s.pinned else ""
        super().__init__(
            f"need {s.needed} blocks, have {s.free} free and {s.evictable} evictable{own} of {s.num_blocks} "
            f"({s.locked} locked by {s.num_locks} locks{pins}, {s.private} private); "
            f"raise num_blocks{', release leases' if s.pinned else ''} or lower max_running"
        )


@dataclass(frozen=True, slots=True)
class PinShortage:
    """The numbers at the moment when a pin was refused, in blocks, and what was pinned then."""

    needed: int  # blocks of the path that no lease protects yet
    pinned: int
    max_pinned: int
    leases: tuple[LeaseInfo, ...]  # the first to end first


class PinRefused(RadixError):
    """A lease would take the pinned blocks over the budget. Nothing was changed."""

    def __init__(self, shortage: PinShortage) -> None:
        """Word the message from `shortage`, which stays readable as an attribute."""
        self.shortage = shortage
        s = shortage
        listed = [
            f"{lease.owner!r} {lease.num_tokens} tokens for {lease.expires_in_s:.1f} s more"
            for lease in s.leases[:MAX_LISTED]
        ]
        if len(s.leases) > MAX_LISTED:
            listed.append(f"and {len(s.leases) - MAX_LISTED} more")
        pinned = f"{s.pinned} pinned by {len(s.leases)} leases: {', '.join(listed)}" if listed else "0 pinned"
        remedy = (
            "release a lease, wait for one to end" if s.needed <= s.max_pinned else "pin a shorter prefix"
        )
        super().__init__(
            f"need {s.needed} more blocks pinned, have {s.max_pinned - s.pinned} left of {s.max_pinned} "
            f"({pinned}); {remedy}, or raise max_pinned_blocks"
        )
