"""What live paths hold of the radix cache: admission, growth, commit, fork, suspension. The only caller of RadixCache.

Paths are *active* (a request runs on them) or *idle* (a branch keeps them for later). When memory is short, first the tails of finished
paths go (`tail_store.py`), then the idle path that was used longest ago is suspended. That costs its owner a few recomputed
tokens, since its whole blocks stay in the tree until somebody needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from phloem.radix import (
    CacheStats,
    Explanation,
    Lease,
    Miss,
    MissReason,
    Namespace,
    NodeRef,
    OutOfBlocks,
    RadixCache,
)
from phloem.runtime.batch import RowCopy
from phloem.runtime.explain import of_first, with_known
from phloem.runtime.path import Path, SharedTail, Sighting
from phloem.runtime.tail_store import Place, Tail, TailStore

TAIL_SHARE = 16
"""One block in so many may hold the tail of a finished path."""

Result = TypeVar("Result")


class PathCache:
    """Owner of every path's block table, lock and tail.

    With `prefix_cache` off, paths hold private blocks only: nothing is matched, committed or shared.
    """

    def __init__(self, cache: RadixCache, *, prefix_cache: bool = True) -> None:
        self.cache = cache
        self.block_size = cache.block_size
        self.prefix_cache = prefix_cache
        self.tails = TailStore(max_tails=max(1, cache.pool.num_blocks // TAIL_SHARE))
        self._idle: dict[Path, None] = {}
        """Resident idle paths, used longest ago first."""
        self._kept: dict[Path, NodeRef] = {}
        """Locks for suspended paths, on what the tree has of them; kept longest first."""

    @property
    def num_idle(self) -> int:
        """Idle paths that hold something."""
        return len(self._idle)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self.cache.pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def cached_tokens(self, path: Path, *, reusable: int) -> int:
        """How many whole-block tokens of a path's first `reusable` ones the tree has. Changes nothing."""
        if not self.prefix_cache:
            return 0
        return min(self._seen(path).num_tokens, reusable - reusable % self.block_size)

    def explain(self, path: Path, *, reusable: int, num_tokens: int | None = None) -> Explanation:
        """Tell how much of a path needs no computing, and why the rest does. Changes nothing.

        Args:
            path: What it holds itself counts as cached.
            reusable: How many of its first tokens may come from the cache.
            num_tokens: How many of its first tokens to tell of. None: all.
        """
        num_tokens = len(path.tokens) if num_tokens is None else num_tokens
        if not self.prefix_cache:
            return Explanation(num_tokens, 0, (Miss(0, num_tokens, MissReason.BYPASSED),))
        found = self.cache.explain(path.namespace, path.tokens, limit=reusable)
        known = with_known(found, max(path.num_computed, self._reach(path)), limit=reusable)
        return of_first(known, num_tokens)

    def pin(self, path: Path, *, ttl: float, owner: str) -> Lease:
        """Keep the whole blocks of a path from eviction for a time.

        Raises:
            NothingToPin: Not one whole block of it is cached.
            PinRefused: The budget for pins does not hold it.
        """
        return self.cache.pin(path.namespace, path.tokens, ttl=ttl, owner=owner)

    def expire(self) -> None:
        """End the leases whose time is over."""
        self.cache.expire()

    def stats(self) -> CacheStats:
        """Return the cache's counters and the state of its pool. An idle engine has no steps in which leases end: they do here."""
        self.expire()
        return self.cache.stats()

    def check(self) -> None:
        """Prove the cache's invariants.

        Raises:
            InvariantError: One does not hold.
        """
        self.cache.check()

    # Active paths

    def admit(self, path: Path, *, reusable: int, num_tokens: int, spare: int = 0) -> list[RowCopy]:
        """Make a suspended or idle path active: lock its cached prefix, and give it room for `num_tokens`.

        Args:
            path: What it has computed already is used, unless the tree has more.
            reusable: How many of its first tokens need no computing; at least the rest will be computed.
            num_tokens: How many will be computed at all.
            spare: How many blocks more must be left free or evictable. Only for a path that is suspended.

        Returns:
            Copies to make before the step writes, in this order.

        Raises:
            OutOfBlocks: Too few blocks, even after every idle path was suspended. The path is suspended or idle.
        """
        self._idle.pop(path, None)
        if path.num_committed <= reusable < path.num_computed:
            path.num_computed = reusable  # the rest runs again, for its logits
        if path.is_resident and not self._is_best_as_it_is(path, reusable):
            self.release(path)
        try:
            if path.is_resident:
                return self.grow(path, num_tokens)
            tail = self._find_tail(path, reusable)  # now: it may be dropped to make room for this very path
            return self._suspending_idle(lambda: self._acquire(path, reusable, num_tokens, spare, tail))
        except OutOfBlocks:
            self.park(path)
            raise

    def grow(self, path: Path, num_tokens: int) -> list[RowCopy]:
        """Give an active path room for `num_tokens`, and a tail of its own to write to. All of it, or nothing.

        Returns:
            Copies to make before the step writes, in this order.

        Raises:
            OutOfBlocks: Too few blocks, even after every idle path was suspended.
        """
        if path.tail is None and self.blocks_for(num_tokens) <= len(path.block_table):
            return []  # as for most tokens that are decoded
        return self._suspending_idle(lambda: self._grow(path, num_tokens))

    def commit(self, path: Path, num_computed: int) -> None:
        """Record what a step has computed, and hand blocks that are now full to the tree (rule 7).

        Where the tree has such a block already, the path adopts it (rule 8).
        """
        path.num_computed = num_computed
        start, end = path.num_committed, num_computed - num_computed % self.block_size
        if not self.prefix_cache or end == start:
            return
        first, last = start // self.block_size, end // self.block_size
        assert path.ref is not None
        done = self.cache.extend(
            path.ref, path.tokens[start:end], path.block_table[first:last], label=path.label
        )
        path.ref = done.node
        path.block_table[first:last] = done.blocks
        path.num_committed = end

    def release(self, path: Path) -> None:
        """Give back all that a path holds: it is suspended now. What it committed stays in the tree while there is room."""
        self._idle.pop(path, None)
        self._drop_kept(path)
        if path.ref is not None:
            self.cache.unlock(path.ref)
        self._free_from(path, path.num_committed // self.block_size)
        path.ref = None
        path.block_table = []
        path.num_committed = path.num_computed = 0

    def retire(self, path: Path) -> None:
        """Release a path that nobody goes on with, but keep its tail for others that begin alike."""
        self._keep_tail(path)
        self.release(path)

    def keep(self, path: Path) -> None:
        """Lock what the tree has of a suspended path, until it is admitted or released, or others need the memory more."""
        hit = self.cache.match(path.namespace, path.tokens)
        if hit.num_tokens == 0:
            return
        self.cache.lock(hit.node)
        self._drop_kept(path)
        self._kept[path] = hit.node

    def drop_kept(self) -> bool:
        """Give up the lock of the path that was kept first. False: there is none."""
        if not self._kept:
            return False
        self._drop_kept(next(iter(self._kept)))
        return True

    def clear(self) -> None:
        """Forget all that is cached. Active and idle paths keep what they hold."""
        self.cache.free(self.tails.clear())
        self.cache.clear()

    # Idle paths

    def park(self, path: Path) -> None:
        """Make an active path idle: it keeps its lock and its tail, and gives back blocks that it has not written to."""
        self._free_from(path, self.blocks_for(path.num_computed))
        if path.is_resident:
            self._idle[path] = None

    def fork(self, path: Path, num_tokens: int) -> Path:
        """Return a new idle path of the first `num_tokens` tokens, sharing all KV that there is for them.

        Whole blocks are shared through the tree, the tail's rows until one of the sharers writes. O(num_tokens) to copy
        the token ids; no KV is copied.
        """
        child = Path(path.namespace, path.tokens[:num_tokens])
        if path.ref is None:
            return child
        computed = min(num_tokens, path.num_computed)
        if computed >= path.num_committed:
            self._share(path, child, computed)
        else:
            self._lock_prefix(child, computed - computed % self.block_size)
        if child.is_resident:
            self._idle[child] = None
        return child

    # Parts of the above

    def _is_best_as_it_is(self, path: Path, reusable: int) -> bool:
        if path.num_computed > reusable:
            # Tokens whose logits are wanted are in whole blocks, which must not be written again.
            return False
        if not self.prefix_cache:
            return True
        return min(self._reach(path), reusable) <= path.num_computed

    def _seen(self, path: Path) -> Sighting:
        """Look how much of a path the tree has; a memory compare, unless neither path nor cache have changed since the last time."""
        seen, version, path_len = path.sighting, self.cache.version, len(path.tokens)
        if seen is None or seen.version != version or seen.path_len != path_len:
            hit = self.cache.match(path.namespace, path.tokens)
            last_block = hit.blocks[-1] if hit.blocks else None
            seen = Sighting(version, path_len, hit.num_tokens, hit.tail_tokens, last_block)
            path.sighting = seen
        return seen

    def _acquire(
        self, path: Path, reusable: int, num_tokens: int, spare: int, tail: tuple[Tail, int] | None
    ) -> list[RowCopy]:
        num_blocks = self.blocks_for(num_tokens)
        if not self.prefix_cache:
            path.block_table = self.cache.allocate(num_blocks)
            return []
        with memoryview(path.tokens) as tokens:
            grip = self.cache.acquire(path.namespace, tokens[:reusable], num_blocks=num_blocks, spare=spare)
        self._drop_kept(path)
        path.ref = grip.node
        path.block_table = [*grip.blocks, *grip.new_blocks]
        path.num_committed = grip.num_tokens
        source, rows = grip.tail_block, grip.tail_tokens
        # Either block may be among the new ones by now: it is copied before anybody writes to it.
        if tail is not None and tail[1] > rows:
            source, rows = tail[0].block, tail[1]
            self.tails.touch(tail[0])
        path.num_computed = grip.num_tokens + rows
        return [] if source is None else [RowCopy(source, grip.new_blocks[0], rows)]

    def _find_tail(self, path: Path, reusable: int) -> tuple[Tail, int] | None:
        """Find a kept tail with rows for the first `reusable` tokens of a suspended path, and how many it has of them."""
        if not self.prefix_cache:
            return None
        seen = self._seen(path)
        rest = path.tokens[seen.num_tokens : min(reusable, seen.num_tokens + self.block_size)]
        return self.tails.find(self._place_after(path.namespace, seen.last_block), rest) if rest else None

    def _drop_kept(self, path: Path) -> None:
        ref = self._kept.pop(path, None)
        if ref is not None:
            self.cache.unlock(ref)

    def _place(self, path: Path) -> Place:
        """Where the path's tail begins."""
        whole = path.num_committed // self.block_size
        return self._place_after(path.namespace, path.block_table[whole - 1] if whole else None)

    def _place_after(self, namespace: Namespace, block: int | None) -> Place:
        return namespace, block, 0 if block is None else self.cache.pool.life(block)

    def _reach(self, path: Path) -> int:
        """How far the tree and a kept tail go together along a path."""
        seen = self._seen(path)
        rest = path.tokens[seen.num_tokens : seen.num_tokens + self.block_size]
        kept = self.tails.find(self._place_after(path.namespace, seen.last_block), rest)
        return seen.num_tokens + max(seen.tail_tokens, kept[1] if kept else 0)

    def _keep_tail(self, path: Path) -> None:
        rows = path.num_computed - path.num_committed
        shared = path.tail is not None and path.tail.num_sharers > 1
        if not self.prefix_cache or path.ref is None or rows == 0 or shared:
            return
        index = path.num_committed // self.block_size
        tokens = path.tokens[path.num_committed : path.num_computed]
        tail = Tail(self._place(path), tokens, path.block_table.pop(index))
        path.tail = None
        path.num_computed = path.num_committed
        self.cache.free(self.tails.keep(tail))

    def _grow(self, path: Path, num_tokens: int) -> list[RowCopy]:
        tail = path.tail if num_tokens > path.num_computed else None
        needs_own_tail = tail is not None and tail.num_sharers > 1
        short = max(0, self.blocks_for(num_tokens) - len(path.block_table))
        new_blocks = self.cache.allocate(short + needs_own_tail)
        copies = []
        if tail is not None:
            if needs_own_tail:
                own = new_blocks.pop()
                copies.append(RowCopy(tail.block, own, path.num_computed % self.block_size))
                path.block_table[path.num_committed // self.block_size] = own
                tail.num_sharers -= 1
            path.tail = None
        path.block_table += new_blocks
        return copies

    def _share(self, path: Path, child: Path, computed: int) -> None:
        """Lock the whole committed interval for the child too, and let it read the parent's tail."""
        assert path.ref is not None
        whole = path.num_committed // self.block_size
        self.cache.lock(path.ref)
        child.ref = path.ref
        child.block_table = path.block_table[:whole]
        child.num_committed = path.num_committed
        child.num_computed = computed
        if computed > path.num_committed:
            block = path.block_table[whole]
            if path.tail is None:
                path.tail = SharedTail(block, num_sharers=1)
            path.tail.num_sharers += 1
            child.tail = path.tail
            child.block_table.append(block)

    def _lock_prefix(self, child: Path, num_tokens: int) -> None:
        """Lock so many whole-block tokens, which the parent's lock keeps in the tree (unless that tree was cleared)."""
        hit = self.cache.match(child.namespace, child.tokens[:num_tokens])
        if hit.num_tokens == 0:
            return
        self.cache.lock(hit.node)
        child.ref = hit.node
        child.block_table = hit.blocks
        child.num_committed = child.num_computed = hit.num_tokens

    def _free_from(self, path: Path, index: int) -> None:
        """Give back the private blocks from `index` of the block table on; a tail that others read as well stays theirs."""
        private = path.block_table[index:]
        del path.block_table[index:]
        place = path.num_committed // self.block_size - index
        if path.tail is not None and place >= 0:
            path.tail.num_sharers -= 1
            if path.tail.num_sharers > 0:
                del private[place]
            path.tail = None
        self.cache.free(private)

    def _suspending_idle(self, action: Callable[[], Result]) -> Result:
        """Run an action that may raise OutOfBlocks, dropping tails and suspending idle paths until it does not."""
        while True:
            try:
                return action()
            except OutOfBlocks:
                if len(self.tails):
                    self.cache.free([self.tails.pop_oldest()])
                elif self._idle:
                    self.release(next(iter(self._idle)))
                else:
                    raise
