"""Ages of hits: counted once per admission, right but for what is promised, in bounded memory."""

import itertools
import random

import pytest
from manual_clock import ManualClock

from phloem.radix import BlockPool, Namespace, RadixCache
from phloem.radix.ages import MAX_SAMPLES, PRECISION, RESOLUTION_S, HitAges

NS = Namespace()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def cache(clock: ManualClock) -> RadixCache:
    return RadixCache(BlockPool(64), block_size=2, clock=clock)


def admit(cache: RadixCache, tokens: list[int]) -> None:
    """Run a prompt as a request does."""
    grip = cache.acquire(NS, tokens, num_blocks=len(tokens) // 2)
    rest = tokens[grip.num_tokens :]
    done = cache.extend(grip.node, rest, grip.new_blocks)
    cache.unlock(done.node)


def ages(cache: RadixCache) -> list[int]:
    return list(cache.stats().hit_ages.counts)


def test_a_hit_is_as_old_as_the_last_use_of_the_end_of_what_it_hits(
    cache: RadixCache, clock: ManualClock
) -> None:
    admit(cache, [1, 2, 3, 4])
    assert sum(ages(cache)) == 0, "nothing was hit"
    clock.now += 30
    admit(cache, [1, 2, 9, 9])  # hits the first block, which was used 30 s ago
    clock.now += 200
    admit(cache, [1, 2, 3, 4])  # hits both; the second was used 230 s ago, the first 200 s ago
    clock.now += 2
    admit(cache, [1, 2, 5, 5])
    counts = dict(zip((*cache.stats().hit_ages.bounds_s, None), ages(cache), strict=True))
    assert {bound: count for bound, count in counts.items() if count} == {60: 1, 300: 1, 5: 1}
    assert cache.stats().hit_ages.sum_s == pytest.approx(30 + 230 + 2)
    assert cache.stats().hits == 3


def test_a_refused_admission_is_no_hit(clock: ManualClock) -> None:
    cache = RadixCache(BlockPool(2), block_size=2, clock=clock)
    admit(cache, [1, 2])
    with pytest.raises(Exception, match="need"):
        cache.acquire(NS, [1, 2, 3, 4, 5, 6], num_blocks=3)
    assert sum(ages(cache)) == 0


@pytest.mark.parametrize("seed", range(5))
def test_an_age_is_told_from_few_samples_and_never_too_low(clock: ManualClock, seed: int) -> None:
    draw = random.Random(seed)
    found = HitAges(clock)
    used_at_s = [clock.now]
    for tick in range(1, 20_000):
        clock.now += draw.choice([0.0, 0.001, 0.02, 0.5, 3.0]) * (1000 if draw.random() < 0.001 else 1)
        found.sample(tick)
        used_at_s.append(clock.now)
        for asked in (tick, draw.randrange(tick + 1), max(0, tick - draw.randrange(50))):
            age_s = clock.now - used_at_s[asked]
            assert age_s <= found.age_s(asked) + 1e-9
            assert found.age_s(asked) <= age_s + age_s / PRECISION + RESOLUTION_S + 1e-9
        assert len(found._ticks) == len(found._times_s) <= MAX_SAMPLES


def test_a_year_of_use_takes_no_more_memory_and_is_seldom_thinned(clock: ManualClock) -> None:
    found = HitAges(clock)
    lengths = [1]
    for tick in range(1, 100_000):
        clock.now += 365 * 86_400 / 100_000 if tick < 50_000 else RESOLUTION_S
        found.sample(tick)
        lengths.append(len(found._ticks))
    assert max(lengths) <= MAX_SAMPLES
    thinned = [after for before, after in itertools.pairwise(lengths) if after < before]
    assert thinned
    assert max(thinned) <= MAX_SAMPLES / 2


def test_blocks_that_go_with_their_namespace_are_counted_apart_from_evicted_ones(cache: RadixCache) -> None:
    admit(cache, [1, 2, 3, 4])
    held = cache.acquire(NS, [1, 2], num_blocks=1)
    cache.evict(1)
    admit(cache, [7, 8])
    cache.clear()
    assert (cache.stats().evictions, cache.stats().cleared) == (1, 1)
    cache.unlock(held.node)
    assert (cache.stats().evictions, cache.stats().cleared) == (1, 2)
    assert cache.stats().free == 64
