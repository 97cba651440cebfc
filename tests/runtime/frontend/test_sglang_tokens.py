"""SGLang's programs over a tokenizer that would cut the joined text in another way: what was scored or generated keeps its tokens."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from merging_model import SLASHES, make_merging_model
from sglang_programs import GREEDY, PhloemBackend, run, sgl

from phloem.runtime import Engine, SamplingParams

TEXT = "see http:"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with Engine(make_merging_model(tmp_path / "model"), dtype="float32", num_blocks=64) as engine:
        yield engine
        engine.check()


@pytest.mark.parametrize("options", [["//", "//x"], ["//abc", "//"], ["//"]])
def test_the_option_that_is_selected_keeps_the_tokens_that_were_scored(
    engine: Engine, options: list[str]
) -> None:
    def choose(s):
        s += TEXT
        s += sgl.select("choice", options)
        s += sgl.gen("next", **GREEDY)

    state = run(PhloemBackend(engine), choose)
    before = engine.tokenizer.encode(TEXT)
    own = [SLASHES, *state["choice"][2:].encode()]
    meta = state.get_meta_info("next")
    assert engine.tokenizer.encode(TEXT + state["choice"]) != before + own, "the text as a whole has others"
    assert meta["prompt_tokens"] == len(before) + len(own)
    # A score computes all but its last token.
    assert meta["cached_tokens"] == meta["prompt_tokens"] - 1
    engine.clear_cache()
    [alone] = engine.generate([before + own], SamplingParams(**GREEDY))
    assert state["next"] == alone.text
    assert state.text() == TEXT + state["choice"] + alone.text
