"""int8 weights: nearly the same numbers, warm as cold, and KV of their own."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from path_runner import PathRunner
from real_model import real_model_path
from tiny_model import make_tiny_model

from phloem.kernels.cpu import make_cpu_linear
from phloem.runtime import Engine, EngineConfig, InvalidRequest, SamplingParams
from phloem.runtime.models.config import read_model_config
from phloem.runtime.models.loading import load_model
from phloem.runtime.placement import place

needs_kernel = pytest.mark.skipif(make_cpu_linear() is None, reason="no compiler")
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@needs_kernel
def test_logits_are_close_and_the_weights_a_model_of_their_own(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path)
    exact = load_model(path, dtype=torch.float32)
    rounded = load_model(path, dtype=torch.float32, int8=True)
    wanted, given = (PathRunner(each).run(0, list(range(60))) for each in (exact, rounded))
    assert 0 < (given - wanted).norm() < 0.05 * wanted.norm()
    assert rounded.fingerprint == f"{exact.fingerprint}+int8"


@needs_kernel
def test_warm_equals_cold(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path)
    prompts = [list(range(k, k + 90)) for k in (0, 0, 40)]
    with Engine(path, quantization="int8", num_blocks=64) as engine:
        warm = [engine.generate([prompt], GREEDY)[0] for prompt in prompts]
        assert warm[1].usage.cached_tokens == 89
        engine.check()
    with Engine(path, quantization="int8", num_blocks=64, prefix_cache=False) as engine:
        cold = engine.generate(prompts, GREEDY)
    assert [each.token_ids for each in warm] == [each.token_ids for each in cold]


def test_where_it_cannot_be_had_the_engine_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny_model(tmp_path)
    monkeypatch.setenv("PHLOEM_CPU_KERNEL", "torch")
    with pytest.raises(InvalidRequest, match="quantization=int8 needs compiled linear layers") as caught:
        place(EngineConfig(quantization="int8"), read_model_config(path))
    assert caught.value.field == "quantization"
    with pytest.raises(ValueError, match="int8 weights need the compiled linear layers"):
        load_model(path, int8=True)
    with pytest.raises(InvalidRequest, match="quantization must be one of none, int8, not 'int4'"):
        EngineConfig(quantization="int4")


@needs_kernel
@pytest.mark.slow
def test_perplexity_of_a_shipped_text_stays_within_a_percent() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()

    def perplexity(quantization: str) -> float:
        with Engine(real_model_path(), dtype="bfloat16", quantization=quantization, num_blocks=128) as engine:
            token_ids = engine.tokenizer.encode(text)[:2000]
            scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
            [output] = engine.generate([token_ids], scored)
        known = [each.logprob for each in output.prompt_logprobs or () if each is not None]
        assert len(known) == 1999
        return math.exp(-sum(known) / len(known))

    assert perplexity("int8") == pytest.approx(perplexity("none"), rel=0.01)
