"""Leases: pins that end by themselves.

A lease locks a cached path for an owner until its lifetime is over, and the lifetime starts anew whenever the path is
used. Nobody has to come back to end it: a client that crashed, or forgot, holds memory for `ttl` seconds and no longer.
All leases together protect at most `max_pinned_blocks` blocks, each counted once however many leases are on it.

When a lease falls due
----------------------
It is due `ttl` seconds after its last renewal, or after the last admission that reused its path to the end, whichever
is later. Admissions are many, and a thousand leases may be on one system prompt, so an admission only notes the time at
the node. Leases are sorted by when they *were* due at the last look; when that time comes, `expire` looks again, and
sorts a lease in anew that has been used since. That is once per lease and lifetime at most.

Invariants, proved by `RadixCache.check`:

- A lease that has not ended holds one lock at its node, whose end is the lease's; ``node.pins`` counts these leases.
- They are on paths that can be matched: `clear` ends the leases in what it clears.
- ``pinned`` = the blocks of nodes with ``pin_refs``, and is not above `max_pinned_blocks`.

The book knows no tokens and no policy; time comes from outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Literal, TypeAlias

from sortedcontainers import SortedList

from phloem.radix.errors import InvalidLease, LeaseEnded, PinRefused, PinShortage
from phloem.radix.namespace import Namespace
from phloem.radix.node import Node
from phloem.radix.residency import Residency
from phloem.radix.results import LeaseInfo
from phloem.radix.tree import Place, Tail

MAX_OWNER_CHARS = 256

LeaseEnd: TypeAlias = Literal["released", "expired", "cleared"]


@dataclass(slots=True, eq=False, repr=False)
class Lease:
    """A claim on a cached path, made by `RadixCache.pin`; owned by the cache's book, held by whoever pinned.

    It keeps the path's blocks from eviction until it is released, falls due, or its namespace is cleared. Losing the
    object ends nothing; time does.
    """

    namespace: Namespace
    owner: str
    num_tokens: int  # what it protects, in whole blocks
    ttl: float  # seconds that it lives on after each use
    ended: LeaseEnd | None  # None while it lives
    _book: LeaseBook
    _node: Node
    _renewed_at_s: float
    _rank: _Rank | None  # its entry in the book's order

    @property
    def expires_in_s(self) -> float:
        """Seconds until it ends if it is not used; 0 once it has ended. O(1)."""
        return self._book.remaining_s(self)

    def release(self) -> None:
        """Ends it now; does nothing if it has ended already. O(nodes on the path), O(log leases)."""
        self._book.end(self, "released")

    def renew(self, ttl: float | None = None) -> None:
        """Starts its lifetime anew, which is `ttl` seconds from now on if given. O(log leases).

        Raises:
            LeaseEnded: It has ended; pin again.
            InvalidLease: `ttl` is not a positive finite number.
        """
        self._book.renew(self, ttl)

    def __repr__(self) -> str:
        state = self.ended or f"{self.expires_in_s:.1f} s left"
        return f"<Lease of {self.owner!r} on {self.num_tokens} tokens, {state}>"


_Rank: TypeAlias = "tuple[float, int, Lease]"  # when it was due at the last look, a serial number, the lease


class LeaseBook:
    """All leases of one cache that have not ended, in the order in which they fall due. Owned by a `RadixCache`."""

    __slots__ = (
        "_clock",
        "_order",
        "_residency",
        "_serial",
        "_used_at_s",
        "max_pinned_blocks",
        "num_expired",
    )

    def __init__(self, residency: Residency, *, max_pinned_blocks: int, clock: Callable[[], float]) -> None:
        """No leases on what is resident; `clock` gives seconds and never goes back."""
        self.max_pinned_blocks = max_pinned_blocks
        self.num_expired = 0
        self._residency = residency
        self._clock = clock
        self._order = SortedList()
        self._serial = 0
        # When an admission last reused the path of a node to its end; only for nodes with leases.
        self._used_at_s: dict[Node, float] = {}

    def __len__(self) -> int:
        return len(self._order)

    def pin(self, namespace: Namespace, place: Place[Node], *, ttl: float, owner: str) -> Lease:
        """Makes a lease on the path up to `place`, which is no root. May split a node. O(nodes on the path).

        Raises:
            PinRefused: More blocks would be pinned than may be; nothing was changed.
            InvalidLease: `ttl` or `owner` make no sense.
        """
        seconds = _checked_ttl(ttl)
        _check_owner(owner)
        self._require_budget(_unpinned_blocks(place))
        residency = self._residency
        node = residency.tree.split(place.node, place.num_blocks)
        residency.pin(node)
        lease = Lease(
            namespace=namespace,
            owner=owner,
            num_tokens=place.num_blocks * residency.tree.block_size,
            ttl=seconds,
            ended=None,
            _book=self,
            _node=node,
            _renewed_at_s=self._clock(),
            _rank=None,
        )
        self._sort_in(lease)
        return lease

    def renew(self, lease: Lease, ttl: float | None) -> None:
        """See `Lease.renew`."""
        seconds = lease.ttl if ttl is None else _checked_ttl(ttl)
        self.expire()
        if lease.ended is not None:
            raise LeaseEnded(
                f"the lease of {lease.owner!r} on {lease.num_tokens} tokens was {lease.ended}; pin again"
            )
        lease.ttl = seconds
        lease._renewed_at_s = self._clock()
        self._sort_out(lease)
        self._sort_in(lease)

    def use(self, node: Node, tail: Tail[Node]) -> None:
        """Renews the leases whose paths an admission has reused to their ends. O(nodes on the path).

        Args:
            node: The end of the admission's hit.
            tail: What it copies beyond. A prompt of whole blocks that comes again must run its last token, so that
                it reuses its last block as a tail: that counts as use of a lease that ends with this block.
        """
        if not self._order:
            return
        now = self._clock()
        for step in node.ancestors():
            if step.pins:
                self._used_at_s[step] = now
        last = tail.node
        if last is not None and tail.num_tokens and last.pins and last.end == node.end + 1:
            self._used_at_s[last] = now

    def expire(self) -> int:
        """Ends the leases that are due. O(1) when none is; O(log leases) and O(nodes on its path) for each that is."""
        order = self._order
        if not order:
            return 0
        now = self._clock()
        expired = 0
        while order and order[0][0] <= now:
            lease: Lease = order[0][2]
            if self._due_at_s(lease) <= now:
                self.end(lease, "expired")
                expired += 1
            else:
                self._sort_out(lease)
                self._sort_in(lease)
        self.num_expired += expired
        return expired

    def end(self, lease: Lease, how: LeaseEnd) -> None:
        """Ends a lease, if it has not ended. The path is as old as before: the end of a lease is no use of it."""
        if lease.ended is not None:
            return
        lease.ended = how
        self._sort_out(lease)
        node = lease._node
        self._residency.unpin(node)
        if not node.pins:
            self._used_at_s.pop(node, None)

    def end_all(self, namespace: Namespace | None) -> None:
        """Ends all leases in a namespace, or all there are, because it is cleared. O(leases)."""
        for lease in self.all():
            if namespace is None or lease.namespace == namespace:
                self.end(lease, "cleared")

    def all(self) -> list[Lease]:
        """Those that have not ended. O(leases)."""
        return [rank[2] for rank in self._order]

    def infos(self) -> tuple[LeaseInfo, ...]:
        """Those that are not due, the first to end first. O(leases · log leases). Changes nothing."""
        infos = [
            LeaseInfo(
                owner=lease.owner,
                namespace=lease.namespace,
                num_tokens=lease.num_tokens,
                ttl=lease.ttl,
                expires_in_s=self.remaining_s(lease),
            )
            for lease in self.all()
        ]
        return tuple(
            sorted((info for info in infos if info.expires_in_s > 0), key=lambda info: info.expires_in_s)
        )

    def remaining_s(self, lease: Lease) -> float:
        """Seconds until `lease` is due, at least 0."""
        return 0.0 if lease.ended else max(0.0, self._due_at_s(lease) - self._clock())

    def _due_at_s(self, lease: Lease) -> float:
        used_at_s = self._used_at_s.get(lease._node, -math.inf)
        return max(lease._renewed_at_s, used_at_s) + lease.ttl

    def _sort_in(self, lease: Lease) -> None:
        self._serial += 1  # so that two leases are never compared
        lease._rank = (self._due_at_s(lease), self._serial, lease)
        self._order.add(lease._rank)

    def _sort_out(self, lease: Lease) -> None:
        self._order.remove(lease._rank)
        lease._rank = None

    def _require_budget(self, needed: int) -> None:
        pinned = self._residency.pinned
        if pinned + needed > self.max_pinned_blocks:
            raise PinRefused(
                PinShortage(
                    needed=needed, pinned=pinned, max_pinned=self.max_pinned_blocks, leases=self.infos()
                )
            )


def _unpinned_blocks(place: Place[Node]) -> int:
    """How many blocks of the walked path no lease protects. O(nodes on it)."""
    node = place.node
    while node.pin_refs == 0 and node.parent is not None:
        node = node.parent
    return max(0, place.num_blocks - node.end) if node.pin_refs else place.num_blocks


def _checked_ttl(ttl: object) -> float:
    if not isinstance(ttl, Real) or isinstance(ttl, bool):
        raise InvalidLease(f"ttl must be a number of seconds, not {type(ttl).__name__}")
    try:
        seconds = float(ttl)
    except OverflowError:
        seconds = math.inf
    if not 0 < seconds < math.inf:
        raise InvalidLease(f"ttl must be a finite number of seconds above 0, not {seconds}")
    return seconds


def _check_owner(owner: object) -> None:
    if not isinstance(owner, str):
        raise InvalidLease(f"owner must be a str, not {type(owner).__name__}")
    if not 0 < len(owner) <= MAX_OWNER_CHARS:
        raise InvalidLease(f"owner must have 1 to {MAX_OWNER_CHARS} characters, not {len(owner)}")
