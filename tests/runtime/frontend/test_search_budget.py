"""Budgets of searches, memory that pruning frees, saving and going on, on a tiny random model."""

import json
from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_trees import PROMPT, sample, shape, tokens_of, worth

from phloem.runtime import BranchReleased, CacheFull, Engine, InvalidRequest
from phloem.runtime.frontend.search import (
    Budget,
    Growth,
    Node,
    SearchTree,
    beam,
    best_of_n,
    breadth_first,
    depth_first,
    dvts,
    mcts,
)
from phloem.runtime.frontend.search.holdings import Holdings

GOING_ON: dict[str, Callable[[SearchTree], object]] = {
    "best_of_n": lambda tree: best_of_n(tree, sample(6), worth),
    "beam": lambda tree: beam(tree, sample(3), worth, width=2, depth=3),
    "dvts": lambda tree: dvts(tree, sample(3), worth, depth=3),
    "breadth_first": lambda tree: breadth_first(tree, sample(3), worth, keep=2, depth=3),
    "depth_first": lambda tree: depth_first(tree, sample(2), worth, depth=3, threshold=0.2),
    "mcts": lambda tree: mcts(tree, sample(3), worth, expansions=9, depth=4),
}


def held_blocks(engine: Engine) -> int:
    stats = engine.stats()
    return stats.cache.locked + stats.cache.private - stats.kept_tails


@pytest.mark.parametrize("name", GOING_ON)
def test_a_search_that_was_interrupted_and_saved_goes_on_as_if_it_had_not(engine: Engine, name: str) -> None:
    with SearchTree(engine, PROMPT, seed=5) as tree:
        GOING_ON[name](tree)
        whole, needed = shape(tree), tree.ledger.tokens
    state, interruptions = None, 0
    for limit in range(needed // 4, needed + needed // 4 + 1, needed // 4):
        budget = Budget(max_tokens=limit)
        with (
            SearchTree(engine, PROMPT, seed=5, budget=budget)
            if state is None
            else SearchTree.from_dict(engine, json.loads(state), budget=budget)
        ) as tree:
            if state is not None:
                assert json.loads(state) == tree.to_dict()
            GOING_ON[name](tree)
            assert tree.ledger.tokens <= limit
            assert tree.ledger.reserved_tokens == tree.ledger.reserved_nodes == 0
            assert tree.ledger.nodes == len(list(tree.nodes()))
            interruptions += shape(tree) != whole
            state = json.dumps(tree.to_dict())
        engine.clear_cache()
    assert interruptions >= 2, "there was something to go on with"
    assert shape(tree) == whole


@pytest.mark.parametrize("name", GOING_ON)
def test_a_budget_of_nodes_holds(engine: Engine, name: str) -> None:
    with SearchTree(engine, PROMPT, seed=5, budget=Budget(max_nodes=5)) as tree:
        GOING_ON[name](tree)
        assert 3 <= len(list(tree.nodes())) <= 5


@pytest.mark.parametrize("name", GOING_ON)
def test_a_budget_of_blocks_holds_and_changes_nothing(engine: Engine, name: str) -> None:
    with SearchTree(engine, PROMPT, seed=5) as tree:
        GOING_ON[name](tree)
        free = shape(tree)
    held: list[int] = []

    def watching(node: Node) -> float:
        held.append(held_blocks(engine))
        return worth(node)

    limit = 3 + 6 * 2
    with SearchTree(engine, PROMPT, seed=5, budget=Budget(max_blocks=limit)) as tree:
        searches = {
            "best_of_n": lambda: best_of_n(tree, sample(6), watching),
            "beam": lambda: beam(tree, sample(3), watching, width=2, depth=3),
            "dvts": lambda: dvts(tree, sample(3), watching, depth=3),
            "breadth_first": lambda: breadth_first(tree, sample(3), watching, keep=2, depth=3),
            "depth_first": lambda: depth_first(tree, sample(2), watching, depth=3, threshold=0.2),
            "mcts": lambda: mcts(tree, sample(3), watching, expansions=9, depth=4),
        }
        searches[name]()
        assert shape(tree) == free
        assert 0 < max(held) <= limit
        assert held_blocks(engine) <= tree.holdings.num_blocks <= limit


def test_a_family_beyond_the_budget_of_blocks_is_refused_with_the_numbers(engine: Engine) -> None:
    with SearchTree(engine, PROMPT, seed=5, budget=Budget(max_blocks=9)) as tree:
        with pytest.raises(
            CacheFull, match=r"6 children of node root, which has 47 tokens.* max_blocks .* is 9"
        ):
            best_of_n(tree, sample(6), worth)
        assert tree.ledger.reserved_tokens == 0
        assert len(best_of_n(tree, sample(3), worth)) == 3, "the tree can go on with less"


def test_pruning_frees_memory_at_once(engine: Engine) -> None:
    with SearchTree(engine, PROMPT, seed=5) as tree:
        best_of_n(tree, sample(8, max_tokens=40), worth)
        before = held_blocks(engine)
        for node in tree.root.children[1:]:
            tree.prune(node)
        assert before - held_blocks(engine) == 7 * 4, "three whole blocks and a tail of each"
        assert tree.leaves() == [tree.root.children[0]]
        tree.prune(tree.root)
        assert held_blocks(engine) == 0


def test_only_leaves_that_can_go_on_hold_memory(engine: Engine) -> None:
    with SearchTree(engine, PROMPT, seed=5) as tree:
        mcts(tree, sample(3), worth, expansions=6)
        for node in tree.nodes():
            assert (node in tree.holdings) == (not node.children)
        assert held_blocks(engine) <= tree.holdings.num_blocks
        for node in tree.leaves():
            tree.holdings.park(node)
        assert held_blocks(engine) == tree.holdings.num_blocks == 0
        [best, *_] = tree.ranked()
        assert tree.branch(best).token_ids == best.path_token_ids
        assert tree.branch(best).explain().cached_tokens >= best.end - 16, "it is still cached"


def test_a_value_that_fails_leaves_the_tree_as_it_was_and_can_be_tried_again(engine: Engine) -> None:
    with SearchTree(engine, PROMPT, seed=5) as tree:
        breadth_first(tree, sample(3), worth, keep=2, depth=2)
    calls = 0

    def failing(node: Node) -> float:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("no value today")
        return worth(node)

    with SearchTree(engine, PROMPT, seed=5) as again:
        with pytest.raises(RuntimeError, match="no value today"):
            breadth_first(again, sample(3), failing, keep=2, depth=2)
        assert len(list(again.nodes())) == 4
        assert engine.stats().running == engine.stats().waiting == 0
        for node in again.nodes():
            again.holdings.park(node)
        assert held_blocks(engine) == again.holdings.num_blocks == 0, "nothing else is held"
        breadth_first(again, sample(3), failing, keep=2, depth=2)
        assert shape(again) == shape(tree)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None, "good"])
def test_a_value_that_is_no_number_is_refused_with_the_node(engine: Engine, bad: object) -> None:
    with SearchTree(engine, PROMPT, seed=5) as tree:
        with pytest.raises(InvalidRequest, match="for node 2; it must be a finite number") as caught:
            best_of_n(tree, sample(3), lambda node: bad if node.index == 2 else 0.5)  # type: ignore[arg-type, return-value]
        assert caught.value.field == "value"


def test_a_value_for_too_few_nodes_is_refused(engine: Engine) -> None:
    class Short:
        def of(self, tree: SearchTree, families: list[list[Node]]) -> list[list[float]]:
            return [[0.5] for _ in families]

    with SearchTree(engine, PROMPT, seed=5) as tree, pytest.raises(InvalidRequest, match="1 values for 3"):
        best_of_n(tree, sample(3), Short())


def test_leaving_a_growth_early_aborts_the_rest(engine: Engine) -> None:
    with SearchTree(engine, PROMPT, seed=5) as tree:
        best_of_n(tree, sample(3), worth)
        spent = tree.ledger.tokens
        with Growth(tree, sample(2, max_tokens=300), worth) as growth:
            for node in tree.root.children:
                assert growth.add(node)
            assert tree.ledger.reserved_tokens == 1800
        assert engine.stats().running == engine.stats().waiting == 0
        assert tree.ledger.reserved_tokens == 0
        assert tree.ledger.tokens == spent
        with Growth(tree, sample(2, max_tokens=300), worth) as growth:
            for node in tree.root.children:
                growth.add(node)
            next(iter(growth))
        assert [len(node.children) for node in tree.root.children].count(2) == 1


def test_a_closed_tree_says_so_but_can_still_be_read_and_saved(engine: Engine) -> None:
    with SearchTree(engine, PROMPT, seed=5) as tree:
        best_of_n(tree, sample(3), worth)
    with pytest.raises(BranchReleased, match="closed"):
        best_of_n(tree, sample(5), worth)
    with pytest.raises(BranchReleased, match="closed"):
        tree.branch(tree.root)
    assert len(tree.to_dict()["nodes"]) == 4
    assert tokens_of(tree) == 47 + 24


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"version": 2}, "state"),
        ({"more": 1}, "state"),
        ({"nodes": []}, "nodes"),
        ({"nodes": [{"parent": None}]}, "nodes"),
        ({"spent_tokens": -1}, "spent_tokens"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_a_description_that_is_none_is_refused(engine: Engine, change: dict[str, object], field: str) -> None:
    with SearchTree(engine, PROMPT, seed=5) as tree:
        state = tree.to_dict() | change
    with pytest.raises(InvalidRequest) as caught:
        SearchTree.from_dict(engine, state)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("parent", 2),
        ("parent", None),
        ("token_ids", []),
        ("token_ids", [1, "a"]),
        ("token_ids", [999_999]),
        ("value", "good"),
        ("is_done", 1),
        ("visits", 0.5),
    ],
)
def test_a_description_with_a_bad_node_is_refused_with_its_place(
    engine: Engine, name: str, bad: object
) -> None:
    with SearchTree(engine, PROMPT, seed=5) as tree:
        best_of_n(tree, sample(2), worth)
        state = json.loads(json.dumps(tree.to_dict()))
    state["nodes"][1][name] = bad
    with pytest.raises(InvalidRequest, match=rf"nodes\[1\].{name}"):
        SearchTree.from_dict(engine, state)


class Handle:
    """Stands for a branch where only its being held counts."""

    def release(self) -> None:
        pass


@given(st.data())
def test_blocks_are_counted_as_a_walk_over_all_live_branches_counts_them(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([1, 2, 4]))
    nodes = [Node(None, 0, 0, 0, array("i", range(data.draw(st.integers(1, 9)))), str)]
    for _ in range(data.draw(st.integers(0, 8))):
        parent = data.draw(st.sampled_from(nodes))
        tokens = array("i", range(data.draw(st.integers(1, 9))))
        nodes.append(Node(parent, len(parent.children), parent.depth + 1, parent.end, tokens, str))
        parent.children.append(nodes[-1])
    holdings = Holdings(lambda node: Handle(), block_size=block_size)  # type: ignore[arg-type, return-value]
    live: set[Node] = set()
    for node, opens in data.draw(st.lists(st.tuples(st.sampled_from(nodes), st.booleans()), max_size=20)):
        if opens:
            before, promised = holdings.num_blocks, holdings.blocks_to_open(node)
            holdings.branch(node)
            live.add(node)
            assert holdings.num_blocks == before + promised
        else:
            holdings.park(node)
            live.discard(node)
        blocks = {(each, 0, number) for node in live for each in node.line()
                  for number in range(each.start // block_size, each.end // block_size)}  # fmt: skip
        blocks |= {(node, 1, 0) for node in live if node.end % block_size}
        assert holdings.num_blocks == len(blocks)


def test_bad_limits_are_refused() -> None:
    for limit in (0, -3, True, 1.5, "9"):
        for name in ("max_tokens", "max_blocks", "max_nodes"):
            with pytest.raises(InvalidRequest) as caught:
                Budget(**{name: limit})  # type: ignore[arg-type]
            assert caught.value.field == name
