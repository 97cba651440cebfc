"""The numbers that a tree of thoughts promises, and the README's ten lines, on the real model."""

import re
from pathlib import Path

import pytest
from search_trees import distinct_tokens, shape

from phloem.runtime import Engine, SamplingParams
from phloem.runtime.frontend.search import Node, Sample, ScoreValue, SearchTree, breadth_first

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = (ROOT / "examples" / "data" / "gsm8k" / "fewshot.txt").read_text(encoding="utf-8")
STEP = Sample(4, SamplingParams(max_tokens=24, temperature=1.0, logprobs=0))


def likely(node: Node) -> float:
    return node.mean_logprob


def grow(engine: Engine) -> SearchTree:
    """Depth 4, branch 4, keep 3."""
    with SearchTree(engine, EXAMPLES + "\n\n### Instruction:\nHow much is", seed=24) as tree:
        breadth_first(tree, STEP, likely, keep=3, depth=4)
    return tree


@pytest.mark.slow
@pytest.mark.model
def test_a_tree_of_thoughts_computes_distinct_tokens_only(smollm2_path: Path) -> None:
    with Engine(smollm2_path) as engine:
        tree = grow(engine)
        computed = engine.stats().computed_tokens
        engine.check()
    with Engine(smollm2_path, prefix_cache=False) as engine:
        cold = grow(engine)
        computed_cold = engine.stats().computed_tokens
    assert computed <= 1.05 * distinct_tokens(tree)
    assert computed_cold >= 5 * computed
    assert shape(cold) == shape(tree)


@pytest.mark.slow
@pytest.mark.model
def test_scores_add_the_tokens_that_they_read_and_no_more(smollm2_path: Path) -> None:
    suffix, verdicts = "\nIs this right so far? Answer:", {" yes": 1.0, " no": 0.0}
    with Engine(smollm2_path) as engine:
        with SearchTree(engine, EXAMPLES, seed=24) as tree:
            breadth_first(tree, STEP, ScoreValue(verdicts, suffix=suffix), keep=3, depth=3)
        computed = engine.stats().computed_tokens
        read = len(engine.tokenizer.encode(suffix, add_special_tokens=False))
        # Of each node: its last token, and the suffix. The verdicts are one token each, which is not computed.
        scored = (tree.ledger.nodes - 1) * (1 + read)
        assert computed <= 1.05 * distinct_tokens(tree) + scored


@pytest.mark.slow
@pytest.mark.model
def test_the_lines_in_the_readme_run(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    [block] = [block for block in blocks if "SearchTree" in block]
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {"Engine": Engine, "SamplingParams": SamplingParams})
    assert "cached_tokens=" in capsys.readouterr().out
    assert "<details" in (tmp_path / "tree.html").read_text(encoding="utf-8")
