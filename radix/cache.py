"""The prefix cache: locks, admission, eviction and counters over a `RadixTree` and a `BlockPool`.

This is the door: it packs tokens, checks what callers hand in, words refusals, keeps statistics. What a path looks like
is the tree's business (`RadixTree`), which blocks exist the pool's (`BlockPool`), which nodes may go the residency's
(`Residency`), which of those first the policy's, how long a pin lasts the leases' (`LeaseBook`), and what was lost the
ghost's (`Ghost`). It is not thread-safe: one thread owns it.

Invariants, each proved by `RadixCache.check`:

- Every block has one owner: free + evictable + locked + private = all (rule 10).
- ``lock_refs`` of a node = locks held at the node + ``lock_refs`` of its children; hence a parent has at least as many
  as a child, and everything below an unlocked node is unlocked: all that counts as evictable can be evicted, leaf by
  leaf (rule 11).
- The eviction candidates are the unlocked leaves, no more and no fewer, in the order of their present keys (rule 12).
- A cleared tree holds locked nodes only, and is matched by nobody (rule 16).
- Of a node's locks, `pins` are those of leases that live; at idle there are no others (rule 13).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from phloem.radix.ages import HitAges
from phloem.radix.check import check_cache
from phloem.radix.counters import Counters
from phloem.radix.errors import (
    InvalidBlocks,
    InvalidLabel,
    InvalidNamespace,
    NothingToPin,
    OutOfBlocks,
)
from phloem.radix.explain import Explanation, explain
from phloem.radix.ghost import Ghost
from phloem.radix.leases import Lease, LeaseBook
from phloem.radix.namespace import Namespace
from phloem.radix.node import Node, NodeRef
from phloem.radix.packing import TOKEN_BYTES, Tokens, pack
from phloem.radix.policy import EvictionOrder, EvictionPolicy, policy_named
from phloem.radix.pool import BlockPool, Owner
from phloem.radix.refs import live_node, locked_node, ref_to
from phloem.radix.residency import Residency, unlocked_blocks
from phloem.radix.results import CacheStats, ClearResult, Grip, InsertResult, LeaseInfo, PrefixMatch
from phloem.radix.tree import Place, RadixTree

MAX_LABEL_CHARS = 256
GHOST_BYTES_PER_TOKEN = 4  # of the pool; a KV cache takes thousands
MIN_DEFAULT_GHOST_BYTES = 2**20


class RadixCache:
    """A cache of token paths in blocks; owner of its tree, and of the pool it was given.

    Every method that takes tokens takes any sequence of ints, or packed int32 (see `packing.pack`).

    >>> cache = RadixCache(BlockPool(8), block_size=2)
    >>> ns = Namespace(salt="tenant-a")
    >>> done = cache.insert(ns, [1, 2, 3, 4], cache.allocate(2))
    >>> hit = cache.match(ns, [1, 2, 3, 9])
    >>> hit.num_tokens, hit.blocks, hit.tail_tokens, hit.tail_block
    (2, [0], 1, 1)
    >>> grip = cache.acquire(ns, [1, 2, 9], num_blocks=2)
    >>> grip.blocks, grip.new_blocks
    ([0], [2])
    >>> done = cache.extend(grip.node, [9, 9], grip.new_blocks)
    >>> cache.unlock(done.node)
    >>> cache.evict(3), cache.stats().free
    (3, 8)
    """

    __slots__ = ("_ages", "_counters", "_ghost", "_leases", "_residency", "_tree", "_version", "pool")

    def __init__(
        self,
        pool: BlockPool,
        block_size: int = 16,
        *,
        policy: str | EvictionPolicy = "lru",
        max_pinned_blocks: int | None = None,
        ghost_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """An empty cache over `pool`, in which nobody else may move blocks from then on.

        Args:
            pool: All blocks that tree and callers share.
            block_size: Tokens per block.
            policy: Which unlocked leaf is evicted first: ``lru``, ``lfu``, ``fifo``, ``priority``, or one's own.
            max_pinned_blocks: How many blocks all leases together may protect; with None, half of the pool.
            ghost_bytes: How much memory the evicted paths may take that are remembered for `explain`; 0 for none; with
                None, 4 bytes for each token that the pool holds, but at least 1 MiB. A remembered token takes 2 to 4
                bytes by its vocabulary, and a node some 250: about 3 bytes a token in all on paths with 300 own tokens.
            clock: What leases are timed by, in seconds; must never go back.

        Raises:
            ValueError: `block_size` is not positive, `ghost_bytes` is negative, or `max_pinned_blocks` is negative
                or more than the pool has.
            UnknownPolicy: No policy has that name.
        """
        if block_size < 1:
            raise ValueError(f"block_size must be 1 or more, not {block_size}")
        if max_pinned_blocks is None:
            max_pinned_blocks = pool.num_blocks // 2
        if not 0 <= max_pinned_blocks <= pool.num_blocks:
            raise ValueError(f"max_pinned_blocks must be 0 to {pool.num_blocks}, not {max_pinned_blocks}")
        if ghost_bytes is None:
            ghost_bytes = max(GHOST_BYTES_PER_TOKEN * pool.num_blocks * block_size, MIN_DEFAULT_GHOST_BYTES)
        if ghost_bytes < 0:
            raise ValueError(f"ghost_bytes must be 0 or more, not {ghost_bytes}")
        self.pool = pool
        self._tree = RadixTree(block_size, Node.root_of)
        self._ghost = Ghost(block_size, max_bytes=ghost_bytes)
        order = EvictionOrder(policy_named(policy) if isinstance(policy, str) else policy)
        self._ages = HitAges(clock)
        self._residency = Residency(self._tree, pool, order, self._ghost, self._ages)
        self._leases = LeaseBook(self._residency, max_pinned_blocks=max_pinned_blocks, clock=clock)
        self._counters = Counters()
        self._version = 0

    @property
    def version(self) -> int:
        """Moves whenever what is cached does: until then, `match` finds for a path what it found before. O(1)."""
        return self._version

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._tree.block_size

    @property
    def policy(self) -> EvictionPolicy:
        """The order of eviction."""
        return self._residency.order.policy

    def match(self, namespace: Namespace, tokens: Tokens) -> PrefixMatch:
        """Finds the longest cached prefix of `tokens`. Changes nothing, not even recency.

        Costs a memory compare of the tokens, plus O(1) per node and O(1) per block of the result.

        To keep the last token of a prompt for the forward pass (it must run to give logits), leave it out of `tokens`:
        where that makes the path end inside a block, the rest of the block is found as the tail.

        Raises:
            InvalidTokens: `tokens` are no token ids.
            InvalidNamespace: `namespace` is not a `Namespace`.
        """
        query = pack(tokens)
        place = self._tree.walk(self._tree.root(namespace), query)
        tail = self._tree.tail(place, self._rest(place, query))
        return PrefixMatch(
            num_tokens=place.num_blocks * self._tree.block_size,
            blocks=place.blocks,
            node=ref_to(self.pool, place.node, place.num_blocks),
            tail_tokens=tail.num_tokens,
            tail_block=tail.block,
        )

    def explain(
        self,
        namespace: Namespace,
        tokens: Tokens,
        *,
        limit: int | None = None,
        across_namespaces: bool = False,
    ) -> Explanation:
        """Tells how much of `tokens` is cached, and why the rest is not. Changes nothing. Costs about two matches.

        Reasons of eviction and divergence hold as far as the ghost remembers; beyond, paths count as never seen.

        Args:
            namespace: The path's namespace.
            tokens: The path, up to its end: unlike `match`, this takes the last token of a prompt too.
            limit: How many leading tokens may be reused at most: n - 1 for an n-token prompt. None: all.
            across_namespaces: Look for the rest in other namespaces too, one match for each. It tells one tenant what
                another has cached, hence is for operators.

        Raises:
            InvalidTokens: `tokens` are no token ids.
            InvalidNamespace: `namespace` is not a `Namespace`.
            ValueError: `limit` is negative.
        """
        query = pack(tokens)
        num_tokens = len(query) // TOKEN_BYTES
        if limit is not None and limit < 0:
            raise ValueError(f"limit must be 0 or more, not {limit}")
        return explain(
            self._tree,
            self._ghost.tree,
            namespace,
            query,
            limit=num_tokens if limit is None else min(limit, num_tokens),
            others=[name for name in self._tree.roots if name != namespace] if across_namespaces else (),
        )

    def stats(self) -> CacheStats:
        """All counters. O(1)."""
        return self._counters.snapshot(self._residency, self._leases, self._ghost, self._ages)

    def check(self) -> None:
        """Proves every invariant. O(blocks + nodes), meant for tests.

        Raises:
            InvariantError: One does not hold; the message says which and where.
        """
        check_cache(self._residency, self._leases, self._ghost)

    def lock(self, ref: NodeRef) -> None:
        """Protects the path up to `ref` from eviction, until `unlock`. Counts. May split a node. O(nodes on the path).

        Raises:
            StaleNode: Blocks of the path have left the tree since `ref` was made; nothing was changed.
        """
        node = self._tree.split(live_node(self._residency, ref), ref.num_blocks)
        self._residency.lock(node)

    def unlock(self, ref: NodeRef) -> None:
        """Takes back one `lock`, and marks the path as used now. O(nodes on the path), O(log n) for n candidates.

        In a cleared tree, whatever no lock protects any more is freed at once.

        Raises:
            NotLocked: No lock is held at `ref`, or only those of leases; nothing was changed.
        """
        self._residency.unlock(locked_node(ref))

    def pin(self, namespace: Namespace, tokens: Tokens, *, ttl: float = 60.0, owner: str = "app") -> Lease:
        """Keeps what is cached of `tokens`, in whole blocks, from eviction for a time. May split a node.

        The lease ends `ttl` seconds after its last use: `Lease.renew`, or an admission that reuses the pinned path to
        its end. Until then it may be released; `clear` ends it too. Leases that are due end before anything that they
        might stand in the way of, and whenever `expire` is called. O(tokens) as a match, plus O(nodes on the path).

        Args:
            namespace: The path's namespace.
            tokens: The path. What of it is not cached, or not in whole blocks, is not pinned: see `Lease.num_tokens`.
            ttl: Its lifetime in seconds.
            owner: For whom; shown in `leases` and in refusals.

        Raises:
            NothingToPin: Not one whole block of the path is cached.
            PinRefused: More blocks than `max_pinned_blocks` would be pinned; the message says what is.
            InvalidLease: `ttl` is not a positive finite number, or `owner` not a text of 1 to 256 characters.
            InvalidTokens: `tokens` are no token ids.
            InvalidNamespace: `namespace` is not a `Namespace`.
        """
        query = pack(tokens)
        self._leases.expire()
        place = self._tree.walk(self._tree.root(namespace), query)
        if place.num_blocks == 0:
            raise NothingToPin(
                f"of {len(query) // TOKEN_BYTES} tokens, no whole block of {self.block_size} is cached in the "
                "namespace; run the prompt first, then pin it"
            )
        return self._leases.pin(namespace, place, ttl=ttl, owner=owner)

    def expire(self) -> int:
        """Ends the leases that are due, and says how many: to be called now and then, as once a step.

        O(1) when none is due; O(log leases) and O(nodes on the path) for each that is.
        """
        return self._leases.expire()

    def leases(self) -> tuple[LeaseInfo, ...]:
        """The leases that live, the first to end first. O(leases · log leases). Changes nothing."""
        return self._leases.infos()

    def acquire(
        self, namespace: Namespace, tokens: Tokens, *, num_blocks: int, spare: int = 0, priority: int = 0
    ) -> Grip:
        """Matches, locks and allocates as one step: all of it, or nothing. May split a node; may evict.

        The caller then has `num_blocks` blocks, the hit's and private ones, in this order; it gives them back with
        `unlock` and `free`, or moves them into the tree with `extend`. Blocks of the hit that nobody has locked yet
        do not count as evictable for this request. Hit counts and the statistics of admission move here, and leases
        on paths that it reuses to the end are renewed. Leases that are due end first.

        The tail block is not locked. This very allocation may evict it and even hand it out among `new_blocks`, its
        content as yet unharmed: copy its `tail_tokens` rows before anything is written in this step, and do so in the
        order of admission if several requests are admitted in it.

        Args:
            namespace: The path's namespace.
            tokens: What to look up. At most n - 1 tokens of an n-token prompt, so that one is left to compute.
            num_blocks: Length of the whole block table that the caller wants; no new block if the hit is longer.
            spare: How many more blocks must be left free or evictable, for what the caller has promised to others.
            priority: Raises the priority of what it hits.

        Raises:
            OutOfBlocks: The blocks cannot be had; nothing was changed but the count of refusals.
            InvalidTokens: `tokens` are no token ids.
            InvalidNamespace: `namespace` is not a `Namespace`.
        """
        query = pack(tokens)
        self._leases.expire()
        place = self._tree.walk(self._tree.root(namespace), query)
        needed = max(0, num_blocks - place.num_blocks)
        self._require_room(needed + spare, reserved=unlocked_blocks(place))
        tail = self._tree.tail(place, self._rest(place, query))
        if place.num_blocks:
            self._ages.count(place.node.last_used)
        node = self._tree.split(place.node, place.num_blocks)
        self._residency.lock(node)
        self._residency.hit(node, priority=priority)
        self._leases.use(node, tail)
        grip = Grip(
            num_tokens=place.num_blocks * self._tree.block_size,
            blocks=place.blocks,
            node=ref_to(self.pool, node, place.num_blocks),
            tail_tokens=tail.num_tokens,
            tail_block=tail.block,
            new_blocks=self._take(needed),
        )
        self._counters.count_admission(len(query) // TOKEN_BYTES, grip)
        return grip

    def allocate(self, count: int) -> list[int]:
        """Private blocks for the caller; evicts exactly what is short. O(count), O(log n) per node evicted.

        Leases that are due end first.

        Raises:
            OutOfBlocks: Too few are free or evictable; nothing was changed but the count of refusals.
            ValueError: `count` is negative.
        """
        if count < 0:
            raise ValueError(f"cannot allocate {count} blocks")
        self._leases.expire()
        self._require_room(count, reserved=0)
        return self._take(count)

    def free(self, blocks: Sequence[int]) -> None:
        """Gives private blocks back to the pool. O(len(blocks)).

        Raises:
            InvalidBlocks: One of them is not private (freed twice, or in the tree), unknown, or named twice; nothing
                was given back.
        """
        self.pool.free(blocks)

    def insert(
        self,
        namespace: Namespace,
        tokens: Tokens,
        blocks: Sequence[int],
        *,
        priority: int = 0,
        label: str | None = None,
    ) -> InsertResult:
        """Hands over the blocks of a whole path, from the root. May split a node. The new blocks start evictable.

        Where the tree has a block already, it stays, and the caller's own goes back to the pool: from now on the block
        table is `blocks` of the result. A block that the caller had from the tree at this very position is left alone.
        O(len(tokens)) as a memory compare, plus O(nodes on the path).

        Args:
            namespace: The path's namespace.
            tokens: The path. What it has beyond its last full block is ignored, since its block stays the caller's.
            blocks: One block for each full block of `tokens`.
            priority: Raises the priority of the whole path.
            label: Who puts the new blocks there, as a request's id; `explain` shows it to those who part from them.

        Raises:
            InvalidBlocks: Too few or too many blocks, or one of them is not the caller's; nothing was changed.
            InvalidLabel: `label` is neither None nor a text of up to 256 characters.
            InvalidTokens: `tokens` are no token ids.
            InvalidNamespace: `namespace` is not a `Namespace`.
        """
        _check_label(label)
        query, own = self._full_blocks(tokens, blocks)
        root = self._tree.root(namespace)
        place = self._tree.walk(root, query)
        kept = len(place.blocks)
        duplicates = [block for block, old in zip(own, place.blocks, strict=False) if block != old]
        self.pool.require(duplicates + own[kept:], Owner.PRIVATE)
        if own:
            self._tree.enter(root)
        self._version += kept < len(own)
        node = self._residency.graft(place, query, own[kept:], priority=priority, label=label, own_locks=0)
        self._residency.touch(node, priority=priority)
        self._discard_duplicates(duplicates)
        return InsertResult(blocks=place.blocks + own[kept:], node=ref_to(self.pool, node, node.end))

    def extend(
        self,
        ref: NodeRef,
        tokens: Tokens,
        blocks: Sequence[int],
        *,
        priority: int = 0,
        label: str | None = None,
    ) -> InsertResult:
        """Commits what follows a locked place, and moves the caller's lock from `ref` to its end. May split a node.

        Blocks that the tree has already (another branch was first) are adopted as in `insert`. A leaf that nobody but
        the caller has used grows in place, so decoding makes no chain of one-block nodes: amortised O(len(tokens)),
        independent of the depth.

        In a cleared tree this works as ever for its holder, and the blocks are freed when the last lock ends.

        Args:
            ref: Where the caller holds a lock; the reference is used up, `node` of the result replaces it.
            tokens: The tokens that follow `ref`. What they have beyond their last full block is ignored.
            blocks: One private block for each full block of `tokens`.
            priority: The priority of the new blocks.
            label: Who puts them there; see `insert`. A leaf grows in place only under its own label.

        Returns:
            The tree's blocks for `tokens` only, and the new end.

        Raises:
            NotLocked: No lock is held at `ref`.
            InvalidBlocks: Too few or too many blocks, or one of them is not private; nothing was changed.
            InvalidLabel: `label` is neither None nor a text of up to 256 characters.
            InvalidTokens: `tokens` are no token ids.
        """
        _check_label(label)
        query, own = self._full_blocks(tokens, blocks)
        start = locked_node(ref)
        self.pool.require(own, Owner.PRIVATE)
        place = self._tree.walk(start, query)
        kept = len(place.blocks)
        self._version += kept < len(own)
        own_locks = 1 if place.node is start else 0
        node = self._residency.graft(
            place, query, own[kept:], priority=priority, label=label, own_locks=own_locks
        )
        self._residency.move_lock(start, node)
        self._discard_duplicates(own[:kept])
        return InsertResult(blocks=place.blocks + own[kept:], node=ref_to(self.pool, node, node.end))

    def evict(self, count: int) -> int:
        """Evicts up to `count` blocks in the policy's order, and says how many: all it can. O(log n) per node.

        Raises:
            ValueError: `count` is negative.
        """
        if count < 0:
            raise ValueError(f"cannot evict {count} blocks")
        evicted = self._residency.evict(count)
        self._counters.evictions += evicted
        self._version += evicted > 0
        return evicted

    def clear(self, namespace: Namespace | None = None) -> ClearResult:
        """Makes everything cached in one namespace (or, with None, in all) unmatchable at once. O(nodes and blocks).

        What is unlocked is freed now, what is locked as its locks end; their holders go on undisturbed. Leases on what
        is cleared end, since nobody could use it; and what was evicted before is forgotten.

        Raises:
            InvalidNamespace: `namespace` is neither a `Namespace` nor None.
        """
        if namespace is None:
            roots = list(self._tree.roots.values())
        elif isinstance(namespace, Namespace):
            roots = [self._tree.roots[namespace]] if namespace in self._tree.roots else []
        else:
            raise InvalidNamespace(f"expected a Namespace or None, not {type(namespace).__name__}")
        before = self.pool.num_free
        self._version += 1
        self._leases.end_all(namespace)
        self._ghost.clear(namespace)
        locked = sum(self._residency.clear(root) for root in roots)
        return ClearResult(num_freed=self.pool.num_free - before, num_locked=locked)

    def _rest(self, place: Place[Node], query: bytes) -> bytes:
        """What of `query` follows `place`, up to one block; `query` began at the root."""
        offset = place.num_blocks * self._tree.block_bytes
        return query[offset : offset + self._tree.block_bytes]

    def _full_blocks(self, tokens: Tokens, blocks: Sequence[int]) -> tuple[bytes, list[int]]:
        query = pack(tokens)
        count = len(query) // self._tree.block_bytes
        if len(blocks) != count:
            raise InvalidBlocks(
                f"{len(query) // TOKEN_BYTES} tokens fill {count} blocks of {self.block_size}, not {len(blocks)}"
            )
        return query[: count * self._tree.block_bytes], list(blocks)

    def _take(self, count: int) -> list[int]:
        self.evict(max(0, count - self.pool.num_free))
        return self.pool.allocate(count)

    def _discard_duplicates(self, blocks: list[int]) -> None:
        self.pool.free(blocks)
        self._counters.duplicates += len(blocks)

    def _require_room(self, needed: int, *, reserved: int) -> None:
        if needed > self.pool.num_free + self._residency.evictable - reserved:
            self._counters.refusals += 1
            raise OutOfBlocks(self._residency.shortage(needed, reserved=reserved))


def _check_label(label: object) -> None:
    if label is None:
        return
    if not isinstance(label, str):
        raise InvalidLabel(f"label must be a str or None, not {type(label).__name__}")
    if len(label) > MAX_LABEL_CHARS:
        raise InvalidLabel(f"label has {len(label)} characters, more than the limit of {MAX_LABEL_CHARS}")
