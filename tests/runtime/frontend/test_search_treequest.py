"""TreeQuest drives a search whose states are our branches: they share their KV, and nothing of them is copied."""

from pathlib import Path

import numpy as np
import pytest
from search_trees import PROMPT, make_engine

from phloem.runtime import Branch, Engine, SamplingParams

treequest = pytest.importorskip("treequest", reason="treequest is not installed; it needs Python 3.11")


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """ABMCTSA draws from numpy's global generator, and takes no other."""
    np.random.seed(0)


def worth(branch: Branch) -> float:
    return sum(branch.completion.token_ids) % 97 / 97


def search(engine: Engine, root: Branch, algorithm: object) -> list[tuple[Branch, float]]:
    """Twelve states, two at a time."""
    state = algorithm.init_tree()
    with engine.expansion() as expansion:
        for number in range(6):
            state, trials = algorithm.ask_batch(state, 2, ["step"])
            families = {}
            for index, trial in enumerate(trials):
                params = SamplingParams(
                    max_tokens=8, temperature=2.0, ignore_eos=True, seed=2 * number + index
                )
                families[expansion.add(trial.parent_state or root, 1, params)] = trial
            for born in sorted(expansion, key=lambda born: born.family):
                trial = families[born.family]
                state = algorithm.tell(state, trial.trial_id, (born.branch, worth(born.branch)))
    [(best, value)] = treequest.top_k(state, algorithm, k=1)
    found = algorithm.get_state_score_pairs(state)
    assert value == worth(best) == max(score for _, score in found)
    return found


@pytest.mark.parametrize(
    "make", [lambda: treequest.StandardMCTS(samples_per_action=2), lambda: treequest.ABMCTSA()]
)
def test_treequest_searches_over_branches(tiny_path: Path, make: object) -> None:
    with make_engine(tiny_path) as engine:
        with engine.branch(PROMPT) as root:
            # Two children that start apart from each other on a new path would both compute its last, partial block.
            root.next_token_logprobs(top=1)
            found = search(engine, root, make())
            assert len(found) == 12
            assert len({tuple(branch.token_ids) for branch, _ in found}) == 12
            assert any(len(branch) > len(root) + 8 for branch, _ in found), "some grew from others"
            # Each state's tokens went through the model once, and so did the prompt.
            assert engine.stats().computed_tokens == len(root) + 12 * 8
            for branch, _ in found:
                assert branch.completion.usage.computed_tokens in (1, len(root)), (
                    "all but the last were there"
                )
                branch.release()
        stats = engine.stats()
        assert stats.cache.locked == stats.cache.private - stats.kept_tails == 0
        engine.check()


def test_the_same_search_gives_the_same_states_warm_and_cold(tiny_path: Path) -> None:
    runs = []
    for cached in (True, True, False):
        with make_engine(tiny_path, prefix_cache=cached) as engine, engine.branch(PROMPT) as root:
            found = search(engine, root, treequest.StandardMCTS(samples_per_action=2))
            runs.append([(branch.token_ids, score) for branch, score in found])
            for branch, _ in found:
                branch.release()
    assert runs[0] == runs[1] == runs[2]
