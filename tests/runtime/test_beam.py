"""Beam search over branches, against transformers' own."""

from pathlib import Path

import pytest
import torch

from phloem.runtime import Engine, InvalidRequest
from phloem.runtime.beam import beam_search


def ids(count: int, *, start: int = 0) -> list[int]:
    return [(7 * n + start) % 250 for n in range(count)]


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("start", [0, 3])
def test_it_finds_what_transformers_finds(
    tiny_path: Path, tiny_engine: Engine, width: int, length_penalty: float, start: int
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    prompt = torch.tensor([ids(20, start=start)])
    ends = list(range(200, 245))  # many, so that beams do end
    expected = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=10, num_beams=width, do_sample=False,
        length_penalty=length_penalty, eos_token_id=ends, pad_token_id=259, num_return_sequences=width,
        early_stopping=False,
    )  # fmt: skip
    with tiny_engine.branch(ids(20, start=start)) as root:
        found = beam_search(
            root, width=width, max_tokens=10, length_penalty=length_penalty, stop_token_ids=ends
        )
        assert root.token_ids == ids(20, start=start)
    best = expected[0, 20:].tolist()
    end = next((index + 1 for index, token in enumerate(best) if token in ends), len(best))
    assert found[0].token_ids == best[:end]
    assert [beam.score for beam in found] == sorted((beam.score for beam in found), reverse=True)


def test_it_leaves_nothing_behind_and_computes_no_prompt_twice(tiny_engine: Engine) -> None:
    with tiny_engine.branch(ids(60)) as root:
        beam_search(root, width=4, max_tokens=6)
    assert tiny_engine.stats().computed_tokens < 60 + 6 * 4 * 2
    assert tiny_engine.stats().cache.locked == 0


@pytest.mark.parametrize("options", [{"width": 0}, {"width": 10**9}, {"max_tokens": 0}, {"width": 1.5}])
def test_sizes_out_of_range_are_refused(tiny_engine: Engine, options: dict[str, int]) -> None:
    with tiny_engine.branch(ids(5)) as root, pytest.raises(InvalidRequest, match="whole number"):
        beam_search(root, **options)
