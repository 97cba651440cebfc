"""The lines of BEHAVIOURS.md that the data structure shows alone, by their numbers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from phloem.radix import (
    BlockPool,
    InvalidNamespace,
    Namespace,
    NotLocked,
    OutOfBlocks,
    RadixCache,
    pack,
)

NS = Namespace()


@pytest.fixture
def cache():
    """16 tokens a block, and room for everything."""
    cache = make(2_000, 16)
    yield cache
    cache.check()


def make(num_blocks: int, block_size: int, policy: str = "lru") -> RadixCache:
    return RadixCache(BlockPool(num_blocks), block_size, policy=policy)


def put(cache: RadixCache, tokens, namespace: Namespace = NS):
    done = cache.insert(namespace, tokens, cache.allocate(len(tokens) // cache.block_size))
    cache.check()
    return done


def hit(cache: RadixCache, tokens, namespace: Namespace = NS) -> int:
    """Cached tokens as an engine counts them: whole blocks, and the rows of a copied one."""
    match = cache.match(namespace, tokens)
    assert len(match.blocks) * cache.block_size == match.num_tokens
    return match.num_tokens + match.tail_tokens


def numbers(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def test_b01_second_prompt_hits_all_but_the_last_token(cache):
    prompt = numbers(17)
    put(cache, prompt)
    match = cache.match(NS, prompt[:-1])
    assert (match.num_tokens, match.tail_tokens) == (16, 0)


def test_b01_a_prompt_of_exactly_one_block_hits_all_but_one_token_by_copy(cache):
    prompt = numbers(16)
    done = put(cache, prompt)
    match = cache.match(NS, prompt[:-1])
    assert (match.num_tokens, match.tail_tokens, match.tail_block) == (0, 15, done.blocks[0])


@pytest.mark.parametrize("differs_at", [0, 1, 15, 16, 17, 32, 1234])
def test_b02_long_keys_hit_exactly_up_to_the_token_where_they_differ(cache, differs_at):
    key = numbers(1600)
    done = put(cache, key)
    other = [*key[:differs_at], 99_999, *key[differs_at + 1 :]]
    match = cache.match(NS, other)
    assert match.num_tokens == differs_at // 16 * 16
    assert match.tail_tokens == differs_at % 16
    assert match.tail_block == (done.blocks[differs_at // 16] if differs_at % 16 else None)


@pytest.mark.parametrize("num_children", [2, 5, 33, 500])
def test_b02_the_best_tail_among_many_children_is_found(num_children):
    cache = make(num_children, 16)
    rng = random.Random(num_children)
    keys = [[rng.randint(0, 1) for _ in range(16)] for _ in range(num_children)]
    for key in keys:
        put(cache, key) if num_children < 50 else cache.insert(NS, key, cache.allocate(1))
    for _ in range(200):
        query = [rng.randint(0, 1) for _ in range(rng.randint(1, 15))]
        best = max(
            next((i for i, (a, b) in enumerate(zip(key, query, strict=False)) if a != b), len(query))
            for key in keys
        )
        assert hit(cache, query) == best


def test_b03_namespaces_share_nothing(cache):
    tokens = numbers(64)
    spaces = [
        NS,
        Namespace(salt="x"),
        Namespace(salt="y"),
        Namespace(adapter="x"),
        Namespace(kv_dtype="x"),
        Namespace(model="x"),
        Namespace(weights_version=1),
        Namespace(adapter="bc", salt="a"),
        Namespace(adapter="c", salt="ab"),
    ]
    for number, space in enumerate(spaces):
        assert [hit(cache, tokens, other) for other in spaces[number:]] == [0] * (len(spaces) - number)
        put(cache, tokens, space)
    assert cache.stats().namespaces == len(spaces)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"salt": ""}, "salt must not be empty"),
        ({"salt": "x" * 10_000}, "salt has 10000 bytes, more than the limit of 256"),
        ({"salt": b"x"}, "salt must be a str, not bytes"),
        ({"adapter": ""}, "adapter must not be empty"),
        ({"adapter": 3}, "adapter must be a str, not int"),
        ({"model": None}, "model must be a str, not NoneType"),
        ({"weights_version": "1"}, "weights_version must be an int, not str"),
        ({"weights_version": True}, "weights_version must be an int, not bool"),
        ({"weights_version": -1}, "weights_version must be 0 or more, not -1"),
    ],
)
def test_b04_a_bad_namespace_field_is_named_with_its_limit(fields, named):
    with pytest.raises(InvalidNamespace, match=named):
        Namespace(**fields)


def test_b04_something_else_than_a_namespace_is_refused_and_leaves_no_trace(cache):
    for wrong in (None, "default", ("salt", "x")):
        with pytest.raises(InvalidNamespace):
            cache.match(wrong, [1])
        with pytest.raises(InvalidNamespace):
            cache.acquire(wrong, [1], num_blocks=1)
    with pytest.raises(InvalidNamespace):
        cache.clear("default")
    assert cache.stats() == make(2_000, 16).stats()


def test_b05_a_thousand_matches_change_nothing():
    cache = make(3, 2)
    put(cache, [1, 1])
    put(cache, [2, 2, 2, 2])
    before = cache.stats()
    for _ in range(1_000):
        assert hit(cache, [1, 1]) == 2
        cache.match(NS, [2, 2, 2, 9])
        cache.match(Namespace(salt="unseen"), [1])
    assert cache.stats() == before
    cache.evict(1)
    assert hit(cache, [1, 1]) == 0  # the oldest went, whatever was matched


def test_b06_a_mismatch_in_the_second_block_hits_the_first(cache):
    key = numbers(48)
    put(cache, key)
    assert cache.match(NS, key[:20] + numbers(28, 500)).num_tokens == 16
    assert hit(cache, key[:20] + numbers(28, 500)) == 20
    assert cache.match(NS, key[:3] + numbers(45, 500)).num_tokens == 0
    assert hit(cache, key[:3] + numbers(45, 500)) == 3


def test_b07_the_same_block_content_at_two_positions_is_two_blocks():
    cache = make(8, 4)
    done = put(cache, [1, 2, 3, 4, 1, 2, 3, 4])
    assert len(set(done.blocks)) == 2
    assert cache.match(NS, [1, 2, 3, 4]).blocks == done.blocks[:1]
    assert cache.match(NS, [1, 2, 3, 4, 1, 2, 3, 4]).blocks == done.blocks
    assert cache.evict(1) == 1
    assert cache.match(NS, [1, 2, 3, 4, 1, 2, 3, 4]).blocks == done.blocks[:1]


def test_b08_a_path_caches_its_full_blocks_and_grows_by_one(cache):
    prompt, answer = numbers(55 + 4), numbers(19, 500)
    grip = cache.acquire(NS, prompt[:-1], num_blocks=4)
    first = cache.extend(grip.node, prompt, grip.new_blocks[:3])
    stats = cache.stats()
    assert (stats.locked, stats.private, stats.nodes) == (3, 1, 1)
    path = prompt + answer
    tail = grip.new_blocks[3:] + cache.allocate(1)
    second = cache.extend(first.node, path[48:], tail[:1])
    stats = cache.stats()
    assert (stats.locked, stats.private, stats.nodes) == (4, 1, 1)  # it grew in place
    cache.unlock(second.node)
    cache.free(tail[1:])
    assert cache.match(NS, path).num_tokens == 64


def test_b09_two_branches_store_their_base_once():
    cache = make(20, 2)
    base, left, right = [1, 1, 2, 2], [3, 3, 4, 4, 5, 5], [6, 6]
    put(cache, base + left)
    put(cache, base + right)
    stats = cache.stats()
    assert stats.evictable == 2 + 3 + 1
    assert stats.duplicates == 2
    assert cache.match(NS, base + left).num_tokens == 10
    assert cache.match(NS, base + right).num_tokens == 6
    assert cache.match(NS, base + left).blocks[:2] == cache.match(NS, base + right).blocks[:2]


def test_b10_blocks_that_the_tree_has_go_back_to_the_pool():
    cache = make(10, 2)
    first = put(cache, [1, 1, 2, 2])
    mine = cache.allocate(3)
    second = cache.insert(NS, [1, 1, 2, 2, 3, 3], mine)
    assert second.blocks == first.blocks + mine[2:]
    assert cache.stats().free == 10 - 3
    assert cache.stats().private == 0
    assert cache.allocate(2) == mine[:2]


def test_b10_a_twin_adopts_what_the_first_committed():
    cache = make(10, 1)
    first = cache.acquire(NS, [], num_blocks=1)
    twin = cache.acquire(NS, [], num_blocks=2)
    done = cache.extend(first.node, [7], first.new_blocks)
    adopted = cache.extend(twin.node, [7, 8], twin.new_blocks)
    assert adopted.blocks == [*done.blocks, twin.new_blocks[1]]
    cache.check()
    cache.unlock(done.node)  # the twin's lock protects both, the first one's held only the first
    assert cache.evict(9) == 0
    cache.unlock(adopted.node)
    assert cache.evict(9) == 2


def test_b11_a_split_keeps_locks_recency_and_priority_of_both_parts():
    cache = make(6, 1, policy="priority")
    cache.insert(NS, [1, 2, 3], cache.allocate(3), priority=5)
    grip = cache.acquire(NS, [1, 2, 3], num_blocks=3)
    put(cache, [1, 9])  # splits under the lock
    put(cache, [8])
    assert cache.evict(10) == 2  # what is not locked
    cache.check()
    assert cache.match(NS, [1, 2, 3]).num_tokens == 3
    assert cache.match(NS, [1]).num_tokens == 1
    cache.unlock(grip.node)
    with pytest.raises(NotLocked):
        cache.unlock(grip.node)
    put(cache, [8])
    cache.insert(NS, [7], cache.allocate(1), priority=1)
    assert cache.evict(2) == 2  # the low priorities, although used later
    assert cache.match(NS, [1, 2, 3]).num_tokens == 3


def test_b11_the_upper_part_of_a_split_keeps_its_hits():
    cache = make(4, 1, policy="lfu")
    put(cache, [1, 2])
    for _ in range(3):
        cache.unlock(cache.acquire(NS, [1, 2], num_blocks=2).node)
    put(cache, [1, 3])  # splits
    put(cache, [5])
    cache.unlock(cache.acquire(NS, [5], num_blocks=1).node)
    assert cache.evict(1) == 1  # [1, 3], never hit
    assert cache.evict(1) == 1  # [5], hit once
    assert cache.match(NS, [1, 2]).num_tokens == 2


def test_b12_memory_is_in_proportion_to_distinct_tokens():
    """10,000 sequences over one prefix of 10,000 tokens: each costs its own blocks and one node."""
    num_sequences, own = 10_000, 7
    cache = make(625 + num_sequences * own, 16)
    prefix = pack(numbers(10_000))
    grip = cache.acquire(NS, prefix, num_blocks=625)
    base = cache.extend(grip.node, prefix, grip.new_blocks)
    for number in range(num_sequences):
        cache.lock(base.node)
        tokens = pack([10_000 + number, *numbers(own * 16 - 1)])
        done = cache.extend(base.node, tokens, cache.allocate(own))
        cache.unlock(done.node)
    stats = cache.stats()
    assert stats.free == 0
    assert stats.nodes == num_sequences + 1
    assert cache.match(NS, prefix + tokens).num_tokens == 10_000 + own * 16
    cache.unlock(base.node)
    cache.check()


def test_b13_a_chain_of_ten_thousand_nodes_works():
    depth = 10_000
    cache = make(depth, 1)
    path = pack([0] * depth)
    cache.insert(NS, path, cache.allocate(depth))
    for number in range(depth - 1, 0, -1):  # cut it at every block
        ref = cache.match(NS, path[: 4 * number]).node
        cache.lock(ref)
        cache.unlock(ref)
    assert cache.stats().nodes == depth
    grip = cache.acquire(NS, path, num_blocks=depth)
    cache.check()
    assert cache.evict(1) == 0
    assert cache.clear().num_locked == depth
    cache.unlock(grip.node)
    assert cache.stats().free == depth
    cache.check()
    cache.insert(NS, path, cache.allocate(depth))
    assert cache.evict(depth + 1) == depth


def test_b14_a_lock_protects_a_node_and_what_is_above_it_but_no_sibling():
    cache = make(4, 1)
    put(cache, [1, 2])
    put(cache, [1, 3])
    put(cache, [4])
    ref = cache.match(NS, [1, 2]).node
    cache.lock(ref)
    assert cache.stats().locked == 2
    assert cache.evict(9) == 2
    assert [hit(cache, tokens) for tokens in ([1, 2], [1, 3], [4])] == [2, 1, 0]
    cache.unlock(ref)


def test_b14_a_lock_in_the_middle_of_a_node_leaves_the_rest_to_eviction():
    cache = make(4, 1)
    put(cache, [1, 2, 3, 4])
    cache.lock(cache.match(NS, [1, 2]).node)
    assert cache.evict(9) == 2
    assert hit(cache, [1, 2, 3, 4]) == 2


def test_b15_an_admission_that_cannot_be_met_changes_nothing():
    """5 free, 3 more wanted than those, 3 of the hits evictable: they are needed, hence no room."""
    cache = make(8, 1)
    put(cache, [1, 2, 3])
    before, match = cache.stats(), cache.match(NS, [1, 2, 3])
    with pytest.raises(OutOfBlocks) as refused:
        cache.acquire(NS, [1, 2, 3, 4], num_blocks=3 + 6)
    shortage = refused.value.shortage
    assert (shortage.needed, shortage.free, shortage.evictable, shortage.reserved) == (6, 5, 3, 3)
    assert "need 6 blocks, have 5 free and 3 evictable (3 of them the hit itself) of 8" in str(refused.value)
    assert cache.stats() == replace(before, refusals=1)
    assert cache.match(NS, [1, 2, 3]) == match
    cache.check()


def test_b15_a_refusal_in_the_middle_of_a_node_does_not_split_or_touch_it():
    cache = make(4, 1)
    put(cache, [1, 2])
    put(cache, [5])
    with pytest.raises(OutOfBlocks):
        cache.acquire(NS, [1], num_blocks=9)
    with pytest.raises(OutOfBlocks):
        cache.acquire(Namespace(salt="new"), [1], num_blocks=9)
    with pytest.raises(OutOfBlocks):
        cache.allocate(5)
    assert (cache.stats().nodes, cache.stats().namespaces) == (2, 1)
    assert cache.evict(2) == 2
    assert [hit(cache, [1, 2]), hit(cache, [5])] == [0, 1]


def test_b16_a_locked_hit_is_no_longer_evictable():
    cache = make(8, 1)
    put(cache, [1, 2, 3])
    grip = cache.acquire(NS, [1, 2, 3], num_blocks=3)
    assert (grip.blocks, grip.new_blocks) == (cache.match(NS, [1, 2, 3]).blocks, [])
    assert (cache.stats().evictable, cache.stats().locked) == (0, 3)
    with pytest.raises(OutOfBlocks):
        cache.allocate(6)
    assert len(cache.allocate(5)) == 5


def test_b17_eviction_takes_the_oldest_leaf_from_its_end_and_only_what_is_short():
    cache = make(6, 1)
    put(cache, [1, 2, 3])
    put(cache, [4, 5])
    assert cache.stats().free == 1
    cache.allocate(3)
    assert cache.stats().evictions == 2
    assert [hit(cache, [1, 2, 3]), hit(cache, [4, 5])] == [1, 2]
    cache.check()


def test_b18_a_parent_becomes_a_candidate_when_its_last_child_goes():
    cache = make(4, 1)
    put(cache, [1])
    cache.unlock(cache.acquire(NS, [1], num_blocks=1).node)  # hit, so that what follows gets nodes of its own
    put(cache, [1, 2])
    put(cache, [1, 3])
    assert cache.stats().nodes == 3
    assert cache.evict(2) == 2
    assert hit(cache, [1]) == 1
    assert cache.evict(1) == 1
    assert cache.stats().namespaces == 0


def test_b18_a_locked_descendant_keeps_all_above_it():
    cache = make(6, 1)
    put(cache, [1, 2, 3])
    put(cache, [1, 2, 4])
    ref = cache.match(NS, [1, 2, 3]).node
    cache.lock(ref)
    assert cache.evict(4) == 1
    assert hit(cache, [1, 2, 3]) == 3


def test_b19_in_a_pool_of_two_the_older_block_stays_when_it_was_hit():
    cache = make(2, 1)
    put(cache, [1])
    put(cache, [2])
    cache.unlock(cache.acquire(NS, [1], num_blocks=1).node)
    put(cache, [3])
    assert [hit(cache, [token]) for token in (1, 2, 3)] == [1, 0, 1]


def test_b20_an_eviction_among_forty_thousand_leaves_is_no_scan():
    """Counted, not timed: the policy's key is asked for once per leaf that is sorted in, never on eviction."""
    calls = 0

    class Counting:
        name = "counting"

        def key(self, node):
            nonlocal calls
            calls += 1
            return node.last_used

    cache = RadixCache(BlockPool(40_000), 1, policy=Counting())
    for token in range(40_000):
        cache.insert(NS, [token], cache.allocate(1))
    calls = 0
    for _ in range(100):
        assert cache.evict(1) == 1
    assert calls == 0
    assert [hit(cache, [99]), hit(cache, [100])] == [0, 1]


def test_b21_hit_counts_move_once_per_admission():
    cache = make(4, 1, policy="lfu")
    put(cache, [1, 2])
    put(cache, [5])
    grip = cache.acquire(NS, [1, 2], num_blocks=3)
    for token in (3, 4):  # the chunks of one request are no further hits
        done = cache.extend(grip.node, [token], grip.new_blocks)
        grip = replace(grip, node=done.node, new_blocks=cache.allocate(1) if token == 3 else [])
    cache.unlock(grip.node)
    assert cache.stats().queries == 1
    assert cache.stats().hit_tokens == 2
    cache.check()
    assert hit(cache, [1, 2]) == 2


def test_b22_a_scan_of_ten_times_the_capacity_leaves_a_prefix_that_was_used():
    cache = make(50, 1, policy="lfu")
    put(cache, numbers(10))
    for _ in range(5):
        cache.unlock(cache.acquire(NS, numbers(10), num_blocks=10).node)
    for start in range(1_000, 1_500, 5):
        grip = cache.acquire(NS, numbers(5, start), num_blocks=5)
        cache.unlock(cache.extend(grip.node, numbers(5, start), grip.new_blocks).node)
    assert hit(cache, numbers(10)) == 10


def test_b35_clear_while_busy_hides_the_old_and_leaves_it_to_its_holders():
    cache = make(8, 1)
    put(cache, [5, 6])
    grip = cache.acquire(NS, [1, 2], num_blocks=2)
    old = cache.extend(grip.node, [1, 2], grip.new_blocks)
    cleared = cache.clear(NS)
    assert (cleared.num_freed, cleared.num_locked) == (2, 2)
    assert [hit(cache, [1, 2]), hit(cache, [5, 6])] == [0, 0]
    old = cache.extend(old.node, [3], cache.allocate(1))  # the old request goes on
    new = put(cache, [1, 2, 3])  # and a new tree grows beside it
    assert cache.match(NS, [1, 2, 3]).blocks == new.blocks
    assert (cache.stats().locked, cache.stats().evictable) == (3, 3)
    cache.unlock(old.node)
    assert (cache.stats().locked, cache.stats().evictable, cache.stats().free) == (0, 3, 5)
    assert cache.match(NS, [1, 2, 3]).blocks == new.blocks
    cache.check()


def test_b35_a_request_without_a_hit_that_began_before_a_clear_does_not_commit_after_it():
    cache = make(4, 1)
    grip = cache.acquire(NS, [1, 2], num_blocks=2)
    cache.clear()
    done = cache.extend(grip.node, [1, 2], grip.new_blocks)
    assert hit(cache, [1, 2]) == 0
    cache.unlock(done.node)
    assert cache.stats().free == 4
    cache.check()
