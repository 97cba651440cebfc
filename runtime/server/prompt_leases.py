"""Leases on the beginnings of prompts that clients marked as worth keeping: one for each, taken once the prompt was computed.

A lease lives for its ttl after the last use. Within one key's leases, what one protects beyond a shorter one on the same prompt is
what counts, if the shorter one lives as long: every use of the longer one is one of it too. Where a key's limit or the engine's budget
does not hold a lease, there is none; the tokens are in the cache all the same for as long as there is room, as everything is.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeAlias

from phloem.radix import Lease, Namespace
from phloem.runtime.engine import Engine
from phloem.runtime.errors import CacheFull, InvalidRequest
from phloem.runtime.server.auth import Tenant

TOKEN_BYTES = array("i").itemsize


@dataclass(frozen=True, slots=True)
class Mark:
    """The end of what is to be kept of a prompt."""

    num_tokens: int
    ttl_s: float


@dataclass(slots=True, eq=False)
class _Held:
    """A lease, or the claim to one that is being taken."""

    num_tokens: int
    own_tokens: int
    """What it protects beyond others."""

    lease: Lease | None = None
    is_being_taken: bool = True

    @property
    def has_ended(self) -> bool:
        return not self.is_being_taken and (self.lease is None or self.lease.ended is not None)


_HeldByKey: TypeAlias = "dict[tuple[bytes, float], _Held]"
"""By the digest of a prompt's beginning, and the ttl in seconds."""


class PromptLeases:
    """Owner of the leases on prompts, by key. Used by the event loop only."""

    def __init__(self, engine: Engine, max_tokens_per_key: int) -> None:
        self._engine = engine
        self._max_tokens = max_tokens_per_key
        self._held: defaultdict[bytes, _HeldByKey] = defaultdict(dict)

    async def hold(
        self,
        tenant: Tenant,
        token_ids: Sequence[int],
        marks: Sequence[Mark],
        namespace: Namespace,
        *,
        num_pinned: int,
    ) -> list[Mark]:
        """Take or keep the leases of a prompt that has been computed; return the marks that have one.

        Args:
            tenant: Whose prompt it is.
            token_ids: The prompt.
            marks: The first one first.
            namespace: The prompt's.
            num_pinned: What the tenant's pins take of its limit.
        """
        if not marks or not self._engine.config.prefix_cache:
            return []
        held = self._living(tenant)
        lengths = {each.num_tokens for each in held.values()} | {mark.num_tokens for mark in marks}
        digests = _digests(namespace, token_ids, lengths)
        limit = self._max_tokens - num_pinned
        new = [mark for mark in marks if self._claim(held, mark, digests, limit)]
        await asyncio.gather(*(self._take(held, mark, digests, token_ids, namespace) for mark in new))
        return [mark for mark in marks if (digests[mark.num_tokens], mark.ttl_s) in held]

    def num_tokens(self, tenant: Tenant) -> int:
        """Return how many tokens a tenant's leases count for. O(leases of the tenant)."""
        return sum(each.own_tokens for each in self._living(tenant).values())

    def _living(self, tenant: Tenant) -> _HeldByKey:
        held = self._held[tenant.root]
        for key in [key for key, each in held.items() if each.has_ended]:
            del held[key]
        return held

    def _claim(self, held: _HeldByKey, mark: Mark, digests: Mapping[int, bytes], limit: int) -> bool:
        """Claim a lease within what is left of the key's limit. False: it is there, or there is no room for it."""
        key = (digests[mark.num_tokens], mark.ttl_s)
        if key in held:
            return False
        known = max(
            (
                each.num_tokens
                for (digest, ttl_s), each in held.items()
                if ttl_s >= mark.ttl_s
                and each.num_tokens <= mark.num_tokens
                and digests.get(each.num_tokens) == digest
            ),
            default=0,
        )
        own_tokens = max(mark.num_tokens - known, self._engine.config.block_size)
        if sum(each.own_tokens for each in held.values()) + own_tokens > limit:
            return False
        held[key] = _Held(mark.num_tokens, own_tokens)
        return True

    async def _take(
        self,
        held: _HeldByKey,
        mark: Mark,
        digests: Mapping[int, bytes],
        token_ids: Sequence[int],
        namespace: Namespace,
    ) -> None:
        """Take the lease that was claimed, or give the claim up."""
        key = (digests[mark.num_tokens], mark.ttl_s)
        claim = held[key]
        beginning = array("i", token_ids[: mark.num_tokens])
        try:
            with self._engine.branch(beginning, namespace=namespace) as branch:
                await branch.apin(ttl=mark.ttl_s, owner="cache_control")
                claim.lease = branch.lease
        except (CacheFull, InvalidRequest):  # no room for it, or not one whole block
            pass
        finally:
            claim.is_being_taken = False
            if claim.lease is None:
                del held[key]


def _digests(namespace: Namespace, token_ids: Sequence[int], lengths: Iterable[int]) -> dict[int, bytes]:
    """Return digests of a prompt's beginnings, of the lengths that it has. O(len(token_ids))."""
    packed = memoryview(array("i", token_ids)).cast("B")
    running, done = sha256((namespace.salt or "").encode()), 0
    found = {}
    for length in sorted(each for each in lengths if each <= len(token_ids)):
        end = length * TOKEN_BYTES
        running.update(packed[done:end])
        done = end
        found[length] = running.digest()
    return found
