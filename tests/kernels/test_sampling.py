"""Draws for a batch: the distribution that was asked for, the same token in any company."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phloem.kernels.sampling import Draws, draw_tokens

VOCABULARY = 50


def draws(
    uniforms: list[float],
    *,
    temperature: float = 1.0,
    top_k: int = VOCABULARY,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Draws:
    rows = len(uniforms)
    return Draws(
        uniforms=torch.tensor(uniforms, dtype=torch.float64),
        temperatures=torch.full((rows,), temperature),
        top_ks=torch.full((rows,), top_k),
        top_ps=torch.full((rows,), top_p),
        min_ps=torch.full((rows,), min_p),
    )


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn((rows, VOCABULARY), generator=torch.Generator().manual_seed(seed))


def shares(row: torch.Tensor, **how: float) -> torch.Tensor:
    """How often each token comes up over an even grid of numbers."""
    grid = 20_000
    uniforms = [(i + 0.5) / grid for i in range(grid)]
    tokens = draw_tokens(row.expand(grid, -1), draws(uniforms, **how))  # type: ignore[arg-type]
    return torch.bincount(tokens, minlength=VOCABULARY) / grid


def wanted(
    row: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = VOCABULARY,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> torch.Tensor:
    """The definition, token by token."""
    probabilities = (row.double() / temperature).softmax(-1)
    order = sorted(range(VOCABULARY), key=lambda token: -float(probabilities[token]))[:top_k]
    total = sum(float(probabilities[token]) for token in order)
    kept, reached = [], 0.0
    for token in order:
        share = float(probabilities[token]) / total
        if (not kept or reached < top_p) and share >= min_p * float(probabilities[order[0]]) / total:
            kept.append(token)
        reached += share
    mask = torch.zeros(VOCABULARY, dtype=torch.bool)
    mask[kept] = True
    left = probabilities * mask
    return left / left.sum()


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_k": 1},
        {"top_p": 0.6},
        {"top_p": 0.0},
        {"min_p": 0.3},
        {"top_k": 10, "top_p": 0.8, "min_p": 0.05, "temperature": 1.7},
    ],
)
def test_tokens_come_up_as_often_as_asked(how: dict[str, float]) -> None:
    row = logits(1)[0]
    found = shares(row, **how)
    right = wanted(row, **how)  # type: ignore[arg-type]
    assert (found.double() - right).abs().max() < 2e-4
    assert set(found.nonzero().flatten().tolist()) <= set(right.nonzero().flatten().tolist())


def test_zero_temperature_takes_the_first_of_the_likeliest() -> None:
    table = torch.zeros(2, VOCABULARY)
    table[0, [7, 9]] = 1.0
    assert draw_tokens(table, draws([0.99, 0.5], temperature=0.0)).tolist() == [7, 0]
    assert draw_tokens(table[:1], draws([0.99], temperature=1e-30)).tolist() == [9]


def test_banned_tokens_are_never_drawn() -> None:
    row = torch.full((3, VOCABULARY), -torch.inf)
    row[:, [4, 30]] = torch.tensor([1.0, 2.0])
    tokens = draw_tokens(row, draws([0.0, 0.8, 1 - 2**-53]))
    assert tokens.tolist() == [30, 4, 4]


@settings(deadline=None)
@given(
    st.integers(0, 99), st.lists(st.floats(0, 1, exclude_max=True), min_size=2, max_size=6), st.floats(0, 1)
)
def test_company_changes_no_token(seed: int, uniforms: list[float], top_p: float) -> None:
    table = logits(len(uniforms), seed)
    together = draw_tokens(table, draws(uniforms, top_p=top_p)).tolist()
    alone = [
        int(draw_tokens(table[row : row + 1], draws([number], top_p=top_p)))
        for row, number in enumerate(uniforms)
    ]
    assert together == alone
