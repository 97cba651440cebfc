"""`Mirror` does each operation on a RadixCache and on the oracle, and compares answers, errors and contents."""

from __future__ import annotations

from dataclasses import dataclass

from naive_cache import NaiveCache, NaiveLease, Spot, Tokens

from phloem.radix import (
    BlockPool,
    InvalidBlocks,
    Lease,
    LeaseEnded,
    Namespace,
    NodeRef,
    NothingToPin,
    NotLocked,
    OutOfBlocks,
    PinRefused,
    RadixCache,
    StaleNode,
)


@dataclass
class Branch:
    """A holder of a lock and of private blocks, as a request is."""

    ref: NodeRef
    spot: Spot
    private: list[int]
    planned: Tokens = ()  # what it was admitted for and has not committed yet


class Mirror:
    """A real cache and the oracle, driven side by side."""

    def __init__(self, num_blocks: int, block_size: int, policy: str, *, ghost_bytes: int = 10**9) -> None:
        budget = max(1, num_blocks // 2)
        self.naive = NaiveCache(num_blocks, block_size, policy, budget)
        self.real = RadixCache(
            BlockPool(num_blocks),
            block_size,
            policy=policy,
            max_pinned_blocks=budget,
            ghost_bytes=ghost_bytes,
            clock=lambda: self.naive.now,
        )
        self.leases: list[tuple[Lease, NaiveLease]] = []
        self.branches: list[Branch] = []
        self.refs: list[tuple[NodeRef, Spot]] = []
        self.locks: list[tuple[NodeRef, Spot]] = []

    def match(self, namespace: Namespace, tokens: Tokens) -> None:
        tree = self.naive.tree_of(namespace)
        path = self.naive.path(tree, tokens)
        hit = self.real.match(namespace, tokens)
        assert hit.blocks == [record.block for record in path]
        assert hit.num_tokens == len(path) * self.naive.block_size
        rows, blocks = self.naive.tails(tree, tokens)
        assert hit.tail_tokens == rows
        assert hit.tail_block in (blocks or {None})
        self.refs.append((hit.node, self.naive.spot(namespace, tree, tokens[: hit.num_tokens])))
        del self.refs[:-8]

    def insert(
        self, namespace: Namespace, tokens: Tokens, *, priority: int, adopt: bool, label: str | None = None
    ) -> None:
        count = len(tokens) // self.naive.block_size
        own = self.allocate(count)
        if own is None:
            return
        if adopt:  # as a caller does that had the first blocks from the tree
            kept = self.real.match(namespace, tokens).blocks
            self.free(own[: len(kept)])
            own = kept + own[len(kept) :]
        tree = self.naive.tree_of(namespace)
        done = self.real.insert(namespace, tokens, own, priority=priority, label=label)
        if count:
            self.naive.trees[namespace] = tree
        full = tokens[: count * self.naive.block_size]
        table = self.naive.put(namespace, tree, full, own, start=0, priority=priority, label=label)
        self.naive.touch(tree, full, priority=priority)
        assert done.blocks == table
        self.refs.append((done.node, self.naive.spot(namespace, tree, full)))

    def insert_wrongly(self, namespace: Namespace, tokens: Tokens, blocks: list[int]) -> None:
        """With blocks that are not the caller's: refused, whatever they are, unless the tree has just these."""
        count = len(tokens) // self.naive.block_size
        table = self.real.match(namespace, tokens).blocks
        wrong = (blocks * count)[:count] + blocks[:1] * (count == 0)
        if wrong == table or not set(wrong) - self.naive.private - set(table):
            return
        try:
            self.real.insert(namespace, tokens, wrong)
        except InvalidBlocks:
            return
        raise AssertionError(f"blocks {wrong} were accepted")

    def lock(self, choice: int) -> None:
        if not self.refs:
            return
        ref, spot = self.refs[choice % len(self.refs)]
        try:
            self.real.lock(ref)
        except StaleNode:
            assert self.naive.is_stale(spot)
            return
        assert not self.naive.is_stale(spot)
        held = Spot(spot.namespace, spot.tree, spot.prefix, spot.record)
        self.naive.lock(held)
        self.locks.append((ref, held))

    def unlock(self, choice: int) -> None:
        if self.locks:
            ref, spot = self.locks.pop(choice % len(self.locks))
            self.real.unlock(ref)
            self.naive.unlock(spot)

    def unlock_wrongly(self, choice: int) -> None:
        if not self.refs:
            return
        ref, spot = self.refs[choice % len(self.refs)]
        if any(other.tree == spot.tree and other.prefix == spot.prefix for other in self.naive.locks):
            return
        try:
            self.real.unlock(ref)
        except NotLocked:
            return
        raise AssertionError("an unlocked node was unlocked")

    def acquire(self, namespace: Namespace, tokens: Tokens, *, extra: int, priority: int) -> None:
        num_blocks = len(tokens) // self.naive.block_size + extra
        self.naive.expire()
        tree = self.naive.tree_of(namespace)
        path = self.naive.path(tree, tokens)
        needed = max(0, num_blocks - len(path))
        rows, tails = self.naive.tails(tree, tokens)
        try:
            grip = self.real.acquire(namespace, tokens, num_blocks=num_blocks, priority=priority)
        except OutOfBlocks:
            assert self.naive.room(beside=path) < needed
            return
        assert self.naive.room(beside=path) >= needed
        assert grip.blocks == [record.block for record in path]
        assert grip.tail_tokens == rows
        assert grip.tail_block in (tails or {None})
        spot = self.naive.spot(namespace, tree, tokens[: grip.num_tokens])
        self.naive.lock(spot)
        self.naive.touch(tree, spot.prefix, priority=priority, hits=1)
        self.naive.use_leases(tree, spot.prefix, grip.tail_block)
        self._evict_short(needed)
        self.naive.take(grip.new_blocks)
        assert len(grip.new_blocks) == needed
        self.branches.append(Branch(grip.node, spot, grip.new_blocks, tokens[grip.num_tokens :]))

    def acquire_twin(self, choice: int, *, extra: int) -> None:
        """Admits what a branch that is under way has planned, once more and a little longer."""
        if self.branches:
            branch = self.branches[choice % len(self.branches)]
            tokens = branch.spot.prefix + branch.planned
            self.acquire(branch.spot.namespace, tokens, extra=extra, priority=0)

    def extend(self, choice: int, tokens: Tokens, *, priority: int, label: str | None = None) -> None:
        """Commits what the branch planned, then `tokens`, as far as it has private blocks for them."""
        if not self.branches:
            return
        branch = self.branches[choice % len(self.branches)]
        size = self.naive.block_size
        tokens = branch.planned + tokens
        count = min(len(branch.private), len(tokens) // size)
        ragged = len(tokens) % size
        own, branch.private = branch.private[:count], branch.private[count:]
        spot = branch.spot
        done = self.real.extend(
            branch.ref, tokens[: count * size + ragged], own, priority=priority, label=label
        )
        full = spot.prefix + tokens[: count * size]
        branch.planned = branch.planned[count * size :]
        start = len(spot.prefix) // size
        table = self.naive.put(
            spot.namespace, spot.tree, full, own, start=start, priority=priority, label=label
        )
        assert done.blocks == table
        self.naive.locks.remove(spot)
        branch.ref, branch.spot = done.node, self.naive.spot(spot.namespace, spot.tree, full)
        self.naive.locks.append(branch.spot)

    def fork(self, choice: int) -> None:
        if self.branches:
            branch = self.branches[choice % len(self.branches)]
            self.real.lock(branch.ref)
            spot = Spot(branch.spot.namespace, branch.spot.tree, branch.spot.prefix, branch.spot.record)
            self.naive.lock(spot)
            self.branches.append(Branch(branch.ref, spot, []))

    def release(self, choice: int) -> None:
        if self.branches:
            branch = self.branches.pop(choice % len(self.branches))
            self.real.unlock(branch.ref)
            self.naive.unlock(branch.spot)
            self.free(branch.private)

    def pin(self, namespace: Namespace, tokens: Tokens, *, ttl: float) -> None:
        naive = self.naive
        naive.expire()
        tree = naive.tree_of(namespace)
        prefix = tokens[: len(naive.path(tree, tokens)) * naive.block_size]
        needed = {(tree, path) for path in naive.prefixes(prefix)} | naive.pinned()
        try:
            lease = self.real.pin(namespace, tokens, ttl=ttl)
        except NothingToPin:
            assert prefix == ()
            return
        except PinRefused:
            assert len(needed) > naive.max_pinned
            return
        assert prefix
        assert len(needed) <= naive.max_pinned
        assert lease.num_tokens == len(prefix)
        naive.touch(tree, prefix)
        twin = NaiveLease(naive.spot(namespace, tree, prefix), ttl, naive.now + ttl)
        naive.leases.append(twin)
        self.leases.append((lease, twin))

    def release_lease(self, choice: int) -> None:
        """Releases one, be it for the second time."""
        if self.leases:
            lease, twin = self.leases[choice % len(self.leases)]
            lease.release()
            if twin in self.naive.leases:
                self.naive.leases.remove(twin)
            elif len(self.leases) > 6:
                self.leases.remove((lease, twin))

    def renew(self, choice: int, ttl: float | None) -> None:
        if not self.leases:
            return
        lease, twin = self.leases[choice % len(self.leases)]
        self.naive.expire()
        try:
            lease.renew(ttl)
        except LeaseEnded:
            assert twin not in self.naive.leases
            return
        assert twin in self.naive.leases
        twin.ttl = ttl or twin.ttl
        twin.due = self.naive.now + twin.ttl

    def wait(self, seconds: float) -> None:
        """Time goes by, and nobody calls `expire`."""
        self.naive.now += seconds

    def expire(self) -> None:
        assert self.real.expire() == self.naive.expire()

    def allocate(self, count: int) -> list[int] | None:
        self.naive.expire()
        try:
            blocks = self.real.allocate(count)
        except OutOfBlocks:
            assert self.naive.room(beside=[]) < count
            return None
        self._evict_short(count)
        self.naive.take(blocks)
        assert len(blocks) == count
        return blocks

    def free(self, blocks: list[int]) -> None:
        self.real.free(blocks)
        self.naive.private -= set(blocks)

    def allocate_and_free(self, count: int) -> None:
        blocks = self.allocate(count)
        if blocks is not None:
            self.free(blocks)
            if blocks:
                try:
                    self.real.free(blocks[:1])
                except InvalidBlocks:
                    return
                raise AssertionError("a block was freed twice")

    def evict(self, count: int) -> None:
        assert self.real.evict(count) == self.naive.evict(count)

    def clear(self, namespace: Namespace | None) -> None:
        freed = self.real.clear(namespace).num_freed
        before = len(self.naive.free)
        self.naive.clear(namespace)
        assert len(self.naive.free) - before == freed

    def release_all(self) -> None:
        """Idle afterwards: nothing private, and no locks but those of leases, which end alone."""
        while self.branches:
            self.release(0)
        while self.locks:
            self.unlock(0)
        stats = self.real.stats()
        assert (stats.locks, stats.locked) == (stats.leases, stats.pinned)
        self.wait(1e9)
        self.expire()

    def compare(self) -> None:
        """Every invariant of the real cache, and equality of all that both hold."""
        self.real.check()
        stats, naive = self.real.stats(), self.naive
        unlocked = len(naive.unlocked())
        assert (stats.free, stats.private) == (len(naive.free), len(naive.private))
        assert (stats.evictable, stats.locked) == (unlocked, len(naive.records) - unlocked)
        assert (stats.leases, stats.pinned) == (len(naive.leases), len(naive.pinned()))
        assert (stats.locks, stats.namespaces) == (len(naive.locks) + len(naive.leases), len(naive.trees))
        for lease, twin in self.leases:
            left = max(0, twin.due - naive.now) if twin in naive.leases else 0
            assert (lease.expires_in_s, lease.ended is None) == (left, twin in naive.leases)
        for namespace, tree in naive.trees.items():
            for owner, prefix in naive.records:
                if owner == tree:
                    path = [record.block for record in naive.path(tree, prefix)]
                    assert self.real.match(namespace, prefix).blocks == path

    def _evict_short(self, needed: int) -> None:
        short = max(0, needed - len(self.naive.free))
        assert self.naive.evict(short) == short
