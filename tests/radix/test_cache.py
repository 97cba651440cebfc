"""The cache's door: what it takes, refuses and returns."""

from __future__ import annotations

import itertools
import pickle
import random
from array import array

import numpy as np
import pytest

from phloem.radix import (
    FIFO,
    BlockPool,
    InvalidBlocks,
    InvalidTokens,
    Namespace,
    NotLocked,
    OutOfBlocks,
    Owner,
    RadixCache,
    RadixError,
    StaleNode,
    UnknownPolicy,
    pack,
    unpack,
)

NS = Namespace()


def make(num_blocks: int = 8, block_size: int = 1, policy: str = "lru") -> RadixCache:
    return RadixCache(BlockPool(num_blocks), block_size, policy=policy)


def test_any_form_of_tokens_is_the_same_path():
    cache = make(block_size=2)
    tokens = [1, 2, 3, 2**31 - 1]
    cache.insert(NS, tokens, cache.allocate(2))
    forms = [
        tokens,
        tuple(tokens),
        array("i", tokens),
        array("q", tokens),
        np.array(tokens, dtype=np.int32),
        np.array(tokens, dtype=np.int64),
        np.repeat(np.array(tokens, dtype=np.int32), 2)[::2],
        pack(tokens),
        bytearray(pack(tokens)),
        memoryview(pack(tokens)),
        [np.int64(token) for token in tokens],
    ]
    assert [cache.match(NS, form).num_tokens for form in forms] == [4] * len(forms)
    assert unpack(pack(tokens)) == tokens


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [2**31],
        ["a"],
        "ab",
        [1.0],
        [None],
        b"abc",
        3,
        np.array([1.0], dtype=np.float32),
        np.array([[1, 2]], dtype=np.int32),
        np.array([-1], dtype=np.int32),
        np.array([2**40]),
        range(-2, 0),
    ],
)
def test_what_is_no_token_path_is_refused(tokens):
    cache = make()
    for call in (
        lambda: pack(tokens),
        lambda: cache.match(NS, tokens),
        lambda: cache.acquire(NS, tokens, num_blocks=1),
        lambda: cache.insert(NS, tokens, []),
    ):
        with pytest.raises(InvalidTokens):
            call()
    cache.check()
    assert cache.stats() == make().stats()


def test_every_error_about_input_is_a_value_error_of_the_family():
    for kind in (InvalidBlocks, InvalidTokens, NotLocked, UnknownPolicy):
        assert issubclass(kind, ValueError)
        assert issubclass(kind, RadixError)


def test_an_unknown_policy_is_refused_with_the_names_there_are():
    with pytest.raises(UnknownPolicy, match="'mru'; there are lru, lfu, fifo, priority"):
        make(policy="mru")


@pytest.mark.parametrize(
    "call",
    [lambda: BlockPool(0), lambda: make(block_size=0), lambda: make().evict(-1), lambda: make().allocate(-1)],
)
def test_senseless_sizes_are_refused(call):
    with pytest.raises(ValueError, match=r"-1|not 0"):
        call()


def test_fifo_evicts_what_came_first_whatever_was_used():
    cache = RadixCache(BlockPool(2), 1, policy=FIFO())
    cache.insert(NS, [1], cache.allocate(1))
    cache.insert(NS, [2], cache.allocate(1))
    cache.unlock(cache.acquire(NS, [1], num_blocks=1).node)
    cache.evict(1)
    assert [cache.match(NS, [token]).num_tokens for token in (1, 2)] == [0, 1]


@pytest.mark.parametrize("wrong", [[0], [0, 1, 2], [0, 0], [0, 7], [0, 8], [0, -1], [0, "x"], [5, 1]])
def test_insert_refuses_blocks_that_are_not_the_callers_and_changes_nothing(wrong):
    cache = make()
    mine = cache.allocate(2)
    cache.insert(NS, [5], cache.allocate(1))
    cache.insert(NS, [6, 7], cache.allocate(2))
    assert (mine, cache.pool.num_free) == ([0, 1], 3)
    before = cache.stats()
    wrong = [3 if block == 5 else block for block in wrong]  # 3 is the tree's, elsewhere
    with pytest.raises(InvalidBlocks):
        cache.insert(NS, [1, 2], wrong)
    assert cache.stats() == before
    cache.check()


def test_insert_leaves_a_block_alone_that_the_caller_had_from_the_tree():
    cache = make()
    first = cache.insert(NS, [1], cache.allocate(1))
    done = cache.insert(NS, [1, 2], first.blocks + cache.allocate(1))
    assert done.blocks == cache.match(NS, [1, 2]).blocks
    cache.check()


def test_a_ragged_end_is_ignored():
    cache = make(block_size=4)
    done = cache.insert(NS, [1, 2, 3, 4, 5], cache.allocate(1))
    assert done.node.num_blocks == 1
    assert cache.insert(NS, [1, 2, 3], []).blocks == []
    cache.check()


@pytest.mark.parametrize("wrong", [[0, 0], [7], [8], [-1], [1, 2]])
def test_free_refuses_blocks_that_are_not_private_and_frees_none(wrong):
    cache = make()
    cache.allocate(2)
    cache.insert(NS, [1], cache.allocate(1))
    with pytest.raises(InvalidBlocks):
        cache.free(wrong)
    assert cache.stats().private == 2
    assert [cache.pool.owner(block) for block in (0, 2, 7)] == [Owner.PRIVATE, Owner.CACHED, Owner.FREE]
    cache.check()


def test_a_block_is_not_freed_twice():
    cache = make()
    mine = cache.allocate(1)
    cache.free(mine)
    with pytest.raises(InvalidBlocks, match="block 0 is free, not private"):
        cache.free(mine)


def test_unlock_without_a_lock_is_refused():
    cache = make()
    cache.insert(NS, [1, 2], cache.allocate(2))
    whole, half = cache.match(NS, [1, 2]).node, cache.match(NS, [1]).node
    unknown = cache.match(Namespace(salt="new"), [1]).node
    cache.lock(whole)
    for ref in (half, unknown):
        with pytest.raises(NotLocked):
            cache.unlock(ref)
    cache.lock(half)
    cache.unlock(half)
    with pytest.raises(NotLocked):  # although its blocks are still locked, from below
        cache.unlock(half)
    cache.unlock(whole)
    cache.check()


def test_a_reference_whose_blocks_left_is_stale_even_if_the_same_ids_came_back():
    cache = make(2)
    done = cache.insert(NS, [1, 2], cache.allocate(2))
    half = cache.match(NS, [1]).node
    cache.evict(1)
    again = cache.insert(NS, [1, 3], [done.blocks[0], *cache.allocate(1)])  # grows the same leaf in place
    assert again.blocks == done.blocks
    before = cache.stats()
    with pytest.raises(StaleNode):
        cache.lock(done.node)
    assert cache.stats() == before
    cache.lock(half)
    cache.lock(again.node)
    cache.check()


def test_a_reference_survives_splits():
    cache = make()
    whole = cache.insert(NS, [1, 2, 3], cache.allocate(3)).node
    half = cache.match(NS, [1, 2]).node
    for end in (9, 8):
        cache.insert(NS, [1, end], cache.allocate(2))
    for ref in (half, whole, half):
        cache.lock(ref)
        cache.check()
    for ref in (half, half, whole):
        cache.unlock(ref)
        cache.check()
    assert cache.stats().locked == 0


def test_the_empty_path_of_a_namespace_that_was_filled_since_is_stale():
    cache = make()
    ref = cache.match(NS, [1]).node
    cache.insert(NS, [1], cache.allocate(1))
    with pytest.raises(StaleNode):
        cache.lock(ref)
    cache.lock(cache.match(NS, [2]).node)
    assert cache.stats().locks == 1
    cache.check()


def test_many_namespaces_leave_nothing_behind():
    cache = make()
    for number in range(1_000):
        space = Namespace(salt=str(number))
        grip = cache.acquire(space, [1, 2], num_blocks=2)
        cache.unlock(cache.extend(grip.node, [1, 2], grip.new_blocks).node)
        cache.match(Namespace(salt=f"not {number}"), [1])
    assert cache.stats().namespaces == 4
    cache.evict(8)
    assert cache.stats().namespaces == 0
    cache.check()


def test_the_tail_may_be_evicted_by_the_very_admission():
    cache = make(1, block_size=4)
    cache.insert(NS, [1, 2, 3, 4], cache.allocate(1))
    grip = cache.acquire(NS, [1, 2, 3], num_blocks=1)
    assert (grip.tail_tokens, grip.tail_block, grip.new_blocks) == (3, 0, [0])
    cache.check()


def test_a_leaf_that_another_branch_has_locked_does_not_grow_under_its_lock():
    cache = make()
    ref = cache.insert(NS, [1], cache.allocate(1)).node
    cache.lock(ref)
    cache.lock(ref)
    done = cache.extend(ref, [2], cache.allocate(1))
    assert cache.stats().nodes == 2
    cache.unlock(done.node)
    assert cache.evict(9) == 1
    cache.unlock(ref)
    cache.check()


def test_decoding_grows_one_node():
    cache = make(64, block_size=2)
    grip = cache.acquire(NS, [1, 1], num_blocks=1)
    ref = cache.extend(grip.node, [1, 1], grip.new_blocks).node
    for token in range(20):
        ref = cache.extend(ref, [token, token], cache.allocate(1)).node
    assert cache.stats().nodes == 1
    assert ref.num_blocks == 21
    cache.unlock(ref)
    cache.check()


def test_an_extension_needs_the_lock_and_private_blocks():
    cache = make()
    done = cache.insert(NS, [1], cache.allocate(1))
    mine = cache.allocate(1)
    with pytest.raises(NotLocked):
        cache.extend(done.node, [2], mine)
    cache.lock(done.node)
    for wrong in ([], [*mine, 7], [7], done.blocks):
        with pytest.raises(InvalidBlocks):
            cache.extend(done.node, [2], wrong)
    cache.check()
    assert cache.stats().private == 1


def test_out_of_blocks_says_the_numbers_and_the_way_out():
    cache = make(8)
    cache.insert(NS, [1, 2], cache.allocate(2))
    cache.lock(cache.match(NS, [1]).node)
    cache.allocate(3)
    with pytest.raises(OutOfBlocks) as refused:
        cache.allocate(5)
    assert str(refused.value) == (
        "need 5 blocks, have 3 free and 1 evictable of 8 (1 locked by 1 locks, 3 private); "
        "raise num_blocks or lower max_running"
    )


def test_a_namespace_and_stats_are_plain_values():
    assert pickle.loads(pickle.dumps(Namespace(salt="x"))) == Namespace(salt="x")
    stats = make().stats()
    assert stats.free + stats.evictable + stats.locked + stats.private == stats.num_blocks
    assert stats.pinned == 0


@pytest.mark.parametrize("seed", range(20))
def test_while_the_version_stands_every_match_finds_what_it_found(seed):
    draw = random.Random(seed)
    cache = make(num_blocks=draw.randrange(1, 6), block_size=2)
    paths = [list(path) for length in (2, 4, 5) for path in itertools.product((0, 1), repeat=length)]
    locks, stood = [], 0

    def found():
        hits = [cache.match(NS, path) for path in paths]
        return [(hit.blocks, hit.tail_tokens, hit.tail_block) for hit in hits]

    for _ in range(200):
        before, version = found(), cache.version
        path, action = draw.choice(paths), draw.randrange(5)
        if action == 0 and len(path) // 2 <= cache.stats().free + cache.stats().evictable:
            cache.insert(NS, path, cache.allocate(len(path) // 2))
        elif action == 1:
            ref = cache.match(NS, path).node
            cache.lock(ref)
            locks.append(ref)
        elif action == 2 and locks:
            cache.unlock(locks.pop())
        elif action == 3:
            cache.evict(1)
        elif draw.random() < 0.1:
            cache.clear()
        if cache.version == version:
            stood += 1
            assert found() == before
    assert stood > 20, "the version must not move with every call"
