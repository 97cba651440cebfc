"""What a search may spend, and what it has."""

from __future__ import annotations

from dataclasses import dataclass, fields

from phloem.runtime.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of a search; None is no limit. A search that comes to one stops, and can go on with a larger budget.

    Raises:
        InvalidRequest: A limit is not a whole number of at least 1.
    """

    max_tokens: int | None = None
    """Tokens that are sampled, whatever was cached, so that a warm cache and a cold one search alike. No step begins
    that could exceed it; answers that a `Value` asks the model for count once they are there."""

    max_blocks: int | None = None
    """KV blocks that branches of the search may hold at once. The branches used longest ago keep only their tokens
    then; their KV stays cached while nobody else needs the room."""

    max_nodes: int | None = None
    """Nodes of the tree, pruned ones included. What a function proposes for one node may exceed it."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if value is not None and not good:
                raise InvalidRequest(
                    f"{limit.name} must be a whole number of at least 1, or None, not {value!r}",
                    field=limit.name,
                )


@dataclass(slots=True)
class Ledger:
    """What was spent of a budget, and what is set aside for steps under way."""

    budget: Budget
    tokens: int = 0
    """Sampled so far."""

    nodes: int = 1
    reserved_tokens: int = 0
    reserved_nodes: int = 0

    @property
    def tokens_left(self) -> int | None:
        """Tokens that are neither spent nor set aside; None when there is no limit."""
        limit = self.budget.max_tokens
        return None if limit is None else limit - self.tokens - self.reserved_tokens

    @property
    def nodes_left(self) -> int | None:
        """The same for nodes."""
        limit = self.budget.max_nodes
        return None if limit is None else limit - self.nodes - self.reserved_nodes

    @property
    def is_limited(self) -> bool:
        """Whether a step may be refused."""
        return self.budget.max_tokens is not None or self.budget.max_nodes is not None

    def reserve(self, *, tokens: int, nodes: int) -> bool:
        """Set so much aside; False when that is not there, and then nothing changes."""
        left = ((self.tokens_left, tokens), (self.nodes_left, nodes))
        if any(there is not None and there < needed for there, needed in left):
            return False
        self.reserved_tokens += tokens
        self.reserved_nodes += nodes
        return True

    def free(self, *, tokens: int, nodes: int) -> None:
        """Give back what was set aside."""
        self.reserved_tokens -= tokens
        self.reserved_nodes -= nodes
