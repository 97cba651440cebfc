"""An oracle for RadixCache: a dict with losses, that never loses what is locked.

`NaiveCache` keeps a flat dictionary from (tree, prefix of whole blocks) to a record, and finds everything by scanning
it. It has no nodes, hence no splits and no counters; it predicts which blocks exist, under which ids, and exactly which
ones an eviction takes (for policies whose key is a property of a block: lru, lfu, priority).

`Mirror` does each operation on a real cache and on the oracle, and compares answers, errors and contents.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from phloem.radix import (
    BlockPool,
    InvalidBlocks,
    Namespace,
    NodeRef,
    NotLocked,
    OutOfBlocks,
    RadixCache,
    StaleNode,
)

Tokens = tuple[int, ...]

KEYS: dict[str, Callable[[Record], Hashable]] = {
    "lru": lambda record: record.last_used,
    "lfu": lambda record: (record.hits, record.last_used),
    "priority": lambda record: (record.priority, record.last_used),
}


@dataclass(eq=False)
class Record:
    block: int
    last_used: int = 0
    hits: int = 0
    priority: int = 0


@dataclass(frozen=True, eq=False)
class Spot:
    """What a NodeRef stands for: a prefix in a tree, and the record that was there."""

    namespace: Namespace
    tree: int
    prefix: Tokens
    record: Record | None


@dataclass
class NaiveCache:
    num_blocks: int
    block_size: int
    policy: str
    trees: dict[Namespace, int] = field(default_factory=dict)
    records: dict[tuple[int, Tokens], Record] = field(default_factory=dict)
    locks: list[Spot] = field(default_factory=list)
    private: set[int] = field(default_factory=set)
    clock: int = 0
    next_tree: int = 0

    @property
    def free(self) -> set[int]:
        cached = {record.block for record in self.records.values()}
        return set(range(self.num_blocks)) - cached - self.private

    def prefixes(self, tokens: Tokens) -> list[Tokens]:
        size = self.block_size
        return [tokens[: n * size] for n in range(1, len(tokens) // size + 1)]

    def path(self, tree: int, tokens: Tokens) -> list[Record]:
        found = []
        for prefix in self.prefixes(tokens):
            if (tree, prefix) not in self.records:
                break
            found.append(self.records[tree, prefix])
        return found

    def tree_of(self, namespace: Namespace) -> int:
        if namespace in self.trees:
            return self.trees[namespace]
        self.next_tree += 1
        return self.next_tree

    def spot(self, namespace: Namespace, tree: int, prefix: Tokens) -> Spot:
        return Spot(namespace, tree, prefix, self.records.get((tree, prefix)))

    def tails(self, tree: int, tokens: Tokens) -> tuple[int, set[int]]:
        """The best number of rows beyond the match, and the blocks that have it."""
        prefix = tokens[: len(self.path(tree, tokens)) * self.block_size]
        best: tuple[int, set[int]] = (0, set())
        for (owner, path), record in self.records.items():
            if owner != tree or len(path) != len(prefix) + self.block_size or path[: len(prefix)] != prefix:
                continue
            rows = 0
            for a, b in zip(path[len(prefix) :], tokens[len(prefix) :], strict=False):
                if a != b:
                    break
                rows += 1
            if rows > best[0]:
                best = (rows, {record.block})
            elif rows == best[0] and rows:
                best[1].add(record.block)
        return best

    def is_locked(self, tree: int, prefix: Tokens) -> bool:
        return any(spot.tree == tree and spot.prefix[: len(prefix)] == prefix for spot in self.locks)

    def unlocked(self) -> list[tuple[int, Tokens]]:
        return [key for key in self.records if not self.is_locked(*key)]

    def is_stale(self, spot: Spot) -> bool:
        if spot.record is not None:
            return self.records.get((spot.tree, spot.prefix)) is not spot.record
        is_cleared = any(lock.tree == spot.tree for lock in self.locks)
        return not is_cleared and self.trees.get(spot.namespace, spot.tree) != spot.tree

    def room(self, *, beside: list[Record]) -> int:
        hit = {id(record) for record in beside}
        return len(self.free) + sum(id(self.records[key]) not in hit for key in self.unlocked())

    def evict(self, count: int) -> int:
        for done in range(count):
            leaves = [
                (tree, prefix)
                for tree, prefix in self.unlocked()
                if not any(
                    owner == tree and len(path) > len(prefix) and path[: len(prefix)] == prefix
                    for owner, path in self.records
                )
            ]
            if not leaves:
                return done
            del self.records[min(leaves, key=lambda leaf: KEYS[self.policy](self.records[leaf]))]
            self.forget_idle()
        return count

    def take(self, blocks: list[int]) -> None:
        assert set(blocks) <= self.free
        assert len(set(blocks)) == len(blocks)
        self.private |= set(blocks)

    def touch(self, tree: int, tokens: Tokens, *, priority: int = 0, hits: int = 0) -> None:
        self.clock += 1
        for record in self.path(tree, tokens):
            record.last_used = self.clock
            record.priority = max(record.priority, priority)
            record.hits += hits

    def put(self, tree: int, tokens: Tokens, blocks: list[int], *, start: int, priority: int) -> list[int]:
        """Commits `blocks` to the prefixes from number `start` on; returns the table of these prefixes."""
        table = []
        for prefix, block in zip(self.prefixes(tokens)[start:], blocks, strict=True):
            record = self.records.get((tree, prefix))
            if record is None:
                record = self.records[tree, prefix] = Record(block, self.clock, priority=priority)
            self.private.discard(block)
            table.append(record.block)
        return table

    def lock(self, spot: Spot) -> None:
        self.locks.append(spot)
        if all(other.tree != spot.tree for other in self.locks[:-1]):
            self.trees.setdefault(spot.namespace, spot.tree)
        self.touch(spot.tree, spot.prefix)

    def unlock(self, spot: Spot) -> None:
        self.locks.remove(spot)
        self.touch(spot.tree, spot.prefix)
        self.forget_idle()

    def clear(self, namespace: Namespace | None) -> None:
        for name in list(self.trees):
            if namespace in (None, name):
                del self.trees[name]
        self.forget_idle()

    def forget_idle(self) -> None:
        for tree, prefix in self.unlocked():
            if tree not in self.trees.values():
                del self.records[tree, prefix]
        used = {tree for tree, _ in self.records} | {spot.tree for spot in self.locks}
        self.trees = {name: tree for name, tree in self.trees.items() if tree in used}


@dataclass
class Branch:
    """A holder of a lock and of private blocks, as a request is."""

    ref: NodeRef
    spot: Spot
    private: list[int]
    planned: Tokens = ()  # what it was admitted for and has not committed yet


class Mirror:
    """A real cache and the oracle, driven side by side."""

    def __init__(self, num_blocks: int, block_size: int, policy: str) -> None:
        self.real = RadixCache(BlockPool(num_blocks), block_size, policy=policy)
        self.naive = NaiveCache(num_blocks, block_size, policy)
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

    def insert(self, namespace: Namespace, tokens: Tokens, *, priority: int, adopt: bool) -> None:
        count = len(tokens) // self.naive.block_size
        own = self.allocate(count)
        if own is None:
            return
        if adopt:  # as a caller does that had the first blocks from the tree
            kept = self.real.match(namespace, tokens).blocks
            self.free(own[: len(kept)])
            own = kept + own[len(kept) :]
        tree = self.naive.tree_of(namespace)
        done = self.real.insert(namespace, tokens, own, priority=priority)
        if count:
            self.naive.trees[namespace] = tree
        full = tokens[: count * self.naive.block_size]
        table = self.naive.put(tree, full, own, start=0, priority=priority)
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

    def extend(self, choice: int, tokens: Tokens, *, priority: int) -> None:
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
        done = self.real.extend(branch.ref, tokens[: count * size + ragged], own, priority=priority)
        full = spot.prefix + tokens[: count * size]
        branch.planned = branch.planned[count * size :]
        table = self.naive.put(spot.tree, full, own, start=len(spot.prefix) // size, priority=priority)
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

    def allocate(self, count: int) -> list[int] | None:
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
        """Idle afterwards: no lock, nothing private."""
        while self.branches:
            self.release(0)
        while self.locks:
            self.unlock(0)

    def compare(self) -> None:
        """Every invariant of the real cache, and equality of all that both hold."""
        self.real.check()
        stats, naive = self.real.stats(), self.naive
        unlocked = len(naive.unlocked())
        assert (stats.free, stats.private) == (len(naive.free), len(naive.private))
        assert (stats.evictable, stats.locked) == (unlocked, len(naive.records) - unlocked)
        assert (stats.locks, stats.namespaces) == (len(naive.locks), len(naive.trees))
        for namespace, tree in naive.trees.items():
            for owner, prefix in naive.records:
                if owner == tree:
                    path = [record.block for record in naive.path(tree, prefix)]
                    assert self.real.match(namespace, prefix).blocks == path

    def _evict_short(self, needed: int) -> None:
        short = max(0, needed - len(self.naive.free))
        assert self.naive.evict(short) == short
