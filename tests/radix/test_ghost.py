"""The ghost: how much it remembers, what it forgets first, and that its memory is what it says (rule 15)."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Iterator

import pytest

from phloem.radix import BlockPool, Miss, MissReason, Namespace, RadixCache
from phloem.radix.bench.workload import Shape, paths
from phloem.radix.ghost import DICT_BYTES, NODE_BYTES, ROOT_BYTES

NS = Namespace()
NEVER, DIVERGED, EVICTED = MissReason.NEVER_SEEN, MissReason.DIVERGED, MissReason.EVICTED


def put(cache: RadixCache, tokens, *, label: str | None = None, namespace: Namespace = NS):
    return cache.insert(namespace, tokens, cache.allocate(len(tokens) // cache.block_size), label=label)


def room(num_nodes: int, num_tokens: int, *, block_size: int = 1) -> int:
    """Bytes for so many nodes right below a root, and so many tokens of two bytes in them."""
    return ROOT_BYTES + DICT_BYTES + num_nodes * (NODE_BYTES + 2 * block_size) + 2 * num_tokens


def evicted(cache: RadixCache, tokens) -> int:
    return cache.explain(NS, tokens).tokens(EVICTED)


@pytest.mark.parametrize("ghost_bytes", [0, 3, room(1, 8, block_size=4) - 1])
def test_a_ghost_without_room_remembers_nothing(ghost_bytes):
    cache = RadixCache(BlockPool(8), 4, ghost_bytes=ghost_bytes)
    put(cache, [1] * 8)
    cache.evict(2)
    assert cache.explain(NS, [1] * 8).misses == (Miss(0, 8, NEVER),)
    stats = cache.stats()
    assert (stats.ghost_tokens, stats.ghost_bytes, stats.max_ghost_bytes) == (0, 0, ghost_bytes)
    cache.check()


def test_a_ghost_uses_all_its_room():
    cache = RadixCache(BlockPool(8), 4, ghost_bytes=room(1, 8, block_size=4))
    put(cache, [1] * 8)
    cache.evict(2)
    assert evicted(cache, [1] * 8) == 8
    assert cache.stats().ghost_bytes == cache.stats().max_ghost_bytes


def test_a_negative_ghost_is_refused():
    with pytest.raises(ValueError, match="ghost_bytes must be 0 or more, not -1"):
        RadixCache(BlockPool(8), 4, ghost_bytes=-1)


@pytest.mark.parametrize(("num_blocks", "most"), [(8, 2**20), (2**20, 4 * 16 * 2**20)])
def test_by_default_the_ghost_takes_four_bytes_a_token_of_the_pool_or_a_mebibyte(num_blocks, most):
    assert RadixCache(BlockPool(num_blocks), 16).stats().max_ghost_bytes == most


def test_the_oldest_is_forgotten_first():
    cache = RadixCache(BlockPool(2), 1, ghost_bytes=room(2, 4))
    for number in range(3):
        put(cache, [number, number])
    cache.evict(2)
    cache.check()
    assert cache.stats().ghost_tokens == 4
    assert [evicted(cache, [number, number]) for number in range(3)] == [0, 2, 2]


def test_of_a_long_path_only_what_is_too_much_is_forgotten():
    cache = RadixCache(BlockPool(1_000), 1, ghost_bytes=room(2, 1_000))
    put(cache, [7] * 998)
    put(cache, [8, 8])
    put(cache, [9] * 1_000)
    assert (evicted(cache, [7] * 998), evicted(cache, [8, 8])) == (998, 2)
    cache = RadixCache(BlockPool(1_000), 1, ghost_bytes=room(2, 1_000))
    put(cache, [7] * 998)
    put(cache, [8] * 12)
    cache.evict(12)
    cache.evict(988)
    cache.check()
    assert (evicted(cache, [7] * 998), evicted(cache, [8] * 12)) == (988, 12)


def test_a_path_longer_than_the_ghost_is_remembered_from_where_it_fits():
    cache = RadixCache(BlockPool(9), 1, ghost_bytes=room(1, 5))
    put(cache, [1, 1, 1])
    cache.evict(3)
    put(cache, [7] * 9)
    cache.evict(4)
    assert evicted(cache, [1, 1, 1]) == 3  # nothing made room for what cannot be held
    assert evicted(cache, [7] * 9) == 0
    cache.evict(5)
    assert evicted(cache, [7] * 9) == 5
    cache.check()


def test_what_was_evicted_again_is_not_the_oldest():
    cache = RadixCache(BlockPool(1), 1, ghost_bytes=room(3, 3))
    for number in (0, 1, 2, 0, 3):
        put(cache, [number])
        cache.evict(1)
    assert [evicted(cache, [number]) for number in range(4)] == [1, 0, 1, 1]


def test_a_prefix_outlives_the_continuation_that_was_remembered_before_it():
    cache = RadixCache(BlockPool(3), 1, ghost_bytes=room(3, 4) + DICT_BYTES)
    put(cache, [1, 2])
    put(cache, [1, 3])
    cache.evict(3)  # [1, 2], then [1, 3], then what they share
    put(cache, [4])
    cache.evict(1)
    cache.check()
    assert [evicted(cache, tokens) for tokens in ([1, 2], [1, 3], [4])] == [1, 2, 1]
    put(cache, [5])
    cache.evict(1)
    assert [evicted(cache, tokens) for tokens in ([1, 3], [4], [5])] == [1, 1, 1]


def test_the_ghost_keeps_within_its_bounds_whatever_comes():
    rng = random.Random(1)
    cache = RadixCache(BlockPool(64), 2, ghost_bytes=6_000)
    fullest = 0
    for step in range(4_000):
        # Short alphabets share and split, long ones make new leaves, large ids take more room.
        top = rng.choice([1, 1, 50, 50, 2 ** rng.randint(15, 31) - 1])
        tokens = [rng.randint(0, top) for _ in range(2 * rng.choice([1, 2, 3, 10, 50, 64]))]
        put(cache, tokens, label=rng.choice([None, "x" * rng.randint(0, 256)]))
        if rng.random() < 0.02:
            cache.evict(rng.randint(1, 64))
        fullest = max(fullest, cache.stats().ghost_bytes)
        assert fullest <= 6_000
        if step % 20 == 0:
            cache.check()
    assert fullest > 5_500


# Tokens are kept in as few bytes as the largest needs.

BORDERS = [0, 0xFEFF, 0xFF00, 0xFFFF, 0x10000, 0xFEFFFF, 0xFF0000, 0xFFFFFF, 2**24, 2**31 - 1]


@pytest.mark.parametrize(
    ("largest", "token_bytes"), list(zip(BORDERS, [2, 2, 3, 3, 3, 3, 4, 4, 4, 4], strict=True))
)
def test_a_token_takes_as_many_bytes_as_the_largest_needs(largest, token_bytes):
    cache = RadixCache(BlockPool(2), 4)
    put(cache, [1, 2, largest, 4, 5, 6, 7, 8])
    cache.evict(2)
    assert cache.stats().ghost_bytes == room(1, 0, block_size=0) + (8 + 4) * token_bytes
    cache.check()


@pytest.mark.parametrize("known", BORDERS)
@pytest.mark.parametrize("asked", BORDERS)
@pytest.mark.parametrize("place", [2, 4, 5])
def test_a_large_token_is_told_from_every_other(known, asked, place):
    cache = RadixCache(BlockPool(4), 4)
    path, query = [3] * 8, [3] * 8
    path[place], query[place] = known, asked
    put(cache, path, label="first")
    cache.evict(2)
    told = cache.explain(NS, query)
    if known == asked:
        assert told.misses == (Miss(0, 8, EVICTED, label="first"),)
    else:
        left = Miss(place, 8, DIVERGED, label="first", token=asked, other_token=known)
        assert told.misses == (Miss(0, place, EVICTED, label="first"), left)


def test_what_was_remembered_before_a_larger_token_came_stays_so():
    rng = random.Random(2)
    cache = RadixCache(BlockPool(100), 2)
    remembered = []
    for largest in BORDERS[1:]:
        for _ in range(40):  # more children of the root than are kept without an order
            tokens = [rng.randint(0, 1), 1, rng.randint(0, largest), largest, rng.randint(0, largest), 5]
            put(cache, tokens, label=str(len(remembered)))
            remembered.append(tokens)
        cache.evict(100)
        cache.check()
        for number, tokens in enumerate(remembered):
            assert evicted(cache, tokens) == 6
            told = cache.explain(NS, [*tokens[:5], 6]).misses[-1]
            assert (told.start, told.other_token, told.label) == (5, 5, str(number))


# Its memory, as Python allocates it.


def tails() -> Iterator[list[int]]:
    """Unique tails of two to six blocks of 16 tokens after a shared prefix."""
    rng = random.Random(3)
    for _ in range(2_731):  # one more than fit into a dictionary of 4,096 slots, which is doubled therefore
        yield [7] * 160 + [rng.randrange(49_152) for _ in range(16 * rng.randint(2, 6))]


def single_blocks() -> Iterator[list[int]]:
    return ([number] * 16 for number in range(3_000))


def namespaces() -> Iterator[list[int]]:
    return ([number] * 64 for number in range(2_000))


def long_chains() -> Iterator[list[int]]:
    """Each goes on where the one before ended, or beside it: nodes with two children."""
    rng, path = random.Random(4), []
    for _ in range(400):
        path = path[: 16 * rng.randint(0, 20)] + [rng.randrange(49_152) for _ in range(64)]
        yield path


def realistic() -> Iterator[bytes]:
    return paths(Shape(2_000))


@pytest.mark.parametrize("make", [tails, single_blocks, namespaces, long_chains, realistic])
@pytest.mark.parametrize("labelled", [False, True])
def test_the_ghost_takes_no_more_memory_than_it_says(make, labelled):
    cache = RadixCache(BlockPool(60_000), 16)
    tracemalloc.start()
    for number, tokens in enumerate(make()):
        namespace = Namespace(salt=str(number)) if make is namespaces else NS
        size = len(tokens) // (4 if isinstance(tokens, bytes) else 1)
        label = f"request-{number}" if labelled else None
        cache.insert(namespace, tokens, cache.allocate(size // 16), label=label)
    del tokens, namespace, label  # which the ghost alone keeps from now on
    cache.evict(60_000)
    stats = cache.stats()
    before = tracemalloc.get_traced_memory()[0]
    cache.clear()
    taken = before - tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.6 * stats.ghost_bytes < taken <= stats.ghost_bytes
    if make is realistic:
        assert stats.ghost_bytes < 4 * stats.ghost_tokens


# Its cost.


def test_the_ghost_of_a_long_chain_costs_no_square():
    cache = RadixCache(BlockPool(10_000), 1)
    ref = cache.acquire(NS, [], num_blocks=0).node
    for number in range(10_000):
        ref = cache.extend(ref, [number % 7], cache.allocate(1), label=str(number)).node
    cache.unlock(ref)
    assert cache.stats().nodes == 10_000
    start = time.perf_counter()
    for _ in range(10_000):
        cache.evict(1)
    assert time.perf_counter() - start < 2  # 20 µs each would be 0.2 s; steps over the depth would be minutes
    cache.check()
    told = cache.explain(NS, [number % 7 for number in range(10_000)])
    assert told.tokens(EVICTED) == 10_000


def test_trims_of_a_long_leaf_cost_no_copy_each():
    cache = RadixCache(BlockPool(20_000), 16)
    tokens = [number % 97 for number in range(20_000 * 16)]
    put(cache, tokens)
    start = time.perf_counter()
    for _ in range(10_000):
        cache.evict(1)
    assert time.perf_counter() - start < 1
    told = cache.explain(NS, tokens)
    assert (told.cached_tokens, told.tokens(EVICTED)) == (160_000, 160_000)
