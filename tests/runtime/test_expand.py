"""Expansions that grow while they run, and scores of several branches, on a tiny random model."""

import gc

import pytest

from phloem.runtime import Engine, InvalidRequest, PromptTooLong, SamplingParams

SEEDED = SamplingParams(seed=11, max_tokens=8, ignore_eos=True)


def ids(count: int, *, start: int = 0) -> list[int]:
    return [(7 * n + start) % 250 for n in range(count)]


def test_more_can_be_added_while_children_are_under_way(tiny_engine: Engine) -> None:
    with tiny_engine.branch(ids(20)) as root, tiny_engine.expansion() as expansion:
        first = expansion.add(root, 2, SEEDED)
        kids, later = [], None
        for born in expansion:
            kids.append(born.branch)
            if later is None:
                later = expansion.add(born.branch, 3, SEEDED)
                assert later != first
            assert len(expansion) == 5 - len(kids)
        assert len(kids) == 5
        assert list(expansion) == [], "nothing is under way"
        expansion.add(root, 1, SEEDED)
        kids += [born.branch for born in expansion]
        for kid in kids:
            kid.release()


def test_a_child_added_alone_by_its_number_is_the_same_child(tiny_engine: Engine) -> None:
    with tiny_engine.branch(ids(20)) as root, tiny_engine.expansion() as expansion:
        together = root.expand(3, SEEDED)
        expansion.add(root, 1, SEEDED, first=2)
        [born] = expansion
        assert born.index == 2
        assert born.branch.token_ids == together[2].token_ids != together[0].token_ids
        for branch in (*together, born.branch):
            branch.release()


def test_leaving_an_expansion_aborts_and_releases_the_rest(tiny_engine: Engine) -> None:
    endless = SamplingParams(max_tokens=500, ignore_eos=True, temperature=0)
    root = tiny_engine.branch(ids(20))
    with tiny_engine.expansion() as expansion:
        expansion.add(root, 3, endless)
    lost = tiny_engine.expansion()
    lost.add(root, 3, endless)
    del lost
    gc.collect()
    root.release()
    assert tiny_engine.stats().running == tiny_engine.stats().waiting == 0


def test_bad_input_to_an_expansion_starts_nothing(tiny_engine: Engine) -> None:
    with tiny_engine.branch(ids(20)) as root, tiny_engine.expansion() as expansion:
        for n in (0, True, "2"):
            with pytest.raises(InvalidRequest, match="n must be"):
                expansion.add(root, n, SEEDED)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="first must be"):
            expansion.add(root, 1, SEEDED, first=-1)
        assert len(expansion) == 0


def test_scores_of_several_branches_equal_each_alone(tiny_engine: Engine) -> None:
    branches = [tiny_engine.branch(ids(20, start=n)) for n in range(3)]
    options = [" yes", " no"]
    together = type(branches[0]).scores_of(branches, options)
    for branch, scores in zip(branches, together, strict=True):
        again = branch.score(options)
        assert again == scores
        assert all(score.usage.cached_tokens >= 19 for score in again), (
            "all but the last token, whose logits are read"
        )
        branch.release()


def test_one_branch_too_long_to_score_stops_all(tiny_engine: Engine) -> None:
    short = tiny_engine.branch(ids(20))
    full = tiny_engine.branch(ids(tiny_engine.max_model_len - 1))
    with pytest.raises(PromptTooLong):
        type(short).scores_of([short, full], [" yes"])
    short.release()
    full.release()
