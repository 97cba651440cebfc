"""Leases: pins that protect a path, renew themselves by use, and end alone (rule 13)."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import pytest
from manual_clock import ManualClock

from phloem.radix import (
    BlockPool,
    InvalidLease,
    InvalidNamespace,
    InvalidTokens,
    LeaseEnded,
    Namespace,
    NothingToPin,
    NotLocked,
    OutOfBlocks,
    PinRefused,
    RadixCache,
    RadixError,
)

NS = Namespace()


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def cache(clock):
    """8 blocks of 2 tokens, of which 4 may be pinned; [1, 1, 2, 2, 3, 3] is cached."""
    cache = RadixCache(BlockPool(8), 2, clock=clock)
    put(cache, [1, 1, 2, 2, 3, 3])
    yield cache
    cache.check()


def put(cache: RadixCache, tokens, namespace: Namespace = NS):
    return cache.insert(namespace, tokens, cache.allocate(len(tokens) // cache.block_size))


def use(cache: RadixCache, tokens) -> int:
    """Admits a path that needs no new block, and is done with it at once."""
    grip = cache.acquire(NS, tokens, num_blocks=0)
    cache.unlock(grip.node)
    return grip.num_tokens


def test_a_pinned_prefix_survives_when_all_else_is_evicted(cache):
    lease = cache.pin(NS, [1, 1, 2, 2], owner="bot")
    assert (lease.num_tokens, lease.owner, lease.ended) == (4, "bot", None)
    assert cache.evict(8) == 1
    assert cache.match(NS, [1, 1, 2, 2, 3, 3]).num_tokens == 4
    assert (cache.stats().pinned, cache.stats().locked, cache.stats().leases) == (2, 2, 1)
    lease.release()
    assert cache.stats().pinned == 0
    assert cache.evict(8) == 2


def test_what_is_cached_of_a_path_is_pinned_in_whole_blocks(cache):
    assert cache.pin(NS, [1, 1, 2, 2, 3]).num_tokens == 4
    assert cache.pin(NS, [1, 1, 9, 9]).num_tokens == 2


@pytest.mark.parametrize("tokens", [[], [1], [9, 9], [1, 9]])
def test_a_pin_of_nothing_cached_is_refused(cache, tokens):
    before = cache.stats()
    with pytest.raises(NothingToPin, match=f"of {len(tokens)} tokens, no whole block of 2 is cached"):
        cache.pin(NS, tokens)
    with pytest.raises(NothingToPin):
        cache.pin(Namespace(salt="x"), [1, 1])
    assert cache.stats() == before


def test_releasing_twice_is_once(cache):
    first, second = cache.pin(NS, [1, 1]), cache.pin(NS, [1, 1])
    first.release()
    first.release()
    assert cache.stats().leases == 1
    assert cache.evict(8) == 2
    assert (first.ended, second.ended) == ("released", None)


def test_a_lease_ends_alone_when_its_time_is_over(cache, clock):
    lease = cache.pin(NS, [1, 1], ttl=10)
    clock.now += 9.5
    assert (cache.expire(), lease.expires_in_s) == (0, 0.5)
    clock.now += 0.5
    assert lease.expires_in_s == 0
    assert cache.leases() == ()
    assert cache.expire() == 1
    assert (lease.ended, cache.stats().expired_leases, cache.stats().pinned) == ("expired", 1, 0)
    assert cache.evict(8) == 3


def test_leases_end_in_the_order_of_their_times_not_of_their_pins(cache, clock):
    leases = [cache.pin(NS, [1, 1], ttl=ttl) for ttl in (30, 10, 20)]
    seen = []
    for _ in range(3):
        clock.now += 10
        assert cache.expire() == 1
        seen.append([lease.ended is not None for lease in leases])
    assert seen == [[False, True, False], [False, True, True], [True, True, True]]


def test_an_admission_that_needs_the_room_of_a_lease_that_is_due_gets_it(cache, clock):
    cache.pin(NS, [1, 1, 2, 2, 3, 3], ttl=10)
    with pytest.raises(OutOfBlocks, match="3 locked by 1 locks, 3 of them pinned by leases"):
        cache.allocate(6)
    with pytest.raises(OutOfBlocks, match="raise num_blocks, release leases or lower max_running"):
        cache.acquire(NS, [9, 9], num_blocks=6)
    clock.now += 10
    assert len(cache.allocate(6)) == 6


def test_an_admission_ends_what_is_due_too(cache, clock):
    lease = cache.pin(NS, [1, 1, 2, 2, 3, 3], ttl=10)
    clock.now += 10
    assert len(cache.acquire(NS, [9, 9], num_blocks=6).new_blocks) == 6
    assert lease.ended == "expired"


def test_use_of_the_whole_path_renews_a_lease(cache, clock):
    lease = cache.pin(NS, [1, 1, 2, 2], ttl=10)
    for tokens in ([1, 1, 2, 2, 3, 3], [1, 1, 2, 2], [1, 1, 2, 2, 9]):
        clock.now += 9
        use(cache, tokens)
        assert lease.expires_in_s == 10
        assert cache.expire() == 0
    clock.now += 10
    assert cache.expire() == 1


def test_a_prompt_of_whole_blocks_renews_its_own_lease_though_its_last_token_must_run(cache, clock):
    prompt = [1, 1, 2, 2, 3, 3]
    lease = cache.pin(NS, prompt, ttl=10)
    clock.now += 9
    assert use(cache, prompt[:-1]) == 4
    assert lease.expires_in_s == 10


@pytest.mark.parametrize("tokens", [[1, 1], [1, 1, 9, 9], [9, 9], [1, 1, 2]])
def test_use_of_less_does_not_renew_it(cache, clock, tokens):
    lease = cache.pin(NS, [1, 1, 2, 2, 3, 3], ttl=10)
    clock.now += 9
    use(cache, tokens)
    assert lease.expires_in_s == 1


def test_match_and_explain_and_a_refused_admission_do_not_renew_it(cache, clock):
    lease = cache.pin(NS, [1, 1, 2, 2], ttl=10)
    clock.now += 4
    cache.match(NS, [1, 1, 2, 2])
    cache.explain(NS, [1, 1, 2, 2])
    with pytest.raises(OutOfBlocks):
        cache.acquire(NS, [1, 1, 2, 2], num_blocks=99)
    assert lease.expires_in_s == 6


def test_use_after_the_time_is_over_does_not_revive_a_lease(cache, clock):
    lease = cache.pin(NS, [1, 1], ttl=10)
    clock.now += 10
    use(cache, [1, 1])
    assert lease.ended == "expired"


def test_a_lease_is_renewed_from_now_and_for_as_long_as_one_says(cache, clock):
    lease = cache.pin(NS, [1, 1], ttl=10)
    clock.now += 6
    lease.renew()
    assert lease.expires_in_s == 10
    lease.renew(ttl=3)
    assert (lease.ttl, lease.expires_in_s) == (3, 3)
    clock.now += 3
    with pytest.raises(LeaseEnded, match="the lease of 'app' on 2 tokens was expired; pin again"):
        lease.renew()
    assert cache.stats().leases == 0


def test_a_released_lease_cannot_be_renewed(cache):
    lease = cache.pin(NS, [1, 1])
    lease.release()
    with pytest.raises(LeaseEnded, match="was released"):
        lease.renew()


def test_blocks_of_several_leases_count_once(cache):
    leases = [cache.pin(NS, tokens) for tokens in ([1, 1], [1, 1, 2, 2], [1, 1, 2, 2], [1, 1])]
    assert (cache.stats().pinned, cache.stats().leases, cache.stats().locks) == (2, 4, 4)
    counts = []
    for lease in leases:
        lease.release()
        cache.check()
        counts.append(cache.stats().pinned)
    assert counts == [2, 2, 1, 0]


def test_half_of_the_pool_may_be_pinned_and_the_refusal_says_what_is(cache, clock):
    put(cache, [4, 4, 5, 5])
    cache.pin(NS, [1, 1, 2, 2], ttl=41, owner="app")
    cache.pin(NS, [1, 1, 2, 2, 3, 3], ttl=3, owner="bot")
    before = cache.stats()
    with pytest.raises(PinRefused) as refused:
        cache.pin(NS, [4, 4, 5, 5])
    assert str(refused.value) == (
        "need 2 more blocks pinned, have 1 left of 4 (3 pinned by 2 leases: 'bot' 6 tokens for 3.0 s more, "
        "'app' 4 tokens for 41.0 s more); release a lease, wait for one to end, or raise max_pinned_blocks"
    )
    assert [lease.owner for lease in refused.value.shortage.leases] == ["bot", "app"]
    assert cache.stats() == before
    assert cache.pin(NS, [4, 4]).num_tokens == 2
    clock.now += 3
    assert cache.pin(NS, [4, 4, 5, 5]).num_tokens == 4  # the lease that was due made room by itself


def test_a_pin_beyond_the_whole_budget_is_told_so(clock):
    cache = RadixCache(BlockPool(8), 2, max_pinned_blocks=1, clock=clock)
    put(cache, [1, 1, 2, 2])
    with pytest.raises(PinRefused, match=r"left of 1 \(0 pinned\); pin a shorter prefix, or raise"):
        cache.pin(NS, [1, 1, 2, 2])
    cache.check()


def test_a_refusal_lists_some_leases_and_counts_the_others(cache):
    for number in range(20):
        cache.pin(NS, [1, 1], owner=f"user {number}")
    put(cache, [4, 4, 5, 5, 6, 6, 7, 7])
    with pytest.raises(PinRefused, match=r"pinned by 20 leases: .*and 12 more"):
        cache.pin(NS, [4, 4, 5, 5, 6, 6, 7, 7])


def test_a_budget_of_nothing_refuses_every_pin():
    cache = RadixCache(BlockPool(8), 2, max_pinned_blocks=0)
    put(cache, [1, 1])
    with pytest.raises(PinRefused):
        cache.pin(NS, [1, 1])


@pytest.mark.parametrize("budget", [-1, 9])
def test_a_budget_that_the_pool_has_not_is_refused(budget):
    with pytest.raises(ValueError, match=f"max_pinned_blocks must be 0 to 8, not {budget}"):
        RadixCache(BlockPool(8), 2, max_pinned_blocks=budget)


@pytest.mark.parametrize(
    "ttl", [0, -1, math.inf, math.nan, -math.inf, 10**400, "60", None, True, Decimal("1"), 1j]
)
def test_a_senseless_lifetime_is_refused(cache, ttl):
    before = cache.stats()
    with pytest.raises(InvalidLease, match="ttl must be"):
        cache.pin(NS, [1, 1], ttl=ttl)
    assert cache.stats() == before
    lease = cache.pin(NS, [1, 1], ttl=5)
    if ttl is not None:
        with pytest.raises(InvalidLease, match="ttl must be"):
            lease.renew(ttl=ttl)
    assert (lease.ttl, lease.expires_in_s) == (5, 5)


def test_any_real_number_is_a_lifetime(cache):
    assert [cache.pin(NS, [1, 1], ttl=ttl).ttl for ttl in (3, 0.5, Fraction(1, 4))] == [3, 0.5, 0.25]


@pytest.mark.parametrize(
    ("owner", "named"), [("", "not 0"), ("x" * 257, "not 257"), (None, "NoneType"), (b"x", "bytes")]
)
def test_a_senseless_owner_is_refused(cache, owner, named):
    before = cache.stats()
    with pytest.raises(InvalidLease, match=f"owner must .*{named}"):
        cache.pin(NS, [1, 1], owner=owner)
    assert cache.stats() == before


def test_a_pin_takes_tokens_and_namespaces_only(cache):
    with pytest.raises(InvalidTokens):
        cache.pin(NS, [-1])
    with pytest.raises(InvalidNamespace):
        cache.pin("default", [1, 1])
    assert cache.stats().leases == 0


def test_the_errors_are_of_the_family():
    assert all(issubclass(kind, RadixError) for kind in (InvalidLease, LeaseEnded, NothingToPin, PinRefused))
    assert all(issubclass(kind, ValueError) for kind in (InvalidLease, NothingToPin))


def test_clear_ends_leases_and_frees_what_nobody_else_has_locked(cache):
    lease = cache.pin(NS, [1, 1, 2, 2])
    grip = cache.acquire(NS, [1, 1], num_blocks=0)
    done = cache.clear()
    assert (done.num_freed, done.num_locked) == (2, 1)
    assert (lease.ended, cache.stats().pinned, cache.stats().leases) == ("cleared", 0, 0)
    lease.release()
    cache.unlock(grip.node)
    assert cache.stats().free == 8
    with pytest.raises(LeaseEnded, match="was cleared"):
        lease.renew()


def test_clear_of_one_namespace_leaves_the_leases_of_the_others(cache):
    other = Namespace(salt="x")
    put(cache, [1, 1], other)
    mine, theirs = cache.pin(NS, [1, 1]), cache.pin(other, [1, 1])
    cache.clear(other)
    assert (mine.ended, theirs.ended) == (None, "cleared")


def test_the_lock_of_a_lease_is_not_the_callers_to_give_back(cache):
    cache.pin(NS, [1, 1, 2, 2])
    ref = cache.match(NS, [1, 1, 2, 2]).node
    mine = cache.allocate(1)
    with pytest.raises(NotLocked):
        cache.unlock(ref)
    with pytest.raises(NotLocked):
        cache.extend(ref, [9, 9], mine)
    cache.lock(ref)
    cache.unlock(ref)
    with pytest.raises(NotLocked):
        cache.unlock(ref)


def test_b11_a_split_keeps_a_lease_on_both_parts(cache, clock):
    lease = cache.pin(NS, [1, 1, 2, 2, 3, 3], ttl=10)
    put(cache, [1, 1, 9, 9])
    cache.check()
    assert cache.stats().pinned == 3
    clock.now += 9
    use(cache, [1, 1, 2, 2, 3, 3])
    assert lease.expires_in_s == 10
    assert cache.evict(8) == 1
    lease.release()
    assert cache.evict(8) == 3


def test_a_pinned_leaf_does_not_grow_under_its_lease(cache):
    cache.pin(NS, [1, 1, 2, 2, 3, 3])
    put(cache, [1, 1, 2, 2, 3, 3, 4, 4])
    grip = cache.acquire(NS, [1, 1, 2, 2, 3, 3], num_blocks=4)
    cache.unlock(cache.extend(grip.node, [5, 5], grip.new_blocks).node)
    assert cache.stats().pinned == 3
    assert cache.evict(8) == 2


def test_the_end_of_a_lease_is_no_use_of_its_path(cache):
    lease = cache.pin(NS, [1, 1, 2, 2, 3, 3])
    put(cache, [4, 4])
    lease.release()
    cache.evict(3)
    assert cache.match(NS, [4, 4]).num_tokens == 2


def test_leases_are_listed_with_what_they_protect(cache, clock):
    cache.pin(NS, [1, 1, 2, 2], ttl=20, owner="late")
    cache.pin(NS, [1, 1], ttl=10, owner="early")
    clock.now += 1
    shown = [
        (info.owner, info.namespace, info.num_tokens, info.ttl, info.expires_in_s) for info in cache.leases()
    ]
    assert shown == [("early", NS, 2, 10, 9), ("late", NS, 4, 20, 19)]


def test_a_lost_lease_ends_all_the_same(cache, clock):
    cache.pin(NS, [1, 1], ttl=10)  # nobody keeps it
    assert cache.stats().leases == 1
    clock.now += 10
    assert cache.expire() == 1


def test_leases_released_early_leave_nothing_behind(cache):
    for _ in range(1_000):
        lease = cache.pin(NS, [1, 1], ttl=1e9)
        use(cache, [1, 1])
        lease.release()
    assert len(cache._leases) == 0
    assert not cache._leases._used_at_s


def test_the_default_clock_is_the_real_one():
    cache = RadixCache(BlockPool(2), 1)
    put(cache, [1])
    assert 59 < cache.pin(NS, [1]).expires_in_s <= 60
