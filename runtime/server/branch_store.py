"""Branches that clients hold by an id: of one tenant each, in limited number, released when nobody has used them for a while."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from phloem.runtime.branch import Branch
from phloem.runtime.server.auth import Tenant
from phloem.runtime.server.errors import ApiError, Failure, invalid, not_found
from phloem.runtime.server.openai_fields import new_id


@dataclass(slots=True, eq=False)
class HeldBranch:
    """A branch under its id; owned by the store."""

    id: str
    branch: Branch
    parent_id: str | None
    created: int
    """In seconds since 1970."""

    num_users: int = 0
    """Requests that work on it now."""

    used_at_s: float = 0.0
    """By the store's clock, when the last of them ended."""


Key = tuple[bytes, str]
"""Whose it is, and its id."""


class BranchStore:
    """Held branches by tenant and id; another tenant's id is an unknown one. Used by the event loop only.

    A branch is *busy* while requests work on it, else *idle*; an idle one is released `idle_s` seconds after its last use.
    """

    def __init__(
        self,
        *,
        max_branches: int,
        max_per_key: int,
        idle_s: float,
        retry_after_s: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_expired = 0
        self._max_branches = max_branches
        self._max_per_key = max_per_key
        self._idle_s = idle_s
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._held: dict[Key, HeldBranch] = {}
        self._idle: OrderedDict[Key, None] = OrderedDict()
        """Those that are not busy, used longest ago first."""

        self._num_taken: Counter[bytes] = Counter()
        """By tenant: the branches held, and the places promised."""

    def __len__(self) -> int:
        return len(self._held)

    @contextmanager
    def room(
        self, tenant: Tenant, count: int
    ) -> Iterator[Callable[[Sequence[Branch], str | None], list[HeldBranch]]]:
        """Promise places for `count` branches, and give a function that puts branches into them, with their parent's id.

        Raises:
            ApiError: 400, a tenant may not hold so many; 429, there are not so many places left.
        """
        self._require_room(tenant, count)
        self._num_taken[tenant.root] += count
        num_kept = 0

        def keep(branches: Sequence[Branch], parent_id: str | None) -> list[HeldBranch]:
            nonlocal num_kept
            num_kept += len(branches)
            return [self._keep(tenant, branch, parent_id) for branch in branches]

        try:
            yield keep
        finally:
            self._give_back(tenant.root, count - num_kept)

    @contextmanager
    def use(self, tenant: Tenant, branch_id: str) -> Iterator[HeldBranch]:
        """Give a branch, which is busy until the context is left.

        Raises:
            ApiError: 404, the tenant has none of that id, or no more.
        """
        self.expire()
        key = (tenant.root, branch_id)
        held = self._held.get(key)
        if held is None:
            raise _unknown(branch_id)
        held.num_users += 1
        self._idle.pop(key, None)
        try:
            yield held
        finally:
            held.num_users -= 1
            held.used_at_s = self._clock()
            if held.num_users == 0 and key in self._held:
                self._idle[key] = None

    def drop(self, tenant: Tenant, branch_id: str) -> None:
        """Release a branch, and end what works on it.

        Raises:
            ApiError: 404, as for `use`.
        """
        self.expire()
        if (tenant.root, branch_id) not in self._held:
            raise _unknown(branch_id)
        self._release((tenant.root, branch_id))

    def clear(self) -> None:
        """Release all branches."""
        for key in list(self._held):
            self._release(key)

    def all_of(self, tenant: Tenant) -> list[HeldBranch]:
        """Return a tenant's branches, the oldest first. O(branches of all)."""
        self.expire()
        return [held for (root, _), held in self._held.items() if root == tenant.root]

    def expires_in_s(self, held: HeldBranch) -> float | None:
        """Return how long a branch will be held if it is not used; None while it is."""
        return None if held.num_users else max(0.0, held.used_at_s + self._idle_s - self._clock())

    def expire(self) -> None:
        """Release the branches that nobody has used for too long. O(1) when there is none."""
        due = self._clock() - self._idle_s
        while self._idle and self._held[next(iter(self._idle))].used_at_s <= due:
            self._release(next(iter(self._idle)))
            self.num_expired += 1

    def _require_room(self, tenant: Tenant, count: int) -> None:
        self.expire()
        if count > self._max_per_key:
            raise invalid(
                f"the request asks for {count} branches; a key may hold {self._max_per_key} (max_branches_per_key)"
            )
        if self._num_taken[tenant.root] + count > self._max_per_key:
            raise self._full(
                f"the key holds {self._num_taken[tenant.root]} branches, and {count} more would exceed "
                f"max_branches_per_key, {self._max_per_key}: delete some"
            )
        if self._num_taken.total() + count > self._max_branches:
            raise self._full(f"the server holds no more than {self._max_branches} branches (max_branches)")

    def _full(self, message: str) -> ApiError:
        return ApiError(
            Failure(429, "rate_limit", message, code="too_many_branches", retry_after_s=self._retry_after_s)
        )

    def _keep(self, tenant: Tenant, branch: Branch, parent_id: str | None) -> HeldBranch:
        held = HeldBranch(new_id("branch_"), branch, parent_id, int(time.time()), used_at_s=self._clock())
        self._held[tenant.root, held.id] = held
        self._idle[tenant.root, held.id] = None
        return held

    def _release(self, key: Key) -> None:
        self._idle.pop(key, None)
        self._held.pop(key).branch.release()
        self._give_back(key[0], 1)

    def _give_back(self, root: bytes, count: int) -> None:
        self._num_taken[root] -= count
        if not self._num_taken[root]:
            del self._num_taken[root]


def _unknown(branch_id: str) -> ApiError:
    return not_found(f"there is no branch {branch_id!r}, or no more", "branch_id")
