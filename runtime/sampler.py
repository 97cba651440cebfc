"""From logits to tokens.

Each row is handled alone, and its draw is a function of (seed, child, position): a request gives the same tokens in any company.
The counter-based generator is Philox (Salmon et al., 2011), as numpy implements it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from phloem.kernels.sampling import MIN_TEMPERATURE, Draws, draw_tokens
from phloem.runtime.grammar import Constraint
from phloem.runtime.sampling_params import SamplingParams

TOP_P_CANDIDATES = 1024
"""How many of the likeliest tokens are sorted before the whole vocabulary is: nearly always enough for top-p."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What one row of logits is sampled with."""

    params: SamplingParams
    seed: int
    child_index: int
    position: int
    """Of the token to be sampled, in its path."""

    banned_ids: tuple[int, ...] = ()
    """Tokens that may not be sampled: the end-of-sequence tokens before `min_tokens`."""

    tokens: Sequence[int] = ()
    """The path so far, for penalties."""

    num_prompt_tokens: int = 0
    """How many of `tokens` were given, not generated."""

    constraint: Constraint | None = None
    """The grammar that the next token must fit."""


def sample(logits: Tensor, rows: list[SamplingRow]) -> list[int]:
    """Choose one token per row.

    Args:
        logits: `[num_rows, vocab_size]`, float32, on any device. Rows with penalties, biases or banned tokens are changed in place.
        rows: One per row of `logits`.
    """
    if logits.device.type != "cpu":
        # One by one, each draw would make the host wait for the device a few times.
        together: list[int] = sample_on_device(logits, rows).tolist()
        return together
    for index, row in enumerate(rows):
        _adjust(logits[index], row)
    # the first of equals, as `argmax`, but in a quarter of its time
    tokens: list[int] = logits.max(dim=-1).indices.tolist()
    for index, row in enumerate(rows):
        if not row.params.is_greedy:
            tokens[index] = _draw(logits[index], row)
    return tokens


def sample_on_device(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Choose one token per row, all rows together, and leave the tokens where the logits are. See `sample`.

    The same draws; where neither `top_k` nor `top_p` cuts, they fall on tokens in another order than on the CPU.

    Returns:
        int64 `[num_rows]`.
    """
    for index, row in enumerate(rows):
        _adjust(logits[index], row)
    if all(row.params.is_greedy for row in rows):
        return logits.argmax(dim=-1)
    return draw_tokens(logits, _draws(rows, logits))


def _draws(rows: Sequence[SamplingRow], logits: Tensor) -> Draws:
    """The rows' parameters and numbers as arrays beside their logits."""
    vocab_size = logits.shape[1]

    def array(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    return Draws(
        uniforms=array([_uniform(row) for row in rows], torch.float64),
        temperatures=array([row.params.temperature for row in rows], torch.float32),
        top_ks=array([row.params.top_k or vocab_size for row in rows], torch.int64),
        top_ps=array([row.params.top_p for row in rows], torch.float32),
        min_ps=array([row.params.min_p for row in rows], torch.float32),
    )


def _adjust(logits: Tensor, row: SamplingRow) -> None:
    """Apply penalties, biases and bans to one row, in place."""
    params = row.params
    if params.has_penalties:
        _penalise(logits, row)
    if params.logit_bias:
        ids = list(params.logit_bias)
        logits[ids] += torch.tensor([params.logit_bias[i] for i in ids], device=logits.device)
    if row.constraint is not None:
        row.constraint.apply(logits)
    if row.banned_ids:
        _ban(logits, list(row.banned_ids))


def _ban(logits: Tensor, ids: list[int]) -> None:
    """Ban tokens, unless a grammar allows nothing else: a text that is complete must be able to end."""
    before = logits[ids]
    logits[ids] = -torch.inf
    if not torch.isfinite(logits).any():
        logits[ids] = before


def _penalise(logits: Tensor, row: SamplingRow) -> None:
    params = row.params
    path = np.asarray(row.tokens)
    seen = torch.from_numpy(np.unique(path)).long().to(logits.device)
    values = logits[seen]
    logits[seen] = torch.where(
        values > 0, values / params.repetition_penalty, values * params.repetition_penalty
    )
    generated, counts = np.unique(path[row.num_prompt_tokens :], return_counts=True)
    penalties = params.presence_penalty + params.frequency_penalty * counts
    places = torch.from_numpy(generated).long().to(logits.device)
    logits[places] -= torch.from_numpy(penalties).float().to(logits.device)


def _draw(logits: Tensor, row: SamplingRow) -> int:
    params = row.params
    # The maximum goes to zero first, so that no temperature, however small, overflows.
    scaled = (logits - logits.max()) / max(params.temperature, MIN_TEMPERATURE)
    candidates = None
    if params.top_k is not None and params.top_k < len(scaled):
        scaled, candidates = scaled.topk(params.top_k)
    probabilities = scaled.softmax(dim=-1)
    if params.top_p < 1.0:
        kept = _top_p(probabilities, params.top_p)
        candidates = kept if candidates is None else candidates[kept]
        probabilities = probabilities[kept]
    if params.min_p > 0.0:
        probabilities = probabilities.where(probabilities >= params.min_p * probabilities.max(), 0.0)
    cumulative = probabilities.double().cumsum(dim=-1)
    target = _uniform(row) * cumulative[-1]
    # `right`: the first entry above the target, so that a token of probability 0 is never drawn.
    chosen = int(torch.searchsorted(cumulative, target, right=True))
    if chosen == len(cumulative):  # the number times the sum was rounded to the sum
        chosen = int(probabilities.nonzero()[-1])
    return chosen if candidates is None else int(candidates[chosen])


def _top_p(probabilities: Tensor, top_p: float) -> Tensor:
    """Return the ids of the smallest set of likeliest tokens that sums to `top_p`, likeliest first."""
    size = min(TOP_P_CANDIDATES, len(probabilities))
    likeliest, ids = probabilities.topk(size)
    if float(likeliest.sum()) < top_p and size < len(probabilities):
        likeliest, ids = probabilities.sort(descending=True, stable=True)
    before = likeliest.cumsum(dim=-1) - likeliest
    return ids[: max(1, int((before < top_p).sum()))]


def _uniform(row: SamplingRow) -> float:
    """Return the number in [0, 1) that belongs to (seed, child, position)."""
    bits = np.random.Philox(key=[row.seed, row.child_index], counter=row.position)
    return float(np.random.Generator(bits).random())
