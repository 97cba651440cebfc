"""`check` sees what is broken: each test breaks one thing by hand."""

from __future__ import annotations

import pytest

from phloem.radix import BlockPool, InvariantError, Namespace, RadixCache

NS = Namespace()


@pytest.fixture
def cache():
    """[1, 2] and [1, 3] share a block; [1, 2] is locked; [1] is leased; [1, 4, 5] was evicted."""
    cache = RadixCache(BlockPool(8), 1)
    cache.insert(NS, [1, 4, 5], cache.allocate(3))
    cache.evict(3)
    cache.insert(NS, [1, 2], cache.allocate(2))
    cache.insert(NS, [1, 3], cache.allocate(2))
    cache.lock(cache.match(NS, [1, 2]).node)
    cache.pin(NS, [1])
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


def break_pins(cache):
    leaf(cache, [1]).pins -= 1


def break_pin_refs(cache):
    leaf(cache, [1, 3]).pin_refs += 1


def break_pinned(cache):
    cache._residency.pinned -= 1


def break_lock_of_lease(cache):
    cache._residency.unlock(leaf(cache, [1]))


def break_book(cache):
    cache._leases._order.clear()


def break_lease(cache):
    cache._leases.all()[0].num_tokens += 1


def break_end_of_lease(cache):
    cache._leases.all()[0].ended = "released"


def break_budget(cache):
    cache._leases.max_pinned_blocks = 0


def break_namespace_of_lease(cache):
    cache._leases.all()[0].namespace = Namespace(salt="x")


def break_ghost_count(cache):
    cache._ghost.num_blocks += 1


def break_ghost_order(cache):
    cache._ghost.leaves.discard(cache._ghost.leaves.oldest())


def break_ghost_bound(cache):
    cache._ghost.max_bytes = cache._ghost.num_bytes - 1


def break_ghost_links(cache):
    cache._ghost.leaves._ends.older = cache._ghost.leaves._ends


def break_ghost_labels(cache):
    cache._ghost.leaves.oldest().label = "nobody"


def break_ghost_edge(cache):
    cache._ghost.leaves.oldest().edge = b"\7" + cache._ghost.leaves.oldest().edge[1:]


BREAKS = [value for name, value in sorted(globals().items()) if name.startswith("break_")]


@pytest.mark.parametrize("damage", BREAKS, ids=lambda damage: damage.__name__)
def test_check_finds_each_kind_of_damage(cache, damage):
    damage(cache)
    with pytest.raises(InvariantError):
        cache.check()
