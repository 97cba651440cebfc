"""Values by scores and by votes, questions to the model, and drawings, on a tiny random model."""

import math
from html.parser import HTMLParser

import pytest
from search_trees import PROMPT, sample, shape, tokens_of

from phloem.runtime import Engine, InvalidRequest, SamplingParams
from phloem.runtime.frontend.search import (
    Node,
    Propose,
    ScoreValue,
    SearchTree,
    VoteValue,
    best_of_n,
    breadth_first,
    mcts,
)


def test_a_score_value_is_what_the_model_expects_and_reads_only_its_own_tokens(engine: Engine) -> None:
    value = ScoreValue({" yes": 1.0, " no": 0.0, " so-so": 0.5}, suffix="\nGood? ")
    with SearchTree(engine, PROMPT, seed=3) as tree:
        nodes = best_of_n(tree, sample(4), value)
        computed = engine.stats().computed_tokens
        # Of each node its last token and the suffix, once; of the verdicts the space they begin with, once, and of each all
        # tokens behind it but the last.
        assert computed == tokens_of(tree) - 1 + 4 * (1 + 7) + 4 * (1 + 2 + 1 + 4)
        assert tree.ledger.tokens == 32, "scores sample nothing"
        for node in nodes:
            with engine.branch(node.path_token_ids) as alone:
                scores = alone.append("\nGood? ").score(list(value.verdicts))
            odds = [math.exp(score.total) for score in scores]
            assert node.value == pytest.approx((odds[0] + 0.5 * odds[2]) / sum(odds))
        assert tree.usage.cached_tokens > 4 * 3 * 50


def test_a_score_value_can_ask_with_a_prompt_of_its_own(engine: Engine) -> None:
    value = ScoreValue({"good": 2.0, "bad": -1.0}, prompt=lambda node: f"Judge: {node.path_text}\nIt is ")
    with SearchTree(engine, PROMPT, seed=3) as tree:
        step = Propose(lambda nodes: [[" one", " two"] for _ in nodes])
        found = breadth_first(tree, step, value, keep=1, depth=2)
        with engine.branch(f"Judge: {found[0].path_text}\nIt is ") as alone:
            good, bad = (math.exp(score.total) for score in alone.score(["good", "bad"]))
        assert found[0].value == pytest.approx((2 * good - bad) / (good + bad))


def test_votes_are_shares_and_share_their_prompt(engine: Engine) -> None:
    shown: list[list[str]] = []

    def prompt(family: list[Node]) -> str:
        shown.append([node.name for node in family])
        return "Which? " + " / ".join(node.path_text for node in family) + " Answer:"

    def choice(text: str) -> int | None:
        number = sum(text.encode()) % 4
        return None if number == 3 else number

    value = VoteValue(prompt, choice, votes=6, params=SamplingParams(max_tokens=4, ignore_eos=True))
    trees = []
    for _ in range(2):
        shown.clear()
        with SearchTree(engine, PROMPT, seed=3) as tree:
            breadth_first(tree, sample(3), value, keep=2, depth=2)
            trees.append(shape(tree))
            families = [node.children for node in tree.nodes() if node.children]
            assert sorted(shown) == sorted([child.name for child in family] for family in families)
            for family in families:
                total = sum(child.value for child in family)
                assert total <= 1.0
                assert all(child.value * 6 == pytest.approx(round(child.value * 6)) for child in family)
            ballots = len(families) * 6 * 4
            assert tree.ledger.tokens == tokens_of(tree) - 47 + ballots, "votes count for the budget"
    assert trees[0] == trees[1]


def test_questions_get_the_same_answers_alone_and_together(engine: Engine) -> None:
    params = SamplingParams(max_tokens=6, n=2, ignore_eos=True)
    with SearchTree(engine, PROMPT, seed=3) as tree:
        together = tree.ask(["one?", "two?", "one?"], params)
        [alone] = tree.ask(["two?"], params)
        assert [done.text for done in together[1]] == [done.text for done in alone]
        assert [done.text for done in together[0]] == [done.text for done in together[2]]
        assert len({done.text for done in together[1]}) == 2
        assert tree.ask([], params) == []
        assert tree.usage.completion_tokens == tree.ledger.tokens == 8 * 6


def test_bad_values_are_refused() -> None:
    for call, field in (
        (lambda: ScoreValue({" yes": 1.0}), "verdicts"),
        (lambda: ScoreValue({"a": 1, "b": 0}, suffix="?", prompt=lambda node: "?"), "suffix"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            call()
        assert caught.value.field == field
    with pytest.raises(InvalidRequest, match="n must be"):
        VoteValue(lambda family: "?", lambda text: 0, votes=0)


class Outline(HTMLParser):
    """Notes which tags are open, and how deep they nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_drawings_show_every_node_and_escape_what_the_model_says(engine: Engine) -> None:
    nasty = ' "<script>alert(1)</script> | #quot; `x`] --> n0'
    with SearchTree(engine, PROMPT, seed=3) as tree:
        step = Propose(lambda nodes: [[nasty, " plain"] for _ in nodes], lambda node: node.depth == 2)
        breadth_first(tree, step, lambda node: float(node.index), keep=1, depth=2)
        page, chart = tree.to_html(), tree.to_mermaid()
    outline = Outline()
    outline.feed(page)
    assert outline.open == []
    assert "script" not in outline.count
    assert outline.count["details"] + outline.count["p"] == 5
    assert nasty.strip() in outline.text
    lines = chart.splitlines()
    assert lines[0] == "flowchart TD"
    labels = [line for line in lines if '["' in line]
    assert len(labels) == 5
    assert all(line.count('"') == 2 and "<" not in line and "`" not in line for line in labels)
    assert sum("-.->" in line for line in lines) == sum(node.is_pruned for node in tree.nodes()) == 1
    assert sum(":::done" in line for line in lines) == 2


def test_drawings_are_bounded_and_deep_trees_do_not_break_them(engine: Engine) -> None:
    with SearchTree(engine, PROMPT, seed=3) as tree:
        step = Propose(lambda nodes: [["a"] for _ in nodes])
        mcts(tree, step, lambda node: 0.5, expansions=1100, depth=1100)
        assert tree.ranked()[0].depth == 1100
        outline = Outline()
        outline.feed(tree.to_html())
        assert outline.open == []
        assert outline.count["details"] == 1100
        assert len(tree.to_mermaid(max_nodes=10).splitlines()) == 1 + 10 + 9 + 2
        assert "1 more" in tree.to_mermaid(max_nodes=10)
        tree.prune(tree.root)
