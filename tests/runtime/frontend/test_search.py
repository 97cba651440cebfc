"""The searches on a tiny random model: what they find, and that every token is computed once."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from search_trees import PROMPT, distinct_tokens, make_engine, sample, shape, tokens_of, worth

from phloem.runtime import Engine, EngineClosed, InvalidRequest
from phloem.runtime.frontend.search import (
    Budget,
    Node,
    Propose,
    Puct,
    SearchTree,
    beam,
    best_of_n,
    breadth_first,
    depth_first,
    dvts,
    mcts,
    self_consistency,
)

Search = Callable[[SearchTree], object]
SEARCHES: dict[str, Search] = {
    "best_of_n": lambda tree: best_of_n(tree, sample(6), worth),
    "beam": lambda tree: beam(tree, sample(3), worth, width=2, depth=3),
    "dvts": lambda tree: dvts(tree, sample(3), worth, depth=4),
    "breadth_first": lambda tree: breadth_first(tree, sample(4), worth, keep=3, depth=3),
    "depth_first": lambda tree: depth_first(tree, sample(3), worth, depth=3, threshold=0.2, enough=0.95),
    "uct": lambda tree: mcts(tree, sample(3), worth, expansions=12, depth=4),
    "puct": lambda tree: mcts(
        tree, sample(3, logprobs=0), worth, expansions=12, depth=4, rule=Puct(), parallel=4
    ),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_computes_each_token_of_its_tree_once(engine: Engine, name: str) -> None:
    with SearchTree(engine, PROMPT, seed=3) as tree:
        SEARCHES[name](tree)
        # A child's last token is computed when somebody goes on from it; its parent's, once for each child.
        assert engine.stats().computed_tokens == tokens_of(tree) - 1
        assert engine.stats().computed_tokens <= 1.05 * distinct_tokens(tree)
        sampled = tokens_of(tree) - len(tree.root.tokens)
        assert tree.usage.completion_tokens == tree.ledger.tokens == sampled
        families = sum(bool(node.children) for node in tree.nodes())
        children = tree.ledger.nodes - 1
        assert tree.usage.computed_tokens == len(tree.root.tokens) - 1 + children
        assert families > 1 or name == "best_of_n"


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_is_the_same_warm_cold_without_a_cache_and_beside_others(
    tiny_path: Path, engine: Engine, name: str
) -> None:
    found = []
    for _ in range(2):
        with SearchTree(engine, PROMPT, seed=3) as tree:
            SEARCHES[name](tree)
            found.append(shape(tree))
    with (
        make_engine(tiny_path, prefix_cache=False, max_running=5) as plain,
        SearchTree(plain, PROMPT, seed=3) as tree,
    ):
        SEARCHES[name](tree)
        found.append(shape(tree))
        assert plain.stats().computed_tokens > engine.stats().computed_tokens / 2
    assert found[0] == found[1] == found[2]
    with SearchTree(engine, PROMPT, seed=4) as tree:
        SEARCHES[name](tree)
        assert shape(tree) != found[0]


def test_best_of_n_returns_the_samples_best_first(engine: Engine) -> None:
    with SearchTree(engine, PROMPT, seed=3) as tree:
        nodes = best_of_n(tree, sample(6), worth)
        assert [node.value for node in nodes] == sorted((worth(node) for node in nodes), reverse=True)
        assert sorted(node.index for node in nodes) == list(range(6))
        assert len({tuple(node.tokens) for node in nodes}) == 6
        more = best_of_n(tree, sample(8), worth)
        assert set(nodes) < set(more), "two more, the others stay"


def test_a_tree_can_start_from_a_branch_which_stays_as_it_is(engine: Engine) -> None:
    with engine.branch(PROMPT) as branch:
        branch.append(" one day")
        with SearchTree(engine, branch, seed=3) as tree:
            [best, *_] = best_of_n(tree, sample(2), worth)
            with SearchTree(engine, PROMPT + " one day", seed=3) as other:
                [same, *_] = best_of_n(other, sample(2), worth)
            assert best.path_token_ids == same.path_token_ids == tree.branch(best).token_ids
            assert best.path_text == best.text
        assert branch.text == PROMPT + " one day"


def test_self_consistency_counts_the_answers(engine: Engine) -> None:
    def parity(text: str) -> str | None:
        return None if text[0] in "aeiou" else "even" if len(text.encode()) % 2 == 0 else "odd"

    with SearchTree(engine, PROMPT, seed=3) as tree:
        found = self_consistency(tree, sample(9), parity)
        answers = [parity(node.path_text) for node in tree.root.children]
        assert found.votes == {answer: answers.count(answer) for answer in found.votes}
        assert found.answer == max(found.votes, key=lambda answer: found.votes[answer])
        assert [parity(node.path_text) for node in found.nodes] == [found.answer] * found.votes[found.answer]
    with SearchTree(engine, PROMPT, seed=3) as tree:
        nothing = self_consistency(tree, sample(3), lambda text: None)
        assert (nothing.answer, nothing.votes, nothing.nodes) == (None, {}, [])


def test_breadth_first_keeps_the_best_of_each_level_and_prunes_the_rest(engine: Engine) -> None:
    with SearchTree(engine, PROMPT, seed=3) as tree:
        found = breadth_first(tree, sample(4), worth, keep=3, depth=3)
        for depth in (1, 2, 3):
            level = [node for node in tree.nodes() if node.depth == depth]
            assert len(level) == (4 if depth == 1 else 12)
            kept = [node.value for node in level if not node.is_pruned]
            assert sorted(kept) == sorted(node.value for node in level)[-3:]
        assert [node.depth for node in found] == [3, 3, 3]
        assert [node.value for node in found] == sorted([node.value for node in found], reverse=True)


def test_beam_keeps_done_texts_that_are_good_enough_and_ends_when_all_are(engine: Engine) -> None:
    step = sample(4)
    ends = type(step)(4, step.params, is_done=lambda node: worth(node) > 0.6)
    with SearchTree(engine, PROMPT, seed=3) as tree:
        found = beam(tree, ends, worth, width=2, depth=9)
        assert len(found) == 2
        assert all(node.is_done for node in found)
        assert max(node.depth for node in tree.nodes()) < 9
        best = max((node for node in tree.nodes() if node.value is not None), key=worth)
        assert found[0] is best


def test_dvts_goes_on_with_the_best_of_each_subtree(engine: Engine) -> None:
    with SearchTree(engine, PROMPT, seed=3) as tree:
        found = dvts(tree, sample(3), worth, depth=4)
        assert sorted(node.line()[1].index for node in found) == [0, 1, 2], "one of each"
        for leaf in found:
            assert leaf.depth == 4
            for node in leaf.line()[2:]:
                assert node.value == max(sibling.value for sibling in node.parent.children)


def test_depth_first_goes_into_the_best_child_first_and_stops_at_enough(engine: Engine) -> None:
    order: list[Node] = []

    def noting(node: Node) -> float:
        order.append(node)
        return worth(node)

    with SearchTree(engine, PROMPT, seed=3) as tree:
        found = depth_first(tree, sample(2), noting, depth=3)
        assert len(found) == 8
        families = order[::2]
        assert [node.depth for node in families] == [1, 2, 3, 3, 2, 3, 3]
        assert families[1].parent is max(tree.root.children, key=worth)
    with SearchTree(engine, PROMPT, seed=3) as tree:
        first = depth_first(tree, sample(2), worth, depth=3, enough=0.0)
        assert [node.depth for node in first] == [3, 3]
        assert first[0].parent.parent.parent is tree.root
        assert len(list(tree.nodes())) == 7
    with SearchTree(engine, PROMPT, seed=3) as tree:
        assert depth_first(tree, sample(2), worth, depth=3, threshold=1.0) == []
        assert [node.is_pruned for node in tree.nodes()] == [False, True, True]


def test_mcts_counts_visits_and_comes_back_to_what_is_good(engine: Engine) -> None:
    with SearchTree(engine, PROMPT, seed=3) as tree:
        mcts(tree, sample(3), worth, expansions=15, depth=5)
        grown = [node for node in tree.nodes() if node.children]
        assert len(grown) == 15
        assert tree.root.visits == 45
        for node in grown:
            own = 0 if node is tree.root else 1
            assert node.visits == own + sum(child.visits for child in node.children)
            below = (worth(node) if own else 0.0) + sum(child.total for child in node.children)
            assert node.total == pytest.approx(below)
        means = sorted(tree.root.children, key=lambda node: node.total / node.visits)
        assert means[-1].visits >= means[0].visits


def test_mcts_ends_when_nothing_is_left_to_grow(engine: Engine) -> None:
    with SearchTree(engine, PROMPT, seed=3) as tree:
        found = mcts(tree, sample(2), worth, expansions=100, depth=2, parallel=3)
        assert len(found) == 4
        assert tree.root.visits == 6


def test_proposed_texts_are_nodes_and_none_is_a_dead_end(engine: Engine) -> None:
    asked: list[int] = []

    def propose(nodes: list[Node]) -> list[list[str]]:
        asked.append(len(nodes))
        return [[] if node.path_text.endswith("b") else [" a", " b"] for node in nodes]

    def is_done(node: Node) -> bool:
        return node.path_text == " a a a"

    for search, levels in ((breadth_first, [1, 2, 2]), (depth_first, None), (mcts, None)):
        asked.clear()
        with SearchTree(engine, PROMPT, seed=3) as tree:
            limit = {"keep": 5} if search is breadth_first else {"expansions": 9} if search is mcts else {}
            found = search(tree, Propose(propose, is_done), lambda node: 0.5, depth=3, **limit)
            assert found[0].path_text == " a a a"
            assert found[0].is_done
            assert levels is None or asked == levels, "all nodes of a level at once"
            dead = [node for node in tree.nodes() if node.path_text == " b"]
            assert [node.is_pruned for node in dead] == [True]
            assert engine.stats().computed_tokens == 0, "nothing was needed of the model"
            assert tree.branch(found[0]).text == PROMPT + " a a a"


@pytest.mark.parametrize("max_tokens", [None, 420])
@pytest.mark.parametrize("name", ["dvts", "mcts"])
def test_which_step_is_finished_first_decides_nothing(
    tiny_path: Path, name: str, max_tokens: int | None
) -> None:
    step = sample(3, max_tokens=40, min_tokens=1, stop_token_ids=tuple(range(40)))
    searches: dict[str, Search] = {
        "dvts": lambda tree: dvts(tree, step, worth, depth=4),
        "mcts": lambda tree: mcts(tree, step, worth, expansions=10, parallel=5),
    }
    found = []
    for max_running in (64, 1, 2):
        with (
            make_engine(tiny_path, max_running=max_running) as engine,
            SearchTree(engine, PROMPT, seed=3, budget=Budget(max_tokens=max_tokens)) as tree,
        ):
            searches[name](tree)
            found.append(shape(tree))
    assert len({len(tokens) for _, tokens, *_ in found[0]}) > 5, "steps of many lengths"
    assert found[0] == found[1] == found[2]


def test_dvts_called_again_after_a_dead_end_goes_on_with_the_other_subtrees(engine: Engine) -> None:
    step = Propose(lambda nodes: [[] if node.path_text == " a a" else [" a", " b"] for node in nodes])
    with SearchTree(engine, PROMPT, seed=3) as tree:
        first = dvts(tree, step, lambda node: 1.0 - node.index, depth=3)
        again = dvts(tree, step, lambda node: 1.0 - node.index, depth=4)
        assert [node.path_text for node in first] == [" b a a"]
        assert [node.path_text for node in again] == [" b a a a"]


@pytest.mark.parametrize("name", ["beam", "dvts", "breadth_first", "depth_first", "mcts"])
def test_texts_end_where_the_context_does(tiny_path: Path, name: str) -> None:
    searches: dict[str, Search] = {
        "beam": lambda tree: beam(tree, sample(2), worth, width=2, depth=30),
        "dvts": lambda tree: dvts(tree, sample(2), worth, depth=30),
        "breadth_first": lambda tree: breadth_first(tree, sample(2), worth, keep=2, depth=30),
        "depth_first": lambda tree: depth_first(tree, sample(1), worth, depth=30),
        "mcts": lambda tree: mcts(tree, sample(2), worth, expansions=999),
    }
    with make_engine(tiny_path, max_model_len=70) as engine:
        with SearchTree(engine, PROMPT, seed=3) as tree:
            found = searches[name](tree)
            assert {node.end for node in found} == {70}
            assert all(node.is_done for node in found)
        engine.check()


def test_an_engine_that_is_closed_ends_the_search_with_its_error(tiny_path: Path) -> None:
    with make_engine(tiny_path) as engine, SearchTree(engine, PROMPT, seed=3) as tree:

        def closing(node: Node) -> float:
            if node.depth == 2:
                engine.close()
            return worth(node)

        with pytest.raises(EngineClosed):
            breadth_first(tree, sample(3), closing, keep=2, depth=4)
        assert json.dumps(tree.to_dict()), "what was found can be saved"


def test_bad_input_is_refused_with_its_name(engine: Engine) -> None:
    with SearchTree(engine, PROMPT, seed=3) as tree:
        for field, call in {
            "n": lambda: sample(0),
            "seed": lambda: sample(2, seed=1),
            "params": lambda: sample(2, prompt_logprobs=0),
            "max_tokens": lambda: sample(2, max_tokens=0),
            "keep": lambda: breadth_first(tree, sample(2), worth, keep=0, depth=2),
            "depth": lambda: dvts(tree, sample(2), worth, depth=True),
            "width": lambda: beam(tree, sample(2), worth, width=1.5, depth=2),  # type: ignore[arg-type]
            "enough": lambda: depth_first(tree, sample(2), worth, depth=1, enough=float("nan")),
            "expansions": lambda: mcts(tree, sample(2), worth, expansions=-1),
            "logprobs": lambda: mcts(tree, sample(2), worth, expansions=1, rule=Puct()),
            "step": lambda: best_of_n(tree, 4, worth),  # type: ignore[arg-type]
            "value": lambda: best_of_n(tree, sample(2), 0.5),  # type: ignore[arg-type]
        }.items():
            with pytest.raises(InvalidRequest) as caught:
                call()
            assert caught.value.field == field
        assert engine.stats().steps == 0
    with pytest.raises(InvalidRequest, match="seed"):
        SearchTree(engine, PROMPT, seed=-1)
