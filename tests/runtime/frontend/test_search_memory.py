"""Large searches in a small pool: cold branches are evicted and computed again, and hold nothing but their tokens."""

import gc
import tracemalloc
from pathlib import Path

import pytest
from search_trees import PROMPT, make_engine, sample, shape, tokens_of, worth

from phloem.runtime.frontend.search import Budget, SearchTree, mcts


@pytest.mark.parametrize("max_blocks", [None, 28])
def test_a_search_that_does_not_fit_the_pool_finds_the_same(tiny_path: Path, max_blocks: int | None) -> None:
    found = []
    for num_blocks, budget in ((1024, None), (32, Budget(max_blocks=max_blocks))):
        with make_engine(tiny_path, num_blocks=num_blocks) as engine:
            with SearchTree(engine, PROMPT, seed=1, budget=budget) as tree:
                mcts(tree, sample(4, max_tokens=4), worth, expansions=60, parallel=2)
                found.append(shape(tree))
                engine.check()
                assert tree.ledger.nodes == 241
                if num_blocks == 32 and max_blocks is None:
                    assert engine.stats().cache.evictions > 0
                elif num_blocks == 32:
                    assert tree.holdings.num_blocks <= 28
            stats = engine.stats()
            assert stats.cache.locked == stats.cache.private - stats.kept_tails == 0
            engine.check()
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("max_blocks", [None, 110])
def test_ten_thousand_nodes_stay_within_a_pool_of_128_blocks(tiny_path: Path, max_blocks: int | None) -> None:
    with make_engine(tiny_path, num_blocks=128) as engine:
        budget = Budget(max_blocks=max_blocks)
        tracemalloc.start()
        try:
            with SearchTree(engine, PROMPT, seed=1, budget=budget) as tree:
                mcts(tree, sample(4, max_tokens=4), worth, expansions=2500, parallel=16)
                gc.collect()
                held = tracemalloc.get_traced_memory()[0]
                num_nodes, num_tokens = tree.ledger.nodes, tokens_of(tree)
                stats = engine.stats()
                engine.check()
        finally:
            tracemalloc.stop()
        assert num_nodes == 10_001
        assert num_tokens > 15 * 128 * 16, "many times what the pool holds"
        assert stats.cache.evictions > 0
        assert stats.computed_tokens <= 2 * num_tokens, "most of what a search comes back to is still there"
        assert held / num_nodes < (4_000 if max_blocks is None else 1_000), "bytes of Python objects a node"
        stats = engine.stats()
        assert stats.cache.locked == stats.cache.private - stats.kept_tails == 0
        engine.check()
