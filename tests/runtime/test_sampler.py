"""The sampler alone: filters, draws that depend on (seed, position) only, and the distribution."""

import math
from collections import Counter

import pytest
import torch

from phloem.runtime import SamplingParams
from phloem.runtime.sampler import SamplingRow, sample


def draws(logits: torch.Tensor, params: SamplingParams, count: int, *, seed: int = 1) -> Counter[int]:
    rows = [SamplingRow(params, seed, 0, position) for position in range(count)]
    return Counter(sample(logits.repeat(count, 1), rows))


def test_greedy_takes_the_likeliest_and_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    assert sample(logits, [SamplingRow(SamplingParams(temperature=0), 0, 0, 0)]) == [1]


def test_draws_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    found = draws(probabilities.log(), SamplingParams(), 4000)
    for token, probability in enumerate(probabilities.tolist()):
        # four standard deviations of a binomial share
        assert abs(found[token] / 4000 - probability) < 4 * math.sqrt(probability * (1 - probability) / 4000)


def test_temperature_flattens_and_sharpens() -> None:
    logits = torch.tensor([1.0, 0.0])
    sharp = draws(logits, SamplingParams(temperature=0.2), 1000)[0]
    plain = draws(logits, SamplingParams(temperature=1.0), 1000)[0]
    flat = draws(logits, SamplingParams(temperature=5.0), 1000)[0]
    assert sharp > plain > flat


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-5])
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(temperature: float) -> None:
    assert draws(torch.tensor([3.0, 900.0, 899.0]), SamplingParams(temperature=temperature), 50) == {1: 50}


def test_top_k_keeps_k() -> None:
    assert set(draws(torch.arange(10.0) / 10, SamplingParams(top_k=3), 300)) == {7, 8, 9}
    assert set(draws(torch.zeros(3), SamplingParams(top_k=50), 300)) == {0, 1, 2}


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.5, {0}), (0.51, {0, 1}), (0.8, {0, 1}), (0.81, {0, 1, 2}), (1e-9, {0})]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    logits = torch.tensor([0.5, 0.25 + 0.05, 0.2, 0.0]).log()
    assert set(draws(logits, SamplingParams(top_p=top_p), 400)) == kept


def test_top_p_over_a_flat_large_vocabulary_needs_more_than_the_first_candidates() -> None:
    found = draws(torch.zeros(5000), SamplingParams(top_p=0.9), 3000)
    assert len(found) > 1500, "more than the 1,024 candidates that are sorted first"


def test_min_p_drops_what_is_far_less_likely_than_the_likeliest() -> None:
    logits = torch.tensor([0.6, 0.3, 0.07, 0.03]).log()
    assert set(draws(logits, SamplingParams(min_p=0.2), 400)) == {0, 1}


def test_filters_combine() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # top_k=3 leaves 4/9, 3/9, 2/9; top_p=0.7 of these is the first two.
    assert set(draws(logits, SamplingParams(top_k=3, top_p=0.7), 400)) == {0, 1}


def test_a_draw_does_not_depend_on_its_batch_mates() -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, 100)
    rows = [SamplingRow(SamplingParams(top_p=0.9), seed, 0, 5) for seed in range(8)]
    together = sample(logits.clone(), rows)
    alone = [sample(logits[i : i + 1].clone(), [rows[i]])[0] for i in range(8)]
    backwards = sample(logits.flip(0).clone(), rows[::-1])[::-1]
    assert together == alone == backwards


def test_seeds_and_positions_give_different_draws() -> None:
    logits = torch.zeros(1, 1000)
    by_seed = {sample(logits, [SamplingRow(SamplingParams(), seed, 0, 0)])[0] for seed in range(50)}
    by_position = {
        sample(logits, [SamplingRow(SamplingParams(), 0, 0, position)])[0] for position in range(50)
    }
    assert len(by_seed) > 40
    assert len(by_position) > 40


def test_banned_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[9.0, 1.0, 0.0]])
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature)
        assert 0 not in {sample(logits.clone(), [SamplingRow(params, s, 0, 0, (0,))])[0] for s in range(50)}


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(3, 50_000)
    logits[1, [49_999, 31, 77]] = 1.0
    logits[2, [49_999, 16_384]] = -1.0
    assert sample(logits, [SamplingRow(SamplingParams(temperature=0.0), 0, 0, position=0)] * 3) == [0, 31, 0]
