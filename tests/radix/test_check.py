"""`check` sees what is broken: each test breaks one thing by hand."""

from __future__ import annotations

import pytest

from phloem.radix import BlockPool, InvariantError, Namespace, RadixCache

NS = Namespace()


@pytest.fixture
def cache():
    """[1, 2] and [1, 3] share a block; [1, 2] is locked."""
    cache = RadixCache(BlockPool(8), 1)
    cache.insert(NS, [1, 2], cache.allocate(2))
    cache.insert(NS, [1, 3], cache.allocate(2))
    cache.lock(cache.match(NS, [1, 2]).node)
    cache.check()
    return cache


def leaf(cache, tokens):
    return cache.match(NS, tokens).node.node


def break_refs(cache):
    leaf(cache, [1, 2]).lock_refs += 1


def break_held(cache):
    leaf(cache, [1]).held += 1


def break_evictable(cache):
    cache._residency.evictable += 1


def break_locks(cache):
    cache._residency.num_locks -= 1


def break_order(cache):
    cache._residency.order.discard(leaf(cache, [1, 3]))


def break_rank(cache):
    leaf(cache, [1, 3]).last_used += 1


def break_edge(cache):
    leaf(cache, [1, 3]).edge += b"\0\0\0\0"


def break_key(cache):
    leaf(cache, [1, 3]).edge[0] = 9


def break_end(cache):
    leaf(cache, [1, 2]).end += 1


def break_parent(cache):
    leaf(cache, [1, 2]).parent = leaf(cache, [1, 3])


def break_owner(cache):
    cache.pool._owners[leaf(cache, [1, 3]).blocks[0]] = 1


def break_free_list(cache):
    cache.pool._free.append(cache.pool._free[0])


def break_sharing(cache):
    leaf(cache, [1, 3]).blocks[0] = leaf(cache, [1, 2]).blocks[0]


def break_node_count(cache):
    cache._tree.num_nodes += 1


def break_root(cache):
    cache._tree.roots[Namespace(salt="x")] = cache._tree.roots.pop(NS)


BREAKS = [value for name, value in sorted(globals().items()) if name.startswith("break_")]


@pytest.mark.parametrize("damage", BREAKS, ids=lambda damage: damage.__name__)
def test_check_finds_each_kind_of_damage(cache, damage):
    damage(cache)
    with pytest.raises(InvariantError):
        cache.check()
