"""Pins that clients hold by an id: leases on prompts, of one tenant each, on a limited number of tokens."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from phloem.runtime.branch import Branch
from phloem.runtime.server.auth import Tenant
from phloem.runtime.server.errors import ApiError, Failure, invalid, not_found
from phloem.runtime.server.openai_fields import new_id


@dataclass(frozen=True, slots=True, eq=False)
class HeldPin:
    """A pin under its id; owned by the store."""

    id: str
    branch: Branch
    """Was released; it is the handle on the lease."""

    num_tokens: int
    """What is pinned, in whole blocks."""

    ttl_s: float
    created: int
    """In seconds since 1970."""


@dataclass(frozen=True, slots=True)
class PinState:
    """A pin, and how long it lives if it is not used."""

    pin: HeldPin
    expires_in_s: float


class PinStore:
    """Pins by tenant and id; another tenant's id is an unknown one. Used by the event loop only.

    A lease that is used lives on, which only the engine knows: whoever asks for pins waits for the engine's answer.
    """

    def __init__(
        self, max_tokens_per_key: int, *, num_leased: Callable[[Tenant], int], retry_after_s: int
    ) -> None:
        """Hold none yet; `num_leased` tells what else a tenant keeps of the tokens that it may."""
        self._max_tokens = max_tokens_per_key
        self._num_leased = num_leased
        self._retry_after_s = retry_after_s
        self._held: defaultdict[bytes, dict[str, HeldPin]] = defaultdict(dict)
        self._promised: Counter[bytes] = Counter()
        """Tokens that are being pinned, by tenant."""

    @asynccontextmanager
    async def room(
        self, tenant: Tenant, num_tokens: int
    ) -> AsyncIterator[Callable[[Branch, int, float], PinState]]:
        """Promise `num_tokens` to a tenant, and give a function that keeps a pin: the branch, how many tokens, and its ttl in seconds.

        Raises:
            ApiError: 400, a tenant may not pin so many tokens; 429, not so many more.
        """
        await self._require_room(tenant, num_tokens)
        self._promised[tenant.root] += num_tokens

        def keep(branch: Branch, num_pinned: int, ttl_s: float) -> PinState:
            held = HeldPin(new_id("pin_"), branch, num_pinned, ttl_s, int(time.time()))
            self._held[tenant.root][held.id] = held
            return PinState(held, ttl_s)

        try:
            yield keep
        finally:
            self._promised[tenant.root] -= num_tokens

    async def all_of(self, tenant: Tenant) -> list[PinState]:
        """Return a tenant's pins that live, the oldest first."""
        held = list(self._held[tenant.root].values())
        lasting = await Branch.apinned_s_of([pin.branch for pin in held])
        states = [PinState(pin, each_s) for pin, each_s in zip(held, lasting, strict=True)]
        for state in states:
            if not state.expires_in_s:
                self._held[tenant.root].pop(state.pin.id, None)
        return [state for state in states if state.expires_in_s]

    async def num_tokens(self, tenant: Tenant) -> int:
        """Return how many tokens a tenant has pinned, or was promised."""
        if tenant.root not in self._held and not self._promised[tenant.root]:
            return 0
        living = await self.all_of(tenant)
        return sum(state.pin.num_tokens for state in living) + self._promised[tenant.root]

    async def drop(self, tenant: Tenant, pin_id: str) -> None:
        """End a pin.

        Raises:
            ApiError: 404, the tenant has none of that id, or no more.
        """
        await self.all_of(tenant)  # those that have ended are gone then
        held = self._held[tenant.root].pop(pin_id, None)
        if held is None:
            raise not_found(f"there is no pin {pin_id!r}, or no more", "pin_id")
        await held.branch.aunpin()

    async def _require_room(self, tenant: Tenant, num_tokens: int) -> None:
        if num_tokens > self._max_tokens:
            raise invalid(
                f"the prompt has {num_tokens} tokens; a key may pin {self._max_tokens} (max_pinned_tokens_per_key)"
            )
        pinned = await self.num_tokens(tenant) + self._num_leased(tenant)
        if pinned + num_tokens > self._max_tokens:
            raise self.full(
                f"the key keeps {pinned} tokens, and {num_tokens} more would exceed "
                f"max_pinned_tokens_per_key, {self._max_tokens}: delete some, or wait for one to end"
            )

    def full(self, message: str) -> ApiError:
        """Return the error of a pin for which there is no room now."""
        return ApiError(
            Failure(429, "rate_limit", message, code="too_many_pins", retry_after_s=self._retry_after_s)
        )
