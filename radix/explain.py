"""Why a path is not cached, or not all of it.

`explain` looks at a path from its root, as a match does, and tells how far it is cached; then it names a cause for each
token beyond. The causes that cost nothing to find are found in this order along the path::

    0          cached        known                              n
    ├── cached ──┼── evicted ──┼── diverged, or never seen ──────┤

*Known* is the longest prefix of the path that is cached now, or was when the ghost last saw it. There the path leaves
what is known. Some known path goes on there with another token: then it has *diverged*, and the rest of it is that one
event's consequence. Or none does: then it only goes on further than anything before it, and the rest was *never seen*.
A path that shares not even its first token with a known one was never seen either.

Tokens at `limit` and beyond that are known must run all the same, for their logits: *last token*.

All of it is pure: no recency moves, nothing is split.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from phloem.radix.ghost_node import GhostNode
from phloem.radix.namespace import Namespace
from phloem.radix.node import N, Node
from phloem.radix.packing import TOKEN_BYTES, narrow, token_at
from phloem.radix.tree import RadixTree, Tail


class MissReason(str, Enum):
    """Why tokens of a path are not reused."""

    NEVER_SEEN = "never_seen"  # no known path has them there
    DIVERGED = "diverged"  # the path left a known one at the first of them
    EVICTED = "evicted"  # they were cached, and had to make room
    NAMESPACE = "namespace"  # they are cached, but under another namespace
    LAST_TOKEN = "last_token"  # their logits are wanted, so that they must run although they are known
    BYPASSED = "bypassed"  # the caller did not ask the cache; never found here


@dataclass(frozen=True, slots=True)
class Miss:
    """A half-open interval [start, end) of a path's tokens that are not reused, for one reason."""

    start: int
    end: int
    reason: MissReason
    label: str | None = None  # whose path it is that diverges, or that was evicted; see `RadixCache.insert`
    token: int | None = None  # diverged: the path's token at `start`
    other_token: int | None = None  # diverged: the known path's token there
    namespace: Namespace | None = None  # namespace: the other one

    @property
    def num_tokens(self) -> int:
        """Tokens in it."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Explanation:
    """What of a path is cached, and why the rest is not: `misses` are contiguous and cover [cached_tokens, num_tokens)."""

    num_tokens: int
    cached_tokens: int  # whole blocks, and the rows to copy of one more
    misses: tuple[Miss, ...]

    def tokens(self, reason: MissReason | str) -> int:
        """How many tokens are missed for `reason`."""
        reason = MissReason(reason)
        return sum(miss.num_tokens for miss in self.misses if miss.reason is reason)


@dataclass(frozen=True, slots=True)
class _Reach:
    """How far one tree knows a path."""

    num_tokens: int
    label: str | None  # of the node that has the last of them
    other_token: int | None  # what a known path has next instead; None if none goes on
    other_label: str | None  # of the node that has it
    namespace: Namespace


def explain(
    resident: RadixTree[Node],
    ghost: RadixTree[GhostNode],
    namespace: Namespace,
    query: bytes,
    *,
    limit: int,
    others: Iterable[Namespace] = (),
) -> Explanation:
    """See `RadixCache.explain`, and the picture above.

    O(len(query)) as memory compares for each of the trees looked at, plus O(1) per node and per block found.

    Args:
        resident: What is cached.
        ghost: What was evicted.
        namespace: The path's.
        query: The path, packed.
        limit: How many leading tokens need not run if they are cached.
        others: Other namespaces, in whose cached paths to look for what `namespace` does not know.
    """
    num_tokens = len(query) // TOKEN_BYTES
    cached = _reach(resident, namespace, query)
    lost = _reach(ghost, namespace, query)
    known = max(cached.num_tokens, lost.num_tokens)
    misses = [
        Miss(cached.num_tokens, min(known, limit), MissReason.EVICTED, label=lost.label),
        Miss(limit, known, MissReason.LAST_TOKEN),
    ]
    reaches = [cached, lost]
    beyond = max((_reach(resident, name, query) for name in others), key=_length, default=cached)
    if beyond.num_tokens > known:
        misses.append(Miss(known, beyond.num_tokens, MissReason.NAMESPACE, namespace=beyond.namespace))
        reaches = [beyond]
    misses.append(_rest(query, reaches))
    return Explanation(
        num_tokens=num_tokens,
        cached_tokens=min(cached.num_tokens, limit),
        misses=tuple(miss for miss in misses if miss.start < miss.end),
    )


def _reach(tree: RadixTree[N], namespace: Namespace, packed: bytes) -> _Reach:
    query = narrow(packed, tree.token_bytes)
    place = tree.walk(tree.root(namespace), query)
    offset = place.num_blocks * tree.block_bytes
    tail = tree.tail(place, query[offset : offset + tree.block_bytes])
    last = tail.node if tail.node is not None and tail.num_tokens else place.node
    return _Reach(
        num_tokens=place.num_blocks * tree.block_size + tail.num_tokens,
        label=last.label,
        other_token=_next_token(tree, tail),
        other_label=None if tail.node is None else tail.node.label,
        namespace=namespace,
    )


def _rest(query: bytes, reaches: list[_Reach]) -> Miss:
    """The interval from where the furthest of `reaches` ends, possibly empty."""
    start, end = max(map(_length, reaches)), len(query) // TOKEN_BYTES
    for reach in reaches:
        if 0 < start == reach.num_tokens < end and reach.other_token is not None:
            return Miss(
                start,
                end,
                MissReason.DIVERGED,
                label=reach.other_label,
                token=token_at(query, start),
                other_token=reach.other_token,
            )
    return Miss(start, end, MissReason.NEVER_SEEN)


def _next_token(tree: RadixTree[N], tail: Tail[N]) -> int | None:
    """The token after those that agree; None where nothing goes on."""
    if tail.num_tokens * tree.token_bytes == len(tail.tokens):
        return None
    return token_at(tail.tokens, tail.num_tokens, token_bytes=tree.token_bytes)


def _length(reach: _Reach) -> int:
    return reach.num_tokens
