"""An oracle for RadixCache: a dict with losses, that never loses what is locked or leased.

`NaiveCache` keeps a flat dictionary from (tree, prefix of whole blocks) to a record, and finds everything by scanning
it. It has no nodes, hence no splits and no counters; it predicts which blocks exist, under which ids, and exactly which
ones an eviction takes (for policies whose key is a property of a block: lru, lfu, priority). It also keeps whatever was
ever cached since the last clear, with its labels, for naive_explain.py.

cache_mirror.py does each operation on a real cache and on this one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from phloem.radix import Namespace

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


@dataclass(eq=False)
class NaiveLease:
    spot: Spot
    ttl: float
    due: float


@dataclass
class NaiveCache:
    num_blocks: int
    block_size: int
    policy: str
    max_pinned: int
    now: float = 0.0
    leases: list[NaiveLease] = field(default_factory=list)
    ever: dict[Namespace, dict[Tokens, set[str | None]]] = field(default_factory=dict)
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
        spots = self.locks + [lease.spot for lease in self.leases]
        return any(spot.tree == tree and spot.prefix[: len(prefix)] == prefix for spot in spots)

    def pinned(self) -> set[tuple[int, Tokens]]:
        return {
            (lease.spot.tree, prefix) for lease in self.leases for prefix in self.prefixes(lease.spot.prefix)
        }

    def expire(self) -> int:
        due = [lease for lease in self.leases if lease.due <= self.now]
        self.leases = [lease for lease in self.leases if lease.due > self.now]
        return len(due)

    def use_leases(self, tree: int, prefix: Tokens, tail_block: int | None) -> None:
        """Renews those whose whole path is in `prefix`, or is `prefix` and the block copied from."""
        for lease in self.leases:
            path, record = lease.spot.prefix, lease.spot.record
            assert record is not None
            whole = prefix[: len(path)] == path
            copied = path[: -self.block_size] == prefix and record.block == tail_block
            if lease.spot.tree == tree and (whole or copied):
                lease.due = self.now + lease.ttl

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

    def put(
        self,
        namespace: Namespace,
        tree: int,
        tokens: Tokens,
        blocks: list[int],
        *,
        start: int,
        priority: int,
        label: str | None,
    ) -> list[int]:
        """Commits `blocks` to the prefixes from number `start` on; returns the table of these prefixes."""
        table = []
        ever = self.ever.setdefault(namespace, {}) if self.trees.get(namespace) == tree else {}
        for prefix, block in zip(self.prefixes(tokens)[start:], blocks, strict=True):
            record = self.records.get((tree, prefix))
            if record is None:
                record = self.records[tree, prefix] = Record(block, self.clock, priority=priority)
                ever.setdefault(prefix, set()).add(label)
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
        self.leases = [lease for lease in self.leases if namespace not in (None, lease.spot.namespace)]
        self.ever = {name: paths for name, paths in self.ever.items() if namespace not in (None, name)}
        self.forget_idle()

    def forget_idle(self) -> None:
        for tree, prefix in self.unlocked():
            if tree not in self.trees.values():
                del self.records[tree, prefix]
        used = {tree for tree, _ in self.records} | {spot.tree for spot in self.locks}
        self.trees = {name: tree for name, tree in self.trees.items() if tree in used}
