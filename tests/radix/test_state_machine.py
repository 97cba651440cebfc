"""RadixCache against a dict with losses that never loses what is locked (tests/support/naive_cache.py)."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import asdict

import pytest
from cache_mirror import Mirror
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from naive_cache import KEYS, Tokens
from naive_explain import check_sound, compare

from phloem.radix import MissReason, Namespace

NAMESPACES = [Namespace(salt="x"), Namespace(adapter="x")]
BLOCK_SIZES = [1, 2, 4, 16]
LABELS = [None, "a", "b"]
LIFETIMES = [1, 2, 5]
LARGE_TOKENS = [0xFEFF, 0xFF00, 0xFFFF, 0xFF0000, 2**31 - 1]

# Two tokens are enough to agree and to differ, and tiny pools evict all the time.
bits = st.lists(st.integers(0, 1), max_size=12)
names = st.sampled_from(NAMESPACES)
choices = st.integers(0, 7)
labels = st.sampled_from(LABELS)
lifetimes = st.sampled_from(LIFETIMES)
priorities = st.sampled_from([0, 0, 0, 1, 2])
pool_sizes = st.one_of(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(6, 512))


def stretched(tokens: list[int], mirror: Mirror) -> Tokens:
    """Repeats tokens so that a few bits fill some blocks of 16, and still differ inside them.

    No longer than what the pool can just not hold: paths that are refused again and again test nothing else.
    """
    block_size, num_blocks = mirror.naive.block_size, mirror.naive.num_blocks
    repeated = [token for token in tokens for _ in range(max(1, block_size // 4))]
    return tuple(repeated[: (num_blocks + 1) * block_size])


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=pool_sizes, block_size=st.sampled_from(BLOCK_SIZES), policy=st.sampled_from(sorted(KEYS))
    )
    def start(self, num_blocks: int, block_size: int, policy: str) -> None:
        self.mirror = Mirror(num_blocks, block_size, policy)

    def tokens(self, drawn: list[int]) -> Tokens:
        return stretched(drawn, self.mirror)

    @rule(namespace=names, drawn=bits)
    def match(self, namespace, drawn):
        self.mirror.match(namespace, self.tokens(drawn))

    @rule(namespace=names, drawn=bits, priority=priorities, adopt=st.booleans(), label=labels)
    def insert(self, namespace, drawn, priority, adopt, label):
        self.mirror.insert(namespace, self.tokens(drawn), priority=priority, adopt=adopt, label=label)

    @rule(namespace=names, drawn=bits, blocks=st.lists(st.integers(-1, 5), min_size=1, max_size=3))
    def insert_wrongly(self, namespace, drawn, blocks):
        self.mirror.insert_wrongly(namespace, self.tokens(drawn), blocks)

    @rule(choice=choices)
    def lock(self, choice):
        self.mirror.lock(choice)

    @rule(choice=choices)
    def unlock(self, choice):
        self.mirror.unlock(choice)

    @rule(choice=choices)
    def unlock_wrongly(self, choice):
        self.mirror.unlock_wrongly(choice)

    @rule(namespace=names, drawn=bits, extra=st.integers(0, 2), priority=priorities)
    def acquire(self, namespace, drawn, extra, priority):
        self.mirror.acquire(namespace, self.tokens(drawn), extra=extra, priority=priority)

    @rule(choice=choices, extra=st.integers(0, 2))
    def acquire_twin(self, choice, extra):
        self.mirror.acquire_twin(choice, extra=extra)

    @rule(choice=choices, drawn=bits, priority=priorities, label=labels)
    def extend(self, choice, drawn, priority, label):
        self.mirror.extend(choice, self.tokens(drawn), priority=priority, label=label)

    @rule(namespace=names, drawn=bits, ttl=lifetimes)
    def pin(self, namespace, drawn, ttl):
        self.mirror.pin(namespace, self.tokens(drawn), ttl=ttl)

    @rule(choice=choices)
    def release_lease(self, choice):
        self.mirror.release_lease(choice)

    @rule(choice=choices, ttl=st.one_of(st.none(), lifetimes))
    def renew(self, choice, ttl):
        self.mirror.renew(choice, ttl)

    @rule(seconds=st.sampled_from([1, 1, 3]))
    def wait(self, seconds):
        self.mirror.wait(seconds)

    @rule()
    def expire(self):
        self.mirror.expire()

    @rule(namespace=names, drawn=bits, limit=st.integers(0, 50), across=st.booleans())
    def explain(self, namespace, drawn, limit, across):
        compare(self.mirror, namespace, self.tokens(drawn), limit=limit, across_namespaces=across)

    @rule(choice=choices)
    def fork(self, choice):
        self.mirror.fork(choice)

    @rule(choice=choices)
    def release(self, choice):
        self.mirror.release(choice)

    @rule(count=st.integers(0, 6))
    def allocate_and_free(self, count):
        self.mirror.allocate_and_free(count)

    @rule(count=st.integers(0, 4))
    def evict(self, count):
        self.mirror.evict(count)

    @rule(namespace=st.sampled_from([*NAMESPACES, None]))
    def clear(self, namespace):
        self.mirror.clear(namespace)

    @invariant()
    def real_and_naive_hold_the_same(self):
        if hasattr(self, "mirror"):
            self.mirror.compare()

    def teardown(self):
        if hasattr(self, "mirror"):
            self.mirror.release_all()
            self.mirror.compare()
            assert self.mirror.real.stats().locked == 0


def random_tokens(mirror: Mirror, rng: random.Random) -> Tokens:
    naive = mirror.naive
    longest = min(24, naive.num_blocks * min(4, naive.block_size)) if rng.random() < 0.7 else 24
    tokens = stretched([rng.randint(0, 1) for _ in range(rng.randint(0, longest))], mirror)
    if mirror.refs and rng.random() < 0.4:  # again something seen lately, or beside it
        tokens = rng.choice(mirror.refs)[1].prefix + tokens[: rng.randint(0, 2 * naive.block_size)]
    if rng.random() < 0.02:  # ids that need more bytes in the ghost than those before
        large = rng.choice(LARGE_TOKENS)
        tokens = tuple(token and large for token in tokens)
    return tokens


def random_step(mirror: Mirror, rng: random.Random) -> None:
    """One operation drawn at random; grows and acquires more often than it clears."""
    namespace = rng.choice(NAMESPACES)
    tokens = random_tokens(mirror, rng)
    choice, priority, label = rng.randint(0, 7), rng.choice([0, 0, 0, 1, 2]), rng.choice(LABELS)
    ttl = rng.choice(LIFETIMES)
    operations = [
        (6, lambda: mirror.acquire(namespace, tokens, extra=rng.randint(0, 2), priority=priority)),
        (2, lambda: mirror.acquire_twin(choice, extra=rng.randint(0, 2))),
        (10, lambda: mirror.extend(choice, tokens, priority=priority, label=label)),
        (4, lambda: mirror.insert(namespace, tokens, priority=priority, adopt=choice < 4, label=label)),
        (1, lambda: mirror.insert_wrongly(namespace, tokens, [rng.randint(-1, 5) for _ in range(2)])),
        (2, lambda: mirror.match(namespace, tokens)),
        (1.5, lambda: mirror.lock(choice)),
        (4, lambda: mirror.unlock(choice)),
        (1, lambda: mirror.unlock_wrongly(choice)),
        (1, lambda: mirror.fork(choice)),
        (6, lambda: mirror.release(choice)),
        (1, lambda: mirror.allocate_and_free(rng.randint(0, 6))),
        (1, lambda: mirror.evict(rng.randint(0, 4))),
        (4, lambda: mirror.pin(namespace, tokens, ttl=ttl)),
        (0.5, lambda: mirror.release_lease(choice)),
        (0.5, lambda: mirror.renew(choice, rng.choice([None, ttl]))),
        (1, lambda: mirror.wait(1)),
        (0.5, mirror.expire),
        (0.2, lambda: mirror.clear(rng.choice([*NAMESPACES, None]))),
    ]
    weights, functions = zip(*operations, strict=True)
    rng.choices(functions, weights)[0]()


def random_question(mirror: Mirror, rng: random.Random, *, forgetful: bool) -> Counter[str]:
    """Asks why a random path is not cached; returns the reasons."""
    namespace, tokens = rng.choice(NAMESPACES), random_tokens(mirror, rng)
    if forgetful:
        check_sound(mirror, namespace, tokens)
        return Counter()
    limit = len(tokens) - rng.randint(0, 1) if rng.random() < 0.7 else rng.randint(0, 50)
    return Counter(
        compare(mirror, namespace, tokens, limit=max(0, limit), across_namespaces=rng.random() < 0.3)
    )


def run_randomly(num_steps: int, seed: int, steps_per_episode: int = 200) -> Counter[str]:
    """Many short lives of small caches, and few of larger ones; returns the sums of their counters."""
    totals: Counter[str] = Counter()
    for episode in range(num_steps // steps_per_episode):
        rng = random.Random(f"{seed}/{episode}")
        num_blocks = rng.randint(1, 5) if rng.random() < 0.8 else rng.randint(6, 64)
        block_size = rng.choice(BLOCK_SIZES)
        forgetful = rng.random() < 0.3
        # Room for no node, up to a dozen; now and then a token needs more bytes than those before.
        ghost_bytes = rng.randint(0, 5_000) if forgetful else 10**9
        mirror = Mirror(num_blocks, block_size, rng.choice(sorted(KEYS)), ghost_bytes=ghost_bytes)
        for _ in range(steps_per_episode):
            random_step(mirror, rng)
            mirror.compare()
            if rng.random() < 0.3:
                totals.update(random_question(mirror, rng, forgetful=forgetful))
        mirror.release_all()
        mirror.compare()
        stats = mirror.real.stats()
        assert sum(stats.hit_ages.counts) == stats.hits
        totals.update({name: value for name, value in asdict(stats).items() if isinstance(value, int)})
    return totals


def test_the_cache_is_a_dict_with_losses_that_never_loses_what_is_locked():
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=200,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_many_random_steps_agree_with_the_oracle():
    totals = run_randomly(50_000, seed=1)
    # The steps must do something: a run in which all is refused agrees with any oracle.
    assert totals["refusals"] < 2 * totals["queries"]
    assert totals["hits"] > totals["queries"] / 6
    assert totals["evictions"] > 4_000
    assert totals["duplicates"] > 300
    assert totals["expired_leases"] > 200
    for reason in set(MissReason) - {MissReason.BYPASSED}:
        assert totals[reason] > 150


@pytest.mark.slow
def test_a_million_random_steps_agree_with_the_oracle():
    run_randomly(1_000_000, seed=2)
