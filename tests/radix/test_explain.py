"""`explain`: how far a path is cached, and the reasons for the rest (rule 15)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phloem.radix import (
    BlockPool,
    InvalidLabel,
    InvalidNamespace,
    InvalidTokens,
    Miss,
    MissReason,
    Namespace,
    RadixCache,
)

NS = Namespace()
NEVER, DIVERGED, EVICTED = MissReason.NEVER_SEEN, MissReason.DIVERGED, MissReason.EVICTED
LAST, ELSEWHERE = MissReason.LAST_TOKEN, MissReason.NAMESPACE


@pytest.fixture
def cache():
    """8 blocks of 4 tokens; [1] * 4 + [2] * 4 is cached by "first"."""
    cache = RadixCache(BlockPool(8), 4)
    put(cache, [1] * 4 + [2] * 4, label="first")
    yield cache
    cache.check()


def put(cache: RadixCache, tokens, *, label: str | None = None, namespace: Namespace = NS):
    return cache.insert(namespace, tokens, cache.allocate(len(tokens) // cache.block_size), label=label)


def test_a_cached_path_misses_nothing(cache):
    told = cache.explain(NS, [1] * 4 + [2] * 4)
    assert (told.num_tokens, told.cached_tokens, told.misses) == (8, 8, ())


def test_the_last_token_of_a_cached_prompt_must_run(cache):
    told = cache.explain(NS, [1] * 4 + [2] * 4, limit=7)
    assert (told.cached_tokens, told.misses) == (7, (Miss(7, 8, LAST),))


def test_an_unknown_path_was_never_seen(cache):
    assert cache.explain(NS, [9, 9, 9]).misses == (Miss(0, 3, NEVER),)


def test_an_extension_of_a_cached_path_was_never_seen(cache):
    told = cache.explain(NS, [1] * 4 + [2] * 4 + [3, 3], limit=9)
    assert (told.cached_tokens, told.misses) == (8, (Miss(8, 10, NEVER),))


def test_the_empty_path_misses_nothing(cache):
    assert cache.explain(NS, []).misses == ()
    assert cache.explain(NS, [], limit=0).misses == ()


def test_a_divergence_is_told_by_its_token_and_whose_path_it_left(cache):
    told = cache.explain(NS, [1] * 4 + [2, 2, 7, 2, 2, 2])
    expected = Miss(6, 10, DIVERGED, label="first", token=7, other_token=2)
    assert (told.cached_tokens, told.misses) == (6, (expected,))


def test_a_divergence_between_blocks_names_a_path_that_goes_on(cache):
    told = cache.explain(NS, [1] * 4 + [8])
    assert told.misses == (Miss(4, 5, DIVERGED, label="first", token=8, other_token=2),)


def test_evicted_tokens_are_told_from_those_never_seen(cache):
    cache.evict(1)
    told = cache.explain(NS, [1] * 4 + [2] * 4 + [3])
    assert told.cached_tokens == 4
    assert told.misses == (Miss(4, 8, EVICTED, label="first"), Miss(8, 9, NEVER))


def test_the_ghost_knows_a_path_of_which_nothing_is_left(cache):
    cache.evict(2)
    assert cache.stats().namespaces == 0
    told = cache.explain(NS, [1] * 4 + [2, 2, 5])
    assert told.misses == (
        Miss(0, 6, EVICTED, label="first"),
        Miss(6, 7, DIVERGED, label="first", token=5, other_token=2),
    )


def test_what_was_evicted_and_must_run_anyhow_is_not_blamed_on_eviction(cache):
    cache.evict(1)
    told = cache.explain(NS, [1] * 4 + [2] * 4, limit=7)
    assert told.misses == (Miss(4, 7, EVICTED, label="first"), Miss(7, 8, LAST))


def test_a_path_that_is_cached_again_is_evicted_no_more(cache):
    cache.evict(2)
    put(cache, [1] * 4 + [2] * 4, label="second")
    assert cache.explain(NS, [1] * 4 + [2] * 4).misses == ()
    assert cache.explain(NS, [1] * 4 + [3]).misses[0].label == "second"


def test_a_leaf_that_grew_otherwise_after_a_trim_is_remembered_with_both_ends(cache):
    cache.evict(1)
    put(cache, [1] * 4 + [5] * 4, label="first")
    cache.evict(2)
    for end in (2, 5):
        assert cache.explain(NS, [1] * 4 + [end] * 4).tokens(EVICTED) == 8


def test_other_namespaces_are_looked_at_only_when_asked(cache):
    other = Namespace(salt="b")
    tokens = [1] * 4 + [2] * 3 + [7]
    assert cache.explain(other, tokens).misses == (Miss(0, 8, NEVER),)
    told = cache.explain(other, tokens, across_namespaces=True)
    assert told.cached_tokens == 0
    assert told.misses == (
        Miss(0, 7, ELSEWHERE, namespace=NS),
        Miss(7, 8, DIVERGED, label="first", token=7, other_token=2),
    )


def test_of_the_other_namespaces_the_one_that_has_most_is_named(cache):
    most = Namespace(salt="most")
    put(cache, [1] * 12, namespace=most)
    put(cache, [1] * 8, namespace=Namespace(salt="less"))
    told = cache.explain(NS, [1] * 13, across_namespaces=True)
    assert told.cached_tokens == 4
    assert told.misses == (Miss(4, 12, ELSEWHERE, namespace=most), Miss(12, 13, NEVER))


def test_a_namespace_that_has_no_more_than_ones_own_is_not_named(cache):
    put(cache, [1] * 4, namespace=Namespace(salt="b"))
    told = cache.explain(NS, [1] * 4 + [9], across_namespaces=True)
    assert [miss.reason for miss in told.misses] == [DIVERGED]


def test_clear_makes_the_ghost_forget_its_namespace_only(cache):
    other = Namespace(salt="b")
    put(cache, [1] * 4, namespace=other)
    cache.evict(3)
    cache.clear(other)
    cache.check()
    assert cache.explain(other, [1] * 4).misses == (Miss(0, 4, NEVER),)
    assert cache.explain(NS, [1] * 4).misses == (Miss(0, 4, EVICTED, label="first"),)
    cache.clear()
    assert cache.explain(NS, [1] * 4).misses == (Miss(0, 4, NEVER),)
    assert cache.stats().ghost_tokens == 0


def test_what_a_clear_freed_was_not_evicted(cache):
    cache.clear()
    assert cache.explain(NS, [1] * 4).misses == (Miss(0, 4, NEVER),)


def test_explain_changes_nothing(cache):
    cache.evict(1)
    before = cache.stats()
    order = [node.last_used for node in cache._tree.below(cache._tree.roots[NS])]
    for tokens in ([1] * 4, [1] * 6, [1] * 4 + [2] * 4, [9], []):
        cache.explain(NS, tokens, limit=2, across_namespaces=True)
        cache.explain(Namespace(salt="unseen"), tokens)
    assert cache.stats() == before
    assert [node.last_used for node in cache._tree.below(cache._tree.roots[NS])] == order


def test_limits_beyond_the_path_are_no_limits_and_negative_ones_are_refused(cache):
    assert cache.explain(NS, [1] * 4, limit=99).misses == ()
    assert cache.explain(NS, [1] * 4, limit=0).misses == (Miss(0, 4, LAST),)
    with pytest.raises(ValueError, match="limit must be 0 or more, not -1"):
        cache.explain(NS, [1] * 4, limit=-1)


def test_explain_takes_tokens_and_namespaces_only(cache):
    with pytest.raises(InvalidTokens):
        cache.explain(NS, "text")
    with pytest.raises(InvalidNamespace):
        cache.explain("default", [1])


def test_tokens_are_summed_by_reason(cache):
    told = cache.explain(NS, [1] * 4 + [2, 7, 7])
    assert told.tokens("diverged") == told.tokens(DIVERGED) == 2
    assert told.tokens(EVICTED) == 0
    with pytest.raises(ValueError, match="unknown"):
        told.tokens("unknown")


@pytest.mark.parametrize(("label", "named"), [(3, "not int"), (b"x", "not bytes"), ("x" * 257, "257")])
def test_a_label_is_a_short_text(cache, label, named):
    grip = cache.acquire(NS, [1] * 4, num_blocks=2)
    before = cache.stats()
    with pytest.raises(InvalidLabel, match=named):
        cache.insert(NS, [9] * 4, grip.new_blocks, label=label)
    with pytest.raises(InvalidLabel, match=named):
        cache.extend(grip.node, [9] * 4, grip.new_blocks, label=label)
    assert cache.stats() == before


def test_a_label_stays_with_the_blocks_that_came_under_it(cache):
    grip = cache.acquire(NS, [], num_blocks=3)
    ref = cache.extend(grip.node, [5] * 4, grip.new_blocks[:1], label="a").node
    ref = cache.extend(ref, [6] * 4, grip.new_blocks[1:2], label="a").node
    assert cache.stats().nodes == 2  # one's own leaf grows
    ref = cache.extend(ref, [7] * 4, grip.new_blocks[2:], label="b").node
    assert cache.stats().nodes == 3
    put(cache, [5] * 4 + [8] * 4, label="c")
    cache.unlock(ref)
    for prefix, label in ((0, None), (1, "a"), (5, "a"), (9, "b")):
        path = (5,) * 4 + (6,) * 4 + (7,) * 4
        assert cache.explain(NS, [*path[:prefix], 0]).misses[0].label == label


def test_an_adopted_block_keeps_the_label_of_who_was_first(cache):
    put(cache, [1] * 4 + [2] * 4 + [3] * 4, label="second")
    assert cache.explain(NS, [1] * 5).misses[0].label == "first"
    assert cache.explain(NS, [1] * 4 + [2] * 4 + [9]).misses[0].label == "second"


def test_results_are_plain_values(cache):
    told = cache.explain(NS, [1, 2])
    assert replace(told.misses[0], label=None) == Miss(1, 2, DIVERGED, token=2, other_token=1)
    assert told.misses[0].reason == "diverged"
    assert {reason.value for reason in MissReason} == {
        "never_seen",
        "diverged",
        "evicted",
        "namespace",
        "last_token",
        "bypassed",
    }
